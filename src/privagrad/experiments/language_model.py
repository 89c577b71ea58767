"""Table 1 and Figure 2 of the paper: an LSTM on WikiText-2 under differential privacy."""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privagrad import _validate
from privagrad.experiments.language_tuning import Trial, price, read_trials, tune
from privagrad.experiments.plots import COLOURS, figure, save

if TYPE_CHECKING:
    from privagrad.torch.language.training import Setting, Texts

LABELS = {
    "dp-sgd": "DP-SGD",
    "pasan": "PASAN",
    "pagan": "PAGAN",
    "sgd": "SGD (not private)",
    "adagrad": "AdaGrad (not private)",
}
PAPER = {
    ("dp-sgd", 3.0): 238.44,
    ("dp-sgd", 1.0): 285.11,
    ("dp-sgd", 0.5): 350.23,
    ("pasan", 3.0): 238.87,
    ("pasan", 1.0): 274.63,
    ("pasan", 0.5): 332.52,
    ("pagan", 3.0): 224.82,
    ("pagan", 1.0): 253.41,
    ("pagan", 0.5): 291.41,
    ("sgd", math.inf): 75.45,
    ("adagrad", math.inf): 79.74,
}
"""Test perplexities of the paper's Table 1."""

RECIPES: dict[str, dict[str, Any]] = {
    "dp-sgd": {"step_size": {3.0: 7.0, 1.0: 5.5, 0.5: 4.0}, "schedule": "linear"},
    "pasan": {"step_size": {3.0: 200.0, 1.0: 230.0, 0.5: 250.0}, "schedule": "linear"},
    "pagan": {"step_size": {3.0: 0.2, 1.0: 0.22, 0.5: 0.24}, "schedule": "linear"},
    "sgd": {"step_size": {math.inf: 10.0}, "schedule": "linear"},
    "adagrad": {"step_size": {math.inf: 0.1}, "schedule": "constant"},
}
COLUMNS = (
    "method", "epsilon", "seed", "epochs", "step_size", "radius", "valid_perplexity",
    "test_perplexity", "epsilon_spent", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Which runs to make."""

    methods: tuple[str, ...] = ("dp-sgd", "pasan", "pagan", "sgd", "adagrad")
    epsilons: tuple[float, ...] = (3.0, 1.0, 0.5)
    epochs: int = 7
    seeds: int = 1
    batch_size: int = 250
    quick: bool = False
    tuning_seconds: float = 0.0
    """To be shared by all methods and epsilons alike; 0: the recipes as they are."""


def read_texts(
    folder: Path, public: Path | None, vocabulary: str = "train", quick: bool = False
) -> Texts:
    """train.txt, valid.txt and, where it is there, test.txt of a folder; and the public text."""
    from privagrad.torch.language.corpus import VOCABULARY, Vocabulary, read_folder, read_tokens
    from privagrad.torch.language.training import Texts

    _validate.choice("vocabulary", vocabulary, ("train", "public"))
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
    from privagrad.torch.language.training import PRIVATE, Setting

    settings = []
    for seed in range(plan.seeds):
        for method in plan.methods:
            for epsilon in plan.epsilons if method in PRIVATE else (math.inf,):
                recipe = RECIPES[method]
                sizes = recipe["step_size"]
                nearest = min(sizes, key=lambda e: abs(math.log(e / epsilon)) if e < 1e9 else 0.0)
                setting = Setting(
                    method,
                    epsilon,
                    sizes[nearest] * _larger(method, plan.batch_size),
                    schedule=recipe["schedule"],
                    epochs=plan.epochs,
                    batch_size=plan.batch_size,
                    seed=seed,
                )
                if plan.quick:
                    setting = replace(setting, batch_size=50, width=32, epochs=min(plan.epochs, 2))
                settings.append(setting)
    return settings


def _larger(method: str, batch_size: int) -> float:
    """Fewer steps must go as far; those of adaptive methods fall with the square root anyway."""
    return math.pow(batch_size / 250, 1.0 if method in ("dp-sgd", "sgd") else 0.5)


def run(texts: Texts, plan: Plan, out: Path) -> list[dict[str, Any]]:
    """Tune if asked to, make every run that is not there yet; write tables, curves and Figure 2."""
    from privagrad.torch.language.training import SHAPED, public_moments, train

    settings = settings_of(plan)
    rows = []
    with _bar() as show:
        for setting in settings:
            if setting.method in SHAPED:
                public_moments(texts, setting, out / "runs", show("public moments", setting))
        if plan.tuning_seconds:
            settings = _tuned(settings, texts, plan, out, show)
        for number, setting in enumerate(settings):
            folder = out / "runs" / _name(setting)
            finished = folder / "result.json"
            if not finished.exists():
                folder.mkdir(parents=True, exist_ok=True)
                title = f"run {number + 1} of {len(settings)}"
                result = train(setting, texts, folder, show(title, setting))
                _write_whole(finished, json.dumps(result))
            rows.append({**asdict(setting), **json.loads(finished.read_text(encoding="utf-8"))})
            _write(out, rows, texts)
    return rows


def _tuned(
    settings: list[Setting], texts: Texts, plan: Plan, out: Path, show: Any
) -> list[Setting]:
    """The same runs with the step sizes, radii and schedules that the tuner finds."""
    recipes = {(s.method, s.epsilon): replace(s, seed=0) for s in settings}
    share = plan.tuning_seconds / len(recipes)
    best = {
        key: tune(recipe, texts, share, out, lambda trial: show("tuning", trial))
        for key, recipe in recipes.items()
    }
    return [replace(best[s.method, s.epsilon], seed=s.seed) for s in settings]


def _name(setting: Setting) -> str:
    parts = [setting.method, f"{setting.epsilon:g}", f"{setting.epochs}x{setting.batch_size}"]
    parts += [f"{setting.step_size:g}", f"{setting.radius:g}", setting.schedule, f"{setting.width}"]
    return "-".join([*parts, f"seed{setting.seed}"])


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _write(out: Path, rows: list[dict[str, Any]], texts: Texts) -> None:
    with (out / "table1.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for row in rows:
            writer.writerow({**row, "test_perplexity": row["test_perplexity"] or ""})
    with (out / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        curves = csv.writer(file)
        curves.writerow(["method", "epsilon", "seed", "epoch", "rounds", "valid_perplexity"])
        for row in rows:
            for epoch, value in enumerate(row["valid_curve"], start=1):
                rounds = row["steps_made"] * epoch // len(row["valid_curve"])
                curves.writerow([row["method"], row["epsilon"], row["seed"], epoch, rounds, value])
    notes = _price(read_trials(out / "tuning.csv"), rows, texts)
    if texts.test is None:
        notes.append("There was no test.txt: that column is empty.")
    (out / "table1.md").write_text(_markdown(rows, notes), encoding="utf-8")
    _draw(out / "figure2", rows)


def _price(trials: list[Trial], rows: list[dict[str, Any]], texts: Texts) -> list[str]:
    """What the tuning would cost if it were charged."""
    from privagrad.torch.language.corpus import Sequences
    from privagrad.torch.language.training import DELTA, Setting

    if not trials:
        return []
    names = [field.name for field in fields(Setting)]
    finals = {(r["method"], r["epsilon"]): Setting(**{n: r[n] for n in names}) for r in rows}
    notes = [
        f"Step size, radius and schedule are the best of {len(trials)} trials on the validation "
        "text (tuning.csv), which are not charged. If they were:"
    ]
    for (method, epsilon), final in finals.items():
        own = [t for t in trials if (t.method, t.epsilon) == (method, epsilon)]
        if own and final.private:
            cost = price(own, final, len(Sequences(texts.train)), DELTA)
            notes.append(
                f"- {LABELS[method]}: {len(own)} trials of {sum(t.steps for t in own)} steps "
                f"together and the run itself, epsilon {cost:.3g} in place of {epsilon:g}"
            )
    return notes


def _markdown(rows: list[dict[str, Any]], notes: list[str]) -> str:
    lines = [
        "| method | epsilon | validation, state carried | reset every 35 | test | paper's test |",
        "|---|---|---|---|---|---|",
    ]
    for method, epsilon in dict.fromkeys((row["method"], row["epsilon"]) for row in rows):
        group = [r for r in rows if (r["method"], r["epsilon"]) == (method, epsilon)]
        cells = [_spread([r[key] for r in group]) for key in _SHOWN]
        paper = PAPER.get((method, epsilon))
        lines.append(f"| {LABELS[method]} | {epsilon:g} | {' | '.join(cells)} | {paper or ''} |")
    lines += ["", "Perplexities, mean ± standard deviation over seeds. The noise is seeded."]
    lines.append(
        "The vocabulary is taken from the training text unless --vocabulary public: that is "
        "not private."
    )
    if any(row["width"] != 120 for row in rows):
        lines.append("A small model on a slice of the text: not to be compared with the paper's.")
    return "\n".join([*lines, *notes]) + "\n"


_SHOWN = ("valid_perplexity", "valid_perplexity_reset", "test_perplexity")


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = sum(known) / len(known)
    if len(known) == 1:
        return f"{mean:.1f}"
    deviation = math.sqrt(sum((v - mean) ** 2 for v in known) / (len(known) - 1))
    return f"{mean:.1f} ± {deviation:.1f}"


def _draw(stem: Path, rows: list[dict[str, Any]]) -> None:
    epsilons = sorted({r["epsilon"] for r in rows if math.isfinite(r["epsilon"])}, reverse=True)
    panels = epsilons or [math.inf]
    fig, grid = figure(len(panels), width=4.2 * len(panels), height=4.2)
    for axes, epsilon in zip(grid, panels, strict=True):
        for colour, (method, label) in zip(COLOURS, LABELS.items(), strict=False):
            group = [
                r for r in rows if r["method"] == method and r["epsilon"] in (epsilon, math.inf)
            ]
            for number, row in enumerate(group):
                best = [min(row["valid_curve"][: k + 1]) for k in range(len(row["valid_curve"]))]
                rounds = [row["steps_made"] * k // len(best) for k in range(1, len(best) + 1)]
                axes.plot(rounds, best, color=colour, label=label if number == 0 else None)
        axes.set(title=f"epsilon = {epsilon:g}", xlabel="rounds", yscale="log")
    grid[0].set_ylabel("least validation perplexity so far")
    grid[-1].legend(frameon=False, fontsize="small")
    save(fig, stem)


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
