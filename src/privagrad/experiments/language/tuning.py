"""Step size, radius and schedule of the language model's methods, by successive halving."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privagrad.experiments.tuning import halve, ladder
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent

if TYPE_CHECKING:
    from privagrad.experiments.language.training import Setting, Texts

STEP_FACTORS = (1.0, 2.0, 0.5, 4.0, 0.25)
RADIUS_FACTORS = (1.0, 0.5, 2.0)
LEAST = 10
"""Examples a step of the smallest trial."""

_WORDS = 20_000


@dataclass(frozen=True)
class Trial:
    """One line of the tuner's log."""

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


def candidates(recipe: Setting) -> list[Setting]:
    """The recipe and its neighbours on the grid, in an order that is the same every time."""
    from privagrad.experiments.language.training import SCHEDULES

    grid = [
        replace(recipe, step_size=recipe.step_size * s, radius=recipe.radius * r, schedule=kind)
        for s in STEP_FACTORS
        for r in RADIUS_FACTORS
        for kind in SCHEDULES
    ]
    others = [setting for setting in grid if setting != recipe]
    random.Random(0).shuffle(others)
    return [recipe, *others]


def tune(
    recipe: Setting,
    texts: Texts,
    seconds: float,
    out: Path,
    runs: Path,
    show: Callable[[Setting], Any] | None = None,
) -> Setting:
    """The best of `candidates` within a time; every trial is a line of out/tuning.csv.

    Trials make the steps of the whole run with its noise, on fewer examples, and are judged by
    the first words of the validation text. Trials found in the log are not made again.
    """
    from privagrad.experiments.language.training import train

    log = out / "tuning.csv"
    known = {_key(trial): trial for trial in read_trials(log)}
    brief = replace(texts, valid=texts.valid[: _WORDS + 1], test=None)

    def make(setting: Setting, rung: int, sample: int) -> Trial:
        wanted = _key_of(setting, runs.name, rung, sample)
        if wanted not in known:
            trial = replace(setting, sample=sample)
            result = train(trial, brief, runs / "trial", show and show(trial))
            found = result["valid_perplexity"]
            score = found if math.isfinite(found) else math.inf
            known[wanted] = Trial(
                runs.name, setting.method, setting.epsilon, setting.epochs, setting.batch_size,
                rung, sample, setting.step_size, setting.radius, setting.schedule,
                score, result["noise_multiplier"], result["seconds"],
            )  # fmt: skip
            _append(log, known[wanted])
        return known[wanted]

    pace = make(recipe, -1, LEAST).seconds / LEAST
    rungs = ladder(seconds, pace, recipe.batch_size, LEAST)
    return halve(candidates(recipe), rungs, lambda s, k, n: make(s, k, n).valid_perplexity)


def price(trials: Iterable[Trial], final: GaussianEvent, delta: float) -> float:
    """What the chosen run would cost if its trials were private runs on the same budget."""
    events = [replace(final, noise_multiplier=trial.noise_multiplier) for trial in trials]
    return PrivacyPlan((*events, final)).epsilon(delta)


def read_trials(log: Path) -> list[Trial]:
    """What the log holds; a line that was cut off while it was written does not count."""
    if not log.exists():
        return []
    kinds = (str, str, float, int, int, int, int, float, float, str, float, float, float)
    with log.open(newline="", encoding="utf-8") as file:
        lines = [line for line in list(csv.reader(file))[1:] if len(line) == len(kinds)]
    return [Trial(*(kind(v) for kind, v in zip(kinds, line, strict=True))) for line in lines]


def _append(log: Path, trial: Trial) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    fresh = not log.exists()
    with log.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(asdict(trial))
        writer.writerow(astuple(trial))


def _key_of(setting: Setting, texts: str, rung: int, sample: int) -> tuple[Any, ...]:
    run = (setting.method, setting.epsilon, setting.epochs, setting.batch_size)
    return (texts, *run, rung, sample, setting.step_size, setting.radius, setting.schedule)


def _key(trial: Trial) -> tuple[Any, ...]:
    return astuple(trial)[:10]
