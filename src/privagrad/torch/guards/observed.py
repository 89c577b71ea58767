"""What was seen of a module with several examples, and with each of them alone."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from privagrad.torch.guards.determinism import RunEffects
from privagrad.torch.guards.recorder import Recorder, RowMove
from privagrad.torch.guards.refusals import UnverifiedError
from privagrad.torch.guards.structure import tensors_of
from privagrad.torch.per_example.layout import (
    ROUNDING,
    Layout,
    MixedExamplesError,
    ObservedTensor,
    learned_layout,
    mixed,
    same,
)
from privagrad.torch.per_example.shared import VALUES
from privagrad.torch.per_example.tape import ForwardPass

Layouts = dict[object, Layout | None]


def named_outputs(outputs: Any, current: ForwardPass) -> dict[object, Tensor]:
    """A module's outputs, and the losses of each example that it has computed itself."""
    found: dict[object, Tensor] = {
        ("output", place): leaf for place, leaf in enumerate(tensors_of(outputs))
    }
    return found | {("loss", place): own for place, own in enumerate(current.own_losses)}


def is_output(key: object) -> bool:
    return isinstance(key, tuple) and key[0] == "output"


@dataclass
class ObservedRun:
    """What a module does with some examples."""

    observed: list[ObservedTensor]
    recorder: Recorder
    effects: RunEffects
    shared: Layouts = field(default_factory=dict)

    @property
    def regular(self) -> list[ObservedTensor]:
        """What is the same for examples together and alone; shared values meet others elsewhere."""
        return [seen for seen in self.observed if not is_value(seen.key)]

    def refuse_difference(
        self, alone: ObservedRun, layouts: Layouts, place: int, size: float = 1.0
    ) -> None:
        """Refuse other values for the example at `place`, of numbers of this size, than alone."""
        count = self.recorder.count
        for a, b in zip(self.regular, alone.regular, strict=False):
            layout = layouts.get(a.key)
            if layout is None or a.key != b.key:
                continue
            own, other = layout.split(a.tensor, count)[place], b.tensor
            if b.tensor.dim() == a.tensor.dim():
                other = layout.split(b.tensor, 1)[0]
            if own.shape == other.shape and not same(own, other, ROUNDING * size):
                raise mixed(a.name)


@dataclass(frozen=True)
class MovingCalls:
    """The calls of a pass that index a dimension which has the examples.

    They are known by their places among as many calls as in `together`. Where the data decide
    which calls are made, those are taken for moving that no example makes alone with these sizes.
    """

    places: frozenset[int] = frozenset()
    together: int = 0
    alone: Counter[Any] | None = None

    @classmethod
    def of(cls, together: ObservedRun, alone: list[ObservedRun]) -> MovingCalls:
        several, single = together.recorder.moves, alone[0].recorder.moves
        rest = Counter((call.name, call.sizes) for call in single)
        for one in alone[1:]:
            rest &= Counter((call.name, call.sizes) for call in one.recorder.moves)
        if len(several) != len(single):
            return cls(alone=rest, together=-1)
        pairs = enumerate(zip(several, single, strict=True))
        places = frozenset(place for place, (a, b) in pairs if a.sizes != b.sizes)
        return cls(places, len(several), rest)

    def among(self, calls: list[RowMove]) -> list[RowMove]:
        if len(calls) == self.together:
            return [calls[place] for place in self.places]
        if self.alone is None:
            return []
        found = Counter((call.name, call.sizes) for call in calls)
        return [c for c in calls if found[c.name, c.sizes] > self.alone[c.name, c.sizes]]


@dataclass(frozen=True)
class LearnedLayouts:
    """Where a pass has its examples, and which of its calls may move them to other rows.

    `factors` are the numbers with which its outputs have the module's own losses, `constants`
    tensors that are the same for all examples, `written` the buffers that it writes to.
    """

    layouts: Layouts = field(default_factory=dict)
    moves: MovingCalls = field(default_factory=MovingCalls)
    alone: tuple[tuple[int, ObservedRun], ...] = ()
    factors: tuple[float, ...] = ()
    constants: dict[object, Tensor] = field(default_factory=dict)
    written: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, together: ObservedRun, examples: list[int], alone: list[ObservedRun]
    ) -> LearnedLayouts:
        """What `examples` together and each of them alone tell; nothing if there is but one."""
        if len(examples) == 1:
            return cls()
        seen, layouts = tuple(zip(examples, alone, strict=True)), _match(together, alone)
        constants = {
            own.key: own.tensor
            for own in together.regular
            if own.constant and layouts[own.key] is None
        }
        return cls(layouts, MovingCalls.of(together, alone), seen, constants=constants)

    @property
    def shared(self) -> Layouts:
        """What is to be known of values that are the same for all examples."""
        return {
            key: own for key, own in self.layouts.items() if key in self.constants or is_value(key)
        }

    @property
    def random(self) -> bool:
        return any(one.effects.random for _, one in self.alone)

    @property
    def outside_torch(self) -> bool:
        return any(one.effects.outside_torch for _, one in self.alone)

    def refuse_other_outputs(self, outputs: dict[object, Tensor], count: int) -> None:
        """Refuse a pass of the whole batch with other outputs for examples than those alone have.

        Both must have been made without random numbers, or with the same.
        """
        for example, one in self.alone:
            found = {o.key: o.tensor for o in one.observed}
            for key, leaf in outputs.items():
                layout, alone = self.layouts.get(key), found.get(key)
                if layout is None or alone is None:
                    continue
                own = layout.split(leaf.detach(), count)[example]
                if not same(own.reshape(alone.shape), alone):
                    raise mixed("the module's output")

    def has_other_constants(self, current: ForwardPass) -> bool:
        """Whether something that is the same for all examples has changed."""
        now = current.constants
        return not all(
            key in now and torch.equal(now[key], own) for key, own in self.constants.items()
        )

    def has_other_factors(self, current: ForwardPass) -> bool:
        """Whether a pass has its own losses with other numbers than examples alone have."""
        return len(self.factors) != len(current.factors) or not all(
            map(math.isclose, self.factors, current.factors)
        )

    def refuse_other_buffers(self, current: ForwardPass) -> None:
        """Refuse a pass that writes to buffers to which a few examples write nothing."""
        for name in sorted(current.written - self.written):
            raise keeps_statistics(name)

    def refuse_moved_rows(self, recorder: Recorder) -> None:
        """Refuse a pass in which an index out of the data puts examples into other rows."""
        for call in self.moves.among(recorder.moves):
            if not call.in_place:
                raise UnverifiedError(
                    "Expected a module that keeps the examples in their rows, found that "
                    f"{call.name}() moves them by an index or a mask that depends "
                    "on the data: its gradients could not be told apart by example. Mask rows "
                    "instead of choosing them; for sequences set enforce_sorted=False."
                )


def _match(together: ObservedRun, alone: list[ObservedRun]) -> Layouts:
    """The layout of everything observed."""
    count = len(alone)
    for one in alone:
        if [o.key for o in one.regular] != [o.key for o in together.regular]:
            raise UnverifiedError(
                "Expected a module that does the same for one example as for several, found that "
                "it calls other layers. Let it not depend on the number of examples."
            )
    layouts: Layouts = {}
    for place, several in enumerate(together.regular):
        singles = [(position, one.regular[place]) for position, one in enumerate(alone)]
        layout = learned_layout(several, singles, count)
        if layout is not None and several.axis not in (None, layout.axis):
            raise MixedExamplesError(
                f"Expected the examples in dimension {several.axis} of the input of "
                f"{several.name}, found them in dimension {layout.axis}: see batch_first."
            )
        if layout is None and several.constant:
            for _, single in singles:
                if not same(several.tensor, single.tensor):
                    raise mixed(several.name)
        layouts[several.key] = layout
    return layouts


def is_value(key: object) -> bool:
    return isinstance(key, tuple) and key[0] == VALUES


def refuse_memory(runs: list[ObservedRun]) -> None:
    """Refuse buffers into which a pass writes what depends on its examples."""
    first = runs[0].effects.written
    for other in (run.effects.written for run in runs[1:]):
        for name in first.keys() | other.keys():
            a, b = first.get(name), other.get(name)
            if a is None or b is None or not torch.equal(a, b):
                raise keeps_statistics(name)


def keeps_statistics(name: str) -> UnverifiedError:
    return UnverifiedError(
        "Expected buffers that do not depend on the data, found that a forward pass writes "
        f"statistics of its examples into {name}: they would be released with the module, "
        "unprotected. Do not track statistics."
    )


def refuse_inputs_of_none(together: ObservedRun, layouts: Layouts) -> None:
    """Refuse layers with parameters that work on something other than the examples."""
    for several in together.regular:
        layout = layouts.get(several.key, Layout(0))
        if layout is None and several.leading and not several.shared:
            raise MixedExamplesError(
                f"Expected {several.name} to work on the examples of the batch, found an input of "
                f"shape {tuple(several.tensor.shape)} that is the same for every batch: its "
                "gradient cannot be told apart by example. Repeat its input for every example, for "
                "instance with expand(batch_size, ...)."
            )


def layouts_of_values(once: ObservedRun, twice: ObservedRun) -> Layouts:
    """Where tensors that meet shared values have the examples; seen of a batch, and of it twice."""
    count = once.recorder.count
    pairs = [[seen for seen in run.observed if is_value(seen.key)] for run in (once, twice)]
    layouts: Layouts = {}
    if [seen.key for seen in pairs[0]] != [seen.key for seen in pairs[1]]:
        raise mixed("an embedding of the same for all examples")
    for one, both in zip(*pairs, strict=True):
        layout = _layout_of_twice(one.tensor, both.tensor, count)
        if layouts.setdefault(one.key, layout) != layout:
            raise many_meetings()
    return layouts


def many_meetings() -> UnverifiedError:
    return UnverifiedError(
        "Expected embeddings that are the same for all examples to meet values of the examples in "
        "a few operations of one kind each, found others. Expand their input to the examples "
        "before the embedding: torch.arange(T).expand(len(x), T)."
    )


def _layout_of_twice(once: Tensor, twice: Tensor, count: int) -> Layout | None:
    if once.shape == twice.shape and same(once, twice, ROUNDING):
        return None
    if once.dim() == twice.dim():
        for axis in range(once.dim()):
            if once.shape[axis] == count and twice.shape[axis] == 2 * count:
                first, second = twice.split(count, axis)
                if same(once, first, ROUNDING) and same(once, second, ROUNDING):
                    return Layout(axis)
    raise mixed("an embedding of the same for all examples")
