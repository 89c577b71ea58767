"""Any module that treats examples one by one: every example gets parameters of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from privagrad.torch.tape import Tape
from privagrad.torch.uses import Direct, Use


def anything(tape: Tape, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """vmap over examples of the module as it is; autograd gives each example's own gradient.

    The gradients of all examples exist at once: for large modules write a layer.
    """
    count = tape.count
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if tensors:
        tape.examples(module, tensors[0], tensors[0].dim() - 1)
    mapped = [isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == count for x in leaves]
    # The names by which the module was wrapped are in the way of a functional call.
    plain = type(module).forward
    parameters = {
        name: _own(tape, parameter, count) for name, parameter in module.named_parameters()
    }

    def one(own: dict[str, Tensor], values: list[Tensor]) -> Any:
        given = iter(values)
        filled = [next(given)[None] if m else x for m, x in zip(mapped, leaves, strict=True)]
        a, k = tree_unflatten(filled, structure)
        outputs = functional_call(
            _Plain(module, plain), {f"module.{n}": p for n, p in own.items()}, a, k
        )
        return tree_map(lambda y: y[0], outputs)

    if count == 0:
        with torch.no_grad():
            outputs = plain(module, *args, **kwargs)
        return tree_map(lambda y: _rooted(tape, y), outputs)
    chosen = [x for m, x in zip(mapped, leaves, strict=True) if m]
    axes = (dict.fromkeys(parameters, 0), [0] * len(chosen))
    return vmap(one, in_dims=axes, randomness="different")(parameters, chosen)


def _rooted(tape: Tape, output: Any) -> Any:
    """An output of no example, which backward() may start from all the same."""
    if isinstance(output, Tensor) and output.is_floating_point():
        return tape.tap(output, lambda gradient: ())
    return output


def _own(tape: Tape, parameter: nn.Parameter, count: int) -> Tensor:
    """The parameter once for every example."""
    copies = parameter.detach().expand(count, *parameter.shape)
    if not tape.trains(parameter):
        return copies

    def uses(gradient: Tensor) -> Iterator[Use]:
        yield Direct(parameter, gradient)

    return tape.tap(copies.clone(), uses)


class _Plain(nn.Module):
    """A module under its own forward, past the private one."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        super().__init__()
        self.module, self.plain = module, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(self.module, *args, **kwargs)
