"""What a run cost as JSON: the one form in which model files keep it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from privagrad.privacy.accounting import PrivacyReport
from privagrad.privacy.codec import as_json, from_json
from privagrad.privacy.events import relation_named
from privagrad.privacy.noise import Noise
from privagrad.privacy.sampling import Sampling

_ALL_ROWS = "all rows in every step"


def report_as_json(report: PrivacyReport) -> dict[str, Any]:
    """A report as plain values."""
    return {
        "epsilon": report.epsilon,
        "delta": report.delta,
        "relation": report.relation,
        "sampling": report.sampling or _ALL_ROWS,
        "accountant": report.accountant,
        "seeded": report.seeded,
        "noise": report.noise,
        "events": [as_json(event) for event in report.events],
    }


def report_from_json(values: Mapping[str, Any]) -> PrivacyReport:
    """The report of plain values, also of those in files of version 0.1, which state no noise."""
    sampling = values["sampling"] if values["sampling"] in get_args(Sampling) else None
    noise: Noise = "discrete" if values.get("noise") == "discrete" else "gaussian"
    known = PrivacyReport.__dataclass_fields__
    more = {name: values[name] for name in ("unit", "verified") if name in values and name in known}
    return PrivacyReport(
        float(values["epsilon"]), float(values["delta"]), relation_named(values["relation"]),
        sampling, values["accountant"], tuple(from_json(event) for event in values["events"]),
        bool(values["seeded"]), noise=noise, **more,
    )  # fmt: skip
