"""The per-example gradient has a definition, that of the example alone: modules are held to it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from privagrad.torch.guards.determinism import (
    Aftermath,
    Drawn,
    attributes_kept,
    normals,
    random_state_kept,
    undisturbed,
)
from privagrad.torch.guards.padding import (
    padded_examples,
    same_but_for_padding,
    unpadded_inputs,
)
from privagrad.torch.guards.recorder import Recorder, public_tensors
from privagrad.torch.guards.structure import tensors_of
from privagrad.torch.guards.trace import history
from privagrad.torch.guards.traced import node_of, untraced
from privagrad.torch.layout import (
    ROUNDING,
    Layout,
    Mixed,
    ObservedTensor,
    input_leaves,
    learned_layout,
    mixed,
    possible_axes,
    same,
    take,
    with_unusual,
)
from privagrad.torch.scales import Scale, accurate, as_matrix
from privagrad.torch.tape import Tape
from privagrad.torch.uses import Use

EXAMPLES = 3
"""How many examples of a batch are verified."""

UNUSUAL = (float("nan"), 1e4, -1.0, 0.0)
"""Values that a module may treat in another way: missing, huge, marked as missing."""

_RELATIVE, _OF_ALL = 1e-3, 1e-5
_COARSE = 100.0
_BROKEN = (RuntimeError, IndexError, ValueError, AssertionError, TypeError, KeyError)

Layouts = dict[object, Layout | None]


class UnverifiedError(RuntimeError):
    """What the engine computes for an example cannot be shown to be that example's gradient."""


class UntriedError(UnverifiedError):
    """A module that cannot be run on a few examples alone."""


@dataclass
class Observed:
    """What a module does with some examples."""

    observed: list[ObservedTensor]
    written: dict[str, Tensor]
    recorder: Recorder
    random: bool
    outside_torch: bool


@dataclass(frozen=True)
class Learned:
    """Where a pass has its examples, and which of its calls may move them to other rows."""

    layouts: Layouts
    moving: frozenset[int]
    alone: tuple[tuple[int, Observed], ...] = ()

    @property
    def random(self) -> bool:
        return any(one.random for _, one in self.alone)

    @property
    def outside_torch(self) -> bool:
        return any(one.outside_torch for _, one in self.alone)

    def refuse_other_outputs(self, outputs: Any, count: int) -> None:
        """Refuse a pass of the whole batch with other outputs for examples than those alone have.

        Both must have been made without random numbers, or with the same.
        """
        for example, one in self.alone:
            found = {o.key: o.tensor for o in one.observed}
            for place, leaf in enumerate(tensors_of(outputs)):
                layout = self.layouts.get(("output", place))
                alone = found.get(("output", place))
                if layout is None or alone is None:
                    continue
                own = layout.split(leaf.detach(), count)[example]
                if not same(own.reshape(alone.shape), alone):
                    raise mixed("the module's output")

    def refuse_moved_rows(self, recorder: Recorder) -> None:
        """Refuse a pass in which an index out of the data puts examples into other rows."""
        for place in self.moving:
            if place < len(recorder.moves) and not recorder.moves[place].in_place:
                raise UnverifiedError(
                    "Expected a module that keeps the examples in their rows, found that "
                    f"{recorder.moves[place].name}() moves them by an index or a mask that depends "
                    "on the data: its gradients could not be told apart by example. Mask rows "
                    "instead of choosing them; for sequences say enforce_sorted=False."
                )


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
        self.latest: Learned | None = None
        self._known: dict[int, Learned] = {}
        self._axes: tuple[int | None, ...] | None = None
        self._prepared = False
        self._drawn = Drawn()
        self._of_batch: Sequence[bool] = ()
        self.draws_outside_torch = self.unsettled = False

    def prepare(self, inputs: Any, count: int, of_batch: Sequence[bool]) -> Layouts:
        """The layouts that a pass most likely has.

        `of_batch` says which of the inputs are computed from the batch of the data loader.
        """
        self._prepared, self._of_batch = False, of_batch
        if self.latest is None and count > 1:
            try:
                self.latest = self._learn(inputs, count, Drawn())
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
        self, inputs: Any, count: int, layouts: Layouts, drawn: Drawn
    ) -> dict[int, list[Tensor]]:
        """The outputs of examples that are padded, without padding: the same, or refused."""
        steps = [step for t in tensors_of(inputs) for step in history(node_of(t))]
        examples = padded_examples(steps) if self.verify and self._axes and count > 1 else []
        alone: dict[int, list[Tensor]] = {}
        if not examples:
            return alone
        padded = tensors_of(self._deterministic(untraced(inputs), count, layouts, drawn))
        for example in examples:
            try:
                own = unpadded_inputs(inputs, self._axes or (), count, example)
                found = self._deterministic(own, 1, layouts, drawn)
            except _BROKEN as error:
                raise padding_matters("the output") from error
            alone[example] = tensors_of(found)
            for place, (several, one) in enumerate(zip(padded, alone[example], strict=True)):
                layout = layouts.get(("output", place))
                if layout is not None and not same_but_for_padding(
                    layout.split(several, count)[example], layout.split(one, 1)[0]
                ):
                    raise padding_matters("the output")
        return alone

    def _deterministic(self, inputs: Any, count: int, layouts: Layouts, drawn: Drawn) -> Any:
        """The outputs of the whole batch, without random numbers or with those of another pass."""
        with self._aside(), torch.no_grad():
            self._drawn = drawn
            with self._undisturbed(), self.tape.passing(count, layouts):
                return self.module(*inputs[0], **inputs[1])

    def _learn(self, inputs: Any, count: int, drawn: Drawn, thorough: bool = True) -> Learned:
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
            except Mixed as error:
                problem = error if not isinstance(problem, Mixed) else problem
            except UnverifiedError as error:
                problem = problem or error
            except _BROKEN as error:
                problem = problem or _untried(error)
        if not self.verify:
            return Learned({}, frozenset())
        assert problem is not None
        raise problem

    def _try(
        self, inputs: Any, axes: Sequence[int | None], examples: list[int], thorough: bool
    ) -> Learned:
        """Compare some examples together with each alone, as if `axes` were the examples'."""
        together = take(inputs, axes, examples)
        single = [take(inputs, axes, [example]) for example in examples]
        whole = self._observe(together, len(examples))
        alone = [self._observe(one, 1) for one in single]
        if len(examples) == 1:
            found = Learned({}, frozenset())
        else:
            seen = tuple(zip(examples, alone, strict=True))
            found = Learned(_match(whole, alone), _moving(whole, alone), seen)
        if self.verify:
            self._refuse_memory([whole, *alone])
            if thorough:
                self._refuse_rare_mixing(single[0], axes, alone[0], found.layouts)
            self._compare(together, single, found.layouts)
        return found

    def _observe(self, inputs: Any, count: int) -> Observed:
        """A pass without gradients; every tensor that goes into a layer or out of the module."""
        tape = self.tape
        observed: list[ObservedTensor] = []
        recorder = Recorder(count, public_tensors(self.module), quiet=False)
        before = versions(inputs)
        with self._undisturbed() as aftermath, torch.no_grad():
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
        return Observed(
            observed, aftermath.written, recorder, aftermath.random, aftermath.outside_torch
        )

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Runs that leave no trace in the training: they may come after its own pass."""
        with self.tape.aside(), random_state_kept(), attributes_kept(self.module):
            yield

    def _undisturbed(self) -> AbstractContextManager[Aftermath]:
        return undisturbed(self.module, self._drawn, self.tape.is_inside_layer)

    def _refuse_rare_mixing(
        self, single: Any, axes: Sequence[int | None], usual: Observed, layouts: Layouts
    ) -> None:
        """Refuse modules that mix or remember examples only where the data are unusual.

        An example must come out the same beside others with unusual values, and these the same as
        alone.
        """
        alone: dict[float | None, Observed] = {None: usual}
        for value in UNUSUAL:
            inputs = with_unusual(single, axes, [value])
            if inputs is None:
                continue
            try:
                alone[value] = self._observe(inputs, 1)
            except _BROKEN:
                continue
            self._refuse_memory([usual, alone[value]])
        if not layouts:
            return
        # Values that do not go together are tried one by one.
        groups = ([*alone], *([None, unusual] for unusual in alone if unusual is not None))
        for values in groups:
            try:
                beside = self._observe(with_unusual(single, axes, values), len(values))
            except _BROKEN:
                continue
            for place, own in enumerate(values):
                _refuse_difference(beside, alone[own], layouts, place)
            if len(values) == len(alone):
                return

    def _refuse_memory(self, runs: list[Observed]) -> None:
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
            weights = _backward(self.tape, outputs, count, layouts)
        if not any(weights):
            return
        _, uses = self.tape.collect()
        squares = {name: _squares(own) for name, own in uses.items()}
        self.tape.plain = True
        for position, inputs in enumerate(single):
            with self._undisturbed(), torch.enable_grad():
                outputs = self.module(*inputs[0], **inputs[1])
                value = sum(
                    (leaf * weight(position, leaf)).sum()
                    for leaf, weight in zip(tensors_of(outputs), weights, strict=True)
                    if weight is not None and leaf.requires_grad
                )
            expected = _gradients(value, self.tape.parameters)
            for name, found in _differences(uses, squares, expected, position):
                raise UnverifiedError(
                    "Expected the gradient of each example to be that of the example alone, found "
                    f"that of {name} {found}. A layer uses it in a way that the engine does not "
                    "follow (a hook that computes weights, an operation outside of the layer, "
                    "rows that do not stay with their example)."
                )


def _refuse_difference(several: Observed, alone: Observed, layouts: Layouts, place: int) -> None:
    """Refuse other values for the example at `place` among several than it has alone."""
    count = several.recorder.count
    for a, b in zip(several.observed, alone.observed, strict=False):
        layout = layouts.get(a.key)
        if layout is None or a.key != b.key:
            continue
        own, other = layout.split(a.tensor, count)[place], b.tensor
        if b.tensor.dim() == a.tensor.dim():
            other = layout.split(b.tensor, 1)[0]
        if own.shape == other.shape and not same(own, other, ROUNDING):
            raise mixed(a.name)


def _match(whole: Observed, alone: list[Observed]) -> Layouts:
    """The layout of everything observed."""
    count = len(alone)
    for one in alone:
        if [o.key for o in one.observed] != [o.key for o in whole.observed]:
            raise UnverifiedError(
                "Expected a module that does the same for one example as for several, found that "
                "it calls other layers. Let it not depend on the number of examples."
            )
    layouts: Layouts = {}
    for place, several in enumerate(whole.observed):
        singles = [(position, one.observed[place]) for position, one in enumerate(alone)]
        layout = learned_layout(several, singles, count)
        if layout is None:
            _refuse_shared(several, [one for _, one in singles])
        elif several.axis is not None and layout.axis != several.axis:
            raise Mixed(
                f"Expected the examples in dimension {several.axis} of the input of "
                f"{several.name}, found them in dimension {layout.axis}: see batch_first."
            )
        layouts[several.key] = layout
    return layouts


def _moving(whole: Observed, alone: list[Observed]) -> frozenset[int]:
    """The calls that index a dimension which has the examples, by their place."""
    several, single = whole.recorder.moves, alone[0].recorder.moves
    if len(several) != len(single):
        return frozenset(range(len(several)))
    pairs = enumerate(zip(several, single, strict=True))
    return frozenset(place for place, (a, b) in pairs if a.sizes != b.sizes)


def _refuse_shared(several: ObservedTensor, alone: list[ObservedTensor]) -> None:
    """Refuse what has no examples where a layer needs them, or differs from example to example."""
    if several.leading and not several.shared:
        raise Mixed(
            f"Expected {several.name} to work on the examples of the batch, found an input of "
            f"shape {tuple(several.tensor.shape)} that is the same for every batch: its gradient "
            "cannot be told apart by example. Repeat its input for every example, for instance "
            "with expand(batch_size, ...)."
        )


Weight = Callable[[int, Tensor], Tensor]


def _backward(tape: Tape, outputs: Any, count: int, layouts: Layouts) -> list[Weight | None]:
    """Send random gradients back from the outputs; those of each example alone, by output.

    None for outputs without a gradient, and for those that are not of examples.
    """
    weights: list[Weight | None] = []
    roots, drawn = [], []
    for place, leaf in enumerate(tensors_of(outputs)):
        layout = layouts.get(("output", place), Layout(0)) if leaf.dim() else None
        gradient = _uneven(normals(leaf.shape).to(leaf), layout, count)
        weight = _weight(leaf, gradient, layout, tape) if leaf.requires_grad else None
        weights.append(weight)
        if weight is not None:
            roots.append(leaf)
            drawn.append(gradient)
    grads = {p: p.grad for p in tape.parameters.values()}
    try:
        if roots:
            torch.autograd.backward(roots, drawn)
    finally:
        for p, grad in grads.items():
            p.grad = grad
    return weights


def _uneven(gradient: Tensor, layout: Layout | None, count: int) -> Tensor:
    """Gradients of very different sizes: what bounds them together treats them otherwise."""
    if layout is None or count < 2 or not gradient.numel():
        return gradient
    parts = layout.split(gradient, count).clone()
    spread = 1.0 if gradient.dtype in (torch.float16, torch.bfloat16) else 3.0
    sizes = 10.0 ** (spread * torch.linspace(-1, 1, count).roll(random.Random().randrange(count)))
    parts *= sizes.to(parts).reshape(-1, *[1] * (parts.dim() - 1))
    return layout.join(parts).contiguous()


def _weight(leaf: Tensor, drawn: Tensor, layout: Layout | None, tape: Tape) -> Weight | None:
    """What an example alone has of the gradient of an output."""
    count = tape.count
    if layout is not None:
        return lambda position, like: layout.split(drawn, count)[position].reshape(like.shape)
    for loss, reduction in tape.current.losses:
        if loss is leaf:
            share = drawn / count if reduction == "mean" else drawn
            return lambda position, like: share
    return None


def _gradients(value: Any, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    tensors = list(parameters.values())
    if not isinstance(value, Tensor):
        return {name: torch.zeros_like(p) for name, p in parameters.items()}
    found = torch.autograd.grad(value, tensors, allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else _dense(g.detach())
        for (name, p), g in zip(parameters.items(), found, strict=True)
    }


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


@torch.no_grad()
def _squares(uses: list[Use]) -> list[float]:
    """The squared norm of each example's gradient of a parameter, as the engine has it."""
    scales = [Scale.ball(as_matrix(use.parameter)[use.part]) for use in uses]
    squares = [use.squares(scale).double() for use, scale in zip(uses, scales, strict=True)]
    return [max(float(square), 0.0) for square in torch.stack(squares).sum(0)]


@torch.no_grad()
def _differences(
    uses: dict[str, list[Use]],
    squares: dict[str, list[float]],
    expected: dict[str, Tensor],
    position: int,
) -> list[tuple[str, str]]:
    """The parameters whose gradient or norm the engine has wrong, with what was found."""
    exact = {name: as_matrix(accurate(g)).double() for name, g in expected.items()}
    sizes = {name: float(g.norm()) for name, g in exact.items()}
    whole = math.hypot(*sizes.values())
    if not math.isfinite(whole):
        return []
    wrong = []
    for name, g in exact.items():
        rough = _COARSE if expected[name].dtype in (torch.float16, torch.bfloat16) else 1.0
        tolerance = rough * (_RELATIVE * sizes[name] + _OF_ALL * whole)
        difference, norm = g, 0.0
        for use in uses.get(name, []):
            difference[use.part] -= use.examples(position, position + 1)[0]
            norm = squares[name][position] ** 0.5
        off = float(difference.norm())
        if off > tolerance:
            share = f"{off / sizes[name]:.1%}" if sizes[name] else "all"
            wrong.append((name, f"off by {share} of it"))
        # A norm that is too large bounds more than it must; one too large for its type counts as
        # not finite, and nothing is released of it.
        elif norm < sizes[name] - 3 * tolerance:
            wrong.append((name, f"to have the norm {norm:.3g} instead of {sizes[name]:.3g}"))
    return wrong


def padding_matters(what: str) -> UnverifiedError:
    return UnverifiedError(
        f"Expected {what} of an example to be the same at any length that the batch is padded to, "
        "found that padding changes it, or that it cannot be computed without: the longest example "
        "of a batch would change the gradients of all others. Mask what is padded, divide by each "
        "example's own length, or pad all rows to one public length."
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


def _untried(error: Exception) -> UntriedError:
    reason = UntriedError(
        "Expected a module that runs on a few examples of the batch, and on one alone, so that it "
        f"can be verified; found {type(error).__name__}: {error}. Let the module take any number "
        "of examples in its inputs' first dimension (or set batch_first). If you vouch yourself "
        "that it treats every example by itself, say verify=False to make_private."
    )
    reason.__cause__ = error
    return reason
