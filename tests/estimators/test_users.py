"""Estimators and searches that protect users."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn
from scipy.sparse import csr_array
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score

import privagrad as pg
from privagrad.data.schema import Column, Schema
from privagrad.estimators import search
from privagrad.estimators._tables import Given
from privagrad.glm.rows import as_rows
from privagrad.methods.loop import train
from privagrad.methods.users import UserGradients
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import random_source
from privagrad.privacy.users import Users

RNG = np.random.default_rng(0)
USERS = 400
OWNERS = np.repeat(np.arange(USERS), RNG.integers(1, 7, USERS))
X = RNG.standard_normal((USERS, 3))[OWNERS] + 0.3 * RNG.standard_normal((OWNERS.size, 3))
NUMBERS = X @ np.array([1.0, -1.0, 0.5]) + 0.5 * RNG.standard_normal(OWNERS.size)
SIGNS = (NUMBERS > 0).astype(int)
CLASSES = np.digitize(NUMBERS, [-1, 1])
FITS: list[tuple[Any, Any]] = [
    (pg.PrivateLogisticRegression(class_weight="balanced"), SIGNS),
    (pg.PrivateLogisticRegression(evaluate=True), CLASSES),
    (pg.PrivateLinearSVC(), SIGNS),
    (pg.PrivateHuberRegressor(evaluate=True), NUMBERS),
    (pg.PrivateQuantileRegressor(), NUMBERS),
    (pg.PrivateRidge(), NUMBERS),
    (pg.PrivateRidge(solver="gradients"), NUMBERS),
]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize(("estimator", "y"), FITS, ids=lambda one: type(one).__name__)
def test_where_every_user_has_one_row_nothing_changes(estimator: Any, y: Any) -> None:
    first = np.unique(OWNERS, return_index=True)[1]
    labels = [f"user {k}" for k in RNG.permutation(USERS)]
    for table in (X[first], csr_array(X[first])):
        rows = sklearn.clone(estimator).set_params(random_state=1).fit(table, y[first])
        users = sklearn.clone(rows).fit(table, y[first], groups=labels)
        for name in ("coef_", "intercept_", "coef_noise_", "intercept_noise_"):
            assert np.array_equal(getattr(rows, name), getattr(users, name))
        assert (rows.privacy_.unit, users.privacy_.unit) == ("row", "user")
        assert users.model_.made["rows"] == USERS
        assert rows.evaluation_ == users.evaluation_


@pytest.mark.parametrize(("estimator", "y"), FITS, ids=lambda one: type(one).__name__)
def test_a_fit_tells_users_and_nothing_of_the_number_of_rows(
    estimator: Any, y: Any, tmp_path: Path
) -> None:
    fitted = sklearn.clone(estimator).set_params(epsilon=8.0).fit(X, y, groups=OWNERS)
    fitted.save(tmp_path / "a.model")
    fitted.report(tmp_path / "a.html")
    loaded = pg.load_model(tmp_path / "a.model")
    assert loaded.privacy_.unit == fitted.privacy_.unit == "user"
    model = loaded.model_
    assert model.privacy["unit"] == model.privacy_unit == "user"
    assert model.made["rows"] == USERS
    assert f"the number of users: {USERS}" in model.privacy["public"]
    told = repr(model.made) + repr(model.privacy) + repr(model.evaluation)
    page = (tmp_path / "a.html").read_text()
    assert f"{USERS} users" in page
    assert "One user contributes its values, or nothing; the number of users is public." in page
    assert "one given row" not in page
    for text in (told, page.replace(",", ""), repr(loaded), model._repr_html_()):
        assert f"{OWNERS.size} " not in text
        assert f": {OWNERS.size}" not in text


def test_without_privacy_ridge_is_least_squares_over_users() -> None:
    found = pg.PrivateRidge(epsilon=float("inf")).fit(X, NUMBERS, groups=OWNERS)
    weights = np.sqrt(1 / np.bincount(OWNERS)[OWNERS])
    table = np.column_stack([X, np.ones(OWNERS.size)])
    wanted = np.linalg.lstsq(weights[:, None] * table, weights * NUMBERS, rcond=None)[0]
    np.testing.assert_allclose(np.append(found.coef_, found.intercept_), wanted, rtol=1e-9)
    assert found.model_.privacy["unit"] == "user"


def test_training_sees_all_rows_and_queries_one_of_each_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained: list[Any] = []

    def watched(method: Any, gradients: Any, *others: Any, **more: Any) -> Any:
        trained.append(gradients)
        return train(method, gradients, *others, **more)

    monkeypatch.setattr("privagrad.linear.fit.train", watched)
    pg.PrivateLogisticRegression(random_state=0).fit(X, SIGNS, groups=OWNERS)
    [gradients] = trained
    assert isinstance(gradients, UserGradients)
    assert gradients.users.rows.size == OWNERS.size
    assert OWNERS[gradients.users.chosen].tolist() == list(range(USERS))


@pytest.mark.parametrize("y", [SIGNS, CLASSES], ids=["two classes", "three classes"])
def test_every_query_counts_users(y: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units, norms, calibration and evaluation are means over users: of one row of each."""
    sizes: set[float] = set()
    release = GaussianSum.release

    def watched(self: GaussianSum, *arguments: Any) -> Any:
        sizes.add(self.batch_size)
        return release(self, *arguments)

    monkeypatch.setattr(GaussianSum, "release", watched)
    model = pg.PrivateLogisticRegression(8.0, evaluate=True, class_weight="balanced", batch_size=50)
    model.fit(X, y, groups=OWNERS)
    assert sizes == {50, USERS}


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        (OWNERS[1:], "another number of labels"),
        (np.where(OWNERS == 3, np.nan, OWNERS.astype(float)), "rows without one"),
        (np.zeros(OWNERS.size), "at least two different users"),
        (np.arange(OWNERS.size) % 9, "at least 10 users"),
    ],
)
def test_groups_that_name_no_users_are_refused(groups: Any, match: str) -> None:
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    target = Column("y", "category", categories=("0", "1"))
    schema = Schema((*(Column(name) for name in "abc"), target), "y")
    estimator = pg.PrivateLogisticRegression(schema=schema)
    with pytest.raises(ValueError, match=match) as caught:
        estimator.fit(frame, SIGNS, groups=groups)
    assert str(OWNERS.size) not in str(caught.value)
    with pytest.raises(ValueError, match="another number of them") as caught:
        estimator.fit(frame, SIGNS[1:], groups=OWNERS)
    assert str(OWNERS.size) not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "targets"),
    [
        (X, np.stack([SIGNS, SIGNS], axis=1)),
        (X[:, :0], SIGNS),
        (X[:, 0], SIGNS),
        (X[:, :, None], SIGNS),
    ],
)
def test_wrong_shapes_are_refused_without_telling_the_number_of_rows(
    rows: Any, targets: Any
) -> None:
    search = pg.PrivateSearch(pg.PrivateLogisticRegression(), {"step_size": [0.3, 1.0]})
    doors: list[Any] = [
        pg.PrivateLogisticRegression().fit,
        search.fit,
        partial(pg.minimize, "logistic", epsilon=1.0),
    ]
    for door in doors:
        with pytest.raises(ValueError, match="Expected") as caught:
            door(rows, targets, groups=OWNERS)
        assert str(OWNERS.size) not in str(caught.value)


def test_a_schema_with_users_keeps_the_number_of_rows_to_itself_too() -> None:
    columns = (Column("who", "user"), *(Column(name) for name in "abc"))
    schema = Schema((*columns, Column("y", "category", categories=("0", "1"))), "y")
    frame = pd.DataFrame(X, columns=["a", "b", "c"]).assign(who=OWNERS)
    with pytest.raises(ValueError, match="one target for each row") as caught:
        pg.PrivateLogisticRegression(schema=schema).fit(frame, np.stack([SIGNS, SIGNS], axis=1))
    assert str(OWNERS.size) not in str(caught.value)


def test_groups_of_another_order_than_the_rows_are_refused_by_every_door() -> None:
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    moved = pd.Series(OWNERS).sample(frac=1.0, random_state=0)
    search = pg.PrivateSearch(pg.PrivateLogisticRegression(), {"step_size": [0.3, 1.0]})
    for door in (pg.PrivateLogisticRegression(), search):
        with pytest.raises(ValueError, match="matched by place"):
            door.fit(frame, SIGNS, groups=moved)
    with pytest.raises(ValueError, match="matched by place"):
        pg.minimize("logistic", frame, SIGNS, epsilon=1.0, groups=moved)


def test_a_schema_may_name_the_column_of_users_which_predictions_do_not_need() -> None:
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    frame["who"] = [f"u{k}" for k in OWNERS]
    columns = (*(Column(name) for name in "abc"), Column("who", "user"))
    schema = Schema((*columns, Column("y")), "y")
    by_schema = pg.PrivateHuberRegressor(schema=schema, random_state=4).fit(frame, NUMBERS)
    plain = Schema((*columns[:3], Column("y")), "y")
    by_groups = pg.PrivateHuberRegressor(schema=plain, random_state=4)
    by_groups.fit(frame, NUMBERS, groups=frame["who"])
    assert np.array_equal(by_schema.coef_, by_groups.coef_)
    assert by_schema.privacy_.unit == "user"
    assert by_schema.feature_names_in_.tolist() == by_groups.feature_names_in_.tolist()
    assert "who" not in " ".join(by_schema.model_.features)
    assert np.array_equal(
        by_schema.predict(frame[["a", "b", "c"]]), by_groups.predict(frame[["a", "b", "c"]])
    )
    by_schema.evaluate_on(frame[["a", "b", "c"]], NUMBERS)
    with pytest.raises(ValueError, match="found both"):
        pg.PrivateHuberRegressor(schema=schema).fit(frame, NUMBERS, groups=OWNERS)


def test_a_search_holds_out_whole_users() -> None:
    given = Given(as_rows(X), SIGNS, np.array([0, 1]), "y", Users.of(OWNERS, OWNERS.size))
    kept: list[int] = []
    for seed in range(20):
        train, test = search._split(given, random_source(seed))
        sizes = [part.users.count for part in (train, test) if part.users is not None]
        assert sum(sizes) == USERS
        assert train.y.size + test.y.size == OWNERS.size
        rows = {tuple(row) for row in np.asarray(train.rows.matrix).tolist()}
        fitted = np.array([tuple(row) in rows for row in X.tolist()])
        for of_user in np.split(fitted, np.flatnonzero(np.diff(OWNERS)) + 1):
            assert of_user.all() or not of_user.any()
        kept.append(sizes[0])
    assert 0.75 * USERS < np.mean(kept) < 0.85 * USERS


def test_a_score_is_the_mean_over_users() -> None:
    class Scorer:
        def _row_scores(self, given: Any) -> Any:
            return np.array([1.0, 0.0, 0.5, 3.0, -2.0])

    users = Users.of([7, 7, 8, 9, 9], 5)
    given = Given(as_rows(X[:5]), SIGNS[:5], np.array([0, 1]), "y", users)
    scorer: Any = Scorer()
    assert search._scores(scorer, given).tolist() == [0.5, 0.5, 0.5]


def test_scikit_learn_passes_groups_to_fits_only_where_they_are_requested() -> None:
    units: list[str] = []

    class Watched(pg.PrivateLogisticRegression):
        def fit(self, X: Any, y: Any, *, groups: Any = None, **refused: Any) -> Any:
            fitted = super().fit(X, y, groups=groups, **refused)
            units.append(self.privacy_.unit)
            return fitted

    estimator = Watched(random_state=0)
    cross_val_score(estimator, X, SIGNS, groups=OWNERS, cv=GroupKFold(2))
    assert units == ["row", "row"]
    with sklearn.config_context(enable_metadata_routing=True):
        estimator.set_fit_request(groups=True)
        units.clear()
        cross_val_score(estimator, X, SIGNS, params={"groups": OWNERS}, cv=GroupKFold(2))
        assert units == ["user", "user"]
        units.clear()
        grid = GridSearchCV(estimator, {"radius": [0.3]}, cv=GroupKFold(2))
        grid.fit(X, SIGNS, groups=OWNERS)
        assert units == ["user"] * 3
