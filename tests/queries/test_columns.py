"""Queries over all rows, as events."""

import pytest

from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.queries.columns import Share, query_event


def test_a_query_costs_its_share_under_both_relations():
    """Under replace-one a row moves a sum twice as far, and the query has twice the noise."""
    share = Share("ranges", 0.3)
    for relation in ("zero-out", "replace-one"):
        event = query_event(share, 2.0, 1e-5, relation)
        under = GaussianEvent(event.noise_multiplier, under=relation)
        assert PrivacyPlan((under,)).epsilon(1e-5) == pytest.approx(0.6, rel=0.01)
