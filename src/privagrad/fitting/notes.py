"""What a user should know about the columns of a table, from names, kinds and releases alone."""

from __future__ import annotations

import re
from collections.abc import Iterable

from privagrad.data.schema import Column, Schema

_CODE = re.compile(
    r"(?:^|[\W_])(?:id|ids|uuid|key|code|codes|zip|zipcode|postcode|postal|phone|tel|telephone|fax"
    r"|ssn|mrn|iban|icd|nr|no|number|nummer|numero|plz|telefon|kennung)$"
    r"|[a-z](?:ID|Id|Code|Zip|No|Nr|Number)$"
    r"|(?:zip|post)_?code$|[a-zäöüß](?:nummer|nr|kennung|leitzahl)$",
)
_SHOWN = 10


def column_notes(schema: Schema, undiscovered: Iterable[str] = ()) -> list[str]:
    """Sentences about columns that are not used, or hardly as they are meant.

    Names and kinds are public, values are not looked at. Of the columns `undiscovered` the
    categories are not known yet.
    """
    if schema.libsvm:
        return []
    features, waiting = schema.features, set(undiscovered)
    ignored = [c.name for c in schema.columns if c.kind == "ignore"]
    quantities = [c.name for c in features if c.kind == "number" and looks_like_code(c.name)]
    open_categories = [c for c in features if c.kind == "category"]
    codes = [c.name for c in open_categories if c.name in waiting and looks_like_code(c.name)]
    empty = [c.name for c in open_categories if not c.categories and c.name not in waiting]
    told = (
        (ignored, "Ignored columns: {}."),
        (quantities, "Names of identifiers or codes, but used as quantities: {}. If their size "
         "means nothing, make them categories or ignored in the schema."),
        (codes, "Names of identifiers or codes, whose categories are to be discovered: {}. Values "
         "of few rows are never discovered: ignore such columns in the schema."),
        (empty, "Not used, because no category was frequent enough to be discovered: {}. State "
         "their categories in the schema, or another kind, such as date or ignore."),
    )  # fmt: skip
    return [text.format(_listed(names)) for names, text in told if names]


def hidden_notes(schema: Schema, hidden: Iterable[str]) -> list[str]:
    """Sentences about columns of which noise hides everything, from releases alone.

    `hidden` are encoded columns of too few rows to show their scale.
    """
    if schema.libsvm:
        return []
    unseen = set(hidden)
    names = [c.name for c in schema.features if (told := _told(c)) and unseen.issuperset(told)]
    if not names:
        return []
    return [
        f"Nothing was learned of {_listed(names)}: so few rows showed a value there that noise hid "
        "it. Check how the schema spells categories (`aliases`), and that the columns are not "
        "empty."
    ]


def _told(column: Column) -> list[str]:
    """The encoded columns that hold what a column says, without the one for its blanks."""
    return [
        name
        for part in column.encoded
        for name in (
            [f"{part.name}={value}" for value in part.categories]
            if part.kind == "category"
            else [part.name]
        )
    ]


def looks_like_code(name: str) -> bool:
    """Whether a column of this name is more likely to hold codes than quantities."""
    return bool(_CODE.search(name) or _CODE.search(name.lower()))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
