"""A criterion that is evaluated example by example, so that it cannot mix examples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from privagrad._internal import validate
from privagrad.torch.guards.constants import BatchFloat, BatchInteger
from privagrad.torch.guards.padding import padded_examples, same_gradient, unpadded
from privagrad.torch.guards.refusals import BROKEN, UnverifiedError, padding_matters
from privagrad.torch.guards.structure import map_tensors, tensors_of
from privagrad.torch.guards.trace import Output, history
from privagrad.torch.guards.traced import TracedTensor, node_of, untraced
from privagrad.torch.per_example.layers.anything import one_by_one


class _OwnRowsOnly(TorchFunctionMode):
    """Refuses tensors of the batch in a criterion other than those it was given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        if any(isinstance(x, BatchFloat | BatchInteger) or node_of(x) is not None for x in given):
            raise UnverifiedError(
                "Expected a criterion that computes the loss of an example from its arguments, "
                "found in it another tensor of the batch (an attribute, a variable of its "
                "surroundings). Give it to PerExampleLoss as an argument, with a row for each "
                "example."
            )
        return func(*args, **kwargs)


class PerExampleLoss(nn.Module):
    """``criterion(outputs, targets)`` of each example alone, and the mean (or sum) of these.

    Whatever the criterion divides by, it sees one example: padding, class weights and normalisers
    of one example cannot change another's gradient. Used in place of the criterion in a training
    loop; without a private module's outputs it gives the same number.

    Parameters
    ----------
    criterion : callable
        The loss of a batch (outputs, targets).
    reduction : {"mean", "sum"}
        As `loss_reduction` of make_private.
    batch_first : bool
        False: the examples are in the second dimension of outputs and targets, where they have one.

    Guarantees
    ----------
    The loss of an example is a function of its own rows of the outputs and targets.
    """

    def __init__(
        self, criterion: Callable[..., Tensor], reduction: str = "mean", batch_first: bool = True
    ) -> None:
        super().__init__()
        self.criterion = criterion
        self.reduction = validate.choice("reduction", reduction, ("mean", "sum"))
        self.batch_first = batch_first

    def forward(self, *values: Any, shape: Any = None) -> Tensor:
        """The loss of outputs, targets and whatever else the criterion takes, in its order."""
        if shape is not None:
            raise TypeError(
                "Expected outputs and targets with one row for each example, found shape=, which "
                "says how flattened ones were: give the criterion the outputs (examples, tokens, "
                "classes) and targets (examples, tokens) as they are; a criterion that wants them "
                "flat can flatten them itself, for one example at a time."
            )
        traced = [t for t in tensors_of(values) if isinstance(t, TracedTensor) and t.guard]
        guard = traced[0].guard if traced else None
        if guard is not None:
            guard.check_rows(traced)
            leaves = [leaf for t in traced for leaf in history(t.node)]
            examples = {leaf.count for leaf in leaves if isinstance(leaf, Output)}
        with torch._C.DisableTorchFunctionSubclass():
            plain = untraced(values)
            tensors = tensors_of(plain)
            if not tensors:
                raise ValueError("Expected outputs and targets that are tensors, found none.")
            counts = {self._axis_size(t) for t in tensors}
            if len(counts) != 1:
                raise ValueError(
                    "Expected outputs and targets with one row for each example, found "
                    f"{' and '.join(map(str, sorted(counts)))} rows. Give PerExampleLoss the "
                    "outputs as the module returned them; batch_first=False for examples in the "
                    "second dimension."
                )
            count = counts.pop()
            if guard is not None and examples - {count}:
                raise ValueError(
                    f"Expected outputs of {examples.pop()} examples, found {count} rows. Give "
                    "PerExampleLoss the outputs as the module returned them, not flattened."
                )
            if guard is not None and guard.verify:
                self._refuse_padding(values, plain, padded_examples(leaves), count)
            before = self._state()
            losses = self._losses(plain, tensors, count)
            if guard is not None and guard.verify and self._state() != before:
                raise UnverifiedError(
                    "Expected a criterion without memory, found one that changes its buffers: the "
                    "loss of an example would depend on those before it. Keep no statistics."
                )
            loss = losses.sum()
            if self.reduction == "mean":
                loss = loss / max(1, len(losses))
        return loss if guard is None else guard.separate_loss(loss, len(losses))

    def _state(self) -> list[tuple[int, int]]:
        return [(id(buffer), buffer._version) for buffer in self.buffers()]

    def _axis(self, tensor: Tensor) -> int:
        return 0 if self.batch_first or tensor.dim() < 2 else 1

    def _axis_size(self, tensor: Tensor) -> int:
        if tensor.dim() == 0:
            raise ValueError(
                "Expected outputs and targets with one row for each example, found a single "
                "number. Public numbers belong into the criterion itself."
            )
        return tensor.shape[self._axis(tensor)]

    def _refuse_padding(self, values: Any, plain: Any, examples: list[int], count: int) -> None:
        """Refuse a criterion that changes with the length that the batch is padded to."""
        traced = tensors_of(values)
        for example in examples:
            single = [t.narrow(self._axis(t), example, 1).detach() for t in tensors_of(plain)]
            padded = self._gradients(plain, single)
            for own in unpadded(traced, single, count, example):
                with suppress(*BROKEN):
                    if all(map(same_gradient, padded, self._gradients(plain, own))):
                        break
            else:
                raise padding_matters("the loss")

    def _gradients(self, values: Any, rows: list[Tensor]) -> list[Tensor]:
        """Of the loss of one example, in its rows of the values that need one."""
        needed = [t.requires_grad for t in tensors_of(values)]
        roots = [t.detach().requires_grad_(need) for t, need in zip(rows, needed, strict=True)]
        given = iter(roots)
        with torch.enable_grad():
            loss = self.criterion(*map_tensors(lambda _: next(given), values))
            wanted = [t for t in roots if t.requires_grad]
            return list(torch.autograd.grad(loss, wanted, materialize_grads=True))

    def _losses(self, values: Any, tensors: list[Tensor], count: int) -> Tensor:
        """The loss of each example."""

        def one(own: list[Tensor]) -> Tensor:
            given = iter(own)

            def row(tensor: Tensor) -> Tensor:
                return next(given).unsqueeze(self._axis(tensor))

            with _OwnRowsOnly():
                loss = self.criterion(*map_tensors(row, values))
            if loss.numel() != 1:
                raise ValueError(
                    "Expected a criterion that gives one number for one example, found shape "
                    f"{tuple(loss.shape)}: let it take the mean or the sum."
                )
            return loss.reshape(())

        if count == 0:
            # Something to call backward() on all the same.
            roots = [t.reshape(-1) for t in tensors if t.requires_grad]
            return torch.cat(roots) if roots else torch.zeros(0)
        losses: Tensor = one_by_one(one, [t.movedim(self._axis(t), 0) for t in tensors])
        return losses
