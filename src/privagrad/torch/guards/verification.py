"""The per-example gradient has a definition, that of the example alone: modules are held to it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from privagrad.torch.guards.determinism import (
    RunEffects,
    attributes_kept,
    random_state_kept,
    undisturbed,
)
from privagrad.torch.guards.gradients import (
    backward_from,
    differences,
    gradients_alone,
    squares_of,
)
from privagrad.torch.guards.observed import (
    Layouts,
    LearnedLayouts,
    ObservedRun,
    match,
    moving_calls,
    refuse_difference,
)
from privagrad.torch.guards.padding import (
    padded_examples,
    same_but_for_padding,
    unpadded_inputs,
)
from privagrad.torch.guards.random_functions import RandomDraws
from privagrad.torch.guards.recorder import Recorder, public_tensors
from privagrad.torch.guards.refusals import (
    BROKEN,
    UntriedError,
    UnverifiedError,
    padding_matters,
    untried,
)
from privagrad.torch.guards.structure import tensors_of
from privagrad.torch.guards.trace import history
from privagrad.torch.guards.traced import node_of, untraced
from privagrad.torch.per_example.layout import (
    MixedExamplesError,
    ObservedTensor,
    input_leaves,
    possible_axes,
    take,
    with_unusual,
)
from privagrad.torch.per_example.tape import Tape

EXAMPLES = 3
"""How many examples of a batch are verified."""

UNUSUAL = (float("nan"), 1e4, -1.0, 0.0)
"""Values that a module may treat in another way: missing, huge, marked as missing."""


class ModuleGuard:
    """Learns where a module's examples are, and that it treats each of them by itself.

    A few examples are run together, as the engine runs them, and each of them alone, as PyTorch
    does: outputs, gradients and their norms must be the same. That is done at passes 1, 2, 4, 8,
    ... and whenever a pass does something new (see `Recorder`); in training mode, with random
    functions made deterministic.
    """

    def __init__(self, module: nn.Module, tape: Tape, verify: bool = True) -> None:
        self.module, self.tape, self.verify = module, tape, verify
        self.passes = self.verifications = 0
        self.latest: LearnedLayouts | None = None
        self._known: dict[int, LearnedLayouts] = {}
        self._axes: tuple[int | None, ...] | None = None
        self._prepared = False
        self._drawn = RandomDraws()
        self._of_batch: Sequence[bool] = ()
        self.draws_outside_torch = self.unsettled = False

    def prepare(self, inputs: Any, count: int, of_batch: Sequence[bool]) -> Layouts:
        """The layouts that a pass most likely has.

        `of_batch` says which of the inputs are computed from the batch of the data loader.
        """
        self._prepared, self._of_batch = False, of_batch
        if self.latest is None and count > 1:
            try:
                self.latest = self._learn(inputs, count, RandomDraws())
                self._prepared = True
            except UntriedError:
                # If it is the module's own error, it shows on the whole batch too.
                return {}
        return self.latest.layouts if self.latest else {}

    def layouts(self, recorder: Recorder, inputs: Any, count: int, outputs: Any) -> Layouts:
        """The layouts of a pass that has been made, verified where it is due.

        `unsettled` is then whether the pass must be made again, with Python's random numbers kept.
        """
        prepared, self._prepared = self._prepared, False
        drawn = recorder.drawn
        due = not (self.passes + 1) & self.passes or recorder.reads
        known = self.latest if prepared else self._known.get(recorder.signature)
        if known is None or (due and not prepared) or (prepared and drawn.decisive):
            known = self._learn(inputs, count, drawn, thorough=known is None)
        self.unsettled = known.outside_torch and drawn.states is None
        if self.unsettled:
            return known.layouts
        if self.verify:
            known.refuse_moved_rows(recorder)
            if known.alone and (due or recorder.signature not in self._known):
                if known.random:
                    outputs = self._deterministic(inputs, count, known.layouts, drawn)
                known.refuse_other_outputs(outputs, count)
        # The tensors of examples alone are not needed any more.
        self._known[recorder.signature] = replace(known, alone=())
        self.passes += 1
        if count > 1:
            self.latest = self._known[recorder.signature]
        return known.layouts

    def outputs_without_padding(
        self, inputs: Any, count: int, layouts: Layouts, drawn: RandomDraws
    ) -> dict[int, list[Tensor]]:
        """The outputs of examples that are padded, without padding: the same, or refused."""
        steps = [step for t in tensors_of(inputs) for step in history(node_of(t))]
        examples = padded_examples(steps) if self.verify and self._axes and count > 1 else []
        alone: dict[int, list[Tensor]] = {}
        if not examples:
            return alone
        padded = tensors_of(self._deterministic(untraced(inputs), count, layouts, drawn))
        for example in examples:
            for own in unpadded_inputs(inputs, self._axes or (), count, example):
                with suppress(*BROKEN):
                    found = tensors_of(self._deterministic(own, 1, layouts, drawn))
                    if _same_but_for_padding(padded, found, layouts, count, example):
                        alone[example] = found
                        break
            else:
                raise padding_matters("the output")
        return alone

    def _deterministic(self, inputs: Any, count: int, layouts: Layouts, drawn: RandomDraws) -> Any:
        """The outputs of the whole batch, without random numbers or with those of another pass."""
        with self._aside(), torch.no_grad():
            self._drawn = drawn
            with self._undisturbed(), self.tape.passing(count, layouts):
                return self.module(*inputs[0], **inputs[1])

    def _learn(
        self, inputs: Any, count: int, drawn: RandomDraws, thorough: bool = True
    ) -> LearnedLayouts:
        self.verifications += 1
        leaves = input_leaves(inputs)[0]
        guesses = possible_axes(leaves, count, self.tape.batch_first, self._of_batch)
        if self._axes in guesses:
            guesses.insert(0, self._axes)
        self._drawn = drawn
        examples = sorted({0, count - 1, random.Random().randrange(count)})
        if len(examples) < EXAMPLES <= count:
            examples = [0, count // 2, count - 1]
        problem: Exception | None = None
        for axes in dict.fromkeys(guesses):
            try:
                with self._aside():
                    found = self._try(inputs, axes, examples, thorough)
                self._axes = axes
                self.draws_outside_torch |= found.outside_torch
                return found
            except MixedExamplesError as error:
                problem = error if not isinstance(problem, MixedExamplesError) else problem
            except UnverifiedError as error:
                problem = problem or error
            except BROKEN as error:
                problem = problem or untried(error)
        if not self.verify:
            return LearnedLayouts({}, frozenset())
        assert problem is not None
        raise problem

    def _try(
        self, inputs: Any, axes: Sequence[int | None], examples: list[int], thorough: bool
    ) -> LearnedLayouts:
        """Compare some examples together with each alone, as if `axes` were the examples'."""
        together = take(inputs, axes, examples)
        single = [take(inputs, axes, [example]) for example in examples]
        whole = self._observe(together, len(examples))
        alone = [self._observe(one, 1) for one in single]
        if len(examples) == 1:
            found = LearnedLayouts({}, frozenset())
        else:
            seen = tuple(zip(examples, alone, strict=True))
            found = LearnedLayouts(match(whole, alone), moving_calls(whole, alone), seen)
        if self.verify:
            self._refuse_memory([whole, *alone])
            if thorough:
                self._refuse_rare_mixing(single[0], axes, alone[0], found.layouts)
            self._compare(together, single, found.layouts)
        return found

    def _observe(self, inputs: Any, count: int) -> ObservedRun:
        """A pass without gradients; every tensor that goes into a layer or out of the module."""
        tape = self.tape
        observed: list[ObservedTensor] = []
        recorder = Recorder(count, public_tensors(self.module), quiet=False)
        before = versions(inputs)
        with self._undisturbed() as effects, torch.no_grad():
            tape.observed, tape.recorder = observed, recorder
            with tape.passing(count), recorder:
                outputs = self.module(*inputs[0], **inputs[1])
            tape.observed = tape.recorder = None
        refuse_changes(inputs, before)
        for place, leaf in enumerate(tensors_of(outputs)):
            observed.append(
                ObservedTensor(
                    ("output", place), "the module's output", leaf.detach(), leaf.dim(), shared=True
                )
            )
        return ObservedRun(
            observed, effects.written, recorder, effects.random, effects.outside_torch
        )

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Runs that leave no trace in the training: they may come after its own pass."""
        with self.tape.aside(), random_state_kept(), attributes_kept(self.module):
            yield

    def _undisturbed(self) -> AbstractContextManager[RunEffects]:
        return undisturbed(self.module, self._drawn, self.tape.is_inside_layer)

    def _refuse_rare_mixing(
        self, single: Any, axes: Sequence[int | None], usual: ObservedRun, layouts: Layouts
    ) -> None:
        """Refuse modules that mix or remember examples only where the data are unusual.

        An example must come out the same beside others with unusual values, and these the same as
        alone.
        """
        alone: dict[float | None, ObservedRun] = {None: usual}
        for value in UNUSUAL:
            inputs = with_unusual(single, axes, [value])
            if inputs is None:
                continue
            try:
                alone[value] = self._observe(inputs, 1)
            except BROKEN:
                continue
            self._refuse_memory([usual, alone[value]])
        if not layouts:
            return
        # Values that do not go together are tried one by one.
        groups = ([*alone], *([None, unusual] for unusual in alone if unusual is not None))
        for values in groups:
            try:
                beside = self._observe(with_unusual(single, axes, values), len(values))
            except BROKEN:
                continue
            for place, own in enumerate(values):
                refuse_difference(beside, alone[own], layouts, place)
            if len(values) == len(alone):
                return

    def _refuse_memory(self, runs: list[ObservedRun]) -> None:
        """Refuse buffers into which a pass writes what depends on its examples."""
        first = runs[0].written
        for other in (run.written for run in runs[1:]):
            for name in first.keys() | other.keys():
                a, b = first.get(name), other.get(name)
                if a is None or b is None or not torch.equal(a, b):
                    raise UnverifiedError(
                        f"Expected buffers that do not depend on the data, found that a forward "
                        f"pass writes statistics of its examples into {name}: they would be "
                        "released with the module, unprotected. Do not track statistics."
                    )

    def _compare(self, together: Any, single: list[Any], layouts: Layouts) -> None:
        """Gradients and norms of the engine, for examples together, and of each alone."""
        count = len(single)
        with self._undisturbed(), torch.enable_grad():
            with self.tape.passing(count, layouts):
                outputs = self.module(*together[0], **together[1])
            weights = backward_from(self.tape, outputs, count, layouts)
        if not any(weights):
            return
        _, gradients = self.tape.collect()
        squares = {name: squares_of(own) for name, own in gradients.items()}
        self.tape.plain = True
        for position, inputs in enumerate(single):
            with self._undisturbed(), torch.enable_grad():
                outputs = self.module(*inputs[0], **inputs[1])
                value = sum(
                    (leaf * weight(position, leaf)).sum()
                    for leaf, weight in zip(tensors_of(outputs), weights, strict=True)
                    if weight is not None and leaf.requires_grad
                )
            expected = gradients_alone(value, self.tape.parameters)
            for name, found in differences(gradients, squares, expected, position):
                raise UnverifiedError(
                    "Expected the gradient of each example to be that of the example alone, found "
                    f"that of {name} {found}. A layer uses it in a way that the engine does not "
                    "follow (a hook that computes weights, an operation outside of the layer, "
                    "rows that do not stay with their example)."
                )


def _same_but_for_padding(
    padded: list[Tensor], alone: list[Tensor], layouts: Layouts, count: int, example: int
) -> bool:
    """Whether outputs of the batch are, for one example, those of the example alone."""
    for place, (several, one) in enumerate(zip(padded, alone, strict=True)):
        layout = layouts.get(("output", place))
        if layout is not None and not same_but_for_padding(
            layout.split(several, count)[example], layout.split(one, 1)[0]
        ):
            return False
    return True


def versions(inputs: Any) -> list[int]:
    return [tensor._version for tensor in tensors_of(inputs)]


def refuse_changes(inputs: Any, before: list[int]) -> None:
    """Refuse a module that has changed its inputs in place since `before`."""
    if versions(inputs) != before:
        raise UnverifiedError(
            "Expected a module that leaves its inputs as they are, found that it changes them in "
            "place: the change would reach every other use of the batch. Use the operation that "
            "returns a new tensor instead (x = x - y for x -= y)."
        )
