"""Synthetic inputs that are public by construction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from privagrad._internal import validate


def pink_noise(
    count: int, shape: Sequence[int], generator: torch.Generator | None = None
) -> Tensor:
    """Images whose amplitudes fall as 1/frequency, as those of natural images do.

    Parameters
    ----------
    count : int
    shape : sequence of int
        (channels, height, width)
    generator : torch.Generator, optional

    Returns
    -------
    Tensor (count, channels, height, width)
        Every image has mean 0 and mean square 1: bring it to the range of your inputs, for example
        with ``0.5 + 0.25 * pink_noise(...)``.
    """
    validate.integer("count", count)
    if len(shape) != 3 or min(shape) < 1 or max(shape[1:]) < 2:
        raise ValueError(
            "Expected shape to be (channels, height, width) of images of two pixels or more, found "
            f"{tuple(shape)}."
        )
    height, width = shape[1:]
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
    """Texts of independent tokens: token k, from 0, with probability ~ 1/(k + 1).

    Parameters
    ----------
    count, length, vocabulary : int
    generator : torch.Generator, optional

    Returns
    -------
    Tensor (count, length)
    """
    for name, value in (("count", count), ("length", length), ("vocabulary", vocabulary)):
        validate.integer(name, value)
    weights = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    tokens = torch.multinomial(weights, count * length, replacement=True, generator=generator)
    return tokens.view(count, length)
