"""Train models under differential privacy with noise that follows the gradients' geometry."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from privagrad.accounting import PrivacyPlan, PrivacyReport
from privagrad.descent import Result, minimize
from privagrad.domains import Box, L1Ball, L2Ball, Simplex, WholeSpace
from privagrad.events import GaussianEvent
from privagrad.geometry import Ellipsoid
from privagrad.losses import Loss

if TYPE_CHECKING:
    from privagrad.estimators import (
        PrivateHuberRegressor,
        PrivateLinearSVC,
        PrivateLogisticRegression,
        PrivateQuantileRegressor,
        PrivateSearch,
    )

__version__ = version("privagrad")
__all__ = [
    "Box",
    "Ellipsoid",
    "GaussianEvent",
    "L1Ball",
    "L2Ball",
    "Loss",
    "PrivacyPlan",
    "PrivacyReport",
    "PrivateHuberRegressor",
    "PrivateLinearSVC",
    "PrivateLogisticRegression",
    "PrivateQuantileRegressor",
    "PrivateSearch",
    "Result",
    "Simplex",
    "WholeSpace",
    "minimize",
]


def __getattr__(name: str) -> Any:
    # scikit-learn is loaded when an estimator is asked for, not before.
    if name.startswith("Private") and name in __all__:
        return getattr(import_module("privagrad.estimators"), name)
    raise AttributeError(f"module 'privagrad' has no attribute {name!r}")
