"""A model from a file: read, plan, reserve, fit, evaluate, save, in this order."""

from privagrad.fitting.jobs import Job, prepare
from privagrad.fitting.runs import run
from privagrad.fitting.scores import scores_on, with_test
from privagrad.fitting.snapshots import fingerprint, same_content
from privagrad.fitting.wishes import LOSSES, Wish

__all__ = [
    "LOSSES",
    "Job",
    "Wish",
    "fingerprint",
    "prepare",
    "run",
    "same_content",
    "scores_on",
    "with_test",
]
