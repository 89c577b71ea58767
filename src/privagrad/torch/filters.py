"""Filters of the private gradients over time, before the step of any optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from privagrad._internal import validate
from privagrad.torch.optimizer import PrivateOptimizer
from privagrad.torch.wrapped import NoiseAware, WrappedOptimizer


class GradientFilter(WrappedOptimizer):
    """`optimizer`, with each parameter's gradients filtered over time.

    A filter only follows what has been released: it costs no privacy.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, NoiseAware):
            raise TypeError(
                "Expected an optimizer that does not use the variance of the noise, found "
                f"{type(optimizer).__name__}: a filter changes that variance. Use one of the two."
            )
        if isinstance(optimizer, PrivateOptimizer):
            raise TypeError(
                "Expected an optimizer that is not private yet, found a private one, whose "
                "gradients are only there within its step(): filter first, then call make_private."
            )
        super().__init__(optimizer)
        self._kept: dict[nn.Parameter, dict[str, Any]] = {}

    @property
    def own_states(self) -> list[dict[Any, Any]]:
        return [self._kept]

    @abstractmethod
    def filtered(self, parameter: nn.Parameter, gradient: Tensor, kept: dict[str, Any]) -> Tensor:
        """What the optimizer has in place of the gradient; `kept` is empty at first."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self._parameters():
            if parameter.grad is not None:
                kept = self._kept.setdefault(parameter, {})
                parameter.grad = self.filtered(parameter, parameter.grad, kept)
        self.original_optimizer.step()
        return loss

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def state_dict(self) -> dict[str, Any]:
        kept = [self._kept.get(parameter, {}) for parameter in self._parameters()]
        return {"optimizer": self.original_optimizer.state_dict(), "filter": kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.original_optimizer.load_state_dict(state_dict["optimizer"])
        pairs = zip(self._parameters(), state_dict["filter"], strict=True)
        self._kept = {parameter: dict(kept) for parameter, kept in pairs if kept}


class LowPassFilter(GradientFilter):
    """The low-pass filter of DOPPLER (Zhang et al. 2024) before the step of any optimizer.

    ĝ are the private gradients of any ellipsoid, c is what becomes of the constant gradient 1:

        m_t = Σ_r a_r m_{t-r} + Σ_r b_r ĝ_{t-r},    c_t = Σ_r a_r c_{t-r} + Σ_r b_r,

    and the optimizer's gradient is m_t / c_t. Noise is independent from step to step, gradients
    change slowly. Useful with many steps and much noise; with momentum, which is such a filter
    already, hardly.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Before `make_private`.
    feedback : sequence of float
        a_1, a_2, ...
    feedforward : sequence of float
        b_0, b_1, ...
    """

    elementwise = True

    def __init__(
        self,
        optimizer: Optimizer,
        feedback: Sequence[float] = (0.9,),
        feedforward: Sequence[float] = (0.05, 0.05),
    ) -> None:
        super().__init__(optimizer)
        self.feedback, self.feedforward = (
            tuple(map(float, feedback)),
            tuple(map(float, feedforward)),
        )
        poles = np.abs(np.roots([1.0, *(-a for a in self.feedback)]))
        if (poles.size and not poles.max() < 1) or not min(self._of_ones(100)) > 0:
            raise ValueError(
                "Expected a stable filter (all roots of 1 - Σ a_r x^-r within the unit circle) "
                f"that turns ones into positive numbers, found feedback={feedback!r} and "
                f"feedforward={feedforward!r}."
            )

    def _of_ones(self, steps: int) -> list[float]:
        """c_1, c_2, ..."""
        found: list[float] = []
        for step in range(steps):
            past = zip(self.feedback, reversed(found), strict=False)
            found.append(sum(self.feedforward[: step + 1]) + sum(a * c for a, c in past))
        return found

    def filtered(self, parameter: nn.Parameter, gradient: Tensor, kept: dict[str, Any]) -> Tensor:
        inputs = [gradient.clone(), *kept.get("inputs", [])][: len(self.feedforward)]
        past, units = kept.get("outputs", []), kept.get("units", [])
        output, unit = torch.zeros_like(gradient), 0.0
        for weight, value in zip(self.feedforward, inputs, strict=False):
            output.add_(value, alpha=weight)
            unit += weight
        for weight, value, of_unit in zip(self.feedback, past, units, strict=False):
            output.add_(value, alpha=weight)
            unit += weight * of_unit
        kept["inputs"] = inputs
        kept["outputs"] = [output, *past][: len(self.feedback)]
        kept["units"] = [unit, *units][: len(self.feedback)]
        return output / unit


class KalmanFilter(GradientFilter, NoiseAware):
    """The Kalman filter of each coordinate's gradient, with the noise's own variance.

    The gradient is taken to be a random walk whose steps have the variance `drift` · Φ, seen
    through the noise of variance Φ of the private gradient ĝ, in the shape of any ellipsoid:

        P ← P + drift · Φ,    K = P/(P + Φ),    m ← m + K (ĝ - m),    P ← (1 - K) P,

    with P = ∞ at first, and the optimizer's gradient is m. With constant noise K soon becomes
    constant: a low-pass filter. Where the noise follows a schedule, gradients with less noise
    count for more, which `LowPassFilter` does not know. The idea of a Kalman filter of private
    gradients is that of DiSK (Zhang et al. 2024), which needs gradients at two points a step.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Before `make_private`.
    drift : float
        How far the gradient moves in one step, as a part of the noise's variance.
    """

    elementwise = True

    def __init__(self, optimizer: Optimizer, drift: float = 0.01) -> None:
        GradientFilter.__init__(self, optimizer)
        self.drift = validate.positive("drift", drift)

    def filtered(self, parameter: nn.Parameter, gradient: Tensor, kept: dict[str, Any]) -> Tensor:
        noise = self.noise_variance(parameter)
        if not kept or not bool((noise > 0).all()):
            # Without noise the gradient is what is seen.
            kept["mean"], kept["variance"] = gradient.clone(), noise.clone()
            return gradient
        ahead = kept["variance"] + self.drift * noise
        gain = ahead / (ahead + noise)
        kept["mean"] = torch.lerp(kept["mean"], gradient, gain)
        kept["variance"] = (1 - gain) * ahead
        return kept["mean"].clone()
