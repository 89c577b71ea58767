"""Runs of a module beside its training: with fixed random numbers, and with nothing left behind."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from privagrad.torch.guards.determinism import (
    RunEffects,
    attributes_kept,
    normals,
    random_state_kept,
    undisturbed,
)
from privagrad.torch.guards.observed import Layouts, ObservedRun, named_outputs
from privagrad.torch.guards.random_functions import RandomDraws
from privagrad.torch.guards.recorder import Recorder, public_tensors
from privagrad.torch.guards.refusals import UnverifiedError
from privagrad.torch.guards.structure import tensors_of
from privagrad.torch.per_example.gradients import PerExampleGradient
from privagrad.torch.per_example.inner_losses import note_losses, private_pass
from privagrad.torch.per_example.layout import Layout, ObservedTensor, autocast_precision
from privagrad.torch.per_example.tape import Tape
from privagrad.torch.scales import Scale, accurate, as_matrix

_RELATIVE, _OF_ALL = 1e-3, 1e-5
_COARSE = 100.0

Weight = Callable[[int, Tensor], Tensor]


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
        return undisturbed(self.module, self.drawn, lambda: self.tape.layers_entered > 0)

    def outputs(
        self, inputs: Any, count: int, layouts: Layouts, drawn: RandomDraws
    ) -> dict[object, Tensor]:
        """The outputs of the whole batch, without random numbers or with those of another pass."""
        with self.aside(), torch.no_grad():
            self.drawn = drawn
            with self._undisturbed(), private_pass(self.tape, count, layouts) as current:
                return named_outputs(self.module(*inputs[0], **inputs[1]), current)

    def observe(self, inputs: Any, count: int, shared: Layouts | None = None) -> ObservedRun:
        """A pass without gradients; every tensor that goes into a layer or out of the module.

        `shared` is what is known of values that are the same for all examples.
        """
        observed: list[ObservedTensor] = []
        recorder = Recorder(count, public_tensors(self.module), quiet=False)
        with inputs_kept(inputs), self._undisturbed() as effects, torch.no_grad():
            self.tape.observed = observed
            with private_pass(self.tape, count, shared, recorder) as current:
                outputs = self.module(*inputs[0], **inputs[1])
            self.tape.observed = None
        for key, leaf in named_outputs(outputs, current).items():
            name = "the module's output"
            observed.append(ObservedTensor(key, name, leaf.detach(), leaf.dim(), shared=True))
        return ObservedRun(observed, recorder, effects, shared or {})

    def refuse_other_gradients(
        self, together: Any, single: list[Any], layouts: Layouts
    ) -> tuple[float, ...]:
        """Gradients and norms of the engine, for examples together, and of each alone.

        Returns the numbers with which the outputs have the module's own losses.
        """
        count = len(single)
        with self._undisturbed(), torch.enable_grad():
            with private_pass(self.tape, count, layouts) as current:
                outputs = self.module(*together[0], **together[1])
                note_losses(self.tape, outputs)
            weights = _backward_from(self.tape, outputs, count, layouts)
        if not any(weights):
            return current.factors
        _, gradients = self.tape.collect()
        squares = {name: _squares_of(own) for name, own in gradients.items()}
        self.tape.plain = True
        for position, inputs in enumerate(single):
            with self._undisturbed(), torch.enable_grad():
                outputs = self.module(*inputs[0], **inputs[1])
                value = sum(
                    (leaf * weight(position, leaf)).sum()
                    for leaf, weight in zip(tensors_of(outputs), weights, strict=True)
                    if weight is not None and leaf.requires_grad
                )
                # Within: checkpoints compute activations again.
                expected = _gradients_alone(value, self.tape.parameters)
            for name, found in _differences(gradients, squares, expected, position):
                raise UnverifiedError(
                    "Expected the gradient of each example to be that of the example alone, found "
                    f"that of {name} {found}. A layer uses it in a way that the engine does not "
                    "follow (a hook that computes weights, an operation outside of the layer, "
                    "rows that do not stay with their example)."
                )
        return current.factors


@contextmanager
def inputs_kept(inputs: Any) -> Iterator[None]:
    """Refuse a module that changes its inputs in place."""
    before = [tensor._version for tensor in tensors_of(inputs)]
    yield
    if [tensor._version for tensor in tensors_of(inputs)] != before:
        raise UnverifiedError(
            "Expected a module that leaves its inputs as they are, found that it changes them in "
            "place: the change would reach every other use of the batch. Use the operation that "
            "returns a new tensor instead (x = x - y for x -= y)."
        )


def _backward_from(tape: Tape, outputs: Any, count: int, layouts: Layouts) -> list[Weight | None]:
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
            _run_backward(roots, drawn, (), accumulates=True)
    finally:
        for p, grad in grads.items():
            p.grad = grad
    return weights


def _run_backward(
    roots: list[Tensor], gradients: list[Tensor], inputs: Sequence[Tensor], accumulates: bool
) -> Any:
    """A backward pass within which function modes see what checkpoints compute again.

    `torch.autograd.backward` is itself a function of the modes, and leaves them for its time.
    """
    return _engine_run_backward(
        tuple(roots), tuple(gradients), False, False, tuple(inputs), allow_unreachable=True,
        accumulate_grad=accumulates,
    )  # fmt: skip


def _uneven(gradient: Tensor, layout: Layout | None, count: int) -> Tensor:
    """Gradients of very different sizes: what bounds them together treats them otherwise."""
    if layout is None or count < 2 or not gradient.numel():
        return gradient
    parts = layout.split(gradient, count).clone()
    half = gradient.dtype in (torch.float16, torch.bfloat16)
    spread = 1.0 if half or autocast_precision(gradient.device.type) else 3.0
    sizes = 10.0 ** (spread * torch.linspace(-1, 1, count).roll(random.Random().randrange(count)))
    parts *= sizes.to(parts).reshape(-1, *[1] * (parts.dim() - 1))
    return layout.join(parts).contiguous()


def _weight(leaf: Tensor, drawn: Tensor, layout: Layout | None, tape: Tape) -> Weight | None:
    """What an example alone has of the gradient of an output."""
    count = tape.count
    if layout is not None:
        return lambda position, like: layout.split(drawn, count)[position].reshape(like.shape)
    for loss, reduction in tape.current.losses:
        if loss() is leaf:
            share = drawn / count if reduction == "mean" else drawn
            return lambda position, like: share
    return None


def _gradients_alone(value: Any, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    tensors = list(parameters.values())
    if not isinstance(value, Tensor):
        return {name: torch.zeros_like(p) for name, p in parameters.items()}
    found = _run_backward([value], [torch.ones_like(value)], tensors, accumulates=False)
    filled = (torch.zeros_like(p) if g is None else g for g, p in zip(found, tensors, strict=True))
    dense = (g.to_dense() if g.is_sparse else g for g in filled)
    return {name: g.detach() for name, g in zip(parameters, dense, strict=True)}


@torch.no_grad()
def _squares_of(gradients: list[PerExampleGradient]) -> list[float]:
    """The squared norm of each example's gradient of a parameter, as the engine has it."""
    balls = [Scale.ball(as_matrix(own.parameter)[own.part]) for own in gradients]
    squares = [own.squared_norms(ball).double() for own, ball in zip(gradients, balls, strict=True)]
    return [max(float(square), 0.0) for square in torch.stack(squares).sum(0)]


@torch.no_grad()
def _differences(
    gradients: dict[str, list[PerExampleGradient]],
    squares: dict[str, list[float]],
    expected: dict[str, Tensor],
    position: int,
) -> list[tuple[str, str]]:
    """The parameters whose gradient or norm the engine has wrong, with what was found."""
    sizes = {name: float(accurate(g).double().norm()) for name, g in expected.items()}
    whole = math.hypot(*sizes.values())
    if not math.isfinite(whole):
        return []
    wrong = []
    for name, g in expected.items():
        half = g.dtype in (torch.float16, torch.bfloat16) or autocast_precision(g.device.type)
        rough = _COARSE if half else 1.0
        tolerance = rough * (_RELATIVE * sizes[name] + _OF_ALL * whole)
        difference, norm = as_matrix(accurate(g)).double(), 0.0
        for own in gradients.get(name, []):
            difference[own.part] -= own.examples(position, position + 1)[0]
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
