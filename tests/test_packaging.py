"""The lock file satisfies pyproject.toml, and one version stands everywhere."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import privagrad

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = [
    Requirement(line)
    for line in (ROOT / "requirements.lock").read_text().splitlines()
    if not line.startswith("#")
]


def needed(extra: str | None = None) -> Iterator[Requirement]:
    """What the package needs, with an extra and the extras that it names."""
    for line in PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            for other in sorted(requirement.extras):
                yield from needed(other)
        else:
            yield requirement


NEEDED = [*needed(), *needed("dev")]


def test_the_lock_pins_one_version_of_each_package() -> None:
    names = [canonicalize_name(pin.name) for pin in LOCK]
    assert len(names) == len(set(names)) > len(NEEDED)
    for pin in LOCK:
        # A label such as +cpu would tie the lock file to one build.
        assert re.fullmatch(r"==[^,*+]+", str(pin.specifier)), pin


@pytest.mark.parametrize("requirement", NEEDED, ids=str)
def test_the_lock_satisfies_pyproject(requirement: Requirement) -> None:
    (pin,) = (p for p in LOCK if canonicalize_name(p.name) == canonicalize_name(requirement.name))
    version = Version(str(pin.specifier).removeprefix("=="))
    assert version in requirement.specifier, "run make lock"


def test_one_version_everywhere() -> None:
    assert privagrad.__version__ == PROJECT["version"]
    assert f"version: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()
