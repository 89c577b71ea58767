"""Adam without the bias that private noise gives its second moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from privagrad._internal import validate
from privagrad.torch.wrapped import NoiseAware


class AdamBC(NoiseAware):
    """DP-AdamBC (Tang, Shpilevskiy, Lécuyer 2024), with the private gradients ĝ of any ellipsoid.

    Adam's second moment of ĝ = g + noise is that of g plus the variance Φ of the noise, which is
    public and mostly much larger: plain Adam divides every coordinate by about the same number.
    This one subtracts Φ first:

        m ← β₁ m + (1-β₁) ĝ,    v ← β₂ v + (1-β₂) ĝ²,    f ← β₂ f + (1-β₂) Φ
        x ← x - lr · m̂ / sqrt(max(v̂ - f̂, floor · f̂, ε²)),    m̂ = m/(1-β₁ᵗ), and so on.

    f is Φ where the noise is constant, and follows schedules of the noise. It costs no privacy.
    Useful where gradients are visible through the noise: large batches or little noise. Where they
    are not, it takes up to 1/sqrt(floor) times Adam's steps on pure noise.

    Parameters
    ----------
    params : iterable
        As of any torch optimizer.
    lr : float
    betas : tuple of float
        β₁, β₂.
    floor : float
        The least squared denominator as a part of the noise's variance (γ' of the paper is the
        least squared denominator itself).
    eps : float
        ε, for training without noise.
    """

    elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 0.1,
        eps: float = 1e-8,
    ) -> None:
        validate.positive("lr", lr)
        validate.positive("floor", floor)
        validate.positive("eps", eps)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Expected betas in [0, 1), found {betas!r}.")
        super().__init__(params, {"lr": lr, "betas": betas, "floor": floor, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (first, second), floor, eps = group["betas"], group["floor"], group["eps"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                own, gradient = self.state[parameter], parameter.grad
                noise = self.noise_variance(parameter)
                if not own:
                    own["step"] = 0
                    for name in ("mean", "square", "noise"):
                        own[name] = torch.zeros_like(parameter)
                own["step"] += 1
                own["mean"].lerp_(gradient, 1 - first)
                own["square"].lerp_(gradient.square(), 1 - second)
                own["noise"].lerp_(noise, 1 - second)
                seen = 1 - second ** own["step"]
                noise = own["noise"] / seen
                visible = own["square"] / seen - noise
                size = torch.maximum(visible, floor * noise).clamp_(min=eps**2).sqrt_()
                step = group["lr"] / (1 - first ** own["step"])
                parameter.addcdiv_(own["mean"], size, value=-step)
        return loss
