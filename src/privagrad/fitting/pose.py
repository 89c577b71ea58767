"""The problem that a table poses under settings, and what is public about it before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.data.encoding import are_sparse
from privagrad.data.tables import Table
from privagrad.fitting.settings import FitSettings
from privagrad.glm.examples import Examples
from privagrad.linear import Bounds, Problem, PublicFacts, quantities_of
from privagrad.privacy.users import UserRows

_GUESSED_CATEGORIES = 21
"""Of a column whose categories are not known yet: for the plan alone."""


def public_facts(table: Table, settings: FitSettings) -> PublicFacts:
    """What is public about the problem before categories are discovered."""
    encoding, loss = table.encoding, settings.loss
    unknown = sum(name != table.target.name for name in table.counts)
    width = len(encoding.names) + _GUESSED_CATEGORIES * unknown
    quantities = quantities_of(
        len(encoding.names), encoding.bounds, encoding.groups, encoding.blanks
    )
    one_hot = sum(stop - first - 1 for first, stop in encoding.groups)
    entries = len(encoding.names) - encoding.indicators - one_hot + unknown
    if unknown and are_sparse(entries, width - encoding.indicators):
        quantities = 0  # rows will be sparse, most likely
    classes = 0 if loss.regression else len(table.target.categories)
    outputs, weights = classes if classes > 2 else 1, settings.class_weights
    return PublicFacts(
        table.n, width, outputs, encoding.sparse, loss.regression, settings.intercept,
        encoding.bounds is not None, table.target.bounded,
        loss.name == "logistic" or (outputs > 1 and weights is not None),
        isinstance(weights, str), settings.squares, encoding.indicators,
        quantities, table.unit,
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
    loss, outputs, examples = settings.loss, 1, table.examples()
    if target.kind == "number":
        examples = examples.mapped(_with_known_numbers)
    else:
        if not discovered:
            require_stated_labels(table)
        two = len(target.categories) == 2
        examples = examples.mapped(_with_classes, two)
        if not two:
            loss, outputs = loss.multiclass_twin, len(target.categories)
    return Problem(
        loss,
        examples,
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


def _with_known_numbers(examples: Examples) -> Examples:
    """Numbers as targets; rows where they are missing are left out."""
    left_out = np.isnan(examples.targets)
    return _leaving_out(examples, np.where(left_out, 0.0, examples.targets), left_out)


def _with_classes(examples: Examples, two: bool) -> Examples:
    """Class numbers as targets, of two classes signs; rows without a class are left out.

    These are blanks, and what was too rare to be discovered.
    """
    left_out = ~(examples.targets >= 0)
    numbers = np.where(left_out, 0.0, examples.targets)
    return _leaving_out(examples, 2 * numbers - 1 if two else numbers, left_out)


def _leaving_out(examples: Examples, targets: Vector, left_out: NDArray[np.bool_]) -> Examples:
    return replace(examples, targets=targets, left_out=left_out if left_out.any() else None)


def require_stated_labels(table: Table) -> None:
    """Refuse targets with another label than the stated ones."""
    count, row = table.strange_labels()
    if count:
        where = f" in row {row} ({count} such rows)" if row else f" in {count} rows"
        where = "" if table.unit == "user" else where
        raise ValueError(
            f"Expected the stated labels alone, found another one{where}: state all classes, or "
            "other spellings as `aliases` in the schema."
        )
