"""The ellipsoid that a training starts with, and what learns another during training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from privagrad._internal import validate
from privagrad.geometry.scales import (
    SCALE_POWERS,
    SQUARE_MEMORY,
    WIDTH_FLOOR,
    GradientHistory,
    visible_size,
)
from privagrad.torch.moments import shaped_scales
from privagrad.torch.processes import Processes
from privagrad.torch.scales import Scale, as_matrix, given_scales

EllipsoidChoice = str | Sequence[Tensor] | Mapping[str, Tensor] | None

FOLLOWING = "scale-then-privatize"
"""The name of `FollowingEllipsoid`."""


class EllipsoidRule(Protocol):
    """Chooses the next ellipsoid from the private gradients of the steps so far."""

    def learn(
        self,
        parameters: Mapping[str, nn.Parameter],
        scales: Mapping[str, Scale],
        noise_std: float,
        examples: float,
    ) -> dict[str, Scale] | None:
        """Take in the private gradients of a step; the new scales, or None to keep the old ones.

        Parameters have the private gradient as `grad`; `noise_std` is its noise at a coordinate of
        scale 1, `examples` the variance of one example's gradient over that of `grad`.
        """

    def state_dict(self) -> dict[str, Any]:
        """What the next ellipsoids depend on, for checkpoints; it follows from releases alone."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; from an empty one, as at the beginning."""


class LearnedEllipsoid:
    """C = σ^power from the variance of private gradients: see `GradientHistory`, `SCALE_POWERS`.

    C keeps the gradients' mean squared norm, so that max_grad_norm means what it means for a ball.
    """

    def __init__(self, power: float) -> None:
        self.power = power
        self._histories: dict[str, GradientHistory[Tensor]] = {}

    def learn(
        self,
        parameters: Mapping[str, nn.Parameter],
        scales: Mapping[str, Scale],
        noise_std: float,
        examples: float,
    ) -> dict[str, Scale] | None:
        """The new scales where an estimate is due: see `EllipsoidRule`."""
        due = False
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            gradient = as_matrix(parameter.grad).to(torch.float64, copy=True)
            noise = noise_std**2 / scales[name].full
            own = self._histories.setdefault(name, GradientHistory())
            due = own.add(gradient, noise.double())
        return self._scales(parameters, examples) if due else None

    def _scales(self, parameters: Mapping[str, nn.Parameter], examples: float) -> dict[str, Scale]:
        powers: dict[str, Tensor] = {}
        total = weighted_total = hidden_squares = weighted_hidden_squares = 0.0
        for name, own in self._histories.items():
            variance, hidden = own.variance(), own.hidden()
            scale = (examples * torch.maximum(variance, hidden)) ** (self.power / 2)
            total += examples * float(variance.sum())
            hidden_squares += float((examples * hidden).square().sum())
            weighted_total += examples * float((scale * variance).sum())
            weighted_hidden_squares += float((examples * scale * hidden).square().sum())
            powers[name] = scale
        before = visible_size(total, hidden_squares)
        after = visible_size(weighted_total, weighted_hidden_squares)
        return {
            name: _positive(scale * (before / after), parameters[name])
            for name, scale in powers.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Nothing: after a checkpoint it learns from the steps that follow."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._histories.clear()


class FollowingEllipsoid:
    """C = 1/w², where the widths w are √v of Adam, of the private gradients ĝ of earlier steps.

        v ← β₂ v + (1-β₂) ĝ²,    w = √(v + β₂ᵗ v₀) + floor · rms,    Σ w² = number of coordinates

    Scale-then-privatize (Ganesh, McMahan, Thakurta 2025): see `privagrad.methods` for what was
    chosen. v₀ is the variance of the first step's noise. The noise has the total variance of the
    ball's of the same max_grad_norm. For `torch.optim.Adam` with betas=(0.9, β₂).

    Parameters
    ----------
    square_memory : float
        β₂.
    floor : float
        Added to √v, as a part of its root mean square over all coordinates.

    Guarantees
    ----------
    C depends on released gradients and on the variance of their noise alone, so it costs no
    privacy.
    """

    def __init__(self, square_memory: float = SQUARE_MEMORY, floor: float = WIDTH_FLOOR) -> None:
        self.square_memory, self.floor = square_memory, floor
        self._squares: dict[str, Tensor] = {}
        self._left = 1.0  # β₂ᵗ
        self._start: dict[str, Tensor] = {}

    def learn(
        self,
        parameters: Mapping[str, nn.Parameter],
        scales: Mapping[str, Scale],
        noise_std: float,
        examples: float,
    ) -> dict[str, Scale] | None:
        """The scales of the next step: see `EllipsoidRule`."""
        self._left *= self.square_memory
        moments: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            squares = as_matrix(parameter.grad).double().square()
            if name not in self._squares:
                self._squares[name] = torch.zeros_like(squares)
                self._start[name] = noise_std**2 / scales[name].full.double()
            self._squares[name].lerp_(squares, 1 - self.square_memory)
            moments[name] = self._squares[name] + self._left * self._start[name]
        widths = {name: moment.sqrt() for name, moment in moments.items()}
        typical = _root_mean_square(widths)
        if not 0 < typical < math.inf:
            return None
        widths = {name: width / typical + self.floor for name, width in widths.items()}
        size = _root_mean_square(widths)
        return {
            name: _positive((width / size).pow(-2.0), parameters[name])
            for name, width in widths.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return {"squares": self._squares, "start": self._start, "left": self._left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._squares = {name: t.clone() for name, t in state.get("squares", {}).items()}
        self._start = {name: t.clone() for name, t in state.get("start", {}).items()}
        self._left = float(state.get("left", 1.0))


def _positive(values: Tensor, parameter: nn.Parameter) -> Scale:
    """The scale in the parameter's own type, in which it is neither 0 nor infinite."""
    limits = torch.finfo(parameter.dtype)
    return Scale.of(values.clamp(limits.tiny, limits.max).to(parameter.dtype))


def _root_mean_square(tensors: Mapping[str, Tensor]) -> float:
    """Over all entries of all tensors."""
    total = sum(float(tensor.square().sum()) for tensor in tensors.values())
    return math.sqrt(total / sum(tensor.numel() for tensor in tensors.values()))


@dataclass(frozen=True)
class TrainingEllipsoid:
    """The scales to start with; `learned` replaces them during training, if it is not None."""

    scales: dict[str, Scale]
    learned: EllipsoidRule | None = None

    @property
    def shapes(self) -> dict[str, tuple[bool, bool]]:
        """For each tensor, whether its scale has every entry; and whether it is learned."""
        learns = self.learned is not None
        return {name: (scale.entries is not None, learns) for name, scale in self.scales.items()}

    def agree(self, processes: Processes) -> None:
        """Take the first process's scales, in place."""
        for scale in self.scales.values():
            for tensor in (scale.rows, scale.columns, scale.entries):
                if tensor is not None:
                    processes.agree(tensor)


def choose_ellipsoid(
    choice: EllipsoidChoice,
    parameters: dict[str, nn.Parameter],
    public_loader: Iterable[Any] | None,
    moments_of: Callable[[Iterable[Any]], dict[str, Tensor]],
) -> TrainingEllipsoid:
    """The ellipsoid that `make_private` was asked for with `ellipsoid=choice`.

    `moments_of` is E[g²] of the per-example gradients of public batches.
    """
    ball = {name: Scale.ball(parameter) for name, parameter in parameters.items()}
    if choice is None:
        if public_loader is not None:
            raise ValueError(
                "Expected ellipsoid='pagan' or 'pasan' with a public_loader, found ellipsoid=None."
            )
        return TrainingEllipsoid(ball)
    if not isinstance(choice, str):
        return TrainingEllipsoid(given_scales(choice, parameters))
    if validate.choice("ellipsoid", choice, (*SCALE_POWERS, FOLLOWING)) == FOLLOWING:
        if public_loader is not None:
            raise ValueError(
                f"Expected no public_loader with ellipsoid={FOLLOWING!r}, found one: this "
                "ellipsoid follows the private gradients alone. Leave public_loader out."
            )
        return TrainingEllipsoid(ball, FollowingEllipsoid())
    power = SCALE_POWERS[choice]
    if public_loader is None:
        return TrainingEllipsoid(ball, LearnedEllipsoid(power))
    scales = shaped_scales(moments_of(public_loader), power)
    return TrainingEllipsoid(given_scales(scales, parameters))
