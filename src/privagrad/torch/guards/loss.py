"""The loss is held to its definition: that of each example alone, and a mean or sum of these.

The engine does not see the criterion. So the batch that the data loader draws and the outputs of
the private module are traced tensors; before a backward pass the trace of the loss is run again, on
a few examples, on each of them alone, and with other examples beside them.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from privagrad.torch.guards.determinism import (
    Deterministic,
    is_random,
    random_state_kept,
)
from privagrad.torch.guards.following import Following
from privagrad.torch.guards.means import mean_of_own_means
from privagrad.torch.guards.numbers import BatchFloat, BatchInteger, PublicNumber
from privagrad.torch.guards.padding import (
    padded_examples,
    same_gradient,
    unpadded_rows,
    without_padding,
)
from privagrad.torch.guards.refusals import BROKEN, UnverifiedError, padding_matters
from privagrad.torch.guards.separation import (
    EXAMPLES,
    alone_gradients,
    close_gradients,
    constant_layouts,
    depends_on_others,
    gradients_of,
    mixing_in,
)
from privagrad.torch.guards.structure import tensors_of
from privagrad.torch.guards.trace import (
    SHAPES,
    FromBatch,
    Leaf,
    Output,
    Replay,
    SeparateLoss,
    TraceNode,
    batch_factors,
    digest,
    example_sizes,
    history,
    keeps_rows,
    row_layouts,
    signature,
)
from privagrad.torch.guards.traced import TracedTensor, node_of
from privagrad.torch.per_example.tape import Tape

_USUAL = (0, 1, -1, 2, -100)
_SMALL = 4096
_OF_BATCH = (TracedTensor, BatchFloat, BatchInteger)
SCALED = ({"multiple"}, {"inverse"}, {"multiple", "inverse"})
"""Numbers that may stand for the size of the batch."""
_ADVICE = (
    "Compute the loss of each example by itself and take the mean or the sum; or hand over the "
    "criterion, which is then evaluated example by example: see PerExampleLoss."
)


class LossGuard(Following):
    """Follows the batch and the outputs of one private module to the loss."""

    def __init__(self, tape: Tape, verify: bool = True) -> None:
        super().__init__(verify)
        self.tape, self.reduction = tape, tape.loss_reduction
        self.checks = 0
        self._losses: dict[int, int] = {}
        self._structures: set[int] = set()
        self._public: set[Any] = set()
        self._batch_is_known = False
        self._scales: dict[tuple[int, float], int] = {}
        self.other_batch: Callable[[], None] = lambda: None

    def __deepcopy__(self, memo: Any) -> LossGuard:
        return LossGuard(Tape({}), False)

    @contextmanager
    def backward_of(self, loss: TracedTensor) -> Iterator[None]:
        """The backward pass of a loss, which has been checked."""
        self._expected: list[list[tuple[Output, int, Tensor]]] = []
        with torch._C.DisableTorchFunctionSubclass():
            if self.verify:
                self._check(loss)
            steps = history(loss.node)
            if any(isinstance(s, SeparateLoss) or is_random(s.name, s.constants) for s in steps):
                # Gradients of that loss arrive at the outputs too; random ones are others.
                self._expected.clear()
            # Let go of everything the loss was computed from.
            self.step_done()
        for leaf, _, _ in itertools.chain(*self._expected):
            leaf.wanted, leaf.received = True, None
        self.tape.loss_seen = True
        try:
            yield
        finally:
            self.tape.loss_seen = False
        self._refuse_other_gradients()

    def _refuse_other_gradients(self) -> None:
        """Refuse a backward pass that has brought the outputs other gradients than the loss has."""
        factor = self.reduction == "mean"
        for candidate in self._expected:
            if all(
                leaf.layout is not None
                and close_gradients(
                    leaf.layout.split(_received(leaf), leaf.count)[example]
                    * (leaf.count if factor else 1),
                    leaf.layout.split(exact, 1)[0],
                )
                for leaf, example, exact in candidate
            ):
                return
        if self._expected:
            self.tape.forget()
            self._losses.clear()
            raise UnverifiedError(
                "Expected the gradient of each example's outputs to be that of the example's own "
                "loss, found others (a hook that changes gradients, a backward() of one's own, "
                f"backward(gradient=...)). {_ADVICE}"
            )

    def check_inputs(self, inputs: Any) -> None:
        """Refuse inputs of the module whose rows hold something of other examples of the batch."""
        tensors = tensors_of(inputs)
        nodes = [node_of(tensor) for tensor in tensors]
        steps = [history(node) for node in nodes]
        numbers = {s.number for own in steps for s in own if isinstance(s, FromBatch)}
        self._batch_is_known = any(isinstance(t, TracedTensor) for t in tensors)
        self._batch_of_inputs = max(numbers, default=None)
        foreign = self._number and tensors and nodes[0] is None
        if numbers - {self._number} or foreign:
            self.other_batch()
        if not self.verify:
            return
        _refuse_several_batches(tensors, "inputs of the module")
        for place, (tensor, node) in enumerate(zip(tensors, nodes, strict=True)):
            if node is None:
                self._refuse_unknown_input(tensor, first=place == 0)
            elif not isinstance(node, FromBatch):
                self._refuse_unknown(steps[place])
                self._if_due(steps[place], self._check_input)

    def _refuse_unknown_input(self, tensor: Tensor, first: bool) -> None:
        """Refuse an input that may hold numbers read from the batch.

        The first input has the rows; others may be zeros to begin with, or masks.
        """
        if self._reads and (first or not self._is_known(tensor)):
            raise UnverifiedError(
                "Expected inputs of the module that can be followed from the data loader, found a "
                f"tensor of shape {tuple(tensor.shape)} that may hold numbers read from the batch "
                "(numpy(), tolist(), item()). Prepare rows one by one, in the data set or in "
                "collate_fn."
            )
        if not (first or self._ever_read):
            self._public.add(digest(tensor))

    def _is_known(self, tensor: Tensor) -> bool:
        """Whether a tensor holds classes, or one number everywhere, or was seen before any read."""
        if not tensor.is_floating_point() or not tensor.numel():
            return True
        return digest(tensor) in self._public or bool((tensor == tensor.flatten()[0]).all())

    def check_state(self, module: nn.Module) -> None:
        """Refuse a module into which the loop has put something of a batch."""
        if not self.verify:
            return
        for name, part in module.named_modules():
            kept = [*part._buffers.items(), *part._parameters.items(), *vars(part).items()]
            for own, value in kept:
                inner = tree_leaves(list(value) if isinstance(value, deque) else value)
                if any(isinstance(x, _OF_BATCH) or self.was_written(x) for x in inner):
                    raise UnverifiedError(
                        "Expected a module that holds nothing of the batches, found something "
                        f"computed from one in {f'{name}.{own}'.strip('.')}: it would be used, and "
                        "released with the module, unprotected. Give it to the module as an input."
                    )

    def check_rows(self, tensors: list[TracedTensor]) -> None:
        """Refuse values for a criterion whose rows hold something of other examples."""
        if not self.verify:
            return
        _refuse_several_batches(tensors, "values for a criterion")
        for tensor in tensors:
            steps = history(node_of(tensor))
            self._refuse_unknown(steps)
            if not isinstance(steps[-1], Leaf):
                self._if_due(steps, self._check_input)

    def _check_input(self, steps: list[TraceNode]) -> None:
        self._refuse_moving_rows(steps[-1:], "an input of the module")

    def _check(self, loss: TracedTensor) -> None:
        steps = history(node_of(loss))
        self._refuse_unknown(steps)
        counts = {s.count for s in steps if isinstance(s, Output | SeparateLoss)}
        if counts == {0}:
            return
        _refuse_several_batches([loss], "a loss")
        if not counts or loss.node is None:
            raise UnverifiedError(
                "Expected a loss of outputs of the private module in training mode, found none. "
                f"{_ADVICE}"
            )
        if loss.numel() != 1:
            raise UnverifiedError(
                f"Expected a loss that is one number, found shape {tuple(loss.shape)}. {_ADVICE}"
            )
        # Passes of different sizes are refused in the backward pass; one example is alone.
        if len(counts) == 1:
            self._if_due(steps, self._check_trace if counts != {1} else lambda _: None)

    def _if_due(self, steps: list[TraceNode], check: Any) -> None:
        """At steps 1, 2, 4, 8, ... of the same trace; a new one is always due."""
        count = max(1, *(s.count for s in steps if isinstance(s, Leaf)))
        key = signature(steps, count, rows=self._batch_is_known)
        seen = self._losses.get(key, 0) + 1
        constants = [(step, value) for step in steps for value in step.constants]
        structure = signature(steps, count, constants=False)
        # Constants of a new computation are taken as they are, unless the batch has just been
        # written elsewhere.
        if structure not in self._structures:
            doubtful = [(step, value) for step, value in constants if step.after_write]
        else:
            doubtful = constants if self._ever_read else []
        self._refuse_doubtful(steps, doubtful, count)
        self._structures.add(structure)
        # A small tensor may have as many rows as there are examples by chance.
        self._public.update(
            digest(v) for _, v in constants if not _has_rows(v, count) or v.numel() <= _SMALL
        )
        if not seen & (seen - 1):
            self.checks += 1
            check(steps)
        self._losses[key] = seen

    def _refuse_doubtful(
        self, steps: list[TraceNode], constants: list[tuple[TraceNode, Any]], count: int
    ) -> None:
        """Refuse constants that are new after numbers of a batch were read.

        Numbers may have been kept from an earlier batch. The sizes of this one are its own.
        """
        sizes = example_sizes([s for s in steps if isinstance(s, Leaf)])
        sizes |= {count * size for size in sizes}
        for step, value in constants:
            if step.name in SHAPES or isinstance(value, nn.Parameter | PublicNumber):
                continue
            if isinstance(value, Tensor):
                doubtful = value.is_floating_point()
                if _has_rows(value, count):
                    # Rows are new in every batch.
                    doubtful = doubtful and step.after_read
            else:
                doubtful = isinstance(value, int | float) and value not in _USUAL
                doubtful = doubtful and not {value, 1 / value} & sizes
            if doubtful and digest(value) not in self._public:
                raise UnverifiedError(
                    "Expected a loss with the same constants as before, found that "
                    f"{step.name}() has another one, after numbers of a batch were read or written "
                    "elsewhere (item(), float(), numpy(), len() of chosen rows, operations in "
                    "place): it may be computed from them. If it is known without the data (a "
                    f"schedule), say privagrad.torch.public(number). {_ADVICE}"
                )

    def _refuse_unknown(self, steps: list[TraceNode]) -> None:
        """Refuse what cannot be run again for some examples alone."""
        for step in steps:
            if step.stale:
                raise UnverifiedError(
                    "Expected a loss of this batch alone, found in it something computed from an "
                    "earlier batch or step, which is not protected, or changed in place through a "
                    f"view of it. {_ADVICE}"
                )
            if isinstance(step, Output) and step.layout is None:
                raise UnverifiedError(
                    "Expected outputs of the module that have the examples in one dimension, found "
                    f"one of shape {tuple(step.values.shape)} in the loss: whether a module that "
                    "returns its own loss keeps examples apart cannot be seen. Return the outputs "
                    f"and compute the loss from them. {_ADVICE}"
                )
            if isinstance(step, FromBatch) and step.layout is None:
                raise UnverifiedError(
                    f"Expected tensors of the batch with one row for each of {step.count} "
                    f"examples, found shape {tuple(step.values.shape)} in the loss. {_ADVICE}"
                )
            for constant in step.constants:
                if isinstance(constant, BatchFloat | BatchInteger) and step.name not in SHAPES:
                    raise UnverifiedError(
                        f"Expected a loss of tensors, found in it the number {constant}, which was "
                        f"taken from the batch (item(), tolist()). {_ADVICE}"
                    )
                if not isinstance(constant, Tensor):
                    continue
                if constant.grad_fn is not None:
                    raise UnverifiedError(
                        "Expected a loss of the module's outputs, found in it a tensor with a "
                        "gradient that is not computed from them (an attribute of the module, a "
                        "penalty on its parameters): its examples cannot be told apart. Return it "
                        "from the module, row by row; leave penalties to the optimizer's "
                        f"weight_decay. {_ADVICE}"
                    )
                if not self._batch_is_known and constant.numel() == 1 and float(constant) != 0:
                    raise UnverifiedError(
                        "Expected single numbers in the loss whose origin is known, found a tensor "
                        "that may have been computed from the batch (a count, a normaliser). Take "
                        "batches from the data loader that make_private returned, so that the "
                        f"engine can follow them, or make it a Python number. {_ADVICE}"
                    )
                if self.was_written(constant):
                    raise UnverifiedError(
                        "Expected tensors that are computed from the batch by functions, found one "
                        f"into which parts of it were written in place. {_ADVICE}"
                    )

    def _check_trace(self, steps: list[TraceNode]) -> None:
        """Refuse a loss in which an example's gradient depends on other examples."""
        leaves = [s for s in steps if isinstance(s, Leaf)]
        self._refuse_moving_rows(_sides(steps), "the loss", rows_may_be_chosen=True)
        self._refuse_numbers(steps)
        count = max(leaf.count for leaf in leaves)
        problem: Exception | None = None
        examples = sorted(random.Random().sample(range(count), min(count, EXAMPLES)))
        with Deterministic(), random_state_kept():
            for view in self._views(steps, leaves, count, examples):
                try:
                    if _is_mean_of_rows(steps):
                        self._refuse_padding(steps, leaves, view, mean_of_rows=True)
                        few = replace(view, examples=examples[::2])
                        self._expected.append(alone_gradients(steps, leaves, few))
                        continue
                    found = mixing_in(steps, leaves, view, self.reduction)
                    if not found:
                        self._refuse_padding(steps, leaves, view)
                        self._expected.append(alone_gradients(steps, leaves, view))
                        return
                except UnverifiedError as error:
                    problem = error
                    continue
                except BROKEN as error:
                    problem = problem or error
                    continue
                problem = problem if isinstance(problem, UnverifiedError) else _mixing(found)
        if self._expected:
            return
        if isinstance(problem, UnverifiedError):
            raise problem
        raise UnverifiedError(
            "Expected a loss that is a sum or a mean over examples and can be computed for some "
            f"of them alone, found one that cannot: {type(problem).__name__}: {problem}. {_ADVICE}"
        ) from problem

    def _refuse_padding(
        self, steps: list[TraceNode], leaves: list[Leaf], view: Replay, mean_of_rows: bool = False
    ) -> None:
        """Refuse a loss that changes with the length that the batch is padded to."""
        for example in padded_examples(leaves):
            padded = gradients_of(steps, leaves, replace(view, examples=[example]))
            if mean_of_rows:
                # A mean over each example's own rows: what is padded must not be among them.
                cut = [tuple(map(slice, leaf.unpadded[example].shape)) for leaf in leaves]
                shorter = [g if g is None else g[own] for g, own in zip(padded, cut, strict=True)]
                same = _same_gradients(leaves, padded, shorter)
            else:
                views = without_padding(leaves, example, view)
                same = any(_same_without(steps, leaves, padded, other) for other in views)
            if not same:
                raise padding_matters("the loss")

    def _views(
        self, steps: list[TraceNode], leaves: list[Leaf], count: int, examples: list[int]
    ) -> Iterator[Replay]:
        """The ways in which constants may belong to the examples, the likeliest first."""
        scales = [frozenset[str]()]
        if self._may_stand_for_the_batch(steps, leaves, count):
            scales += [frozenset(kinds) for kinds in SCALED]
        for axes in constant_layouts(steps, count):
            for scaled in scales:
                yield Replay(count, examples, axes, scaled)

    def _may_stand_for_the_batch(
        self, steps: list[TraceNode], leaves: list[Leaf], count: int
    ) -> bool:
        """Whether numbers that scale the loss can be the number of examples, or of their numbers.

        A number that stays as it is when the number of examples changes is not.
        """
        factors = batch_factors(steps, count)
        sizes = example_sizes(leaves)
        if any(value / count not in sizes for _, value in factors):
            return False
        return all(self._scales.setdefault(factor, count) == count for factor in factors)

    def _refuse_moving_rows(
        self, nodes: list[TraceNode], where: str, rows_may_be_chosen: bool = False
    ) -> None:
        """Refuse values whose rows for some examples change with other examples."""
        for node in nodes:
            mixed = depends_on_others(node, rows_may_be_chosen)
            if mixed is None:
                raise UnverifiedError(
                    f"Expected {where} to be computed from values that can be computed for some "
                    f"examples alone, found one of {node.name}() that cannot. {_ADVICE}"
                )
            if mixed:
                raise UnverifiedError(
                    f"Expected {where} to keep examples apart, found in it a value of "
                    f"{node.name}() that depends on several examples of the batch (a count, a "
                    "normaliser, a mixture, another order): the gradient of an example would "
                    f"change with the others. {_ADVICE}"
                )

    def _refuse_numbers(self, steps: list[TraceNode]) -> None:
        """Refuse numbers in a loss that Python has taken from the batch."""
        for step in steps:
            for value in step.constants:
                if _telling(value) and (source := self._numbers.get(float(value))) is not None:
                    self._refuse_moving_rows([source], f"a loss with the number {value}")


def _same_without(
    steps: list[TraceNode], leaves: list[Leaf], padded: list[Tensor | None], view: Replay
) -> bool:
    """Whether gradients are the same without padding, where they can be computed."""
    with suppress(*BROKEN):
        return _same_gradients(
            leaves, padded, gradients_of(steps, leaves, view, rows=unpadded_rows)
        )
    return False


def _same_gradients(
    leaves: list[Leaf], padded: list[Tensor | None], own: list[Tensor | None]
) -> bool:
    return all(
        same_gradient(a, b)
        for leaf, a, b in zip(leaves, padded, own, strict=True)
        if isinstance(leaf, Output) and a is not None and b is not None
    )


def _refuse_several_batches(tensors: Sequence[Tensor], what: str) -> None:
    steps = [step for tensor in tensors for step in history(node_of(tensor))]
    batches = {s.batch for s in steps if isinstance(s, Output)}
    batches |= {s.number for s in steps if isinstance(s, FromBatch)}
    if len(batches - {None}) > 1:
        raise UnverifiedError(
            f"Expected {what} of one batch, found several: a row that is in two of them would "
            f"count twice. {_ADVICE}"
        )


def _received(leaf: Output) -> Tensor:
    return torch.zeros_like(leaf.values) if leaf.received is None else leaf.received


def _telling(value: Any) -> bool:
    """Whether a constant is unlikely to equal a number of the batch by chance."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return False
    return abs(value) > 8 if float(value).is_integer() else len(repr(value).strip("0.-")) > 4


def _mixing(reason: str) -> UnverifiedError:
    return UnverifiedError(
        f"Expected a loss that is a sum or a mean over examples, found one in which {reason}: no "
        f"bound on one example's influence would hold. {_ADVICE}"
    )


def _has_rows(value: Any, count: int) -> bool:
    """Whether a constant is a tensor that may have a row for each example."""
    if not isinstance(value, Tensor) or not value.dim():
        return False
    return next(row_layouts(value.shape, count), None) is not None


def _sides(steps: list[TraceNode]) -> list[TraceNode]:
    """Values without gradients that a value with gradients was computed from."""
    sides = {
        id(source): source
        for step in steps
        if step.differentiable
        for source in step.sources
        if not source.differentiable and not isinstance(source, Leaf)
    }
    return list(sides.values())


def _is_mean_of_rows(steps: list[TraceNode]) -> bool:
    """Whether the loss is PyTorch's cross-entropy of the rows of one output: nothing to check."""
    last = steps[-1]
    if isinstance(last, SeparateLoss):
        return True
    return (
        not isinstance(last, Leaf)
        and last.made[0] is mean_of_own_means
        and all(isinstance(s, Leaf) or keeps_rows(s) for s in history(last.sources[0]))
    )
