"""A fit and its budget: what is released is reserved first, whenever the process is killed."""

import hashlib
import multiprocessing
import os
import shutil
import sqlite3
import stat
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from privagrad.data import libsvm as libsvm_module
from privagrad.data import readers, tables
from privagrad.data.models import load_model, save_model
from privagrad.data.readers import open_table
from privagrad.data.schema import Column, Schema
from privagrad.fitting import FitRequest, fingerprint, prepare, run, save
from privagrad.fitting import save as save_module
from privagrad.fitting.evaluate import EvaluationRequest, prepare_evaluation, run_evaluation
from privagrad.fitting.snapshots import snapshot
from privagrad.linear import Choices
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.ledger import BudgetError, Ledger
from privagrad.privacy.mechanism import GaussianSum
from tests import killing


def libsvm(path: Path, n: int = 2000) -> Path:
    rng = np.random.default_rng(0)
    x = rng.random((n, 5)) < 0.4
    y = np.where(x[:, 0], 1, -1)
    path.write_text(
        "\n".join(
            f"{label} " + " ".join(f"{j + 1}:1" for j in np.flatnonzero(row))
            for label, row in zip(y, x, strict=True)
        )
    )
    return path


def request(folder: Path, epsilon: float = 0.5, **others) -> FitRequest:
    return FitRequest(
        libsvm(folder / "rows.libsvm"), None, epsilon, classes=("-1", "1"),
        choices=Choices(steps=20), **others,
    )  # fmt: skip


def test_everything_released_was_reserved_before(tmp_path, monkeypatch):
    """At each release the ledger already holds the run; afterwards it holds exactly its events."""
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("rows", 2.0, 1e-5)
    seen = []
    real = GaussianSum.release

    def watched(self, *arguments):
        seen.append(ledger.account("rows").spent)
        return real(self, *arguments)

    monkeypatch.setattr(GaussianSum, "release", watched)
    asked = replace(
        request(tmp_path, 1.9), classes=None, task="classification", dataset="rows", ledger=ledger
    )
    job = prepare(asked)
    assert seen == []
    assert ledger.history("rows") == []
    model = run(job, tmp_path / "m.model", False)
    releases = sum(event.count for event in job.events)
    # No column here is far from 0: nothing is asked around centres.
    assert len(seen) == releases - 2
    assert min(seen) == pytest.approx(job.epsilon)
    [entry] = ledger.account("rows").runs
    assert (entry.state, entry.events) == ("finished", job.events)
    assert model.made["run"] == entry.name
    assert model.privacy["epsilon"] == pytest.approx(PrivacyPlan(job.events).epsilon(1e-5))
    assert model.privacy["delta"] == 1e-5


def test_an_evaluation_is_reserved_before_its_release_and_finished_after_it(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("rows", 2.0, 1e-5)
    asked = request(tmp_path)
    model = run(prepare(asked), None, False)
    seen = []
    real = GaussianSum.release

    def watched(self, *arguments):
        seen.append([(one.state, one.events) for one in ledger.account("rows").runs])
        return real(self, *arguments)

    monkeypatch.setattr(GaussianSum, "release", watched)
    job = prepare_evaluation(
        EvaluationRequest(model, asked.table, 0.5, dataset="rows", ledger=ledger)
    )
    assert seen == []
    run_evaluation(job)
    assert job.plan is not None
    assert seen == [[("reserved", job.plan.events)]]
    [entry] = ledger.account("rows").runs
    assert (entry.state, entry.events) == ("finished", job.plan.events)


def test_a_fit_that_fails_stays_charged(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("rows", 2.0, 1e-5)
    job = prepare(request(tmp_path, dataset="rows", ledger=ledger))

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr("privagrad.fitting.save.save_model", full_disk)
    with pytest.raises(OSError, match="no space"):
        run(job, tmp_path / "m.model", False)
    [entry] = ledger.account("rows").runs
    assert (entry.state, entry.events) == ("reserved", job.events)


def test_a_run_that_was_given_back_while_alive_saves_no_model(tmp_path, monkeypatch):
    """Whenever it is given back, the run ends charged, and nobody gets its results."""
    for name in ("first release", "last release"):
        ledger = Ledger(tmp_path / f"{name}.db")
        ledger.create("rows", 2.0, 1e-5)
        job = prepare(request(tmp_path, dataset="rows", ledger=ledger))
        real, count = GaussianSum.release, 0
        last = sum(event.count for event in job.events) - 2  # nothing is asked around centres
        when = 1 if name == "first release" else last

        def release(self, *arguments, real=real, when=when, ledger=ledger):
            nonlocal count
            count += 1
            if count == when:
                [entry] = ledger.account("rows").runs
                ledger.release(entry.name, "taken for dead")
            return real(self, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(GaussianSum, "release", release)
            with pytest.raises(BudgetError, match="given back"):
                run(job, tmp_path / "m.model", False)
        assert not (tmp_path / "m.model").exists()
        [entry] = ledger.account("rows").runs
        assert (entry.state, entry.events) == ("finished", job.events)


def test_a_finished_run_cannot_be_given_back_while_its_model_is_saved(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("rows", 2.0, 1e-5)
    job = prepare(request(tmp_path, dataset="rows", ledger=ledger))

    def save(model, path, ready):
        def told():
            ready()
            with pytest.raises(ValueError, match="finished"):
                ledger.release(model.made["run"], "taken for dead")

        save_model(model, path, told)

    monkeypatch.setattr("privagrad.fitting.save.save_model", save)
    run(job, tmp_path / "m.model", False)
    assert load_model(tmp_path / "m.model").made["run"] == ledger.account("rows").runs[0].name


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_saved_once_after_the_ledger_even_if_its_test_fails(
    tmp_path, monkeypatch, fails
):
    """Scores come before the ledger and the file; without them the model is saved all the same.

    `save_model` tells the ledger before it writes anything of the model.
    """
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("rows", 2.0, 1e-5)
    test = libsvm(tmp_path / "test.libsvm", 300)
    job = prepare(request(tmp_path, dataset="rows", ledger=ledger, test=test))
    done = []
    real: dict[str, Any] = {
        "score": save.with_scores,
        "save": save_model,
        "finish": Ledger.finish,
    }

    def watched(name):
        def function(*arguments):
            done.append(name)
            if name == "score" and fails:
                raise MemoryError("a large table")
            return real[name](*arguments)

        return function

    monkeypatch.setattr("privagrad.fitting.save.with_scores", watched("score"))
    monkeypatch.setattr("privagrad.fitting.save.save_model", watched("save"))
    monkeypatch.setattr(Ledger, "finish", watched("finish"))
    with pytest.raises(MemoryError) if fails else nullcontext():
        run(job, tmp_path / "m.model", False)
    assert done == ["score", "save", "finish"]
    model = load_model(tmp_path / "m.model")
    assert model.made["run"] == ledger.account("rows").runs[0].name
    assert ("test" in model.evaluation) != fails
    if not fails:
        assert model.evaluation["test"]["rows"] == 300


TESTS = {
    "missing column": ("x\n1\n", "Expected the column 'label'"),
    "text": ("x,label\nhigh,yes\n", "found other text"),
    "no target": ("x,label\n1,\n", "rows with a target"),
    "no rows": ("x,label\n", "found none"),
}


@pytest.mark.parametrize("name", TESTS)
def test_nothing_is_spent_where_the_test_table_is_wrong(tmp_path, name):
    pl.DataFrame({"x": np.arange(600.0), "label": ["yes", "no"] * 300}).write_csv(
        tmp_path / "t.csv"
    )
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("rows", 2.0, 1e-5)
    schema = Schema((Column("x"), Column("label", "category")), "label")
    text, message = TESTS[name]
    (tmp_path / "test.csv").write_text(text)
    asked = FitRequest(
        tmp_path / "t.csv", None, 1.0, schema=schema, dataset="rows", ledger=ledger,
        test=tmp_path / "test.csv",
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        prepare(asked)
    with pytest.raises(ValueError, match="same columns"):
        prepare(replace(asked, test=libsvm(tmp_path / "test.libsvm")))
    assert ledger.history("rows") == []


def counted(monkeypatch, *places):
    """How often each of these functions is called."""
    calls: Counter[str] = Counter()

    def around(name, real):
        def function(*arguments, **options):
            calls[name] += 1
            return real(*arguments, **options)

        return function

    for owner, name in places:
        monkeypatch.setattr(owner, name, around(name, getattr(owner, name)))
    return calls


@pytest.mark.parametrize("tested", [False, True])
@pytest.mark.parametrize("ending", ["csv", "parquet", "libsvm"])
@pytest.mark.parametrize("stated", [False, True])
def test_a_file_is_parsed_and_encoded_once(tmp_path, monkeypatch, ending, stated, tested):
    """With and without discovery, a budget and a test table, which is one more file."""
    rng = np.random.default_rng(0)
    city = rng.choice(["Bern", "Rome"], 1200)
    label = np.where(city == "Bern", "yes", "no")
    frame = pl.DataFrame({"x": rng.random(1200), "city": city, "label": label})
    path, test = tmp_path / f"t.{ending}", tmp_path / f"test.{ending}"
    if ending == "libsvm":
        libsvm(path), libsvm(test, 200)
    else:
        for rows, place in ((frame, path), (frame.head(200), test)):
            rows.write_parquet(place) if ending == "parquet" else rows.write_csv(place)
    cities, labels = (("Bern", "Rome"), ("no", "yes")) if stated else ((), ())
    columns = (Column("x"), Column("city", "category", categories=cities),
               Column("label", "category", categories=labels))  # fmt: skip
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("rows", 4.0, 1e-5)
    asked = FitRequest(
        path, None, 2.0, schema=Schema(columns, "label"), dataset="rows", ledger=ledger,
        classes=("-1", "1") if stated and ending == "libsvm" else None,
        choices=Choices(steps=5), test=test if tested else None, task="classification",
    )  # fmt: skip
    calls = counted(
        monkeypatch,
        (readers, "frames"), (libsvm_module, "read_rows"), (tables, "one_hot"),
        (readers, "one_hot"), (tables, "as_rows"), (save_module, "save_model"),
    )  # fmt: skip
    job = prepare(asked)
    assert calls == {"read_rows" if ending == "libsvm" else "frames": 1 + tested}
    run(job, tmp_path / "m.model", False)
    files = 1 + tested
    parsed, encoded = ("read_rows", 0) if ending == "libsvm" else ("frames", files)
    expected = {
        parsed: files,
        "one_hot": encoded,
        "as_rows": int(ending != "libsvm"),
        "save_model": 1,
    }
    assert calls == {name: count for name, count in expected.items() if count}


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("ending", ["libsvm", "csv", "parquet"])
def test_the_rows_that_are_fitted_are_those_of_the_fingerprint(
    tmp_path, monkeypatch, ending, opened
):
    """The file is exchanged as soon as its fingerprint is known; nothing of it is read any more."""
    path = tmp_path / f"rows.{ending}"
    table = pl.DataFrame({"x": np.linspace(-1, 1, 600), "y": np.linspace(0, 1, 600)})

    def write(frame):
        if ending == "libsvm":
            path.write_text("\n".join(f"{y} 1:{x}" for x, y in frame.iter_rows()))
        elif ending == "csv":
            frame.write_csv(path)
        else:
            frame.write_parquet(path)

    write(table)
    ledger = Ledger(tmp_path / "ledger.db")
    content = fingerprint(path)
    ledger.create("rows", 2.0, 1e-5, content if opened else None)
    real = hashlib.file_digest

    def then_exchanged(*arguments):
        found = real(*arguments)
        write(table.head(500))
        return found

    monkeypatch.setattr(hashlib, "file_digest", then_exchanged)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    target = None if ending == "libsvm" else "y"
    asked = FitRequest(path, target, 1.0, loss="huber", dataset="rows", ledger=ledger)
    job = prepare(asked)
    assert job.n == 600
    assert list(tmp_path.glob("privagrad-*")) == []
    path.unlink()
    assert run(job, tmp_path / "m.model", False).made["rows"] == 600
    assert ledger.owners(content) == ["rows"]
    if opened:
        write(table.head(500))
        with pytest.raises(ValueError, match="other content"):
            prepare(asked)


@pytest.mark.parametrize("fails", [False, True])
def test_copies_of_rows_do_not_outlive_their_reading(tmp_path, monkeypatch, fails):
    ledger = Ledger(tmp_path / "ledger.db")
    asked = request(tmp_path, dataset="rows", ledger=ledger)
    ledger.create("rows", 2.0, 1e-5, fingerprint(asked.table))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = []

    def opened(path, schema):
        folders.append(path.parent)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        if fails:
            raise ValueError("Expected a table.")
        return open_table(path, schema)

    monkeypatch.setattr("privagrad.data.files.open_table", opened)
    with pytest.raises(ValueError, match="a table") if fails else nullcontext():
        prepare(asked)
    [folder] = folders
    assert folder.name.startswith("privagrad-")
    assert not folder.exists()


def test_a_copy_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "copyfile", full_disk)
    with pytest.raises(OSError, match="no space"), snapshot(tmp_path / "rows.csv"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_content_with_a_budget_is_paid_by_no_other_one(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    asked = request(tmp_path, dataset="rows", ledger=ledger)
    ledger.create("rows", 2.0, 1e-5, fingerprint(asked.table))
    ledger.create("unmarked", 2.0, 1e-5)
    with pytest.raises(ValueError, match=r"'unmarked' beside 'rows'.* --dataset rows"):
        prepare(replace(asked, dataset="unmarked"))
    prepare(asked)
    # Version 0.1.0 could open two budgets for one content.
    with sqlite3.connect(ledger.path) as db:
        db.execute(
            "INSERT INTO datasets SELECT 'twin', at, user, epsilon, delta, fingerprint "
            "FROM datasets WHERE name = 'rows'"
        )
    db.close()
    for name in ("rows", "twin"):
        with pytest.raises(ValueError, match="only budget"):
            prepare(replace(asked, dataset=name))


def test_content_that_a_budget_has_paid_for_is_paid_by_no_other_one(tmp_path):
    """None of the budgets was opened for the file: the first fit makes it that budget's."""
    ledger = Ledger(tmp_path / "ledger.db")
    for name in ("first", "second", "late"):
        ledger.create(name, 2.0, 1e-5)
    asked = request(tmp_path, dataset="first", ledger=ledger)
    late = prepare(replace(asked, dataset="late"))  # when nothing is charged yet
    run(prepare(asked), tmp_path / "first.model", False)
    with pytest.raises(ValueError, match=r"'second' beside 'first'.* --dataset first"):
        prepare(replace(asked, dataset="second"))
    with pytest.raises(ValueError, match=r"'late' beside 'first'.* --dataset first"):
        run(late, tmp_path / "late.model", False)
    with pytest.raises(ValueError, match=r"'first' in .* has paid for it"):
        ledger.create("bound", 2.0, 1e-5, fingerprint(asked.table))
    assert not (tmp_path / "late.model").exists()
    assert ledger.history("second") == ledger.history("late") == []
    run(prepare(asked), tmp_path / "again.model", False)
    asked.table.write_text(asked.table.read_text() + "\n1 1:1")
    prepare(replace(asked, dataset="second"))  # another content


def test_budgets_that_change_between_plan_and_run_are_seen(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("rows", 0.6, 1e-5)
    job = prepare(request(tmp_path, dataset="rows", ledger=ledger))
    ledger.reserve("rows", [GaussianEvent(9.0)], "someone else")
    with pytest.raises(BudgetError, match="largest epsilon that fits"):
        run(job, tmp_path / "m.model", False)
    assert not (tmp_path / "m.model").exists()
    assert len(ledger.account("rows").runs) == 1


@pytest.mark.parametrize(
    ("batch_size", "epsilon"),
    [(100, 0.9), (8, 0.75)],
)
@pytest.mark.filterwarnings("ignore:2000 rows are few")
def test_what_a_refusal_says_would_fit_does_fit(tmp_path, batch_size, epsilon):
    """Also for runs on small batches, which cost more as later runs than a Gaussian query does."""
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("rows", 1.0, 1e-5)
    ledger.reserve("rows", [GaussianEvent(9.0)], "someone else")
    asked = request(tmp_path, epsilon, dataset="rows", ledger=ledger)
    asked = replace(asked, choices=Choices(steps=20, batch_size=batch_size))
    with pytest.raises(BudgetError) as refused:
        run(prepare(asked), tmp_path / "m.model", False)
    largest = float(str(refused.value).split("that fits is about ")[1].split(". ")[0])
    assert largest > 0.6
    run(prepare(replace(asked, epsilon=largest)), tmp_path / "m.model", False)
    assert 0.95 < ledger.account("rows").spent <= 1.0


def test_rare_labels_and_blanks_teach_nothing(tmp_path):
    """Labels of a handful of rows are not discovered; their rows count, and change nothing else."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(4000)
    label = np.where(x > 0, "yes", "no").astype(object)
    label[:3], label[3:6] = "maybe", None
    pl.DataFrame({"x": x, "label": label.tolist()}).write_csv(tmp_path / "t.csv")
    schema = Schema((Column("x", low=-4, high=4), Column("label", "category")), "label")
    job = prepare(FitRequest(tmp_path / "t.csv", None, 2.0, schema=schema, seed=0))
    assert job.n == 4000
    assert not any("labels" in fact for fact in job.public)
    model = run(job, tmp_path / "m.model", False)
    assert model.classes == ["no", "yes"]
    assert model.evaluation["figures"]["accuracy"]["value"] > 0.9
    stated = schema.with_columns([replace(schema.column("label"), categories=("no", "yes"))])
    with pytest.raises(ValueError, match=r"another one in row 1 \(3 such rows"):
        prepare(FitRequest(tmp_path / "t.csv", None, 2.0, schema=stated))


def test_categories_of_too_few_rows_are_named(tmp_path):
    rng = np.random.default_rng(0)
    kind = np.where(np.arange(3000) < 2, "rare", rng.choice(["a", "b"], 3000))
    x = rng.standard_normal(3000)
    frame = pl.DataFrame({"kind": kind, "x": x, "y": np.where(x + (kind == "a") > 0, "yes", "no")})
    frame.write_csv(tmp_path / "t.csv")
    columns = (Column("kind", "category", categories=("a", "b", "rare")), Column("x"),
               Column("y", "category", categories=("no", "yes")))  # fmt: skip
    asked = FitRequest(tmp_path / "t.csv", None, 2.0, schema=Schema(columns, "y"), seed=0)
    model = run(prepare(asked), tmp_path / "m.model", False)
    assert model.made["not_measurable"] == ["kind=rare", "x is missing"]
    assert {model.features[j] for j in model.ranking[-2:]} == {"kind=rare", "x is missing"}


def test_known_bounds_cost_fewer_releases(tmp_path):
    frame = pl.DataFrame({"a": np.arange(500.0), "b": np.arange(500.0)})
    frame.write_csv(tmp_path / "t.csv")
    purposes = {}
    for name, high in (("open", None), ("bounded", 500.0)):
        schema = Schema((Column("a", low=0.0, high=high), Column("b", low=0.0, high=high)), "b")
        job = prepare(FitRequest(tmp_path / "t.csv", None, 2.0, schema=schema, task="regression"))
        purposes[name] = [event.purpose for event in job.events]
        assert job.epsilon <= 2.0
    assert purposes["bounded"] == ["moments", "target's moments", "row norms", "evaluation",
                                   "curvature", "gradients"]  # fmt: skip
    assert len(purposes["open"]) == 12


def test_a_fingerprint_is_that_of_the_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert fingerprint(tmp_path / "a") == (
        "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def _race(folder: Path, number: int) -> None:
    ledger = Ledger(folder / "ledger.db")
    try:
        job = prepare(request(folder / str(number), 0.5, dataset="rows", ledger=ledger))
        run(job, folder / f"{number}.model", False)
    except BudgetError:
        sys.exit(3)


def test_fits_race_for_one_budget(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("rows", 0.8, 1e-5)
    for number in range(4):
        (tmp_path / str(number)).mkdir()
    context = multiprocessing.get_context("spawn")
    racers = [context.Process(target=_race, args=(tmp_path, number)) for number in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    codes = sorted(racer.exitcode or 0 for racer in racers)
    assert set(codes) == {0, 3}
    account = ledger.account("rows")
    assert account.spent <= 0.8
    assert len(account.runs) == codes.count(0) == len(list(tmp_path.glob("*.model")))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_killed_at_any_moment_nothing_is_forgotten(tmp_path):
    """SIGKILL before and after every statement, release and write between reading and saving."""
    template = tmp_path / "template"
    template.mkdir()
    libsvm(template / "rows.libsvm")
    killing.made_ledger(template)
    planned = prepare(killing.request(template)).events
    seen = set()
    folders = killing.kill_everywhere("fit", template, tmp_path / "out")
    for folder in folders:
        ledger, model = Ledger(folder / "ledger.db"), folder / "rows.model"
        assert killing.ledger_is_intact(ledger.path)
        runs = ledger.account("rows").runs
        state = runs[0].state if runs else "nothing"
        assert len(runs) <= 1
        assert all(entry.events == planned for entry in runs)
        if (folder / "released").exists():
            assert runs
        if model.exists():
            assert state == "finished"
            assert load_model(model).made["run"] == runs[0].name
        found = (state, (folder / "released").exists(), model.exists())
        if found not in seen:  # whoever comes next finds a ledger that works
            ledger.reserve("rows", [GaussianEvent(20.0)], "the next one")
        seen.add(found)
    assert seen == {
        ("nothing", False, False),
        ("reserved", False, False),
        ("reserved", True, False),
        ("finished", True, False),
        ("finished", True, True),
    }
    names = {folder.name.split(" ", 1)[1] for folder in folders}
    assert names >= {
        f"{when} {what}"
        for when in ("before", "after")
        for what in (
            "BEGIN IMMEDIATE", "INSERT INTO history", "COMMIT", "release", "writestr", "fsync",
            "replace", "save_model", "open_table", "copyfile", "file_digest", "rmtree",
        )
    }  # fmt: skip


def people(path: Path, n: int = 400) -> Path:
    rng = np.random.default_rng(0)
    age = rng.integers(18, 80, n)
    frame = {
        "age": age,
        "city": [f"city {k}" for k in range(n)],
        "rich": np.where(age > 50, "y", "n"),
    }
    pl.DataFrame(frame).write_csv(path)
    return path


AGE = Column("age", low=18.0, high=80.0)
CITY = Column("city", "ignore")
RICH = Column("rich", "category", categories=("n", "y"))
REFUSED: dict[str, tuple[tuple[Column, ...], dict[str, Any], str]] = {
    "a target that is ignored": ((AGE, CITY, RICH), {"target": "city"}, "that is not ignored"),
    "a regression of categories": ((AGE, CITY, RICH), {"loss": "huber"}, "logistic or hinge"),
    "classes of a regression": (
        (AGE, CITY, RICH),
        {"target": "age", "loss": "absolute", "classes": ("1", "2")},
        "no classes for a regression, found --classes and 'absolute'",
    ),
    "no target": ((AGE, CITY, RICH), {"target": None}, "Expected --target COLUMN"),
    "the target alone": (
        (replace(AGE, kind="ignore", low=None, high=None), CITY, RICH),
        {},
        "columns beside the target",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_requests_that_make_no_sense_are_refused_before_anything_is_spent(tmp_path, case):
    columns, others, message = REFUSED[case]
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("people", 2.0, 1e-5)
    asked = FitRequest(
        people(tmp_path / "people.csv"), "rich", 1.0, schema=Schema(columns), dataset="people",
        ledger=ledger,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        prepare(replace(asked, **others))
    assert ledger.history("people") == []


def test_numbers_with_classes_are_labels(tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n" + "1.5,0\n2.5,1\n" * 200)
    asked = FitRequest(tmp_path / "t.csv", "y", 1.0)
    for others in ({"classes": ("0", "1")}, {"task": "classification", "classes": ("0", "1")}):
        job = prepare(replace(asked, **others))
        assert (job.loss.name, job.classes) == ("logistic", ("0", "1"))
    assert prepare(replace(asked, task="regression")).loss.name == "huber"
    with pytest.raises(ValueError, match=r"--classes 0,1 .* or --task regression"):
        prepare(asked)


def test_a_quantile_is_the_loss_that_is_asked_for(tmp_path):
    schema = Schema((AGE, CITY, RICH))
    asked = FitRequest(
        people(tmp_path / "people.csv"), "age", 1.0, schema=schema, loss="quantile", quantile=0.9
    )
    job = prepare(asked)
    assert (job.loss.name, job.loss.parameter) == ("quantile", 0.9)
    assert job.classes is None


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            (AGE, CITY, replace(RICH, categories=())),
            r"Expected at least two classes, found \d with more than about .* stays charged",
        ),
        (
            (
                replace(AGE, kind="ignore", low=None, high=None),
                replace(CITY, kind="category"),
                RICH,
            ),
            "no category was frequent enough to be discovered.* stays charged",
        ),
    ],
    ids=["classes", "categories"],
)
@pytest.mark.filterwarnings("ignore:.*are few for epsilon")
def test_a_discovery_that_finds_too_little_stays_charged(tmp_path, columns, message):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("people", 2.0, 1e-5)
    table = people(tmp_path / "people.csv", 400)
    if not columns[2].categories:
        alike = pl.read_csv(people(table, 1000)).with_columns(rich=pl.lit("yes"))
        alike.write_csv(table)
    asked = FitRequest(
        table, "rich", 0.5, schema=Schema(columns), dataset="people", ledger=ledger,
        choices=Choices(steps=5),
    )  # fmt: skip
    job = prepare(asked)
    with pytest.raises(ValueError, match=message):
        run(job, tmp_path / "m.model", False)
    [entry] = ledger.account("people").runs
    assert (entry.state, entry.events) == ("reserved", job.events)
    assert not (tmp_path / "m.model").exists()


def test_other_releases_than_were_planned_are_not_made(tmp_path, monkeypatch):
    job = prepare(request(tmp_path))
    real = type(job).plan

    def other(self, facts):
        return real(self, replace(facts, bounded=not facts.bounded))

    monkeypatch.setattr(type(job), "plan", other)
    monkeypatch.setattr(GaussianSum, "release", lambda *_: pytest.fail("a release"))
    with pytest.raises(RuntimeError, match="Expected the releases that were planned"):
        run(job, tmp_path / "m.model", False)


def test_regressions_and_classes_are_scored_on_other_tables(tmp_path):
    schema = Schema((AGE, CITY, RICH))
    table, other = people(tmp_path / "people.csv"), people(tmp_path / "others.csv", 300)
    asked = FitRequest(
        table, "age", 4.0, schema=schema, test=other, task="regression",
        choices=Choices(steps=20), seed=0,
    )  # fmt: skip
    model = run(prepare(asked), tmp_path / "m.model", False)
    test = model.evaluation["test"]
    truth = pl.read_csv(other)["age"].to_numpy()
    figures = test["figures"]
    of_median = np.abs(truth - np.median(truth)).mean()
    assert figures["baseline_error"]["value"] == pytest.approx(of_median)
    assert 0 < figures["error"]["value"] < of_median
    assert (test["rows"], test["private"]) == (300, False)


def test_a_full_disk_leaves_no_finished_run_without_its_model(tmp_path, monkeypatch):
    """The disk has room for the file, and nothing of its content, before the ledger is told."""
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("rows", 2.0, 1e-5)
    job = prepare(request(tmp_path, dataset="rows", ledger=ledger))
    kept: list[bytes] = []
    real = os.fsync

    def full(descriptor: int) -> None:
        parts = list(tmp_path.glob(".*.part"))
        kept.extend(part.read_bytes() for part in parts)
        if parts:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        run(job, tmp_path / "m.model", False)
    assert len(kept) == 1
    assert not any(kept[0])
    assert [entry.state for entry in ledger.account("rows").runs] == ["reserved"]
    assert not list(tmp_path.glob(".*.part"))


def test_names_that_no_file_can_have_are_refused_before_the_charge(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.create("rows", 2.0, 1e-5)
    job = prepare(request(tmp_path, dataset="rows", ledger=ledger))
    with pytest.raises(ValueError, match="a file name of at most"):
        run(job, tmp_path / ("x" * 300), False)
    assert ledger.account("rows").runs == ()


def test_where_nothing_is_blank_nothing_is_learned_of_blanks(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6000, 2))
    y = np.where(x[:, 0] + rng.logistic(size=6000) > 0, "yes", "no")
    pl.DataFrame({"a": x[:, 0], "b": x[:, 1], "y": y}).write_csv(tmp_path / "t.csv")
    model = run(prepare(FitRequest(tmp_path / "t.csv", "y", 1.0, classes=("no", "yes"))))
    coef = dict(zip(model.features, model.coef[0].tolist(), strict=True))
    assert coef["a"] > 0.5
    assert abs(coef["a is missing"]) + abs(coef["b is missing"]) < 1e-9
