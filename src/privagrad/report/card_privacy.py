"""What a run's releases guarantee, as sections of a privacy card: all of it follows from events."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from privagrad.privacy.accounting import PrivacyPlan, PrivacyReport
from privagrad.privacy.codec import VERSION_OF_USERS, as_json, version_of
from privagrad.privacy.events import Event, GaussianEvent, SelectEvent, Unit, releases_per_draw
from privagrad.privacy.totals import sensitivity_of
from privagrad.report.statement import one_line

COMPARISON = (
    "Compare this epsilon only with one at the same delta, for the same unit of privacy and under "
    "the same neighbouring relation."
)
INFINITY = "infinity"
DELTAS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12)
"""Where a card states epsilon besides its own delta."""

_STRONG, _WEAK_DELTA = 1 + 1e-6, 0.1
_RELATION = {
    "zero-out": "one {unit} contributes nothing instead of its values, or its values instead of "
    "nothing; the number of {unit}s n stays the same and is public",
    "replace-one": "one {unit} holds any other values; the number of {unit}s n stays the same and "
    "is public",
}
_SAMPLING = {
    None: "Every release of the training uses all rows",
    "poisson": "Each step draws every row independently, with probability batch_size / n_examples",
    "without_replacement": "Each step draws batch_size different rows, all such sets being equally "
    "likely",
    "with_replacement": "Each step draws one of n_examples rows, batch_size times independently",
    "random_allocation": "In every epoch of n_examples / batch_size steps, rounded, each row is in "
    "exactly one step, uniformly at random and independently of all other rows",
    "cyclic_poisson": "Rows are in as many groups as a release has bands, by their numbers; the "
    "groups take turns, and each step draws every row of its group independently, with probability "
    "bands * batch_size / n_examples",
}
_RESETS = (
    "Never: the releases of this run count together, and nothing that was spent comes back with "
    "time."
)


def privacy_sections(report: PrivacyReport, rows: int | None) -> dict[str, Any]:
    """The sections guarantee, native, unit, neighbours, sampling, accountant and noise."""
    unit = unit_of(report)
    return {
        "guarantee": _guarantee(report, rows),
        "native": _native(report),
        "unit": {
            "level": unit,
            "words": _UNITS[unit] if is_private(report) else _NOBODY,
            "contribution": _of(_contribution(report.events), unit),
            "resets": _RESETS,
        },
        "neighbours": {
            "relation": report.relation,
            "words": f"Two tables are neighbours if {_RELATION[report.relation]}.".format(
                unit=unit
            ),
        },
        "sampling": {"scheme": report.sampling, "words": f"{_of(_sampling(report), unit)}."},
        "accountant": {
            "name": report.accountant,
            "library": "privagrad",
            "version": installed("privagrad"),
            "dp_accounting": installed("dp-accounting"),
            "words": "Epsilon is an upper bound: discretisation and rounding err on its side.",
        },
        "noise": {
            "kind": report.noise,
            "seeded": report.seeded,
            "words": _source(report),
        },
    }


_SEEDED = "Seeded: whoever knows or guesses the seed can subtract the noise. NOT private."
_SECURE = "From AES-128 in counter mode, with keys of the operating system."
_UNITS = {
    "row": "One row of the table. A person with several rows is protected less.",
    "user": "All rows of one user together: each user makes one bounded contribution.",
}


_NOBODY = "Nothing is protected: the run is not private."


def _of(text: str, unit: str) -> str:
    """A sentence about rows as one about the unit of the guarantee."""
    return re.sub(r"\brow(s?)\b", rf"{unit}\1", text)


def _sampling(report: PrivacyReport) -> str:
    events = (one for e in report.events for one in getattr(e, "events", (e,)))
    if report.sampling is None and any(event.sampling is not None for event in events):
        return "Not the same in all releases: each of them states its own"
    return _SAMPLING[report.sampling]


def _source(report: PrivacyReport) -> str:
    if not report.events:
        return "None was added."
    return _SEEDED if report.seeded else _SECURE


def unit_of(report: PrivacyReport) -> Unit:
    """What the guarantee protects: "row", unless the report says otherwise."""
    return report.unit


def event_values(event: Event) -> dict[str, Any]:
    """An event in the codec's form: with lists for tuples, purposes in one line, and its unit."""
    values = {**as_json(event), "purpose": one_line(event.purpose)}
    if not isinstance(event, SelectEvent):
        return {**values, "unit": event.unit}
    values["events"] = [
        {**one, "purpose": one_line(one["purpose"]), "unit": event.unit} for one in values["events"]
    ]
    return values


def finite(value: float) -> float | str:
    """An epsilon as strict JSON has it."""
    return INFINITY if math.isinf(value) else value


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def is_private(report: PrivacyReport) -> bool:
    return not report.seeded and math.isfinite(report.epsilon)


def _guarantee(report: PrivacyReport, rows: int | None) -> dict[str, Any]:
    return {
        "definition": "approximate differential privacy",
        "private": is_private(report),
        "epsilon": finite(report.epsilon),
        "delta": report.delta,
        "rows": rows,
        "verified": report.verified,
        "words": _words(report),
        "comparison": COMPARISON,
        "remarks": [_of(remark, unit_of(report)) for remark in _remarks(report, rows)],
    }


def _words(report: PrivacyReport) -> str:
    if math.isinf(report.epsilon):
        return "NOT PRIVATE: epsilon is infinite. Something was released without noise."
    unit = unit_of(report)
    factor = f"{math.exp(report.epsilon):.4g}" if report.epsilon < 700 else "more than 1e300"
    change = _RELATION[report.relation].format(unit=unit)
    text = (
        f"Take two tables that differ in one thing: {change}. "
        f"From one to the other no set of results of this run becomes more likely than "
        f"exp({report.epsilon:.4g}) = {factor} times its probability, plus {report.delta:.3g}. "
        f"This holds whatever else is known about the {unit}."
    )
    if not report.verified:
        text = f"Only if each example's gradient depends on it alone, which is not verified: {text}"
    if report.seeded:
        return f"NOT PRIVATE: the noise was seeded and can be repeated. With secure noise: {text}"
    return text


def _remarks(report: PrivacyReport, rows: int | None) -> Sequence[str]:
    found = []
    if report.epsilon > _STRONG and math.isfinite(report.epsilon):
        found.append(
            f"Epsilon {report.epsilon:.4g} is above 1: the bound alone no longer says that an "
            "attacker learns little. Judge what exp(epsilon) means for the people in the data."
        )
    if rows is None:
        found.append("The number of rows n is not in this card: see that delta is far below 1 / n.")
    elif report.delta >= 1 / rows:
        found.append(
            f"Delta {report.delta:.3g} is not below 1 / n = {1 / rows:.3g}: publishing one row "
            "outright would satisfy such a guarantee."
        )
    elif report.delta > _WEAK_DELTA / rows:
        found.append(
            f"Delta {report.delta:.3g} is not far below 1 / n = {1 / rows:.3g}: a tenth of it or "
            "less is usual."
        )
    if not report.verified:
        found.append(
            "Not verified: the user vouches that the gradient of every example depends on that "
            "example alone."
        )
    return found


def _native(report: PrivacyReport) -> dict[str, Any]:
    unprotected = math.isinf(report.epsilon)
    plan = PrivacyPlan(report.events, unprotected=unprotected)
    return {
        "events_version": max(version_of(report.events), VERSION_OF_USERS),
        "events": [event_values(event) for event in report.events],
        "unprotected": unprotected,
        "gaussian": _gaussian(report),
        "epsilon_at": [
            {"delta": delta, "epsilon": finite(plan.epsilon(delta))} for delta in DELTAS
        ],
        "comparison": COMPARISON,
    }


def _gaussian(report: PrivacyReport) -> dict[str, Any]:
    """The μ of Gaussian differential privacy, where one is known."""

    def unknown(reason: str) -> dict[str, Any]:
        return {"mu": None, "is": "unknown", "words": reason}

    if math.isinf(report.epsilon):
        return unknown("Something was released without noise.")
    if not all(isinstance(event, GaussianEvent) for event in report.events):
        return unknown("Selections and objectives with noise are no Gaussian mechanisms.")
    events = [event for event in report.events if isinstance(event, GaussianEvent)]
    if any(event.leak > 0 for event in events):
        return unknown("A release with a leak shows everything with that probability.")
    if any(event.sampling == "with_replacement" and event.batch_size > 1 for event in events):
        return unknown("A row may be drawn several times into one batch.")
    sensitivity = sensitivity_of(report.relation)
    squares = (_seen(event) * (sensitivity / event.noise_multiplier) ** 2 for event in events)
    mu = math.sqrt(math.fsum(squares))
    formula = f"the root of the sum of count * ({sensitivity:g} / noise_multiplier)^2"
    if any(_seen(event) < event.count for event in events):
        formula += (
            " (under random allocation count is the number of epochs, with correlated noise that "
            "of blocks of `bands` releases)"
        )
    if all(event.rate == 1 for event in events):
        return {"mu": mu, "is": "exact", "words": f"All releases use all rows: mu is {formula}."}
    return {
        "mu": mu,
        "is": "upper bound",
        "words": f"Mu is {formula}, as if all releases used all rows. Sampling makes the true "
        "privacy loss much smaller: use the events.",
    }


def _contribution(events: tuple[Event, ...]) -> str:
    if not events:
        return "None: nothing is bounded where no noise is added."
    total, most = (sum(of(event) for event in events) for of in (_count, _seen))
    part = f"all {total} releases"
    if most < total:
        part = (
            f"{most} of {total} releases, one in every epoch of random allocation, or in every "
            "block of releases whose noise is correlated"
        )
    return (
        "In each release the vector that is computed from one row has a norm of at most 1, in the "
        "units in which noise_multiplier is the standard deviation of the noise. One row may take "
        f"part in {part}, and the accountant counts it so."
    )


def _count(event: Event) -> int:
    return event.count


def _seen(event: Event) -> int:
    """The most releases that one row takes part in."""
    return event.count // releases_per_draw(event)
