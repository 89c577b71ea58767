"""Guards between the module's output and the loss.

The engine never sees the criterion. So the module's outputs are tensors that note what is
computed from them, which gives two things that no peer has: a loss that mixes examples
is refused, and means over tokens are means over each example's own tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn._reduction import legacy_get_string
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from privagrad.torch.layout import Layout
from privagrad.torch.notes import Note, Output, history, rows_of
from privagrad.torch.separation import owners_of, refuse_mixing
from privagrad.torch.tape import Tape

_KEPT = 1000


class Watch:
    """Follows the outputs of one private module."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.checked = False
        self._owners: dict[Any, Tensor] = {}

    def __deepcopy__(self, memo: Any) -> Watch:
        return Watch(Tape({}))

    def outputs(self, outputs: Any, count: int) -> Any:
        """The module's outputs, watched."""
        index = -1

        def watched(leaf: Any) -> Any:
            nonlocal index
            index += 1
            # A module that returns its loss has no examples left to tell apart.
            if not isinstance(leaf, Tensor) or not leaf.requires_grad or leaf.dim() == 0:
                return leaf
            layout = self.tape.layouts.get(("output", index), Layout(0))
            result = leaf.as_subclass(Watched)
            result.note = Output(self, leaf.detach(), count, layout)
            return result

        return tree_map(watched, outputs)

    def check(self, loss: Watched) -> None:
        """Refuse a loss that mixes examples, until one batch has shown that it does not."""
        steps = history(loss.note)
        leaves = [step for step in steps if isinstance(step, Output)]
        counts = {leaf.count for leaf in leaves}
        if self.checked or len(counts) != 1 or min(counts) < 2 or loss.numel() != 1:
            return
        self.checked = _is_cross_entropy_of_rows(steps) or refuse_mixing(steps, leaves)

    def owners(self, tensor: Watched) -> tuple[int, Tensor] | None:
        """Of how many examples the rows of `tensor` (rows, classes, ...) are, and of which each is.

        None where that cannot be told.
        """
        steps = history(tensor.note)
        leaves = [step for step in steps if isinstance(step, Output)]
        if len(leaves) != 1:
            return None
        leaf = leaves[0]
        if (rows := rows_of(steps, tuple(tensor.shape))) is not None:
            return leaf.count, rows
        # Masks change with the batch; how many examples they leave is nobody else's business.
        masked = any(step.has_constants for step in steps)
        key = (tuple(leaf.values.shape), leaf.count, leaf.layout, *(str(step) for step in steps))
        owners = None if masked else self._owners.get(key)
        if owners is None:
            owners = owners_of(steps, leaf)
            if owners is None:
                return None
            if len(self._owners) >= _KEPT:
                self._owners.clear()
            if not masked:
                self._owners[key] = owners
        return leaf.count if masked else len(set(owners.flatten().tolist())), owners


class Watched(torch.Tensor):
    """A tensor that remembers how it was computed from a private module's outputs."""

    note: Any = None

    def __format__(self, spec: str) -> str:
        return format(self.detach().as_subclass(Tensor), spec)

    def __repr__(self) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return repr(self.as_subclass(Tensor))

    def __deepcopy__(self, memo: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            _before_backward(args[0])
        if func in _SILENT:
            return super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            given, structure = tree_flatten([args, kwargs])
            versions = [_version(x) for x in given]
            notes = [getattr(x, "note", None) if isinstance(x, Watched) else None for x in given]
        special = _MEANS.get(func)
        if special is not None:
            call: Callable[..., Any] = special
            result = call(func, *args, **kwargs)
        else:
            result = super().__torch_function__(func, types, args, kwargs)
        watch = next((note.watch for note in notes if note is not None), None)
        if watch is None:
            return result
        with torch._C.DisableTorchFunctionSubclass():
            written = [x if note is None else note for x, note in zip(given, notes, strict=True)]
            made = (func, *tree_unflatten(written, structure))
            for index, x in enumerate(given):
                if isinstance(x, Watched) and _version(x) != versions[index]:
                    x.note = Note(watch, made, None, index)
            known = {id(x) for x in given}
            for index, leaf in enumerate(tree_flatten(result)[0]):
                # What has no gradient matters to the check alone.
                if (
                    isinstance(leaf, Watched)
                    and id(leaf) not in known
                    and (leaf.requires_grad or not watch.checked)
                ):
                    leaf.note = Note(watch, made, index, None)
        return result


_SILENT = {Tensor.backward, Tensor.requires_grad.__get__}  # type: ignore[attr-defined]


def _version(value: Any) -> int:
    return value._version if isinstance(value, Watched) and not value.is_inference() else 0


def _before_backward(loss: Tensor) -> None:
    if not isinstance(loss, Watched) or loss.note is None:
        return
    with torch._C.DisableTorchFunctionSubclass():
        loss.note.watch.check(loss)
        # Let go of everything the loss was computed from.
        for step in history(loss.note):
            if not isinstance(step, Output):
                step.made = (_forgotten,)


def _forgotten(*_: Any) -> None:
    raise RuntimeError("Expected a history, found one that a backward pass has used up.")


def _own_means(
    func: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    """A mean over examples of the means over each example's own tokens; class weights are factors.

    PyTorch's mean divides by how many tokens of the whole batch count, or by their weights, so that
    an example's padding (or class) would change every other example's gradient. The value stays
    PyTorch's.
    """
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)

    def plain(reduction: str) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            result: Tensor = func(
                input, target, weight, ignore_index=ignore_index, reduction=reduction, **options
            )
        return result.as_subclass(Watched) if isinstance(input, Watched) else result

    note = getattr(input, "note", None)
    if reduction != "mean" or note is None or target.is_floating_point() or not target.numel():
        return plain(reduction)
    with torch._C.DisableTorchFunctionSubclass():
        counted = target != ignore_index
        uneven = weight is not None or not bool(counted.all())
        found = None
        if uneven or rows_of(history(note), tuple(input.shape)) is None:
            found = note.watch.owners(input)
    if found is None or found[1].shape != target.shape:
        if not uneven:
            return plain(reduction)
        raise RuntimeError(
            "Expected a loss whose rows belong to one example each, found rows that the engine "
            "cannot follow from the module's output to the loss. With ignore_index or class "
            "weights take reduction='none' and the mean of each example's own tokens."
        )
    count, owners = found
    losses = plain("none")
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        counts = counted.to(losses.dtype)
        own = torch.bincount(owners.reshape(-1), counts.reshape(-1)).to(losses.dtype)
        share = torch.where(own > 0, 1 / (count * own), 0.0)[owners]
        weights = counts if weight is None else counts * weight[target * counted]
        shown = losses.sum() / weights.sum()
    loss = (losses * share).sum()
    return loss + (shown - loss).detach()


def _is_cross_entropy_of_rows(steps: list[Note]) -> bool:
    """Whether the loss is PyTorch's cross-entropy of the rows of one output: nothing to check."""
    *before, last = steps
    if not before or isinstance(last, Output) or last.made[0] not in _MEANS:
        return False
    shape = (0, before[0].values.shape[-1]) if isinstance(before[0], Output) else ()
    return last.sources == before[-1:] and rows_of(before, shape) is not None


_MEANS = {F.cross_entropy: _own_means, F.nll_loss: _own_means}
