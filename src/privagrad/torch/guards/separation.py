"""Whether a value keeps examples apart, by computing it again for other examples."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from privagrad.torch.guards.determinism import normals, random_state_kept, seed
from privagrad.torch.guards.random_functions import Deterministic
from privagrad.torch.guards.refusals import BROKEN
from privagrad.torch.guards.replay import Replay, run_again
from privagrad.torch.guards.trace import Leaf, Output, SeparateLoss, Trace, TraceNode, history
from privagrad.torch.per_example.layout import (
    ROUNDING,
    Layout,
    in_single,
    magnitudes,
    row_layouts,
    same,
    without_autocast,
)

EXAMPLES = 4
_CHANGES = (0.0, 1.0, 10.0)
"""Noise on other examples' outputs, over their size: a hinge shows only where it bends."""

_STRANGE = (0, 1, -1, -100, 7, float("nan"))
"""Values that no batch may have had so far, such as marks of padding and of what is missing."""

_GUESSES = 12


def constant_layouts(trace: Trace, count: int) -> list[dict[int, Layout]]:
    """Which constants have a row for each example, the likeliest first."""
    tensors = [c for s in trace for c in s.constants if isinstance(c, Tensor) and c.dim() > 0]
    options = {id(tensor): list(row_layouts(tensor.shape, count)) for tensor in tensors}
    options = {key: found for key, found in options.items() if found}
    first = {key: found[0] for key, found in options.items()}
    guesses = [first]
    for key, found in options.items():
        guesses += [first | {key: other} for other in found[1:]]
        guesses.append({k: v for k, v in first.items() if k != key})
    distinct = [guess for place, guess in enumerate(guesses) if guess not in guesses[:place]]
    return [*(guess for guess in distinct[: _GUESSES - 1] if guess), {}]


def mixing_in(trace: Trace, view: Replay, reduction: str) -> str:
    """How an example's gradient depends on other examples; empty if it does not."""
    examples, size = view.examples, len(view.examples)
    together = gradients_of(trace, view)
    factor = size if reduction == "mean" else 1
    for position, example in enumerate(examples):
        alone = gradients_of(trace, replace(view, examples=[example]))
        for leaf, several, one in zip(trace.leaves, together, alone, strict=True):
            if several is None or one is None:
                continue
            if isinstance(leaf, SeparateLoss):
                if not same(several, one):
                    return "the losses of examples are not added up"
            elif leaf.layout is not None:
                own = leaf.layout.split(several, size)[position]
                exact = leaf.layout.split(one, 1)[0]
                if not close_gradients(own * factor, exact):
                    return _wrong_share(own, exact, reduction, size)
    changes = [*((noise, None) for noise in _CHANGES), *((0.0, s) for s in _STRANGE)]
    for kept, (noise, strange) in itertools.product(_halves(size), changes):
        others = replace(view, examples=_others(examples, kept, view.count))
        try:
            rows_of = partial(_disturbed, kept=kept, noise=noise, strange=strange)
            after = gradients_of(trace, others, rows_of)
        except BROKEN:
            # Such as probabilities that noise has made larger than 1, or a class that is none.
            continue
        for leaf, a, b in zip(trace.leaves, together, after, strict=True):
            if a is None or b is None:
                continue
            if leaf.layout is not None:
                rows = torch.tensor(kept)
                a, b = (leaf.layout.split(g, size)[rows] for g in (a, b))
            if not close_gradients(a, b):
                return "the gradient of an example changes with the outputs of others"
    return ""


def _wrong_share(own: Tensor, exact: Tensor, reduction: str, size: int) -> str:
    other, factor = ("sum", 1) if reduction == "mean" else ("mean", size)
    if close_gradients(own * factor, exact):
        return f"examples are put together by a {other}, where loss_reduction is {reduction!r}"
    return f"the gradient of an example among {size} is not that of the example alone"


def _others(examples: Sequence[int], kept: Sequence[bool], count: int) -> list[int]:
    """The kept examples in their places, and others in place of the others."""
    own = {example for example, keep in zip(examples, kept, strict=True) if keep}
    pool = [example for example in range(count) if example not in own]
    random.Random().shuffle(pool)
    return [e if keep else pool.pop() for e, keep in zip(examples, kept, strict=True)]


def alone_gradients(trace: Trace, view: Replay) -> list[tuple[Output, int, Tensor]]:
    """The gradients of the loss of each example alone in the module's outputs."""
    return [
        (leaf, example, gradient)
        for example in view.examples
        for leaf, gradient in zip(
            trace.leaves, gradients_of(trace, replace(view, examples=[example])), strict=True
        )
        if isinstance(leaf, Output) and gradient is not None
    ]


def _usual(leaf: Leaf, view: Replay) -> Tensor:
    return leaf.rows(view.examples)


def gradients_of(
    trace: Trace, view: Replay, rows: Callable[[Leaf, Replay], Tensor] = _usual
) -> list[Tensor | None]:
    """The gradients of the loss of some examples, one for each leaf; None where it has none.

    `rows` gives the values that a leaf has for the examples.
    """
    seed()
    values: dict[int, Tensor] = {}
    roots: list[Tensor] = []
    with torch.enable_grad():
        for leaf in trace.leaves:
            own = in_single(rows(leaf, view)) if view.single else rows(leaf, view)
            if leaf.differentiable:
                own = own.detach().requires_grad_()
                roots.append(own)
            values[id(leaf)] = own
        loss = run_again(trace, values, view)
        found = iter(torch.autograd.grad(loss, roots, allow_unused=True, materialize_grads=True))
    return [next(found) if leaf.differentiable else None for leaf in trace.leaves]


def _disturbed(
    leaf: Leaf, view: Replay, kept: Sequence[bool], noise: float, strange: float | None
) -> Tensor:
    """The rows of a leaf, with other values for the examples that are not kept.

    Outputs get noise, over their size; tensors of the batch a strange value, if there is one.
    """
    rows, layout = leaf.rows(view.examples), leaf.layout
    if isinstance(leaf, SeparateLoss):
        return rows + noise
    if layout is None:
        return rows
    if not (isinstance(leaf, Output) and rows.is_floating_point()):
        return rows if strange is None else _changed(leaf, rows, kept, strange)
    if not noise:
        return rows
    parts = layout.split(rows, len(kept)).clone()
    size = rows.std() + rows.abs().mean() + 1e-3 if rows.numel() > 1 else rows.abs().mean() + 1e-3
    others = ~torch.tensor(kept)
    parts[others] += noise * size * normals(parts[others].shape).to(rows)
    return layout.join(parts)


def _halves(count: int) -> Iterator[list[bool]]:
    """Halves of the examples: of four examples, any two are apart in one of them."""
    for half in (lambda place: place < (count + 1) // 2, lambda place: place % 2 == 0):
        yield [half(place) for place in range(count)]
        yield [not half(place) for place in range(count)]


def depends_on_others(node: TraceNode, rows_may_be_chosen: bool = False) -> bool | None:
    """Whether the rows of a value for some examples change when the other examples do.

    None where it cannot be computed for some examples alone. With `rows_may_be_chosen`, a value
    that has as many rows as the data say is for others to follow.
    """
    trace = history(node)
    count = trace.n_examples
    if count < 2 or any(leaf.layout is None for leaf in trace.leaves):
        return False
    size = min(count, EXAMPLES)
    # In their order: a constant index that permutes all of them stays what it is.
    examples = sorted(random.Random().sample(range(count), size))
    with Deterministic(), random_state_kept(), torch.no_grad(), without_autocast():
        found = [
            _changed_rows(trace, Replay(count, examples, axes, single=True), rows_may_be_chosen)
            for axes in constant_layouts(trace, count)
        ]
    return False if False in found else True if True in found else None


def _changed_rows(trace: Trace, view: Replay, rows_may_be_chosen: bool) -> bool | None:
    """Whether kept rows change; None where the value cannot be computed."""
    decided: bool | None = None
    # What is missing may be filled in from others.
    for rows in (_usual, _with_missing):
        try:
            usual = {id(f): in_single(rows(f, view)) for f in trace.leaves}
            before = run_again(trace, usual, view)
        except BROKEN:
            continue
        results = []
        for kept, strange in itertools.product(_halves(len(view.examples)), (None, *_STRANGE)):
            values = {
                id(f): in_single(_changed(f, rows(f, view), kept, strange)) for f in trace.leaves
            }
            with suppress(*BROKEN):
                results.append((run_again(trace, values, view), kept))
        if any(after.shape != before.shape for after, _ in results):
            return not rows_may_be_chosen
        if any(_differ(before, after, kept) for after, kept in results):
            return True
        decided = False if results else decided
    return decided


def _with_missing(leaf: Leaf, view: Replay) -> Tensor:
    """The rows with NaN in every second place."""
    rows = leaf.rows(view.examples)
    if rows.is_floating_point() and rows.dim():
        rows = rows.clone()
        rows[..., ::2] = float("nan")
    return rows


def _differ(before: Tensor, after: Tensor, kept: Sequence[bool]) -> bool:
    """Whether rows of kept examples differ, each coordinate in units of its own."""
    layouts = list(row_layouts(before.shape, len(kept)))
    if not layouts:
        return not same(before, after)
    rows = torch.tensor(kept)
    for layout in layouts:
        a, b = (layout.split(value, len(kept)) for value in (before, after))
        measured = a.is_floating_point() and a.numel()
        scale = magnitudes(a).amax(0).expand_as(a[rows]) if measured else None
        if same(a[rows], b[rows], ROUNDING, scale):
            return False
    return True


def _changed(leaf: Leaf, rows: Tensor, kept: Sequence[bool], strange: float | None) -> Tensor:
    """Other values for the examples that are not kept: of other examples, or strange ones."""
    assert leaf.layout is not None
    parts = leaf.layout.split(rows, len(kept)).clone()
    others = ~torch.tensor(kept)
    old = parts[others]
    if strange is None:
        every = leaf.layout.split(leaf.values, leaf.count)
        new = every[[random.Random().randrange(leaf.count) for _ in range(len(old))]]
    elif old.dtype == torch.bool:
        new = ~old
    elif old.is_floating_point():
        new = old * (1 + abs(strange)) + 1 + normals(old.shape).to(old)
    else:
        new = torch.full_like(old, 2 if math.isnan(strange) else int(strange))
    parts[others] = new
    return leaf.layout.join(parts)


def close_gradients(a: Tensor, b: Tensor) -> bool:
    """Whether gradients are the same; those that are not finite count as 0 anyway."""
    if not bool(a.isfinite().all() & b.isfinite().all()):
        return True
    return same(a, b.reshape(a.shape) if a.numel() == b.numel() else b)
