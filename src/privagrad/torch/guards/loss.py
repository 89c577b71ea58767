"""Losses are verified: they are the mean or the sum of the losses of each example alone.

The engine does not see the criterion. So the batch that the data loader draws and the outputs of
the private module are traced tensors. Before a backward pass the trace of the loss is run again: on
a few examples, on each of them alone, and with other examples beside them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privagrad.torch.guards.batch_tracer import BatchTracer
from privagrad.torch.guards.constants import (
    BatchFloat,
    BatchInteger,
    KnownConstants,
    refuse_unknown_constant,
)
from privagrad.torch.guards.linear_losses import LinearOutput
from privagrad.torch.guards.loss_check import ExpectedGradients, LossCheck, refuse_moving_rows
from privagrad.torch.guards.random_functions import is_random
from privagrad.torch.guards.refusals import ADVICE, UnverifiedError
from privagrad.torch.guards.separation import close_gradients
from privagrad.torch.guards.structure import leaves_of, modules_of, tensors_of
from privagrad.torch.guards.trace import (
    BatchTensor,
    Leaf,
    Output,
    SeparateLoss,
    Trace,
    TraceNode,
    history,
    signature,
)
from privagrad.torch.guards.traced import TracedTensor, node_of
from privagrad.torch.per_example.tape import Tape

_OF_BATCH = (TracedTensor, BatchFloat, BatchInteger)


class LossGuard(BatchTracer):
    """Follows the batch and the outputs of one private module to the loss."""

    def __init__(self, tape: Tape, verify: bool = True) -> None:
        super().__init__(verify)
        self.tape, self.reduction = tape, tape.loss_reduction
        self.checks = 0
        self._seen: dict[int, int] = {}
        self._constants = KnownConstants()
        self._loss_check = LossCheck(tape.loss_reduction)
        self._batch_is_known = False
        self.other_batch: Callable[[], None] = lambda: None

    def __deepcopy__(self, memo: Any) -> LossGuard:
        return LossGuard(Tape({}), False)

    @contextmanager
    def backward_of(self, loss: TracedTensor, whole: bool = True) -> Iterator[None]:
        """The backward pass of a loss, which has been checked; not `whole` for some inputs only."""
        self._expected: list[ExpectedGradients] = []
        with torch._C.DisableTorchFunctionSubclass():
            steps = history(node_of(loss) if self.verify else loss.node)
            if self.verify:
                self._check(loss, steps)
            if any(isinstance(s, SeparateLoss) or is_random(s.name, s.constants) for s in steps):
                # Gradients of that loss arrive at the outputs too; random ones are others.
                self._expected.clear()
            # Let go of everything the loss was computed from.
            self.step_done()
            for step in steps:
                if isinstance(step, Output) and not step.needed:
                    step.let_go()
        for leaf, example, _ in itertools.chain(*self._expected):
            leaf.want(example)
        self.tape.loss_seen, self.tape.whole_backward = True, whole
        try:
            yield
        finally:
            self.tape.loss_seen = self.tape.whole_backward = False
        self._refuse_other_gradients()

    def _refuse_other_gradients(self) -> None:
        """Refuse a backward pass that has brought the outputs other gradients than the loss has."""
        factor = self.reduction == "mean"
        expected, self._expected = self._expected, []
        for candidate in expected:
            if all(
                leaf.layout is not None
                and close_gradients(
                    leaf.received(example) * (leaf.count if factor else 1),
                    leaf.layout.split(exact, 1)[0],
                )
                for leaf, example, exact in candidate
            ):
                return
        if expected:
            self.tape.forget()
            self._seen.clear()
            raise UnverifiedError(
                "Expected the gradient of each example's outputs to be that of the example's own "
                "loss, found others (a hook that changes gradients, a backward() of one's own, "
                f"backward(gradient=...)). {ADVICE}"
            )

    def check_inputs(self, inputs: Any) -> None:
        """Refuse inputs of the module whose rows hold something of other examples of the batch."""
        tensors = tensors_of(inputs)
        nodes = [node_of(tensor) for tensor in tensors]
        steps = [history(node) for node in nodes]
        numbers = {s.number for own in steps for s in own if isinstance(s, BatchTensor)}
        self._batch_is_known = any(isinstance(t, TracedTensor) for t in tensors)
        self._batch_of_inputs = max(numbers, default=None)
        if not self.verify:
            return
        foreign = self._number and tensors and nodes[0] is None
        if numbers - {self._number} or foreign:
            self.other_batch()
        _refuse_several_batches(itertools.chain(*steps), "inputs of the module")
        for place, (tensor, node) in enumerate(zip(tensors, nodes, strict=True)):
            if node is None:
                self._refuse_unknown_input(tensor, first=place == 0)
            elif not isinstance(node, BatchTensor):
                self._refuse_unknown(steps[place])
                self._if_due(steps[place], self._check_input)

    def _refuse_unknown_input(self, tensor: Tensor, first: bool) -> None:
        """Refuse an input that may hold numbers read from the batch.

        The first input has the rows; others may be zeros to begin with, or masks.
        """
        if self._reads and (first or not self._constants.has(tensor)):
            raise UnverifiedError(
                "Expected inputs of the module that can be followed from the data loader, found a "
                f"tensor of shape {tuple(tensor.shape)} that may hold numbers read from the batch "
                "(numpy(), tolist(), item()). Prepare rows one by one, in the data set or in "
                "collate_fn."
            )
        if not (first or self._ever_read):
            self._constants.add(tensor)

    def check_state(self, module: nn.Module) -> None:
        """Refuse a module into which the loop has put something of a batch."""
        if not self.verify:
            return
        for part in modules_of(module):
            kept = vars(part)
            # They are attributes themselves, unless the class keeps them elsewhere.
            tensors = {"_buffers": part._buffers, "_parameters": part._parameters}
            apart = [own for name, own in tensors.items() if own is not kept.get(name)]
            if not self._holds_batch([kept, *apart]):
                continue
            kept = {**kept, **part._buffers, **part._parameters}
            owner = next(name for name, found in module.named_modules() if found is part)
            own = [name for name, value in kept.items() if self._holds_batch(value)][-1]
            raise UnverifiedError(
                "Expected a module that holds nothing of the batches, found something computed "
                f"from one in {f'{owner}.{own}'.strip('.')}: it would be used, and released with "
                "the module, unprotected. Give it to the module as an input."
            )

    def _holds_batch(self, value: Any) -> bool:
        inner = leaves_of(value)
        for leaf in inner:
            if isinstance(leaf, _OF_BATCH):
                return True
        return bool(self._lost) and any(map(self.was_written, inner))

    def watch(self, tensor: Tensor) -> None:
        """Someone looks at the gradient of a tensor, or at its memory."""
        self.tape.watch(tensor)

    def cross_entropy_of(self, logits: Tensor) -> Callable[..., Tensor]:
        """F.cross_entropy, or what does the same for the output of a linear layer."""
        output = LinearOutput.seen_in(logits, self.tape)
        return F.cross_entropy if output is None else output.cross_entropy

    def check_rows(self, tensors: list[TracedTensor]) -> None:
        """Refuse values for a criterion whose rows hold something of other examples."""
        if not self.verify:
            return
        traces = [history(node_of(tensor)) for tensor in tensors]
        _refuse_several_batches(itertools.chain(*traces), "values for a criterion")
        for steps in traces:
            self._refuse_unknown(steps)
            if not isinstance(steps[-1], Leaf):
                self._if_due(steps, self._check_input)

    def _check_input(self, trace: Trace) -> None:
        refuse_moving_rows(trace[-1:], "an input of the module")

    def _check(self, loss: TracedTensor, steps: Trace) -> None:
        self._refuse_unknown(steps)
        counts = {s.count for s in steps if isinstance(s, Output | SeparateLoss)}
        if counts == {0}:
            return
        _refuse_several_batches(steps, "a loss")
        if not counts or loss.node is None:
            raise UnverifiedError(
                "Expected a loss of outputs of the private module in training mode, found none. "
                f"{ADVICE}"
            )
        if loss.numel() != 1:
            raise UnverifiedError(
                f"Expected a loss that is one number, found shape {tuple(loss.shape)}. {ADVICE}"
            )
        # Passes of different sizes are refused in the backward pass; one example is alone.
        if len(counts) == 1:
            self._if_due(steps, self._check_trace if counts != {1} else lambda _: None)

    def _if_due(self, trace: Trace, check: Callable[[Trace], None]) -> None:
        """At steps 1, 2, 4, 8, ... of the same trace; a new one is always due."""
        count = max(1, trace.n_examples)
        key = signature(trace, count, rows=self._batch_is_known)
        seen = self._seen.get(key, 0) + 1
        self._constants.refuse_new(trace, count, self._ever_read)
        if not seen & (seen - 1):
            self.checks += 1
            check(trace)
        self._seen[key] = seen

    def _refuse_unknown(self, trace: Trace) -> None:
        """Refuse what cannot be run again for some examples alone."""
        for step in trace:
            _refuse_unknown_leaf(step)
            for constant in step.constants:
                refuse_unknown_constant(constant, step, self._batch_is_known)
                if self.was_written(constant):
                    raise UnverifiedError(
                        "Expected tensors that are computed from the batch by functions, found one "
                        f"into which parts of it were written in place. {ADVICE}"
                    )

    def _check_trace(self, trace: Trace) -> None:
        """Refuse a loss in which an example's gradient depends on other examples."""
        refuse_moving_rows(_sides(trace), "the loss", rows_may_be_chosen=True)
        for step in trace:
            for value in step.constants:
                # A number in the loss that Python has taken from the batch.
                if _telling(value) and (source := self._numbers.get(float(value))) is not None:
                    refuse_moving_rows([source], f"a loss with the number {value}")
        self._expected += self._loss_check.expected_gradients(trace)


def _refuse_unknown_leaf(step: TraceNode) -> None:
    """Refuse values of an earlier batch, and leaves of which the examples are not known."""
    if step.stale:
        raise UnverifiedError(
            "Expected a loss of this batch alone, found in it something computed from an "
            "earlier batch or step, which is not protected, or changed in place through a "
            f"view of it. {ADVICE}"
        )
    if isinstance(step, Output) and step.layout is None:
        raise UnverifiedError(
            "Expected outputs of the module that have the examples in one dimension, found "
            f"one of shape {tuple(step.values.shape)} in the loss. A module may return its own "
            "loss if it is a sum of PyTorch's cross_entropy, nll_loss, mse_loss, l1_loss, "
            "smooth_l1_loss, huber_loss or binary_cross_entropy with the reduction of "
            "loss_reduction, each times a number. Otherwise whether it keeps examples apart cannot "
            f"be seen: return the outputs, and compute the loss from them. {ADVICE}"
        )
    if isinstance(step, BatchTensor) and step.layout is None:
        raise UnverifiedError(
            f"Expected tensors of the batch with one row for each of {step.count} "
            f"examples, found shape {tuple(step.values.shape)} in the loss. {ADVICE}"
        )


def _refuse_several_batches(steps: Iterable[TraceNode], what: str) -> None:
    batches: set[int | None] = set()
    for step in steps:
        if isinstance(step, Output):
            batches.add(step.batch)
        elif isinstance(step, BatchTensor):
            batches.add(step.number)
    if len(batches - {None}) > 1:
        raise UnverifiedError(
            f"Expected {what} of one batch, found several: a row that is in two of them would "
            f"count twice. {ADVICE}"
        )


def _telling(value: Any) -> bool:
    """Whether a constant is unlikely to equal a number of the batch by chance."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return False
    return abs(value) > 8 if float(value).is_integer() else len(repr(value).strip("0.-")) > 4


def _sides(trace: Trace) -> list[TraceNode]:
    """Values without gradients that a value with gradients was computed from."""
    sides = {
        id(source): source
        for step in trace
        if step.differentiable
        for source in step.sources
        if not source.differentiable and not isinstance(source, Leaf)
    }
    return list(sides.values())
