"""PyTorch's mean losses as means over examples.

PyTorch's mean divides by how many tokens of the whole batch count, or by their weights, so that an
example's padding (or class) would change every other example's gradient. Here each example's
tokens are averaged over that example's tokens; class weights are factors. The value that is shown
stays PyTorch's.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn._reduction import legacy_get_string

from privagrad.torch.guards.trace import rows_stay_whole
from privagrad.torch.per_example.layout import RowOwners

_signature = cache(inspect.signature)


def _of_examples(func: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """The loss, and how it was made; None for the latter where that is PyTorch's own way."""
    given = _signature(func).bind(*args, **kwargs).arguments
    input, target, weight = given.pop("input"), given.pop("target"), given.pop("weight", None)
    averages, reduces = given.pop("size_average", None), given.pop("reduce", None)
    reduction = given.pop("reduction", "mean")
    if averages is not None or reduces is not None:
        reduction = legacy_get_string(averages, reduces)
    options: dict[str, Any] = {"ignore_index": -100, **given}
    guard, node = getattr(input, "guard", None), getattr(input, "node", None)

    loss_of = func

    def as_pytorch() -> tuple[Tensor, None]:
        with torch._C.DisableTorchFunctionSubclass():
            loss: Tensor = loss_of(input, target, weight, reduction=reduction, **options)
            return loss.as_subclass(type(input)), None

    if not input.requires_grad or guard is None or node is None:
        return as_pytorch()
    with torch._C.DisableTorchFunctionSubclass():
        are_classes = not target.is_floating_point()
    # The number of targets is read in the open: the data may have chosen it.
    if not are_classes or not target.numel():
        return as_pytorch()
    if func is F.cross_entropy and torch.is_grad_enabled():
        with torch._C.DisableTorchFunctionSubclass():
            loss_of = guard.cross_entropy_of(input)
    if reduction != "mean":
        return as_pytorch()
    with torch._C.DisableTorchFunctionSubclass():
        counted = target != options["ignore_index"]
        uneven = weight is not None or not bool(counted.all())
        owners = guard.owners(node, input)
        if owners is None or owners.rows.shape != target.shape:
            if not uneven:
                return as_pytorch()
            raise RuntimeError(
                "Expected a loss whose rows belong to one example each, found rows that the engine "
                "cannot follow from the module's output to the loss. With ignore_index or class "
                "weights take reduction='none' and the mean of each example's own tokens."
            )
        aim = getattr(target, "node", None)
        aim = target.as_subclass(Tensor) if aim is None else aim
        factors = getattr(weight, "node", None)
        factors = weight if factors is None else factors
        made: Any = (mean_of_own_means, [func, node, aim, factors, owners, options], {})
        if not uneven and rows_stay_whole(node, tuple(input.shape)):
            # As many rows for each example: PyTorch's mean is the same, and faster.
            return as_pytorch()[0], made
        losses, loss = own_means(loss_of, input, target, weight, owners, options)
        weights = counted if weight is None else counted * weight[target * counted]
        shown = losses.detach().sum() / weights.sum()
        loss = loss + (shown - loss).detach()
        return loss.as_subclass(type(input)), made


def mean_of_own_means(*args: Any) -> Tensor:
    """The mean over examples of the means over each example's own rows."""
    return own_means(*args)[1]


def own_means(
    func: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    owners: RowOwners,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The losses of all rows; the mean over examples of the means over each example's own rows."""
    losses: Tensor = func(input, target, weight, reduction="none", **options)
    with torch.no_grad():
        # One example has all rows, of however many there are.
        rows = owners.rows if owners.count > 1 else torch.zeros_like(target)
        counts = (target != options["ignore_index"]).to(losses.dtype)
        own = torch.bincount(rows.reshape(-1), counts.reshape(-1), owners.count).to(losses.dtype)
        share = torch.where(own > 0, 1 / (owners.count * own), 0.0)[rows]
    return losses, (losses * share).sum()


MEANS = {F.cross_entropy: _of_examples, F.nll_loss: _of_examples}
