"""Every reader, with files of strangers: a clear refusal or a good read, never anything else.

A refusal is a `ValueError`, `TypeError` or `OSError` that says what was expected: the command line
makes one line of it. A crash ends the test's process, a hang is ended by an alarm.

    make fuzz

tries several thousand times as many files, other ones every time, and prints how many.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import signal
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from privagrad.data.libsvm import libsvm_schema
from privagrad.data.models import load_model, save_model
from privagrad.data.readers import infer_schema, open_table
from privagrad.data.schema import Schema, read_schema
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.ledger import Ledger
from privagrad.report.card import card_text, privacy_card
from privagrad.report.card_check import check_card
from privagrad.report.statement import read_statement, statement_template
from privagrad.torch import PrivacyEngine, journal
from tests.damage import changed, damaged
from tests.torch.small import private

TIMES = int(os.environ.get("PRIVAGRAD_FUZZ_EXAMPLES", "1"))
PATIENCE = 120
"""Seconds for one file of a few kilobytes: far beyond what a slow machine needs."""

MODELS = Path(__file__).parent / "golden" / "files_before_move"
OPTIONS: dict[str, Any] = {"noise_multiplier": 1.0, "poisson_sampling": True, "batch_size": 8}
SCHEMA = """
target = "y"
[file]
separator = ","
[[column]]
name = "x"
low = 0.0
high = 9.0
[[column]]
name = "when"
kind = "date"
[[column]]
name = "who"
kind = "category"
categories = ["a", "b"]
aliases = { "A" = "a" }
[[column]]
name = "y"
kind = "category"
"""


@dataclass(frozen=True)
class Reader:
    """How one kind of file is read, and good files of the kind."""

    name: str
    read: Callable[[Path], object]
    good: Callable[[], list[bytes]]
    json_in: str | None = None
    """The archive's entry that holds JSON; "" if the file itself does."""

    examples: int = 60


@cache
def frame() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    return pl.DataFrame({
        "x": rng.standard_normal(30).round(3),
        "when": [f"2024-01-{1 + k % 28:02}" for k in range(30)],
        "who": [f'a"{k % 3}' if k % 7 == 0 else "b" for k in range(30)],
        "y": rng.integers(0, 2, 30),
    })  # fmt: skip


def written(write: Callable[[io.BytesIO], Any]) -> bytes:
    content = io.BytesIO()
    write(content)
    return content.getvalue()


def csv_files() -> list[bytes]:
    plain = written(lambda file: frame().write_csv(file))
    semicolons = written(lambda file: frame().write_csv(file, separator=";"))
    return [plain, semicolons, plain.decode().encode("utf-16"), b"x,when,who,y\n", b"\n\n"]


def read_table(path: Path) -> object:
    schema = infer_schema(path)
    target = "y" if any(c.name == "y" for c in schema.columns) else schema.columns[-1].name
    return open_table(path, Schema(**{**schema.__dict__, "target": target}))


def read_stated(path: Path) -> object:
    stated = path.with_name("stated.toml")
    if not stated.exists():
        stated.write_text(SCHEMA)
    return open_table(path, read_schema(stated))


def read_libsvm(path: Path) -> object:
    return open_table(path, libsvm_schema("category", ("-1", "1")))


def libsvm_files() -> list[bytes]:
    lines = [f"{1 if k % 3 else -1} 1:{k} 7:0.5 # c\n" for k in range(30)]
    return ["".join(lines).encode()]


def model_files() -> list[bytes]:
    return [path.read_bytes() for path in sorted(MODELS.glob("*.model"))]


def read_model(path: Path) -> object:
    fitted = load_model(path)
    fitted.predict(np.zeros((1, len(fitted.features))))
    save_model(fitted, path)
    return card_text(privacy_card(fitted)), fitted._repr_html_()


def card_files() -> list[bytes]:
    cards = [privacy_card(load_model(path)) for path in sorted(MODELS.glob("*.model"))]
    return [card_text(card).encode() for card in cards]


def read_card(path: Path) -> object:
    found = check_card(path)
    assert all("\n" not in str(finding) for finding in found)
    return found


def checkpoint_files() -> list[bytes]:
    path = Path(os.environ["PRIVAGRAD_FUZZ_FOLDER"]) / "good.pt"
    run = private(engine=PrivacyEngine(), **OPTIONS)
    run.epoch()
    run.engine.save_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
    return [path.read_bytes()]


@cache
def training() -> Any:
    return private(engine=PrivacyEngine(), **OPTIONS)


def read_checkpoint(path: Path) -> object:
    run = training()
    try:
        return run.engine.load_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
    except RuntimeError as error:
        # torch's own words for weights of another model
        if "Error(s) in loading state_dict" in str(error):
            raise ValueError(f"Expected weights that fit, found: {error}") from error
        raise


def read_journal(path: Path) -> object:
    return journal.records(path)


def journal_files() -> list[bytes]:
    path = Path(os.environ["PRIVAGRAD_FUZZ_FOLDER"]) / "journal.pt"
    run = private(engine=PrivacyEngine(), **OPTIONS)
    run.engine.save_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
    run.epoch()
    return [path.with_name("journal.pt.resumed").read_bytes()]


def ledger_files() -> list[bytes]:
    path = Path(os.environ["PRIVAGRAD_FUZZ_FOLDER"]) / "good.db"
    ledger = Ledger(path)
    ledger.create("rows", 2.0, 1e-5, "abc")
    run = ledger.reserve("rows", [GaussianEvent(20.0, 3)], "a run", "abc")
    ledger.finish(run, [GaussianEvent(20.0, 3)])
    return [path.read_bytes()]


def read_ledger(path: Path) -> object:
    for suffix in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    ledger = Ledger(path)
    return [(ledger.account(name).spent, ledger.history(name)) for name in ledger.names()]


def archive(content: bytes, name: str, luck: random.Random) -> bytes:
    """An archive with one of its entries damaged, and its checksums right."""
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(result, "w") as new:
        entries = {entry: old.read(entry) for entry in old.namelist()}
        chosen = luck.choice([name, name, *entries]) if name in entries else luck.choice([*entries])
        if chosen == name:
            entries[name] = json.dumps(changed(json.loads(entries[name]), luck)).encode()
        else:
            entries[chosen] = damaged(entries[chosen], luck, list(entries.values()))
        for entry, value in entries.items():
            new.writestr(entry, value)
    return result.getvalue()


READERS = [
    Reader("t.csv", read_table, csv_files),
    Reader("stated.csv", read_stated, csv_files),
    Reader("t.csv.gz", read_table, lambda: [gzip.compress(content) for content in csv_files()]),
    Reader("t.parquet", read_table, lambda: [written(frame().write_parquet)], examples=40),
    Reader("t.arrow", read_table, lambda: [written(frame().write_ipc)], examples=40),
    Reader("t.libsvm", read_libsvm, libsvm_files, examples=150),
    Reader("schema.toml", read_schema, lambda: [SCHEMA.encode()], examples=150),
    Reader("statement.toml", read_statement, lambda: [statement_template().encode()]),
    Reader("m.model", read_model, model_files, json_in="model.json", examples=40),
    Reader("c.json", read_card, card_files, json_in="", examples=80),
    Reader("c.pt", read_checkpoint, checkpoint_files, json_in="none", examples=25),
    Reader("c.pt.resumed", read_journal, journal_files, examples=150),
    Reader("l.db", read_ledger, ledger_files, examples=60),
]
GOOD: dict[str, list[bytes]] = {}
TRIED: Counter[str] = Counter()
REFUSED: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIVAGRAD_FUZZ_FOLDER", str(found))
        yield found
    for name, count in TRIED.items():
        with open(os.environ.get("PRIVAGRAD_FUZZ_COUNTS", os.devnull), "a") as file:
            file.write(f"{name} {count} {REFUSED[name]}\n")


def stranger(reader: Reader, luck: random.Random) -> bytes:
    if reader.name not in GOOD:
        GOOD[reader.name] = reader.good()
    good = GOOD[reader.name]
    content = luck.choice(good)
    if reader.json_in == "" and luck.random() < 0.7:
        return json.dumps(changed(json.loads(content), luck)).encode()
    if reader.json_in and luck.random() < 0.7:
        return archive(content, reader.json_in, luck)
    return damaged(content, luck, good)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_readers_refuse_or_read(reader: Reader, folder: Path) -> None:
    if TIMES > 1:
        signal.signal(signal.SIGALRM, _too_long)

    @settings(max_examples=reader.examples * TIMES, derandomize=TIMES == 1, database=None)
    @given(seed=st.integers(0, 2**32 - 1))
    def search(seed: int) -> None:
        path = folder / reader.name
        path.write_bytes(stranger(reader, random.Random(seed)))
        if TIMES > 1:
            signal.alarm(PATIENCE)
        TRIED[reader.name] += 1
        try:
            reader.read(path)
        except (ValueError, TypeError, OSError) as error:
            REFUSED[reader.name] += 1
            if not str(error).startswith("Expected"):
                raise AssertionError(f"Expected a clear refusal, found {error!r}.") from error
        finally:
            if TIMES > 1:
                signal.alarm(0)

    search()
    assert REFUSED[reader.name] > 0


def _too_long(*_: object) -> None:
    raise AssertionError(f"Expected an answer within {PATIENCE} s, found none.")
