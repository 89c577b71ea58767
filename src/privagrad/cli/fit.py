"""`privagrad schema` and `privagrad fit`: from a file to a model."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer.models import OptionInfo

from privagrad.cli._output import (
    Json,
    JsonObject,
    LedgerPath,
    ReportPath,
    StatementPath,
    busy,
    command,
    note,
    read_statement_for,
    require_outputs,
    say,
    show_table,
)

if TYPE_CHECKING:
    from privagrad.data.models import SavedModel
    from privagrad.data.schema import Schema
    from privagrad.fitting import PreparedFit
    from privagrad.privacy.events import Event
    from privagrad.privacy.ledger import Account

Target = Annotated[str | None, typer.Option("--target", "-t", help="The column to predict.")]
Header = Annotated[
    bool | None,
    typer.Option(
        "--header/--no-header",
        help="Whether the first line holds the names of the columns. Default: it does. A "
        "first line that may be a row is refused, because names are public.",
    ),
]
Separator = Annotated[str | None, typer.Option(help="Between cells. Default: guessed.")]
Names = Annotated[
    str | None,
    typer.Option(help="With --no-header: the names of the columns, separated by commas."),
]
Encoding = Annotated[str, typer.Option(help="Of a text file: utf-8, latin-1, cp1252, utf-16, ...")]
Sheet = Annotated[str | None, typer.Option(help="Of an Excel file with several.")]


def _advanced(text: str, least: int | None = None) -> OptionInfo:
    """An option that most people do not need."""
    panel = "Advanced: the defaults need no tuning"
    option: OptionInfo = typer.Option(help=text, min=least, rich_help_panel=panel)
    return option


@command
def schema(
    table: Annotated[
        Path,
        typer.Argument(
            help="A .csv, .tsv, .csv.gz, .xlsx, .parquet or .arrow file, or a folder of them."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write. Default: print it.")
    ] = None,
    target: Target = None,
    header: Header = None,
    separator: Separator = None,
    names: Names = None,
    encoding: Encoding = "utf-8",
    sheet: Sheet = None,
    as_json: Json = False,
) -> JsonObject:
    """Write a template for what is public about a table: the names and kinds of its columns.

    Parquet and Arrow files state the kinds; in text and Excel files they are guessed from the first
    10,000 rows, so that a template in use makes public whether all entries there read as numbers or
    dates, and how numbers are written.

    Fill in the bounds and categories that you know without looking at the rows. Everything in the
    schema is public. What you leave empty is learned from the rows with noise, and charged to the
    epsilon of the fit.

    Examples:

    `privagrad schema people.csv --target income -o schema.toml`

    `privagrad schema adult.data --no-header --names age,job,income -o schema.toml`
    """
    from privagrad.data.schema import as_values, template

    require_new(out)
    found = inferred(table, header, separator, names, encoding, sheet)
    if target is not None:
        found.column(target)
        found = replace(found, target=target)
    text = template(found, table.name)
    if out is None:
        print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")
        say(f"wrote {out}. Fill it in, then: privagrad fit {table.name} --schema {out} ...")
    return as_values(found)


def require_new(out: Path | None) -> None:
    """Refuse to write over a schema."""
    if out is not None and out.exists():
        raise ValueError(
            f"Expected a new file, found {out}: it may have been filled in. Give another name."
        )


def inferred(
    table: Path,
    header: bool | None,
    separator: str | None,
    names: str | None,
    encoding: str,
    sheet: str | None,
) -> Schema:
    """The schema of a table, from its header and column types only."""
    from privagrad.data.readers import infer_schema
    from privagrad.data.schema import encoding_named

    if separator is not None and len(separator) != 1:
        raise ValueError(f"Expected a separator of one character, found {separator!r}.")
    found = infer_schema(table, header, separator, encoding_named(encoding), sheet)
    if names is None:
        return found
    return _renamed(found, [name.strip() for name in names.split(",")])


def _renamed(schema: Schema, names: list[str]) -> Schema:
    columns = schema.columns
    if schema.header or len(names) != len(columns) or len(set(names)) < len(names):
        raise ValueError(
            f"Expected --no-header and {len(columns)} different names, found {len(names)}"
            f"{' and a header' if schema.header else ''}."
        )
    pairs = zip(columns, names, strict=True)
    return replace(schema, columns=tuple(replace(column, name=name) for column, name in pairs))


@command
def fit(
    table: Annotated[
        Path,
        typer.Argument(help="A .csv, .tsv, .parquet, .arrow or LIBSVM file, or a folder of them."),
    ],
    epsilon: Annotated[
        float, typer.Option("--epsilon", "-e", help="The privacy cost of this run, at most.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The model file to write.", dir_okay=False)
    ] = None,
    target: Target = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Probability that the guarantee may fail. Default: that of the budget, or less "
            "than 1/(10 rows)."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="classification or regression. Needed for a target of numbers, unless --loss or "
            "--classes says it."
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="logistic or hinge for classes; huber, absolute, quantile or squared (least "
            "squares) for numbers. Default: logistic for classification, huber for regression."
        ),
    ] = None,
    quantile: Annotated[float, typer.Option(help="For --loss quantile, in (0, 1).")] = 0.5,
    schema: Annotated[
        Path | None, typer.Option(help="What is public about the table: see privagrad schema.")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            help="All labels, separated by commas: they are public. Default: learned privately."
        ),
    ] = None,
    class_weight: Annotated[
        str | None,
        typer.Option(
            help="balanced: all classes weigh the same, at most 1 to 50. One more release learns "
            "their frequencies. Probabilities are then those for classes of equal frequency."
        ),
    ] = None,
    user_column: Annotated[
        str | None,
        typer.Option(
            help="The column that names the user of each row: the guarantee then covers all rows "
            "of a user together. It is no feature."
        ),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="The budget that is charged: see privagrad budget.")
    ] = None,
    ledger: LedgerPath = None,
    encoding: Annotated[
        str | None,
        typer.Option(help="Of a text file: latin-1, utf-16, ... Default: the schema's, or utf-8."),
    ] = None,
    test: Annotated[
        Path | None, typer.Option(help="A table to test on. The test scores are NOT private.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="The Dask scheduler of a cluster, such as tcp://host:8786: its workers read the "
            "table, at the same path, and rows stay on them. The schema states all categories.",
            metavar="ADDRESS",
        ),
    ] = None,
    report: ReportPath = None,
    statement: StatementPath = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be released; spend nothing.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing model file.")
    ] = False,
    steps: Annotated[int | None, _advanced("Number of steps.", least=1)] = None,
    batch_size: Annotated[int | None, _advanced("Expected rows of a step.", least=1)] = None,
    step_size: Annotated[float | None, _advanced("Length of the steps.")] = None,
    radius: Annotated[float | None, _advanced("Bound on the gradient of a row.")] = None,
    noise: Annotated[
        str, _advanced("gaussian; or discrete: exact in whole numbers, slower, at the same cost.")
    ] = "gaussian",
    seed: Annotated[int | None, _advanced("Repeatable noise: the model is NOT private.")] = None,
    as_json: Json = False,
) -> JsonObject:
    """Fit a linear model to a table under differential privacy, without tuning.

    --epsilon pays for everything: the categories and ranges that the schema leaves open, the
    training, and the scores that are printed and reported. The number of rows, what the schema
    states and all options are public.

    With --dataset the cost is reserved in the budget before the first release. A run that does not
    fit into the budget is refused before the table is read.

    Examples:

    `privagrad fit people.csv --target income --task regression --epsilon 1 -o income.model`

    `privagrad fit people.csv --schema schema.toml -e 1 --dataset people --test held-out.csv
    --report report.html -o income.model`

    `privagrad fit a9a.libsvm -e 1 --classes=-1,1 -o a9a.model`

    `privagrad fit /data/people --schema schema.toml -e 1 --cluster tcp://host:8786 -o income.model`

    `privagrad fit people.csv --schema schema.toml -e 1 --dry-run`
    """
    from privagrad import fitting
    from privagrad.data.schema import encoding_named, read_schema
    from privagrad.linear import Choices
    from privagrad.privacy.ledger import Ledger
    from privagrad.privacy.noise import noise_kind

    _check_paths(out, report, dry_run, overwrite, (table, schema, test, statement))
    said = read_statement_for(report, statement)
    if test is not None and not test.exists():
        raise FileNotFoundError(f"Expected a table to test on, found nothing at {test}.")
    if ledger is not None and dataset is None:
        raise ValueError("Expected --dataset NAME with --ledger, found none.")
    labels = None if classes is None else tuple(part.strip() for part in classes.split(","))
    stated = None if schema is None else read_schema(schema)
    if encoding is not None:
        encoding = encoding_named(encoding)
        stated = None if stated is None else replace(stated, encoding=encoding)
    choices = Choices(steps, batch_size, step_size, radius)
    budgets = Ledger(ledger)
    request = fitting.FitRequest(
        table, target, epsilon, delta, loss, quantile, stated, labels, choices, seed, dataset,
        budgets, test, noise_kind(noise), cast("fitting.Task | None", task), encoding or "utf-8",
        class_weight, user_column,
    )  # fmt: skip
    with ExitStack() as stack:
        if cluster is not None:
            request = replace(request, cluster=_client(cluster, stack))
        with busy(f"reading {table.name}"):
            job = fitting.prepare(request)
        if not as_json:
            _show_plan(job)
        events = [str(event) for event in job.events]
        planned = {"epsilon": job.epsilon, "delta": job.delta, "events": events}
        if dry_run or out is None:
            return {"dry_run": True, **planned, "public": job.public, "notes": job.notes}
        model = fitting.run(job, out, None if not as_json else False)
    account = request.ledger.account(dataset) if request.ledger and dataset else None
    if report is not None:
        from privagrad.report.fit import write_fit_report

        write_fit_report(report, model, account, said)
    if not as_json:
        for line in model.made["notes"]:
            if line not in job.notes:
                note(line)
        _show_result(model, account, out, report)
    return {
        "model": str(out),
        "report": None if report is None else str(report),
        "privacy": model.privacy,
        "evaluation": model.evaluation,
        "made": model.made,
        "budget": None if account is None else {"total": account.epsilon, "spent": account.spent},
    }


def _client(address: str, stack: ExitStack) -> object:
    """A client of the cluster with this scheduler, until the stack ends."""
    from privagrad.distributed import cluster_at

    with busy(f"connecting to {address}"):
        return stack.enter_context(cluster_at(address))


def _check_paths(
    out: Path | None,
    report: Path | None,
    dry_run: bool,
    overwrite: bool,
    inputs: tuple[Path | None, ...],
) -> None:
    """Check that all files can be written, before anything is spent."""
    if out is None and not dry_run:
        raise ValueError("Expected -o MODEL, the file to write, or --dry-run; found neither.")
    if out is not None and out.exists() and not overwrite and not dry_run:
        raise ValueError(
            f"Expected a new file, found {out}: a model that has cost privacy. Give another name, "
            "or --overwrite."
        )
    require_outputs((out, report), inputs)


def _show_plan(job: PreparedFit) -> None:
    units = f"{job.table.unit}s"
    rows = [
        (e.purpose, e.count, _noise(e), f"all {units}" if e.sampling is None else e.sampling)
        for e in job.events
    ]
    title = f"Planned releases: epsilon {job.epsilon:.4g} at delta {job.delta:.3g} in total"
    show_table(title, ("purpose", "times", "noise multiplier", units), rows)
    say("Public, not protected: " + "; ".join(job.public) + ".")
    for line in job.notes:
        note(line)
    if job.account:
        after = job.account.spent_with(job.events)
        say(
            f"Budget {job.account.name}: {job.account.spent:.4g} of {job.account.epsilon:g} spent, "
            f"{after:.4g} after this run."
        )
    else:
        note("No --dataset given: this run is not charged to any budget.")


def _noise(event: Event) -> str:
    from privagrad.privacy.events import SelectEvent

    return "–" if isinstance(event, SelectEvent) else f"{event.noise_multiplier:.4g}"


def _show_result(
    model: SavedModel, account: Account | None, out: Path, report: Path | None
) -> None:
    from privagrad.cli.models import scores

    for line in scores(model):
        say(line)
    if model.privacy["seeded"]:
        note("The noise is seeded: this model is NOT private.", "warning")
    if account:
        say(f"Budget {account.name}: {account.spent:.4g} of {account.epsilon:g} spent.")
    say(f"wrote {out}" + (f" and {report}" if report else ""))
