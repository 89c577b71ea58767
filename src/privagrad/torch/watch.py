"""Guards between the module's output and the loss.

The engine never sees the criterion. So the module's outputs are tensors that note what is
computed from them, which gives two things that no peer has: a loss that mixes examples
is refused, and means over tokens are means over each example's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from privagrad.torch.layout import Layout
from privagrad.torch.tape import Tape

_CLOSE = 1e-3


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
            if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                return leaf
            layout = self.tape.layouts.get(("output", index), Layout(0))
            result = leaf.as_subclass(Watched)
            result.origin = Origin(self, count, layout)
            return result

        return tree_map(watched, outputs)

    def check(self, loss: Watched) -> None:
        """Refuse a loss whose gradient in one example's outputs depends on other examples'."""
        leaves = loss_leaves(loss)
        counts = {leaf.origin.count for leaf in leaves}
        if self.checked or len(counts) != 1 or min(counts) < 2 or loss.numel() != 1:
            return
        with torch.random.fork_rng():
            seed = torch.initial_seed() % 2**63
            plain = [leaf.as_subclass(Tensor).detach() for leaf in leaves]
            others = [_changed(x, leaf.origin) for x, leaf in zip(plain, leaves, strict=True)]
            try:
                before = _gradients(loss, leaves, plain, seed)
                after = _gradients(loss, leaves, others, seed)
            except RuntimeError:
                # What cannot be computed again cannot be checked.
                return
        for leaf, a, b in zip(leaves, before, after, strict=True):
            kept = leaf.origin.kept(a), leaf.origin.kept(b)
            if not _close(*kept):
                raise RuntimeError(
                    "Expected a loss that is a sum or a mean over examples, found one in which the "
                    "gradient of an example changes with the outputs of others: no bound on one "
                    "example's influence would hold. Compute the loss of each example by itself "
                    "and take the mean or the sum."
                )
        self.checked = True

    def owners(self, tensor: Watched) -> Tensor | None:
        """The number of the example that each row of `tensor` (rows, classes, ...) belongs to."""
        leaves = loss_leaves(tensor)
        if len(leaves) != 1:
            return None
        key = (tuple(leaves[0].shape), tuple(tensor.shape), leaves[0].origin.count)
        if key not in self._owners:
            numbers = leaves[0].origin.numbers(leaves[0])
            rows = _again(tensor, {id(leaves[0]): numbers}, {}).as_subclass(Tensor)
            first, last = rows.amin(1), rows.amax(1)
            if not torch.equal(first, last) or not torch.equal(first, first.round()):
                return None
            self._owners = {key: first.long()}
        return self._owners[key]


class Origin:
    """Where a watched output comes from, and where the examples are in it."""

    def __init__(self, watch: Watch, count: int, layout: Layout) -> None:
        self.watch, self.count, self.layout = watch, count, layout

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def numbers(self, leaf: Tensor) -> Tensor:
        """A tensor like `leaf` that holds the number of the example at each place."""
        places = torch.arange(leaf.numel(), device=leaf.device).reshape(leaf.shape)
        rows = self.layout.arrange(places, self.count, 0)
        numbers = torch.empty(leaf.numel(), dtype=torch.float32, device=leaf.device)
        own = torch.arange(self.count, dtype=torch.float32, device=leaf.device)
        numbers[rows] = own[:, None].expand(rows.shape)
        return numbers.reshape(leaf.shape)

    def kept(self, tensor: Tensor) -> Tensor:
        """The values of the first half of the examples."""
        return self.layout.arrange(tensor, self.count, 0)[: self.count // 2]


class Watched(torch.Tensor):
    """A tensor that remembers how it was computed from a private module's outputs."""

    origin: Any = None
    made: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            _before_backward(args[0])
        special = _MEANS.get(func)
        if special is not None:
            call: Callable[..., Any] = special
            result = call(func, *args, **kwargs)
        else:
            result = super().__torch_function__(func, types, args, kwargs)
        if func in _SILENT:
            return result
        leaves = tree_flatten(result)[0]
        known = {id(leaf) for leaf in tree_flatten((args, kwargs))[0]}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Watched) and leaf.requires_grad:
                # An operation in place has no "before" to start from again.
                leaf.made = None if id(leaf) in known else (func, args, kwargs, index)
        return result


_SILENT = {Tensor.backward, Tensor.requires_grad.__get__}  # type: ignore[attr-defined]


def _before_backward(loss: Tensor) -> None:
    if isinstance(loss, Watched):
        leaves = loss_leaves(loss)
        if leaves:
            leaves[0].origin.watch.check(loss)
        with torch._C.DisableTorchFunctionSubclass():
            _forget(loss)


def loss_leaves(tensor: Tensor) -> list[Watched]:
    """The module's outputs that a watched tensor was computed from."""
    found: dict[int, Watched] = {}
    seen: set[int] = set()
    waiting: list[Any] = [tensor]
    with torch._C.DisableTorchFunctionSubclass():
        while waiting:
            here = waiting.pop()
            if not isinstance(here, Watched) or id(here) in seen:
                continue
            seen.add(id(here))
            if here.origin is not None:
                found[id(here)] = here
            elif here.made is not None:
                waiting.extend(tree_flatten(here.made[1:3])[0])
    return list(found.values())


def _forget(tensor: Watched) -> None:
    """Let go of everything the loss was computed from."""
    waiting: list[Any] = [tensor]
    while waiting:
        here = waiting.pop()
        if isinstance(here, Watched) and here.made is not None:
            waiting.extend(tree_flatten(here.made[1:3])[0])
            here.made = None


def _again(tensor: Any, leaves: dict[int, Tensor], memo: dict[int, Any]) -> Any:
    """`tensor` computed again from other outputs of the module."""
    if not isinstance(tensor, Watched):
        return tensor
    if id(tensor) in leaves:
        return leaves[id(tensor)]
    if tensor.made is None:
        return tensor.as_subclass(Tensor)
    if id(tensor) not in memo:
        func, args, kwargs, index = tensor.made
        args, kwargs = tree_map(lambda x: _again(x, leaves, memo), (args, kwargs))
        memo[id(tensor)] = tree_flatten(func(*args, **kwargs))[0][index]
    return memo[id(tensor)]


def _gradients(
    loss: Watched, leaves: list[Watched], values: list[Tensor], seed: int
) -> list[Tensor]:
    torch.manual_seed(seed)
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        roots = [value.clone().requires_grad_() for value in values]
        again = _again(loss, {id(a): b for a, b in zip(leaves, roots, strict=True)}, {})
        found = torch.autograd.grad(again, roots, allow_unused=True)
    return [torch.zeros_like(r) if g is None else g for r, g in zip(roots, found, strict=True)]


def _changed(values: Tensor, origin: Origin) -> Tensor:
    """Other values for the second half of the examples."""
    places = torch.arange(values.numel(), device=values.device).reshape(values.shape)
    rows = origin.layout.arrange(places, origin.count, 0)[origin.count // 2 :].reshape(-1)
    flat = values.flatten().clone()
    spread = values.std() if values.numel() > 1 else values.new_ones(())
    flat[rows] += torch.randn_like(flat[rows]) * (spread + values.abs().mean() + 1e-3)
    return flat.reshape(values.shape)


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.numel():
        return True
    return bool(((a - b).abs() <= _CLOSE * a.abs().max() + 1e-12).all() | (~a.isfinite()).any())


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
    """A mean over examples of the means over each example's own tokens.

    PyTorch's mean divides by how many tokens of the whole batch count, so that an example's padding
    (or class weights) would change every other example's gradient. The value stays PyTorch's.
    """
    with torch._C.DisableTorchFunctionSubclass():
        classes = target.is_floating_point() or reduction != "mean" or target.numel() == 0
        even = weight is None and (classes or not bool((target == ignore_index).any()))
    if classes or even or not isinstance(input, Watched):
        return _plain(func, input, target, weight, ignore_index, reduction, options)
    leaves = loss_leaves(input)
    owners = leaves[0].origin.watch.owners(input) if leaves else None
    if owners is None or owners.shape != target.shape:
        raise RuntimeError(
            "Expected a loss whose rows belong to one example each, found rows that the engine "
            "cannot follow from the module's output to the loss. With ignore_index or class "
            "weights take reduction='none' and the mean of each example's own tokens."
        )
    losses = _plain(func, input, target, weight, ignore_index, "none", options)
    with torch.no_grad():
        counts = (target != ignore_index).to(losses.dtype).as_subclass(Tensor)
        if weight is not None:
            counts = counts * weight[target.clamp(0, weight.numel() - 1)]
        count = leaves[0].origin.count
        own = counts.new_zeros(count).index_add_(0, owners.reshape(-1), counts.reshape(-1))
        share = torch.where(own > 0, 1 / (count * own), torch.zeros_like(own))[owners]
        shown = losses.sum() / counts.sum()
    loss = (losses * share).sum()
    return loss + (shown - loss).detach()


def _plain(
    func: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    options: Any,
) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        result: Tensor = func(
            input, target, weight, ignore_index=ignore_index, reduction=reduction, **options
        )
    return result.as_subclass(Watched) if isinstance(input, Watched) else result


_MEANS = {F.cross_entropy: _own_means, F.nll_loss: _own_means}
