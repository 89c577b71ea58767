"""Linear models under differential privacy, without tuning: the choices, the plan, one fit."""

from privagrad.linear.fit import LinearModel, Trace, run_fit
from privagrad.linear.least_squares import BY_GRADIENTS, Solver
from privagrad.linear.plan import Choices, Plan, PublicFacts, plan_fit
from privagrad.linear.problem import Bounds, Problem, quantities_of
from privagrad.linear.recipe import METHOD, default_delta, warn_if_hopeless

__all__ = [
    "BY_GRADIENTS",
    "METHOD",
    "Bounds",
    "Choices",
    "LinearModel",
    "Plan",
    "Problem",
    "PublicFacts",
    "Solver",
    "Trace",
    "default_delta",
    "plan_fit",
    "quantities_of",
    "run_fit",
    "warn_if_hopeless",
]
