"""What is certain to fail, or protects nobody: said before anything is spent."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np

from privagrad.data.tables import Table
from privagrad.fitting.settings import FitSettings
from privagrad.linear import Plan
from privagrad.privacy.ledger import Account, BudgetError
from privagrad.queries.categories import PURPOSE as CATEGORIES
from privagrad.queries.categories import categories_event, threshold

_LEAST_ROWS = 10
_LONGEST_NAME = 255
_MOST_NOISE = 1.0
"""Noise in the mean gradient of all steps, over the bound on a row's gradient: no mean is larger
than the bound."""

_WEAK_EPSILON, _WEAK_DELTA = 10.0, 1e-3


def require_writable(path: Path) -> None:
    """Refuse a file that cannot be written."""
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise ValueError(
            f"Expected a file name of at most {_LONGEST_NAME} bytes, found one of "
            f"{len(os.fsencode(path.name))}. Give a shorter one."
        )
    if path.is_dir():
        raise ValueError(f"Expected a file to write, found the folder {path}. Give another path.")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ValueError(
            f"Expected a folder to write {path.name} to, found none at {path.parent}. Create "
            "it, or give another path."
        )


def require_enough_rows(table: Table, plan: Plan, epsilon: float) -> None:
    """Refuse a fit that the number of rows, which is public, is certain to make useless."""
    n, noise, units = table.n, plan.relative_noise, f"{table.unit}s"
    if n < _LEAST_ROWS or noise >= _MOST_NOISE:
        needed = max(_LEAST_ROWS, round(n * noise / _MOST_NOISE))
        raise ValueError(
            f"Expected at least {needed} {units} for epsilon {epsilon:g} and so many columns, "
            f"found {n}: the noise would hide everything that they could teach. Give more "
            f"{units}, fewer columns or a larger epsilon. Nothing was spent."
        )
    if CATEGORIES not in plan.privacy:
        return
    least = threshold(len(table.counts), n, categories_event(plan.privacy))
    if table.target.name in table.counts and n < 2 * least:
        raise ValueError(
            f"Expected at least {2 * least:.0f} {units} to discover two classes, each of which "
            f"needs about {least:.0f} {units} under this epsilon; found {n}. State the "
            "classes, in the schema or with --classes (classes=). Nothing was spent."
        )
    if not table.encoding.names and n < least:
        raise ValueError(
            f"Expected at least {least:.0f} {units} to discover a category, found {n}, and no "
            "column with stated categories or numbers. State categories in the schema. Nothing "
            "was spent."
        )


def require_test_rows(test: Table, name: str, *, stated: bool) -> None:
    """Refuse a table to test on without targets, or with labels that are not the stated ones."""
    if not np.isfinite(test.targets).any():
        raise ValueError("Expected rows with a target in the table to test on, found none.")
    strange = np.flatnonzero(test.targets < 0)
    if stated and strange.size:
        raise ValueError(
            f"Expected the stated labels alone in {name}, found another one in row "
            f"{strange[0] + 1} ({strange.size} such rows): state other spellings as `aliases` in "
            "the schema, or correct the file. Nothing was spent."
        )


def require_known_weights(table: Table, settings: FitSettings) -> None:
    """Refuse weights of classes for which the plan would depend on classes yet to be found."""
    weights, unknown = settings.class_weights, table.target.name in table.counts
    if weights is None or not unknown:
        return
    if not isinstance(weights, str) or settings.loss.name == "hinge":
        raise ValueError(
            "Expected stated classes for these weights of classes, found classes that are to be "
            "discovered. State them, in the schema or with --classes (classes=). Nothing was spent."
        )


def require_delta_of(account: Account, delta: float | None) -> None:
    """Refuse a delta that the budget does not have; None: the budget's own."""
    if delta is not None and delta > account.delta:
        raise BudgetError(
            f"Expected a delta of at most {account.delta:g}, that of the budget of "
            f"{account.name!r}, found {delta:g}: a guarantee that may fail more often does "
            "not fit into the budget. Leave out --delta (delta=). Nothing was spent."
        )


def warn_if_weak(epsilon: float, delta: float | None) -> None:
    """Say in words what a guarantee means that hardly protects anyone."""
    if epsilon > _WEAK_EPSILON:
        warnings.warn(
            f"epsilon {epsilon:g} hardly protects anyone: what somebody believes about a person "
            f"may become e^{epsilon:g} times as likely through the result. Usual values are 0.1 "
            f"to 3, and at most {_WEAK_EPSILON:g}.",
            UserWarning,
            stacklevel=3,
        )
    if delta is not None and delta > _WEAK_DELTA:
        warnings.warn(
            f"delta {delta:g} hardly protects anyone: publishing each row with probability "
            f"{delta:g} would satisfy this guarantee, so that of 1000 people about "
            f"{1000 * delta:.0f} would be exposed. Choose delta well below 1 / number of rows.",
            UserWarning,
            stacklevel=3,
        )
