"""Any module that treats examples one by one: every example gets parameters of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from privagrad.torch.guards.refusals import UnverifiedError
from privagrad.torch.per_example.gradients import DenseGradient, Gradients
from privagrad.torch.per_example.layout import Layout
from privagrad.torch.per_example.tape import Tape


def anything(tape: Tape, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """vmap over examples of the module as it is; autograd gives each example's own gradient.

    Which inputs and outputs have examples, and where, is learned beforehand; every example gets
    what the module would get for it alone. The gradients of all examples exist at once: for
    large modules write a layer.
    """
    leaves, structure = tree_flatten((args, kwargs))
    plain = type(module).forward
    keys = [_observe(tape, module, leaf) for leaf in leaves]
    if tape.observed is not None or tape.count == 0:
        with torch.no_grad():
            outputs = plain(module, *args, **kwargs)
        for leaf in tree_flatten(outputs)[0]:
            _observe(tape, module, leaf)
        return tree_map(lambda y: _rooted(tape, y), outputs)

    found = [_layout(tape, key, leaf) for key, leaf in zip(keys, leaves, strict=True)]
    constants: list[Any] = []
    forms: list[Any] = []

    def one(own: dict[str, Tensor], values: list[Tensor]) -> list[Tensor]:
        given = iter(values)
        filled = [x if at is None else next(given) for at, x in zip(found, leaves, strict=True)]
        a, k = tree_unflatten(filled, structure)
        outputs, form = tree_flatten(
            functional_call(
                # The names by which the module was wrapped are in the way of a functional call.
                _Plain(module, plain), {f"module.{n}": p for n, p in own.items()}, a, k
            )
        )  # fmt: skip
        constants[:] = [None if isinstance(y, Tensor) else y for y in outputs]
        forms[:] = [form]
        return [y for y in outputs if isinstance(y, Tensor)]

    padding = {id(m.weight): m.padding_idx for m in module.modules() if isinstance(m, nn.Embedding)}
    parameters = {
        n: _own(tape, p, tape.count, padding.get(id(p))) for n, p in module.named_parameters()
    }
    chosen = [
        at.split(x, tape.count) for at, x in zip(found, leaves, strict=True) if at is not None
    ]
    if not chosen:
        raise ValueError(
            "Expected a module with parameters of its own to work on the examples of the batch, "
            "found inputs that are the same for every batch: its gradient cannot be told apart by "
            "example. Give it an input that has the examples, for instance expanded to them."
        )
    results = iter(one_by_one(one, parameters, chosen))
    joined = [_joined(tape, module, next(results)) if c is None else c for c in constants]
    return tree_unflatten(joined, forms[0])


def one_by_one(one: Callable[..., Any], *stacked: Any) -> Any:
    """The results of `one` for all examples, which are first in every tensor; stacked."""
    try:
        with warnings.catch_warnings():
            # Of functions that vmap takes example by example itself.
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            return vmap(one, randomness="different")(*stacked)
    except UnverifiedError:
        raise
    except RuntimeError:
        # Such as branches that depend on values, which vmap cannot take.
        examples = range(len(tree_leaves(stacked)[0]))
        results = [one(*tree_map(itemgetter(i), stacked)) for i in examples]
        return tree_map(lambda *parts: torch.stack(parts), *results)


def _observe(tape: Tape, module: nn.Module, leaf: Any) -> object:
    return tape.observe(module, leaf, leaf.dim(), shared=True) if isinstance(leaf, Tensor) else None


def _layout(tape: Tape, key: object, leaf: Any) -> Layout | None:
    """Where the examples are in an input: as learned, else first."""
    if not isinstance(leaf, Tensor):
        return None
    # All that there is belongs to a single example.
    fits = leaf.dim() > 0 and tape.count in (1, leaf.shape[0])
    used = tape.current.layouts.get(key, Layout(0) if fits else None)
    tape.current.early[key] = used
    return used


def _joined(tape: Tape, module: nn.Module, parts: Tensor) -> Tensor:
    """An output of all examples, as the module itself would give it."""
    key = tape.observe(module, parts, parts.dim(), shared=True)
    used = tape.current.layouts.get(key, Layout(0))
    tape.current.early[key] = used
    if used is None or parts.dim() < 2:
        if used is not None and parts.dim() == 1:
            return parts
        raise ValueError(
            f"Expected outputs of {type(module).__name__} for each example, found one that is the "
            "same for all: its gradient cannot be told apart by example. Expand it to the examples "
            "inside the module."
        )
    return used.join(parts)


def _rooted(tape: Tape, output: Any) -> Any:
    """An output of no example, which backward() may start from all the same."""
    if isinstance(output, Tensor) and output.is_floating_point():
        return tape.tap(output, lambda gradient: ())
    return output


def _own(tape: Tape, parameter: nn.Parameter, count: int, padding: int | None) -> Tensor:
    """The parameter once for every example; the row `padding` of an embedding is not trained."""
    copies = parameter.detach().expand(count, *parameter.shape)
    if not tape.trains(parameter):
        return copies

    def per_example(gradient: Tensor) -> Gradients:
        if padding is not None:
            # PyTorch leaves it out, but not for a parameter of every example.
            gradient = gradient.clone()
            gradient[:, padding] = 0.0
        yield DenseGradient(parameter, gradient)

    return tape.tap(copies.clone(), per_example)


class _Plain(nn.Module):
    """A module under its own forward, past the private one."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        super().__init__()
        self.module, self.plain = module, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(self.module, *args, **kwargs)
