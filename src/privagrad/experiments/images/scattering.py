"""Wavelet scattering of small images: fixed features, which learn from no rows.

Sizes of wavelet coefficients in eight directions, and of the coefficients of these sizes, averaged
over windows (Bruna and Mallat 2013): 81 channels on a grid of 7 × 7 for an image of 28 × 28. Every
image is computed by itself in a fixed order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.jit import kernel

Images = NDArray[np.uint8]
Features = NDArray[np.float32]

SIDE, DIRECTIONS = 28, 8
CHANNELS = 1 + 2 * DIRECTIONS + DIRECTIONS**2
GRID = SIDE // 4
FEATURES = CHANNELS * GRID * GRID
_PADDED = 32
_REACH = 4
"""Filters have 2 * _REACH + 1 taps a side."""


def scattering(images: Images, straighten: bool = True) -> Features:
    """The features of every image, channel by channel.

    Parameters
    ----------
    images : array of shape (n, 28, 28)
        Bytes.
    straighten : bool
        Whether images are first sheared so that their mass is upright, and centred.

    Returns
    -------
    array of shape (n, 3969)
        Each image's features depend on the image alone, to the last bit.
    """
    if images.ndim != 3 or images.shape[1:] != (SIDE, SIDE):
        raise ValueError(f"Expected images of 28 × 28 pixels, found shape {images.shape}.")
    features = np.empty((len(images), FEATURES), np.float32)
    window, blur = _gaussian(_REACH, 1.6), _gaussian(2, 0.8)
    _scatter(images, straighten, morlet_filters(), blur, window, features)
    return features


def morlet_filters(directions: int = DIRECTIONS) -> Features:
    """Real and imaginary parts of one oriented wave in each direction, of mean 0 and unit norm."""
    across = np.arange(-_REACH, _REACH + 1, dtype=np.float64)
    y, x = np.meshgrid(across, across, indexing="ij")
    filters = np.empty((directions, 2, across.size, across.size), np.float32)
    for number in range(directions):
        angle = math.pi * number / directions
        along = math.cos(angle) * x + math.sin(angle) * y
        beside = -math.sin(angle) * x + math.cos(angle) * y
        envelope = np.exp(-(along**2 + (0.5 * beside) ** 2) / (2 * 0.8**2))
        wave = envelope * np.exp(0.75j * math.pi * along)
        wave -= envelope * (wave.sum() / envelope.sum())
        wave /= math.sqrt(float((np.abs(wave) ** 2).sum()))
        filters[number] = wave.real, wave.imag
    return filters


def _gaussian(reach: int, width: float) -> Features:
    taps = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * width**2))
    weights: Features = (taps / taps.sum()).astype(np.float32)
    return weights


@kernel()
def _scatter(
    images: Any, straighten: bool, waves: Any, blur: Any, window: Any, features: Any
) -> None:
    cells, half = GRID * GRID, _PADDED // 2
    page = np.zeros((_PADDED, _PADDED), np.float32)
    size, small = np.empty_like(page), np.empty((half, half), np.float32)
    second = np.empty_like(small)
    for i in range(images.shape[0]):
        _place(images[i], straighten, page)
        row = features[i]
        _pool(page, window, 4, row[:cells])
        at = cells
        _halve(page, blur, small)
        for wave in range(waves.shape[0]):
            _modulus(small, waves[wave], second)
            _pool(second, blur, 2, row[at : at + cells])
            at += cells
        for wave in range(waves.shape[0]):
            _modulus(page, waves[wave], size)
            _pool(size, window, 4, row[at : at + cells])
            at += cells
            _halve(size, blur, small)
            for other in range(waves.shape[0]):
                _modulus(small, waves[other], second)
                _pool(second, blur, 2, row[at : at + cells])
                at += cells


@kernel()
def _place(image: Any, straighten: bool, page: Any) -> None:
    """The image in the middle of the page, of brightness 0 to 1, straightened if asked."""
    mass = across = down = wide = 0.0
    for y in range(SIDE):
        for x in range(SIDE):
            weight = float(image[y, x])
            mass += weight
            down += weight * y
            across += weight * x
    middle = (SIDE - 1) / 2
    shear = 0.0
    if straighten and mass > 0.0:
        down, across, tall = down / mass, across / mass, 0.0
        for y in range(SIDE):
            for x in range(SIDE):
                weight = float(image[y, x])
                tall += weight * (y - down) * (y - down)
                wide += weight * (y - down) * (x - across)
        if tall > 0.0:
            shear = min(max(wide / tall, -1.0), 1.0)
    else:
        down = across = middle
    offset = (_PADDED - SIDE) // 2
    for y in range(_PADDED):
        for x in range(_PADDED):
            # Where this pixel of the page lies in the image.
            from_y = y - offset - middle + down
            from_x = x - offset - middle + across + shear * (y - offset - middle)
            page[y, x] = _between(image, from_y, from_x) / 255.0


@kernel()
def _between(image: Any, y: float, x: float) -> float:
    """The brightness at a point between pixels, linear in both directions; outside 0."""
    top, left = math.floor(y), math.floor(x)
    total = 0.0
    for dy in range(2):
        for dx in range(2):
            row, column = int(top) + dy, int(left) + dx
            if 0 <= row < SIDE and 0 <= column < SIDE:
                weight = (1.0 - abs(y - row)) * (1.0 - abs(x - column))
                total += weight * float(image[row, column])
    return total


@kernel()
def _modulus(page: Any, wave: Any, size: Any) -> None:
    """|page * wave| at every pixel; beyond the page are zeros."""
    side, taps = page.shape[0], wave.shape[1]
    reach = taps // 2
    real, imaginary = np.empty(side, np.float32), np.empty(side, np.float32)
    for y in range(side):
        real[:] = 0.0
        imaginary[:] = 0.0
        for ty in range(max(0, reach - y), min(taps, side + reach - y)):
            line = page[y + ty - reach]
            for tx in range(taps):
                shift = tx - reach
                a, b = wave[0, ty, tx], wave[1, ty, tx]
                for x in range(max(0, -shift), min(side, side - shift)):
                    real[x] += a * line[x + shift]
                    imaginary[x] += b * line[x + shift]
        for x in range(side):
            size[y, x] = math.sqrt(real[x] * real[x] + imaginary[x] * imaginary[x])


@kernel()
def _halve(page: Any, blur: Any, small: Any) -> None:
    """Every second pixel of the blurred page."""
    _average(page, blur, 2, 0, small)


@kernel()
def _pool(page: Any, window: Any, step: int, cells: Any) -> None:
    """Averages over windows around the cells of a grid of 7 × 7."""
    _average(page, window, step, step, cells.reshape(GRID, GRID))


@kernel()
def _average(page: Any, window: Any, step: int, first: int, out: Any) -> None:
    """Windows at every `step`-th pixel from `first` on; beyond the page are zeros."""
    side, reach = page.shape[0], window.size // 2
    line = np.empty(side, np.float32)
    for i in range(out.shape[0]):
        line[:] = 0.0
        centre = first + i * step
        for t in range(window.size):
            y = centre + t - reach
            if 0 <= y < side:
                for x in range(side):
                    line[x] += window[t] * page[y, x]
        for j in range(out.shape[1]):
            total = np.float32(0.0)
            for t in range(window.size):
                x = first + j * step + t - reach
                if 0 <= x < side:
                    total += window[t] * line[x]
            out[i, j] = total
