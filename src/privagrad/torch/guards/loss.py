"""The loss is held to its definition: that of each example alone, and a mean or sum of these.

The engine does not see the criterion. So the batch that the data loader draws and the outputs of
the private module are traced tensors; before a backward pass the trace of the loss is run again, on
a few examples, on each of them alone, and with other examples beside them.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from privagrad.torch.guards.determinism import (
    RANDOM_FUNCTIONS,
    Deterministic,
    random_state_kept,
)
from privagrad.torch.guards.means import mean_of_own_means
from privagrad.torch.guards.numbers import BatchFloat, BatchInteger, PublicNumber
from privagrad.torch.guards.owners import owners_of
from privagrad.torch.guards.padding import (
    padded_examples,
    same_gradient,
    unpadded_rows,
    without_padding,
)
from privagrad.torch.guards.separation import (
    BROKEN,
    EXAMPLES,
    alone_gradients,
    close_gradients,
    constant_layouts,
    depends_on_others,
    gradients_of,
    mixing_in,
)
from privagrad.torch.guards.structure import map_tensors, tensors_of
from privagrad.torch.guards.trace import (
    SHAPES,
    FromBatch,
    Leaf,
    Output,
    Owners,
    Replay,
    SeparateLoss,
    TraceNode,
    batch_factors,
    digest,
    example_sizes,
    history,
    keeps_rows,
    row_layouts,
    rows_stay_whole,
    signature,
)
from privagrad.torch.guards.traced import TracedTensor, node_of
from privagrad.torch.guards.verification import UnverifiedError, padding_matters
from privagrad.torch.layout import Layout, count_examples
from privagrad.torch.tape import ForwardPass, Tape

_USUAL = (0, 1, -1, 2, -100)
_ADVICE = (
    "Compute the loss of each example by itself and take the mean or the sum; or hand over the "
    "criterion, which is then evaluated example by example: see PerExampleLoss."
)


class LossGuard:
    """Follows the batch and the outputs of one private module to the loss."""

    def __init__(self, tape: Tape, verify: bool = True, reduction: str = "mean") -> None:
        self.tape, self.verify, self.reduction = tape, verify, reduction
        self.checks = 0
        self._losses: dict[int, int] = {}
        self._constants: dict[int, dict[Any, None]] = {}
        self._rows_read = self._reads = self._ever_read = False
        self._of_outputs: list[TraceNode] = []
        self._of_batch: list[TraceNode] = []
        self._numbers: dict[float, TraceNode] = {}
        self._lost: list[weakref.ref[Tensor]] = []
        self._owners: dict[tuple[int, int], Owners] = {}
        self._batch_is_known = False
        self._number = 0
        self._batch_of_inputs: int | None = None
        self._scales: dict[tuple[int, float], int] = {}
        self.other_batch: Callable[[], None] = lambda: None

    def __deepcopy__(self, memo: Any) -> LossGuard:
        return LossGuard(Tape({}), False)

    def batch(self, batch: Any, count: int, alone: dict[int, list[Tensor]] | None = None) -> Any:
        """The tensors of a batch of `count` examples, traced.

        `alone` are those of some examples that are padded, by their places, collated alone.
        """
        for node in self._of_batch:
            node.forget()
        self._of_batch.clear()
        self._numbers.clear()
        self._rows_read = self._reads = False
        self._number += 1
        number = self._number
        if not self.verify:
            return batch
        places = itertools.count()

        def traced(tensor: Tensor) -> Tensor:
            layout = next(row_layouts(tensor.shape, count), None) if count else Layout(0)
            node, place = FromBatch(tensor, count, layout, number), next(places)
            node.unpadded = {e: own[place].to(tensor) for e, own in (alone or {}).items()}
            return TracedTensor.of(tensor, node, self)

        return map_tensors(traced, batch)

    def outputs(
        self, outputs: Any, current: ForwardPass, alone: dict[int, list[Tensor]] | None = None
    ) -> Any:
        """The module's outputs, traced; `alone` are those of some examples without padding."""
        places = itertools.count()
        losses = [loss for loss, _ in current.losses]

        def traced(tensor: Tensor) -> Tensor:
            place = next(places)
            values = tensor.detach()
            if any(tensor is loss for loss in losses):
                node: Leaf = SeparateLoss(values, current.count)
            else:
                layout = current.layouts.get(("output", place), Layout(0))
                if tensor.dim() == 0 or (layout and not _fits(tensor, layout, current.count)):
                    layout = None
                node = Output(values, current.count, layout, tensor.requires_grad)
                node.batch = self._batch_of_inputs
                node.unpadded = {e: own[place] for e, own in (alone or {}).items()}
                if tensor.requires_grad:
                    tensor = _Receipt.apply(tensor, node)
            return TracedTensor.of(tensor, node, self)

        return map_tensors(traced, outputs)

    def side_outputs(self, inputs: Any, outputs: Any, batch_first: bool) -> Any:
        """Outputs of a pass that is not trained on, which hold something of the batch as well."""
        known = [t for t in tensors_of(inputs) if isinstance(t, TracedTensor)]
        if not known or not self.verify:
            return outputs
        self.check_rows(known)
        count = count_examples(inputs, batch_first)

        def traced(tensor: Tensor) -> Tensor:
            layout = next(row_layouts(tensor.shape, count), None) if count else Layout(0)
            return TracedTensor.of(tensor, FromBatch(tensor, count, layout, self._number), self)

        return map_tensors(traced, outputs)

    def separate_loss(self, loss: Tensor, count: int) -> Tensor:
        """A loss that was computed example by example, traced."""
        return TracedTensor.of(loss, SeparateLoss(loss.detach(), count), self)

    def node(self, made: Any, place: int, written: bool, graded: bool) -> TraceNode:
        """A new node, which lives as long as the batch it was computed from."""
        node = TraceNode(made, place, written, graded)
        node.after_read = self._reads
        if any(source.stale for source in node.sources):
            node.forget()
        else:
            (self._of_outputs if node.of_outputs else self._of_batch).append(node)
        return node

    def escaped(self, number: Any, node: TraceNode | None) -> None:
        """A number of the batch that Python knows now."""
        self.read(node)
        if isinstance(number, int | float) and not isinstance(number, bool) and node is not None:
            self._numbers[float(number)] = node

    def read(self, node: TraceNode | None) -> None:
        """Numbers computed from the batch have gone where they cannot be followed.

        Rows that are looked at as they were drawn may come back as inputs of the module.
        """
        self._rows_read = True
        self._reads = self._reads or not isinstance(node, Leaf)
        self._ever_read = self._ever_read or self._reads

    def lost(self, tensor: Tensor) -> None:
        """A tensor into which something of the batch was written."""
        self._lost = [old for old in self._lost if old() is not None]
        self._lost.append(weakref.ref(tensor))

    def changed_elsewhere(self) -> TraceNode:
        """What a tensor holds that was changed in place through another view of its memory."""
        node = self.node((), 0, False, True)
        node.forget()
        return node

    def step_done(self) -> None:
        """A step has been made: what was computed from its outputs is of an earlier model."""
        for node in self._of_outputs:
            node.forget()
        self._of_outputs.clear()

    def owners(self, node: TraceNode, table: Tensor) -> Owners | None:
        """Of which example each row of `table` (rows, classes, ...) is; None if it is unclear."""
        steps = history(node)
        leaves = [step for step in steps if isinstance(step, Output)]
        if len(leaves) != 1 or leaves[0].layout is None:
            return None
        leaf, layout = leaves[0], leaves[0].layout
        if rows_stay_whole(node, table.shape):
            numbers = layout.numbers(leaf.values.shape[:-1], leaf.count).reshape(-1)
            return Owners(numbers.to(table.device), leaf.count)
        # Masks change with the batch, and with them the rows.
        fixed = not any(isinstance(s, FromBatch) for s in steps) and not any(
            isinstance(c, Tensor) for s in steps for c in s.constants
        )
        key = (signature(steps, leaf.count), leaf.count)
        if not fixed or key not in self._owners:
            found = owners_of(steps, leaf)
            if found is None:
                return None
            self._owners[key] = Owners(found, leaf.count)
        return self._owners[key] if fixed else self._owners.pop(key)

    @contextmanager
    def backward_of(self, loss: TracedTensor) -> Iterator[None]:
        """The backward pass of a loss, which has been checked."""
        self._expected: list[list[tuple[Output, int, Tensor]]] = []
        with torch._C.DisableTorchFunctionSubclass():
            if self.verify:
                self._check(loss)
            steps = history(loss.node)
            if any(isinstance(s, SeparateLoss) or s.name in RANDOM_FUNCTIONS for s in steps):
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
        self._batch_of_inputs = None
        self._batch_is_known = any(isinstance(t, TracedTensor) for t in tensors_of(inputs))
        if self.verify:
            _refuse_several_batches(tensors_of(inputs), "inputs of the module")
        for place, tensor in enumerate(tensors_of(inputs)):
            node = node_of(tensor)
            steps = history(node)
            numbers = {s.number for s in steps if isinstance(s, FromBatch)}
            self._batch_of_inputs = max(numbers, default=self._batch_of_inputs or 0) or None
            if numbers - {self._number}:
                self.other_batch()
            # The first input has the rows; others may be zeros to begin with.
            if self.verify and node is None and (self._rows_read if place == 0 else self._reads):
                raise UnverifiedError(
                    "Expected inputs of the module that can be followed from the data loader, "
                    "found a tensor that may hold numbers read from the batch (numpy(), item()). "
                    "Prepare rows one by one, in the data set."
                )
            if not self.verify or node is None or isinstance(node, FromBatch):
                continue
            self._refuse_unknown(steps)
            self._if_due(steps, self._check_input)

    def check_state(self, module: nn.Module) -> None:
        """Refuse a module into which the loop has put something of a batch."""
        if not self.verify:
            return
        for name, part in module.named_modules():
            kept = [*part._buffers.items(), *part._parameters.items(), *vars(part).items()]
            for own, value in kept:
                inner = tree_leaves(value) if isinstance(value, list | tuple | dict) else [value]
                if any(isinstance(x, TracedTensor) or self._was_written(x) for x in inner):
                    raise UnverifiedError(
                        "Expected a module that holds nothing of the batches, found something "
                        f"computed from one in {f'{name}.{own}'.strip('.')}: it would be used, and "
                        "released with the module, unprotected. Give it to the module as an input."
                    )

    def _was_written(self, value: Any) -> bool:
        return isinstance(value, Tensor) and any(_same_memory(value, t()) for t in self._lost)

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
        # Passes of different sizes are refused in the backward pass.
        if len(counts) == 1 and counts != {1}:
            self._if_due(steps, self._check_trace)

    def _if_due(self, steps: list[TraceNode], check: Any) -> None:
        """At steps 1, 2, 4, 8, ... of the same trace; a new one is always due."""
        count = max(1, *(s.count for s in steps if isinstance(s, Leaf)))
        structure = signature(steps, count, constants=False)
        key = signature(steps, count, rows=self._batch_is_known)
        seen = self._losses.get(key, 0) + 1
        known = self._constants.setdefault(structure, {})
        if known and self._ever_read:
            self._refuse_doubtful(steps, known, count)
        known.update(dict.fromkeys(digest(c) for s in steps for c in ("", *s.constants)))
        if not seen & (seen - 1):
            self.checks += 1
            check(steps)
        self._losses[key] = seen

    def _refuse_doubtful(self, steps: list[TraceNode], known: dict[Any, None], count: int) -> None:
        """Refuse constants that have changed, after numbers of a batch had been read.

        Numbers may have been kept from an earlier batch; the sizes of this one are its own.
        """
        sizes = example_sizes([s for s in steps if isinstance(s, Leaf)])
        sizes |= {count * size for size in sizes}
        for step in steps:
            for value in step.constants:
                if step.name in SHAPES or isinstance(value, nn.Parameter | PublicNumber):
                    continue
                if isinstance(value, Tensor):
                    doubtful = step.after_read or value.numel() == 1
                else:
                    doubtful = isinstance(value, int | float) and value not in _USUAL
                    doubtful = doubtful and not {value, 1 / value} & sizes
                if doubtful and digest(value) not in known:
                    raise UnverifiedError(
                        "Expected a loss with the same constants as before, found that "
                        f"{step.name}() has another one, after numbers computed from a batch were "
                        "read (item(), float(), numpy(), len() of chosen rows): it may be computed "
                        "from them. If it is known without the data (a schedule), say "
                        f"privagrad.torch.public(number). {_ADVICE}"
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
                if self._was_written(constant):
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
                        few = replace(view, examples=examples[::2])
                        self._expected.append(alone_gradients(steps, leaves, few))
                        self._refuse_padding(steps, leaves, view, mean_of_rows=True)
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
            own = padded
            if not mean_of_rows:
                shorter = without_padding(leaves, example, view)
                try:
                    own = gradients_of(steps, leaves, shorter, rows=unpadded_rows)
                except BROKEN as error:
                    raise padding_matters("the loss") from error
            for leaf, a, b in zip(leaves, padded, own, strict=True):
                if isinstance(leaf, Output) and a is not None and b is not None:
                    short = unpadded_rows(leaf, replace(view, examples=[example]))
                    cut = tuple(slice(0, n) for n in short.shape)
                    if not same_gradient(a, b[cut]):
                        raise padding_matters("the loss")

    def _views(
        self, steps: list[TraceNode], leaves: list[Leaf], count: int, examples: list[int]
    ) -> Iterator[Replay]:
        """The ways in which constants may belong to the examples, the likeliest first."""
        scales = (False, True) if self._may_stand_for_the_batch(steps, leaves, count) else (False,)
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


class _Receipt(torch.autograd.Function):
    """The identity, which keeps the gradient of an output where it is wanted."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, node: Output) -> Tensor:
        ctx.node = node
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.node.wanted:
            ctx.node.received = gradient.detach()
        return gradient, None


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


def _same_memory(a: Tensor, b: Tensor | None) -> bool:
    if b is None or not a.numel():
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _fits(tensor: Tensor, layout: Layout, count: int) -> bool:
    return tensor.dim() > layout.axis and (not count or tensor.shape[layout.axis] % count == 0)


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
