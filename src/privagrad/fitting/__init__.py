"""A model from rows: read, plan, reserve, fit, save, in this order."""

from privagrad.data.files import fingerprint
from privagrad.fitting.budget import require_no_budget
from privagrad.fitting.checks import require_test_rows, require_writable, warn_if_weak
from privagrad.fitting.evaluate import (
    EvaluationRequest,
    PreparedEvaluation,
    exact_figures,
    prepare_evaluation,
    run_evaluation,
)
from privagrad.fitting.fit import run
from privagrad.fitting.forecast import Forecast, Outlook, forecast_size, forecast_table
from privagrad.fitting.plan import (
    PreparedFit,
    check_settings,
    first_plan,
    prepare,
    prepare_table,
)
from privagrad.fitting.request import LOSSES, FitRequest, Task
from privagrad.fitting.settings import SQUARED, FitSettings

__all__ = [
    "LOSSES",
    "SQUARED",
    "EvaluationRequest",
    "FitRequest",
    "FitSettings",
    "Forecast",
    "Outlook",
    "PreparedEvaluation",
    "PreparedFit",
    "Task",
    "check_settings",
    "exact_figures",
    "fingerprint",
    "first_plan",
    "forecast_size",
    "forecast_table",
    "prepare",
    "prepare_evaluation",
    "prepare_table",
    "require_no_budget",
    "require_test_rows",
    "require_writable",
    "run",
    "run_evaluation",
    "warn_if_weak",
]
