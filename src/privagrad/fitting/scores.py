"""How well a model predicts another table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from privagrad._internal.validate import Vector
from privagrad.data.models import SavedModel
from privagrad.data.tables import Table


def with_scores(model: SavedModel, table: Table, path: Path) -> SavedModel:
    """The same model with how well it predicts another table, read from `path`."""
    test = {"table": path.name, **scores_on(model, table)}
    return replace(model, evaluation={**model.evaluation, "test": test})


def scores_on(model: SavedModel, table: Table) -> dict[str, Any]:
    """How well a model predicts another table, beside a constant prediction. NOT private."""
    predicted = np.concatenate([_answers(model, part.X) for part in table.parts()])
    known = np.isfinite(table.targets)
    predicted, truth = predicted[known], table.targets[known]
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
