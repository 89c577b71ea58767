"""Tuning of step size, radius and schedule by successive halving.

Many small trials are followed by larger ones of the best third.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar, get_type_hints

from privagrad.experiments.language.corpus import Texts
from privagrad.experiments.language.pretraining import Report
from privagrad.experiments.language.settings import SCHEDULES, Setting
from privagrad.experiments.language.training import train
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent

Candidate = TypeVar("Candidate")
STEP_FACTORS = (1.0, 2.0, 0.5, 4.0, 0.25)
RADIUS_FACTORS = (1.0, 0.5, 2.0)
LEAST = 10
"""Examples a step of the smallest trial."""

_WORDS = 20_000
"""Words of the validation text that a trial is evaluated on."""

KEPT = 3
"""One in KEPT candidates goes on, to trials KEPT times as large: every rung costs the same."""
_TALLEST = 3


@dataclass(frozen=True)
class Rung:
    """How many candidates are tried, and the size of their trials."""

    candidates: int
    size: int


def ladder(seconds: float, seconds_per_unit: float, largest: int, least: int) -> list[Rung]:
    """As many rungs as `seconds` allow.

    Trials of the first rung have at least `least` units. The last rung has three candidates and
    trials of at most `largest` units.
    """
    affordable = seconds / seconds_per_unit
    for height in range(_TALLEST, 0, -1):
        first = min(
            int(affordable / (height * KEPT**height)), max(least, largest // KEPT ** (height - 1))
        )
        if first >= least:
            return [
                Rung(KEPT ** (height - k), min(largest, first * KEPT**k)) for k in range(height)
            ]
    needed = KEPT * least * seconds_per_unit
    raise ValueError(
        f"Expected at least {needed / 60:.1f} minutes of tuning for each method and epsilon, found "
        f"{seconds / 60:.1f}: three of the smallest trials take that long here. Give --tune more."
    )


def halve(
    candidates: Sequence[Candidate],
    rungs: Sequence[Rung],
    score: Callable[[Candidate, int, int], float],
) -> Candidate:
    """The candidate with the least `score(candidate, rung, size)`."""
    left = list(candidates)
    for number, rung in enumerate(rungs):
        left = left[: rung.candidates]
        scores = [score(candidate, number, rung.size) for candidate in left]
        left = [left[k] for k in sorted(range(len(left)), key=lambda k: scores[k])]
    return left[0]


class Trial(NamedTuple):
    """One line of tuning.csv; `texts` is the folder of the runs, which identifies the texts."""

    texts: str
    method: str
    epsilon: float
    epochs: int
    batch_size: int
    rung: int
    sample: int
    step_size: float
    radius: float
    schedule: str
    valid_perplexity: float
    noise_multiplier: float
    seconds: float


class Tuner:
    """Finds the best setting of a method in a given time.

    Trials make the steps of the whole run with its noise, on fewer examples, and are compared by
    their perplexity on the first words of the validation text. Every trial is a line of
    out/tuning.csv; trials in that file are not repeated. `runs` is the folder of the runs on these
    texts, and `show` returns the function that reports the progress of a trial.
    """

    def __init__(
        self, texts: Texts, out: Path, runs: Path, show: Callable[[Setting], Report] | None = None
    ) -> None:
        self._texts = replace(texts, valid=texts.valid[: _WORDS + 1], test=None)
        self._log, self._runs, self._show = out / "tuning.csv", runs, show
        self._known = {trial[:10]: trial for trial in read_trials(self._log)}

    @property
    def trials(self) -> list[Trial]:
        """All trials on these texts."""
        return [trial for trial in self._known.values() if trial.texts == self._runs.name]

    def best(self, recipe: Setting, seconds: float) -> Setting:
        """The best of the candidates around a recipe that can be tried in the given time."""
        pace = self._trial(recipe, -1, LEAST).seconds / LEAST
        rungs = ladder(seconds, pace, recipe.batch_size, LEAST)
        return halve(
            candidates(recipe), rungs, lambda s, k, size: self._trial(s, k, size).valid_perplexity
        )

    def _trial(self, setting: Setting, rung: int, sample: int) -> Trial:
        run = (setting.method, setting.epsilon, setting.epochs, setting.batch_size)
        tuned = (setting.step_size, setting.radius, setting.schedule)
        key = (self._runs.name, *run, rung, sample, *tuned)
        if key not in self._known:
            short = replace(setting, sample=sample)
            report = None if self._show is None else self._show(short)
            result = train(short, self._texts, self._runs / "trial", report)
            found = result["valid_perplexity"]
            score = found if math.isfinite(found) else math.inf
            trial = Trial(*key, score, result["noise_multiplier"], result["seconds"])
            self._known[key] = trial
            _append(self._log, trial)
        return self._known[key]


def candidates(recipe: Setting) -> list[Setting]:
    """The recipe, then its neighbours on the grid in a random but fixed order."""
    grid = [
        replace(recipe, step_size=recipe.step_size * s, radius=recipe.radius * r, schedule=kind)
        for s in STEP_FACTORS
        for r in RADIUS_FACTORS
        for kind in SCHEDULES
    ]
    others = [setting for setting in grid if setting != recipe]
    random.Random(0).shuffle(others)
    return [recipe, *others]


def price(trials: Iterable[Trial], final: GaussianEvent, delta: float) -> float:
    """The epsilon of the final run and its trials if all were private runs on the same text."""
    events = [replace(final, noise_multiplier=trial.noise_multiplier) for trial in trials]
    return PrivacyPlan((*events, final)).epsilon(delta)


def read_trials(log: Path) -> list[Trial]:
    """All trials of tuning.csv; an incomplete last line is ignored."""
    if not log.exists():
        return []
    kinds = get_type_hints(Trial).values()
    with log.open(newline="", encoding="utf-8") as file:
        lines = [line for line in list(csv.reader(file))[1:] if len(line) == len(kinds)]
    return [Trial(*(kind(v) for kind, v in zip(kinds, line, strict=True))) for line in lines]


def _append(log: Path, trial: Trial) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    is_new = not log.exists()
    with log.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(Trial._fields)
        writer.writerow(trial)
