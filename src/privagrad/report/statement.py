"""What only the owner of the data can say about a release: read from a TOML file, never guessed."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Any

SECTORS = ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance")
SOURCES = ("Static", "Dynamic")
_LONGEST = 20_000
# Characters that are invisible, or that reverse the order of the text around them.
UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


def _text(section: str, ask: str) -> Any:
    return field(default=None, metadata={"section": section, "ask": ask, "kind": "text"})


def _list(section: str, ask: str) -> Any:
    return field(default=None, metadata={"section": section, "ask": ask, "kind": "list"})


def _choice(section: str, ask: str, options: tuple[str, ...]) -> Any:
    told = {"section": section, "ask": ask, "kind": "choice", "options": options}
    return field(default=None, metadata=told)


_PRODUCT, _PEOPLE = "What is released", "Who is protected"
_ACCESS, _BUDGET, _DATA = "Who sees what", "Other releases and the budget", "How it was made"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The data owner's own words. None: the question is open.

    No field is filled in by privagrad, and none is checked against the data. `read_statement` reads
    one from a file, `statement_template` writes an empty file with a comment for each field.

    Parameters
    ----------
    name, description, purpose : str or None
        Of the data product: what it is called, what it is, what it is to be used for.
    curators, registry_authors, links : tuple of str or None
        Who publishes it, who wrote this statement, where to read more.
    contact : str or None
        Whom to ask.
    publication_date : str or None
        YYYY-MM-DD.
    region, data_description : str or None
        Where the data come from, and what they are.
    sector : {"Technology", "Healthcare", "Education", "Government", "Energy", "Finance"} or None
        The domain that the data describe.
    data_source : {"Static", "Dynamic"} or None
        Whether new rows come in over time.
    privacy_unit, rows_per_person : str or None
        What one row is to a person, and how many rows one person may have.
    raw_access, release_access, trust : str or None
        Who sees raw rows, who sees releases, and what is assumed of each of them.
    storage_security, access_control, collection_exposure : str or None
        How the data are stored and who may read them, and where they were exposed on their way.
    other_releases, future_releases : str or None
        From the same data, private or not.
    budget_policy, budget_exhausted : str or None
        Who may spend, for which period, and what happens when all is spent.
    public_facts, preprocessing, group_errors, justification, notes : str or None
        Where the public facts come from, what was done with the data before, how the error differs
        between groups, why these choices.
    """

    name: str | None = _text(_PRODUCT, "The name of the data product.")
    description: str | None = _text(_PRODUCT, "What is released, in one or two sentences.")
    purpose: str | None = _text(_PRODUCT, "What it is to be used for.")
    curators: tuple[str, ...] | None = _list(_PRODUCT, "Who publishes it: offices or companies.")
    contact: str | None = _text(_PRODUCT, "Whom to ask about it.")
    publication_date: str | None = _text(_PRODUCT, "When it is published, as YYYY-MM-DD.")
    links: tuple[str, ...] | None = _list(_PRODUCT, "Where to read more about it.")

    data_description: str | None = _text(
        _PEOPLE, "What the data are: whose, from which years, how they were collected."
    )
    region: str | None = _text(_PEOPLE, "Which region the data describe, or whose laws apply.")
    sector: str | None = _choice(_PEOPLE, "The domain that the data describe.", SECTORS)
    data_source: str | None = _choice(
        _PEOPLE, "Static: no new rows come in. Dynamic: new rows come in over time.", SOURCES
    )
    privacy_unit: str | None = _text(
        _PEOPLE,
        "What a row is to a person, for example: one row is one hospital stay; a patient may have "
        "several.",
    )
    rows_per_person: str | None = _text(
        _PEOPLE, "How many rows one person has at most, and how this is ensured."
    )

    raw_access: str | None = _text(_ACCESS, "Who sees the raw rows: people, machines, operators.")
    release_access: str | None = _text(_ACCESS, "Who sees what is released.")
    trust: str | None = _text(_ACCESS, "What is assumed of each of them, and why.")
    storage_security: str | None = _text(
        _ACCESS, "How the raw rows are stored: encryption, copies, when they are deleted."
    )
    access_control: str | None = _text(
        _ACCESS, "Who may read the raw rows and start runs, and how this is enforced and recorded."
    )
    collection_exposure: str | None = _text(
        _ACCESS, "Where the data were exposed while they were collected and brought together."
    )

    other_releases: str | None = _text(
        _BUDGET,
        "Other releases from the same data, private or not, beside those that the ledger lists.",
    )
    future_releases: str | None = _text(_BUDGET, "Releases from the same data that are planned.")
    budget_policy: str | None = _text(
        _BUDGET, "Who may spend the budget, for which period it holds, and whether it ever resets."
    )
    budget_exhausted: str | None = _text(_BUDGET, "What happens when the budget is used up.")

    public_facts: str | None = _text(
        _DATA,
        "Where the facts that count as public come from: column names, stated categories and "
        "ranges, settings.",
    )
    preprocessing: str | None = _text(
        _DATA,
        "What was done with the data before the run, without privacy: cleaning, looking at them, "
        "choosing settings.",
    )
    group_errors: str | None = _text(
        _DATA, "How the error differs between groups of people, and how this was measured."
    )
    justification: str | None = _text(_DATA, "Why this epsilon, this delta and these choices.")
    notes: str | None = _text(_DATA, "Anything else.")
    registry_authors: tuple[str, ...] | None = _list(_DATA, "Who wrote this statement.")

    def __post_init__(self) -> None:
        problems: list[str] = []
        for told in fields(self):
            object.__setattr__(self, told.name, _checked(told, getattr(self, told.name), problems))
        if problems:
            raise ValueError("Expected a statement, found: " + "; ".join(problems) + ".")

    @property
    def open_fields(self) -> tuple[str, ...]:
        """The names of the fields that say nothing."""
        return tuple(told.name for told in fields(self) if getattr(self, told.name) is None)

    def values(self) -> dict[str, str | list[str] | None]:
        """All fields as plain JSON values; None where one is open."""
        found = ((told.name, getattr(self, told.name)) for told in fields(self))
        return {name: list(v) if isinstance(v, tuple) else v for name, v in found}


def read_statement(path: Path | str) -> Statement:
    """The statement in a TOML file; every problem is named at once. Empty texts stay open."""
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"Expected a statement, found nothing at {path}. Write one to fill in: "
            f"privagrad card --template {path}"
        ) from None
    except (ValueError, RecursionError) as error:  # TOML, UTF-8, numbers of many digits
        raise ValueError(f"Expected TOML in {path.name}, found: {error}.") from error
    return _from_values(values, path.name)


def statement_of(values: Mapping[str, Any]) -> Statement:
    """The statement with these values; fields that it does not have are refused."""
    return _from_values(values, "the statement")


def statement_template() -> str:
    """A TOML file with every field empty, and a comment that says what belongs there."""
    lines = [
        "# What only the owner of the data can say. privagrad card puts it into the privacy card.",
        "# A field that stays empty is shown as an open question; it is never left out.",
        "# Delete nothing: an empty field and a missing one mean the same.",
    ]
    section = None
    for told in fields(Statement):
        if told.metadata["section"] != section:
            section = told.metadata["section"]
            lines += ["", f"## {section}"]
        lines += ["", f"# {told.metadata['ask']}"]
        if told.metadata["kind"] == "choice":
            lines.append(f"# One of: {', '.join(told.metadata['options'])}.")
        lines.append(f"{told.name} = {'[]' if told.metadata['kind'] == 'list' else _EMPTY}")
    return "\n".join(lines) + "\n"


_EMPTY = '""'


def one_line(text: object) -> str:
    """A text in one line, without characters that cannot be seen."""
    return " ".join(UNPRINTABLE.sub("\ufffd", str(text)).split())


def question_of(name: str) -> str:
    """What a field of the statement asks for."""
    asked = {told.name: str(told.metadata["ask"]) for told in fields(Statement)}
    return asked[name]


def _from_values(values: Mapping[str, Any], where: str) -> Statement:
    known = [told.name for told in fields(Statement)]
    strange = [repr(name[:60]) + _hint(name, known) for name in values if name not in known]
    if strange:
        raise ValueError(
            f"Expected the fields of a statement in {where}, found {', '.join(strange)}. The "
            f"fields are {', '.join(known)}."
        )
    try:
        return Statement(**values)
    except ValueError as error:
        raise ValueError(str(error).replace("a statement", f"a statement in {where}", 1)) from None


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _checked(told: Field[Any], value: Any, problems: list[str]) -> str | tuple[str, ...] | None:
    """A value of the right type without blanks around it; None if nothing is left."""
    if value is None:
        return None
    if told.metadata["kind"] == "list":
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            problems.append(f"{told.name} must be a list of texts, found {_kind_of(value)}")
            return None
        parts = tuple(part for v in value if (part := _clean(told.name, v, problems)))
        return parts or None
    if told.name == "publication_date" and type(value) is date:
        value = value.isoformat()
    if not isinstance(value, str):
        problems.append(f"{told.name} must be a text in quotes, found {_kind_of(value)}")
        return None
    text = _clean(told.name, value, problems)
    if text and told.name == "publication_date" and not _is_date(text):
        problems.append(f"{told.name} must be a day as YYYY-MM-DD, found {text[:40]!r}")
    options = told.metadata.get("options")
    if text and options and text not in options:
        problems.append(f"{told.name} must be one of {', '.join(options)}; found {text[:40]!r}")
    return text or None


def _clean(name: str, text: str, problems: list[str]) -> str:
    if UNPRINTABLE.search(text):
        problems.append(f"{name} has characters that cannot be seen; type it again")
    if len(text) > _LONGEST:
        problems.append(f"{name} has {len(text)} characters, more than {_LONGEST}: give a link")
    return text.replace("\r\n", "\n").strip()


def _is_date(text: str) -> bool:
    try:
        return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text)) and date.fromisoformat(text) is not None
    except ValueError:
        return False


def _kind_of(value: object) -> str:
    kinds = {dict: "a table", list: "a list", bool: "true or false"}
    return kinds.get(type(value), f"{type(value).__name__} {str(value)[:40]!r}")
