"""Model files as fitted estimators."""

from __future__ import annotations

from pathlib import Path

from privagrad.data.models import load_model as load_saved_model
from privagrad.estimators._base import PrivateLinearEstimator
from privagrad.estimators.linear import (
    PrivateHuberRegressor,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    PrivateQuantileRegressor,
)
from privagrad.estimators.ridge import PrivateRidge

_KINDS: tuple[type[PrivateLinearEstimator], ...] = (
    PrivateLogisticRegression,
    PrivateLinearSVC,
    PrivateQuantileRegressor,
    PrivateHuberRegressor,
    PrivateRidge,
)


def load_model(path: Path | str) -> PrivateLinearEstimator:
    """The fitted estimator of a model file, which an estimator or ``privagrad fit`` has saved.

    Parameters
    ----------
    path : path
        The file. Loading it runs no code: there is no pickle in it.
    """
    model = load_saved_model(Path(path))
    for kind in _KINDS:
        if model.loss in kind._losses:
            return kind._of(model)
    raise ValueError(f"Expected a model of a known loss in {path}, found {model.loss!r}.")
