"""Queries over all rows, as events."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from privagrad.glm.rows import as_rows
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.queries import columns
from privagrad.queries.columns import (
    Share,
    private_norm,
    private_ranges,
    query_event,
    whitened_moments,
)
from tests.releases import releases_at


def test_a_query_costs_its_share_under_both_relations():
    """Under replace-one a row moves a sum twice as far, and the query has twice the noise."""
    share = Share("ranges", 0.3)
    for relation in ("zero-out", "replace-one"):
        event = query_event(share, 2.0, 1e-5, relation)
        under = GaussianEvent(event.noise_multiplier, under=relation)
        assert PrivacyPlan((under,)).epsilon(1e-5) == pytest.approx(0.6, rel=0.01)


@pytest.mark.parametrize("kind", [np.asarray, csr_array])
def test_threads_share_the_rows_out_without_a_trace(kind, monkeypatch):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((97, 6)) * (rng.uniform(size=(97, 6)) < 0.7) * np.geomspace(1, 1e3, 6)
    X[11, 2] = np.nan
    rows, scale = as_rows(kind(X)), np.geomspace(1, 1e3, 6)

    def answers():
        releases = releases_at({"ranges": 0.3, "moments": 0.3, "norms": 0.3})
        ranges = private_ranges(rows, releases, "ranges")
        means, squares, _ = whitened_moments(rows, scale, 2.0, releases, "moments")
        norm = private_norm(rows, scale, releases, "norms")
        return np.concatenate([ranges.scale, ranges.share, means, squares, [norm]])

    whole = answers()
    monkeypatch.setattr(columns, "_SPLIT_FROM", 0)
    monkeypatch.setattr(columns, "_ENTRIES_PER_SUM", 0)
    assert np.array_equal(answers(), whole)
