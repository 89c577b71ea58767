"""A module whose layers record per-example gradients."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from privagrad.torch.guards.determinism import BufferVersions, generator_states
from privagrad.torch.guards.loss import LossGuard
from privagrad.torch.guards.module_runs import inputs_kept
from privagrad.torch.guards.observed import Layouts
from privagrad.torch.guards.random_functions import RandomDraws
from privagrad.torch.guards.recorder import Recorder, public_tensors
from privagrad.torch.guards.refusals import BROKEN, UnverifiedError
from privagrad.torch.guards.structure import (
    leaves_of,
    map_leaves,
    map_tensors,
    modules_of,
    tensors_of,
)
from privagrad.torch.guards.traced import node_of, untraced
from privagrad.torch.guards.verification import ModuleGuard
from privagrad.torch.opacus_names import hint_for_module
from privagrad.torch.per_example.inner_losses import note_losses, private_pass
from privagrad.torch.per_example.layers import layer_of
from privagrad.torch.per_example.layers._registry import Layer
from privagrad.torch.per_example.layers.anything import anything
from privagrad.torch.per_example.layout import INPUTS, count_examples
from privagrad.torch.per_example.shared import SharedTensor, spread_for_layer
from privagrad.torch.per_example.tape import ForwardPass, Tape
from privagrad.torch.validator import is_frozen_norm


class PrivateModule(nn.Module):
    """The given module, as `_module`, with the private forward pass of each of its layers.

    Behaves as the module itself: attributes are its attributes. Only in training mode with
    gradients enabled does it record anything.

    Parameters
    ----------
    module : Module
    tape : Tape
    verify : bool
        Whether modules and losses are checked to keep examples apart. False: someone else vouches
        for them.
    """

    def __init__(self, module: nn.Module, tape: Tape, verify: bool = True) -> None:
        super().__init__()
        self._module = module
        self._tape = tape
        tape.guarded = verify
        self.guard = ModuleGuard(module, tape, verify)
        self.loss_guard = LossGuard(tape, verify)
        for child in _owners(module, tape):
            if not isinstance(vars(child).get("forward"), PrivateForward | None):
                raise ValueError(
                    f"Expected the forward of a {type(child).__name__} as its class defines it, "
                    "found one that was set on the module itself: it would be lost. Make a "
                    "subclass."
                )
            child.forward = PrivateForward(tape, child, layer_of(child))
        self._handles = [
            parameter.register_hook(partial(tape.note_stray, name))
            for name, parameter in tape.parameters.items()
        ]
        self._known = self._parts()
        self._frozen_norms = [part for part in module.modules() if is_frozen_norm(part)]
        self.train(module.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tape = self._tape
        if not (self.training and torch.is_grad_enabled() and tape.parameters):
            # What is computed without training is followed as that of any other function.
            outputs = self._module(*args, **kwargs)
            for part in self._module.modules() if tape.parameters else ():
                kept = [name for name, value in vars(part).items() if node_of(value) is not None]
                vars(part).update({name: untraced(vars(part)[name]) for name in kept})
            return outputs
        self._refuse_changes()
        self.loss_guard.check_state(self._module)
        _refuse_autocast((args, kwargs))
        _refuse_objects((args, kwargs))
        self.loss_guard.check_inputs((args, kwargs))
        of_batch = [node_of(leaf) is not None for leaf in leaves_of((args, kwargs), INPUTS)]
        inputs = untraced((args, kwargs))
        count = count_examples(inputs, tape.batch_first)
        outputs, current, drawn = self._pass(inputs, count, of_batch)
        alone = self.guard.outputs_without_padding((args, kwargs), count, current.layouts, drawn)
        return self.loss_guard.outputs(outputs, current, alone)

    def _pass(
        self, inputs: Any, count: int, of_batch: Sequence[bool]
    ) -> tuple[Any, ForwardPass, RandomDraws]:
        """A forward pass with the layouts that it has been seen to have."""
        guard = self.guard
        if not count:
            return *self._pass_of_none(inputs), RandomDraws()
        layouts = guard.prepare(inputs, count, of_batch)
        # Again where layers had to guess where the examples are, and guessed wrong.
        for _ in range(3):
            outputs, current, recorder = self._recorded(inputs, count, layouts)
            current.layouts = layouts = guard.layouts(recorder, inputs, count, outputs, current)
            if not (current.guessed_wrong or current.unknown or guard.unsettled):
                return outputs, current, recorder.drawn
        raise UnverifiedError(
            "Expected a module that does the same with the same batch, found that it does "
            "something else each time: it cannot be verified."
        )

    def _pass_of_none(self, inputs: Any) -> tuple[Any, ForwardPass]:
        """A pass of an empty batch.

        Where the module cannot take one, an example of zeros stands in, whose gradient is dropped.
        """
        try:
            return self._recorded(inputs, 0, {})[:2]
        except BROKEN:
            axis = 0 if self._tape.batch_first else 1
            outputs, current, _ = self._recorded(_of_one(inputs, axis), 0, {})
            return _of_none(outputs, axis), current

    def _recorded(
        self, inputs: Any, count: int, layouts: Layouts
    ) -> tuple[Any, ForwardPass, Recorder]:
        tape, recorder = self._tape, Recorder(count or 1, public_tensors(self._module))
        if self.guard.draws_outside_torch:
            recorder.drawn.states = generator_states()
        buffers = BufferVersions(self._module)
        with inputs_kept(inputs), private_pass(tape, count, layouts, recorder) as current:
            outputs = self._module(*inputs[0], **inputs[1])
            note_losses(tape, outputs)
        current.written = buffers.written()
        return outputs, current, recorder

    def _parts(self) -> tuple[list[int], list[int]]:
        modules = modules_of(self._module)
        own = (p for module in modules for p in module._parameters.values() if p is not None)
        return [id(module) for module in modules], [id(p) for p in own if p.requires_grad]

    def train(self, mode: bool = True) -> Self:
        """As of any module; BatchNorm that was frozen stays in eval mode."""
        super().train(mode)
        for norm in self._frozen_norms:
            norm.eval()
        return self

    def to_standard_module(self) -> nn.Module:
        """The module that make_private was given; calls of it in training mode are refused."""
        return self._module

    def detach(self) -> None:
        """Stop watching the parameters."""
        for handle in self._handles:
            handle.remove()

    def _refuse_changes(self) -> None:
        for norm in self._frozen_norms:
            if not is_frozen_norm(norm):
                raise RuntimeError(
                    f"Expected {type(norm).__name__} frozen as it was when make_private was "
                    "called, found it switched to training, or its parameters trainable: it would "
                    "normalise with statistics of the whole batch, and keep them. Call its eval() "
                    "after train(), or that of the module that make_private returned."
                )
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
            try:
                return getattr(super().__getattr__("_module"), name)
            except AttributeError as error:
                raise hint_for_module(name, error) from None


def _refuse_autocast(inputs: Any) -> None:
    # Where the tensors are is no computation to be traced.
    with torch._C.DisableTorchFunctionSubclass():
        devices = {tensor.device.type for tensor in tensors_of(inputs)}
    for device in devices:
        if torch.is_autocast_enabled(device) and _in_float16(device):
            raise RuntimeError(
                f"Expected a forward pass without autocast or in bfloat16, found autocast to "
                f"float16 for {device}: gradients would need a scaled loss, whose scale the norms "
                "would have. Use torch.autocast(..., dtype=torch.bfloat16)."
            )


def _in_float16(device: str) -> bool:
    return torch.get_autocast_dtype(device) is not torch.bfloat16


def _refuse_objects(inputs: Any) -> None:
    for leaf in leaves_of(inputs, INPUTS):
        if not isinstance(leaf, Tensor | PackedSequence) and tensors_of(leaf):
            raise UnverifiedError(
                "Expected tensors, or tuples, lists and dictionaries of tensors, as inputs of the "
                f"module, found tensors inside of a {type(leaf).__name__}: which example they "
                "belong to is not known. Give the module the tensors themselves."
            )


def _of_one(inputs: Any, axis: int) -> Any:
    """Inputs of one example, all zeros, in place of those of none."""

    def zeros(tensor: Tensor) -> Tensor:
        at = min(axis, tensor.dim() - 1)
        if at < 0 or tensor.shape[at]:
            return tensor
        return tensor.new_zeros([1 if dim == at else n for dim, n in enumerate(tensor.shape)])

    return map_tensors(zeros, inputs)


def _of_none(outputs: Any, axis: int) -> Any:
    """The outputs of one example without it."""

    def emptied(tensor: Tensor) -> Tensor:
        at = min(axis, tensor.dim() - 1)
        return tensor.narrow(at, 0, 0) if at >= 0 and tensor.shape[at] == 1 else tensor

    return map_tensors(emptied, outputs)


class PrivateForward:
    """The forward of one layer: private while the tape is open, its own otherwise."""

    def __init__(self, tape: Tape, module: nn.Module, layer: Layer) -> None:
        self.tape, self.module, self.layer = tape, module, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tape = self.tape
        trained = tape.parameters and self.module.training and torch.is_grad_enabled()
        if trained and not (tape.open or tape.plain):
            if torch._C._current_graph_task_id() != -1 and tape.current.count:
                return self._again(*args, **kwargs)
            raise RuntimeError(
                f"Expected a call of the module that make_private returned, found a call of a "
                f"{type(self.module).__name__} inside it: its gradients would not be private. "
                "For evaluation use eval() or torch.no_grad()."
            )
        if any(type(x) is SharedTensor for x in (*args, *kwargs.values())):
            args, kwargs = map_leaves(spread_for_layer, [args, kwargs])
        tape.note_call(self.module)
        tape.layers_entered += 1
        try:
            if not tape.open:
                return type(self.module).forward(self.module, *args, **kwargs)
            if tape.recorder is None:
                return self.layer(tape, self.module, *args, **kwargs)
            with tape.recorder.layer(self.module, *args, *kwargs.values()):
                return self.layer(tape, self.module, *args, **kwargs)
        finally:
            tape.layers_entered -= 1

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        """The layer within a backward pass: a checkpoint computes its activations again."""
        _refuse_reentrant_checkpoints()
        tape = self.tape
        with tape.calling_again(self.module, self.layer is anything):
            tape.layers_entered += 1
            try:
                return self.layer(tape, self.module, *args, **kwargs)
            finally:
                tape.layers_entered -= 1


def _refuse_reentrant_checkpoints() -> None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_qualname == "CheckpointFunction.backward":
            raise RuntimeError(
                "Expected torch.utils.checkpoint.checkpoint(..., use_reentrant=False), found "
                "use_reentrant=True: it makes a backward pass of its own for each checkpoint, and "
                "the gradient of an example must come in one. Models of transformers: "
                "activation_checkpointing_enable({'use_reentrant': False})."
            )
        frame = frame.f_back


def _owners(module: nn.Module, tape: Tape) -> Iterator[nn.Module]:
    """The topmost modules that have trainable parameters of their own, or in lists of their own."""
    # Attention uses its output layer's parameters itself.
    attends = isinstance(module, nn.MultiheadAttention)
    lists = (m for m in module.children() if isinstance(m, nn.ParameterList | nn.ParameterDict))
    own = itertools.chain(module.parameters(recurse=attends), *(m.parameters() for m in lists))
    if any(tape.trains(p) for p in own):
        yield module
        return
    for child in module.children():
        yield from _owners(child, tape)
