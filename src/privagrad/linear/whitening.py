"""Combinations of columns in which a ball of gradients is an ellipsoid with axes of any direction.

The gradient of a linear model is a slope times the row. With rows W a in place of a, gradients are
W g, so that a ball for them is the ellipsoid {g : ‖W g‖ ≤ radius}: its matrix C = W² need not be
diagonal. Whitening is then done once, when rows are standardised; the mechanism does not change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Integers
from privagrad.glm.examples import Examples, PartitionedExamples
from privagrad.glm.rows import DenseRows
from privagrad.privacy.releases import Releases
from privagrad.queries.covariance import COVARIANCE, private_covariance
from privagrad.queries.moments import Columns
from privagrad.queries.second_moments import SecondMoments

_LEAST = 0.3
"""The smallest eigenvalue, in units of the mean one. Directions with smaller ones are stretched as
if they had it: there, few rows are far out, and count less when they are bounded."""


@dataclass(frozen=True)
class Whitening:
    """Columns v of rows are replaced by W v.

    Attributes
    ----------
    columns : array of int, of shape (k,)
        Which columns.
    matrix : array of shape (k, k)
        W, symmetric and positive definite, from releases alone.
    """

    columns: Integers
    matrix: NDArray[np.float64]

    def weights(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weights of the columns, from weights of their combinations, in rows of one output each.

        ⟨w, W v⟩ = ⟨W w, v⟩.
        """
        found = weights.copy()
        found[:, self.columns] = weights[:, self.columns] @ self.matrix
        return found

    def covariance(self, covariance: NDArray[np.float64], outputs: int) -> NDArray[np.float64]:
        """The same for the covariance of all weights, of shape (k d, k d).

        Of variances alone, of shape (k d,), it is the covariance of each output's own weights, of
        shape (k, d, d).
        """
        size = len(covariance) // outputs
        whole = self._whole(size)
        if covariance.ndim == 1:
            return np.array([(whole * v) @ whole for v in covariance.reshape(outputs, size)])
        blocks = covariance.reshape(outputs, size, outputs, size)
        moved = np.einsum("ij,ajbk,kl->aibl", whole, blocks, whole, optimize=True)
        return np.asarray(moved.reshape(covariance.shape))

    def _whole(self, size: int) -> NDArray[np.float64]:
        """W as a matrix of all columns, others staying as they are."""
        whole = np.eye(size)
        whole[np.ix_(self.columns, self.columns)] = self.matrix
        return whole


def learned_whitening(
    examples: Examples | PartitionedExamples, columns: Columns, releases: Releases
) -> Whitening | None:
    """The whitening of those columns that are quantities; None where the plan or rows have none.

    Indicators keep their units: those of rare ones are chosen not to be trusted too much.

    Parameters
    ----------
    examples : Examples or PartitionedExamples
        Standardised rows.
    columns : Columns
        What is known of the columns, from earlier releases.
    releases : Releases
        What pays for the covariance, with the event "covariance", if the plan has it.
    """
    quantities = columns.varied & (columns.moments > 0)
    if columns.seen is not None:
        quantities &= columns.seen
    chosen = np.flatnonzero(quantities)
    if COVARIANCE.purpose not in releases.plan or examples.sparse:
        return None
    if not columns.found or chosen.size < 2:
        return None
    radius = math.sqrt(float(columns.moments[chosen].sum()))
    found = private_covariance(examples, chosen, radius, releases)
    return Whitening(chosen, inverse_root(found))


def inverse_root(found: SecondMoments) -> NDArray[np.float64]:
    """A multiple of S^{-1/2}, S being the matrix as far as it is clear of its noise.

    S = (1 - a) matrix + a m I, where m is the mean eigenvalue. The best a is the part of
    ‖matrix - m I‖² that is noise, whose mean square is noise² k (k + 1) (Ledoit and Wolf 2004). So
    the noisier the matrix is, the nearer the result is to the identity. The multiple leaves the
    mean eigenvalue what it is.
    """
    matrix, size = found.matrix, len(found.matrix)
    mean = float(np.trace(matrix)) / size
    apart = float(np.square(matrix - mean * np.eye(size)).sum())
    noise = found.noise**2 * size * (size + 1)
    if not (mean > 0 and apart > noise):
        return np.eye(size)
    values, vectors = np.linalg.eigh(matrix)
    values = mean + (1 - noise / apart) * (values - mean)
    values = np.maximum(values, _LEAST * mean)
    return np.asarray((vectors * np.sqrt(values.mean() / values)) @ vectors.T)


def whitened(examples: Examples, columns: Integers, matrix: NDArray[np.float64]) -> Examples:
    """Every row with these columns v replaced by W v, in place: standardised rows are a copy."""
    if not isinstance(examples.rows, DenseRows):
        raise TypeError("Expected dense rows, found sparse ones.")
    return replace(examples, rows=examples.rows.combined(columns, matrix))
