"""Events as JSON: the one form in which files keep them.

A list of events is written as ``{"version": 2, "events": [...]}``, each event as its fields and its
kind. Version 1, which privagrad 0.1 wrote, is the bare list. Version 3 is written where a release
protects users: its events have a "unit", which is otherwise that of rows and left out. Version 4 is
written where noise is correlated: its events have "bands", which is otherwise 1 and left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from privagrad.privacy.events import Event, GaussianEvent, ObjectiveEvent, SelectEvent

VERSION, VERSION_OF_USERS, VERSION_OF_ROWS = 4, 3, 2
_VERSIONS = (1, VERSION_OF_ROWS, VERSION_OF_USERS, VERSION)
_KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (GaussianEvent, ObjectiveEvent, SelectEvent)
}


def dumps(events: Iterable[Event]) -> str:
    """The text of some events."""
    told = tuple(events)
    return json.dumps({"version": version_of(told), "events": [as_json(e) for e in told]})


def version_of(events: Iterable[Event]) -> int:
    """The oldest version that can say all of these events."""
    told = [one for event in events for one in getattr(event, "events", (event,))]
    if any(getattr(event, "bands", 1) > 1 for event in told):
        return VERSION
    return VERSION_OF_USERS if any(e.unit == "user" for e in told) else VERSION_OF_ROWS


def loads(text: str) -> tuple[Event, ...]:
    """The events of a text, also of one that version 0.1 wrote."""
    told = json.loads(text)
    if isinstance(told, list):
        told = {"version": 1, "events": told}
    version = told.get("version") if isinstance(told, dict) else None
    if version not in _VERSIONS:
        raise ValueError(
            f"Expected events of version {VERSION} or older, found version {version!r}: a "
            "newer privagrad wrote them. Upgrade this one."
        )
    events = told.get("events")
    if not isinstance(events, list):
        raise ValueError(f"Expected a list of events, found {type(events).__name__}.")
    return tuple(from_json(values) for values in events)


def as_json(event: Event) -> dict[str, Any]:
    """An event as plain values, readable without this library."""
    values: dict[str, Any] = {"kind": type(event).__name__, **asdict(event)}
    for fields in (values, *values.get("events", ())):
        if fields.get("unit") == "row":
            del fields["unit"]
        if fields.get("bands") == 1:
            del fields["bands"]
    return values


def from_json(values: Mapping[str, Any]) -> Event:
    """The event of plain values; without a kind, as checkpoints of 0.1 are, a Gaussian one."""
    try:
        return _event(dict(values))
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"Expected the fields of an event, found others: {error}") from error


def _event(fields: dict[str, Any]) -> Event:
    kind = fields.pop("kind", "GaussianEvent")
    if kind not in _KINDS:
        raise ValueError(f"Expected an event of kind {', '.join(_KINDS)}; found {kind!r}.")
    if kind == "SelectEvent":
        fields["events"] = tuple(GaussianEvent(**inner) for inner in fields["events"])
    if not isinstance(fields.get("purpose", ""), str):
        raise TypeError(f"Expected a text as purpose, found {fields['purpose']!r}.")
    event: Event = _KINDS[kind](**fields)
    return event
