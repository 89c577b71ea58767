"""What a forward and a backward pass leave behind: the uses of parameters by examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from privagrad.torch.layout import Layout, Sighting
from privagrad.torch.uses import Use, separate

Arrange = Callable[[Tensor, int], Tensor]


class Tape:
    """Records, during one forward and one backward pass, how examples use parameters.

    Layers call `examples` to learn where the examples are and `tap` to be told the gradient of
    their output; the optimizer calls `collect` once afterwards. A copy of a tape is empty and
    records nothing, so that copies of a private module are plain modules.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], batch_first: bool = True) -> None:
        self.parameters = parameters
        self.batch_first = batch_first
        self.layouts: dict[object, Layout] = {}
        self.open = False
        self.drawn: int | None = None
        self.sightings: list[Sighting] | None = None
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._calls: Counter[int] = Counter()
        self._count = 0
        self.forget()

    def __deepcopy__(self, memo: Any) -> Tape:
        return Tape({})

    def __reduce__(self) -> Any:
        return (Tape, ({},))

    def forget(self) -> None:
        """Drop what the last backward pass left behind."""
        self._uses: list[Use] = []
        self._strays: dict[str, int] = {}
        self._backward: int | None = None
        self._examples = 0

    def trains(self, *parameters: Tensor | None) -> bool:
        return any(id(parameter) in self._names for parameter in parameters)

    @contextmanager
    def passing(self, count: int) -> Iterator[None]:
        """A forward pass of `count` examples."""
        self.open, self._count = True, count
        self._calls.clear()
        try:
            yield
        finally:
            self.open = False

    @property
    def count(self) -> int:
        """How many examples the current forward pass has."""
        return self._count

    def examples(
        self, module: nn.Module, tensor: Tensor, trailing: int = 1, own: Layout | None = None
    ) -> Arrange:
        """Where the examples are in `tensor`, and in all tensors that share its leading shape.

        Returns a function of a tensor and its number of trailing dimensions, which gives it the
        shape (examples, rows of an example, trailing dimensions). `own` is for layers that know
        where their examples are, and cannot have them elsewhere.
        """
        self._calls[id(module)] += 1
        key = (id(module), self._calls[id(module)])
        leading = tensor.dim() - trailing
        if self.sightings is not None:
            name = type(module).__name__
            self.sightings.append(Sighting(key, name, tensor.detach(), leading))
        count = self._count
        layout = self.layouts.get(key)
        if layout is None and count > 1:
            layout = own or Layout(0 if self.batch_first or leading < 2 else 1)
            if leading == 0 or tensor.shape[layout.axis] != count:
                if self.sightings is None:
                    raise ValueError(
                        f"Expected {count} examples in dimension {layout.axis} of the input of "
                        f"{type(module).__name__}, found shape {tuple(tensor.shape)}. Keep the "
                        "examples in the first dimension, or set batch_first."
                    )
                layout = Layout(0)
        if own is not None and layout is not None and layout.axis != own.axis:
            raise ValueError(
                f"Expected the examples in dimension {own.axis} of the input of "
                f"{type(module).__name__}, found them in dimension {layout.axis}: see batch_first."
            )
        chosen = layout or Layout(0)
        return lambda t, n: chosen.arrange(t, count, n)

    def tap(self, output: Tensor, uses: Callable[[Tensor], Iterable[Use]]) -> Tensor:
        """`output`, whose gradient will be handed to `uses` in the backward pass."""
        if not torch.is_grad_enabled() or not self.open:
            return output
        if not output.requires_grad:
            output = _Rooted.apply(output, torch.ones((), requires_grad=True))
        count = self._count
        output.register_hook(lambda gradient: self.receive(count, uses, gradient.detach()))
        return output

    def receive(
        self, count: int, uses: Callable[[Tensor], Iterable[Use]], gradient: Tensor
    ) -> None:
        """Take what a backward pass brings for a forward pass of `count` examples."""
        self._begin(count)
        if count:
            self._uses.extend(use for use in uses(gradient) if self.trains(use.parameter))

    def _begin(self, count: int) -> None:
        backward = torch._C._current_graph_task_id()
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

    def note_stray(self, name: str) -> None:
        """A gradient has reached a parameter past its layer."""
        self._strays[name] = torch._C._current_graph_task_id()

    def collect(self) -> tuple[int, dict[str, list[Use]]]:
        """How many examples there were, and by parameter how they used it."""
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
        by_name: dict[str, list[Use]] = {}
        for use in self._uses:
            by_name.setdefault(self._names[id(use.parameter)], []).append(use)
        count = self._examples
        self.forget()
        return count, {name: separate(uses) for name, uses in by_name.items()}


class _Rooted(torch.autograd.Function):
    """Makes an output part of the graph where none of its inputs needs a gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, root: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None
