"""Modules are verified: what they compute for an example is what they compute for it alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from privagrad.torch.guards.module_runs import ModuleRuns
from privagrad.torch.guards.observed import (
    Layouts,
    LearnedLayouts,
    ObservedRun,
    is_output,
    is_value,
    layouts_of_values,
    many_meetings,
    named_outputs,
    refuse_inputs_of_none,
    refuse_memory,
)
from privagrad.torch.guards.padding import padded_examples, same_outputs_but_for_padding, unpadded
from privagrad.torch.guards.random_functions import RandomDraws
from privagrad.torch.guards.recorder import Recorder
from privagrad.torch.guards.refusals import BROKEN, UntriedError, UnverifiedError, padding_matters
from privagrad.torch.guards.structure import map_tensors, tensors_of
from privagrad.torch.guards.trace import history
from privagrad.torch.guards.traced import node_of, untraced
from privagrad.torch.per_example.layout import (
    MixedExamplesError,
    autocasts,
    in_single,
    input_leaves,
    mixed,
    possible_axes,
    take,
    with_unusual,
    without_autocast,
)
from privagrad.torch.per_example.tape import ForwardPass, Tape

EXAMPLES = 3
"""How many examples of a batch are verified."""

_ROUNDS = 8
"""So often it is looked for what is the same for all examples."""

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
        self._runs = ModuleRuns(module, tape)
        self._of_batch: Sequence[bool] = ()
        self._values: Layouts = {}
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
        return self.latest.layouts | self._values if self.latest else {}

    def layouts(
        self, recorder: Recorder, inputs: Any, count: int, outputs: Any, current: ForwardPass
    ) -> Layouts:
        """The layouts of a pass that has been made, verified where it is due.

        `unsettled` is then whether the pass must be made again, with Python's random numbers kept.
        """
        prepared, self._prepared = self._prepared, False
        drawn = recorder.drawn
        due = not (self.passes + 1) & self.passes or recorder.reads
        known = self.latest if prepared else self._known.get(recorder.signature)
        unlike = known is not None and known.has_other_constants(current)
        unlike |= self.verify and known is not None and known.has_other_factors(current)
        if known is None or unlike or (due and not prepared) or (prepared and drawn.decisive):
            known = self._learn(inputs, count, drawn, thorough=known is None)
        self.unsettled = known.outside_torch and drawn.states is None
        if self.unsettled:
            return known.layouts
        if self.verify:
            known.refuse_moved_rows(recorder)
            known.refuse_other_buffers(current)
            if known.alone and (due or recorder.signature not in self._known):
                named = named_outputs(outputs, current)
                if known.random:
                    named = self._runs.outputs(inputs, count, known.layouts, drawn)
                known.refuse_other_outputs(named, count)
            if known.alone and known.has_other_factors(current):
                raise mixed("the loss that the module computes")
        if known.has_other_constants(current) and known.alone:
            raise mixed("an embedding of the same for all examples")
        # The tensors of examples alone are not needed any more.
        self._known[recorder.signature] = replace(known, alone=())
        self.passes += 1
        if count > 1:
            self.latest = self._known[recorder.signature]
            if current.unknown:
                self._learn_values_of_batch(inputs, count)
        return known.layouts | self._values

    def outputs_without_padding(
        self, inputs: Any, count: int, layouts: Layouts, drawn: RandomDraws
    ) -> dict[int, list[Tensor]]:
        """The outputs of examples that are padded, without padding: the same, or refused."""
        steps = [step for t in tensors_of(inputs) for step in history(node_of(t))]
        examples = padded_examples(steps) if self.verify and self._axes and count > 1 else []
        alone: dict[int, list[Tensor]] = {}
        if not examples:
            return alone
        padded = self._runs.outputs(untraced(inputs), count, layouts, drawn)
        given, structure = input_leaves(inputs)
        for example in examples:
            single = input_leaves(take(untraced(inputs), self._axes or (), [example]))[0]
            for own in unpadded(given, single, count, example):
                with suppress(*BROKEN):
                    alone_inputs = tree_unflatten(own, structure)
                    found = self._runs.outputs(alone_inputs, 1, layouts, drawn)
                    if same_outputs_but_for_padding(padded, found, layouts, count, example):
                        alone[example] = [t for key, t in found.items() if is_output(key)]
                        break
            else:
                raise padding_matters("the output")
        return alone

    def _learn(
        self, inputs: Any, count: int, drawn: RandomDraws, thorough: bool = True
    ) -> LearnedLayouts:
        self.verifications += 1
        leaves = input_leaves(inputs)[0]
        guesses = possible_axes(leaves, count, self.tape.batch_first, self._of_batch)
        if self._axes in guesses:
            guesses.insert(0, self._axes)
        self._runs.drawn = drawn
        examples = sorted({0, count - 1, random.Random().randrange(count)})
        if len(examples) < EXAMPLES <= count:
            examples = [0, count // 2, count - 1]
        problem: Exception | None = None
        for axes in dict.fromkeys(guesses):
            try:
                with self._runs.aside():
                    found = self._try(inputs, axes, examples, thorough)
                self._axes = axes
                self.draws_outside_torch |= found.outside_torch
                return found
            except MixedExamplesError as error:
                problem = error if not isinstance(problem, MixedExamplesError) else problem
            except UnverifiedError as error:
                problem = problem or error
            except BROKEN as error:
                problem = problem or UntriedError(error)
        if not self.verify:
            return LearnedLayouts()
        assert problem is not None
        raise problem

    def _try(
        self, inputs: Any, axes: Sequence[int | None], examples: list[int], thorough: bool
    ) -> LearnedLayouts:
        """Compare some examples together with each alone, as if `axes` were the examples'."""
        together = take(inputs, axes, examples)
        single = [take(inputs, axes, [example]) for example in examples]
        several, alone, found = self._observe(together, single, axes, examples)
        if self.verify:
            refuse_memory([several, *alone])
            if thorough:
                self._refuse_rare_mixing(single[0], axes, alone[0], found)
            if autocasts():
                self._refuse_mixing_without_autocast(together, single, axes, examples)
            factors = self._runs.refuse_other_gradients(together, single, found.layouts)
            runs = (several, *alone)
            written = frozenset(name for run in runs for name in run.effects.written)
            found = replace(found, factors=factors, written=written)
        return found

    def _refuse_mixing_without_autocast(
        self, together: Any, single: list[Any], axes: Sequence[int | None], examples: list[int]
    ) -> None:
        """Refuse what is too little to show beside the rounding of autocast.

        A module that runs only under autocast is verified there alone.
        """
        several, *alone = map_tensors(in_single, [together, *single])
        try:
            with self._runs.aside(), without_autocast():
                *_, found = self._observe(several, alone, axes, examples)
                self._runs.refuse_other_gradients(several, alone, found.layouts)
        except (MixedExamplesError, UnverifiedError):
            raise
        except BROKEN:
            return

    def _observe(
        self, together: Any, single: list[Any], axes: Sequence[int | None], examples: list[int]
    ) -> tuple[ObservedRun, list[ObservedRun], LearnedLayouts]:
        """Runs that know which values are the same for all examples, and what they tell."""
        shared = self.latest.shared if self.latest else {}
        for _ in range(_ROUNDS):
            several = self._runs.observe(together, len(examples), shared)
            alone = [self._runs.observe(one, 1, shared) for one in single]
            found = LearnedLayouts.of(several, examples, alone)
            known, shared = _without_layout(shared), found.shared
            if any(is_value(seen.key) for seen in several.observed):
                self._learn_values(several, together, axes)
            shared |= self._values
            found = replace(found, layouts=found.layouts | self._values)
            if _without_layout(shared) == known:
                refuse_inputs_of_none(several, found.layouts)
                return several, alone, found
        raise many_meetings()

    def _learn_values(self, once: ObservedRun, inputs: Any, axes: Sequence[int | None]) -> None:
        """Where tensors that meet shared values have the examples, from a run with all twice."""
        count = once.recorder.count
        twice = take(inputs, axes, [*range(count)] * 2)
        found = layouts_of_values(once, self._runs.observe(twice, 2 * count, once.shared))
        if any(self._values.setdefault(key, own) != own for key, own in found.items()):
            raise many_meetings()

    def _learn_values_of_batch(self, inputs: Any, count: int) -> None:
        """The same for a whole batch, whose data have led to other calls than a few examples."""
        assert self.latest is not None
        assert self._axes is not None
        for _ in range(_ROUNDS):
            before = dict(self._values)
            with self._runs.aside():
                once = self._runs.observe(inputs, count, self.latest.shared | before)
                self._learn_values(once, inputs, self._axes)
            if self._values == before:
                return
        raise many_meetings()

    def _refuse_rare_mixing(
        self,
        single: Any,
        axes: Sequence[int | None],
        usual: ObservedRun,
        found: LearnedLayouts,
    ) -> None:
        """Refuse modules that mix or remember examples only where the data are unusual.

        An example must come out the same beside others with unusual values, and these the same as
        alone.
        """
        alone: dict[float | None, ObservedRun] = {None: usual}
        layouts, shared = found.layouts, found.shared
        for value in UNUSUAL:
            inputs = with_unusual(single, axes, [value])
            if inputs is None:
                continue
            try:
                alone[value] = self._runs.observe(inputs, 1, shared)
            except BROKEN:
                continue
            refuse_memory([usual, alone[value]])
        if not layouts:
            return
        # Values that do not go together are tried one by one.
        groups = ([*alone], *([None, unusual] for unusual in alone if unusual is not None))
        for values in groups:
            try:
                others = with_unusual(single, axes, values)
                beside = self._runs.observe(others, len(values), shared)
            except BROKEN:
                continue
            for place, own in enumerate(values):
                # How a product is rounded depends on the batch's size: large numbers may cancel.
                size = 1.0 if own is None or math.isnan(own) else max(1.0, abs(own))
                beside.refuse_difference(alone[own], layouts, place, size)
            if len(values) == len(alone):
                return


def _without_layout(shared: Layouts) -> set[object]:
    return {key for key, layout in shared.items() if layout is None}
