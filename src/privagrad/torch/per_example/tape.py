"""What a forward and a backward pass leave behind: the per-example gradients."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from privagrad.torch.per_example.gradients import PerExampleGradient, without_overlap
from privagrad.torch.per_example.layout import Layout, ObservedTensor

Arrange = Callable[[Tensor, int], Tensor]
Key = tuple[int, int]
GradientsOf = Callable[[Tensor], Iterable[PerExampleGradient]]
"""From the gradient of a layer's output to the per-example gradients of its parameters."""


@dataclass
class ForwardPass:
    """One forward pass: how many examples it has, and where they are at each layer.

    Layouts may become known after the pass; what layers have used before is noted in `early`.
    `losses` are those that layers have made of each example's own terms, with their reduction.
    They are weak: a loss refers to its layers, and these to the pass. `inner` are losses that the
    module computes itself, while it does; `own_losses` are the values of these for each example;
    `factors` are the numbers with which the module's outputs have them. `constants` are tensors
    that may be the same for all examples; `unknown` is whether such a one has met a tensor of which
    it is not known where it has the examples. `calls` are how many tensors a layer has observed
    before each of its calls, by its identity. `written` are the buffers that it has written to.
    `batch` is how many batches, or parts of one, the data loader had handed out before it.
    """

    count: int
    layouts: dict[object, Layout | None]
    open: bool = True
    early: dict[object, Layout | None] = field(default_factory=dict)
    losses: list[tuple[weakref.ref[Tensor], str]] = field(default_factory=list)
    inner: list[GradientEdge] = field(default_factory=list)
    own_losses: list[Tensor] = field(default_factory=list)
    factors: tuple[float, ...] = ()
    constants: dict[object, Tensor] = field(default_factory=dict)
    unknown: bool = False
    calls: dict[int, list[int]] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    batch: int = 0

    @property
    def guessed_wrong(self) -> bool:
        """Whether a layer has used another layout than is known now."""
        return any(self.layouts.get(key, used) != used for key, used in self.early.items())


class Tape:
    """Records the per-example gradients of one forward and one backward pass.

    Layers call `examples` to learn where the examples are and `tap` to receive the gradient of
    their output; the optimizer calls `collect` once afterwards. A copy of a tape is empty and
    records nothing, so that copies of a private module are plain modules.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        batch_first: bool = True,
        loss_reduction: str = "mean",
    ) -> None:
        self.parameters = parameters
        self.batch_first, self.loss_reduction = batch_first, loss_reduction
        self.open = self.plain = False
        self.layers_entered = 0
        self.drawn: int | None = None
        self.observed: list[ObservedTensor] | None = None
        self.guarded = self.loss_seen = self.whole_backward = False
        self.watched: set[int] = set()
        self.recorder: Any = None
        self.current, self._batch = ForwardPass(0, {}), 0
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._calls: Counter[int] = Counter()
        self.forget()

    def __deepcopy__(self, memo: Any) -> Tape:
        return Tape({})

    def __reduce__(self) -> Any:
        return (Tape, ({},))

    def forget(self) -> None:
        """Drop what the last backward pass left behind."""
        self._gradients: list[PerExampleGradient] = []
        self._inputs: list[SavedInput] = []
        self._strays: dict[str, int] = {}
        self._backward: int | None = None
        self._examples = 0

    def begin_batch(self) -> None:
        """The data loader hands out another batch, or part: what passes before it leave is gone."""
        self._batch += 1
        self.forget()

    def trains(self, parameter: Tensor | None) -> bool:
        return id(parameter) in self._names

    @contextmanager
    def passing(
        self, count: int, layouts: dict[object, Layout | None] | None = None, recorder: Any = None
    ) -> Iterator[ForwardPass]:
        """A forward pass of `count` examples, which the recorder sees, if there is one."""
        self.current = ForwardPass(count, layouts or {}, batch=self._batch)
        self.open, self.recorder = True, recorder
        self._calls.clear()
        try:
            with recorder or nullcontext():
                yield self.current
        finally:
            self.open = self.current.open = False
            self.watched |= getattr(recorder, "watched", set())
            self.recorder = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Passes that have nothing to do with the training, nor with what it has left so far."""
        kept = dict(self.__dict__)
        self.forget()
        self.drawn, self.guarded = None, False
        try:
            yield
        finally:
            self.__dict__.update(kept)

    def note_call(self, module: nn.Module) -> None:
        """A layer is called within the pass: what it has observed before."""
        if self.open:
            self.current.calls.setdefault(id(module), []).append(self._calls[id(module)])

    @contextmanager
    def calling_again(self, module: nn.Module, knows_layouts: bool) -> Iterator[None]:
        """A call that is made again in the backward pass, and leaves nothing behind.

        With `knows_layouts` its results depend on where the examples are.
        """
        calls = self.current.calls.get(id(module), [])
        if knows_layouts and len(calls) != 1:
            raise RuntimeError(
                f"Expected a {type(module).__name__} inside of a checkpoint to be called once in a "
                f"pass, found {len(calls)} calls: where its examples are is not known when it is "
                "computed again. Leave it out of the checkpoint."
            )
        self._calls[id(module)] = calls[0] if calls else 0
        self.open = True
        try:
            yield
        finally:
            self.open = False

    def save(self, tensor: Tensor) -> SavedInput:
        """A layer's input, from which gradients are formed until `step()`."""
        return SavedInput(tensor, lambda saved: self._inputs.append(saved))

    @property
    def count(self) -> int:
        """How many examples the current forward pass has."""
        return self.current.count

    def observe(
        self,
        module: nn.Module,
        tensor: Tensor,
        leading: int,
        axis: int | None = None,
        shared: bool = False,
        constant: bool = False,
    ) -> Key:
        """A tensor that goes into a layer or comes out of it; the key of its layout."""
        self._calls[id(module)] += 1
        key = (id(module), self._calls[id(module)])
        if self.observed is not None:
            name = type(module).__name__
            seen = ObservedTensor(key, name, tensor.detach(), leading, axis, shared, constant)
            self.observed.append(seen)
        if constant:
            self.current.constants[key] = tensor.detach()
        return key

    def is_shared(self, module: nn.Module) -> bool:
        """Whether the tensor last observed for a layer is known to be the same for all examples."""
        key = (id(module), self._calls[id(module)])
        shared = self.current.layouts.get(key, self) is None
        # All that one example does is its own.
        shared = shared and (self.count > 1 or self.observed is not None)
        if shared:
            self.current.early[key] = None
        return shared

    def examples(
        self,
        module: nn.Module,
        tensor: Tensor,
        trailing: int = 1,
        own: Layout | None = None,
        constant: bool = False,
    ) -> Arrange:
        """Where the examples are in `tensor`, and in all tensors that share its leading shape.

        Returns a function of a tensor and its number of trailing dimensions, which gives it the
        shape (examples, rows of an example, trailing dimensions). `own` is for layers that know
        where their examples are, and cannot have them elsewhere. With `constant` the tensor may be
        the same for all examples: see `is_shared`.
        """
        leading, axis = tensor.dim() - trailing, None if own is None else own.axis
        key = self.observe(module, tensor, leading, axis, constant, constant)
        current, shape, learning = self.current, tuple(tensor.shape), self.observed is not None
        fallback = own or Layout(0 if self.batch_first or leading < 2 else 1)
        name = type(module).__name__

        def arrange(t: Tensor, n: int) -> Tensor:
            layout = current.layouts.get(key)
            if layout is None:
                fits = leading > 0 and shape[fallback.axis] == current.count
                if current.count > 1 and not fits and not (learning or current.open):
                    raise ValueError(
                        f"Expected {current.count} examples in dimension {fallback.axis} of the "
                        f"input of {name}, found shape {shape}. Keep the examples in the first "
                        "dimension, or set batch_first."
                    )
                layout = fallback if fits else Layout(0)
            if current.open:
                current.early[key] = layout
            return layout.arrange(t, current.count, n)

        return arrange

    def tap(self, output: Tensor, per_example: GradientsOf, call: Any = None) -> Tensor:
        """`output`; the backward pass will hand its gradient to `per_example`.

        `call` is the call of the layer, for losses that go back to it without this gradient.
        """
        if not torch.is_grad_enabled() or not self.open:
            return output
        root = torch.ones((), requires_grad=True)
        tapped: Tensor = _Tap.apply(root, output, self, self.current, per_example, call)
        if call is not None:
            call.tapped(tapped)
        return tapped

    def watch(self, tensor: Tensor) -> None:
        """Someone looks at the gradient of a tensor, or at its memory: it must have both."""
        self.watched.add(tensor.untyped_storage().data_ptr())

    def receive(self, of: ForwardPass, per_example: GradientsOf, gradient: Tensor) -> None:
        """Take what a backward pass brings for a forward pass."""
        if of.batch != self._batch:
            raise RuntimeError(
                "Expected forward pass, backward() and step() on a batch before the data loader "
                "hands out the next one, found a backward pass of an earlier batch: its rows would "
                "be released as if they were those of the next batch. Take the next batch after "
                "step()."
            )
        self._refuse_other_passes(of.count)
        if of.count:
            self._gradients.extend(g for g in per_example(gradient) if self.trains(g.parameter))

    def _refuse_other_passes(self, count: int) -> None:
        backward = torch._C._current_graph_task_id()
        if self.guarded and not self.loss_seen:
            raise RuntimeError(
                "Expected loss.backward() on a loss computed from the outputs of the private "
                "module, found a backward pass that the engine has not seen the loss of "
                "(torch.autograd.backward, a scripted loss, a loss kept as an attribute of the "
                "module). Compute the loss from the module's outputs in Python and call its "
                "backward(), or hand over the criterion: see PerExampleLoss. If you vouch for the "
                "loss yourself, pass verify=False to make_private."
            )
        if self._backward is None:
            self._backward, self._examples = backward, count
            if self.drawn is not None and count != self.drawn:
                raise RuntimeError(
                    f"Expected the {self.drawn} examples that the data loader drew, found a batch "
                    f"of {count} in the module. One row of the batch is one example: several rows "
                    "of one example, or a part of the batch, are not what is accounted for."
                )
        elif backward != self._backward:
            raise RuntimeError(
                "Expected one backward() for each step(), found a second one: the norm of an "
                "example's gradient is bounded once. Add the losses and call backward() on the "
                "sum; for batches too large for memory give make_private a "
                "max_physical_batch_size, and call step() after each backward()."
            )
        elif count != self._examples:
            raise RuntimeError(
                f"Expected the same examples in every forward pass before a backward(), found "
                f"passes of {self._examples} and {count}."
            )

    def note_stray(self, name: str, gradient: Tensor) -> None:
        """A gradient has reached a parameter itself, past its layer: those of examples never do."""
        self._strays[name] = torch._C._current_graph_task_id()

    def collect(self) -> tuple[int, dict[str, list[PerExampleGradient]]]:
        """How many examples there were, and their gradients by the parameter's name."""
        if self._backward is None:
            raise RuntimeError(
                "Expected loss.backward() before optimizer.step(), found no private gradients. "
                "Call the module that make_private returned, in training mode, and backward() on "
                "a loss of its output."
            )
        strays = [name for name, backward in self._strays.items() if backward == self._backward]
        if strays:
            raise RuntimeError(
                f"Expected parameters to be used by their own layers, found {', '.join(strays)} in "
                "the loss by another way (a functional call, a penalty): that part of the gradient "
                "belongs to no example. Share the layer or its parameter between modules instead, "
                "and leave penalties to the optimizer's weight_decay."
            )
        for saved in self._inputs:
            saved.require_unchanged()
        by_name: dict[str, list[PerExampleGradient]] = {}
        for gradient in self._gradients:
            by_name.setdefault(self._names[id(gradient.parameter)], []).append(gradient)
        count = self._examples
        self.forget()
        self.watched.clear()
        return count, {name: without_overlap(own) for name, own in by_name.items()}


class SavedInput:
    """A tensor that a layer needs again, unchanged: in the backward pass, and in `step()`."""

    def __init__(self, tensor: Tensor, used: Callable[[SavedInput], None] | None = None) -> None:
        self._tensor, self._version, self._used = tensor.detach(), tensor._version, used

    @property
    def unchanged(self) -> bool:
        return self._tensor._version == self._version

    def require_unchanged(self) -> None:
        if not self.unchanged:
            raise RuntimeError(
                f"Expected the input of a layer, of shape {tuple(self._tensor.shape)}, to stay as "
                "it was until optimizer.step(), found it changed in place. Use the operation that "
                "returns a new tensor instead (x = x + y for x += y)."
            )

    def __call__(self) -> Tensor:
        self.require_unchanged()
        if self._used is not None:
            self._used(self)
        return self._tensor


class _Tap(torch.autograd.Function):
    """The identity, which tells the tape of the gradient.

    Its result is no view of anything: whatever is done to it in place comes after it in the graph,
    so that the gradient that arrives is always that of the layer's own output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        root: Tensor,
        output: Tensor,
        tape: Tape,
        of: ForwardPass,
        per_example: GradientsOf,
        call: object,
    ) -> Tensor:
        ctx.tape, ctx.of, ctx.per_example, ctx.call = tape, of, per_example, call
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            # Everything has gone another way.
            ctx.tape.receive(ctx.of, lambda _: (), torch.empty(0))
            return None, None, None, None, None, None
        ctx.tape.receive(ctx.of, ctx.per_example, gradient.detach())
        return None, gradient if ctx.needs_input_grad[1] else None, None, None, None, None
