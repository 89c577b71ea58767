"""Model files: whole or absent, safe to load, the same model afterwards."""

import io
import json
import pickle
import tracemalloc
import zipfile
from dataclasses import fields, replace

import numpy as np
import pytest
from scipy.sparse import csr_array

from privagrad._internal.atomic import atomic_write
from privagrad.data.models import VERSION, SavedModel, load_model, save_model
from privagrad.data.schema import Column, Schema

PRIVACY = {
    "epsilon": 1.0, "delta": 1e-6, "relation": "zero-out", "sampling": "poisson",
    "accountant": "none", "seeded": False, "noise": "gaussian", "events": [],
}  # fmt: skip
MADE = {
    "at": "2026-01-01", "version": "0.1.0", "table": "t.csv", "rows": 10, "method": "pagan",
    "steps": 3, "batch_size": 5, "dataset": None, "run": None,
}  # fmt: skip


def model(classes=("no", "yes"), outputs=1):
    d = 3
    rng = np.random.default_rng(0)
    return SavedModel(
        "logistic",
        ["a", "b=ü", "b=<x>"],
        None if classes is None else list(classes),
        Schema(
            (
                Column("a", missing=0.0),
                Column("b", "category", categories=("ü", "<x>")),
                Column("y"),
            ),
            "y",
        ),
        dict(PRIVACY),
        dict(MADE),
        {"score": 0.8, "losses": [None, 0.5]},
        *(rng.standard_normal((outputs, d)), rng.standard_normal(outputs)) * 2,
        *(rng.random((3, d)) + 0.1),
    )


def test_a_model_reads_back(tmp_path):
    path = tmp_path / "m.model"
    saved = model()
    save_model(saved, path)
    found = load_model(path)
    for f in fields(SavedModel):
        assert np.array_equal(getattr(found, f.name), getattr(saved, f.name)), f.name
    assert [p.name for p in tmp_path.iterdir()] == ["m.model"]


def test_a_model_that_says_add_or_remove_one_keeps_its_meaning(tmp_path):
    """Version 0.1.0 wrote that name for zero-out."""
    path, old = tmp_path / "m.model", model()
    old.privacy["relation"] = "add-or-remove-one"
    save_model(old, path)
    assert load_model(path).privacy == {**old.privacy, "relation": "zero-out"}
    old.privacy["relation"] = "two-rows"
    save_model(old, path)
    with pytest.raises(ValueError, match="zero-out, replace-one"):
        load_model(path)


@pytest.mark.parametrize("version", range(1, VERSION + 1))
def test_models_of_every_version_open(tmp_path, version):
    save_model(model(), tmp_path / "m.model")
    changed(tmp_path / "m.model", tmp_path / "old.model", card={"version": version})
    assert load_model(tmp_path / "old.model").features == model().features


def test_columns_of_too_few_rows_come_last():
    saved = model()
    assert saved.measurable.all()  # as in files that do not say it
    hidden = replace(saved, made={**saved.made, "not_measurable": ["b=ü"]})
    assert hidden.measurable.tolist() == [True, False, True]
    effects = np.abs(saved.coef * saved.unit)[0]
    assert saved.ranking.tolist() == np.argsort(-effects).tolist()
    first = sorted((0, 2), key=lambda j: -effects[j])
    assert hidden.ranking.tolist() == [*first, 1]


def test_intervals_hold_95_percent_of_the_noise():
    saved = replace(model(), coef=np.array([[1.0, 2.0, -3.0]]), coef_noise=np.array([[1, 2, 0.0]]))
    low, high = saved.intervals
    assert low.tolist() == [[1 - 1.96, 2 - 3.92, -3.0]]
    assert high.tolist() == [[1 + 1.96, 2 + 3.92, -3.0]]


def test_blanks_keep_the_meaning_that_they_had_when_the_model_was_written(tmp_path):
    """Until version 1 a blank was the middle of the bounds or 0, and no column told of it."""
    schema = Schema((Column("a", low=2.0, high=4.0), Column("b"), Column("y")), "y")
    new = replace(model(None), schema=schema, centre=np.array([5.0, 6.0, 7.0]))
    save_model(new, tmp_path / "new.model")
    changed(tmp_path / "new.model", tmp_path / "old.model", card={"version": 1})
    (tmp_path / "t.csv").write_text("a,b\n,1\n3,\n")
    [part] = load_model(tmp_path / "old.model").rows(tmp_path / "t.csv")
    assert (part.names, part.X.tolist()) == (["a", "b"], [[3, 1], [3, 0]])
    [part] = load_model(tmp_path / "new.model").rows(tmp_path / "t.csv")
    assert part.names == ["a", "a is missing", "b", "b is missing"]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_blank_is_predicted_as_the_centre(sparse):
    fitted = replace(model(), centre=np.array([5.0, 6.0, 7.0]))
    X = np.array([[np.nan, 1.0, 0.0], [1.0, 2.0, np.nan]])
    filled = np.array([[5.0, 1.0, 0.0], [1.0, 2.0, 7.0]])
    table = csr_array(X) if sparse else X
    assert np.allclose(fitted.margins(table), fitted.margins(filled), rtol=1e-14)
    assert np.isnan(X).sum() == 2, "the user's own table stays as it is"


def test_rows_of_other_files_are_in_the_models_columns(tmp_path):
    (tmp_path / "t.csv").write_text("b,a,y\n<x>,1,yes\nü,2,\nother,,no\n")
    saved = replace(model(), schema=model().schema.with_columns([Column("y", "category",
                    categories=("no", "yes"))]))  # fmt: skip
    [part] = saved.rows(tmp_path / "t.csv", target=True)
    assert part.X.tolist() == [[1, 0, 1], [2, 1, 0], [0, 0, 0]]
    assert np.array_equal(part.y, [1, np.nan, 0], equal_nan=True)
    [part] = saved.rows(tmp_path / "t.csv")
    assert part.y is None
    (tmp_path / "t.libsvm").write_text("no 1:5 9:9\n")
    with pytest.raises(ValueError, match=r"the columns of t\.csv, found t\.libsvm"):
        saved.rows(tmp_path / "t.libsvm")
    (tmp_path / "t.libsvm").write_text("1 1:5 9:9\n2 2:3\n")
    [part] = replace(model(("1", "3")), schema=None).rows(tmp_path / "t.libsvm", target=True)
    assert part.X.toarray().tolist() == [[5, 0, 0], [0, 3, 0]]
    assert part.y.tolist() == [0, -1]
    [part] = replace(model(None), schema=None).rows(tmp_path / "t.libsvm", target=True)
    assert part.y.tolist() == [1, 2]


def test_predictions():
    X = np.array([[1.0, 0, 0], [0, 1, 0], [-5.0, 0, 1]])
    two = replace(model(), coef=np.array([[1.0, -1.0, 0.0]]), intercept=np.array([0.5]))
    assert two.predict(X).tolist() == ["yes", "no", "no"]
    three = replace(model(("a", "b", "c"), 3), coef=np.eye(3), intercept=np.array([0.0, 0.1, 0.0]))
    assert three.predict(X).tolist() == ["a", "b", "c"]
    number = replace(two, classes=None)
    assert number.predict(X).tolist() == [1.5, -0.5, -4.5]


def test_a_failed_writer_leaves_what_was_there(tmp_path):
    path = tmp_path / "m.model"
    path.write_text("before")

    def fail():
        with atomic_write(path) as file:
            file.write(b"half")
            raise RuntimeError("a full disk")

    with pytest.raises(RuntimeError, match="full disk"):
        fail()
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["m.model"]


def changed(path, out, **entries):
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "model.json":
                content = json.dumps(json.loads(content) | entries.get("card", {})).encode()
            if name not in entries.get("without", ()):
                new.writestr(name, entries.get("files", {}).get(name, content))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"card": {"format": "other"}}, "no model of privagrad"),
        ({"card": {"version": VERSION + 1}}, "newer than this"),
        ({"card": {"version": "1"}}, "Expected a model"),
        ({"card": {"features": ["a"]}}, "shape"),
        ({"card": {"classes": ["a"]}}, "classes"),
        ({"card": {"schema": {"columns": 3}}}, "Expected a model"),
        ({"card": {"strange": 1}}, "strange"),
        ({"without": ["coef.npy"]}, "coef"),
        ({"files": {"model.json": b"[1]"}}, "no model"),
        ({"files": {"model.json": b"\xff"}}, "Expected a model"),
        ({"files": {"coef.npy": b"nonsense"}}, "Expected a model"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, entries, message):
    save_model(model(), tmp_path / "m.model")
    changed(tmp_path / "m.model", tmp_path / "other.model", **entries)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "other.model")


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def test_nothing_is_ever_unpickled(tmp_path):
    save_model(model(), tmp_path / "m.model")
    array = np.array([Evil()], dtype=object)
    with (tmp_path / "evil.npy").open("wb") as file:
        np.save(file, array, allow_pickle=True)
    evil = (tmp_path / "evil.npy").read_bytes()
    changed(tmp_path / "m.model", tmp_path / "evil.model", files={"coef.npy": evil})
    with pytest.raises(ValueError, match="Expected a model"):
        load_model(tmp_path / "evil.model")
    (tmp_path / "plain.model").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="Expected a model"):
        load_model(tmp_path / "plain.model")
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "absent.model")


def packed(array):
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


def declared(shape, kind="<f8"):
    """An array that says it has this shape, and has 8 bytes."""
    content = io.BytesIO()
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(content, header)
    return content.getvalue() + bytes(8)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"files": {"coef.npy": declared((10**12,))}}, r"shape \(1000000000000,\)"),
        ({"files": {"coef.npy": declared((10**6, 10**9))}}, "in 8 bytes"),
        ({"files": {"coef.npy": declared((1,), "V1000000000")}}, "header"),
        ({"files": {"coef.npy": declared((1,), "<U2")}}, "header"),
        ({"files": {"coef.npy": declared((-1,))}}, "header"),
        ({"files": {"coef.npy": declared((11,) * 5000)}}, "coef"),
        ({"files": {"coef.npy": declared((1,)).replace(b"(1,)", b"(" + b"1" * 40)}}, "header"),
        ({"files": {"coef.npy": packed(np.full((1, 2), np.nan))}}, "not finite"),
        ({"files": {"model.json": b"[" * 100_000}}, "Expected a model"),
        ({"card": {"features": "ab"}}, "features"),
        ({"card": {"classes": [1, 2]}}, "classes"),
        ({"card": {"privacy": PRIVACY | {"epsilon": "1"}}}, "epsilon"),
        ({"card": {"privacy": PRIVACY | {"delta": -1.0}}}, "delta"),
        ({"card": {"privacy": {}}}, "Expected a model"),
        ({"card": {"made": {}}}, "no at, version"),
        ({"card": {"evaluation": {"figures": {"auc": {"value": 1}}}}}, "auc without"),
        ({"card": {"made": None}}, "made"),
    ],
)
def test_models_made_to_harm_are_refused(tmp_path, entries, message):
    save_model(model(), tmp_path / "m.model")
    changed(tmp_path / "m.model", tmp_path / "other.model", **entries)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "other.model")


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path):
    """A gigabyte of zeros in a megabyte."""
    path = tmp_path / "m.model"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("model.json", "w", force_zip64=True) as entry,
    ):
        for _ in range(1024):
            entry.write(bytes(2**20))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"1,073,741,824 bytes packed into 1,0"):
            load_model(tmp_path / "m.model")
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_an_interruption_while_packing_stays_one(tmp_path, monkeypatch):
    """Not the complaint of an archive that is closed in the middle of an entry."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("zipfile._get_compressor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_model(model(), tmp_path / "m.model")
    assert list(tmp_path.iterdir()) == []
