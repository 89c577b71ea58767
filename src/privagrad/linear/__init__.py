"""Linear models under differential privacy, without tuning: the choices, one fit, what it shows."""

from privagrad.linear.evaluation import EVALUATION, Evaluation
from privagrad.linear.fit import (
    Bounds,
    Choices,
    Facts,
    LinearModel,
    Plan,
    Problem,
    Trace,
    is_regression,
    plan_fit,
    run_fit,
)
from privagrad.linear.recipe import METHODS, default_delta, warn_if_hopeless

__all__ = [
    "EVALUATION",
    "METHODS",
    "Bounds",
    "Choices",
    "Evaluation",
    "Facts",
    "LinearModel",
    "Plan",
    "Problem",
    "Trace",
    "default_delta",
    "is_regression",
    "plan_fit",
    "run_fit",
    "warn_if_hopeless",
]
