"""The ellipsoid that a training starts with, and what learns another during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from privagrad._internal import validate
from privagrad.geometry.scales import SCALE_POWERS
from privagrad.torch.history import LearnedEllipsoid
from privagrad.torch.moments import Per, second_moments, shaped_scales
from privagrad.torch.processes import Processes
from privagrad.torch.scales import Scale, given_scales

EllipsoidChoice = str | Sequence[Tensor] | Mapping[str, Tensor] | None


@dataclass(frozen=True)
class PublicData:
    """Public batches, and how second moments are taken from them: see `second_moments`."""

    loader: Iterable[Any] | None
    criterion: Callable[[Any, Any], Tensor] | None
    loss_reduction: str
    batch_first: bool
    floor: float
    per: Per

    def moments(self, module: nn.Module) -> dict[str, Tensor]:
        """E[g²] of the module's per-example gradients over the public batches."""
        assert self.loader is not None
        return second_moments(
            module, self.loader, self.criterion,
            loss_reduction=self.loss_reduction, batch_first=self.batch_first,
            floor=self.floor, per=self.per,
        )  # fmt: skip


@dataclass(frozen=True)
class TrainingEllipsoid:
    """The scales to start with; `learned` replaces them during training, if it is not None."""

    scales: dict[str, Scale]
    learned: LearnedEllipsoid | None = None

    def agree(self, processes: Processes) -> None:
        """Take the first process's scales, in place."""
        for scale in self.scales.values():
            for tensor in (scale.rows, scale.columns, scale.entries):
                if tensor is not None:
                    processes.agree(tensor)


def choose_ellipsoid(
    choice: EllipsoidChoice,
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    public: PublicData,
) -> TrainingEllipsoid:
    """The ellipsoid that `make_private` was asked for with `ellipsoid=choice`."""
    ball = {name: Scale.ball(parameter) for name, parameter in parameters.items()}
    if choice is None:
        if public.loader is not None:
            raise ValueError(
                "Expected ellipsoid='pagan' or 'pasan' with a public_loader, found ellipsoid=None."
            )
        return TrainingEllipsoid(ball)
    if not isinstance(choice, str):
        return TrainingEllipsoid(given_scales(choice, parameters))
    power = SCALE_POWERS[validate.choice("ellipsoid", choice, SCALE_POWERS)]
    if public.loader is None:
        return TrainingEllipsoid(ball, LearnedEllipsoid(power))
    scales = shaped_scales(public.moments(module), power)
    return TrainingEllipsoid(given_scales(scales, parameters))
