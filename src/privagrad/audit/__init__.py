"""Empirical lower bounds on epsilon: what an attacker really achieves, beside what is claimed.

`one_release` and `whole_run` attack this library in a configuration of your choice;
`measure_release` and `measure_run` evaluate the scores of an attack of your own.
"""

from privagrad.audit.bounds import Audit, measure_release, measure_run
from privagrad.audit.canaries import whole_run
from privagrad.audit.releases import one_release

__all__ = ["Audit", "measure_release", "measure_run", "one_release", "whole_run"]
