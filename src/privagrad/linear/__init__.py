"""Linear models under differential privacy, without tuning: the choices, one fit, what it shows."""

from privagrad.linear.fit import (
    Bounds,
    Choices,
    LinearModel,
    Plan,
    Problem,
    PublicFacts,
    Trace,
    is_regression,
    plan_fit,
    run_fit,
)
from privagrad.linear.recipe import METHODS, default_delta, warn_if_hopeless
from privagrad.queries.evaluation import EVALUATION, Evaluation

__all__ = [
    "EVALUATION",
    "METHODS",
    "Bounds",
    "Choices",
    "Evaluation",
    "LinearModel",
    "Plan",
    "Problem",
    "PublicFacts",
    "Trace",
    "default_delta",
    "is_regression",
    "plan_fit",
    "run_fit",
    "warn_if_hopeless",
]
