"""Normalised inputs, times a gain, plus a shift: γ x̂ + β."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privagrad.torch.per_example.gradients import DenseGradient, PerExampleGradient
from privagrad.torch.per_example.layers._registry import frozen, layer
from privagrad.torch.per_example.tape import Arrange, SavedInput, Tape
from privagrad.torch.scales import accurate

Normalize = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


@layer(nn.LayerNorm)
def layer_norm(tape: Tape, module: nn.LayerNorm, x: Tensor) -> Tensor:
    gain, shift, shape = module.weight, module.bias, list(module.normalized_shape)
    y, mean, rate = torch.native_layer_norm(x, shape, frozen(gain), frozen(shift), module.eps)
    mean, rate, saved = mean.detach(), rate.detach(), SavedInput(x)

    def normalized() -> Tensor:
        return (saved() - mean).mul_(rate)

    return _over_rows(tape, module, x, y, normalized, len(shape), gain, shift)


@layer(nn.RMSNorm)
def rms_norm(tape: Tape, module: nn.RMSNorm, x: Tensor) -> Tensor:
    shape = list(module.normalized_shape)
    y = F.rms_norm(x, shape, frozen(module.weight), module.eps)
    saved = SavedInput(x)

    def normalized() -> Tensor:
        return F.rms_norm(saved(), shape, None, module.eps)

    return _over_rows(tape, module, x, y, normalized, len(shape), module.weight, None)


@layer(nn.GroupNorm)
def group_norm(tape: Tape, module: nn.GroupNorm, x: Tensor) -> Tensor:
    def normalize(x: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
        return F.group_norm(x, module.num_groups, gain, shift, module.eps)

    return _over_channels(tape, module, x, normalize)


@layer(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(
    tape: Tape, module: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d, x: Tensor
) -> Tensor:
    if x.dim() == module._get_no_batch_dim():
        raise ValueError(
            f"Expected examples in the first dimension of the input of {type(module).__name__}, "
            f"found shape {tuple(x.shape)}: give it a dimension of examples."
        )

    def normalize(x: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
        return F.instance_norm(x, weight=gain, bias=shift, eps=module.eps)

    return _over_channels(tape, module, x, normalize)


def _over_rows(
    tape: Tape,
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    normalized: Callable[[], Tensor],
    trailing: int,
    gain: Tensor | None,
    shift: Tensor | None,
) -> Tensor:
    """A gain and a shift for each of the last dimensions."""
    examples = tape.examples(module, x, trailing)

    def per_example(gradient: Tensor) -> Iterator[PerExampleGradient]:
        d = examples(gradient, trailing)
        again = partial(_arranged, normalized, examples, trailing)
        yield from _of_both(tape, gain, shift, d, again, (1,))

    return tape.tap(y, per_example)


def _over_channels(
    tape: Tape,
    module: nn.GroupNorm | nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d,
    x: Tensor,
    normalize: Normalize,
) -> Tensor:
    """A gain and a shift for each channel of x (b, channels, ...)."""
    y = normalize(x, frozen(module.weight), frozen(module.bias))
    trailing = x.dim() - 1
    examples, saved = tape.examples(module, x, trailing), SavedInput(x)
    others = (1, *range(3, x.dim() + 1))

    def per_example(gradient: Tensor) -> Iterator[PerExampleGradient]:
        d = examples(gradient, trailing)
        again = partial(_arranged, partial(normalize, saved(), None, None), examples, trailing)
        yield from _of_both(tape, module.weight, module.bias, d, again, others)

    return tape.tap(y, per_example)


def _arranged(normalized: Callable[[], Tensor], examples: Arrange, trailing: int) -> Tensor:
    # Computed again, so that nothing is kept between the passes that is not kept anyway.
    return examples(normalized(), trailing)


def _of_both(
    tape: Tape,
    gain: Tensor | None,
    shift: Tensor | None,
    gradient: Tensor,
    normalized: Callable[[], Tensor],
    others: tuple[int, ...],
) -> Iterator[PerExampleGradient]:
    gradient = accurate(gradient)
    if gain is not None and tape.trains(gain):
        yield DenseGradient(gain, accurate(normalized()).mul_(gradient).sum(others))
    if shift is not None and tape.trains(shift):
        yield DenseGradient(shift, gradient.sum(others))
