"""How columns vary together: the second moments of standardised columns, in one private query."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Integers
from privagrad.glm.examples import Examples, PartitionedExamples
from privagrad.privacy.releases import Releases
from privagrad.queries.columns import Share
from privagrad.queries.second_moments import Factors, SecondMoments, private_second_moments

COVARIANCE = Share("covariance", 0.3)


def private_covariance(
    examples: Examples | PartitionedExamples, columns: Integers, radius: float, releases: Releases
) -> SecondMoments:
    """E[v vᵀ] of these columns v of the rows, v shrunk to norm at most `radius`.

    Parameters
    ----------
    examples : Examples or PartitionedExamples
        Dense rows, standardised.
    columns : array of int
        Which columns. They must be public or come from earlier releases.
    radius : float
        The bound on the norm of v. It must be public or come from earlier releases.
    releases : Releases
        What pays for the query.

    Guarantees
    ----------
    One Gaussian release, the plan's event "covariance", by `private_second_moments`.
    """
    chosen = examples.mapped(_columns_of, columns)
    return private_second_moments(
        chosen, radius, releases, COVARIANCE.purpose, Factors(_ones, (), 1)
    )


def _columns_of(examples: Examples, columns: Integers) -> Examples:
    zeros = np.zeros(columns.size)
    return replace(examples, rows=examples.rows.centred(columns, zeros))


def _ones(examples: Examples) -> NDArray[Any]:
    return np.ones((examples.shape[0], 1, 1))
