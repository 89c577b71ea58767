"""A module whose layers record how examples use its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from privagrad.torch.layers import Layer, layer_of
from privagrad.torch.layout import (
    Sighting,
    count_examples,
    find_layouts,
    undisturbed,
)
from privagrad.torch.tape import Tape
from privagrad.torch.watch import Watch


class PrivateModule(nn.Module):
    """The given module, as `_module`, with the private forward pass of each of its layers.

    Behaves as the module itself: attributes are its attributes. Only in training mode with
    gradients enabled does it record anything.
    """

    def __init__(self, module: nn.Module, tape: Tape) -> None:
        super().__init__()
        self._module = module
        self._tape = tape
        self._watch = Watch(tape)
        self._tried = False
        for child in _owners(module, tape):
            child.forward = Tapped(tape, child, layer_of(child))
        for name, parameter in tape.parameters.items():
            parameter.register_hook(_Stray(tape, name))
        self._known = self._parts()
        self.train(module.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tape = self._tape
        if not (self.training and torch.is_grad_enabled() and tape.parameters):
            return self._module(*args, **kwargs)
        self._refuse_changes()
        count = count_examples(args, kwargs, tape.batch_first)
        if not self._tried and count > 1:
            self._try(args, kwargs, count)
        with tape.passing(count):
            outputs = self._module(*args, **kwargs)
        return self._watch.outputs(outputs, count)

    def _try(self, args: Any, kwargs: Any, count: int) -> None:
        """Learn from a few examples where the examples are, and that they are kept apart."""
        tape = self._tape

        def run(inputs: Any) -> list[Sighting]:
            tape.sightings = []
            try:
                with undisturbed(self._module):
                    torch.manual_seed(0)
                    kept = count_examples(inputs[0], inputs[1], tape.batch_first)
                    with tape.passing(kept):
                        outputs = self._module(*inputs[0], **inputs[1])
                return tape.sightings + [
                    Sighting(("output", i), "the module's output", leaf.detach(), leaf.dim())
                    for i, leaf in enumerate(tree_flatten(outputs)[0])
                    if isinstance(leaf, Tensor)
                ]
            finally:
                tape.sightings = None

        tape.layouts = find_layouts(run, (args, kwargs), count, tape.batch_first)
        self._tried = True

    def _parts(self) -> tuple[list[int], list[int]]:
        modules = [id(module) for module in self._module.modules()]
        return modules, [id(p) for p in self._module.parameters() if p.requires_grad]

    def _refuse_changes(self) -> None:
        if self._parts() == self._known:
            return
        known = set(self._known[0]) | set(self._known[1])
        new = [
            name or "the module itself"
            for name, part in (*self._module.named_modules(), *self._module.named_parameters())
            if id(part) not in known and (isinstance(part, nn.Module) or part.requires_grad)
        ]
        raise RuntimeError(
            "Expected the module as it was when make_private was called, found changes"
            + (f" at {', '.join(new)}" if new else "")
            + ": gradients of new or newly trainable parameters would be neither bounded nor "
            "noisy. Finish the module first, then call make_private."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._tape.forget()
        super().zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)


class _Stray:
    """Hears of gradients that reach a parameter itself: those of examples never do."""

    def __init__(self, tape: Tape, name: str) -> None:
        self.tape, self.name = tape, name

    def __call__(self, gradient: Tensor) -> None:
        self.tape.note_stray(self.name)


class Tapped:
    """The forward of one layer: private while the tape is open, its own otherwise."""

    def __init__(self, tape: Tape, module: nn.Module, layer: Layer) -> None:
        self.tape, self.module, self.layer = tape, module, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.tape.open:
            return self.layer(self.tape, self.module, *args, **kwargs)
        if self.tape.parameters and self.module.training and torch.is_grad_enabled():
            raise RuntimeError(
                f"Expected a call of the module that make_private returned, found a call of a "
                f"{type(self.module).__name__} inside it: its gradients would not be private. "
                "For evaluation use eval() or torch.no_grad()."
            )
        return type(self.module).forward(self.module, *args, **kwargs)


def _owners(module: nn.Module, tape: Tape) -> Iterator[nn.Module]:
    """The topmost modules that have trainable parameters of their own."""
    # Attention uses its output layer's parameters itself.
    whole = isinstance(module, nn.MultiheadAttention)
    if any(tape.trains(p) for p in module.parameters(recurse=whole)):
        yield module
        return
    for child in module.children():
        yield from _owners(child, tape)
