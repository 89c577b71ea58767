"""Users: who they are, which of their rows count, and what their averages add to a sum."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest

import privagrad as pg
from privagrad.privacy import codec
from privagrad.privacy.events import SelectEvent, unit_of
from privagrad.privacy.ledger import Account, BudgetError, Ledger, require_unit
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import random_source
from privagrad.privacy.users import MOST_ROWS, Users, require_same_order

USER = pg.GaussianEvent(10.0, unit="user")
ROW = pg.GaussianEvent(10.0)


def test_users_are_numbered_by_their_first_rows_whatever_they_are_called() -> None:
    labels: list[Any] = [("b", 2), b"x", 3.0, ("b", 2), 3, None.__class__]
    users = Users.of(labels, 6)
    assert users.numbers.tolist() == [0, 1, 2, 0, 2, 3]
    assert users.count == 4
    for given in (np.array([7, 5, 7]), np.array(["q", "p", "q"]), ["q", "p", "q"]):
        assert Users.of(given, 3).numbers.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("labels", "error", "match"),
    [
        ([1, 2, 3], ValueError, "another number of labels than of rows"),
        ([1, 2, 3, math.nan], ValueError, "rows without one"),
        ([1, 2, 3, None], ValueError, "rows without one"),
        ([1.0, 2.0, math.nan, math.nan], ValueError, "rows without one"),
        ([5, 5, 5, 5], ValueError, "at least two different users"),
        ([[1], [2], [3], [4]], TypeError, "not hashable"),
        (np.zeros((4, 2)), ValueError, "one column of users"),
        # NaN is no part of a name: each would be another one, and each row another user's.
        ([("a", float("nan")), ("a", float("nan")), "b", "b"], ValueError, "rows without one"),
        ([("a", None), ("a", None), ("b", 1), ("b", 1)], ValueError, "rows without one"),
        (pd.MultiIndex.from_arrays([[1, 1, 2, 2], [np.nan] * 4]), ValueError, "rows without one"),
        (["a", "a", "", " "], ValueError, "rows without one"),
        (["1", 1, "2", 2], TypeError, "all texts, or none"),
        (pd.Series([1, "1", 2, "2"]), TypeError, "all texts, or none"),
        ("user", TypeError, "found a str"),
        ({"a": [0], "b": [1], "c": [2], "d": [3]}, TypeError, "found a dict"),
        ({"a", "b", "c", "d"}, TypeError, "found a set"),
        (pd.DataFrame(np.eye(4), columns=list("abcd")), TypeError, "found a DataFrame"),
    ],
)
def test_labels_that_name_no_users_are_refused_without_telling_numbers(
    labels: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match) as caught:
        Users.of(labels, 4)
    assert not any(digit in str(caught.value) for digit in "0123456789")


def test_of_each_user_one_uniformly_random_row_stands_for_all() -> None:
    users = Users.of(np.repeat([0, 1, 2], [1, 3, 4]), 8)
    generator = np.random.default_rng(0)
    chosen = np.array([users.draw(generator).chosen for _ in range(4000)])
    assert (chosen[:, 0] == 0).all()
    for column, (first, last) in ((1, (1, 4)), (2, (4, 8))):
        counts = np.bincount(chosen[:, column], minlength=8)[first:last]
        assert counts.sum() == 4000
        # False alarm below 1e-5 in each cell: 4.5 standard deviations.
        expected, share = 4000 / counts.size, 1 / counts.size
        assert np.abs(counts - expected).max() < 4.5 * math.sqrt(4000 * share * (1 - share))


def test_rows_beyond_the_cap_are_left_out_at_random() -> None:
    users = Users.of(np.repeat([0, 1], [2, 5]), 7)
    seen = np.zeros(7)
    for seed in range(2000):
        rows = users.draw(np.random.default_rng(seed), 3)
        assert rows.counts.tolist() == [2, 3]
        assert rows.chosen[1] in rows.rows[2:]
        seen[rows.rows] += 1
    assert (seen[:2] == 2000).all()
    # False alarm below 1e-5: 4.5 standard deviations.
    assert np.abs(seen[2:] - 1200).max() < 4.5 * math.sqrt(2000 * 0.6 * 0.4)
    everyone = Users.of(np.repeat([0, 1], [1, 5000]), 5001).draw(np.random.default_rng(0))
    assert everyone.counts.tolist() == [1, MOST_ROWS]


def test_choices_leave_the_draws_of_batches_as_they_are() -> None:
    source, other = random_source(3), random_source(3)
    source.another_generator().random(5)
    assert np.array_equal(source.sampler.random(9), other.sampler.random(9))
    generators = [random_source(None).another_generator() for _ in range(2)]
    assert generators[0].random() != generators[1].random()


@pytest.mark.parametrize("count", [2, 3, 7, 1000, 1024])
@pytest.mark.parametrize("z", [0.01, 1.0, 300.0])
@pytest.mark.parametrize("dim", [1, 30])
def test_rows_of_a_user_that_all_pull_one_way_move_a_sum_by_one_and_no_more(
    count: int, z: float, dim: int
) -> None:
    """The worst case: equal rows, of the largest norm and many parts of units to round up."""
    mechanism = GaussianSum(dim, z, 50.0)
    rng = np.random.default_rng(count)
    for _ in range(20):
        row = rng.standard_normal(dim)
        row *= 1e200 / np.linalg.norm(row)
        moved = []
        others = rng.standard_normal((6, dim)) * 3
        for mine in (np.tile(row, (count, 1)), np.empty((0, dim))):
            total = mechanism.sum()
            averages = total.averages()
            averages.of(count).add(mine)
            averages.of(3).add(others)
            averages.of(1).add(others)
            averages.add()
            assert np.array_equal(total.memory, np.rint(total.memory))
            moved.append(total.memory.copy())
        squares = sum(int(v) ** 2 for v in (moved[0] - moved[1]).tolist())
        assert squares <= (Fraction(mechanism.sensitivity) / Fraction(mechanism.grid)) ** 2
        assert math.sqrt(squares) * mechanism.grid > 0.99 - math.sqrt(dim) * mechanism.grid


def test_where_units_are_not_cut_finer_rows_are_made_shorter_for_their_rounding() -> None:
    """260 rows of 3.94 units, which would round to 4 each."""
    mechanism = GaussianSum(1, 1000.0, 2.0**40)
    assert mechanism.fineness == 1
    assert 1 / (260 * mechanism.grid) % 1 > 0.9
    total = mechanism.sum()
    averages = total.averages()
    averages.of(260).add(np.ones((260, 1)))
    averages.add()
    assert 0.5 < total.memory[0] * mechanism.grid <= mechanism.sensitivity


def test_a_part_of_a_sum_is_not_released() -> None:
    mechanism = GaussianSum(3, 1.0, 10.0)
    part = mechanism.sum().averages().of(2)
    with pytest.raises(TypeError, match="a part of it"):
        mechanism.release(part, random_source(0))


def test_averages_that_noise_would_need_more_digits_for_are_refused() -> None:
    with pytest.raises(ValueError, match="users with several rows"):
        GaussianSum(1, 1e5, 1e14).sum().averages().of(1024).add(np.zeros((1, 1)))


def test_releases_of_rows_and_of_users_do_not_make_one_plan() -> None:
    assert pg.PrivacyPlan((USER,)).unit == "user"
    assert pg.PrivacyPlan((ROW,)).unit == pg.PrivacyPlan(()).unit == "row"
    with pytest.raises(ValueError, match="found both"):
        pg.PrivacyPlan((USER, ROW))
    with pytest.raises(ValueError, match="found both"):
        SelectEvent((USER, ROW), 3.0)
    assert unit_of([SelectEvent((USER,), 3.0)]) == "user"
    with pytest.raises(ValueError, match="unit"):
        pg.GaussianEvent(1.0, unit="house")  # type: ignore[arg-type]
    report = pg.PrivacyPlan((USER,)).report(1e-5, seeded=False)
    assert report.unit == "user"
    assert "unit: user" in str(report)
    assert "unit" not in str(pg.PrivacyPlan((ROW,)).report(1e-5, seeded=False))


def test_events_of_users_are_written_with_their_unit_and_older_ones_are_of_rows() -> None:
    select = SelectEvent((USER,), 3.0)
    assert codec.loads(codec.dumps([USER, select])) == (USER, select)
    assert f'"version": {codec.VERSION_OF_USERS}' in codec.dumps([USER])
    for text in (codec.dumps([ROW]), codec.dumps([SelectEvent((ROW,), 3.0)])):
        assert f'"version": {codec.VERSION_OF_ROWS}' in text
        assert "unit" not in text
        assert unit_of(codec.loads(text)) == "row"


def test_a_budget_pays_for_rows_or_for_users(tmp_path: Any) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    for name, first, other in (("users", USER, ROW), ("rows", ROW, USER)):
        ledger.create(name, 3.0, 1e-5)
        run = ledger.reserve(name, [first], "the first run")
        with pytest.raises(ValueError, match="do not add up"):
            ledger.reserve(name, [other], "of the other unit")
        ledger.finish(run, [first])
        with pytest.raises(ValueError, match="do not add up"):
            ledger.reserve(name, [other], "of the other unit")
        assert len(ledger.account(name).runs) == 1
        ledger.finish(ledger.reserve(name, [first], "again"), [first])
        assert 0 < ledger.account(name).spent < 3.0
        assert ledger.account(name).unit == first.unit
    with pytest.raises(ValueError, match="name users"):
        require_unit(ledger.account("users"), "row")
    # A run that was given back is no charge.
    ledger.create("free", 3.0, 1e-5)
    ledger.release(ledger.reserve("free", [ROW], "never began"), "the machine was off")
    ledger.reserve("free", [USER], "the first that counts")
    assert Account("a", 1.0, 1e-5, None, ()).unit is None


def test_a_run_does_not_finish_with_releases_of_rows_that_it_reserved_for_users(
    tmp_path: Any,
) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("users", 3.0, 1e-5)
    run = ledger.reserve("users", [USER], "a run")
    with pytest.raises(RuntimeError, match="beyond it"):
        ledger.finish(run, [ROW])


@pytest.mark.parametrize(("before", "after"), [(ROW, USER), (USER, ROW)])
def test_a_budget_of_both_units_pays_for_nothing(before: Any, after: Any, tmp_path: Any) -> None:
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("both", 3.0, 1e-5)
    alive = ledger.reserve("both", [before], "seems dead")
    ledger.release(alive, "no answer")
    ledger.finish(ledger.reserve("both", [after], "of the other unit"), [after])
    assert ledger.account("both").spent < 3.0
    with pytest.raises(BudgetError, match="given back"):
        ledger.finish(alive, [before])
    account = ledger.account("both")
    assert account.spent == math.inf
    assert account.units == {"row", "user"}
    assert account.unit is None
    assert "inf of epsilon 3 spent" in account._repr_html_()
    for event in (ROW, USER):
        with pytest.raises(ValueError, match="found runs that protect rows and runs that protect"):
            ledger.reserve("both", [event], "one more")


def test_labels_with_another_index_than_the_rows_are_refused() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0]}, index=[5, 6, 7])
    owners = pd.Series(["x", "y", "x"], index=frame.index)
    moved = owners.loc[[7, 5, 6]]
    target = pd.Series([0, 1, 0], index=frame.index)
    for tables in ((frame,), (frame.to_numpy(), target), ([[1.0]], target)):
        require_same_order(owners, *tables)
        require_same_order(moved.to_numpy(), *tables)
        require_same_order(moved.tolist(), *tables)
        with pytest.raises(ValueError, match="found another one"):
            require_same_order(moved, *tables)
    require_same_order(moved, frame.to_numpy(), [0, 1, 0])
