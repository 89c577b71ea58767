"""`privagrad init`: the questions before the first fit, a schema and a budget from the answers."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privagrad.cli import _questions as read
from privagrad.cli._output import Json, JsonObject, LedgerPath, busy, command, note, say
from privagrad.cli._public import ask_columns, ask_target
from privagrad.cli._questions import Questions
from privagrad.cli.fit import Encoding, Header, Names, Separator, Sheet, inferred, require_new
from privagrad.cli.plan import show_forecast, values

if TYPE_CHECKING:
    from privagrad.data.schema import Schema
    from privagrad.fitting import FitRequest
    from privagrad.privacy.ledger import Account, Ledger

_TOTAL, _EPSILON = 3.0, 1.0
_OPTIONS = "Answers, so that they are not asked"


@command
def init(
    table: Annotated[
        Path, typer.Argument(help="A .csv, .tsv, .csv.gz, .xlsx, .parquet or .arrow file.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The schema to write.")] = Path(
        "schema.toml"
    ),
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Take all defaults without asking, for scripts.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help="The column to predict.", rich_help_panel=_OPTIONS),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="classification or regression.", rich_help_panel=_OPTIONS)
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Name of the budget.", rich_help_panel=_OPTIONS)
    ] = None,
    total: Annotated[
        float | None, typer.Option(help="Epsilon of all runs.", rich_help_panel=_OPTIONS)
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Delta of all runs.", rich_help_panel=_OPTIONS)
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option("--epsilon", "-e", help="Of the first run.", rich_help_panel=_OPTIONS),
    ] = None,
    header: Header = None,
    separator: Separator = None,
    names: Names = None,
    encoding: Encoding = "utf-8",
    sheet: Sheet = None,
    ledger: LedgerPath = None,
    as_json: Json = False,
) -> JsonObject:
    """Ask what is public about a table, write the schema, open a budget, show the plan.

    Every question has a default and says why it is asked; Enter takes the default. Answer from what
    you know without looking at the rows: the codebook, the law, common sense. No value of the table
    is shown. Nothing is written or opened before the last question, and nothing is spent at all.

    Examples:

    `privagrad init people.csv`

    `privagrad init people.csv --yes --target income --dataset people -o people.toml`
    """
    from privagrad.data.frames import row_count
    from privagrad.fitting import FitRequest, fingerprint, forecast_table, require_writable
    from privagrad.privacy.ledger import Ledger

    if not yes and (as_json or not _interactive()):
        raise ValueError(
            "Expected a terminal to ask questions in, found none: give --yes to take all defaults."
        )
    require_new(out)
    require_writable(out)
    asked, budgets = Questions(yes), Ledger(ledger)
    with _nothing_half_written():
        found = inferred(table, header, separator, names, encoding, sheet)
        _require_style(asked, found, table)
        found, kind = ask_target(asked, found, target, task)
        found = ask_columns(asked, found, kind)
        with busy(f"counting the rows of {table.name}"):
            content, n = fingerprint(table), row_count(table, found)
        account = _existing(budgets, content, dataset)
        is_new = account is None
        if account is None:
            account = _ask_budget(asked, table, n, content, budgets, (dataset, total, delta))
        first = _ask_epsilon(asked, account, epsilon)
        request = FitRequest(
            table, None, first, schema=found, task=kind, dataset=account.name, ledger=budgets
        )
        with busy(f"planning {table.name}"):
            forecast = forecast_table(request, [first], account)
        if not as_json:
            show_forecast(forecast)
        if not asked.confirm(
            f"Write {out}" + (f" and open the budget {account.name!r}?" if is_new else "?"),
            "The total of a budget is fixed once. The schema can still be changed by hand.",
            True,
        ):
            raise typer.Abort
        _write(out, found, table, budgets, account if is_new else None)
    line = _command(request, out, None if ledger is None else budgets)
    say(f"wrote {out}" + (f" and opened the budget {account.name}" if is_new else ""))
    say(f"Next: {line}")
    return {"schema": str(out), "dataset": account.name, "command": line, "plan": values(forecast)}


def _interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


@contextmanager
def _nothing_half_written() -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, typer.Abort):
        note("Nothing was written, no budget was opened, nothing was spent.")
        raise


def _require_style(asked: Questions, schema: Schema, table: Path) -> None:
    """Let somebody check how numbers are written, where that was guessed."""
    from privagrad.data.readers import require_usual_numbers

    usual = (schema.decimal, schema.thousands) == (".", "")
    if usual:
        return
    shown = f"1{schema.thousands}234{schema.decimal}5"
    why = "1,234 may be one number or two: a wrong guess would make other numbers of them."
    if asked.silent or not asked.confirm(f"Are numbers written like {shown}?", why, True):
        require_usual_numbers(schema, table.name)


def _existing(ledger: Ledger, content: str, dataset: str | None) -> Account | None:
    """The budget that these rows have already: they get no second one."""
    owners = ledger.owners(content)
    if not owners:
        return None
    account = ledger.account(owners[0])
    if dataset is not None and dataset != account.name:
        raise ValueError(
            f"Expected the budget that these rows have already, {account.name!r}, found --dataset "
            f"{dataset}: two budgets for the same rows would protect them less than each one says."
        )
    say(f"\nThese rows have a budget already: {account.name}, epsilon {account.epsilon:g}.")
    return account


def _ask_budget(
    asked: Questions,
    table: Path,
    n: int,
    content: str,
    ledger: Ledger,
    given: tuple[str | None, float | None, float | None],
) -> Account:
    """A budget that is not open yet."""
    from privagrad.linear import default_delta
    from privagrad.privacy.ledger import Account

    taken = ledger.names()

    def new(answer: str) -> str:
        name = answer.strip()
        if not name or name in taken:
            raise ValueError(
                f"Expected a new name, found {name!r}, which has a budget in {ledger.where}: use "
                "it in `privagrad fit` if it is that of these rows, or give another name."
                if name
                else "Expected a name for the budget, found none."
            )
        return name

    why = f"The budget of this data set in {ledger.where}: one total for all runs on these rows."
    name = asked.ask("Name of the budget", why, table.name.partition(".")[0], new, given[0])
    why = "The most that one person may lose over all uses of these rows. Usual values: 0.1 to 3."
    total = asked.ask("Total epsilon", why, f"{_TOTAL:g}", read.number("epsilon"), given[1])
    why = (
        f"Probability that the guarantee may fail: well below 1/{n}, which publishing one of the "
        f"{n} rows at random would have."
    )
    usual = _round_down(default_delta(n))
    delta = asked.ask("Delta", why, f"{usual:g}", read.number("delta", 1 / n), given[2])
    why = (
        "A budget for exactly these rows refuses files that changed: they are another data set. "
        "Answer no if rows will be corrected or added."
    )
    bound = asked.confirm("Only for the file as it is now?", why, True)
    return Account(name, total, delta, content if bound else None, ())


def _round_down(value: float) -> float:
    """One digit of a number, not more than it."""
    unit = 10.0 ** math.floor(math.log10(value) + 1e-9)
    return float(f"{math.floor(value / unit + 1e-9) * unit:.0e}")


def _ask_epsilon(asked: Questions, account: Account, given: float | None) -> float:
    why = (
        "Epsilon of the first run: less protects more, and leaves more for later runs. See the "
        "plan below; `privagrad plan` compares several."
    )
    usual = f"{min(_EPSILON, account.epsilon):g}"
    return asked.ask(
        "Epsilon of this run", why, usual, read.number("epsilon", account.epsilon), given
    )


def _write(out: Path, schema: Schema, table: Path, ledger: Ledger, account: Account | None) -> None:
    """The schema, and the budget if it is new: both or neither."""
    from privagrad.data.schema import template

    with out.open("x", encoding="utf-8") as file:
        try:
            file.write(template(schema, table.name))
            file.flush()
            if account is not None:
                ledger.create(account.name, account.epsilon, account.delta, account.fingerprint)
        except BaseException:
            out.unlink()
            raise


def _command(request: FitRequest, out: Path, ledger: Ledger | None) -> str:
    """The command that makes the first fit."""
    model = request.table.name.partition(".")[0] + ".model"
    words = ["privagrad", "fit", str(request.table), "--schema", str(out), "--dataset",
             str(request.dataset), "--epsilon", f"{request.epsilon:g}"]  # fmt: skip
    words += ["--task", "regression"] * (request.task == "regression")
    words += [] if ledger is None else ["--ledger", ledger.where]
    return shlex.join([*words, "-o", model])
