"""How often the 95 % intervals of the stated noise hold the mean coefficient of repeated fits.

The fits differ in their noise alone. A column is covered if at least 90 % of its intervals,
coefficient ± 1.96 noise, hold the mean of all fits. `ratio` is the median stated noise over the
standard deviation of the fits: the least, the median and the largest over the columns, and how many
columns have more than 3.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from privagrad import fitting
from privagrad.data.models import SavedModel
from privagrad.data.schema import Column, Schema

FITS, ROWS = 100, 20_000
_NUMBERS = (0, 2, 4, 10, 11, 12)


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks coverage")
    parser.add_argument("--fits", type=int, default=FITS, help="fits of each table")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 0.3])
    parser.add_argument("--data-dir", type=Path, help="a folder with adult/adult.data")
    options = parser.parse_args(arguments)
    result: dict[str, object] = {"fits": options.fits}
    with tempfile.TemporaryDirectory(prefix="privagrad-coverage-") as name:
        folder = Path(name)
        tables = [(f"correlation {c}", nearly_equal(c, folder)) for c in (0.99, 0.999)]
        if options.data_dir is not None:
            tables.append(("adult", adult(options.data_dir / "adult" / "adult.data", folder)))
        for label, request in tables:
            for epsilon in options.epsilons:
                found = coverage(replace(request, epsilon=epsilon), options.fits, folder)
                print(label, epsilon, json.dumps(found), flush=True)
                result[f"{label}, epsilon {epsilon:g}"] = found
    return result


def coverage(request: fitting.FitRequest, fits: int, folder: Path) -> dict[str, object]:
    """Coverage of the stated intervals over fits with the seeds 0, 1, ..."""
    job = fitting.prepare(request)
    models: list[SavedModel] = []
    for seed in range(fits):
        again = replace(job, settings=replace(job.settings, random_state=seed))
        models.append(fitting.run(again, folder / f"{seed}.model", progress=False))
    coef = np.array([model.coef.ravel() for model in models])
    noise = np.array([model.coef_noise.ravel() for model in models])
    inside = np.abs(coef - coef.mean(axis=0)) <= 1.96 * noise
    ratio = np.median(noise, axis=0) / coef.std(axis=0, ddof=1)
    return {
        "columns": coef.shape[1],
        "intervals_that_hold": float(inside.mean()),
        "columns_covered": float((inside.mean(axis=0) >= 0.9).mean()),
        "ratio": np.quantile(ratio, [0, 0.5, 1]).tolist(),
        "ratios_above_3": int(np.count_nonzero(ratio > 3)),
    }


def nearly_equal(correlation: float, folder: Path) -> fitting.FitRequest:
    """Eight normal columns, of which the first two have this correlation."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((ROWS, 8))
    X[:, 1] = correlation * X[:, 0] + np.sqrt(1 - correlation**2) * X[:, 1]
    y = X[:, 0] + (X[:, 2] - X[:, 3]) / 2 + rng.logistic(size=ROWS) > 0
    path = folder / f"correlation-{correlation}.csv"
    columns = {f"x{j}": X[:, j] for j in range(8)}
    pl.DataFrame({**columns, "y": y.astype(int)}).write_csv(path)
    target = Column("y", "category", categories=("0", "1"))
    schema = Schema((*(Column(name, missing=False) for name in columns), target), "y")
    return fitting.FitRequest(path, "y", 1.0, schema=schema, seed=0)


def adult(source: Path, folder: Path) -> fitting.FitRequest:
    """The Adult table with all categories stated: 108 columns."""
    table = pl.read_csv(source, has_header=False).drop_nulls()
    table = table.with_columns(pl.col(pl.String).str.strip_chars())
    table = table.rename({old: f"c{j}" for j, old in enumerate(table.columns)})
    numbers = [f"c{j}" for j in _NUMBERS]
    table = table.with_columns(pl.col(numbers).cast(pl.Float64))
    path = folder / "adult.csv"
    table.write_csv(path)
    columns = [
        Column(name, missing=False) if name in numbers
        else Column(name, "category", categories=tuple(sorted(table[name].unique())))
        for name in table.columns
    ]  # fmt: skip
    return fitting.FitRequest(path, "c14", 1.0, schema=Schema(columns=tuple(columns)), seed=0)
