"""Tensors that remember how they were computed from the examples of a batch."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from privagrad.torch.guards.constants import of_batch
from privagrad.torch.guards.means import MEANS
from privagrad.torch.guards.structure import leaves_of, map_leaves
from privagrad.torch.guards.trace import TraceNode, chooses, history


class TracedTensor(torch.Tensor):
    """A tensor of the batch, an output of the private module, or what was computed of these."""

    node: TraceNode | None = None
    guard: Any = None
    version = 0

    @classmethod
    def of(cls, tensor: Tensor, node: TraceNode, guard: Any) -> TracedTensor:
        traced = tensor.as_subclass(cls)
        traced.node, traced.guard, traced.version = node, guard, _version(tensor)
        return traced

    def __format__(self, spec: str) -> str:
        if self.guard is not None:
            self.guard.read()
        return format(untraced(self.detach()), spec)

    def __repr__(self) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return repr(self.as_subclass(Tensor))

    def __deepcopy__(self, memo: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            twin = copy.deepcopy(self.as_subclass(Tensor), memo)
            return twin if self.node is None else TracedTensor.of(twin, self.node, self.guard)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "Expected a loss that is computed in Python, found one inside of torch.compile, "
                "where the engine cannot follow it. Leave the loss uncompiled."
            )
        if func is Tensor.backward:
            return _backward(*args, **kwargs)
        if func in _SILENT:
            return super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            call = _Call(func, args, kwargs)
            if func in WATCHES and call.guard is not None:
                call.guard.watch(args[0])
        made: tuple[Any, ...] | None = None
        if func in MEANS and call.guard is not None:
            result, made = MEANS[func](func, *args, **kwargs)
        else:
            result = super().__torch_function__(func, types, args, kwargs)
        if call.guard is None or all(node is None for node in call.nodes):
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return call.followed(result, made)


class _Call:
    """A call of a function of PyTorch, as it is before the function runs."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func = func
        self.given: list[Any] = []
        # In containers of our own: the function may change those that it is given.
        self._arguments = map_leaves(self._note, [args, kwargs])
        self.versions = [_version(x) for x in self.given]
        self.nodes = [node_of(x) for x in self.given]
        guards = (x.guard for x in self.given if isinstance(x, TracedTensor) and x.guard)
        self.guard: Any = next(guards, None)
        self.target = _own_target(func, self.given, self.nodes)

    def followed(self, result: Any, made: tuple[Any, ...] | None) -> Any:
        """`result`, with its tensors and those that the call has changed traced.

        `made` is how the result is computed, where that is not by the function itself.
        """
        func, guard = self.func, self.guard
        if func in _NUMBERS:
            guard.escaped(result, self.nodes[0])
            return of_batch(result) if func in _MARKED else result
        # The size of a value is of the batch where the data say how many rows it has.
        if func in _READS or (func in _SIZES and any(map(chooses, history(self.nodes[0])))):
            guard.read()
            return result
        traced = [
            x if node is None else node for x, node in zip(self.given, self.nodes, strict=True)
        ]
        made = made or (func, *self._with(traced))
        if func in _SQUEEZES and len(self.given) == 1:
            # A single example would lose its dimension too.
            single = tuple(dim for dim, size in enumerate(self.given[0].shape) if size == 1)
            made = (func, [traced[0], single], {})
        if self.target is not None and isinstance(result, TracedTensor):
            # What is returned can be computed again, from the tensor as it was.
            made = (func, *self._with([self.target, *traced[1:]]))
            _set(result, guard, made, 0, True)
        for place, x in enumerate(self.given):
            if isinstance(x, Tensor) and _version(x) != self.versions[place]:
                _set(x, guard, made, place, True)
        known = {id(x) for x in (*self.given, result if self.target is not None else None)}
        for place, leaf in enumerate(leaves_of(result)):
            if isinstance(leaf, TracedTensor) and id(leaf) not in known:
                _set(leaf, guard, made, place, False)
        return result

    def _note(self, leaf: Any) -> Any:
        self.given.append(leaf)
        return leaf

    def _with(self, leaves: list[Any]) -> Any:
        """The arguments with other leaves, in new containers."""
        waiting = iter(leaves)
        return map_leaves(lambda _: next(waiting), self._arguments)


WATCHES: set[Any] = {
    Tensor.register_hook,
    Tensor.retain_grad,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    vars(torch._C.TensorBase)["grad_fn"].__get__,
    vars(torch._C.TensorBase)["data"].__get__,
    vars(torch._C.TensorBase)["data"].__set__,
}
"""Functions after which a tensor needs its own gradient, or may change without notice."""

_SILENT = {Tensor.requires_grad.__get__}  # type: ignore[attr-defined]
_SQUEEZES = {Tensor.squeeze, torch.squeeze}
_MARKED = {Tensor.item, Tensor.tolist}
_READS: set[Any] = {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
_SIZES: set[Any] = {
    Tensor.__len__,
    Tensor.numel,
    Tensor.size,
    vars(torch._C.TensorBase)["shape"].__get__,
}
_NUMBERS = {*_MARKED, Tensor.__float__, Tensor.__int__, Tensor.__index__}


def _own_target(func: Any, given: list[Any], nodes: list[Any]) -> Tensor | None:
    """A copy of the tensor, not of the batch, that a function is about to write to."""
    name = getattr(func, "__name__", "")
    writes = name.endswith("_") and not name.endswith("__")
    if not (writes and given and isinstance(given[0], Tensor) and nodes[0] is None):
        return None
    return given[0].detach().clone() if any(nodes) else None


def node_of(tensor: Any) -> TraceNode | None:
    """How a tensor was computed, unless it has been changed since through another view of it."""
    if not isinstance(tensor, TracedTensor):
        return None
    if tensor.node is not None and _version(tensor) != tensor.version:
        tensor.node = tensor.guard.changed_elsewhere()
        tensor.version = _version(tensor)
    return tensor.node


def _set(tensor: Tensor, guard: Any, made: Any, place: int, written: bool) -> None:
    if not isinstance(tensor, TracedTensor):
        # Something of the batch was written into a tensor that is not ours to mark.
        guard.lost(tensor)
        return
    tensor.guard, tensor.version = guard, _version(tensor)
    tensor.node = guard.node(made, place, written, tensor.requires_grad)
    if tensor.node.made and chooses(tensor.node):
        tensor.node.chosen = tuple(tensor.shape)


def _version(value: Any) -> int:
    if not isinstance(value, Tensor):
        return 0
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if value.is_inference() else value._version


def _backward(loss: Any, *args: Any, **kwargs: Any) -> None:
    """The backward pass of a traced loss, which is checked before."""
    guard = getattr(loss, "guard", None)
    inputs = [*args[3:], kwargs.get("inputs")]
    given = [*args[:1], kwargs.get("gradient"), *inputs]
    if guard is not None and guard.verify and any(x is not None for x in given):
        raise RuntimeError(
            "Expected loss.backward() of a loss that is one number, found backward(gradient=...) "
            "or backward(inputs=...): multiply the loss instead."
        )
    whole = all(x is None for x in inputs)
    checked = nullcontext() if guard is None else guard.backward_of(loss, whole)
    with checked, torch._C.DisableTorchFunctionSubclass():
        Tensor.backward(loss, *args, **kwargs)


def untraced(value: Any) -> Any:
    """`value` with plain tensors in place of traced ones."""
    with torch._C.DisableTorchFunctionSubclass():
        return map_leaves(
            lambda x: x.as_subclass(Tensor) if isinstance(x, TracedTensor) else x, value
        )
