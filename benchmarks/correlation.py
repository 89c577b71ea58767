"""Correlated against independent noise: equal budgets, equal grids of step sizes, several seeds.

`python -m benchmarks correlation --data-dir DIR [--problems ...] [--out FILE]`: DIR has the folders
`a9a` and `mnist`. Every finished run is a line of FILE and is not made again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import privagrad as pg
from privagrad.data.readers import read_table
from privagrad.experiments.problems import absolute_regression
from privagrad.privacy.bands import Correlation

DELTA = 1e-5


@dataclass(frozen=True)
class Task:
    """A problem, how it is minimised, and how good a point is: less is better.

    `sizes` are the step sizes that are tried, `correlation` the other noise.
    """

    loss: str
    X: Any
    y: Any
    score: Callable[[Any], float]
    options: dict[str, Any]
    sizes: Sequence[float]
    correlation: Correlation = "auto"


def paper(_: Path) -> Task:
    """Section 5.1 with PAGAN; the score is the mean absolute error above that of the signs of the
    least squares, the true x, in millionths."""
    X, y, sigma = absolute_regression()
    best = float(np.abs(X @ np.sign(np.linalg.lstsq(X, y, rcond=None)[0]) - y).mean())
    options = {
        "method": "pagan", "batch_size": 70, "steps": 2000, "domain": pg.Box(-1, 1),
        "ellipsoid": pg.Ellipsoid(sigma ** (-4 / 3), 2.0),
    }  # fmt: skip
    return Task(
        "absolute", X, y, lambda x: 1e6 * (float(np.abs(X @ x - y).mean()) - best), options,
        (0.1, 0.2, 0.4, 0.8, 1.6), 16,
    )  # fmt: skip


def paper_sgd(folder: Path) -> Task:
    """The same with DP-SGD."""
    task = paper(folder)
    options = {**task.options, "method": "dp-sgd", "ellipsoid": pg.Ellipsoid.ball(100, 1.0)}
    return replace(task, options=options, sizes=(0.5, 1.0, 2.0, 4.0), correlation="auto")


def adult(folder: Path) -> Task:
    """Logistic regression on a9a with samples; the score is the error on the test set, in %."""
    X, y, *_ = read_table(folder / "a9a" / "a9a", None)
    test, truth, *_ = read_table(folder / "a9a" / "a9a.t", None)
    columns = min(X.shape[1], test.shape[1])
    X, test = X[:, :columns], test[:, :columns]
    options = {
        "method": "dp-sgd", "batch_size": 1000, "steps": 500,
        "ellipsoid": pg.Ellipsoid.ball(columns, 1.0),
    }  # fmt: skip
    positive = np.asarray(truth) > 0
    return Task(
        "logistic", X, y, lambda x: 100 * float(((test @ x > 0) != positive).mean()), options,
        (4.0, 8.0, 16.0, 32.0),
    )  # fmt: skip


def mnist(folder: Path) -> Task:
    """A linear model on pixels with samples; the score is the error on the test set, in %."""
    with np.load(next((folder / "mnist").glob("*.npz"))) as file:
        images = {name: file[name] for name in file.files}

    def rows(name: str) -> Any:
        pixels = images[name].reshape(len(images[name]), -1) / 255.0 - 0.13
        return np.hstack([pixels / 8.6, np.full((len(pixels), 1), 0.3)])

    X, test = rows("x_train"), rows("x_test")
    dim = 10 * X.shape[1]

    def score(x: Any) -> float:
        found = (test @ x.reshape(10, -1).T).argmax(axis=1)
        return 100 * float((found != images["y_test"]).mean())

    options = {
        "method": "dp-sgd", "batch_size": 1000, "steps": 600,
        "ellipsoid": pg.Ellipsoid.ball(dim, 1.0),
    }  # fmt: skip
    return Task(
        "softmax", X, images["y_train"].astype(np.int64), score, options, (32.0, 64.0, 128.0, 256.0)
    )


PROBLEMS: dict[str, Callable[[Path], Task]] = {
    "paper": paper,
    "paper-sgd": paper_sgd,
    "a9a": adult,
    "mnist": mnist,
}


def made(
    name: str, task: Task, epsilons: Sequence[float], seeds: int, known: set[str]
) -> Iterator[dict[str, Any]]:
    """All runs that are not known yet."""
    for epsilon in epsilons:
        correlations: tuple[Correlation | None, ...] = (None, task.correlation)
        for correlation in correlations:
            for size in task.sizes:
                for seed in range(seeds):
                    key = f"{name} {epsilon:g} {correlation} {size:g} {seed}"
                    if key in known:
                        continue
                    start = time.perf_counter()
                    found = pg.minimize(
                        task.loss, task.X, task.y, epsilon=epsilon, delta=DELTA, step_size=size,
                        schedule="linear", random_state=seed, threads=1, progress=False,
                        correlation=correlation, **task.options,
                    )  # fmt: skip
                    event: Any = found.privacy.events[-1]
                    yield {
                        "key": key, "problem": name, "epsilon": epsilon, "step_size": size,
                        "correlation": correlation, "bands": event.bands, "seed": seed,
                        "score": task.score(found.x), "seconds": time.perf_counter() - start,
                    }  # fmt: skip


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each problem, budget and noise the step size with the best mean, and its spread."""
    groups: dict[tuple[Any, ...], dict[float, list[dict[str, Any]]]] = {}
    for run in runs:
        place = run["problem"], run["epsilon"], run["correlation"]
        groups.setdefault(place, {}).setdefault(run["step_size"], []).append(run)
    table = []
    for (problem, epsilon, correlation), by_size in groups.items():
        means = {size: float(np.mean([r["score"] for r in own])) for size, own in by_size.items()}
        best = min(means, key=lambda size: means[size])
        scores = [r["score"] for r in by_size[best]]
        table.append(
            {
                "problem": problem, "epsilon": epsilon, "correlation": correlation,
                "bands": by_size[best][0]["bands"], "step_size": best, "mean": means[best],
                "deviation": float(np.std(scores, ddof=1)), "seeds": len(scores),
                "seconds": float(np.mean([r["seconds"] for r in by_size[best]])),
                "means": means,
            }
        )  # fmt: skip
    return table


def run(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks correlation", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0, 8.0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("correlation.jsonl"))
    given = parser.parse_args(arguments)
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    runs = [json.loads(line) for line in lines]
    for name in given.problems:
        task = PROBLEMS[name](given.data_dir)
        known = {one["key"] for one in runs}
        for one in made(name, task, given.epsilons, given.seeds, known):
            runs.append(one)
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(one) + "\n")
    table = summary(runs)
    for row in table:
        print(
            f"{row['problem']:10} {row['epsilon']:4g} {row['correlation']!s:5} b={row['bands']:2} "
            f"step {row['step_size']:g}: {row['mean']:.4f} ± {row['deviation']:.4f}"
        )
    return {"delta": DELTA, "table": table}
