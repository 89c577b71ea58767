"""The doors for people with a table: `privagrad fit` and the estimator, side by side.

Both fit the same rows under the same schema; "command, open" is the command with a schema that
leaves bounds and categories to be learned. Beside them stand the same linear model without
privacy, and the constant. Figures are those of held-out rows, means over seeds of rows and noise.

Goals: log losses of both doors within 2 % of each other and below the constant's; an AUC within
0.01 of that without privacy at epsilon 1. The calibration error of a constant is next to 0, which
no model that says more can reach: compare with the model without privacy.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from scipy.special import expit
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from sklearn.preprocessing import StandardScaler

import privagrad as pg
from benchmarks._people import People, adult, credit, hospital
from privagrad import fitting
from privagrad.data.columns import Schema
from privagrad.data.readers import chunks

ROWS, HELD_OUT, EPSILONS = 20_000, 10_000, (1.0, 0.3)
COMMAND, OPEN, ESTIMATOR, NOT_PRIVATE, CONSTANT = (
    "command", "command, open", "estimator", "without privacy", "constant",
)  # fmt: skip
_BINS = 10

Split = tuple[People, People]
Figures = dict[str, float]


def tables(folder: Path) -> Iterator[tuple[str, Callable[[int], Split]]]:
    if (folder / "adult").is_dir():
        yield "adult", lambda _: adult(folder / "adult")
    else:
        print(f"Without adult: found no folder adult in {folder}.", flush=True)
    for generate in (credit, hospital):
        yield generate.__name__, partial(_generated, generate)


def _generated(generate: Callable[[int, int], People], seed: int) -> Split:
    return generate(ROWS + HELD_OUT, seed).split(ROWS)


def command_door(files: tuple[Path, Path], schema: Schema, epsilon: float, seed: int) -> Any:
    """Probabilities that the model of `privagrad fit` gives the held-out rows."""
    train, test = files
    request = fitting.FitRequest(train, None, epsilon, schema=schema, seed=seed)
    model = fitting.run(fitting.prepare(request), train.with_suffix(".model"), progress=False)
    return np.concatenate([expit(model.margins(rows.X)[:, 0]) for rows in model.rows(test)])


def estimator_door(files: tuple[Path, Path], schema: Schema, epsilon: float, seed: int) -> Any:
    """Probabilities that the estimator gives the held-out rows: of encoded columns, no schema.

    With `schema=` it would be the command's model to the last bit (tests/estimators/test_doors.py).
    """
    (X, y), (X_test, _) = (encoded(path, schema) for path in files)
    model = pg.PrivateLogisticRegression(epsilon, classes=[0, 1], random_state=seed)
    return model.fit(filled(X, schema), y).predict_proba(filled(X_test, schema))[:, 1]


def opened(schema: Schema) -> Schema:
    """The same schema as a hurried user leaves it: nothing is stated but kinds and labels."""
    columns = (
        replace(c, low=None, high=None, missing=None, categories=()) for c in schema.features
    )
    return schema.with_columns(columns)


def encoded(path: Path, schema: Schema) -> tuple[Any, Any]:
    """All rows in the columns that the schema states, NaN where blank, and their labels."""
    parts = list(chunks(path, schema, target=True))
    stack = sparse.vstack if hasattr(parts[0].X, "tocsr") else np.vstack
    labels = np.concatenate([np.asarray(rows.y) for rows in parts])
    return stack([rows.X for rows in parts]), labels.astype(int)


def filled(X: Any, schema: Schema) -> Any:
    """Blanks as the middle of public bounds, or as 0, which columns of their own tell apart."""
    middles = []
    for part in schema.encoded:
        if part.kind == "category":
            middles += [0.0] * len(part.categories)
            continue
        known = part.low is not None and part.high is not None
        middles.append((part.low + part.high) / 2 if known else 0.0)  # type: ignore[operator]
        middles += [0.0] * (part.missing is None)
    return _filled(X, np.array(middles))


def _filled(X: Any, values: Any) -> Any:
    if not hasattr(X, "tocsr"):
        return np.where(np.isnan(X), values, X)
    X = X.tocsr().copy()
    blank = np.isnan(X.data)
    X.data[blank] = values[X.indices[blank]]
    return X


def not_private(files: tuple[Path, Path], schema: Schema) -> Any:
    """Probabilities of scikit-learn's model of the same columns, standardised."""
    (X, y), (X_test, _) = (encoded(path, schema) for path in files)
    X, X_test = (M.toarray() if hasattr(M, "tocsr") else M for M in (X, X_test))
    means = np.nanmean(X, axis=0)
    scaler = StandardScaler().fit(_filled(X, means))
    model = LogisticRegression(max_iter=2000).fit(scaler.transform(_filled(X, means)), y)
    return model.predict_proba(scaler.transform(_filled(X_test, means)))[:, 1]


def figures(y: Any, chances: Any) -> Figures:
    """Log loss, calibration error, AUC and accuracy of probabilities of 1."""
    return {
        "log_loss": float(log_loss(y, chances)),
        "ece": calibration_error(y, chances),
        "auc": float(roc_auc_score(y, chances)),
        "accuracy": float(accuracy_score(y, chances > 0.5)),
    }


def calibration_error(y: Any, chances: Any) -> float:
    """Mean distance of probabilities from frequencies, in ten bins of equal width."""
    bins = np.minimum((chances * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, chances - y, _BINS)
    return float(np.abs(gaps).sum() / len(y))


def measure(split: Split, seed: int, folder: Path) -> dict[tuple[str, float | None], Figures]:
    """The figures of all contestants on one split, by name and epsilon."""
    train, test = split
    files = train.write(folder / "train.csv"), test.write(folder / "test.csv")
    schema = train.schema
    y, y_test = (encoded(path, schema)[1] for path in files)
    chances: dict[tuple[str, float | None], Any] = {
        (CONSTANT, None): np.full(len(y_test), y.mean()),
        (NOT_PRIVATE, None): not_private(files, schema),
    }
    for epsilon in EPSILONS:
        chances[COMMAND, epsilon] = command_door(files, schema, epsilon, seed)
        chances[OPEN, epsilon] = command_door(files, opened(schema), epsilon, seed)
        chances[ESTIMATOR, epsilon] = estimator_door(files, schema, epsilon, seed)
    return {who: figures(y_test, found) for who, found in chances.items()}


def summary(runs: list[dict[tuple[str, float | None], Figures]]) -> list[dict[str, Any]]:
    """Means and standard deviations over seeds, a record for each contestant."""
    records = []
    for who, epsilon in runs[0]:
        record: dict[str, Any] = {"contestant": who, "epsilon": epsilon}
        for name in runs[0][who, epsilon]:
            values = [run[who, epsilon][name] for run in runs]
            record[name] = float(np.mean(values))
            record[f"{name}_sd"] = float(np.std(values))
        records.append(record)
    return records


def goals(records: list[dict[str, Any]]) -> dict[str, Any]:
    """How far the doors are from each other, from the constant and from no privacy."""
    found = {(r["contestant"], r["epsilon"]): r for r in records}
    best, constant, told = found[NOT_PRIVATE, None], found[CONSTANT, None], {}
    for epsilon in EPSILONS:
        doors = [found[COMMAND, epsilon], found[ESTIMATOR, epsilon]]
        losses, errors = ([door[name] for door in doors] for name in ("log_loss", "ece"))
        told[f"{epsilon:g}"] = {
            "log_losses_apart": max(losses) / min(losses) - 1,
            "calibration_errors_apart": max(errors) - min(errors),
            "below_constant": max(losses) < constant["log_loss"],
            "calibration_error_lost": {d["contestant"]: d["ece"] - best["ece"] for d in doors},
            "auc_lost": {door["contestant"]: best["auc"] - door["auc"] for door in doors},
            "log_loss_lost": {d["contestant"]: d["log_loss"] - best["log_loss"] for d in doors},
        }
    return told


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks doors")
    parser.add_argument("--data-dir", type=Path, required=True, help="has the folder adult")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="tables whose names contain this")
    options = parser.parse_args(arguments)
    result: dict[str, object] = {"seeds": options.seeds}
    for name, split in tables(options.data_dir):
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="privagrad-doors-") as folder:
            runs = [measure(split(seed), seed, Path(folder)) for seed in range(options.seeds)]
        records = summary(runs)
        for record in records:
            print(line(name, record), flush=True)
        result[name] = {"contestants": records, "goals": goals(records)}
        print(name, goals(records), flush=True)
    return result


def line(table: str, record: dict[str, Any]) -> str:
    epsilon = "none" if record["epsilon"] is None else f"{record['epsilon']:g}"
    cells = (f"{name} {record[name]:.4f} ± {record[name + '_sd']:.4f}"
             for name in ("log_loss", "ece", "auc", "accuracy"))  # fmt: skip
    return f"{table:9} {epsilon:5} {record['contestant']:16} " + "  ".join(cells)
