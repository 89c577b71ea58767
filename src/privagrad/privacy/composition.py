"""Composition of many releases: exact for Gaussians, by a tilted Fourier transform otherwise.

A plain Fourier transform computes probabilities with an error of about 1e-16 times the number of
releases, whatever their size: useless for δ = 1e-12 and a million releases. So the losses are
tilted first: with K(θ) = log E[e^{θ L}] the probabilities q(l) = p(l) e^{θ l - K(θ)} are again a
distribution, its composition is that of p in the same way, and θ is chosen so that it is centred
where δ is decided. What was an absolute error becomes one relative to δ. It is bounded and added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.privacy.privacy_loss import LossGrid
from privagrad.privacy.roots import crossing, least
from privagrad.privacy.rounding import ROUNDING

_FFT_ROUNDINGS = 8.0
"""Relative error of a transform of length N = 2^k in the 2-norm, in roundings, over k: at most 6.7
for radix 2 and fewer for larger radices (Higham, Accuracy and Stability, Theorem 24.2)."""

_OUTSIDE = 1e-14
_REACHES = (1.0, 2.0, 3.0, 4.5, 6.0, 8.0, 12.0)
_TINY = 1e-300


def gaussian_delta(epsilon: float, mu: float) -> float:
    """The Gaussian mechanism's δ(ε), means `mu` standard deviations apart; never too small.

    Φ(a) - e^ε Φ(a - mu), a = mu/2 - ε/mu (Balle and Wang 2018). As e^ε φ(a - mu) = φ(a), it is
    φ(a) (m(-a) - m(mu - a)) with Mills' ratio m(t) = Φ(-t)/φ(t), and nothing underflows.
    """
    from scipy.special import erfcx, ndtr

    a = mu / 2 - epsilon / mu
    slack = 8 * ROUNDING * (4 + (1 + abs(a)) * (abs(a) + abs(epsilon) / mu + mu))
    density = math.exp(-a * a / 2) / 2
    first = ndtr(a) if a > 0 else density * erfcx(-a / math.sqrt(2))
    second = density * erfcx((mu - a) / math.sqrt(2))
    return float(np.clip(first * (1 + slack) - second * (1 - slack), 0.0, 1.0))


def gaussian_epsilon(delta: float, mu: float) -> float:
    """The least ε with δ(ε) ≤ delta for a Gaussian mechanism; never too small."""
    if delta <= 0:
        return math.inf
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    high = mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta)) + 1e-9

    def excess(epsilon: float) -> float:
        return math.log(max(gaussian_delta(epsilon, mu), _TINY)) - math.log(delta)

    return crossing(excess, 0.0, high, 1e-14 * high)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest μ of a Gaussian mechanism with δ(ε) ≤ delta."""

    def excess(log_mu: float) -> float:
        return gaussian_delta(epsilon, math.exp(log_mu)) - delta

    return math.exp(crossing(excess, math.log(1e6), math.log(1e-9), 1e-12))


@dataclass(frozen=True)
class _Window:
    """The composition's probabilities on consecutive losses, never too small.

    Attributes
    ----------
    first : int
        The number of the smallest loss, in intervals.
    deltas : array
        δ at every loss of the window, without infinite losses.
    weight : float
        E[e^{l - L}; L ≥ l] at the smallest loss l.
    below, above : float
        Bounds on the probability of losses outside.
    """

    first: int
    deltas: Vector
    weight: float
    below: float
    above: float


_TILTS = 24
"""With how many tilts δ is computed at many ε."""

_FURTHEST = 20.0
"""The largest exponent within a block of discounted sums."""


class _Part:
    """Equal losses that are added `count` times: logarithms of probabilities, values."""

    def __init__(self, grid: LossGrid, count: int, interval: float) -> None:
        self.count, self.first = count, grid.first
        with np.errstate(divide="ignore"):
            self.logs: Vector = np.log(grid.masses)
        numbers = grid.first + np.arange(grid.masses.size, dtype=np.float64)
        self.losses: Vector = interval * numbers
        self.widest = float(np.abs(self.losses).max())
        self.rounding = grid.rounding

    def cumulant(self, tilt: float) -> float:
        """count · log E[e^{θ L}], and as much more as rounding may have taken away."""
        rounding = self.rounding + ROUNDING * (200 + 4 * abs(tilt) * self.widest)
        return self.count * (_log_sum(self.logs + tilt * self.losses) + rounding)

    def tilted(self, tilt: float) -> Vector:
        exponents = self.logs + tilt * self.losses
        return np.asarray(np.exp(exponents - _log_sum(exponents)))

    def variance(self, probabilities: Vector) -> float:
        middle = float(probabilities @ self.losses)
        return self.count * float(probabilities @ np.square(self.losses - middle))


class Composition:
    """The sum of independent losses on one grid: `parts` are distributions and their counts.

    Guarantees
    ----------
    ``epsilon`` and ``delta`` are upper bounds: the errors of floating-point arithmetic and what
    lies outside of the transform's window are bounded and added.
    """

    def __init__(self, parts: Sequence[tuple[LossGrid, int]], interval: float) -> None:
        self.interval = interval
        self.parts = [_Part(grid, count, interval) for grid, count in parts]
        self.count = sum(count for _, count in parts)
        kept = (count * math.log1p(-min(grid.certain, 1 - 1e-12)) for grid, count in parts)
        self.certain = -math.expm1(sum(kept))
        # By so much could a sum of losses be off.
        reach = sum(part.count * part.widest for part in self.parts)
        self.shift = 4 * ROUNDING * (self.count + reach)

    def epsilon(self, delta: float) -> float:
        """The least ε with δ(ε) ≤ delta."""
        tilt = self._best(lambda t: (self._cumulant(t) - math.log(delta)) / t)
        window = self._window(tilt)
        left = delta - self.certain - window.above
        if left <= 0:
            return math.inf
        deltas, first = window.deltas, window.first
        within = np.flatnonzero(deltas <= left)
        if not within.size:
            return math.inf
        i = int(within[0])
        if i == 0:
            return max(0.0, first * self.interval + self.shift)
        # Between two losses δ is linear in e^ε.
        share = (deltas[i - 1] - left) / (deltas[i - 1] - deltas[i])
        inside = math.log1p(share * math.expm1(self.interval))
        return max(0.0, (first + i - 1) * self.interval + inside + self.shift)

    def delta(self, epsilon: float) -> float:
        """δ(ε)."""
        return float(self.deltas(np.array([epsilon]))[0])

    def deltas(self, epsilons: Vector) -> Vector:
        """δ(ε) of several ε in order.

        Every tilt gives an upper bound at every ε. So a few serve all: each ε takes the least.
        """
        lowered = np.asarray(epsilons, dtype=np.float64) - self.shift
        chosen = np.linspace(0, lowered.size - 1, min(lowered.size, _TILTS)).round().astype(int)
        bounds = []
        for epsilon in np.unique(lowered[chosen]):
            tilt = self._best(partial(self._log_bound, float(epsilon)))
            bounds.append(self._read(self._window(tilt), lowered))
        return np.asarray(np.minimum.reduce(bounds))

    def _log_bound(self, epsilon: float, tilt: float) -> float:
        return self._cumulant(tilt) - tilt * epsilon

    def _read(self, window: _Window, epsilons: Vector) -> Vector:
        """δ(ε) out of one window: between two losses it is linear in e^ε."""
        places = epsilons / self.interval - window.first
        outside = self.certain + window.above
        below = places < 0
        i = np.clip(np.floor(places), 0, window.deltas.size - 2).astype(int)
        inside = np.clip(places - i, 0.0, 1.0)
        shares = np.expm1(inside * self.interval) / math.expm1(self.interval)
        found = window.deltas[i] + shares * (window.deltas[i + 1] - window.deltas[i])
        found = np.where(places >= window.deltas.size - 1, 0.0, found)
        missing = np.expm1(np.where(below, places, 0.0) * self.interval)
        lower = window.deltas[0] - missing * window.weight + window.below
        return np.minimum(1.0, np.where(below, lower, found) + outside)

    def _cumulant(self, tilt: float) -> float:
        return sum(part.cumulant(tilt) for part in self.parts)

    def _tilted(self, tilt: float) -> tuple[list[Vector], float]:
        """The tilted parts, and the standard deviation of their sum."""
        tilted = [part.tilted(tilt) for part in self.parts]
        pairs = zip(self.parts, tilted, strict=True)
        variance = sum(part.variance(probabilities) for part, probabilities in pairs)
        return tilted, max(math.sqrt(variance), self.interval)

    def _best(self, bound: Callable[[float], float]) -> float:
        """The tilt θ > 0 that makes a bound on ε or on log δ least; any other is sound too."""
        _, deviation = self._tilted(0.0)
        widest = max(part.widest for part in self.parts)
        low, high = math.log(1e-3 / (widest + deviation)), math.log(1e2 / deviation)
        return math.exp(least(lambda x: bound(math.exp(x)), low, high, 0.02))

    def _window(self, tilt: float) -> _Window:
        h = self.interval
        tilted, deviation = self._tilted(tilt)
        cumulant = self._cumulant(tilt)
        needed = -math.log(_OUTSIDE)
        ups = [tilt + reach / deviation for reach in _REACHES]
        downs = [tilt - reach / deviation for reach in _REACHES]
        cumulants = {t: self._cumulant(t) for t in (*ups, *downs)}
        high = min((cumulants[t] - cumulant + needed) / (t - tilt) for t in ups)
        low = max((cumulants[t] - cumulant + needed) / (t - tilt) for t in downs)
        size = 2 ** max(4, math.ceil(math.log2(max((high - low) / h, 1.0) + 3)))
        first = math.floor(low / h)
        composed, error = self._convolved(tilted, first, size)
        losses = h * (first + np.arange(size))
        logs = np.log(np.maximum(composed, 0.0) + error) + cumulant - tilt * losses
        masses = np.exp(np.minimum(logs, 1.0))
        # δ falls by (1 - e^{-h}) weight_{i+1} from i on.
        weights = _discounted(masses, h)
        falls = -math.expm1(-h) * np.append(weights[1:], 0.0)
        deltas = np.cumsum(falls[::-1])[::-1] * (1 + 8 * size * ROUNDING)
        top, bottom = float(losses[-1]), float(losses[0])
        positive = [t for t in (tilt, *ups) if t > 0]
        cumulants[tilt] = cumulant
        above = math.exp(min(0.0, *(cumulants[t] - t * top for t in positive)))
        if top >= sum(part.count * float(part.losses[-1]) for part in self.parts):
            above = 0.0
        negative = [t for t in downs if t < 0]
        below = math.exp(min([0.0, *(cumulants[t] - t * bottom for t in negative)]))
        return _Window(first, deltas, float(weights[0]), below, above)

    def _convolved(self, tilted: list[Vector], first: int, size: int) -> tuple[Vector, float]:
        """The composition of the tilted parts from loss `first` on, and a bound on its errors.

        What lies outside of the window is wrapped into it, which only adds.
        """
        step = ROUNDING * _FFT_ROUNDINGS * math.log2(size)
        total, phase, offset = np.zeros(size // 2 + 1), np.zeros(size // 2 + 1), 0
        padded, missed = [], []
        for part, probabilities in zip(self.parts, tilted, strict=True):
            # The tilted mean at place 0: then phases are small where it matters.
            middle = round(float(probabilities @ np.arange(probabilities.size)))
            places = (np.arange(probabilities.size) - middle) % size
            wrapped = np.bincount(places, weights=probabilities, minlength=size)
            spectrum = np.fft.rfft(wrapped)
            sizes = np.abs(spectrum)
            missed.append(step * math.sqrt(size) * float(np.linalg.norm(wrapped)))
            padded.append(np.log(sizes + missed[-1]))
            total += part.count * np.log(np.maximum(sizes, _TINY))
            phase += part.count * np.angle(spectrum)
            offset += part.count * (part.first + middle)
        product = np.exp(total)
        composed = np.fft.irfft(product * np.exp(1j * phase), size)
        largest = sum(part.count * log for part, log in zip(self.parts, padded, strict=True))
        # Errors of the powers, and of the transform back.
        error = ROUNDING * (8 + 12 * self.count) * 2 * float(product.sum()) / size
        error += step * _two_norm(product) / math.sqrt(size)
        for part, log, miss in zip(self.parts, padded, missed, strict=True):
            # |F̂ᶜ - Fᶜ| ≤ c max(|F|, |F̂|)^{c-1} |F̂ - F|, then Cauchy and Schwarz.
            error += part.count * _two_norm(np.exp(largest - log)) * miss / size
        return np.roll(composed, -((first - offset) % size)), error


def _two_norm(half: Vector) -> float:
    """Of a whole spectrum, from the half that is kept of a real signal's."""
    return math.sqrt(2 * float(half @ half))


def _log_sum(exponents: Vector) -> float:
    largest = float(exponents.max())
    return largest + math.log(float(np.exp(exponents - largest).sum()))


def _discounted(masses: Vector, interval: float) -> Vector:
    """Σ_{j ≥ i} p_j e^{-(j - i) h} for all i.

    Within a block it is e^{i h} Σ_{j ≥ i} p_j e^{-j h}, whose factors stay below e^20, so that
    nothing overflows; what follows a block is one number, its first sum. All terms are positive:
    the relative error is at most two roundings for each addition, and 50 for the factors.
    """
    length = min(masses.size, max(1, int(_FURTHEST / interval)))
    blocks = -(-masses.size // length)
    sums = np.zeros((blocks, length))
    sums.ravel()[: masses.size] = masses
    falling = np.exp(-interval * np.arange(length))
    sums = np.cumsum((sums * falling)[:, ::-1], axis=1)[:, ::-1] / falling
    carried = falling[::-1] * math.exp(-interval)
    for block, following in zip(sums[-2::-1], sums[:0:-1], strict=True):
        block += carried * following[0]
    return np.asarray(sums.ravel()[: masses.size])
