"""The covariance of some columns: what it is, its noise, what a row can move."""

import numpy as np
import pytest

from privagrad.glm.examples import Examples, MemoryPartitions, PartitionedExamples
from privagrad.glm.rows import as_rows
from privagrad.privacy.mechanism import GaussianSum
from privagrad.queries import second_moments
from privagrad.queries.covariance import COVARIANCE, private_covariance
from tests.releases import releases_at
from tests.statistics import assert_scale

PURPOSE = COVARIANCE.purpose
CHOSEN = np.array([0, 2, 3])


def table(n=200, dim=5, seed=0):
    return np.random.default_rng(seed).standard_normal((n, dim))


def found(X, radius=100.0, noise=1e-7, seed=0):
    examples = Examples(as_rows(X), np.zeros(len(X)))
    return private_covariance(examples, CHOSEN, radius, releases_at({PURPOSE: noise}, seed))


def handed(X, radius):
    """The units that the mechanism was handed, times its grid."""
    made = []

    class Recorded(GaussianSum):
        def release(self, total, *rest):
            made.append(total.memory * self.grid)
            return super().release(total, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second_moments, "GaussianSum", Recorded)
        found(X, radius, 1.0)
    return made[0]


def test_it_is_the_mean_of_the_outer_products_of_the_chosen_columns():
    X = table()
    others = X.copy()
    others[:, [1, 4]] = 1e9  # neither seen nor counted in norms
    for given in (X, others):
        V = X[:, CHOSEN]
        assert found(given).matrix == pytest.approx(V.T @ V / len(V), abs=1e-4)


def test_a_row_beyond_the_bound_counts_as_much_as_one_on_it():
    X = np.zeros((1, 5))
    X[0, CHOSEN] = 3.0, 4.0, 12.0
    for radius, moved in ((26.0, 0.25), (13.0, 1.0), (1.0, 1.0)):
        assert np.linalg.norm(handed(X, radius)) == pytest.approx(moved, abs=1e-5)
    X[0, 2] = np.inf
    assert not handed(X, 1.0).any()


def test_the_noise_is_that_of_the_plan():
    """Of norm 1 for ‖v vᵀ‖ = radius²: z radius²/n in the diagonal, less by sqrt(2) beside it."""
    n, radius, noise = 50, 3.0, 5.0
    X = np.zeros((n, 5))
    drawn = [found(X, radius, noise, seed) for seed in range(300)]
    matrices = np.array([one.matrix for one in drawn])
    assert drawn[0].noise == pytest.approx(noise * radius**2 / (np.sqrt(2) * n))
    assert_scale(matrices[:, [0, 0, 1], [1, 2, 2]], drawn[0].noise)
    assert_scale(np.diagonal(matrices, axis1=1, axis2=2), np.sqrt(2) * drawn[0].noise)


def test_rows_in_partitions_give_the_same_to_the_last_bit():
    X = table()
    parts = [Examples(as_rows(part), np.zeros(len(part))) for part in (X[:70], X[70:])]
    examples = PartitionedExamples.of(MemoryPartitions(parts))
    apart = private_covariance(examples, CHOSEN, 2.0, releases_at({PURPOSE: 1.0}))
    assert np.array_equal(apart.matrix, found(X, 2.0, 1.0).matrix)


def test_a_plan_without_it_refuses_it():
    X = table()
    with pytest.raises(RuntimeError, match="covariance"):
        private_covariance(
            Examples(as_rows(X), np.zeros(len(X))), CHOSEN, 1.0, releases_at({"moments": 1.0})
        )
