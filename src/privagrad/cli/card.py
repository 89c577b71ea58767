"""`privagrad card`: the privacy card of a model, its check, and the entry in a public registry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from privagrad._internal.atomic import atomic_write
from privagrad.cli._output import (
    BUG,
    Json,
    JsonObject,
    LedgerPath,
    account_of,
    command,
    note,
    say,
)
from privagrad.data.models import load_model

CARD_IS_WRONG = BUG
"""The exit code of a check that finds something."""

_ENDINGS = ".json (the card), .md (the same for people) or .yaml (an entry of the registry)"


@command
def card(
    model: Annotated[
        Path | None, typer.Argument(help="A model file of privagrad fit.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help=f"The file to write; its ending decides: {_ENDINGS}."),
    ] = None,
    statement: Annotated[
        Path | None, typer.Option(help="What the owner of the data states: a TOML file.")
    ] = None,
    ledger: LedgerPath = None,
    template: Annotated[
        Path | None, typer.Option(help="Write an empty statement to this file, to be filled in.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(help="Check this card instead: its form, and every number that follows."),
    ] = None,
    as_json: Json = False,
) -> JsonObject:
    """Show the privacy card of a model: what is guaranteed, what is open, who answers for what.

    A card answers the questions of those who decide about a publication. What only the owner of
    the data knows comes from a statement: write one with --template, fill it in, and give it with
    --statement. Questions that nobody answers are listed as open. Exact figures and categories are
    not in the card.

    --check computes epsilon again from the releases in a card. It ends with exit code 1 and names
    the lines that are wrong.

    Examples:

    `privagrad card income.model`

    `privagrad card --template statement.toml`   (then fill it in)

    `privagrad card income.model --statement statement.toml -o card.json`

    `privagrad card --check card.json`
    """
    chosen = [value for value in (model, template, check) if value is not None]
    if len(chosen) != 1:
        raise ValueError(
            f"Expected one of MODEL, --template and --check, found {len(chosen)} of them."
        )
    if model is not None:
        return _card(model, out, statement, ledger)
    if (out, statement, ledger) != (None, None, None):
        raise ValueError("Expected MODEL with --out, --statement and --ledger, found none.")
    return _check(check) if check is not None else _write_template(chosen[0])


def _card(path: Path, out: Path | None, statement: Path | None, ledger: str | None) -> JsonObject:
    from privagrad.report.card import card_text, privacy_card, statement_from
    from privagrad.report.card_markdown import card_markdown
    from privagrad.report.registry import registry_yaml

    writers = {".json": card_text, ".md": card_markdown, ".yaml": registry_yaml,
               ".yml": registry_yaml}  # fmt: skip
    if out is not None and out.suffix.lower() not in writers:
        raise ValueError(f"Expected a file that ends in {_ENDINGS}; found {out.name}.")
    if out is not None and out.resolve() in {p.resolve() for p in (path, statement) if p}:
        raise ValueError(f"Expected a file to write, found {out.name}, which is read.")
    told, fitted = statement_from(statement), load_model(path)
    account = account_of(fitted, ledger, "The card leaves the budget open")
    found = privacy_card(fitted, statement=told, account=account)
    if out is None:
        typer.echo(card_markdown(found), nl=False)
        return found
    text = writers[out.suffix.lower()](found)
    with atomic_write(out) as file:
        file.write(text.encode("utf-8"))
    left = [entry for entry in found["questions"] if entry["status"] == "open"]
    say(f"wrote {out}")
    if left:
        note(f"{len(left)} of {len(found['questions'])} questions are open; the card lists them.")
    return found


def _check(path: Path) -> JsonObject:
    from privagrad.report.card_check import check_card, writer_of

    findings = check_card(path)
    for finding in findings:
        say(f"{path.name}: {finding}")
    if not findings:
        say(f"{path.name}: epsilon, mu and all that follows from the releases is right.")
        note("Figures, facts about the table and the owner's words cannot be checked.")
    if not findings and (writer := writer_of(path)) is not None:
        note(f"Another version, {writer}, wrote the card: its sentences were not compared.")
    told: list[dict[str, Any]] = [
        {"line": f.line, "pointer": f.pointer, "problem": f.problem} for f in findings
    ]
    code = {"exit_code": CARD_IS_WRONG} if findings else {}
    return {"card": str(path), "right": not findings, "findings": told, **code}


def _write_template(path: Path) -> JsonObject:
    from privagrad.report.statement import statement_template

    if path.exists():
        raise ValueError(f"Expected a new file for the template, found {path}. Give another name.")
    with atomic_write(path) as file:
        file.write(statement_template().encode("utf-8"))
    say(f"wrote {path}: fill it in, then privagrad card MODEL --statement {path}")
    return {"template": str(path)}
