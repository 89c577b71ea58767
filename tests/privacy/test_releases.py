"""What is released is held against the plan."""

import pytest

from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent, SelectEvent
from privagrad.privacy.noise import random_source
from privagrad.privacy.releases import Releases
from tests.releases import releases_at


def test_every_release_is_counted_and_none_is_made_beyond_the_plan():
    plan = PrivacyPlan((GaussianEvent(3.0, 2, purpose="gradients"), GaussianEvent(9.0)))
    releases = Releases(plan, random_source(0))
    assert [releases.noise_for("gradients") for _ in range(2)] == [3.0, 3.0]
    assert releases.made == {"gradients": 2, "query": 0}
    for purpose in ("gradients", "other"):
        with pytest.raises(RuntimeError, match="Expected a release that is planned"):
            releases.take(purpose)


def test_two_events_of_one_purpose_are_refused():
    plan = PrivacyPlan((GaussianEvent(3.0), GaussianEvent(9.0)))
    with pytest.raises(ValueError, match="one event a purpose"):
        Releases(plan, random_source(0))


def test_a_selection_is_no_single_release():
    plan = PrivacyPlan((SelectEvent((GaussianEvent(30.0),), 3.0),))
    with pytest.raises(TypeError, match="found a selection"):
        Releases(plan, random_source(0)).take("selection")


def test_a_report_of_releases_is_that_of_the_whole_plan():
    releases = releases_at({"ranges": 5.0, "moments": 7.0})
    releases.delta = 1e-5
    releases.take("ranges")
    assert releases.report() == releases.plan.report(1e-5, seeded=True)
