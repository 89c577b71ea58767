"""Normalised inputs, times a gain, plus a shift: γ x̂ + β."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privagrad.torch.per_example.gradients import DenseGradient, Gradients
from privagrad.torch.per_example.layers._registry import frozen, layer
from privagrad.torch.per_example.tape import Tape
from privagrad.torch.scales import accurate

InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d


@layer(nn.LayerNorm)
def layer_norm(tape: Tape, module: nn.LayerNorm, x: Tensor) -> Tensor:
    gain, shift, shape = module.weight, module.bias, list(module.normalized_shape)
    y, mean, rate = torch.native_layer_norm(x, shape, frozen(gain), frozen(shift), module.eps)
    mean, rate, saved = mean.detach(), rate.detach(), tape.save(x)

    def normalized() -> Tensor:
        return (saved() - mean).mul_(rate)

    return _tapped(tape, module, x, y, normalized, len(shape))


@layer(nn.RMSNorm)
def rms_norm(tape: Tape, module: nn.RMSNorm, x: Tensor) -> Tensor:
    shape, saved = list(module.normalized_shape), tape.save(x)
    y = F.rms_norm(x, shape, frozen(module.weight), module.eps)

    def normalized() -> Tensor:
        return F.rms_norm(saved(), shape, None, module.eps)

    return _tapped(tape, module, x, y, normalized, len(shape))


@layer(nn.GroupNorm)
def group_norm(tape: Tape, module: nn.GroupNorm, x: Tensor) -> Tensor:
    groups, saved = module.num_groups, tape.save(x)
    y = F.group_norm(x, groups, frozen(module.weight), frozen(module.bias), module.eps)

    def normalized() -> Tensor:
        return F.group_norm(saved(), groups, None, None, module.eps)

    return _tapped(tape, module, x, y, normalized, x.dim() - 1, by_channel=True)


@layer(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(tape: Tape, module: InstanceNorm, x: Tensor) -> Tensor:
    if x.dim() == module._get_no_batch_dim():
        raise ValueError(
            f"Expected examples in the first dimension of the input of {type(module).__name__}, "
            f"found shape {tuple(x.shape)}: give it a dimension of examples."
        )
    saved = tape.save(x)
    gain, shift = frozen(module.weight), frozen(module.bias)
    y = F.instance_norm(x, weight=gain, bias=shift, eps=module.eps)

    def normalized() -> Tensor:
        return F.instance_norm(saved(), eps=module.eps)

    return _tapped(tape, module, x, y, normalized, x.dim() - 1, by_channel=True)


def _tapped(
    tape: Tape,
    module: nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | InstanceNorm,
    x: Tensor,
    y: Tensor,
    normalized: Callable[[], Tensor],
    trailing: int,
    by_channel: bool = False,
) -> Tensor:
    """`y` with the gradients of gain and shift, which are for all `trailing` dimensions of x.

    With `by_channel`, for the first of them alone. `normalized` computes x̂ again, so that nothing
    is kept between the passes that is not kept anyway.
    """
    gain, shift = module.weight, getattr(module, "bias", None)
    examples = tape.examples(module, x, trailing)
    summed = (1, *range(3, trailing + 2)) if by_channel else (1,)

    def per_example(gradient: Tensor) -> Gradients:
        d = accurate(examples(gradient, trailing))
        if tape.trains(gain):
            again = accurate(examples(normalized(), trailing))
            yield DenseGradient(gain, again.mul_(d).sum(summed))
        if shift is not None and tape.trains(shift):
            yield DenseGradient(shift, d.sum(summed))

    return tape.tap(y, per_example)
