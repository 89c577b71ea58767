"""How well a model predicts another table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.data.libsvm import read_libsvm
from privagrad.data.models import SavedModel
from privagrad.fitting.labels import label_numbers


def scores_on(model: SavedModel, table: Path) -> dict[str, Any]:
    """How well a model predicts another table, beside a constant prediction. NOT private."""
    from privagrad.data.readers import chunks

    if model.schema is None:
        X, y = read_libsvm(table, len(model.features))
        parts: Any = [(X, label_numbers(y, tuple(model.classes)) if model.classes else y)]
    else:
        parts = ((part.X, part.y) for part in chunks(table, model.schema))
    answers = [np.stack([_answers(model, X), y])[:, np.isfinite(y)] for X, y in parts]
    predicted, truth = np.concatenate(answers, axis=1)
    if not truth.size:
        raise ValueError(f"Expected rows with a target in {table.name}, found none.")
    if model.classes is not None:
        _, counts = np.unique(truth, return_counts=True)
        return {
            "rows": int(truth.size),
            "accuracy": float((predicted == truth).mean()),
            "majority": float(counts.max() / truth.size),
            "private": False,
        }
    return {
        "rows": int(truth.size),
        "mean_absolute_error": float(np.abs(predicted - truth).mean()),
        "mean_absolute_error_of_median": float(np.abs(truth - np.median(truth)).mean()),
        "private": False,
    }


def _answers(model: SavedModel, X: Any) -> Vector:
    """Predicted numbers, or numbers of classes."""
    margins = model.margins(X)
    if model.classes is None:
        return margins[:, 0]
    guess = margins.argmax(axis=1) if margins.shape[1] > 1 else margins[:, 0] > 0
    return np.asarray(guess, dtype=np.float64)


def with_test(model: SavedModel, scores: dict[str, Any], table: str) -> SavedModel:
    """The same with what a test table said of it."""
    return replace(model, evaluation={**model.evaluation, "test": {"table": table, **scores}})
