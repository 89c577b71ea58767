"""The problem that a table poses under settings, and what is public about it before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.data.tables import Table
from privagrad.fitting.settings import FitSettings
from privagrad.glm.examples import Examples
from privagrad.glm.rows import as_rows
from privagrad.linear import Bounds, Problem, PublicFacts
from privagrad.privacy.events import Unit
from privagrad.privacy.users import UserRows

_GUESSED_CATEGORIES = 21
"""Of a column whose categories are not known yet: for the size of batches alone."""


def public_facts(table: Table, settings: FitSettings) -> PublicFacts:
    """What is public about the problem before categories are discovered."""
    encoding, loss = table.encoding, settings.loss
    unknown = sum(name != table.target.name for name in table.counts)
    width = len(encoding.names) + _GUESSED_CATEGORIES * unknown
    classes = 0 if loss.regression else len(table.target.categories)
    outputs, weights = classes if classes > 2 else 1, settings.class_weights
    return PublicFacts(
        table.n, width, outputs, encoding.sparse, loss.regression, settings.intercept,
        encoding.bounds is not None, table.target.bounded,
        loss.name == "logistic" or (outputs > 1 and weights is not None),
        isinstance(weights, str), settings.squares, encoding.indicators, table.unit,
    )  # fmt: skip


def pose(
    table: Table, settings: FitSettings, *, discovered: bool = False, users: UserRows | None = None
) -> Problem:
    """The only way from a table, all of whose categories are known, to a problem."""
    encoding, target = table.encoding, table.target
    if not encoding.names:
        raise ValueError(
            "Expected columns to learn from, found none: no category was frequent enough to be "
            "discovered. State categories in the schema. The run stays charged: finding this out "
            "was a release."
        )
    target_bounds: Bounds | None = None
    if target.low is not None and target.high is not None:
        target_bounds = np.array([target.low]), np.array([target.high])
    loss, outputs = settings.loss, 1
    if target.kind == "number":
        left_out = np.isnan(table.targets)
        targets = np.where(left_out, 0.0, table.targets)
    else:
        targets, left_out = class_numbers(table.targets, discovered=discovered, unit=table.unit)
        if len(target.categories) == 2:
            targets = 2 * targets - 1
        else:
            loss, outputs = loss.multiclass_twin, len(target.categories)
    return Problem(
        loss,
        Examples(as_rows(table.rows()), targets, left_out if left_out.any() else None),
        outputs,
        settings.intercept,
        encoding.bounds,
        target_bounds,
        encoding.groups,
        encoding.limits,
        encoding.blanks,
        settings.class_weights,
        settings.squares,
        users,
    )


def class_numbers(
    codes: Vector, *, discovered: bool, unit: Unit = "row"
) -> tuple[Vector, NDArray[np.bool_]]:
    """Class numbers, and which rows have none: blanks, and what was too rare to be discovered."""
    strange = np.flatnonzero(codes < 0)
    if strange.size and not discovered:
        where = "" if unit == "user" else f" in row {strange[0] + 1} ({strange.size} such rows)"
        raise ValueError(
            f"Expected the stated labels alone, found another one{where}: state all classes, or "
            "other spellings as `aliases` in the schema."
        )
    left_out = ~(codes >= 0)
    return np.where(left_out, 0.0, codes), left_out
