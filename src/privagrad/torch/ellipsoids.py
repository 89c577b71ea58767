"""The ellipsoid that a training starts with, and what learns another during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from privagrad._internal import validate
from privagrad.geometry.scales import SCALE_POWERS, GradientHistory, visible_size
from privagrad.torch.moments import shaped_scales
from privagrad.torch.processes import Processes
from privagrad.torch.scales import Scale, as_matrix, given_scales

EllipsoidChoice = str | Sequence[Tensor] | Mapping[str, Tensor] | None


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
        """Take in the private gradients of a step; the new scales where an estimate is due.

        Parameters have the private gradient as `grad`; `noise_std` is its noise at a coordinate of
        scale 1, `examples` the variance of one example's gradient over that of `grad`.
        """
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
            name: Scale.of((scale * (before / after)).to(parameters[name].dtype))
            for name, scale in powers.items()
        }


@dataclass(frozen=True)
class TrainingEllipsoid:
    """The scales to start with; `learned` replaces them during training, if it is not None."""

    scales: dict[str, Scale]
    learned: LearnedEllipsoid | None = None

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
    power = SCALE_POWERS[validate.choice("ellipsoid", choice, SCALE_POWERS)]
    if public_loader is None:
        return TrainingEllipsoid(ball, LearnedEllipsoid(power))
    scales = shaped_scales(moments_of(public_loader), power)
    return TrainingEllipsoid(given_scales(scales, parameters))
