"""Which ellipsoid a training begins with, and what learns a better one on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from privagrad._internal import validate
from privagrad.torch.moments import POWERS, History, Per, second_moments, shaped_scales
from privagrad.torch.processes import Processes
from privagrad.torch.scales import Scale, given_scales

Shape = str | Sequence[Tensor] | Mapping[str, Tensor] | None


def choose_scales(
    ellipsoid: Shape,
    module: nn.Module,
    parameters: dict[str, nn.Parameter],
    public_loader: Iterable[Any] | None,
    criterion: Callable[[Any, Any], Tensor] | None,
    loss_reduction: str,
    batch_first: bool,
    per: Per,
    floor: float,
) -> tuple[dict[str, Scale], History | None]:
    """The scales to begin with, and what learns better ones on the way."""
    ball = {name: Scale.ball(parameter) for name, parameter in parameters.items()}
    if ellipsoid is None:
        if public_loader is not None:
            raise ValueError(
                "Expected ellipsoid='pagan' or 'pasan' with a public_loader, found ellipsoid=None."
            )
        return ball, None
    if not isinstance(ellipsoid, str):
        return given_scales(ellipsoid, parameters), None
    power = POWERS[validate.choice("ellipsoid", ellipsoid, POWERS)]
    if public_loader is None:
        return ball, History(power)
    moments = second_moments(
        module, public_loader, criterion,
        loss_reduction=loss_reduction, batch_first=batch_first, floor=floor, per=per,
    )  # fmt: skip
    return given_scales(shaped_scales(moments, power), parameters), None


def agree_on(scales: dict[str, Scale], processes: Processes) -> None:
    """The first process's ellipsoid everywhere."""
    for scale in scales.values():
        for tensor in (scale.rows, scale.columns, scale.entries):
            if tensor is not None:
                processes.agree(tensor)
