"""Every choice that a fit without tuning makes, from public facts and private releases alone.

The numbers were found on synthetic and public data; `docs/estimators.md` explains how.
"""

from __future__ import annotations

import math
import warnings

from privagrad.glm.losses import Loss
from privagrad.methods.sgd import DPSGD
from privagrad.privacy.events import Unit
from privagrad.privacy.sampling import Batches
from privagrad.queries.columns import Share
from privagrad.queries.moments import ColumnQueries

METHOD = DPSGD()
"""Gradient descent with isotropic noise, in units in which columns are comparable."""

STEPS = 100
RADIUS = 1 / 3
"""Bound on gradients, in units of the largest slope times the median norm of a row."""

REACH, TARGET_REACH = 1.2, 0.3
"""How far the noise of all steps together may move the margin of a median row: for classes, and
for standardised targets of a regression."""

MANY_COLUMNS = 40
"""From so many on, the votes of a row are too many for rare columns to show among them."""

_SHAPED, _MOST_SHAPED, _MOST_SHAPED_PRODUCTS = 1.5, 200, 4e9
"""Noise in the eigenvalues of a covariance up to which it is worth its part of epsilon; up to how
many columns, and products, it takes no longer than the training, about."""

GOOD_KEPT = 0.9
"""The part of the advantage for which the needed rows are told."""

_EVEN = 0.0035
"""The noise at which units of indicators are halfway between their size and their deviation."""

_LARGEST_STEP, _LARGEST_TARGET_STEP, _RAREST = 300.0, 50.0, 0.05
_WORK = 1e9
_LEAST_RATE = 0.2
_SPARSE_ENTRIES = 100
_HALF, _LEAST_KEPT = 0.05, 0.8
_VISIBLE, _LARGEST_PART, _LARGEST_TOTAL = 0.1, 0.5, 0.4


def default_delta(n_examples: int) -> float:
    """δ where the user gives none: below one over the number of rows, which is public."""
    return min(1e-5, 0.1 / n_examples)


def entries(columns: int, sparse: bool) -> int:
    """How many entries a row may have: for sparse tables a guess."""
    return min(columns, _SPARSE_ENTRIES) if sparse else columns


def batches(n: int, dim: int, sparse: bool, steps: int | None, batch_size: int | None) -> Batches:
    """All rows where that is affordable: no noise is lost to sampling. Else a Poisson sample."""
    steps = STEPS if steps is None else steps
    affordable = _WORK / (steps * entries(dim, sparse))
    size = max(affordable, _LEAST_RATE * n, 1) if batch_size is None else batch_size
    if size > n / 2:
        return Batches(n, n, steps, None)
    return Batches(n, round(size), steps, "poisson")


def relative_noise(noise_multiplier: float, batches: Batches, dim: int) -> float:
    """Length of the noise in the average of all steps' gradients, over the bound on one of them."""
    return noise_multiplier * math.sqrt(dim / batches.steps) / batches.batch_size


def mean_weight(ratio: float) -> float:
    """The mean weight of rows, the larger class weight being 1, for weights of two classes.

    `ratio` is that of the weights, which are taken to be inverse to the frequencies. Weights shrink
    gradients, but not their bound and the noise.
    """
    lighter = min(ratio, 1 / ratio)
    return 2 * lighter / (1 + lighter)


def evenness(noise: float) -> float:
    """How far units of rare columns are from the size of entries, 0, to deviations, 1.

    `noise` is the relative noise, over the mean weight of rows. Where there is little, rare columns
    are learned as well as others, and units of one size keep them from being trusted too much.
    Where there is much, those in larger units than their deviations would be lost in it.
    """
    return noise**2 / (noise**2 + _EVEN**2)


def reach(regression: bool, n: int, columns: int) -> float:
    """How far noise may move a margin: see `REACH`. Less with many columns for each row.

    What is then learned of single columns carries over to other rows less, and noise in them is
    pulled back less.
    """
    return TARGET_REACH if regression else REACH / (1 + min(columns / n, 1.0) / 2)


def weighted_reach(reach: float, mean_weight: float) -> float:
    """The reach for a loss with weights of classes: less, as they pull noise back less."""
    return reach / (1 + (1 - mean_weight) / 2)


def largest_step(loss: Loss) -> float:
    """What η times the square of a row's norm may be at most.

    Extreme quantiles are far away, and few rows pull towards them.
    """
    if not loss.regression:
        return _LARGEST_STEP
    steepest = loss.lipschitz if loss.name == "quantile" else 0.5
    return _LARGEST_TARGET_STEP * 0.5 / max(1 - steepest, _RAREST)


def step_size(reach: float, noise: float, row_norm: float, steps: int, largest: float) -> float:
    """η of the first step, which falls to 0: η noise row_norm sqrt(steps/3) = reach.

    That is how far the noise of all steps together moves the margin of a row of this norm, `noise`
    being its standard deviation in a coordinate of the mean gradient. Where there is little noise,
    steps larger than `largest` over row_norm² would only overshoot.
    """
    most = largest / row_norm**2
    return min(reach / (noise * row_norm * math.sqrt(steps / 3)), most) if noise else most


def visible(
    asked: ColumnQueries, n: int, entries: int, epsilon: float, delta: float
) -> list[Share]:
    """The queries about columns, with larger parts of epsilon where the table is small.

    The votes of a normal column show if the noise multiplier of the ranges is at most
    _VISIBLE n / sqrt(entries), for rows of so many entries.
    """
    most = _VISIBLE * n / math.sqrt(entries)
    needed = math.sqrt(2 * math.log(1.25 / delta)) / (most * epsilon)
    factor = max(min(needed, _LARGEST_PART) / asked.ranges.part, 1.0)
    return [Share(share.purpose, factor * share.part) for share in asked.shares]


def limited(shares: list[Share]) -> list[Share]:
    """The queries, with smaller parts where together they would leave little for the training."""
    factor = math.sqrt(_LARGEST_TOTAL / max(sum(s.part**2 for s in shares), _LARGEST_TOTAL))
    return [Share(share.purpose, factor * share.part) for share in shares]


def shaped(n: int, columns: int, sparse: bool, noise_multiplier: float) -> bool:
    """Whether gradients are bounded to an ellipsoid whose axes are those of the rows' covariance.

    The noise in an eigenvalue of the covariance, whose mean is 1, is about z d^1.5/n: z is the
    noise multiplier that its part of epsilon allows. `docs/estimators.md` shows what it gains.
    """
    affordable = columns <= _MOST_SHAPED and n * columns**2 <= _MOST_SHAPED_PRODUCTS
    clear = noise_multiplier * columns**1.5 <= _SHAPED * n
    return not sparse and columns > 1 and affordable and clear


def kept_advantage(noise: float) -> float:
    """The part of a non-private model's advantage over a constant prediction that is left.

    A curve through measured accuracies of tables with 10 to 123 columns, ±0.15 around the middle.
    """
    return 1 / (1 + (noise / _HALF) ** 2)


def rows_needed(n: int, noise: float) -> float:
    """About how many rows would keep GOOD_KEPT of the advantage, where n rows have this noise."""
    return n * noise / (_HALF * math.sqrt(1 / GOOD_KEPT - 1))


def warn_if_hopeless(n: int, epsilon: float, noise: float, unit: Unit = "row") -> None:
    """Say what to expect where noise takes more than a fifth of the advantage."""
    kept = kept_advantage(noise)
    if kept >= _LEAST_KEPT:
        return
    needed = rows_needed(n, noise)
    warnings.warn(
        f"{n} {unit}s are few for epsilon={epsilon:g}: expect this model to keep about "
        f"{100 * kept:.0f} % of what a model without privacy gains over a constant prediction "
        f"(0 % is the accuracy of always answering the most frequent class). For "
        f"{100 * GOOD_KEPT:.0f} % it needs about {rounded_up(needed)} {unit}s, or epsilon="
        f"{epsilon * needed / n:.2g}, or fewer columns.",
        UserWarning,
        stacklevel=5,
    )


def rounded_up(number: float) -> str:
    """Two digits of a number, not less than it."""
    digits = 10 ** (math.floor(math.log10(number)) - 1)
    return f"{math.ceil(number / digits) * digits:,}"
