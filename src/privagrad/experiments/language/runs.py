"""Table 1 and Figure 2 of the paper: an LSTM on WikiText-2 under differential privacy."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privagrad._internal import validate
from privagrad._internal.atomic import atomic_write
from privagrad.experiments.language.tables import write
from privagrad.experiments.language.tuning import Trial, read_trials, tune

if TYPE_CHECKING:
    from privagrad.experiments.language.training import Schedule, Setting, Texts


@dataclass(frozen=True)
class Recipe:
    """What a method does unless it is tuned: (epsilon, batch size, step size at that batch)."""

    sizes: tuple[tuple[float, int, float], ...]
    schedule: Schedule = "linear"
    power: float = 1.0
    """Of the batch size, for the step size: larger batches make fewer steps, which must go as far.
    0 for steps that are measured by the noise of all steps before them."""

    @property
    def private(self) -> bool:
        return math.isfinite(self.sizes[0][0])

    def batch_size(self, epsilon: float) -> int:
        return self._nearest(epsilon)[1]

    def step_size(self, epsilon: float, batch_size: int) -> float:
        _, own, size = self._nearest(epsilon)
        return size * math.pow(batch_size / own, self.power)

    def _nearest(self, epsilon: float) -> tuple[float, int, float]:
        if not self.private:
            return self.sizes[0]
        return min(self.sizes, key=lambda size: abs(math.log(size[0] / epsilon)))


RECIPES = {
    "dp-sgd": Recipe(((3.0, 250, 7.0), (1.0, 250, 4.5), (0.5, 250, 3.5))),
    "pasan": Recipe(((3.0, 250, 0.122), (1.0, 250, 0.12), (0.5, 250, 0.1)), power=0.0),
    "pagan": Recipe(((3.0, 250, 0.2), (1.0, 250, 0.22), (0.5, 250, 0.15)), power=0.0),
    "dp-sgd+words": Recipe(((3.0, 500, 16.0), (1.0, 1000, 16.0), (0.5, 1000, 12.0))),
    "pasan+words": Recipe(((3.0, 500, 0.06), (1.0, 1000, 0.05), (0.5, 1000, 0.06)), power=0.0),
    "pagan+words": Recipe(((3.0, 500, 0.15), (1.0, 1000, 0.16), (0.5, 1000, 0.14)), power=0.0),
    "sgd": Recipe(((math.inf, 25, 10.0),), power=0.5),
    "adagrad": Recipe(((math.inf, 25, 0.05),), "constant", power=0.5),
}


@dataclass(frozen=True)
class Plan:
    """Which runs to make."""

    methods: tuple[str, ...] = ("dp-sgd", "pasan", "pagan", "sgd", "adagrad")
    epsilons: tuple[float, ...] = (3.0, 1.0, 0.5)
    epochs: int = 7
    seeds: int = 1
    batch_size: int | None = None
    """None: each method's own."""
    sample: int | None = None
    """Trials of so many examples a step in place of runs."""
    quick: bool = False
    tuning_seconds: float = 0.0
    """To be shared by all methods and epsilons alike; 0: the recipes as they are."""


def read_texts(
    folder: Path, public: Path | None, vocabulary: str = "train", quick: bool = False
) -> Texts:
    """train.txt, valid.txt and, where it is there, test.txt of a folder; and the public text."""
    from privagrad.experiments.language.corpus import (
        VOCABULARY,
        Vocabulary,
        read_folder,
        read_tokens,
    )
    from privagrad.experiments.language.training import Texts

    validate.choice("vocabulary", vocabulary, ("train", "public"))
    train, valid = read_tokens(folder / "train.txt"), read_tokens(folder / "valid.txt")
    test = folder / "test.txt"
    others = read_folder(public) if public is not None else None
    if vocabulary == "public" and others is None:
        raise ValueError("Expected --public-dir with --vocabulary public, found none.")
    if quick:
        train, valid = train[:40_000], valid[:4_000]
        others = others[:20_000] if others is not None else None
    source = others if vocabulary == "public" and others is not None else train
    words = Vocabulary.of(source, 1000 if quick else VOCABULARY)
    return Texts(
        words,
        words.encode(train),
        words.encode(valid),
        words.encode(read_tokens(test)) if test.is_file() and not quick else None,
        None if others is None else words.encode(others),
    )


def settings_of(plan: Plan) -> list[Setting]:
    """Every run of the plan, seed by seed, so that early results cover all methods."""
    from privagrad.experiments.language.training import Setting

    settings = []
    for seed in range(plan.seeds):
        for method, recipe in ((method, RECIPES[method]) for method in plan.methods):
            for epsilon in plan.epsilons if recipe.private else (math.inf,):
                batch_size = plan.batch_size or recipe.batch_size(epsilon)
                setting = Setting(
                    method,
                    epsilon,
                    recipe.step_size(epsilon, batch_size),
                    schedule=recipe.schedule,
                    epochs=plan.epochs,
                    batch_size=batch_size,
                    seed=seed,
                    sample=plan.sample,
                )
                if plan.quick:
                    size = recipe.step_size(epsilon, 250)
                    epochs = min(plan.epochs, 2)
                    setting = replace(
                        setting, step_size=size, batch_size=50, width=32, epochs=epochs
                    )
                settings.append(setting)
    return settings


def run(texts: Texts, plan: Plan, out: Path) -> list[dict[str, Any]]:
    """Tune if asked to, make every run that is not there yet; write tables, curves and Figure 2."""
    from privagrad.experiments.language.training import public_moments, train

    settings = settings_of(plan)
    rows: list[dict[str, Any]] = []
    trials: list[Trial] = []
    runs = out / f"runs-{_digest(texts)}"
    with _bar() as show:
        for setting in settings:
            if setting.shaped:
                public_moments(texts, setting, runs, show("public moments", setting))
        if plan.tuning_seconds:
            settings = _tuned(settings, texts, plan, out, runs, show)
            trials = [t for t in read_trials(out / "tuning.csv") if t.texts == runs.name]
        for number, setting in enumerate(settings):
            folder = runs / _name(setting)
            finished = folder / "result.json"
            if not finished.exists():
                folder.mkdir(parents=True, exist_ok=True)
                title = f"run {number + 1} of {len(settings)}"
                result = train(setting, texts, folder, show(title, setting))
                with atomic_write(finished) as file:
                    file.write(json.dumps(result).encode())
            known = {**asdict(setting), "kind": setting.kind, "words": setting.words}
            rows.append({**known, **json.loads(finished.read_text(encoding="utf-8"))})
            write(out, rows, texts, trials)
    return rows


def _tuned(
    settings: list[Setting], texts: Texts, plan: Plan, out: Path, runs: Path, show: Any
) -> list[Setting]:
    """The same runs with the step sizes, radii and schedules that the tuner finds."""
    recipes = {(s.method, s.epsilon): replace(s, seed=0) for s in settings}
    share = plan.tuning_seconds / len(recipes)
    best = {
        key: tune(recipe, texts, share, out, runs, lambda trial: show("tuning", trial))
        for key, recipe in recipes.items()
    }
    return [replace(best[s.method, s.epsilon], seed=s.seed) for s in settings]


def _digest(texts: Texts) -> str:
    """Changes with the texts, so that results of other texts are never taken for these."""
    digest = hashlib.sha256()
    for part in (texts.train, texts.valid, texts.public, texts.test):
        digest.update(b"" if part is None else part.numpy().tobytes())
    return digest.hexdigest()[:8]


def _name(setting: Setting) -> str:
    parts = [setting.method, f"{setting.epsilon:g}", f"{setting.epochs}x{setting.batch_size}"]
    parts += [f"{setting.step_size:g}", f"{setting.radius:g}", setting.schedule, f"{setting.width}"]
    trial = [] if setting.sample is None else [f"trial{setting.sample}"]
    return "-".join([*parts, f"seed{setting.seed}", *trial])


@contextmanager
def _bar() -> Iterator[Any]:
    """A bar for the run at hand, with its perplexity and epsilon so far."""
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

        def show(what: str, setting: Setting) -> Any:
            bar.reset(task)
            title = f"{what}: {setting.method}, epsilon {setting.epsilon:g}"
            last = time.monotonic()

            def report(step: int, total: int, perplexity: float, epsilon: float) -> None:
                nonlocal last
                if time.monotonic() - last > 0.5:
                    last = time.monotonic()
                    seen = "" if math.isnan(perplexity) else f"perplexity {perplexity:.1f}"
                    cost = "" if math.isnan(epsilon) else f", epsilon {epsilon:.3g}"
                    bar.update(
                        task, description=title, completed=step, total=total, note=seen + cost
                    )

            return report

        yield show
