"""What all commands share: options, tables, JSON, errors without tracebacks, exit codes."""

from __future__ import annotations

import functools
import io
import json
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from privagrad._internal.errors import ClusterError
from privagrad.privacy.ledger import BudgetError

if TYPE_CHECKING:
    from privagrad.data.models import SavedModel
    from privagrad.privacy.ledger import Account
    from privagrad.report.statement import Statement

BUG, WRONG_INPUT, REFUSED, INTERRUPTED = 1, 2, 3, 130
debugging = False

JsonObject = dict[str, Any]
"""What a command prints with --json."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
LedgerPath = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        help="All budgets: a file, or a PostgreSQL database (postgresql://USER@HOST/DATABASE). "
        "Default: $PRIVAGRAD_LEDGER, or a file in your data directory.",
        metavar="FILE|URL",
    ),
]
ReportPath = Annotated[
    Path | None, typer.Option("--report", help="Write an HTML report to this file.", dir_okay=False)
]
StatementPath = Annotated[
    Path | None,
    typer.Option(
        "--statement",
        help="With --report: what only the data owner can say, a TOML file. What it leaves open is "
        "shown as open.",
        dir_okay=False,
    ),
]


def require_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path | None]) -> None:
    """Refuse files that cannot be written, and those that would replace what is read."""
    from privagrad.fitting import require_writable

    taken = {path.resolve() for path in inputs if path is not None}
    for path in outputs:
        if path is None:
            continue
        require_writable(path)
        if path.resolve() in taken:
            raise ValueError(
                f"Expected different files to read and to write, found {path.name} twice. Give "
                "another path."
            )
        taken.add(path.resolve())


def command(function: Callable[..., object]) -> Callable[..., None]:
    """Make a command: print errors in one line; with --json print what it returns, nothing else.

    A result with an `exit_code` other than 0 ends with it.
    """

    @functools.wraps(function)
    def wrapped(**arguments: Any) -> None:
        as_json = bool(arguments.get("as_json"))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", UserWarning)
                # Warnings are printed at once, before anything is spent.
                warnings.showwarning = lambda message, *_: note(str(message), "warning")
                with redirect_stdout(io.StringIO()) if as_json else nullcontext():
                    result = function(**arguments)
            if as_json:
                print(json.dumps(result, ensure_ascii=False, indent=1, default=str))
            if isinstance(result, dict) and result.get("exit_code"):
                raise typer.Exit(result["exit_code"])
        except typer.Exit:
            raise
        except BudgetError as error:
            _fail(error, REFUSED, as_json)
        except (ValueError, TypeError, OSError, ImportError, ClusterError) as error:
            _fail(error, WRONG_INPUT, as_json)
        except (KeyboardInterrupt, typer.Abort) as error:
            _fail(error, INTERRUPTED, as_json, "interrupted")
        except MemoryError as error:
            message = (
                f"Expected memory for this table and model, found too little: {error or 'no room'}."
                " What was reserved in a budget stays reserved. Take fewer rows or columns, or a "
                "machine with more."
            )
            _fail(error, WRONG_INPUT, as_json, message)
        except Exception as error:
            message = (
                f"{type(error).__name__}: {error}. This is a bug in privagrad; please report it "
                "with the output of privagrad --debug."
            )
            _fail(error, BUG, as_json, message)

    return wrapped


def _fail(error: BaseException, code: int, as_json: bool, message: str | None = None) -> None:
    if debugging:
        raise error
    text = message or str(error) or type(error).__name__
    if as_json:
        print(json.dumps({"error": text, "exit_code": code}, ensure_ascii=False))
    else:
        shown = "".join(c if c.isprintable() else "?" for c in text.replace("\n", " "))
        note(shown, "error", "red")
    raise typer.Exit(code) from None


def busy(what: str) -> AbstractContextManager[Any]:
    """Show on a terminal what takes time."""
    return Console(stderr=True).status(escape(what))


def note(text: str, kind: str = "note", colour: str = "yellow") -> None:
    """Print a note, a warning or an error on standard error."""
    line = f"[{colour}]{kind}:[/{colour}] {escape(text)}"
    Console(stderr=True).print(line, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a line."""
    Console().print(escape(text), highlight=False, soft_wrap=True)


def explain(text: str) -> None:
    """Print a paragraph, as wide as the terminal, after an empty line."""
    Console().print(f"\n{escape(text)}", highlight=False)


def read_statement_for(report: Path | None, statement: Path | None) -> Statement | None:
    """The data owner's statement for a report, read before anything is spent."""
    if statement is None:
        return None
    if report is None:
        raise ValueError("Expected --report FILE with --statement, found none.")
    if report.resolve() == statement.resolve():
        raise ValueError(
            f"Expected another file for the report, found the statement {report.name}."
        )
    from privagrad.report.statement import read_statement

    return read_statement(statement)


def account_of(model: SavedModel, where: str | None, without: str) -> Account | None:
    """The budget that a model was charged to.

    Without --ledger it may be unknown, as on another machine. A note then says so, and what is done
    `without` it.
    """
    from privagrad.privacy.ledger import Ledger

    name, ledger = model.made["dataset"], Ledger(where)
    if name is None:
        if where is not None:
            raise ValueError("Expected a model that a budget has paid for, found one without.")
        return None
    try:
        account = ledger.account(name)
        if all(run.name != model.made["run"] for run in account.runs):
            raise ValueError(
                f"Expected the run {model.made['run']} of the model in {ledger.where}, found none."
            )
    except ValueError as error:
        if where is not None:
            raise
        note(f"{error} {without}: give --ledger.")
        return None
    return account


def show_table(
    title: str, columns: Iterable[str], rows: Iterable[Iterable[object]], left: int = 1
) -> None:
    """Print a table; the first `left` columns are aligned to the left."""
    shown = Table(title=escape(title), title_justify="left")
    for number, column in enumerate(columns):
        shown.add_column(escape(column), justify="left" if number < left else "right")
    for row in rows:
        shown.add_row(*(escape(str(cell)) for cell in row))
    Console().print(shown)


def say_where(out: Path, *names: str) -> None:
    """Print the names of the files that were written."""
    say(f"wrote {', '.join(names)} in {out}")
