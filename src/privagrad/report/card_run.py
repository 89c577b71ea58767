"""What a run was, as sections of a privacy card: the model, its budget, its figures, its limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from privagrad.data.models import SavedModel
from privagrad.privacy.accounting import PrivacyReport
from privagrad.privacy.events import TRAINING, Event, ObjectiveEvent, Release, SelectEvent
from privagrad.privacy.filters import epsilon_of_runs
from privagrad.privacy.ledger import Account, Run
from privagrad.report.card_privacy import event_values, finite, is_private
from privagrad.report.statement import one_line
from privagrad.report.verdict import exceeds

LINEAR_MODEL = "linear model"
_LONGEST, _MOST_FACTS = 300, 50

_EFFECTS = (
    "The bound on the contribution of one {unit} shortens large ones, which biases what is learned "
    "from rare and extreme {unit}s. What is computed from releases alone costs no privacy, and may "
    "bias figures: shares are cut to [0, 1], for example."
)
_TRUST = (
    "Central model: the process that runs the fit reads the raw rows, in memory and in temporary "
    "files. Whoever can read that memory, those files or the table sees the rows.",
    "Whoever sees what was released may know everything else, and may work together with others. "
    "Nothing is assumed of them, except that they do not see the noise or the machine at work.",
    "The operating system's randomness cannot be predicted.",
    "The facts that are listed as public were not taken from the private rows.",
)
_SIDE_CHANNELS = {
    "floating point": "Closed: contributions and noise are whole units of a public grid, bounds "
    "are shrunk by a few roundings, rounding is counted in the sensitivity. Gaussian noise leaves "
    "one effect uncounted: docs/privacy.md#the-noise, point 3. Discrete noise has no such effect.",
    "timing": "Open: how long a run takes is not hidden. Do not publish running times.",
    "memory": "Open: use of memory, of temporary files and of the disk is not hidden.",
    "errors": "Open: errors and warnings may depend on rows. Show them only to people who may see "
    "the rows.",
}
_BOTH_KINDS = "docs/privacy.md#the-noise", "tests/privacy/test_noise.py"
_MECHANISMS = {
    "full": ("a sum over all {unit}s with Gaussian noise", "docs/privacy.md#the-accountant",
             "tests/privacy/test_mechanism.py"),
    "sampled": ("a sum over a sample of the {unit}s with Gaussian noise",
                "docs/privacy.md#sampling", "tests/privacy/test_composition.py"),
    "leak": ("categories shown above a noisy threshold", "docs/privacy.md#the-accountant",
             "tests/queries/test_categories.py"),
    "objective": ("a minimiser of an objective with Gaussian noise",
                  "src/privagrad/privacy/events.py", "tests/privacy/test_events.py"),
    "selection": ("the best of a secret number of runs", "docs/privacy.md#the-accountant",
                  "tests/estimators/test_search.py"),
    "gaussian": ("Gaussian noise in whole units", *_BOTH_KINDS),
    "discrete": ("discrete Gaussian noise", "docs/privacy.md#the-noise",
                 "tests/privacy/test_discrete.py"),
}  # fmt: skip


def plain(text: object, longest: int = _LONGEST) -> str:
    """A text from outside in one line, without characters that cannot be seen."""
    clean = one_line(text)
    if len(clean) <= longest:
        return clean
    return f"{clean[:longest]}… ({len(clean)} characters in all)"


def kind_of(model: SavedModel) -> str:
    """What was released."""
    searched = any(event.get("kind") == "SelectEvent" for event in model.privacy["events"])
    return f"{LINEAR_MODEL} chosen by a private search" if searched else LINEAR_MODEL


def product_of_model(model: SavedModel) -> dict[str, Any]:
    made = model.made
    return {
        "kind": kind_of(model),
        "target": None if model.schema is None else plain(model.schema.target),
        "classes": None if model.classes is None else len(model.classes),
        "columns": len(model.features),
        "rows": int(made["rows"]),
        "table": plain(made["table"]),
        "made_at": plain(made["at"]),
        "made_with": plain(made["version"]) or "unknown",
    }


def product_of_report(kind: str, rows: int | None, made_with: str) -> dict[str, Any]:
    empty = dict.fromkeys(("target", "classes", "columns", "table", "made_at"))
    return {"kind": plain(kind), **empty, "rows": rows, "made_with": made_with}


def algorithm_of_model(model: SavedModel) -> dict[str, Any]:
    made = model.made
    return {
        "name": plain(made["method"]),
        "loss": plain(model.loss),
        "steps": int(made["steps"]),
        "batch_size": int(made["batch_size"]),
    }


def algorithm_of_report(report: PrivacyReport) -> str:
    """What the releases of a report are made of."""
    events = list(single_releases(report.events))
    if any(isinstance(event, ObjectiveEvent) for event in events):
        return "minimiser of an objective with noise"
    noisy_gradients = any(event.purpose == TRAINING or event.sampling for event in events)
    return "noisy gradients" if noisy_gradients else "sums with noise"


def public_facts(facts: Iterable[str]) -> list[str]:
    """What is not protected; long lists are cut, and say so."""
    told = [plain(fact) for fact in facts]
    if len(told) > _MOST_FACTS:
        told = [*told[:_MOST_FACTS], f"… and {len(told) - _MOST_FACTS} more"]
    return told


def mechanisms(report: PrivacyReport) -> list[dict[str, str]]:
    """Every kind of release once, with the places of its proof and its tests."""
    kinds = dict.fromkeys(_kind(event) for event in single_releases(report.events))
    if any(isinstance(event, SelectEvent) for event in report.events):
        kinds["selection"] = None
    if kinds:
        kinds[report.noise] = None
    names = ("mechanism", "proof", "tests")
    told = ((text.format(unit=report.unit) for text in _MECHANISMS[kind]) for kind in kinds)
    return [dict(zip(names, texts, strict=True)) for texts in told]


def utility(model: SavedModel | None, report: PrivacyReport) -> dict[str, Any]:
    """The figures of the private evaluation; exact ones stay out of a card."""
    found = {} if model is None else model.evaluation
    private = bool(found.get("private")) and is_private(report)
    figures = found.get("figures", {}) if private else {}
    return {
        "figures": [
            {"name": name, "value": _known(f["value"]), "noise": _known(f["noise"])}
            for name, f in figures.items()
        ],
        "verdict": plain(found["verdict"]) if figures and "verdict" in found else None,
        **utility_words(report.unit, measured=bool(figures)),
    }


def utility_words(unit: str, *, measured: bool) -> dict[str, str]:
    """What a card says of its figures, with and without any."""
    words = "No private evaluation was made, or it is not private."
    if measured:
        words = (
            "Measured on the training rows with noise and charged to epsilon; noise is a standard "
            "deviation. The chance in which rows were drawn is not in it."
        )
    return {"words": words, "effects": _EFFECTS.format(unit=unit)}


def not_private_outputs(model: SavedModel | None) -> list[dict[str, str]]:
    """What a run shows besides its releases."""
    tested = None if model is None else "test" in model.evaluation
    found = [
        ("figures on a test table", TESTED[tested]),
        ("figures of privagrad evaluate without --epsilon, score() and losses computed by hand",
         "Exact where somebody made them: not covered by the guarantee."),
        ("counts of clipped or non-finite gradients", "Without noise: not to be published."),
        ("progress, errors and warnings", "May depend on rows: for those who may see the rows."),
        ("running time and use of memory", "Not hidden."),
    ]  # fmt: skip
    return [{"what": what, "status": status} for what, status in found]


BEYOND = "Its runs together cost more than the budget allows."
TESTED = {
    True: "Made for this model, exact, and not in this card. The model file holds them: remove "
    "them before it is published, unless the test rows are public.",
    False: "None are in the model file.",
    None: "Not known to the run.",
}


def ledger_section(made: dict[str, Any] | None, account: Account | None) -> dict[str, Any]:
    """The budget that was charged, as far as it is known."""
    dataset, run = (made or {}).get("dataset"), (made or {}).get("run")
    charged = dataset is not None or account is not None
    return {
        "charged": charged,
        "dataset": None if dataset is None else plain(dataset),
        "run": None if run is None else plain(run),
        "account": None if account is None else _account(account, run),
        **ledger_words(
            charged,
            account is not None,
            account is not None and exceeds(account.epsilon, account.spent),
        ),
    }


def ledger_words(charged: bool, known: bool, exceeded: bool) -> dict[str, str | None]:
    """What a card says of a budget, known or not, exceeded or not, or of none."""
    if charged:
        query_model = (
            "Many runs, each of which may be chosen after the results of earlier ones: a privacy "
            "filter bounds all of them together."
        )
        used_up = "Every further run is refused before it reads a row."
    else:
        query_model = "One run, whose releases were planned before the first one."
        used_up = None
    words = (
        "Charged to a budget; its state was not looked up for this card."
        if not known
        else "The state of the budget when this card was made. Names of users and notes stay out."
    )
    if exceeded:
        words = f"{BEYOND} {words}"
    return {
        "query_model": query_model,
        "when_used_up": used_up,
        "words": words
        if charged
        else "Charged to no budget: what else was computed from the same rows is not known.",
    }


def trust() -> list[str]:
    return list(_TRUST)


def side_channels() -> list[dict[str, str]]:
    return [{"channel": name, "status": status} for name, status in _SIDE_CHANNELS.items()]


def spent_of(runs: Sequence[tuple[Event, ...]], epsilon: float, delta: float) -> float | str:
    """What runs cost together, as a card states it."""
    return finite(epsilon_of_runs(runs, epsilon, delta))


def _account(account: Account, run: str | None) -> dict[str, Any]:
    spent = account.spent
    period, policy = getattr(account, "period", None), getattr(account, "policy", None)
    return {
        "epsilon": account.epsilon,
        "delta": account.delta,
        "spent": finite(spent),
        "left": max(account.epsilon - spent, 0.0),
        "bound_to_content": account.fingerprint is not None,
        "period": None if period is None else plain(period),
        "policy": None if policy is None else plain(policy),
        "runs": [_run(one, run) for one in account.runs],
    }


def _run(one: Run, run: str | None) -> dict[str, Any]:
    return {
        "run": plain(one.name),
        "at": plain(one.at),
        "state": one.state,
        "this_run": one.name == run,
        "events": [event_values(event) for event in one.events],
    }


def _known(value: float) -> float | None:
    """A figure as strict JSON has it: noise may leave none."""
    return float(value) if math.isfinite(value) else None


def single_releases(events: Iterable[Event]) -> Iterator[Release]:
    """The events, and instead of a selection those of one of its runs."""
    for event in events:
        yield from event.events if isinstance(event, SelectEvent) else (event,)


def _kind(event: Release) -> str:
    if isinstance(event, ObjectiveEvent):
        return "objective"
    if event.leak > 0:
        return "leak"
    return "full" if event.rate == 1 else "sampled"
