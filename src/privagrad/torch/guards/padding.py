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
from torch.utils._pytree import tree_unflatten

from privagrad.torch.guards.refusals import BROKEN
from privagrad.torch.guards.replay import Replay, run_again
from privagrad.torch.guards.trace import Leaf, TraceNode, history
from privagrad.torch.guards.traced import node_of, untraced
from privagrad.torch.per_example.layout import Layout, input_leaves, same, take


def padded_examples(steps: Iterable[TraceNode]) -> list[int]:
    """The examples of which values without padding are known."""
    return sorted({e for step in steps if isinstance(step, Leaf) for e in step.unpadded})


def without_padding(leaves: Sequence[Leaf], example: int, view: Replay) -> list[Replay]:
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


def unpadded_rows(leaf: Leaf, view: Replay) -> Tensor:
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
    for view in without_padding(leaves, example, Replay(count, [example])):
        own: list[Any] = []
        with suppress(*BROKEN):
            for trace, alone in zip(traces, single, strict=True):
                if trace:
                    rows = {id(leaf): unpadded_rows(leaf, view) for leaf in trace.leaves}
                    own.append(run_again(trace, rows, view))
                else:
                    own.append(view.shortened(alone) if isinstance(alone, Tensor) else alone)
            yield own


def unpadded_inputs(
    inputs: Any, axes: Sequence[int | None], count: int, example: int
) -> Iterator[Any]:
    """The inputs of a module for one example, computed from its rows without padding."""
    given, structure = input_leaves(inputs)
    single = input_leaves(take(untraced(inputs), axes, [example]))[0]
    for own in unpadded(given, single, count, example):
        yield tree_unflatten(own, structure)


def same_outputs_but_for_padding(
    padded: list[Tensor],
    alone: list[Tensor],
    layouts: Mapping[object, Layout | None],
    count: int,
    example: int,
) -> bool:
    """Whether an example has the same outputs in the batch as alone, where it has both."""
    for place, (several, one) in enumerate(zip(padded, alone, strict=True)):
        layout = layouts.get(("output", place))
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
