"""Runs of a module beside its training: with fixed random numbers, and with nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from privagrad.torch.guards.determinism import (
    RunEffects,
    attributes_kept,
    random_state_kept,
    undisturbed,
)
from privagrad.torch.guards.gradients import backward_from, differences, gradients_alone, squares_of
from privagrad.torch.guards.observed import Layouts, ObservedRun
from privagrad.torch.guards.random_functions import RandomDraws
from privagrad.torch.guards.recorder import Recorder, public_tensors
from privagrad.torch.guards.refusals import UnverifiedError
from privagrad.torch.guards.structure import tensors_of
from privagrad.torch.per_example.layout import ObservedTensor
from privagrad.torch.per_example.tape import Tape


class ModuleRuns:
    """Runs of one module on a few examples.

    `drawn` are the random numbers of the pass whose decisions the runs repeat.
    """

    def __init__(self, module: nn.Module, tape: Tape) -> None:
        self.module, self.tape = module, tape
        self.drawn = RandomDraws()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Runs that leave no trace in the training: they may come after its own pass."""
        with self.tape.aside(), random_state_kept(), attributes_kept(self.module):
            yield

    def _undisturbed(self) -> AbstractContextManager[RunEffects]:
        return undisturbed(self.module, self.drawn, self.tape.is_inside_layer)

    def outputs(self, inputs: Any, count: int, layouts: Layouts, drawn: RandomDraws) -> Any:
        """The outputs of the whole batch, without random numbers or with those of another pass."""
        with self.aside(), torch.no_grad():
            self.drawn = drawn
            with self._undisturbed(), self.tape.passing(count, layouts):
                return self.module(*inputs[0], **inputs[1])

    def observe(self, inputs: Any, count: int) -> ObservedRun:
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

    def refuse_other_gradients(self, together: Any, single: list[Any], layouts: Layouts) -> None:
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
