"""Train models under differential privacy with noise that follows the gradients' geometry."""

from importlib.metadata import version

from privagrad.accounting import PrivacyPlan, PrivacyReport
from privagrad.descent import Result, minimize
from privagrad.domains import Box, L1Ball, L2Ball, Simplex, WholeSpace
from privagrad.events import GaussianEvent
from privagrad.geometry import Ellipsoid
from privagrad.losses import Loss

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
    "Result",
    "Simplex",
    "WholeSpace",
    "minimize",
]
