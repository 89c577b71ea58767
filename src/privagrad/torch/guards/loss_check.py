"""Whether an example's gradient of a loss depends on other examples of the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from privagrad.torch.guards.determinism import random_state_kept
from privagrad.torch.guards.means import mean_of_own_means
from privagrad.torch.guards.padding import (
    padded_examples,
    same_gradient,
    unpadded_rows,
    without_padding,
)
from privagrad.torch.guards.random_functions import Deterministic
from privagrad.torch.guards.refusals import ADVICE, BROKEN, UnverifiedError, padding_matters
from privagrad.torch.guards.replay import Replay, batch_factors, example_sizes
from privagrad.torch.guards.separation import (
    EXAMPLES,
    alone_gradients,
    constant_layouts,
    depends_on_others,
    gradients_of,
    mixing_in,
)
from privagrad.torch.guards.trace import (
    Leaf,
    Output,
    SeparateLoss,
    Trace,
    TraceNode,
    history,
    keeps_rows,
)

ExpectedGradients = list[tuple[Output, int, Tensor]]
"""An output of the module, an example, and the gradient of its own loss in that output."""

_SCALED = ({"multiple"}, {"inverse"}, {"multiple", "inverse"})
"""Numbers that may stand for the size of the batch."""


class LossCheck:
    """Runs traces of losses again, for some examples alone and with others beside them."""

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction
        self._factors: dict[tuple[int, float], int] = {}

    def expected_gradients(self, trace: Trace) -> list[ExpectedGradients]:
        """Refuse a loss in which an example's gradient depends on other examples.

        Returns the gradients of some examples alone; more than one list of them where constants of
        the loss can be read in several ways.
        """
        count = trace.n_examples
        expected: list[ExpectedGradients] = []
        problem: Exception | None = None
        examples = sorted(random.Random().sample(range(count), min(count, EXAMPLES)))
        with Deterministic(), random_state_kept():
            for view in self._views(trace, examples):
                try:
                    if _is_mean_of_rows(trace):
                        _refuse_padding(trace, view, mean_of_rows=True)
                        few = replace(view, examples=examples[::2])
                        expected.append(alone_gradients(trace, few))
                        continue
                    found = mixing_in(trace, view, self.reduction)
                    if not found:
                        _refuse_padding(trace, view)
                        return [alone_gradients(trace, view)]
                except UnverifiedError as error:
                    problem = error
                    continue
                except BROKEN as error:
                    problem = problem or error
                    continue
                problem = problem if isinstance(problem, UnverifiedError) else _mixing(found)
        if expected:
            return expected
        if isinstance(problem, UnverifiedError):
            raise problem
        raise UnverifiedError(
            "Expected a loss that is a sum or a mean over examples and can be computed for some "
            f"of them alone, found one that cannot: {type(problem).__name__}: {problem}. {ADVICE}"
        ) from problem

    def _views(self, trace: Trace, examples: list[int]) -> Iterator[Replay]:
        """The ways in which constants may belong to the examples, the likeliest first."""
        count, scales = trace.n_examples, [frozenset[str]()]
        if self._may_stand_for_the_batch(trace):
            scales += [frozenset(kinds) for kinds in _SCALED]
        for axes in constant_layouts(trace, count):
            for scaled in scales:
                yield Replay(count, examples, axes, scaled)

    def _may_stand_for_the_batch(self, trace: Trace) -> bool:
        """Whether numbers that scale the loss can be the number of examples, or of their numbers.

        A number that stays as it is when the number of examples changes is not.
        """
        count = trace.n_examples
        factors = batch_factors(trace, count)
        sizes = example_sizes(trace.leaves)
        if any(value / count not in sizes for _, value in factors):
            return False
        return all(self._factors.setdefault(factor, count) == count for factor in factors)


def refuse_moving_rows(
    nodes: list[TraceNode], where: str, rows_may_be_chosen: bool = False
) -> None:
    """Refuse values whose rows for some examples change with other examples."""
    for node in nodes:
        mixed = depends_on_others(node, rows_may_be_chosen)
        if mixed is None:
            raise UnverifiedError(
                f"Expected {where} to be computed from values that can be computed for some "
                f"examples alone, found one of {node.name}() that cannot. {ADVICE}"
            )
        if mixed:
            raise UnverifiedError(
                f"Expected {where} to keep examples apart, found in it a value of "
                f"{node.name}() that depends on several examples of the batch (a count, a "
                "normaliser, a mixture, another order): the gradient of an example would "
                f"change with the others. {ADVICE}"
            )


def _refuse_padding(trace: Trace, view: Replay, mean_of_rows: bool = False) -> None:
    """Refuse a loss that changes with the length that the batch is padded to."""
    for example in padded_examples(trace.leaves):
        padded = gradients_of(trace, replace(view, examples=[example]))
        if mean_of_rows:
            # A mean over each example's own rows: what is padded must not be among them.
            cut = [tuple(map(slice, leaf.unpadded[example].shape)) for leaf in trace.leaves]
            shorter = [g if g is None else g[own] for g, own in zip(padded, cut, strict=True)]
            same = _same_gradients(trace, padded, shorter)
        else:
            views = without_padding(trace.leaves, example, view)
            same = any(_same_without(trace, padded, other) for other in views)
        if not same:
            raise padding_matters("the loss")


def _same_without(trace: Trace, padded: list[Tensor | None], view: Replay) -> bool:
    """Whether gradients are the same without padding, where they can be computed."""
    with suppress(*BROKEN):
        return _same_gradients(trace, padded, gradients_of(trace, view, rows=unpadded_rows))
    return False


def _same_gradients(trace: Trace, padded: list[Tensor | None], own: list[Tensor | None]) -> bool:
    return all(
        same_gradient(a, b)
        for leaf, a, b in zip(trace.leaves, padded, own, strict=True)
        if isinstance(leaf, Output) and a is not None and b is not None
    )


def _mixing(reason: str) -> UnverifiedError:
    return UnverifiedError(
        f"Expected a loss that is a sum or a mean over examples, found one in which {reason}: no "
        f"bound on one example's influence would hold. {ADVICE}"
    )


def _is_mean_of_rows(trace: Trace) -> bool:
    """Whether the loss is PyTorch's cross-entropy of the rows of one output: nothing to check."""
    last = trace[-1]
    if isinstance(last, SeparateLoss):
        return True
    return (
        not isinstance(last, Leaf)
        and last.made[0] is mean_of_own_means
        and all(isinstance(s, Leaf) or keeps_rows(s) for s in history(last.sources[0]))
    )
