"""Whether an example's gradient of a loss depends on other examples of the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from privagrad.torch.guards.determinism import random_state_kept
from privagrad.torch.guards.means import mean_of_own_means
from privagrad.torch.guards.padding import refuse_padding
from privagrad.torch.guards.random_functions import Deterministic
from privagrad.torch.guards.refusals import ADVICE, BROKEN, UnverifiedError
from privagrad.torch.guards.replay import Replay, batch_factors, example_sizes
from privagrad.torch.guards.separation import (
    EXAMPLES,
    alone_gradients,
    constant_layouts,
    depends_on_others,
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
from privagrad.torch.per_example.layout import without_autocast

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
        with Deterministic(), random_state_kept(), without_autocast():
            for view in self._views(trace, examples):
                try:
                    if _is_mean_of_rows(trace):
                        refuse_padding(trace, view, mean_of_rows=True)
                        few = replace(view, examples=examples[::2])
                        expected.append(alone_gradients(trace, few))
                        continue
                    found = mixing_in(trace, view, self.reduction)
                    if not found:
                        refuse_padding(trace, view)
                        return [alone_gradients(trace, view)]
                # Without its traceback, which would keep the values of the trace in memory.
                except UnverifiedError as error:
                    problem = error.with_traceback(None)
                    continue
                except BROKEN as error:
                    problem = problem or error.with_traceback(None)
                    continue
                if not isinstance(problem, UnverifiedError):
                    problem = UnverifiedError(
                        "Expected a loss that is a sum or a mean over examples, found one in which "
                        f"{found}: no bound on one example's influence would hold. {ADVICE}"
                    )
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
                yield Replay(count, examples, axes, scaled, single=True)

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
