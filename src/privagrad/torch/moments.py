"""Second moments of per-example gradients from public data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privagrad._internal import validate
from privagrad._internal.progress import track
from privagrad.torch.module import PrivateModule
from privagrad.torch.per_example.gradients import PerExampleGradient
from privagrad.torch.per_example.tape import Tape
from privagrad.torch.scales import as_matrix

Per = Literal["coordinate", "row", "tensor"]


class SecondMoments:
    """Running means of g² over examples, of every parameter.

    Parameters
    ----------
    parameters : mapping of str to Parameter
    floor : float
        Added to every moment, as a part of the tensor's mean moment: coordinates that public data
        hardly touch, such as rare words, would otherwise dominate the norm.
    per : {"coordinate", "row", "tensor"}
        What has a moment of its own.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], floor: float = 0.1, per: Per = "coordinate"
    ) -> None:
        validate.choice("per", per, ("coordinate", "row", "tensor"))
        self.floor, self.per = validate.positive("floor", floor), per
        self.count = 0
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self._sums: dict[str, Tensor] = {}
        for name, p in parameters.items():
            rows, columns = as_matrix(p).shape
            kept = (rows, columns if per == "coordinate" else 1)
            self._sums[name] = torch.zeros(kept, dtype=torch.float64, device=p.device)

    @torch.no_grad()
    def add(
        self, count: int, gradients: Mapping[str, list[PerExampleGradient]], factor: float
    ) -> None:
        """Take in `count` examples, whose gradients are `factor` times `gradients`."""
        self.count += count
        for name, parts in gradients.items():
            for own in parts:
                if self.per == "coordinate":
                    squares = own.sum_of_squares()
                else:
                    squares = own.row_sums_of_squares()[:, None]
                self._sums[name][own.part] += factor**2 * squares.double()

    def means(self) -> dict[str, Tensor]:
        """E[g²] of every parameter, in its shape, positive."""
        if self.count == 0:
            raise ValueError("Expected public examples, found none in public_loader.")
        means = {
            name: total * (total.numel() / (self._shapes[name].numel() * self.count))
            for name, total in self._sums.items()
        }
        largest = max(float(mean.mean()) for mean in means.values())
        if not (largest > 0 and math.isfinite(largest)):
            raise ValueError(
                f"Expected public gradients with finite moments above 0, found {largest:g}: check "
                "the public data and the loss."
            )
        return {name: self._shaped(name, mean, largest) for name, mean in means.items()}

    def _shaped(self, name: str, mean: Tensor, largest: float) -> Tensor:
        typical = float(mean.mean())
        if self.per == "tensor":
            mean = mean.mean().expand_as(mean)
        floored = mean + self.floor * max(typical, 1e-12 * largest)
        shape = self._shapes[name]
        return floored.expand(len(mean), shape.numel() // len(mean)).reshape(shape)


def shaped_scales(moments: Mapping[str, Tensor], power: float) -> dict[str, Tensor]:
    """C = σ^power, times the factor that keeps the gradients' mean squared norm as it was.

    So max_grad_norm means in the ellipsoid what it means in a ball.
    """
    scales = {name: moment.double() ** (power / 2) for name, moment in moments.items()}
    before = sum(float(moment.sum()) for moment in moments.values())
    after = sum(float((scales[name] * moment).sum()) for name, moment in moments.items())
    return {name: (scale * (before / after)).float() for name, scale in scales.items()}


def second_moments(
    module: nn.Module,
    loader: Iterable[Any],
    criterion: Callable[[Any, Any], Tensor] | None = None,
    *,
    loss_reduction: str = "mean",
    batch_first: bool = True,
    floor: float = 0.1,
    per: Per = "coordinate",
) -> dict[str, Tensor]:
    """E[g²] of `module`'s per-example gradients over PUBLIC batches (inputs, targets).

    Parameters
    ----------
    module : Module
    loader : iterable
        Public batches (inputs, targets).
    criterion : callable, optional
        The loss of (outputs, targets). None: cross-entropy for whole-number targets, squared error
        for others, and the output itself where it is a single number.
    loss_reduction : {"mean", "sum"}
        How the criterion puts the losses of examples together.
    batch_first : bool
        Whether the examples are in the first dimension of the inputs.
    floor, per : float, {"coordinate", "row", "tensor"}
        See `SecondMoments`.

    Returns
    -------
    dict of str to Tensor
    """
    twin = copy.deepcopy(module)
    parameters = {name: p for name, p in twin.named_parameters() if p.requires_grad}
    tape = Tape(parameters, batch_first)
    # What is public needs no guard.
    private = PrivateModule(twin, tape, verify=False).train()
    moments = SecondMoments(parameters, floor, per)
    total = len(loader) if isinstance(loader, Sized) else 0
    for batch in track(loader, total, "public moments"):
        loss_of(private, batch, criterion).backward()
        count, gradients = tape.collect()
        moments.add(count, gradients, float(count) if loss_reduction == "mean" else 1.0)
    return moments.means()


def loss_of(
    module: nn.Module, batch: Any, criterion: Callable[[Any, Any], Tensor] | None
) -> Tensor:
    """The loss of a batch (inputs, targets)."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise TypeError(
            f"Expected public_loader to give batches (inputs, ..., targets), found "
            f"{type(batch).__name__}."
        )
    *inputs, targets = batch
    if criterion is not None:
        return criterion(module(*inputs), targets)
    outputs = module(*inputs)
    if isinstance(outputs, (tuple, list)):
        outputs = outputs[0]
    if outputs.numel() == 1:
        return outputs.reshape(())
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets.reshape(outputs.shape))
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))
