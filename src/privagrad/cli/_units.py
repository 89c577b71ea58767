"""The unit of privacy of a budget: what its runs protect, in words and as JSON."""

from __future__ import annotations

from privagrad.privacy.ledger import Account

_WORDS = {
    None: "",
    "row": "Unit of privacy: row. Later runs must protect rows, too.",
    "user": "Unit of privacy: user. Later runs must name users, too.",
    "both": "Unit of privacy: row in some runs, user in others. Their costs do not add up: no "
    "further run fits.",
}


def unit_value(account: Account) -> str | None:
    """The unit as JSON has it: "row", "user", "both", or None where no run is charged."""
    return "both" if len(account.units) > 1 else account.unit


def unit_words(unit: str | None) -> str:
    """What the runs of a budget protect, and what follows for later ones; empty: no runs yet."""
    return _WORDS[unit]
