"""`privagrad fit --cluster`: the workers read the table, and the model is that of one machine."""

import itertools
import json
import os
import sys
from dataclasses import replace
from importlib import reload
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from distributed import Client, LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import privagrad.distributed
from privagrad import fitting
from privagrad._internal.errors import ClusterError
from privagrad.cli import app
from privagrad.data import cluster_files, pieces
from privagrad.data.columns import Column, Schema
from privagrad.data.libsvm import libsvm_schema
from privagrad.data.models import SavedModel
from privagrad.data.pieces import LinePiece, RowPiece, SeenFile, cut_lines, widened
from privagrad.data.readers import open_table
from privagrad.distributed import clients, cluster_at
from privagrad.glm.examples import Examples
from privagrad.glm.rows import SparseRows
from privagrad.glm.stored import joined
from privagrad.linear import Choices
from privagrad.privacy.ledger import Ledger
from tests.distributed.test_failures import kill_at, stop_all

JOBS = ("cook", "baker", 'poet, "rhyming"')
SCHEMA = Schema(
    (
        Column("age", low=17, high=90),
        Column("hours"),
        Column("job", "category", categories=JOBS),
        Column("day", "date", parts=("days",)),
        Column("rich", "category", categories=("no", "yes")),
    ),
    "rich",
)


def people(n: int = 900) -> pl.DataFrame:
    rng = np.random.default_rng(0)
    hours = rng.normal(40, 10, n)
    table = {
        "age": rng.integers(15, 95, n),
        "hours": [None if k % 50 == 3 else hour for k, hour in enumerate(hours)],
        "job": rng.choice([*JOBS, "other\nand more", ""], n),
        "day": [f"2024-0{1 + k % 9}-1{k % 7}" for k in range(n)],
        "rich": rng.choice(["no", "yes", ""], n, p=[0.5, 0.48, 0.02]),
    }
    return pl.DataFrame(table)


def write_libsvm(path: Path, n: int = 900) -> Path:
    rng = np.random.default_rng(1)
    lines = ["# rows"]
    for k in range(n):
        entries = sorted(rng.choice(9, 2, replace=False) + 1)
        pairs = [f"{j}:{rng.normal():.4g}" for j in entries] + [f"{40 + k // 100}:1"]
        lines.append(f"{1 - 2 * (k % 2)} {' '.join(pairs)}")
    path.write_text("\n".join([*lines, ""]))
    return path


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, table = tmp_path_factory.mktemp("tables"), people()
    for kind in ("parquet", "arrow", "csv"):
        (folder / kind).mkdir()
    for number, first in enumerate(range(0, 900, 250)):
        some = table[first : first + 250]
        some.write_parquet(folder / "parquet" / f"{number}.parquet", row_group_size=64)
        some.write_ipc(folder / "arrow" / f"{number}.arrow")
        some.write_csv(folder / "csv" / f"{number}.csv")
    table.write_csv(folder / "table.csv")
    (folder / "table.csv").write_text((folder / "table.csv").read_text() + "\n\n")
    table.write_csv(folder / "packed.csv.gz", compression="gzip")
    table.select("age", pl.col("hours").fill_null(40.0)).write_csv(folder / "numbers.csv")
    write_libsvm(folder / "rows.libsvm")
    return folder


def wide(schema: Schema) -> Schema:
    """Encoded as sparse rows."""
    jobs = (*JOBS, *(f"job {k}" for k in range(40)))
    return schema.with_columns([replace(schema.column("job"), categories=jobs)])


CASES: dict[str, dict[str, Any]] = {
    "parquet": {"schema": SCHEMA},
    "arrow": {"schema": wide(SCHEMA), "class_weight": "balanced"},
    "csv": {"schema": replace(SCHEMA, target="age"), "loss": "squared"},
    "table.csv": {"schema": SCHEMA, "loss": "hinge"},
    "packed.csv.gz": {"schema": SCHEMA, "loss": "hinge"},
    "numbers.csv": {"target": "age", "loss": "squared"},
    "rows.libsvm": {"classes": ("-1", "1")},
}


def fitted(path: Path, cluster: Any, **asked: Any) -> SavedModel:
    told: dict[str, Any] = {"target": None, "epsilon": 4.0, "seed": 3, **asked}
    choices = Choices(steps=5) if asked.get("loss") != "squared" else Choices()
    request = fitting.FitRequest(path, choices=choices, cluster=cluster, **told)
    return fitting.run(fitting.prepare(request))


@pytest.mark.parametrize("name", CASES)
def test_models_are_those_of_one_machine(
    client: Client, tables: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_files, "_LEAST_ROWS", 70)
    monkeypatch.setattr(cluster_files, "_LEAST_BYTES", 3000)
    one, other = (fitted(tables / name, where, **CASES[name]) for where in (None, client))
    assert np.array_equal(one.coef, other.coef)
    assert np.array_equal(one.intercept, other.intercept)
    assert (one.features, one.classes, one.schema) == (other.features, other.classes, other.schema)
    assert one.privacy == other.privacy
    assert one.evaluation == other.evaluation
    assert {**one.made, "at": ""} == {**other.made, "at": ""}


@settings(max_examples=25)
@given(edges=st.lists(st.integers(0, 900), max_size=5))
def test_pieces_of_a_text_are_its_rows(tables: Path, edges: list[int]) -> None:
    file = seen(tables / "table.csv")
    ends = [0, *sorted(set(edges) - {0, 900}), 900]
    parts = [
        RowPiece(file, SCHEMA, first, stop - first, 2 + first)()
        for first, stop in itertools.pairwise(ends)
    ]
    whole = open_table(tables / "table.csv", SCHEMA).examples()
    require_same(joined(parts), whole)


@settings(max_examples=25)
@given(size=st.integers(1, 40_000))
def test_pieces_of_sparse_lines_are_its_rows(tables: Path, size: int) -> None:
    schema, file = libsvm_schema("number"), seen(tables / "rows.libsvm")
    whole = open_table(file.path, schema).examples()
    lines = cut_lines(file, size)
    assert [one.stop for one in lines[:-1]] == [one.first for one in lines[1:]]
    parts = [LinePiece(file, schema, some)() for some in lines]
    require_same(joined([widened(part, whole.shape[1]) for part in parts]), whole)


def seen(path: Path) -> SeenFile:
    stat = path.stat()
    return SeenFile(path, stat.st_size, stat.st_mtime_ns, "")


def require_same(one: Examples, other: Any) -> None:
    assert np.array_equal(one.targets, other.targets, equal_nan=True)
    if isinstance(one.rows, SparseRows):
        pairs = [(getattr(one.rows, k), getattr(other.rows, k)) for k in ("data", "indices")]
        pairs.append((one.rows.indptr, other.rows.indptr))
    else:
        pairs = [(one.rows.array, other.rows.array)]
    assert all(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def test_a_fault_in_a_part_of_a_libsvm_file_names_its_line(tmp_path: Path) -> None:
    path = write_libsvm(tmp_path / "rows.libsvm")
    path.write_text(path.read_text() + "1 3:x\n")
    last = cut_lines(seen(path), 9000)[-1]
    with pytest.raises(ValueError, match="in line 902 of"):
        LinePiece(seen(path), libsvm_schema("number"), last)()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"schema": replace(SCHEMA, columns=(*SCHEMA.columns[:2], Column("job", "category"),
          *SCHEMA.columns[3:]))}, "stated categories with --cluster, found none of 'job'"),
        ({"schema": SCHEMA, "user_column": "day"}, "no column of users with --cluster"),
        ({"schema": SCHEMA, "classes": ("no", "perhaps")}, r"found another one in \d+ rows"),
        ({"schema": SCHEMA, "target": "hours", "loss": "huber", "batch_size": 901},
         "batch_size <= 900"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_before_anything_is_spent(
    client: Client, tables: Path, tmp_path: Path, asked: dict[str, Any], message: str
) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.create("people", 9.0, 1e-5)
    told = {"target": None, "dataset": "people", "ledger": ledger, **asked}
    choices = Choices(batch_size=told.pop("batch_size", None))
    request = fitting.FitRequest(
        tables / "table.csv", epsilon=1.0, cluster=client, choices=choices, **told
    )
    with pytest.raises(ValueError, match=message):
        fitting.prepare(request)
    assert ledger.history("people") == []


def test_training_rows_are_no_table_to_test_on(client: Client, tables: Path) -> None:
    with pytest.raises(ValueError, match="found the training rows"):
        fitted(tables / "parquet", client, schema=SCHEMA, test=tables / "parquet" / "1.parquet")


def test_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    people(60).write_csv(path)
    file = SeenFile.of(path)
    piece = RowPiece(file, SCHEMA, 20, 10, 22)
    first, last = RowPiece(file, SCHEMA, 0, 20, 2), RowPiece(file, SCHEMA, 30, 30, 32)
    require_same(joined([first(), piece(), last()]), open_table(path, SCHEMA).examples())
    os.utime(path, (1, 1))  # the same content on another machine
    assert piece().shape[0] == 10
    path.write_text(path.read_text().replace("cook", "coox"))
    with pytest.raises(ClusterError, match=r"same content in table\.csv during the whole fit"):
        piece()
    path.unlink()
    with pytest.raises(FileNotFoundError, match="that every worker reads at"):
        pieces.files_there(path)


def run(*arguments: object, code: int = 0) -> Any:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_a_budget_is_charged_once_though_a_worker_dies(
    client: Client, cluster: LocalCluster, tables: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The command with and without a cluster: the same model, and the same run in the ledger."""
    monkeypatch.setattr(cluster_files, "_LEAST_BYTES", 3000)
    killed = kill_at(monkeypatch, cluster, 9)
    asked = ["fit", tables / "rows.libsvm", "--classes=-1,1", "-e", 1, "--steps", 20]
    found, planned = [], []
    for name, where in (("alone", []), ("cluster", ["--cluster", cluster.scheduler_address])):
        keys = itertools.count(1)
        # A run that a budget pays takes no seed.
        monkeypatch.setattr(
            "privagrad.privacy.noise.secrets.randbits", lambda bits, keys=keys: next(keys)
        )
        monkeypatch.setenv("PRIVAGRAD_LEDGER", str(tmp_path / name))
        planned.append(run(*asked, "--dry-run", *where))
        ledger = Ledger(tmp_path / name)
        assert not ledger.exists()
        ledger.create("rows", 3.0, 1e-5)
        model = run(*asked, "--dataset", "rows", "-o", tmp_path / f"{name}.model", *where)
        runs = [(entry.state, entry.events) for entry in ledger.history("rows")]
        assert [state for state, _ in runs] == ["reserved", "finished"]
        assert ledger.account("rows").spent <= 1.0
        found.append((model["privacy"], model["evaluation"], runs))
    assert planned[0] == planned[1]
    assert found[0] == found[1]
    assert len(killed) == 1


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tcp://127.0.0.1:9", "Dask scheduler at tcp://127.0.0.1:9, found none that answers"),
        ("nowhere", "address of a Dask scheduler, such as tcp://host:8786, found 'nowhere'"),
    ],
)
def test_addresses_without_a_scheduler(
    tables: Path, monkeypatch: pytest.MonkeyPatch, address: str, message: str
) -> None:
    monkeypatch.setattr(clients, "_SECONDS", 0.2)
    told = run("fit", tables / "rows.libsvm", "-e", 1, "--classes=-1,1", "--dry-run", "--cluster",
               address, code=2)  # fmt: skip
    assert message in told["error"]
    assert "Nothing was spent" in told["error"]


def test_workers_are_there_and_of_this_version(
    lone: tuple[Client, LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = lone[1].scheduler_address
    monkeypatch.setattr(clients, "_SECONDS", 0.5)
    with cluster_at(address) as found:
        assert len(found.nthreads()) == 1
    with monkeypatch.context() as patch:
        patch.setattr(clients, "version_here", lambda: "99.9")
        with pytest.raises(ClusterError, match=r"Expected privagrad 99\.9 on every worker"), (
            cluster_at(address)
        ):  # fmt: skip
            pass
    stop_all(*lone)
    with pytest.raises(ConnectionError, match="Expected workers at the scheduler"), (
        cluster_at(address)
    ):  # fmt: skip
        pass


def test_without_dask(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "dask", None)
        with pytest.raises(ImportError, match=r"pip install 'privagrad\[dask\]'"):
            reload(privagrad.distributed)
