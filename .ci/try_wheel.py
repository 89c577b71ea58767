"""What the wheel promises without any extra. To be run where only the wheel is installed."""

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import privagrad as pg

ROOT = Path(pg.__file__).parent


def run(*words: str) -> str:
    """What the command `privagrad` beside this interpreter prints."""
    command = [str(Path(sys.executable).parent / "privagrad"), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return " ".join(done.stdout.split())


def refusal(use: Callable[[], Any]) -> str:
    try:
        return str(use())
    except ImportError as error:
        return str(error)


def read_a_table() -> str:
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "rows.csv")
        table.write_text("x,y\n1,0\n2,1\n")
        return run("schema", str(table), "--target", "y")


def draw_a_plot() -> Any:
    return importlib.import_module("privagrad.experiments.plots").figure(1, 4.0, 3.0)


assert "site-packages" in ROOT.parts, f"Expected the installed wheel, found {ROOT}."
assert (ROOT / "py.typed").exists()
assert "Usage: privagrad" in run("--help")
assert "CREATE SCHEMA" in run("budget", "setup", "--print")

former = sorted(path.stem for path in (ROOT / "_former_paths").glob("*.py"))
assert "ledger" in former
for name in former:
    importlib.import_module(f"privagrad.{name}")

X = np.random.default_rng(0).standard_normal((2000, 3))
result = pg.minimize(
    "absolute", X, X.sum(axis=1), method="pagan", epsilon=1.0, delta=1e-5,
    domain=pg.Box(-1, 1), batch_size=20, steps=20,
)  # fmt: skip
assert np.isfinite(result.x).all()
pg.PrivateLogisticRegression(epsilon=1.0, delta=1e-5).fit(X, X[:, 0] > 0)

for extra, use in {
    "torch": lambda: importlib.import_module("privagrad.torch"),
    "tables": read_a_table,
    "plots": draw_a_plot,
    "postgres": lambda: run("budget", "list", "--ledger", "postgresql://ann@db/ledger"),
}.items():
    shown = refusal(use)
    assert f"privagrad[{extra}]" in shown, f"Expected the extra {extra} to be named, found: {shown}"

print(f"privagrad {pg.__version__} works on Python {sys.version.split()[0]} without extras")
