"""Convolutions: the gradient of the weight is what the output's gradient says of input windows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from privagrad.torch.per_example.gradients import (
    DenseGradient,
    FormedGradient,
    Gradients,
    sums_of_products,
)
from privagrad.torch.per_example.layers._registry import frozen, layer
from privagrad.torch.per_example.tape import Tape
from privagrad.torch.scales import Scale, accurate

_WINDOWS = 2**20
"""Numbers in the windows that are laid out at a time."""

_SHORT = 16
"""Windows of outputs with shorter rows are gathered: copies of short runs of numbers are slow."""

_GRADIENTS = 2**18
"""Numbers in the gradients that are not kept: they stay close to the processor."""

Convolving = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d

_CONVOLVE: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSE: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_WEIGHT: dict[int, Any] = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}


class Geometry(NamedTuple):
    """Which inputs a convolution brings to which outputs."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@layer(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(tape: Tape, module: Convolving, x: Tensor) -> Tensor:
    dims, pads = module.weight.dim() - 2, module._reversed_padding_repeated_twice
    padding = tuple(pads[::-2])
    if module.padding_mode != "zeros" or pads[::2] != pads[1::2]:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x, padding = F.pad(x, pads, mode), (0,) * dims
    geometry = Geometry(module.stride, padding, module.dilation, module.groups)
    y = _CONVOLVE[dims](x, module.weight.detach(), frozen(module.bias), *geometry)
    return _tapped(tape, module, x, y, geometry)


@layer(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def transposed(
    tape: Tape, module: Transposed, x: Tensor, output_size: list[int] | None = None
) -> Tensor:
    weight, dims = module.weight.detach(), module.weight.dim() - 2
    stride, padding, dilation = module.stride, module.padding, module.dilation
    assert isinstance(padding, tuple)
    extra = module._output_padding(
        x, output_size, list(stride), list(padding), list(module.kernel_size), dims, list(dilation)
    )
    y = _TRANSPOSE[dims](
        x, weight, frozen(module.bias), stride, padding, extra, module.groups, dilation
    )
    return _tapped(tape, module, x, y, Geometry(stride, padding, dilation, module.groups))


def _tapped(
    tape: Tape, module: Convolving | Transposed, x: Tensor, y: Tensor, geometry: Geometry
) -> Tensor:
    """`y` with the gradients of weight and bias.

    Transposed, the weight meets windows of the output's gradient, and the input.
    """
    weight, bias, trailing = module.weight, module.bias, module.weight.dim() - 1
    examples, saved = tape.examples(module, x, trailing), tape.save(x)

    def per_example(gradient: Tensor) -> Gradients:
        d = examples(gradient, trailing)
        if tape.trains(weight):
            given = examples(saved(), trailing)
            windowed, other = (d, given) if isinstance(module, Transposed) else (given, d)
            yield ConvolutionGradient(weight, windowed, other, geometry)
        if bias is not None and tape.trains(bias):
            yield DenseGradient(bias, accurate(d).sum((1, *range(3, trailing + 2))))

    return tape.tap(y, per_example)


class ConvolutionGradient(FormedGradient):
    """Windows of inputs (b, r, channels, ...) times gradients of outputs (b, r, m, ...)."""

    def __init__(
        self, parameter: Tensor, inputs: Tensor, gradients: Tensor, geometry: Geometry
    ) -> None:
        super().__init__(parameter, inputs, gradients)
        self.geometry, self.kernel = geometry, parameter.shape[2:]

    @property
    def steps(self) -> int:
        """How many windows one example has."""
        return self.gradients.shape[1] * self.gradients.shape[3:].numel()

    def form(self, found: Tensor, start: int) -> None:
        self._fill(found, start, self._buffer())

    def _buffer(self) -> Tensor:
        numbers = self.geometry.groups * self.parameter[0].numel() * self.steps
        rows = self.gradients.shape[3]
        if numbers > _WINDOWS:
            return self.gradients.new_empty(max(numbers // rows, _WINDOWS))
        return self.gradients.new_empty(min(self.count, _WINDOWS // max(1, numbers)) * numbers)

    def _fill(self, found: Tensor, start: int, buffer: Tensor) -> None:
        """Write the gradients of the examples from `start` on into `found` (c, m, n)."""
        groups, (count, m, n) = self.geometry.groups, found.shape
        numbers = max(1, groups * n * self.steps)
        rows = self.gradients.shape[3]
        size = max(1, len(buffer) // numbers)
        height = max(1, min(rows, rows * len(buffer) // numbers))
        for first in range(0, count, size):
            g = found[first : first + size]
            chosen = slice(start + first, start + first + len(g))
            g = g.view(len(g) * groups, m // groups, n)
            for top in range(0, rows, height):
                d, a = self._matrices(chosen, slice(top, top + height), buffer)
                if top == 0:
                    torch.bmm(d, a.transpose(1, 2), out=g)
                else:
                    g.baddbmm_(d, a.transpose(1, 2))

    def _matrices(self, examples: slice, rows: slice, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (c groups, m, t) and windows (c groups, n, t) of some rows of the outputs."""
        geometry, groups = self.geometry, self.geometry.groups
        d = self.gradients[examples, :, :, rows]
        x = self.inputs[examples]
        if any(geometry.padding):
            x = F.pad(x, [p for p in reversed(geometry.padding) for _ in range(2)])
        count, repeats, outputs = x.shape[0], x.shape[1], d.shape[3:]
        if repeats == 1 and outputs[-1] < _SHORT and self.kernel.numel() > 1:
            planes = x.reshape(count * x.shape[2], -1)
            places = _window_places(x.shape[3:], self.kernel, outputs, rows.start, geometry)
            windows = buffer[: len(planes) * len(places)].view(len(planes), -1)
            torch.index_select(planes, 1, places.to(x.device), out=windows)
        else:
            windows = self._view_of_windows(x, outputs, rows.start)
            if self.kernel.numel() > 1:
                windows = buffer[: windows.numel()].view(windows.shape).copy_(windows)
        d = d.movedim(2, 1).unflatten(1, (groups, -1))
        t = repeats * outputs.numel()
        return (
            d.reshape(count * groups, -1, t),
            windows.reshape(count * groups, x.shape[2] // groups * self.kernel.numel(), t),
        )

    def _view_of_windows(self, x: Tensor, outputs: torch.Size, top: int) -> Tensor:
        """(c, groups, channels, *kernel, r, *outputs) in the memory of padded inputs.

        `top` is the first row of the outputs.
        """
        geometry, groups = self.geometry, self.geometry.groups
        of_example, of_repeat, of_channel, *of_place = x.stride()
        channels = x.shape[2] // groups
        steps = [s * place for s, place in zip(geometry.stride, of_place, strict=True)]
        holes = [s * place for s, place in zip(geometry.dilation, of_place, strict=True)]
        return x.as_strided(
            (x.shape[0], groups, channels, *self.kernel, x.shape[1], *outputs),
            (of_example, channels * of_channel, of_channel, *holes, of_repeat, *steps),
            x.storage_offset() + top * steps[0],
        )

    def forms_for_norms(self, scale: Scale) -> bool:
        m, n = self.parameter.shape[0], self.parameter[0].numel()
        alike = scale.entries is None and self.geometry.groups == 1
        return not alike or self.steps * (m + n) >= m * n

    def squared_norms_unkept(self, scale: Scale) -> Tensor:
        if self.forms_for_norms(scale):
            return self._squared_norms_in_cache(scale)
        return self._squared_norms_by_gram_matrices(scale)

    def _squared_norms_in_cache(self, scale: Scale) -> Tensor:
        m, n = self.parameter.shape[0], self.parameter[0].numel()
        size = min(self.count, max(1, _GRADIENTS // (m * n)))
        windows, found = self._buffer(), self.gradients.new_empty(size, m, n)
        squares = self.gradients.new_empty(self.count)
        for start in range(0, self.count, size):
            g = found[: self.count - start]
            self._fill(g, start, windows)
            squares[start : start + size] = scale.squared_norms(g)
        return squares

    def _squared_norms_by_gram_matrices(self, scale: Scale) -> Tensor:
        """As for OuterProductGradient, with windows for inputs."""
        numbers = self.steps * self.parameter[0].numel()
        size = max(1, _WINDOWS // numbers)
        buffer = self.gradients.new_empty(size * numbers)
        everything = slice(0, self.gradients.shape[3])
        parts = []
        for start in range(0, self.count, size):
            d, a = self._matrices(slice(start, start + size), everything, buffer)
            products = torch.bmm(a.transpose(1, 2) * scale.columns, a)
            products *= torch.bmm(d.transpose(1, 2) * scale.rows, d)
            parts.append(sums_of_products(products))
        return self.with_exact_small_norms(parts, scale)

    def weighted_sum_unkept(self, weights: Tensor) -> Tensor:
        d = self.gradients * weights.reshape(-1, *[1] * (self.gradients.dim() - 1))
        inputs, shape = self.inputs.flatten(0, 1), self.parameter.shape
        total = _WEIGHT[len(self.kernel)](inputs, shape, d.flatten(0, 1), *self.geometry)
        return total.reshape(self.parameter.shape[0], -1)


@lru_cache(maxsize=64)
def _window_places(
    plane: torch.Size, kernel: torch.Size, outputs: torch.Size, top: int, geometry: Geometry
) -> Tensor:
    """Where in a padded plane the numbers of all its windows are: (kernel · outputs,), flat.

    `top` is the first row of the outputs.
    """
    places = torch.zeros((), dtype=torch.long)
    dims, size = len(plane), 1
    for dim in reversed(range(dims)):
        first = top if dim == 0 else 0
        own = torch.arange(first, first + outputs[dim]) * geometry.stride[dim]
        own = own + torch.arange(kernel[dim])[:, None] * geometry.dilation[dim]
        shape = [1] * (2 * dims)
        shape[dim], shape[dims + dim] = kernel[dim], outputs[dim]
        places = places + size * own.view(shape)
        size *= plane[dim]
    return places.reshape(-1)
