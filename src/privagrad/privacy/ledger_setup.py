"""The tables, rules and roles of a ledger on a server, made by its owner."""

from __future__ import annotations

from importlib.resources import files

from privagrad.privacy.ledger_server import ServerStore


def script() -> str:
    """What `set_up` executes, for administrators who execute it themselves, in one transaction."""
    return files("privagrad.privacy").joinpath("ledger_server.sql").read_text(encoding="utf-8")


def set_up(url: str) -> str:
    """Prepare a database for a ledger, as the user who will own it; its name for people.

    Nothing that is in the ledger changes. It may be done again: rights that were changed are as
    they were.
    """
    server = ServerStore(url)
    server.run_script(script())
    return server.where
