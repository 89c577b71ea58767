"""Guards between the module's output and the loss.

The engine never sees the criterion. So the module's outputs are tensors that note what is
computed from them, which gives two things that no peer has: a loss that mixes examples
is refused, and means over tokens are means over each example's own tokens.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn._reduction import legacy_get_string
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from privagrad.torch.layout import Layout
from privagrad.torch.tape import Tape

_CLOSE = 1e-3
_KEPT = 1000
_CHANGES = (0.0, 1.0, 10.0)
"""Noise on other examples' outputs, over their size: a hinge shows only where it bends."""


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
        """Refuse a loss whose gradient in one example's outputs depends on other examples'."""
        steps = _history(loss.note)
        leaves = [step for step in steps if isinstance(step, Output)]
        counts = {leaf.count for leaf in leaves}
        if self.checked or len(counts) != 1 or min(counts) < 2 or loss.numel() != 1:
            return
        with torch.random.fork_rng():
            seed = torch.initial_seed() % 2**63
            before = _gradients(steps, leaves, [leaf.values for leaf in leaves], seed)
            if before is None or not all(bool(g.isfinite().all()) for g in before):
                return
            for kept, change in itertools.product(_halves(counts.pop()), _CHANGES):
                others = [leaf.changed(~kept, change) for leaf in leaves]
                after = _gradients(steps, leaves, others, seed)
                for leaf, a, b in zip(leaves, before, after or before, strict=True):
                    if not _close(leaf.rows(a)[kept], leaf.rows(b)[kept]):
                        raise RuntimeError(
                            "Expected a loss that is a sum or a mean over examples, found one in "
                            "which the gradient of an example changes with the outputs of others: "
                            "no bound on one example's influence would hold. Compute the loss of "
                            "each example by itself and take the mean or the sum."
                        )
        self.checked = True

    def owners(self, tensor: Watched) -> tuple[int, Tensor] | None:
        """Of how many examples the rows of `tensor` (rows, classes, ...) are, and of which each is.

        None where that cannot be told.
        """
        steps = _history(tensor.note)
        leaves = [step for step in steps if isinstance(step, Output)]
        if len(leaves) != 1:
            return None
        leaf = leaves[0]
        # Masks change with the batch; how many examples they leave is nobody else's business.
        masked = any(step.has_constants for step in steps)
        key = (tuple(leaf.values.shape), leaf.count, leaf.layout, *(str(step) for step in steps))
        owners = None if masked else self._owners.get(key)
        if owners is None:
            owners = _owners(steps, leaf)
            if owners is None:
                return None
            if len(self._owners) >= _KEPT:
                self._owners.clear()
            if not masked:
                self._owners[key] = owners
        return leaf.count if masked else len(set(owners.flatten().tolist())), owners


class Note:
    """How a value was computed: a function of other notes and of constants.

    Notes, not tensors, refer to each other: an operation in place gives its tensor a new note.
    """

    def __init__(self, watch: Watch, made: Any, result: int | None, modified: int | None) -> None:
        self.watch, self.made, self.result, self.modified = watch, made, result, modified

    def __str__(self) -> str:
        func, *arguments = self.made
        constants = [x for x in tree_flatten(arguments)[0] if not isinstance(x, (Note, Tensor))]
        return f"{func} {constants} {self.result} {self.modified}"

    @property
    def sources(self) -> list[Note]:
        return [x for x in tree_flatten(self.made[1:])[0] if isinstance(x, Note)]

    @property
    def has_constants(self) -> bool:
        """Whether tensors from elsewhere are in it, such as masks, which change with the batch."""
        return any(isinstance(x, Tensor) for x in tree_flatten(self.made)[0])

    def again(self, values: dict[int, Tensor]) -> Tensor:
        """The value, computed from other values of its sources."""
        func, *arguments = self.made
        leaves, structure = tree_flatten(arguments)
        leaves = [values[id(x)] if isinstance(x, Note) else x for x in leaves]
        if self.modified is not None:
            leaves[self.modified] = leaves[self.modified].clone()
        args, kwargs = tree_unflatten(leaves, structure)
        result = func(*args, **kwargs)
        if self.modified is not None:
            modified: Tensor = leaves[self.modified]
            return modified
        assert self.result is not None
        found: Tensor = tree_flatten(result)[0][self.result]
        return found


class Output(Note):
    """An output of the module, and where the examples are in it."""

    def __init__(self, watch: Watch, values: Tensor, count: int, layout: Layout) -> None:
        super().__init__(watch, None, None, None)
        self.values, self.count, self.layout = values, count, layout

    def __str__(self) -> str:
        return "output"

    @property
    def sources(self) -> list[Note]:
        return []

    def rows(self, tensor: Tensor) -> Tensor:
        """`tensor`, which is like the output, as (examples, values of one example)."""
        return self.layout.arrange(tensor, self.count, 0)

    def places(self) -> Tensor:
        values = self.values
        return self.rows(torch.arange(values.numel(), device=values.device).reshape(values.shape))

    def numbers(self) -> Tensor:
        """A tensor like the output that holds the number of the example at each place."""
        places = self.places()
        numbers = torch.empty(self.values.numel(), dtype=torch.float32, device=places.device)
        own = torch.arange(self.count, dtype=torch.float32, device=places.device)
        numbers[places] = own[:, None].expand(places.shape)
        return numbers.reshape(self.values.shape)

    def changed(self, examples: Tensor, noise: float) -> Tensor:
        """Other values for some examples: those of their neighbours, and noise."""
        values, places = self.values, self.places()
        flat = values.flatten().clone()
        to = places[examples].reshape(-1)
        flat[to] = values.flatten()[places.roll(1, 0)[examples].reshape(-1)]
        if noise:
            size = values.std() + values.abs().mean() + 1e-3
            flat[to] += noise * size * torch.randn_like(flat[to])
        return flat.reshape(values.shape)


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
        for step in _history(loss.note):
            if not isinstance(step, Output):
                step.made = (_forgotten,)


def _forgotten(*_: Any) -> None:
    raise RuntimeError("Expected a history, found one that a backward pass has used up.")


def _history(note: Note | None) -> list[Note]:
    """Everything a value was computed from and itself, sources first."""
    done: dict[int, Note] = {}
    waiting = [] if note is None else [(note, False)]
    while waiting:
        here, ready = waiting.pop()
        if ready:
            done[id(here)] = here
        elif id(here) not in done:
            waiting.append((here, True))
            waiting.extend((source, False) for source in here.sources if id(source) not in done)
    return list(done.values())


def _owners(steps: list[Note], leaf: Output) -> Tensor | None:
    """The example that each row of the last of `steps` (rows, classes, ...) belongs to.

    Row r moves by J_r v with the outputs. Let v' be v times each example's number: of example i
    alone a row moves by i times as much.
    """
    v = torch.randn(leaf.values.shape, generator=torch.Generator().manual_seed(0)).to(leaf.values)
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        root = leaf.values.clone().requires_grad_()
        rows = _again(steps, {id(leaf): root})
        u = torch.zeros_like(rows, requires_grad=True)
        # J v is the derivative of uᵀ J in u.
        (back,) = torch.autograd.grad(rows, root, u, create_graph=True)
        moves = [
            torch.autograd.grad(back, u, tangent, retain_graph=True)[0].double()
            for tangent in (v, v * leaf.numbers().to(v))
        ]
    once, often = moves
    largest, place = once.abs().max(1, keepdim=True)
    owners = (often.gather(1, place) / once.gather(1, place)).squeeze(1).round()
    error = (often - owners.unsqueeze(1) * once).abs()
    if not bool((error <= _CLOSE * largest * owners.unsqueeze(1).clamp(min=1.0)).all()):
        return None
    known = (largest > 0).all() & (owners >= 0).all() & (owners < leaf.count).all()
    return owners.long() if bool(known) else None


def _again(steps: list[Note], values: dict[int, Tensor]) -> Tensor:
    """The last of `steps` computed again from other values of the module's outputs."""
    for step in steps:
        if id(step) not in values:
            values[id(step)] = step.again(values)
    return values[id(steps[-1])]


def _gradients(
    steps: list[Note], leaves: list[Output], values: list[Tensor], seed: int
) -> list[Tensor] | None:
    """Of the loss in the module's outputs; None where it cannot be computed again."""
    torch.manual_seed(seed)
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        roots = [value.clone().requires_grad_() for value in values]
        try:
            again = _again(steps, {id(a): b for a, b in zip(leaves, roots, strict=True)})
            found = torch.autograd.grad(again, roots, allow_unused=True)
        except RuntimeError:
            # Such as probabilities that noise has made larger than 1.
            return None
    return [torch.zeros_like(r) if g is None else g for r, g in zip(roots, found, strict=True)]


def _halves(count: int) -> Iterator[Tensor]:
    """Halves of the examples: what depends on any other example differs for one of them."""
    numbers = torch.arange(count)
    for half in (numbers < count // 2, numbers % 2 == 0):
        yield half
        yield ~half


def _close(a: Tensor, b: Tensor) -> bool:
    return not a.numel() or bool(((a - b).abs() <= _CLOSE * a.abs().max() + 1e-12).all())


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
        found = note.watch.owners(input) if uneven or not isinstance(note, Output) else None
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


_MEANS = {F.cross_entropy: _own_means, F.nll_loss: _own_means}
