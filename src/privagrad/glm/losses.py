"""Convex losses of generalized linear models: F(x; a, y) = ℓ(⟨a, x⟩; y).

With k classes x is a k × d matrix, stored class by class, and the margin a vector of length k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from inspect import unwrap
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from privagrad._internal import validate
from privagrad._internal.jit import kernel
from privagrad._internal.validate import Vector

Task = Literal["classification", "regression", "none"]


@dataclass(frozen=True)
class _Kind:
    """Facts about a loss: its targets, its task, the largest ℓ'', and its parameter."""

    targets: str  # "numbers", "signs", "classes" or "none"
    task: Task
    smoothness: float = math.inf
    parameter: str = ""
    default: float = 0.0
    below: float = math.inf
    several: str = ""  # the name of the same loss for several classes


_RATIO = "ratio of the weights of the classes -1 and 1"
_KINDS = {
    "absolute": _Kind("numbers", "regression"),
    "logistic": _Kind("signs", "classification", 0.25, _RATIO, 1.0, several="softmax"),
    "hinge": _Kind("signs", "classification", math.inf, _RATIO, 1.0, several="multiclass-hinge"),
    # Slopes below 1e12 keep every product of the kernels within the range of doubles.
    "huber": _Kind("numbers", "regression", 1.0, "bend between square and linear", 1.35, 1e12),
    "quantile": _Kind("numbers", "regression", math.inf, "quantile", 0.5, 1.0),
    "linear": _Kind("none", "none", 0.0),
    "softmax": _Kind("classes", "classification", 0.5, several="softmax"),
    "multiclass-hinge": _Kind("classes", "classification", several="multiclass-hinge"),
}
LOSSES = tuple(_KINDS)
_SQRT2 = math.sqrt(2) * (1 + 2.0**-52)  # rounded up
_ABSOLUTE, _LOGISTIC, _HINGE, _HUBER, _QUANTILE, _LINEAR, _SOFTMAX, _MULTI = range(len(LOSSES))


@kernel(inline=True)
def _class_weight(ratio: float, target: float) -> float:
    """The weight of a target's class, of which the larger one is 1."""
    if target < 0.0:
        return ratio if ratio < 1.0 else 1.0
    return 1.0 / ratio if ratio > 1.0 else 1.0


@kernel(inline=True)
def value(code: int, parameter: float, margin: float, target: float) -> float:
    """ℓ(m; y); NaN for a margin or target that is NaN."""
    if code == _LOGISTIC:
        gain = target * margin
        plain = math.log1p(math.exp(-abs(gain))) + (0.0 if gain > 0.0 else -gain)
        return _class_weight(parameter, target) * plain
    if code == _HINGE:
        gap = 1.0 - target * margin
        return 0.0 if gap <= 0.0 else _class_weight(parameter, target) * gap
    if code == _LINEAR:
        return margin
    residual = margin - target
    if code == _HUBER:
        size = abs(residual)
        return size * size / 2.0 if size <= parameter else parameter * (size - parameter / 2.0)
    if code == _QUANTILE:
        return residual * (1.0 - parameter if residual > 0.0 else -parameter)
    return abs(residual)


@kernel(inline=True)
def class_value(code: int, margins: Vector, label: Any) -> Any:
    """ℓ(m; y) of a vector of margins; NaN where one is not finite."""
    best, worst = -math.inf, 0.0
    for c in range(margins.size):
        worst += 0.0 * margins[c]  # NaN from then on if one is not finite
        if margins[c] > best and (code == _SOFTMAX or c != label):
            best = margins[c]
    if code == _SOFTMAX:
        total = 0.0
        for c in range(margins.size):
            total += math.exp(margins[c] - best)
        return math.log(total) + (best - margins[label]) + worst
    gap = 1.0 + best - margins[label]
    return (gap if gap > 0.0 else 0.0) + worst


@kernel(inline=True)
def slope(code: int, parameter: float, margin: float, target: float) -> float:
    """dℓ/dm, a subgradient where ℓ bends; NaN for a margin or target that is NaN."""
    if code == _LOGISTIC:
        weight = _class_weight(parameter, target)
        return -weight * target / (1.0 + math.exp(target * margin))
    if code == _HINGE:
        gap = 1.0 - target * margin
        if gap > 0.0:
            return -_class_weight(parameter, target) * target
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


@kernel(inline=True)
def lipschitz(code: int, parameter: float) -> float:
    """The largest |ℓ'|; with classes the largest ‖dℓ/dm‖."""
    if code == _HUBER:
        return parameter
    if code == _QUANTILE:
        return max(parameter, 1.0 - parameter)
    if code in (_SOFTMAX, _MULTI):
        return _SQRT2
    return 1.0


@kernel(inline=True)
def class_slopes(code: int, margins: Vector, label: Any) -> None:
    """dℓ/dm_c for every class c, in place of the margins; NaN where a margin is not finite."""
    classes = margins.size
    best, worst = -math.inf, 0.0
    rival = 0
    for c in range(classes):
        worst += 0.0 * margins[c]  # NaN from then on if one is not finite
        if margins[c] > best and (code == _SOFTMAX or c != label):
            best, rival = margins[c], c
    if code == _SOFTMAX:
        total = 0.0
        for c in range(classes):
            margins[c] = math.exp(margins[c] - best) + worst
            total += margins[c]
        for c in range(classes):
            margins[c] /= total
        margins[label] -= 1.0
    else:
        violated = 1.0 + best - margins[label] > 0.0
        for c in range(classes):
            margins[c] = worst
        if violated:
            margins[rival] += 1.0
            margins[label] -= 1.0


@kernel()
def _values(code: int, parameter: float, margins: Vector, targets: Vector) -> Vector:
    result = np.empty(margins.size)
    for i in range(margins.size):
        result[i] = value(code, parameter, margins[i], targets[i])
    return result


@kernel()
def _class_values(code: int, margins: Any, targets: Vector) -> Vector:
    result = np.empty(targets.size)
    for i in range(targets.size):
        result[i] = class_value(code, margins[i], np.int64(targets[i]))
    return result


@dataclass(frozen=True)
class Loss:
    """A loss by name, with its parameter where it has one.

    | name | ℓ(m; y) | parameter |
    |---|---|---|
    | absolute | r = abs(m - y) | |
    | logistic | w_y log(1 + exp(-y m)), y = ±1 | w_-1 / w_1 > 0, default 1; the larger one is 1 |
    | hinge | w_y max(0, 1 - y m), y = ±1 | the same |
    | huber | r²/2 for r ≤ κ, then κ r - κ²/2 | κ > 0, default 1.35 |
    | quantile | max(q (y - m), (q - 1)(y - m)) | 0 < q < 1, default 0.5 |
    | linear | m, without y | |
    | softmax | log Σ_c exp(m_c) - m_y, y = 0, ..., k - 1 | |
    | multiclass-hinge | max(0, 1 + max_{c ≠ y} m_c - m_y), y = 0, ..., k - 1 | |
    """

    name: str
    parameter: float | None = None

    def __post_init__(self) -> None:
        kind = _KINDS[validate.choice("loss", self.name, LOSSES)]
        if self.parameter is not None and not kind.parameter:
            raise ValueError(f"Expected no parameter for the {self.name} loss.")
        value = kind.default if self.parameter is None else self.parameter
        if kind.parameter and not 0 < validate.positive(kind.parameter, value) < kind.below:
            raise ValueError(
                f"Expected the {kind.parameter} in (0, {kind.below:g}), found {value!r}."
            )
        object.__setattr__(self, "parameter", float(value) if kind.parameter else None)

    @property
    def ratio(self) -> float:
        """Of the weights of the classes -1 and 1, where these are the targets; else 1."""
        return float(self.parameter or 1.0) if _KINDS[self.name].parameter == _RATIO else 1.0

    @cached_property
    def key(self) -> tuple[int, float]:
        """The code and the parameter that the kernels take."""
        return LOSSES.index(self.name), float(self.parameter or 0.0)

    @property
    def multiclass(self) -> bool:
        """Whether the margin is a vector, one number per class."""
        return _KINDS[self.name].targets == "classes"

    @property
    def task(self) -> Task:
        """What the targets are: classes, numbers to predict, or none."""
        return _KINDS[self.name].task

    @property
    def regression(self) -> bool:
        """Whether the targets are numbers to predict."""
        return self.task == "regression"

    @property
    def multiclass_twin(self) -> Loss:
        """The same loss for any number of classes: a multiclass loss is its own twin."""
        if not (several := _KINDS[self.name].several):
            raise ValueError(
                f"Expected a loss for classes, found the {self.name} loss: use one of "
                f"{', '.join(name for name, kind in _KINDS.items() if kind.several)}."
            )
        return Loss(several)

    @property
    def lipschitz(self) -> float:
        """The largest \\|ℓ'\\|."""
        # As a Python function: one number is not worth a kernel.
        return float(unwrap(lipschitz)(*self.key))

    @property
    def smoothness(self) -> float:
        """The largest ℓ'', infinite where ℓ bends."""
        return _KINDS[self.name].smoothness

    def value(self, margins: ArrayLike, targets: ArrayLike) -> Vector:
        """ℓ(m; y) for vectors of margins and targets; of a matrix of margins, row by row."""
        m = np.ascontiguousarray(margins, np.float64)
        y = np.ascontiguousarray(targets, np.float64)
        if self.multiclass:
            self.check_targets(y, len(m), m.shape[-1])
            return _class_values(self.key[0], m, y)
        if m.shape != y.shape:
            raise ValueError(f"Expected as many targets as margins, found {y.shape} and {m.shape}.")
        return _values(*self.key, m.ravel(), y.ravel()).reshape(m.shape)

    def check_targets(self, targets: Vector, n_examples: int, outputs: int) -> None:
        """Refuse targets that the kernels, which use labels as indices, could not take."""
        if targets.shape != (n_examples,):
            raise ValueError(
                f"Expected one target for each of {n_examples} rows, found shape {targets.shape}."
            )
        wanted = _KINDS[self.name].targets
        if wanted == "classes":
            known = (targets >= 0) & (targets < outputs) & (targets == np.floor(targets))
            expected = f"classes from 0 to {outputs - 1}"
        elif wanted == "signs":
            known, expected = np.abs(targets) <= 1, "labels -1 and 1"
        else:
            return
        if not known.all():
            raise ValueError(
                f"Expected {expected} for the {self.name} loss, found {targets[~known][0]:g}. "
                "State all classes, or drop these rows."
            )

    @property
    def needs(self) -> str:
        """What its targets are: "numbers", "signs", "classes" or "none"."""
        return _KINDS[self.name].targets

    def targets(self, y: ArrayLike | None, n_examples: int) -> Vector:
        """`y` as the loss needs it: numbers, or signs made from {-1, 1} or {0, 1}.

        The linear loss ignores it.
        """
        wanted = self.needs
        if wanted == "none":
            return np.zeros(n_examples)
        if y is None:
            raise ValueError(f"Expected targets y for the {self.name} loss, found None.")
        targets = np.ascontiguousarray(validate.vector("y", y, dim=n_examples))
        if wanted == "numbers":
            return targets
        if wanted == "classes":
            whole = np.isfinite(targets) & (targets == np.floor(targets))
            strange = targets[~(whole & (targets >= 0))]
            if strange.size:
                raise ValueError(
                    f"Expected classes 0, 1, 2, ... for the {self.name} loss, found {strange[0]!r}."
                )
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
