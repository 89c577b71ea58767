"""scikit-learn estimators that need no tuning: one epsilon pays for everything."""

from privagrad.estimators.linear import (
    PrivateHuberRegressor,
    PrivateLinearSVC,
    PrivateLogisticRegression,
    PrivateQuantileRegressor,
)
from privagrad.estimators.ridge import PrivateRidge
from privagrad.estimators.saved import load_model
from privagrad.estimators.search import PrivateSearch

__all__ = [
    "PrivateHuberRegressor",
    "PrivateLinearSVC",
    "PrivateLogisticRegression",
    "PrivateQuantileRegressor",
    "PrivateRidge",
    "PrivateSearch",
    "load_model",
]
