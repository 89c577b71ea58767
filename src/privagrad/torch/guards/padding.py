"""Whether padding changes anything: an example that is collated alone has none.

How long a batch is padded depends on its longest example. So outputs and losses of an example must
be the same at any length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from privagrad.torch.guards.refusals import BROKEN, padding_matters
from privagrad.torch.guards.replay import Replay, run_again
from privagrad.torch.guards.separation import gradients_of
from privagrad.torch.guards.trace import Leaf, Output, Trace, TraceNode, history
from privagrad.torch.guards.traced import node_of
from privagrad.torch.per_example.layout import Layout, same


def padded_examples(steps: Iterable[TraceNode]) -> list[int]:
    """The examples of which values without padding are known."""
    return sorted({e for step in steps if isinstance(step, Leaf) for e in step.unpadded})


def _without_padding(leaves: Sequence[Leaf], example: int, view: Replay) -> list[Replay]:
    """`view` for one example at its own length, the likeliest first.

    A constant size that equals the padded length may be another one.
    """
    lengths: dict[int, int] = {}
    for leaf in leaves:
        if example in leaf.unpadded:
            padded, own = leaf.rows([example]), leaf.unpadded[example]
            sizes = zip(padded.shape, own.shape, strict=True)
            lengths |= {long: short for long, short in sizes if short < long}
    shifted = {long - 1: short - 1 for long, short in lengths.items() if short > 1}
    readings: tuple[dict[int, int], ...] = ({**shifted, **lengths}, lengths, {})
    return [replace(view, examples=[example], lengths=known) for known in readings]


def _unpadded_rows(leaf: Leaf, view: Replay) -> Tensor:
    """The values of the one example of `view`, at its own length."""
    (example,) = view.examples
    if example in leaf.unpadded:
        return leaf.unpadded[example]
    return view.shortened(leaf.rows([example]))


def unpadded(
    values: Sequence[Any], single: Sequence[Any], count: int, example: int
) -> Iterator[list[Any]]:
    """`values` of a batch for one example, computed from its rows without padding.

    `single` are the same for this example with padding, for those that are not of the batch. What
    they are is not always clear: the likeliest come first.
    """
    traces = [history(node_of(value)) for value in values]
    leaves = [leaf for trace in traces for leaf in trace.leaves]
    for view in _without_padding(leaves, example, Replay(count, [example])):
        own: list[Any] = []
        with suppress(*BROKEN):
            for trace, alone in zip(traces, single, strict=True):
                if trace:
                    rows = {id(leaf): _unpadded_rows(leaf, view) for leaf in trace.leaves}
                    own.append(run_again(trace, rows, view))
                else:
                    own.append(view.shortened(alone) if isinstance(alone, Tensor) else alone)
            yield own


def same_outputs_but_for_padding(
    padded: dict[object, Tensor],
    alone: dict[object, Tensor],
    layouts: Mapping[object, Layout | None],
    count: int,
    example: int,
) -> bool:
    """Whether an example has the same outputs in the batch as alone, where it has both."""
    if padded.keys() != alone.keys():
        return False
    for key, several in padded.items():
        layout, one = layouts.get(key), alone[key]
        if layout is not None:
            row, own = layout.split(several, count)[example], layout.split(one, 1)[0]
            if row.dim() != own.dim():
                return False
            common = _common(row, own)
            if not same(row[common], own[common]):
                return False
    return True


def same_gradient(padded: Tensor, own: Tensor) -> bool:
    """Whether gradients of one example are the same, and 0 in its padding."""
    if not bool(padded.isfinite().all() & own.isfinite().all()):
        return True
    filled = torch.zeros_like(padded)
    common = _common(padded, own)
    filled[common] = own[common]
    return same(padded, filled)


def _common(a: Tensor, b: Tensor) -> tuple[slice, ...]:
    """The places that both tensors have."""
    return tuple(slice(0, min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))


def refuse_padding(trace: Trace, view: Replay, mean_of_rows: bool = False) -> None:
    """Refuse a loss that changes with the length that the batch is padded to."""
    for example in padded_examples(trace.leaves):
        padded = gradients_of(trace, replace(view, examples=[example]))
        if mean_of_rows:
            # A mean over each example's own rows: what is padded must not be among them.
            cut = [tuple(map(slice, leaf.unpadded[example].shape)) for leaf in trace.leaves]
            shorter = [g if g is None else g[own] for g, own in zip(padded, cut, strict=True)]
            unchanged = _same_gradients(trace, padded, shorter)
        else:
            views = _without_padding(trace.leaves, example, view)
            unchanged = any(_same_without(trace, padded, other) for other in views)
        if not unchanged:
            raise padding_matters("the loss")


def _same_without(trace: Trace, padded: list[Tensor | None], view: Replay) -> bool:
    """Whether gradients are the same without padding, where they can be computed."""
    with suppress(*BROKEN):
        return _same_gradients(trace, padded, gradients_of(trace, view, rows=_unpadded_rows))
    return False


def _same_gradients(trace: Trace, padded: list[Tensor | None], own: list[Tensor | None]) -> bool:
    return all(
        same_gradient(a, b)
        for leaf, a, b in zip(trace.leaves, padded, own, strict=True)
        if isinstance(leaf, Output) and a is not None and b is not None
    )
