"""Convex losses of generalized linear models: F(x; a, y) = ℓ(⟨a, x⟩; y)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from privagrad import _validate
from privagrad._numba import kernel
from privagrad._validate import Vector


@dataclass(frozen=True)
class _Kind:
    """What a loss's name stands for: its value in margin m and target y, and its parameter."""

    value: Callable[[Vector, Vector, float], Vector]
    targets: str  # "numbers", "signs" or "none"
    lipschitz: Callable[[float], float] = lambda _: 1.0
    smoothness: float = math.inf
    parameter: str = ""
    default: float = 0.0
    below: float = math.inf


def _huber(m: Vector, y: Vector, bend: float) -> Vector:
    residual = np.abs(m - y)
    return np.where(residual <= bend, residual**2 / 2, bend * (residual - bend / 2))


_KINDS = {
    "absolute": _Kind(lambda m, y, _: np.abs(m - y), "numbers"),
    "logistic": _Kind(lambda m, y, _: np.logaddexp(0.0, -y * m), "signs", smoothness=0.25),
    "hinge": _Kind(lambda m, y, _: np.maximum(0.0, 1.0 - y * m), "signs"),
    "huber": _Kind(_huber, "numbers", lambda k: k, 1.0, "bend between square and linear", 1.35),
    "quantile": _Kind(
        lambda m, y, q: np.maximum(q * (y - m), (q - 1) * (y - m)),
        "numbers",
        lambda q: max(q, 1 - q),
        math.inf,
        "quantile",
        0.5,
        1.0,
    ),
    "linear": _Kind(lambda m, y, _: np.asarray(m), "none", smoothness=0.0),
}
LOSSES = tuple(_KINDS)
_ABSOLUTE, _LOGISTIC, _HINGE, _HUBER, _QUANTILE, _LINEAR = range(len(LOSSES))


@kernel(inline=True)
def slope(code: int, parameter: float, margin: float, target: float) -> float:
    """dℓ/dm, a subgradient where ℓ bends; NaN for a margin or target that is NaN."""
    if code == _LOGISTIC:
        return -target / (1.0 + math.exp(target * margin))
    if code == _HINGE:
        gap = 1.0 - target * margin
        if gap > 0.0:
            return -target
        return 0.0 if gap <= 0.0 else gap
    if code == _LINEAR:
        return 1.0
    residual = margin - target
    if code == _HUBER:
        return min(max(residual, -parameter), parameter) if residual == residual else residual
    up, down = 1.0, -1.0
    if code == _QUANTILE:
        up, down = 1.0 - parameter, -parameter
    if residual > 0.0:
        return up
    return down if residual < 0.0 else residual


@dataclass(frozen=True)
class Loss:
    """A loss by name, with its parameter where it has one.

    ========== ============================================= =======================
    name       ℓ(m; y)                                       parameter
    ========== ============================================= =======================
    absolute   \\|m - y\\|
    logistic   log(1 + exp(-y m)), y = ±1
    hinge      max(0, 1 - y m), y = ±1
    huber      r²/2 up to r = \\|m - y\\| = κ, then κ r - κ²/2  κ > 0, default 1.35
    quantile   max(q (y - m), (q - 1)(y - m))                0 < q < 1, default 0.5
    linear     m (no y)
    ========== ============================================= =======================
    """

    name: str
    parameter: float | None = None

    def __post_init__(self) -> None:
        kind = _KINDS[_validate.choice("loss", self.name, LOSSES)]
        if self.parameter is not None and not kind.parameter:
            raise ValueError(f"Expected no parameter for the {self.name} loss.")
        value = kind.default if self.parameter is None else self.parameter
        if kind.parameter and not 0 < _validate.positive(kind.parameter, value) < kind.below:
            raise ValueError(
                f"Expected the {kind.parameter} in (0, {kind.below:g}), found {value!r}."
            )
        object.__setattr__(self, "parameter", float(value) if kind.parameter else None)

    @cached_property
    def key(self) -> tuple[int, float]:
        """What the kernels call it: `slope`'s code and parameter."""
        return LOSSES.index(self.name), float(self.parameter or 0.0)

    @property
    def lipschitz(self) -> float:
        """The largest \\|ℓ'\\|."""
        return _KINDS[self.name].lipschitz(self.key[1])

    @property
    def smoothness(self) -> float:
        """The largest ℓ'', infinite where ℓ bends."""
        return _KINDS[self.name].smoothness

    def value(self, margins: ArrayLike, targets: ArrayLike) -> Vector:
        """ℓ(m; y), elementwise."""
        return _KINDS[self.name].value(
            np.asarray(margins, np.float64), np.asarray(targets, np.float64), self.key[1]
        )

    def targets(self, y: ArrayLike | None, n_examples: int) -> Vector:
        """`y` as the loss wants it: numbers, or signs made from {-1, 1} or {0, 1}.

        The linear loss needs none and looks at none.
        """
        wanted = _KINDS[self.name].targets
        if wanted == "none":
            return np.zeros(n_examples)
        if y is None:
            raise ValueError(f"Expected targets y for the {self.name} loss, found None.")
        targets = np.ascontiguousarray(_validate.vector("y", y, dim=n_examples))
        if wanted == "numbers":
            return targets
        if np.isin(targets, (-1.0, 1.0)).all():
            return targets
        if np.isin(targets, (0.0, 1.0)).all():
            return 2.0 * targets - 1.0
        strange = targets[~np.isin(targets, (-1.0, 0.0, 1.0))]
        found = f"{strange[0]!r}" if strange.size else "-1, 0 and 1 together"
        raise ValueError(
            f"Expected labels -1 and 1, or 0 and 1, for the {self.name} loss; found {found}. "
            "Map your two classes to 0 and 1 first."
        )
