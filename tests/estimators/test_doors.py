"""Estimators and the command are one: the same model from the same rows, budgets and files."""

import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.ensemble import BaggingClassifier
from sklearn.model_selection import GridSearchCV, cross_val_score

import privagrad as pg
from privagrad.data.models import load_model as load_saved
from privagrad.data.schema import Column, Schema, template
from privagrad.fitting import EvaluationRequest, FitRequest, prepare, prepare_evaluation, run
from privagrad.linear import Choices
from privagrad.privacy.ledger import BudgetError, Ledger
from privagrad.privacy.mechanism import GaussianSum
from privagrad.report.statement import Statement

COLUMNS = (
    Column("age", low=0.0, high=120.0),
    Column("pay"),
    Column("city", "category"),
    Column("member", "category", categories=("false", "true")),
    Column("since", "date", parts=("days", "weekday")),
    Column("note", "ignore"),
)
LABEL = Column("label", "category", categories=("yes", "no"))
SCHEMA = Schema((*COLUMNS, LABEL), "label")
CLASSIFIERS: list[Any] = [pg.PrivateLogisticRegression, pg.PrivateLinearSVC]
REGRESSORS: list[Any] = [
    pg.PrivateQuantileRegressor,
    pg.PrivateHuberRegressor,
    pg.PrivateRidge,
]
FEW = "ignore:.*rows are few"
pytestmark = pytest.mark.filterwarnings(FEW)


def people(n: int = 4000, seed: int = 0) -> pl.DataFrame:
    """A table with text, blanks, dates and booleans, and a label that depends on them."""
    rng = np.random.default_rng(seed)
    age = rng.normal(45, 12, n).round(1)
    city = rng.choice(["Bonn", "Ulm", "Köln"], n)
    days = rng.integers(0, 4000, n)
    yes = (age - 45) / 6 + 2.0 * (city == "Ulm") + rng.logistic(size=n) > 0
    frame = pl.DataFrame(
        {
            "age": age,
            "pay": (rng.lognormal(10, 0.5, n) + 3000 * yes).round(2),
            "city": city,
            "member": rng.random(n) < 0.3,
            "since": pl.Series(days).cast(pl.Int32).cast(pl.Date),
            "note": [f"row {k}" for k in range(n)],
            "label": np.where(yes, "yes", "no"),
        }
    )
    blank = pl.Series(rng.random(n) < 0.1)
    return frame.with_columns(pl.when(blank).then(None).otherwise(pl.col("age")).alias("age"))


def as_pandas(frame: pl.DataFrame) -> pd.DataFrame:
    return pd.DataFrame({name: frame[name].to_list() for name in frame.columns}).astype(
        {"since": "datetime64[ns]"}
    )


def as_arrow(frame: pl.DataFrame) -> Any:
    return frame.to_arrow()


FRAMES: dict[str, Any] = {"polars": lambda f: f, "pandas": as_pandas, "arrow": as_arrow}


def from_file(folder: Path, schema: Schema, **asked: Any) -> Any:
    people().write_csv(folder / "people.csv")
    request = FitRequest(folder / "people.csv", None, 2.0, schema=schema, seed=7,
                         choices=Choices(steps=20), **asked)  # fmt: skip
    return run(prepare(request), folder / "file.model", False)


@pytest.mark.parametrize("kind", FRAMES)
def test_both_doors_give_the_same_model(kind, tmp_path):
    """Open categories, blanks, dates, an evaluation: the same bits through a file and a frame."""
    file = from_file(tmp_path, SCHEMA)
    frame = people()
    X = FRAMES[kind](frame.drop("label"))
    model = pg.PrivateLogisticRegression(
        2.0, schema=SCHEMA, evaluate=True, steps=20, random_state=7
    ).fit(X, frame["label"].to_list())
    saved = model.model_
    assert saved.features == file.features
    assert "city=Ulm" in saved.features
    assert "age is missing" in saved.features
    for name in ("coef", "intercept", "coef_noise", "intercept_noise", "centre", "unit", "scale"):
        assert np.array_equal(getattr(saved, name), getattr(file, name)), name
    assert saved.privacy == file.privacy
    assert saved.evaluation == file.evaluation
    assert (saved.classes, saved.schema) == (file.classes, file.schema)
    # The schema states "yes" first; scikit-learn's metrics need labels in order.
    assert model.classes_.tolist() == ["no", "yes"]
    assert np.array_equal(model.coef_, -file.coef)
    assert model.score(X, frame["label"].to_list()) > 0.75
    assert model.evaluation_ is not None
    assert model.evaluation_.private


@pytest.mark.parametrize(
    ("loss", "cls"),
    [("huber", pg.PrivateHuberRegressor), ("squared", pg.PrivateRidge),
     ("quantile", pg.PrivateQuantileRegressor)],
)  # fmt: skip
def test_both_doors_give_the_same_regression(loss, cls, tmp_path):
    schema = Schema((*COLUMNS[2:], COLUMNS[0], replace(LABEL, kind="ignore"), COLUMNS[1]), "pay")
    file = from_file(tmp_path, schema, loss=loss)
    frame = people()
    model = cls(2.0, schema=schema, evaluate=True, steps=20, random_state=7)
    model.fit(frame.drop("pay"), frame["pay"])
    assert np.array_equal(model.model_.coef, file.coef)
    assert model.model_.loss == file.loss == loss
    assert model.coef_.shape == model.coef_noise_.shape == (len(file.features),)
    loaded = pg.load_model(tmp_path / "file.model")
    assert type(loaded) is cls
    assert np.array_equal(loaded.predict(frame), model.predict(frame))


def test_a_schema_may_be_a_file_and_need_not_name_the_target(tmp_path):
    path = tmp_path / "schema.toml"
    path.write_text(template(Schema(COLUMNS[:2]), "people"))
    frame = people().drop_nulls()
    for given in (path, str(path)):
        model = pg.PrivateLogisticRegression(4.0, schema=given, random_state=0, steps=10)
        model.fit(frame, frame["label"])
        assert model.classes_.tolist() == ["no", "yes"], "discovered"
        assert "categories" in [event.purpose for event in model.privacy_.events]
        assert model.feature_names_in_.tolist() == ["age", "pay"]
    assert np.array_equal(clone(model).fit(frame, frame["label"]).coef_, model.coef_)


@pytest.mark.parametrize("cls", CLASSIFIERS)
@pytest.mark.parametrize(
    "labels", [[0, 1], [3, 1, 2], [True, False], [1.0, 2.0], ["b", "a"], ["x", "y", "z"]]
)
@pytest.mark.parametrize("schema", [None, Schema((Column("a"), Column("b")))])
def test_labels_keep_their_type_through_files(cls, labels, schema, tmp_path):
    rng = np.random.default_rng(0)
    X = pd.DataFrame(rng.standard_normal((3000, 2)), columns=["a", "b"])
    y = np.array(labels)[np.digitize(X["a"], np.linspace(-0.5, 0.5, len(labels) - 1))]
    model = cls(8.0, schema=schema, random_state=0, steps=10).fit(X, y)
    assert model.classes_.dtype == np.unique(y).dtype
    assert np.array_equal(model.classes_, np.unique(y))
    model.save(tmp_path / "m.model")
    for loaded in (cls.load(tmp_path / "m.model"), pg.load_model(tmp_path / "m.model")):
        assert type(loaded) is cls
        assert loaded.classes_.dtype == model.classes_.dtype
        assert np.array_equal(loaded.predict(X), model.predict(X))
        assert np.array_equal(loaded.decision_function(X), model.decision_function(X))
        assert np.array_equal(loaded.coef_noise_, model.coef_noise_)
        assert loaded.privacy_ == model.privacy_
        assert loaded.n_features_in_ == 2
        assert loaded.get_params()["steps"] == 10
    figures = model.evaluate_on(X, y)
    assert not figures.private
    assert figures.figures["accuracy"].value == pytest.approx(model.score(X, y))
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict(X), model.predict(X))


@pytest.mark.parametrize("cls", REGRESSORS)
@pytest.mark.parametrize("layout", [np.asarray, csr_array])
@pytest.mark.parametrize("epsilon", [4.0, np.inf])
def test_regressions_keep_everything_through_files(cls, layout, epsilon, tmp_path):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2000, 3))
    y = X @ [1.0, 2.0, 0.0] + 5
    model = cls(epsilon, random_state=0).fit(layout(X), y)
    model.save(tmp_path / "m.model")
    loaded = pg.load_model(tmp_path / "m.model")
    assert type(loaded) is cls
    assert np.array_equal(loaded.predict(layout(X)), model.predict(layout(X)))
    assert loaded.target_unit_ == model.target_unit_
    assert loaded.privacy_ == model.privacy_
    assert loaded.evaluation_ is None
    assert (model.coef_noise_ == 0).all() == (epsilon == np.inf)
    model.report(tmp_path / "r.html", Statement(purpose="To test."))
    assert "NOT PRIVATE" in (tmp_path / "r.html").read_text()
    assert "To test." in (tmp_path / "r.html").read_text()
    (tmp_path / "s.toml").write_text('purpose = "To read."')
    model.report(tmp_path / "r.html", statement=tmp_path / "s.toml")
    assert "To read." in (tmp_path / "r.html").read_text()
    with pytest.raises(ValueError, match=r"privagrad\.load_model"):
        pg.PrivateLogisticRegression.load(tmp_path / "m.model")


def test_noise_without_an_evaluation_is_an_upper_bound():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((5000, 3))
    y = X[:, 0] + rng.logistic(size=5000) > 0
    cheap = pg.PrivateLogisticRegression(1.0, random_state=0).fit(X, y)
    dear = pg.PrivateLogisticRegression(1.0, random_state=0, evaluate=True).fit(X, y)
    purposes = [event.purpose for event in dear.privacy_.events]
    assert {"evaluation", "curvature"} <= set(purposes)
    assert dear.privacy_.epsilon <= 1.0
    assert cheap.model_.evaluation == {}
    assert (cheap.coef_noise_ > dear.coef_noise_).all()
    fits = [pg.PrivateLogisticRegression(1.0, random_state=s).fit(X, y).coef_ for s in range(12)]
    assert (np.std(fits, axis=0) < cheap.coef_noise_).all()


def test_least_squares_from_moments_are_evaluated():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60_000, 4))
    y = X @ [1.0, 0.0, 2.0, 0.0] + rng.standard_normal(60_000)
    model = pg.PrivateRidge(4.0, evaluate=True, random_state=0).fit(X, y)
    purposes = [event.purpose for event in model.privacy_.events]
    assert "second moments" in purposes
    assert "evaluation" in purposes
    assert "curvature" not in purposes, "the moments state the noise themselves"
    assert model.n_iter_ == 1
    error = np.abs(y - model.predict(X)).mean()
    assert model.evaluation_ is not None
    assert model.evaluation_.figures["error"].value == pytest.approx(error, rel=0.1)


def budget(folder: Path, epsilon: float = 1.0, delta: float = 1e-5) -> Ledger:
    ledger = Ledger(folder / "ledger.db")
    ledger.create("rows", epsilon, delta)
    return ledger


def table(n: int = 3000) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, 3))
    return X, (X[:, 0] + rng.logistic(size=n) > 0).astype(int)


def test_a_fit_is_reserved_before_its_first_release_and_finished_after_its_last(
    tmp_path, monkeypatch
):
    ledger = budget(tmp_path)
    seen = []
    real = GaussianSum.release

    def watched(self, *arguments):
        seen.append([run.state for run in ledger.account("rows").runs])
        return real(self, *arguments)

    monkeypatch.setattr(GaussianSum, "release", watched)
    X, y = table()
    model = pg.PrivateLogisticRegression(0.5, ledger=ledger, dataset="rows", steps=5).fit(X, y)
    assert seen
    assert all(states == ["reserved"] for states in seen)
    [entry] = ledger.account("rows").runs
    assert (entry.state, entry.events) == ("finished", model.privacy_.events)
    assert model.model_.made["run"] == entry.name
    assert model.privacy_.delta == 1e-5, "the budget's"
    model.report(tmp_path / "r.html")
    assert "Budget of rows" in (tmp_path / "r.html").read_text()


def fits_charged(ledger: Ledger) -> int:
    account = ledger.account("rows")
    assert account.spent <= account.epsilon
    assert all(run.state == "finished" for run in account.runs)
    return len(account.runs)


def test_every_fit_of_a_grid_search_is_charged_or_refused(tmp_path):
    X, y = table()
    grid = {"radius": [0.2, 0.3, 0.4], "step_size": [0.5, 1.0]}
    for total, expected in ((20.0, 16), (1.5, None)):
        path = tmp_path / f"{total}.db"
        ledger = Ledger(path)
        ledger.create("rows", total, 1e-5)
        model = pg.PrivateLogisticRegression(0.5, ledger=path, dataset="rows", steps=3)
        search = GridSearchCV(model, grid, cv=2, error_score="raise")
        if expected:
            search.fit(X, y)
            assert fits_charged(ledger) == 13, "6 settings, 2 folds, one more on all rows"
            cross_val_score(model, X, y, cv=3)
            assert fits_charged(ledger) == 16
        else:
            with pytest.raises(BudgetError, match="largest epsilon that fits"):
                search.fit(X, y)
            assert 1 <= fits_charged(ledger) < 13


def test_clones_are_charged_and_members_that_bagging_seeds_are_refused(tmp_path):
    X, y = table(1000)
    ledger = budget(tmp_path, 20.0)
    model = pg.PrivateLogisticRegression(0.5, ledger=ledger, dataset="rows", steps=2)
    for _ in range(16):
        clone(model).fit(X, y)
    assert fits_charged(ledger) == 16
    with pytest.raises(ValueError, match="random_state"):
        BaggingClassifier(model, n_estimators=16, random_state=0).fit(X, y)
    assert fits_charged(ledger) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"random_state": 0}, "seeded noise protects nobody"),
        ({"delta": 1e-4}, "delta of at most 1e-05"),
        ({"epsilon": 5.0}, "within the budget"),
        ({"epsilon": np.inf}, "finite epsilon"),
        ({"noise": "loud"}, "noise"),
        ({"batch_size": 10**6}, "batch_size <= "),
        ({"classes": [0, 2]}, r"found \[1\]"),
        ({"class_weight": {5: 1.0}}, "class_weight"),
        ({"bounds": {7: (0, 1)}}, "columns that X has"),
        ({"bounds": {0: (1, 0)}}, "low <= high"),
        ({"steps": 0}, "steps"),
        ({"epsilon": 1e-4}, "Nothing was spent"),
        ({"dataset": "other"}, "no 'other'"),
        ({"dataset": None}, "dataset=NAME"),
    ],
)
def test_nothing_is_spent_on_what_is_refused(options, message, tmp_path, monkeypatch):
    ledger = budget(tmp_path)
    monkeypatch.setattr(GaussianSum, "release", lambda *_: pytest.fail("a release"))
    X, y = table()
    told = {"epsilon": 0.5, "ledger": ledger, "dataset": "rows", **options}
    with pytest.raises(ValueError, match=message):
        pg.PrivateLogisticRegression(**told).fit(X, y)
    assert ledger.history("rows") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop("city"), "column 'city' in X"),
        (lambda f: f.with_columns(pl.lit("high").alias("age")), "numbers in column 'age'"),
        (lambda f: f.with_columns(pl.lit("soon").alias("since")), "dates"),
        (lambda f: f.head(0), "rows in X"),
        (lambda f: f.select("age", "pay").to_numpy(), "data frame"),
        (lambda f: f.head(100), "as many targets"),
    ],
)
def test_nothing_is_spent_on_bad_frames(change, message, tmp_path):
    ledger, frame = budget(tmp_path), people()
    model = pg.PrivateLogisticRegression(0.5, schema=SCHEMA, ledger=ledger, dataset="rows")
    with pytest.raises((ValueError, TypeError), match=message):
        model.fit(change(frame), frame["label"])
    with pytest.raises(ValueError, match="stated labels alone"):
        model.fit(frame, frame["city"])
    assert ledger.history("rows") == []


def test_a_second_private_fit_of_the_same_rows_warns_once():
    X, y = table(500)
    other = X + 1

    def warned(model: Any, rows: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(rows, y)
        return [str(w.message) for w in caught if "same rows" in str(w.message)]

    model = pg.PrivateLogisticRegression(8.0, steps=2)
    for quiet in ({"random_state": 0}, {"epsilon": np.inf}):
        assert not warned(clone(model).set_params(**quiet), X)
    assert not warned(model, X)
    assert not warned(model, other)
    [told] = warned(pg.PrivateLinearSVC(8.0, steps=2), X)
    assert "2 private fits" in told
    assert "ledger=" in told
    assert not warned(model, X)
    assert not warned(clone(model).set_params(bounds=(-1, 1)), X)
    assert len(warned(model, csr_array(other))) == 0, "another buffer"
    assert len(warned(model, other)) == 1


@pytest.mark.parametrize("kind", ["array", "sparse", "frame"])
def test_fits_that_share_rows_warn_once(kind):
    """Folds of a cross-validation are other tables, but each row is in most of them."""
    X, y = table(600)
    X = X + {"array": 11, "sparse": 12, "frame": 13}[kind]
    told: dict[str, Any] = {"epsilon": 8.0, "steps": 2}
    rows: Any = csr_array(X) if kind == "sparse" else X
    if kind == "frame":
        rows = pd.DataFrame(X, columns=list("abc"))
        told |= {"schema": Schema(tuple(map(Column, "abc"))), "classes": [0, 1]}
    model = pg.PrivateLogisticRegression(**told)
    with pytest.warns(UserWarning, match="share many rows") as caught:
        cross_val_score(model, rows, y, cv=3, error_score="raise")
    assert len([w for w in caught if "share many rows" in str(w.message)]) == 1


def test_other_rows_do_not_warn():
    X, y = table(900)
    X = X + 17
    model = pg.PrivateLogisticRegression(8.0, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*rows are few")
        for part in (slice(0, 300), slice(300, 600), slice(600, 900)):
            model.fit(X[part], y[part])
        coarse = np.random.default_rng(1).integers(0, 2, (900, 3)).astype(float)
        for part in (slice(0, 300), slice(300, 600)):
            model.fit(coarse[part], y[part])


def test_members_that_an_ensemble_seeds_are_told_to_be_not_private():
    X, y = table(600)
    model = pg.PrivateLogisticRegression(8.0, steps=2)
    with pytest.warns(UserWarning, match="NOT private"):
        BaggingClassifier(model, n_estimators=2, random_state=0).fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*rows are few")
        clone(model).set_params(random_state=3).fit(X, y)


def test_an_epsilon_that_protects_nobody_is_told():
    X, y = table(300)
    with pytest.warns(UserWarning, match="epsilon 64 hardly protects anyone"):
        pg.PrivateLogisticRegression(64.0, steps=2).fit(X + 19, y)


def test_targets_named_like_another_column_are_refused(tmp_path):
    """A series that was computed from a column still has its name."""
    frame, ledger = as_pandas(people(600)), budget(tmp_path)
    open_schema = Schema(COLUMNS)
    told: dict[str, Any] = {"schema": open_schema, "ledger": ledger, "dataset": "rows", "steps": 2}
    model = pg.PrivateLogisticRegression(0.5, classes=[False, True], **told)
    older = frame["age"] > 45
    assert older.name == "age"
    with pytest.raises(ValueError, match="name of their own, found 'age'"):
        model.fit(frame, older)
    assert ledger.history("rows") == []
    fitted = model.fit(frame, older.rename("older"))
    assert "age" in fitted.feature_names_in_
    member = model.fit(frame, frame["member"])
    assert "member" not in member.feature_names_in_


@pytest.mark.parametrize("cls", [*CLASSIFIERS, *REGRESSORS])
def test_estimators_show_themselves_in_notebooks_without_a_warning(cls):
    for shown in (cls(), GridSearchCV(cls(), {}), pg.PrivateSearch(cls(), {"radius": [0.2]})):
        assert shown._repr_html_()


def test_tab_completion_finds_public_names_alone():
    found = {name for name in dir(pg) if not name.startswith("_")}
    assert {cls.__name__ for cls in (*CLASSIFIERS, *REGRESSORS)} < found
    assert not found & {"Any", "Path", "TYPE_CHECKING", "find_spec", "import_module"}


def test_partial_bounds_are_public_limits():
    X, y = table()
    X = X * [10.0, 1.0, 1.0] + [50.0, 0, 0]
    wild = X.copy()
    wild[0, 0] = 1e9
    frame = pd.DataFrame(X, columns=["age", "b", "c"])
    by_name = pg.PrivateLogisticRegression(2.0, bounds={"age": (0, 120)}, random_state=0, steps=10)
    by_number = clone(by_name).set_params(bounds={0: (0, 120)})
    coef = by_name.fit(frame, y).coef_
    assert np.array_equal(coef, by_number.fit(X, y).coef_)
    clipped = np.clip(wild[0, 0], 0, 120)
    wild_then = X.copy()
    wild_then[0, 0] = clipped
    assert np.array_equal(by_number.fit(wild, y).coef_, by_number.fit(wild_then, y).coef_)
    everything = {"age": (0, 120), "b": (-5, 5), 2: (-5, 5)}
    bounded = clone(by_name).set_params(bounds=everything).fit(frame, y)
    same = clone(by_name).set_params(bounds=([0, -5, -5], [120, 5, 5])).fit(frame, y)
    assert np.array_equal(bounded.coef_, same.coef_)
    assert "ranges" not in [event.purpose for event in bounded.privacy_.events]


def test_missing_numbers_need_a_schema():
    X, y = table(300)
    X[0, 1] = np.nan
    with pytest.raises(ValueError, match="schema="):
        pg.PrivateLogisticRegression().fit(X, y)


@pytest.mark.parametrize("option", ["schema", "ledger", "dataset", "evaluate"])
def test_a_search_refuses_what_it_cannot_charge(option):
    X, y = table(300)
    given: dict[str, Any] = {option: SCHEMA if option == "schema" else "name"}
    search = pg.PrivateSearch(pg.PrivateLogisticRegression(**given), {"radius": [0.2]})
    with pytest.raises(ValueError, match=f"without {option}"):
        search.fit(X, y)


@pytest.mark.parametrize(
    "make",
    [
        lambda y: pd.Series(y, dtype="Int64"),
        lambda y: pd.Series(y).astype("category"),
        lambda y: pl.Series(y),
        lambda y: pl.Series(y).to_arrow(),
        lambda y: pl.Series([None, *y[1:].tolist()]),
        lambda y: [None, *y[1:].tolist()],
    ],
)
def test_labels_of_every_library_keep_their_type(make):
    """Also where some are missing, which must not show in the type."""
    frame, schema = people(), Schema(COLUMNS)
    y = (frame["label"] == "yes").to_numpy().astype(int)
    model = pg.PrivateLogisticRegression(4.0, schema=schema, random_state=0, steps=10)
    model.fit(frame, make(y))
    assert model.classes_.tolist() == [0, 1]
    assert model.classes_.dtype.kind == "i"
    assert (model.predict(frame) == y).mean() > 0.7


def test_files_of_the_command_are_estimators(tmp_path):
    file = from_file(tmp_path, SCHEMA)
    model = pg.load_model(tmp_path / "file.model")
    assert isinstance(model, pg.PrivateLogisticRegression)
    frame = people(500, seed=1)
    assert model.predict(frame).tolist() == model.predict(as_pandas(frame)).tolist()
    margins = model.decision_function(frame)
    [rows] = file.rows(written(frame, tmp_path / "more.csv"))
    assert margins == pytest.approx(-load_saved(tmp_path / "file.model").margins(rows.X)[:, 0])
    assert model.evaluate_on(frame, frame["label"]).figures["accuracy"].value > 0.7


def written(frame: pl.DataFrame, path: Path) -> Path:
    frame.write_csv(path)
    return path


def test_files_of_estimators_work_at_the_command(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from privagrad.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIVAGRAD_LEDGER", str(tmp_path / "none.db"))
    X, y = table()
    frame = people()
    pl.DataFrame({**{f"x{j}": X[:, j] for j in range(3)}, "target": y}).write_csv("array.csv")
    frame.write_csv("frame.csv")
    Path("sparse.libsvm").write_text(
        "\n".join(
            f"{label} " + " ".join(f"{j + 1}:{cell!r}" for j, cell in enumerate(row.tolist()))
            for label, row in zip(y, X, strict=True)
        )
    )
    plain = pg.PrivateLogisticRegression(8.0, random_state=0, steps=20)
    fitted = {
        "array.csv": (clone(plain).fit(X, y), X, y),
        "sparse.libsvm": (clone(plain).fit(csr_array(X), y), csr_array(X), y),
        "frame.csv": (
            clone(plain).set_params(schema=SCHEMA).fit(frame, frame["label"]),
            frame,
            frame["label"],
        ),
    }
    for name, (model, rows, labels) in fitted.items():
        model.save("m.model")
        for command in (
            ["show", "m.model"],
            ["predict", "m.model", name, "-o", "p.csv"],
            ["evaluate", "m.model", name, "--report", "e.html"],
            ["evaluate", "m.model", name, "-e", "1"],
        ):
            done = CliRunner().invoke(app, command)
            assert done.exit_code == 0, done.output
        found = pl.read_csv("p.csv")["prediction"].cast(pl.String).to_list()
        assert found == [str(label) for label in model.predict(rows)]
        model.report("r.html")
        assert "upper bounds" in Path("r.html").read_text()
        exact = model.evaluate_on(rows, labels)
        assert exact.figures["accuracy"].value == pytest.approx(model.score(rows, labels))


def test_the_command_fits_least_squares_and_balanced_classes(tmp_path):
    people(20_000).write_csv(tmp_path / "people.csv")
    pay = Schema((COLUMNS[0], COLUMNS[1]), "pay")
    asked = FitRequest(tmp_path / "people.csv", None, 4.0, schema=pay, loss="squared", seed=0)
    model = run(prepare(asked), progress=False)
    assert (model.loss, model.made["method"]) == ("squared", "second moments")
    assert "second moments" in [event["purpose"] for event in model.privacy["events"]]
    assert model.evaluation["figures"]["error"]["value"] > 0
    open_label = Schema((*COLUMNS, replace(LABEL, categories=())), "label")
    both = FitRequest(
        tmp_path / "people.csv", None, 4.0, schema=open_label, class_weight="balanced", seed=0
    )
    model = run(prepare(both), progress=False)
    assert "class shares" in [event["purpose"] for event in model.privacy["events"]]
    with pytest.raises(ValueError, match="stated classes"):
        prepare(replace(both, loss="hinge"))
    with pytest.raises(ValueError, match="class_weight"):
        prepare(replace(both, class_weight="heavy"))
    with pytest.raises(ValueError, match="regression"):
        prepare(replace(asked, class_weight="balanced"))


def test_open_categories_do_not_change_the_plan_of_least_squares(tmp_path):
    """The releases are those reserved, also where more columns are found than were guessed."""
    rng = np.random.default_rng(0)
    n = 30_000
    frame = pl.DataFrame(
        {"kind": rng.integers(0, 60, n).astype(str), "x": rng.standard_normal(n)}
    ).with_columns(y=pl.col("x") * 2)
    schema = Schema((Column("kind", "category"), Column("x"), Column("y")), "y")
    for solver in ("auto", "moments", "gradients"):
        for evaluate in (False, True):
            ledger = Ledger(tmp_path / f"{solver}{evaluate}.db")
            ledger.create("rows", 5.0, 1e-6)
            model = pg.PrivateRidge(
                4.0, solver=solver, schema=schema, evaluate=evaluate, ledger=ledger,
                dataset="rows", radius=0.3,
            ).fit(frame, frame["y"])  # fmt: skip
            [entry] = ledger.account("rows").runs
            assert entry.events == model.privacy_.events
            assert len(model.model_.features) > 50


def test_arrays_need_no_polars(tmp_path):
    code = (
        "import sys; sys.modules['polars'] = None\n"
        "import numpy as np, privagrad as pg\n"
        "X = np.random.default_rng(0).standard_normal((500, 2))\n"
        "model = pg.PrivateLogisticRegression(8.0, random_state=0).fit(X, X[:, 0] > 0)\n"
        f"model.save({str(tmp_path / 'm')!r})\n"
        f"assert (pg.load_model({str(tmp_path / 'm')!r}).predict(X) == model.predict(X)).all()\n"
        "try: pg.PrivateRidge(schema='absent.toml').fit(X, X[:, 0])\n"
        "except FileNotFoundError: print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr


def test_private_evaluations_count_rows_with_blanks(tmp_path):
    model = from_file(tmp_path, SCHEMA)
    asked = EvaluationRequest(model, tmp_path / "people.csv", epsilon=1.0, seed=0)
    assert people()["age"].null_count() > 0
    assert prepare_evaluation(asked).rows.known.all()


def test_a_ledgers_password_is_not_a_parameter_that_is_printed() -> None:
    X, y = np.zeros((4, 2)), np.array([0, 1, 0, 1])
    url = "postgresql://ann:s3cret@db/ledger"
    with pytest.raises(ValueError, match=r"ledger=Ledger\(URL\).*Nothing was spent") as caught:
        pg.PrivateLogisticRegression(epsilon=1.0, ledger=url, dataset="people").fit(X, y)
    assert "s3cret" not in str(caught.value)
