"""Synthetic inputs that are public by construction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pink_noise(
    count: int, shape: Sequence[int], generator: torch.Generator | None = None
) -> Tensor:
    """`count` images (channels, height, width) whose amplitudes fall as 1/frequency.

    So do those of natural images. Every image has mean 0 and mean square 1: bring it to the range
    of your inputs, for example with `0.5 + 0.25 * pink_noise(...)`.
    """
    height, width = shape[-2:]
    frequencies = torch.hypot(
        torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None, :]
    )
    # The mean of an image is 0.
    amplitudes = torch.where(frequencies > 0, 1 / frequencies, torch.zeros(()))
    white = torch.randn((count, *shape), generator=generator)
    pink = torch.fft.irfft2(torch.fft.rfft2(white) * amplitudes, s=(height, width))
    return pink / pink.square().mean(tuple(range(1, pink.dim())), keepdim=True).sqrt()


def zipf_tokens(
    count: int, length: int, vocabulary: int, generator: torch.Generator | None = None
) -> Tensor:
    """`count` texts of `length` tokens: token k, from 0, with probability ~ 1/(k + 1)."""
    weights = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    tokens = torch.multinomial(weights, count * length, replacement=True, generator=generator)
    return tokens.view(count, length)
