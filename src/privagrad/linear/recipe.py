"""Every choice that a fit without tuning makes, from public facts and private releases alone.

The numbers were found on synthetic and public data; `docs/estimators.md` explains how.
"""

from __future__ import annotations

import math
import warnings

from privagrad.methods import Method
from privagrad.methods.adagrad import DPAdaGrad
from privagrad.methods.pagan import PAGAN
from privagrad.methods.pasan import PASAN
from privagrad.privacy.sampling import Batches

STEPS = 300
RADIUS = 0.2
"""Bound on gradients, in units of the largest slope times the median norm of a row."""

_HEAD_START = 0.03
METHODS: dict[str, Method] = {
    "pagan": PAGAN(_HEAD_START),
    "pasan": PASAN(),
    "dp-adagrad": DPAdaGrad(_HEAD_START),
}
"""PAGAN is what the numbers here were found with; the others are for comparison."""

_WORK = 1e9
_LEAST_RATE = 0.01
_SPARSE_ENTRIES = 100
_HALF, _LEAST_KEPT, _GOOD_KEPT = 0.05, 0.8, 0.9
_STEP, _STEP_POWER, _LEAST_STEP, _MOST_STEP = 0.04, -2 / 3, 0.1, 4.0


def default_delta(n_examples: int) -> float:
    """δ where the user gives none: below one over the number of rows, which is public."""
    return min(1e-5, 0.1 / n_examples)


def batches(n: int, dim: int, sparse: bool, steps: int | None, batch_size: int | None) -> Batches:
    """All rows where that is affordable: no noise is lost to sampling. Else a Poisson sample."""
    steps = STEPS if steps is None else steps
    entries = min(dim, _SPARSE_ENTRIES) if sparse else dim
    affordable = _WORK / (steps * entries)
    size = max(affordable, _LEAST_RATE * n, 1) if batch_size is None else batch_size
    if size > n / 2:
        return Batches(n, n, steps, None)
    return Batches(n, round(size), steps, "poisson")


def relative_noise(noise_multiplier: float, batches: Batches, dim: int) -> float:
    """Length of the noise in the average of all steps' gradients, over the bound on one of them."""
    return noise_multiplier * math.sqrt(dim / batches.steps) / batches.batch_size


def step_size(noise: float, regression: bool, method: str, dim: int) -> float:
    """α: how far noise alone may carry a coefficient; less where there is more noise.

    PASAN's is the same for the vector of all coefficients.

    Targets of a regression are standardised, so that its coefficients stay below 1.
    """
    reach = 0.2 if regression else 1.0
    if method == "pasan":
        reach *= math.sqrt(dim)
    wanted = _STEP * noise**_STEP_POWER if noise > 0 else math.inf
    return reach * min(max(wanted, _LEAST_STEP), _MOST_STEP)


def kept_advantage(noise: float) -> float:
    """The part of a non-private model's advantage over a constant prediction that is left.

    A curve through measured accuracies of tables with 10 to 123 columns, ±0.15 around the middle.
    """
    return 1 / (1 + (noise / _HALF) ** 2)


def warn_if_hopeless(n: int, epsilon: float, noise: float) -> None:
    """Say what to expect where noise takes more than a fifth of the advantage."""
    kept = kept_advantage(noise)
    if kept >= _LEAST_KEPT:
        return
    needed = n * noise / (_HALF * math.sqrt(1 / _GOOD_KEPT - 1))
    warnings.warn(
        f"{n} rows are few for epsilon={epsilon:g}: expect this model to keep about "
        f"{100 * kept:.0f} % of what a model without privacy gains over a constant prediction "
        f"(0 % is the accuracy of always answering the most frequent class). For "
        f"{100 * _GOOD_KEPT:.0f} % it needs about {_rounded(needed)} rows, or epsilon="
        f"{epsilon * needed / n:.2g}, or fewer columns.",
        UserWarning,
        stacklevel=5,
    )


def _rounded(number: float) -> str:
    digits = 10 ** (math.floor(math.log10(number)) - 1)
    return f"{math.ceil(number / digits) * digits:,}"
