"""`privagrad budget setup` and `move`: a ledger on a server, for several people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from privagrad.cli._output import Json, JsonObject, busy, command, say, show_table


@command
def setup(
    url: Annotated[
        str | None,
        typer.Argument(help="postgresql://USER@HOST/DATABASE, as the user who will own the ledger"),
    ] = None,
    print_: Annotated[
        bool, typer.Option("--print", help="Print the SQL for an administrator; change nothing.")
    ] = False,
    as_json: Json = False,
) -> JsonObject:
    """Prepare a PostgreSQL database for budgets: tables, rules and roles.

    The user of the URL becomes the owner of the ledger, and needs the right to create roles (or an
    administrator creates the roles with --print). Doing it again changes no budget, and restores
    rights that were changed.

    Example: `privagrad budget setup postgresql://ledger_owner@db/ledger`
    """
    from privagrad.privacy.ledger_server import ROLES
    from privagrad.privacy.ledger_setup import script, set_up

    if print_ == (url is not None):
        raise ValueError("Expected either a URL or --print, found both or none.")
    roles = dict(ROLES.values())
    if url is None:
        print(script(), end="")
        return {"script": script(), "roles": roles}
    where = set_up(url)
    say(f"prepared a ledger in {where}")
    show_table("Roles for its users: GRANT ROLE TO USER", ("role", "may"), roles.items(), left=2)
    return {"ledger": where, "roles": roles}


@command
def move(
    source: Annotated[
        Path, typer.Option("--from", help="The file of the budgets.", exists=True, dir_okay=False)
    ],
    target: Annotated[str, typer.Option("--to", help="postgresql://USER@HOST/DATABASE")],
    with_open_runs: Annotated[
        bool,
        typer.Option(
            "--with-open-runs", help="Carry runs over that are reserved now: they stay charged."
        ),
    ] = False,
    as_json: Json = False,
) -> JsonObject:
    """Move all budgets of a file to a server, entry by entry, and close the file.

    The copy is compared with the file before it counts. Afterwards every version of privagrad
    refuses to spend from the file. If the move is interrupted, the file may stay closed: make the
    same move again.

    Example: `privagrad budget move --from ledger.db --to postgresql://olga@db/ledger`
    """
    from privagrad.privacy.ledger_move import move as move_budgets
    from privagrad.privacy.ledger_url import shown

    with busy(f"moving {source.name}"):
        moved = move_budgets(source, target, with_open_runs=with_open_runs)
    say(
        f"moved {', '.join(moved.datasets) or 'no budget'} to {shown(target)}, entries: "
        f"{moved.entries}; {source} is closed"
    )
    if moved.open_runs:
        say(
            f"Reserved, not finished: {', '.join(moved.open_runs)}. They are charged in full and "
            "cannot finish. If you are sure that a run released nothing: privagrad budget release "
            "RUN --reason WHY"
        )
    return {"ledger": shown(target), **vars(moved)}
