"""Every package of the lock file that is installed has a licence that permits all uses.

It reads what is installed and needs no network. Whether a version has a known weakness is another
question, which needs one: pip-audit -r requirements.lock.
"""

import re
from importlib.metadata import PackageMetadata, PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
LOCK = [
    Requirement(line)
    for line in (ROOT / "requirements.lock").read_text().splitlines()
    if not line.startswith("#")
]
PERMISSIVE = re.compile(
    r"apache|mit\b|mit-0|bsd|0bsd|isc|psf|python software foundation|zlib|unlicense|hpnd|cnri"
    r"|mpl[ -]?2|mozilla public license 2|blueoak|public domain|historical permission|dual license"
    r"|boost|bsl-1|cc0|ncsa",
    re.IGNORECASE,
)
"""Licences without conditions on what uses a package. MPL 2.0 has conditions on its own files."""

KNOWN = {
    "psycopg": "LGPL-3.0-only",
    "psycopg-binary": "LGPL-3.0-only",
}
"""Others, each looked at: loaded as libraries of their own, not part of what we distribute."""


def licence_of(package: str) -> str:
    """What a package says of its licence: an expression, a classifier, or a first line."""
    told: PackageMetadata = metadata(package)
    texts = [told["License-Expression"] or ""] if "License-Expression" in told else []
    if "Classifier" in told:
        texts += [c for c in told.get_all("Classifier") or [] if c.startswith("License ::")]
    if not any(texts) and "License" in told:
        texts.append((told["License"] or "").strip().split("\n")[0])
    return "; ".join(text for text in texts if text)


@pytest.mark.parametrize("pin", LOCK, ids=lambda pin: pin.name)
def test_licences_are_known_and_permissive(pin: Requirement) -> None:
    try:
        licence = licence_of(pin.name)
    except PackageNotFoundError:
        pytest.skip(f"{pin.name} is not installed here")
    if pin.name in KNOWN:
        assert KNOWN[pin.name].split("-")[0].lower() in licence.lower().replace("lesser", "lgpl")
        return
    assert licence, f"{pin.name} states no licence"
    assert PERMISSIVE.search(licence), licence


def test_every_version_is_pinned_and_released() -> None:
    for pin in LOCK:
        (told,) = pin.specifier
        assert told.operator == "=="
        assert not Version(told.version).is_prerelease, pin
