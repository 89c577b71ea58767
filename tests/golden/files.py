"""Files of earlier versions: how they were written, and what a version says of them.

    PYTHONPATH=SRC python -m tests.golden.files write FOLDER       # by the version in SRC
    PYTHONPATH=SRC python -m tests.golden.files read FOLDER NAME   # what that version says of them

`files_0_1_0` was written by commit 03e9031, the last one of version 0.1.0, and `files_before_move`
by commit 74d086f, before the source was restructured. `said_before_move.json` is what commit
74d086f said of the files in a folder, but for the outputs after one more epoch, which depend on the
noise of a seed; `said_by_writer.json` is what version 0.1.0 said of its own.
Files cannot be written again with the same content: runs that a budget pays take no seed.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from privagrad.events import Event, ObjectiveEvent, SelectEvent
from privagrad.ledger import Ledger
from privagrad.models import load_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import privagrad as pg
from privagrad.torch import PrivacyEngine
from tests.golden import commands
from tests.golden.deep import adagrad, seeded, summary, train

Said = dict[str, Any]

HERE = Path(__file__).parent
FOLDERS = ("files_0_1_0", "files_before_move")
LEDGER, PEOPLE, LIBSVM = "ledger.db", "people.model", "libsvm.model"
CHECKPOINTS = {"ball": "ball.pt", "pagan": "pagan.pt"}
QUERY = pg.GaussianEvent(10.0, 2, purpose="moments")
TRAINING = pg.GaussianEvent(2.0, 50, "poisson", 10_000, 100, "gradients")
FIXED = pg.GaussianEvent(4.0, 20, "without_replacement", 10_000, 100, "gradients")
NEW_PEOPLE = "age,hours,job\n30,42.5,cook\n61,38,poet\n45,20,baker\n"
NEW_ROWS = "+1 1:0.5 3:-1\n-1 2:2 6:0.25\n+1 1:-1 4:1 5:1\n"


def write(folder: Path) -> None:
    """Write all files with whatever version of privagrad is imported."""
    folder.mkdir(parents=True)
    ledger = Ledger(folder / LEDGER)
    _write_models(folder)
    ledger.create("steps", 4.0, 1e-5, "sha256:steps")
    ledger.finish(ledger.reserve("steps", [QUERY, TRAINING], "a training"), [QUERY, TRAINING])
    ledger.finish(ledger.reserve("steps", [QUERY, TRAINING], "stopped before its end"), [QUERY])
    ledger.reserve("steps", [TRAINING], "died while it ran")
    ledger.release(ledger.reserve("steps", [QUERY], "never began"), "the machine was off")
    # By the name that the writing version has for the relation.
    named = replace(QUERY, purpose="means", under=pg.PrivacyPlan((TRAINING,)).relation)
    ledger.finish(ledger.reserve("steps", [named], "a query by its relation"), [named])
    ledger.create("selections", 6.0, 1e-5)
    select = SelectEvent((named, TRAINING), 3.0)
    ledger.finish(ledger.reserve("selections", [select], "a search"), [select])
    ledger.finish(ledger.reserve("selections", [TRAINING], "after the search"), [TRAINING])
    ledger.create("objectives", 4.0, 1e-5)
    cover = pg.GaussianEvent(200.0, purpose="solver tolerance")
    objective: list[Event] = [cover, ObjectiveEvent(5.0, 0.2)]
    ledger.finish(ledger.reserve("objectives", objective, "a minimiser"), objective)
    ledger.create("fixed batches", 4.0, 1e-5)
    ledger.finish(ledger.reserve("fixed batches", [FIXED], "fixed batches"), [FIXED])
    for kind, name in CHECKPOINTS.items():
        _write_checkpoint(folder / name, kind)


def _write_models(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        people, rows = Path(place) / "people.csv", Path(place) / "rows.libsvm"
        schema, ledger = Path(place) / "schema.toml", folder / LEDGER
        commands.write_people(people)
        commands.write_libsvm(rows)
        schema.write_text(commands.SCHEMA, encoding="utf-8")
        paid = ("--dataset", "people", "--ledger", ledger)
        for name, file in (("people", people), ("rows", rows)):
            budget = ("--epsilon", 5, "--delta", 1e-5, "--file", file, "--ledger", ledger)
            commands.command("budget", "create", name, *budget)
        fit = ("fit", people, "--schema", schema, "-e", 2)
        commands.command(*fit, *paid, "-o", folder / PEOPLE)
        paid = ("--dataset", "rows", "--ledger", ledger)
        commands.command("fit", rows, "-e", 2, "--classes=-1,1", *paid, "-o", folder / LIBSVM)


class Training:
    """A small private training of the same kind in every version."""

    def __init__(self, kind: str) -> None:
        with seeded(40):
            self.model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
            self.inputs = torch.randn(64, 5)
            data = TensorDataset(self.inputs, torch.randint(0, 3, (64,)))
        self.engine = PrivacyEngine()
        self.module, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=adagrad(self.model.parameters()),
            data_loader=DataLoader(data, batch_size=16),
            noise_multiplier=1.5,
            max_grad_norm=1.0,
            ellipsoid=None if kind == "ball" else "pagan",
            random_state=41,
        )

    def epoch(self) -> None:
        train(self.module, self.optimizer, self.loader)

    def save(self, path: Path) -> None:
        self.engine.save_checkpoint(path=path, module=self.module, optimizer=self.optimizer)

    def load(self, path: Path) -> None:
        self.engine.load_checkpoint(path=path, module=self.module, optimizer=self.optimizer)

    def outputs(self) -> Said:
        with torch.no_grad():
            return summary(self.model(self.inputs[:3]))


def _write_checkpoint(path: Path, kind: str) -> None:
    """Five epochs, beyond the step that learns an ellipsoid; then one more from the checkpoint.

    What was released after saving is kept in the file beside it, which a later run has to count.
    """
    with seeded(42):
        training = Training(kind)
        for _ in range(5):
            training.epoch()
        training.save(path)
        training.epoch()


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """A copy to open: opening a ledger or going on from a checkpoint writes to them."""
    with tempfile.TemporaryDirectory() as place:
        yield Path(shutil.copytree(folder, Path(place) / "files"))


def read(folder: Path) -> Said:
    """What the present code says of the files in a folder; it may write to them."""
    return {
        "ledger": _read_ledger(folder / LEDGER),
        "models": {
            PEOPLE: _read_model(folder / PEOPLE, "new.csv", NEW_PEOPLE),
            LIBSVM: _read_model(folder / LIBSVM, "new.libsvm", NEW_ROWS),
        },
        "checkpoints": {
            kind: _read_checkpoint(folder / name, kind) for kind, name in CHECKPOINTS.items()
        },
    }


def _read_ledger(path: Path) -> Said:
    ledger = Ledger(path)
    said = {}
    for name in sorted(ledger.names()):
        account = ledger.account(name)
        said[name] = {
            "epsilon": account.epsilon,
            "delta": account.delta,
            "fingerprint": account.fingerprint,
            "spent": account.spent,
            "left": account.epsilon - account.spent,
            "spent with one more": account.spent_with([FIXED if "fixed" in name else QUERY]),
            "runs": [
                {"name": run.name, "state": run.state, "note": run.note, "at": run.at,
                 "alone": pg.PrivacyPlan(run.events).epsilon(account.delta),
                 "releases": sum(event.count for event in run.events)}
                for run in account.runs
            ],
            "states": [entry.state for entry in ledger.history(name)],
        }  # fmt: skip
    return said


def _read_model(path: Path, name: str, rows: str) -> Said:
    model = load_model(path)
    with tempfile.TemporaryDirectory() as place:
        table, out = Path(place) / name, Path(place) / "predictions.csv"
        table.write_text(rows, encoding="utf-8")
        commands.command("predict", path, table, "--probabilities", "-o", out)
        predictions = [line.split(",") for line in out.read_text(encoding="utf-8").split()[-3:]]
    return {
        "coef": model.coef.tolist(),
        "intercept": model.intercept.tolist(),
        "coef_noise": model.coef_noise.tolist(),
        "features": model.features,
        "classes": model.classes,
        "loss": model.loss,
        "epsilon": model.privacy["epsilon"],
        "delta": model.privacy["delta"],
        "relation": model.privacy["relation"],
        "dataset": model.made["dataset"],
        "run": model.made["run"],
        "score": model.evaluation["score"],
        "labels": [label for label, *_ in predictions],
        "probabilities": [[float(p) for p in row] for _, *row in predictions],
    }


def _read_checkpoint(path: Path, kind: str) -> Said:
    with seeded(43):
        training = Training(kind)
        training.load(path)
        said = _state(training)
        training.epoch()
        return {"loaded": said, "after one more epoch": _state(training)}


def _state(training: Training) -> Said:
    report = training.engine.report(1e-5)
    return {
        "outputs": training.outputs(),
        "epsilon": training.engine.get_epsilon(1e-5),
        "releases": sum(event.count for event in report.events),
        "seeded": report.seeded,
    }


def main() -> None:
    what, folder = sys.argv[1], HERE / sys.argv[2]
    if what == "write":
        write(folder)
    else:
        with copied(folder) as copy:
            said = json.dumps(read(copy), indent=1)
        (folder / sys.argv[3]).write_text(said + "\n", encoding="utf-8")
    print(f"{what} {folder} with {Path(pg.__file__).parent}")


if __name__ == "__main__":
    main()
