"""All runs of a plan: tune if asked to, train what is missing, write the results."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from privagrad._internal.atomic import atomic_write
from privagrad.experiments.language.corpus import Texts
from privagrad.experiments.language.pretraining import Report
from privagrad.experiments.language.public import public_model, public_moments
from privagrad.experiments.language.settings import Plan, Setting
from privagrad.experiments.language.tables import Row, write_results
from privagrad.experiments.language.training import train
from privagrad.experiments.language.tuning import Trial, Tuner

Show = Callable[[str, Setting], Report]
"""Takes a title and a setting, shows a new bar and returns the function that moves it."""


def run(texts: Texts, plan: Plan, out: Path) -> list[Row]:
    """Make every run that is not in `out` yet; write tables, curves and Figure 2.

    An interrupted plan is resumed after the last finished epoch.
    """
    settings = plan.settings()
    rows: list[Row] = []
    trials: list[Trial] = []
    runs = out / f"runs-{_digest(texts)}"
    with _progress_bar() as show:
        for setting in settings:
            if setting.start == "public":
                public_model(texts, setting, runs, show("public text", setting))
            if setting.shaped:
                public_moments(texts, setting, runs, show("public moments", setting))
        if plan.tuning_seconds:
            tuner = Tuner(texts, out, runs, lambda trial: show("tuning", trial))
            settings = _tuned(settings, tuner, plan.tuning_seconds)
            trials = tuner.trials
        for number, setting in enumerate(settings):
            folder = runs / _name(setting)
            finished = folder / "result.json"
            if not finished.exists():
                folder.mkdir(parents=True, exist_ok=True)
                title = f"run {number + 1} of {len(settings)}"
                result = train(setting, texts, folder, show(title, setting))
                with atomic_write(finished) as file:
                    file.write(json.dumps(result).encode())
            known = {**asdict(setting), "kind": setting.kind, "start": setting.start}
            rows.append({**known, **json.loads(finished.read_text(encoding="utf-8"))})
            write_results(out, rows, texts, trials)
    return rows


def _tuned(settings: list[Setting], tuner: Tuner, seconds: float) -> list[Setting]:
    """The same runs with the step sizes, radii and schedules that the tuner finds."""
    recipes = {(s.method, s.epsilon): replace(s, seed=0) for s in settings}
    share = seconds / len(recipes)
    best = {key: tuner.best(recipe, share) for key, recipe in recipes.items()}
    return [replace(best[s.method, s.epsilon], seed=s.seed) for s in settings]


def _digest(texts: Texts) -> str:
    """A name for the texts, so that results on different texts are not mixed."""
    digest = hashlib.sha256()
    for part in (texts.train, texts.valid, texts.public, texts.test):
        digest.update(b"" if part is None else part.numpy().tobytes())
    return digest.hexdigest()[:8]


def _name(setting: Setting) -> str:
    parts = [setting.method, f"{setting.epsilon:g}", f"{setting.epochs}x{setting.batch_size}"]
    parts += [f"{setting.step_size:g}", f"{setting.radius:g}", setting.schedule, f"{setting.width}"]
    parts += [] if setting.correlation == 1 else [f"correlation{setting.correlation}"]
    trial = [] if setting.sample is None else [f"trial{setting.sample}"]
    return "-".join([*parts, f"seed{setting.seed}", *trial])


@contextmanager
def _progress_bar() -> Iterator[Show]:
    """A bar for the current run, with its perplexity and epsilon so far."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1, note="")

        def show(what: str, setting: Setting) -> Report:
            bar.reset(task)
            title = f"{what}: {setting.method}, epsilon {setting.epsilon:g}"

            def report(step: int, total: int, perplexity: float, epsilon: float) -> None:
                seen = "" if math.isnan(perplexity) else f"perplexity {perplexity:.1f}"
                cost = "" if math.isnan(epsilon) else f", epsilon {epsilon:.3g}"
                bar.update(task, description=title, completed=step, total=total, note=seen + cost)

            return report

        yield show
