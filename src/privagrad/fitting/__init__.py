"""A model from a file: read, plan, reserve, fit, save, in this order."""

from privagrad.fitting.checks import require_writable, warn_if_weak
from privagrad.fitting.evaluate import (
    EvaluationRequest,
    PreparedEvaluation,
    prepare_evaluation,
    run_evaluation,
)
from privagrad.fitting.fit import run
from privagrad.fitting.forecast import Forecast, Outlook, forecast_size, forecast_table
from privagrad.fitting.plan import PreparedFit, prepare
from privagrad.fitting.request import LOSSES, FitRequest, Task
from privagrad.fitting.snapshots import fingerprint, same_content

__all__ = [
    "LOSSES",
    "EvaluationRequest",
    "FitRequest",
    "Forecast",
    "Outlook",
    "PreparedEvaluation",
    "PreparedFit",
    "Task",
    "fingerprint",
    "forecast_size",
    "forecast_table",
    "prepare",
    "prepare_evaluation",
    "require_writable",
    "run",
    "run_evaluation",
    "same_content",
    "warn_if_weak",
]
