"""Rows that are not in memory, as estimators fit them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.data.columns import Column, Schema
from privagrad.data.matrices import PartitionedTable
from privagrad.data.opening import numbers_of, open_examples, target_of
from privagrad.glm.examples import Examples, PartitionedExamples, Sums
from privagrad.glm.rows import DenseRows, as_targets, quiet
from privagrad.glm.stored import StoredPartitions

_PIECE = 2**20
_MOST_LABELS = 1000


def source_schema(X: Any, y: Any, given: Schema | None, *, regression: bool) -> Schema:
    """The schema of a source with its target: the one given, or one of numbers alone."""
    if given is None:
        return numbers_of(X, y, "number" if regression else "category")
    name = target_of(X, given, y)
    given.column(name)
    return replace(given, target=name)


def require_no_groups(groups: Any, instead: str) -> None:
    """Refuse users by row for rows that are not in memory."""
    if groups is not None:
        raise ValueError(
            f"Expected no groups= for rows that are not in memory, found users of rows: give "
            f"{instead}."
        )


def require_no_schema(schema: Schema | None) -> None:
    """Refuse columns of other kinds than numbers on a cluster."""
    if schema is not None:
        raise ValueError(
            "Expected no schema= for dask arrays and data frames, which hold numbers alone, found "
            "one: leave it out, or give the path of the table instead of the data frame."
        )


def partitions_of(X: Any, y: Any) -> PartitionedExamples | None:
    """Arrays of numbers that are not in memory, with their targets; None for others."""
    found = open_examples(X, y)
    if not isinstance(found, PartitionedExamples):
        return None
    if y is None and not isinstance(X, PartitionedExamples):
        raise ValueError("Expected targets y, found None.")
    _require_finite(found)
    return found


def labels_of(examples: PartitionedExamples, y: Any) -> NDArray[Any]:
    """The different labels, which are public; refuses targets that are no labels."""
    partitions = examples.partitions
    told: Any = getattr(partitions, "labels", None)
    found: NDArray[Any]
    if told is not None:
        found = told()
        found = found.astype(getattr(y, "dtype", found.dtype))
    else:
        targets = as_targets(y)
        if y is None and isinstance(partitions, StoredPartitions):
            targets = partitions.targets
        pieces = [np.unique(targets[k : k + _PIECE]) for k in range(0, len(targets), _PIECE)]
        found = np.unique(np.concatenate(pieces))
    # A classifier of targets that are no labels would have a class for each of them.
    exact = found.astype(np.float64)
    whole = (exact == np.rint(exact)).all() and (np.diff(exact) >= 1).all()
    if found.size > _MOST_LABELS or not whole:
        raise ValueError(
            f"Expected targets y that are labels of at most {_MOST_LABELS} classes, whole numbers "
            "below 2**53, found others: take an estimator for regression, or encode them as 0, 1, "
            "2, ..."
        )
    return found


def partitioned_table(
    examples: PartitionedExamples, target: Column, labels: NDArray[Any] | None,
    names: NDArray[Any] | None = None,
) -> PartitionedTable:  # fmt: skip
    """The rows as a table, with targets as numbers or as places among the labels."""
    if labels is not None:
        examples = examples.mapped(_coded, np.asarray(labels, dtype=np.float64))
    elif target.low is not None and target.high is not None:
        examples = examples.mapped(_bounded, target.low, target.high)
    told = None if names is None else tuple(map(str, names))
    schema = Schema((target,), target.name)
    return PartitionedTable(schema, np.empty(0), {}, data=examples, names=told)


def _coded(examples: Examples, labels: Vector) -> Examples:
    return replace(examples, targets=np.searchsorted(labels, examples.targets).astype(np.float64))


def _bounded(examples: Examples, low: float, high: float) -> Examples:
    return replace(examples, targets=np.clip(examples.targets, low, high))


def _require_finite(examples: PartitionedExamples) -> None:
    """Refuse NaN and infinite entries and targets, and name their columns."""
    columns, targets = examples.total(_strange, examples.shape[1], sample=None)
    if columns.any():
        shown = ", ".join(map(str, np.flatnonzero(columns)[:10]))
        raise ValueError(
            "Expected finite numbers in X, found NaN or inf in column"
            f"{'s' if np.count_nonzero(columns) > 1 else ''} {shown}: fill them by a public rule, "
            "for example a constant, or drop these columns."
        )
    if targets.any():
        raise ValueError("Expected finite targets y, found NaN or inf: drop those rows.")


@quiet
def _strange(examples: Examples, dim: int) -> Sums:
    """How many entries of each column, and how many targets, are not finite."""
    rows = examples.rows
    targets = np.array([np.count_nonzero(~np.isfinite(examples.targets))])
    if isinstance(rows, DenseRows):
        # A sum shows in one pass whether there is anything to look for.
        if np.isfinite(np.sum(rows.array, dtype=np.float64)):
            return np.zeros(dim, dtype=np.int64), targets
        return np.count_nonzero(~np.isfinite(rows.array), axis=0), targets
    wrong = rows.indices[~np.isfinite(rows.data)]
    return np.bincount(wrong, minlength=dim), targets
