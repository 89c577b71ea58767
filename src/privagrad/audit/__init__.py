"""Empirical lower bounds on epsilon: what an attacker really achieves, beside what is claimed.

`one_release` and `whole_run` attack this library in a configuration of your choice;
`measure_release`, `measure_run` and `measure_run_by_curve` evaluate the scores of an attack of your
own.
"""

from privagrad.audit.bounds import Audit, measure_release, measure_run
from privagrad.audit.canaries import whole_run
from privagrad.audit.curves import measure_run_by_curve
from privagrad.audit.releases import one_release

__all__ = [
    "Audit",
    "measure_release",
    "measure_run",
    "measure_run_by_curve",
    "one_release",
    "whole_run",
]
