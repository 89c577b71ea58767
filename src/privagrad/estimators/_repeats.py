"""Warnings for fits whose privacy nobody keeps account of: repeated rows, and drawn seeds."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

import numpy as np

from privagrad.data.overlap import Marks, shared, sketch_of
from privagrad.data.tables import Table

_MOST = 256
_SHARED = 0.2
"""Part of the rows of two tables from which on they count as the same: folds and resamples."""

_DRAWN_SEEDS = range(2**20, 2**31)
"""People choose smaller seeds; scikit-learn draws those of an ensemble's members below 2^31."""


@dataclass
class _Fitted:
    """Rows that were fitted, and how often they or many of them were."""

    sketch: Marks | None
    count: int = 0


_fits: OrderedDict[int, _Fitted] = OrderedDict()
"""By checksums of tables: in this process alone, never written."""

_lock = Lock()


def warn_of_repeated_fit(table: Table) -> None:
    """Count a private fit of these rows that no budget pays; the second one warns.

    Tables that share a good part of their rows count as one: folds of a cross-validation, resamples
    of an ensemble.
    """
    checksum, sketch = table.checksum, sketch_of(table.marks())
    with _lock:
        known = checksum if checksum in _fits else _overlapping(sketch)
        found = _fits.pop(checksum if known is None else known, _Fitted(sketch))
        found.count += 1
        count = found.count
        _fits[checksum if known is None else known] = found
        if len(_fits) > _MOST:
            _fits.popitem(last=False)
    if count == 2:
        warnings.warn(
            f"{count} private fits of the same rows in this process, or of tables that share many "
            "rows, as folds of a cross-validation do: their epsilons add up, and so do those of "
            "further ones. State a budget that is charged for each of them: ledger= and dataset=.",
            UserWarning,
            stacklevel=4,
        )


def warn_of_drawn_seed(random_state: object) -> None:
    """Say that a fit is not private where a tool is likely to have seeded it.

    Ensembles of scikit-learn draw a seed for each member.
    """
    if isinstance(random_state, (int, np.integer)) and int(random_state) in _DRAWN_SEEDS:
        warnings.warn(
            "This fit is seeded, so that its model is NOT private: whoever knows the seed can "
            "repeat the noise. Ensembles such as BaggingClassifier set random_state on their "
            "members. Fit members one by one without a seed, and charge them to a budget: ledger= "
            "and dataset=.",
            UserWarning,
            stacklevel=4,
        )


def _overlapping(sketch: Marks | None) -> int | None:
    """The rows that were fitted last and that are in good part the same."""
    places = (key for key in reversed(_fits) if shared(sketch, _fits[key].sketch) >= _SHARED)
    return next(places, None)
