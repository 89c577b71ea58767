"""The command line: `privagrad --help`."""

from __future__ import annotations

import atexit
import gc
from typing import Annotated

import typer

from privagrad.cli import (
    _output,
    audit,
    budget,
    card,
    compare,
    fit,
    init,
    models,
    plan,
    reproduce,
    review,
    server,
)

_COLLECTED_AFTER = 100_000
"""New objects after which the garbage collector looks for garbage."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""Differentially private training with noise that follows the gradients' geometry.

Fit a model to a table of numbers, then predict:

`privagrad fit people.csv --target income --task regression --epsilon 1 -o income.model`

`privagrad predict income.model new-people.csv -o predictions.csv`

The start, with questions, each with a default and its reason:

`privagrad init people.csv`

What a fit would cost and how good it may be, before anything is spent:

`privagrad plan people.csv --schema schema.toml --epsilons 0.1,1,3`

`privagrad plan --rows 20000 --columns 30`   (without data)

The same by hand, with text columns and a budget for all runs on the same data:

`privagrad schema people.csv --target income -o schema.toml`   (then fill it in)

`privagrad budget create people --epsilon 3 --delta 1e-6`

`privagrad fit people.csv --schema schema.toml --dataset people -e 1 -o income.model`

Exit codes: 0 success, 1 bug in privagrad or a privacy card that is wrong, 2 wrong input, 3 refused
by the budget, 130 interrupted.""",
)
for command in (
    init.init, plan.plan, fit.schema, fit.fit, models.predict, models.evaluate, models.show,
    card.card, compare.compare, compare.theory, audit.audit,
):  # fmt: skip
    app.command()(command)
for command in (review.review, server.setup, server.move):
    budget.app.command()(command)
app.add_typer(budget.app, name="budget")
app.add_typer(reproduce.app, name="reproduce")


def _version(wanted: bool) -> None:
    if wanted:
        from privagrad import __version__

        typer.echo(f"privagrad {__version__}")
        raise typer.Exit


@app.callback()
def main(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks of errors, for bug reports.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    # What is imported stays until the end: the garbage collector need not look at it again and
    # again, nor take it apart at the end.
    gc.freeze()
    gc.set_threshold(_COLLECTED_AFTER)
    atexit.register(gc.freeze)
    _output.debugging = debug
