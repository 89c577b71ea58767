"""Plans of single releases, for tests of what makes them."""

from collections.abc import Iterable, Mapping

from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.noise import RandomSource, RandomState, random_source
from privagrad.privacy.releases import Releases
from privagrad.queries.columns import Share, query_events


def releases_at(
    noises: Mapping[str, float], source: RandomSource | RandomState = 0, leak: float = 0.0
) -> Releases:
    """One release for each purpose, with these noise multipliers."""
    events = tuple(GaussianEvent(z, purpose=name, leak=leak) for name, z in noises.items())
    return Releases(PrivacyPlan(events), _source(source))


def releases_of(
    shares: Iterable[Share], epsilon: float, delta: float, source: RandomSource | RandomState = 0
) -> Releases:
    """The releases that these shares of a budget allow."""
    events = query_events(shares, epsilon, delta, "zero-out")
    return Releases(PrivacyPlan(tuple(events)), _source(source))


def _source(given: RandomSource | RandomState) -> RandomSource:
    return given if isinstance(given, RandomSource) else random_source(given)
