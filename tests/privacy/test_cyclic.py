"""Cyclic Poisson samples of correlated noise: how they are drawn, and what they cost."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from privagrad.privacy import codec
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.correlation import coefficients_of
from privagrad.privacy.events import (
    GaussianEvent,
    SelectEvent,
    merged,
    relation_of,
    releases_per_draw,
    single,
    training_event,
)
from privagrad.privacy.filters import epsilon_of_runs
from privagrad.privacy.ledger import Ledger
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import random_source
from privagrad.privacy.report_codec import report_as_json, report_from_json
from privagrad.privacy.sampling import Batches, Samples, samples_of
from tests.statistics import FALSE_ALARM, rate_accepted


def cyclic(n: int, size: int, steps: int, bands: int) -> Batches:
    return Batches(n, size, steps, "cyclic_poisson", bands)


def event(z: float, count: int, n: int, size: int, bands: int) -> GaussianEvent:
    return GaussianEvent(z, count, "cyclic_poisson", n, size, "gradients", bands=bands)


@pytest.mark.parametrize(("n", "size", "bands"), [(60, 5, 4), (61, 7, 3), (40, 10, 4), (9, 1, 8)])
def test_a_row_is_drawn_in_its_turn_at_the_rate_that_is_charged(
    n: int, size: int, bands: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row at bands · size/n in every step of its group, independently, and in no other."""
    monkeypatch.setattr("privagrad.privacy.sampling._BLOCK", 13)
    monkeypatch.setattr("privagrad.privacy.sampling._CHUNK", 100)
    steps = 3000 * bands
    batches = cyclic(n, size, steps, bands)
    rate = event(1.0, bands, n, size, bands).rate
    assert rate == batches.rate == bands * size / n
    member = np.zeros((steps, n), dtype=bool)
    for step, rows in enumerate(batches.draw(random_source(0).sampler)):
        assert rows.size == np.unique(rows).size
        assert (rows % bands == step % bands).all()
        member[step, rows] = True
    for row in {0, 1, n // 2, n - 1}:
        own = member[row % bands :: bands, row]
        assert rate_accepted(int(own.sum()), own.size, rate)
        assert rate_accepted(int((own[1:] & own[:-1]).sum()), own.size - 1, rate**2)
        if rate < 0.6:
            assert not rate_accepted(int(own.sum()), own.size, size / n)
        if row + bands < n:
            both = int((own & member[row % bands :: bands, row + bands]).sum())
            assert rate_accepted(both, own.size, rate**2)
    turns = member.reshape(-1, bands, n).sum(axis=1)
    assert turns.max() == 1
    if rate < 1:
        counts = turns.sum(axis=0)
        spread = np.square(counts - counts.mean()).sum() / (3000 * rate * (1 - rate))
        assert stats.chi2(n - 1).sf(spread) > FALSE_ALARM
        assert stats.chi2(n - 1).cdf(spread) > FALSE_ALARM


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_part_of_the_rows_can_draw_its_own(data: Any) -> None:
    n = data.draw(st.integers(2, 400))
    bands = data.draw(st.integers(2, min(n, 9)))
    size, steps = data.draw(st.integers(1, n // bands)), data.draw(st.integers(1, 30))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, n), max_size=4))), n]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privagrad.privacy.sampling._BLOCK", data.draw(st.integers(2, 500)))
        patch.setattr("privagrad.privacy.sampling._CHUNK", data.draw(st.integers(1, 900)))
        samples_of.cache_clear()
        samples = cyclic(n, size, steps, bands).draw(random_source(1).sampler)
        elsewhere = pickle.loads(pickle.dumps(samples))
        step = data.draw(st.integers(0, steps - 1))
        parts = [elsewhere.of_step(step, low, high) for low, high in pairwise(cuts)]
        for part, (low, high) in zip(parts, pairwise(cuts), strict=True):
            assert ((part >= low) & (part < high)).all()
        drawn = list(samples)
        assert np.array_equal(np.sort(np.concatenate(parts)), np.sort(drawn[step]))
        assert len({id(rows) for rows in drawn}) == steps
    samples_of.cache_clear()


def test_a_hundred_billion_rows_take_no_longer() -> None:
    for step, rows in enumerate(cyclic(10**11, 20, 30, 4).draw(random_source(0).sampler)):
        assert rows.size < 80
        assert (rows % 4 == step % 4).all()


@pytest.mark.parametrize(
    ("n", "size", "bands", "sampling"),
    [(10, 3, 4, "cyclic_poisson"), (10, 3, 1, "cyclic_poisson"), (10, 3, 2, "poisson")],
)
def test_more_than_every_row_of_a_group_is_refused(
    n: int, size: int, bands: int, sampling: Any
) -> None:
    with pytest.raises(ValueError, match="bands"):
        Batches(n, size, 5, sampling, bands)
    with pytest.raises(ValueError, match="bands"):
        GaussianEvent(1.0, 4 * bands, sampling, n, size, bands=bands)


@pytest.mark.parametrize(("count", "bands"), [(8, 2), (200, 4), (30, 10)])
@pytest.mark.parametrize("delta", [1e-5, 1e-8])
def test_blocks_cost_what_poisson_samples_at_their_rate_cost(
    count: int, bands: int, delta: float
) -> None:
    n, size, z = 4000, 50, 0.9
    found = PrivacyPlan((event(z, count, n, size, bands),)).epsilon(delta)
    alone = GaussianEvent(z, count // bands, "poisson", n, bands * size)
    assert found == pytest.approx(PrivacyPlan((alone,)).epsilon(delta), rel=1e-9)
    cheap = replace(alone, batch_size=size)
    assert found > 1.2 * PrivacyPlan((cheap,)).epsilon(delta)


def test_at_rate_one_a_block_is_a_release_over_all_rows() -> None:
    every = event(3.0, 40, 400, 100, 4)
    assert every.rate == 1
    assert PrivacyPlan((every,)).epsilon(1e-6) == PrivacyPlan((GaussianEvent(3.0, 10),)).epsilon(
        1e-6
    )


def test_a_block_that_is_begun_is_charged() -> None:
    for steps, charged in ((1, 4), (4, 4), (5, 8), (1000, 1000), (1001, 1004)):
        found = training_event(cyclic(5000, 70, steps, 4))
        assert (found.count, found.bands) == (charged, 4)
    with pytest.raises(ValueError, match="whole blocks"):
        event(1.0, 6, 5000, 70, 4)
    with pytest.raises(ValueError, match="leak"):
        replace(event(1.0, 8, 5000, 70, 4), leak=1e-9)


def test_merged_blocks_cost_what_separate_ones_cost() -> None:
    one = event(1.5, 4, 200, 10, 4)
    assert releases_per_draw(one) == 4
    assert single(replace(one, count=12)) == one
    (three,) = merged([one, replace(one, count=8)])
    assert three == replace(one, count=12)
    apart = PrivacyPlan((one, replace(one, count=8, purpose="more"))).epsilon(1e-6)
    assert PrivacyPlan((three,)).epsilon(1e-6) == pytest.approx(apart, rel=1e-9)
    assert relation_of("cyclic_poisson") == "zero-out"
    with pytest.raises(ValueError, match="Expected under='zero-out'"):
        replace(one, under="replace-one")


def test_calibration_meets_the_budget_from_below() -> None:
    asked = training_event(cyclic(10_000, 100, 1001, 8))
    for budget in (0.3, 4.0):
        plan = PrivacyPlan.calibrate_event(asked, budget, 1e-6, [GaussianEvent(60.0)])
        assert 0.9995 * budget <= plan.epsilon(1e-6) <= budget
        assert plan["gradients"].count == 1008


def test_it_is_written_and_read_again_and_older_programs_refuse_it() -> None:
    own = event(2.0, 40, 1000, 50, 4)
    text = codec.dumps([own])
    assert codec.loads(text) == (own,)
    assert json.loads(text)["version"] == codec.VERSION > codec.VERSION_OF_USERS
    assert "bands" not in codec.dumps([GaussianEvent(2.0, 40, "poisson", 1000, 50)])
    report = PrivacyPlan((own,)).report(1e-6, seeded=False)
    assert report.sampling == "cyclic_poisson"
    assert report_from_json(json.loads(json.dumps(report_as_json(report)))) == report
    assert "correlated over 4" in str(report)


def test_what_is_not_known_is_refused() -> None:
    own = event(2.0, 40, 1000, 50, 4)
    with pytest.raises(ValueError, match="beside a selection"):
        PrivacyPlan((SelectEvent((own,), 5.0),)).epsilon(1e-6)


def test_budgets_charge_it(tmp_path: Path) -> None:
    events = (event(2.0, 40, 1000, 50, 4),)
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("rows", 3.0, 1e-6)
    run = ledger.reserve("rows", events, "")
    ledger.finish(run, events)
    alone = PrivacyPlan(events).epsilon(1e-6)
    assert ledger.account("rows").spent == pytest.approx(alone)
    together = PrivacyPlan((replace(events[0], count=80),)).epsilon(1e-6)
    assert together < epsilon_of_runs([events], 3.0, 1e-6, events) < 2 * alone


@pytest.mark.parametrize("step", [0, 3])
def test_the_block_of_a_row_is_the_pair_that_is_charged(step: int) -> None:
    """Simulated: rows of 1 in their group's steps; the block's sufficient statistic over z.

    Under the claim it is (1 - r) N(0, 1) + r N(1/z, 1) in every block, independently.
    """
    bands, n, size, z = 3, 12, 2, 0.6
    c, steps = coefficients_of(bands), 12_000
    rate = event(z, bands, n, size, bands).rate
    mechanism, source = GaussianSum(1, z, size, coefficients=c), random_source(1)
    history, found = mechanism.begin_history("gaussian"), []
    for rows in Samples(cyclic(n, size, steps, bands), 5):
        total = mechanism.sum()
        total.add(np.ones((int((rows == step).sum()), 1)))
        found.append(float(mechanism.release(total, source, None, history)[0]) * size)
    white = np.convolve(found, c)[:steps]
    blocks = white[step : step + (steps - step) // bands * bands].reshape(-1, bands)
    seen = blocks @ np.array(c) / math.hypot(*c) ** 2 / z

    def law(x: Any, chance: float = rate, noise: float = 1.0) -> Any:
        return (1 - chance) * stats.norm.cdf(x, scale=noise) + chance * stats.norm.cdf(
            x, loc=1 / z, scale=noise
        )

    assert stats.kstest(seen, law).pvalue > FALSE_ALARM
    assert stats.kstest(seen, lambda x: law(x, size / n)).pvalue < FALSE_ALARM
    assert stats.kstest(seen, lambda x: law(x, rate, 2 / 3)).pvalue < FALSE_ALARM
    assert abs(np.corrcoef(seen[1:], seen[:-1])[0, 1]) < 5.4 / math.sqrt(seen.size)
