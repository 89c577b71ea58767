"""Measured rates of the theorems: excess loss against n, d, epsilon and the decay of σ.

PAGAN on the box [-1, 1]^d and PASAN on the Euclidean unit ball minimise the objective of the lower
bounds, F(x; z) = ⟨x, z⟩ with |z_j| ≤ σ_j = j^-decay. σ is public, the scale is optimal, and the
radius is the largest norm of such rows. The bounds hold for the worst rows: as in the proof of
Theorem 4, z_j = ±σ_j with means as large as the noise, `hardness` times B C_jj^{-1/2}/(nε). The
worst of several hardnesses is reported.

The measured slope in epsilon is about -0.9 instead of -1: the noise multiplier that (ε, δ) needs is
smaller than sqrt(2 log(1/δ))/ε, and the difference shrinks as epsilon grows.

Every batch is the whole sample. With the T = (n/b)² steps of b rows in Lemma 1, sampling adds
√b Σσ/n to the noise, which is a slower rate in n unless b is constant.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from privagrad import Box, Ellipsoid, L2Ball, minimize, theory
from privagrad._internal.validate import Vector
from privagrad.experiments import DELTA, write_csv
from privagrad.experiments.plots import COLOURS, draw_band, figure, save
from privagrad.geometry.domains import Domain

METHODS = ("pagan", "pasan")
DOMAINS: dict[str, Domain] = {"pagan": Box(-1, 1), "pasan": L2Ball(1.0)}
THEOREMS = {"pagan": (2, 4), "pasan": (1, 5)}
LABELS = {"n": "rows n", "dim": "dimension d", "epsilon": "epsilon", "decay": "decay of σ"}


@dataclass(frozen=True)
class Problem:
    """One point at which the excess loss is measured."""

    n: int = 4000
    dim: int = 32
    epsilon: float = 1.0
    decay: float = 1.0

    @property
    def sigma(self) -> Vector:
        sigma: Vector = np.arange(1, self.dim + 1, dtype=np.float64) ** -self.decay
        return sigma

    def ellipsoid(self, method: str) -> Ellipsoid:
        """The method's optimal scale, and the norm of a row with |z_j| = σ_j as radius."""
        scale = theory.optimal_scale(self.sigma, method)
        return Ellipsoid(scale, float(np.linalg.norm(np.sqrt(scale) * self.sigma)))

    def means(self, method: str, hardness: float) -> Vector:
        """`hardness` times the smallest means that the noise does not hide, at most σ."""
        detectable = self.ellipsoid(method).noise_std / (self.n * self.epsilon)
        means: Vector = np.minimum(hardness * detectable, self.sigma)
        return means

    def rows(self, method: str, hardness: float, seed: int) -> Vector:
        """±σ_j in random order; the means have random signs and are exact up to one row."""
        rng = np.random.default_rng(seed)
        heads = np.rint(self.n * (1 + self.means(method, hardness) / self.sigma) / 2)
        signs = np.where(np.arange(self.n)[:, None] < heads, 1.0, -1.0)
        rows: Vector = rng.permuted(signs, axis=0) * rng.choice([-1.0, 1.0], self.dim) * self.sigma
        return rows


@dataclass(frozen=True)
class Size:
    """How much is measured: values of n, d, epsilon and decay, hardnesses, seeds and steps."""

    base: Problem
    values: dict[str, tuple[float, ...]]
    hardness: tuple[float, ...]
    seeds: int
    steps: int
    workers: int


FULL = Size(
    Problem(),
    {
        "n": (250, 500, 1000, 2000, 4000, 8000),
        "dim": (4, 8, 16, 32, 64, 128),
        "epsilon": (0.125, 0.25, 0.5, 1.0, 2.0),
        "decay": (0.25, 0.5, 1.0, 1.5, 2.0),
    },
    hardness=(4.0, 8.0, 16.0, 32.0),
    seeds=7,
    steps=400,
    workers=2,
)
QUICK = Size(
    Problem(n=1000, dim=16),
    {
        "n": (250, 1000, 4000),
        "dim": (4, 16, 64),
        "epsilon": (0.25, 1.0, 2.0),
        "decay": (0.5, 1.0, 2.0),
    },
    hardness=(8.0, 16.0),
    seeds=3,
    steps=200,
    workers=1,  # starting processes would take longer
)


class Point(NamedTuple):
    """A line of rates.csv: median and quartiles over seeds, upper and lower bound."""

    varied: str
    value: float
    method: str
    excess: float
    low: float
    high: float
    upper: float
    lower: float


class Slope(NamedTuple):
    """Slope of log excess loss against the log of what varies, by least squares.

    `predicted` is the slope of the privacy term of the upper bound.
    """

    varied: str
    method: str
    measured: float
    predicted: float


class Outcome(NamedTuple):
    """What was measured, and the files that were written."""

    points: list[Point]
    slopes: list[Slope]
    files: list[Path]


_Task = tuple[Problem, str, float]
"""A problem, a method and a hardness."""


def run(out: Path, quick: bool = False) -> Outcome:
    """Measure; write rates.csv, rates.json, rates.png and rates.svg into `out`.

    The noise is seeded, so that the figures can be repeated: the results are not private.
    """
    size = QUICK if quick else FULL
    settings = [
        (varied, value, method, replace(size.base, **{varied: value}))  # type: ignore[arg-type]
        for varied, values in size.values.items()
        for value, method in product(values, METHODS)
    ]
    measured = _measure(size, {(problem, method) for _, _, method, problem in settings})
    points, privacy = [], []
    for varied, value, method, problem in settings:
        hardness, excesses = measured[problem, method]
        bound, lower = _bounds(problem, method, hardness, size.steps)
        low, middle, high = np.quantile(excesses, [0.25, 0.5, 0.75]).tolist()
        points.append(Point(varied, value, method, middle, low, high, bound.total, lower))
        privacy.append(bound.privacy)
    slopes = _slopes(points, privacy)
    hardest = Counter(hardness for hardness, _ in measured.values())
    table = write_csv(out / "rates.csv", Point._fields, points)
    settings_file = _write_json(size, slopes, hardest, out)
    return Outcome(points, slopes, [table, settings_file, *_draw(points, out)])


def _measure(
    size: Size, wanted: Collection[tuple[Problem, str]]
) -> dict[tuple[Problem, str], tuple[float, Vector]]:
    """The hardness with the largest median excess loss over seeds, and the losses there."""
    tasks = [(*key, hardness) for key, hardness in product(wanted, size.hardness)]
    tasks.sort(key=lambda task: task[0].n * task[0].dim, reverse=True)
    work = partial(_excesses, size)
    if size.workers == 1:
        measured = list(map(work, tasks))
    else:
        with ProcessPoolExecutor(size.workers, mp_context=get_context("spawn")) as pool:
            measured = list(pool.map(work, tasks, chunksize=2))
    worst: dict[tuple[Problem, str], tuple[float, Vector]] = {}
    for (problem, method, hardness), excesses in zip(tasks, measured, strict=True):
        key = problem, method
        if key not in worst or np.median(excesses) > np.median(worst[key][1]):
            worst[key] = hardness, excesses
    return worst


def _excesses(size: Size, task: _Task) -> Vector:
    """f(average) - min f for each seed."""
    problem, method, hardness = task
    excesses = []
    for seed in range(size.seeds):
        rows = problem.rows(method, hardness, seed)
        result = minimize(
            "linear",
            rows,
            method=method,
            epsilon=problem.epsilon,
            delta=DELTA,
            ellipsoid=problem.ellipsoid(method),
            domain=DOMAINS[method],
            batch_size=problem.n,
            steps=size.steps,
            random_state=seed,
            progress=False,
            threads=1,
        )
        mean = rows.mean(axis=0)
        # The minimum is minus the dual norm of the domain's.
        least = -np.linalg.norm(mean, 1 if method == "pagan" else 2)
        excesses.append(result.average @ mean - least)
    return np.array(excesses)


def _bounds(
    problem: Problem, method: str, hardness: float, steps: int
) -> tuple[theory.Bound, float]:
    """The upper bound (Theorem 1 or 2 at p = ∞) and the lower bound (Theorem 4 or 5)."""
    upper = theory.pagan_bound if method == "pagan" else theory.pasan_bound
    lower = theory.box_lower_bound if method == "pagan" else theory.ball_lower_bound
    n, epsilon, ellipsoid = problem.n, problem.epsilon, problem.ellipsoid(method)
    # No row is projected, and the gradient of the whole sample is its mean.
    sigma, moment = problem.means(method, hardness), ellipsoid.radius
    setting = (DOMAINS[method], n, epsilon, DELTA, steps)
    return upper(sigma, ellipsoid, moment, np.inf, *setting), lower(problem.sigma, n, epsilon)


def _slopes(points: list[Point], privacy: list[float]) -> list[Slope]:
    slopes = []
    for method, varied in product(METHODS, LABELS):
        chosen = [
            (point.value, point.excess, predicted)
            for point, predicted in zip(points, privacy, strict=True)
            if (point.method, point.varied) == (method, varied)
        ]
        value, excess, predicted = np.log(np.array(chosen)).T
        fits = (float(np.polyfit(value, y, 1)[0]) for y in (excess, predicted))
        slopes.append(Slope(varied, method, *fits))
    return slopes


def _write_json(size: Size, slopes: list[Slope], hardest: Counter[float], out: Path) -> Path:
    path = out / "rates.json"
    settings = {**asdict(size), "delta": DELTA, "batch_size": "n", "random_state": "seeded"}
    content = {
        "settings": settings,
        "slopes": [slope._asdict() for slope in slopes],
        "hardest": {f"{hardness:g}": count for hardness, count in sorted(hardest.items())},
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _draw(points: list[Point], out: Path) -> list[Path]:
    fig, panels = figure(len(LABELS), width=13.0, height=4.5)
    for axes, (varied, x_label) in zip(panels, LABELS.items(), strict=True):
        for method, colour in zip(METHODS, COLOURS[1:], strict=False):
            chosen = [p for p in points if (p.varied, p.method) == (varied, method)]
            value, excess, low, high, upper, lower = np.array(
                [(p.value, p.excess, p.low, p.high, p.upper, p.lower) for p in chosen]
            ).T
            label = f"{method.upper()}, measured"
            draw_band(axes, value, (excess, low, high), colour, label)
            above, below = (f"bound, Theorem {number}" for number in THEOREMS[method])
            axes.plot(value, upper, color=colour, linestyle="--", label=f"upper {above}")
            axes.plot(value, lower, color=colour, linestyle=":", label=f"lower {below}")
        axes.set(xscale="log", yscale="log", xlabel=x_label)
        ticks = sorted({p.value for p in points if p.varied == varied})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    panels[0].set_ylabel("excess loss on the hardest rows")
    handles, _ = panels[0].get_legend_handles_labels()
    by_row = [handle for pair in zip(handles[:3], handles[3:], strict=True) for handle in pair]
    fig.legend(handles=by_row, loc="outside upper center", ncols=3, frameon=False)
    return save(fig, out / "rates")
