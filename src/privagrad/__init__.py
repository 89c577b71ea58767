"""Train models under differential privacy with noise that follows the gradients' geometry."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from privagrad.geometry.domains import Box, L1Ball, L2Ball, Simplex, WholeSpace
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.glm.losses import Loss
from privagrad.methods.loop import Result
from privagrad.methods.minimize import minimize
from privagrad.privacy.accounting import PrivacyPlan, PrivacyReport
from privagrad.privacy.events import GaussianEvent

if TYPE_CHECKING:
    from privagrad.estimators import (
        PrivateHuberRegressor,
        PrivateLinearSVC,
        PrivateLogisticRegression,
        PrivateQuantileRegressor,
        PrivateRidge,
        PrivateSearch,
        load_model,
    )

    __version__: str

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
    "PrivateRidge",
    "PrivateSearch",
    "Result",
    "Simplex",
    "WholeSpace",
    "load_model",
    "minimize",
]

# Modules that version 0.1 had at the top level, such as privagrad.ledger, are still found here.
__path__.append(str(Path(__file__).parent / "_former_paths"))


def __getattr__(name: str) -> Any:
    # scikit-learn is loaded when an estimator is asked for, not before; so are other rooms.
    if name == "load_model" or (name.startswith("Private") and name in __all__):
        return getattr(import_module("privagrad.estimators"), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("privagrad")
    if not name.startswith("_") and find_spec(f"privagrad.{name}") is not None:
        return import_module(f"privagrad.{name}")
    raise AttributeError(f"module 'privagrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    found = globals().items()
    own = {name for name, value in found if name.startswith("__") or isinstance(value, ModuleType)}
    return sorted({*own, *__all__, "__version__"})
