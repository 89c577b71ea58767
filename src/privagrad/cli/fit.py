"""`privagrad schema` and `privagrad fit`: from a file to a model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from privagrad.cli._output import Json, LedgerPath, busy, command, note, say
from privagrad.cli._output import table as show_table


def add_to(app: typer.Typer) -> None:
    app.command()(schema)
    app.command()(fit)


@command
def schema(
    table: Annotated[Path, typer.Argument(help="A .csv, .tsv, .parquet or .arrow file.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write it; default: print it.")
    ] = None,
    target: Annotated[str | None, typer.Option("--target", "-t", help="What to predict.")] = None,
    header: Annotated[
        bool | None,
        typer.Option(
            "--header/--no-header",
            help="Whether the first line names the columns. Default: it does, and a line that "
            "might be a row is refused, because names are public.",
        ),
    ] = None,
    separator: Annotated[str | None, typer.Option(help="Between cells; default: guessed.")] = None,
    names: Annotated[
        str | None, typer.Option(help="With --no-header: the columns' names, by commas.")
    ] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Write a template of what is public about a table, from its header and types alone.

    Fill in bounds and categories that you know without looking at the rows. What you leave empty is
    learned privately, out of the same budget.

    Examples:

    `privagrad schema people.csv --target income -o schema.toml`

    `privagrad schema adult.data --no-header --names age,job,income -o schema.toml`
    """
    from privagrad.data.readers import infer_schema
    from privagrad.data.schema import as_values, template

    if out is not None and out.exists():
        raise ValueError(f"Expected a new file, found {out}: it may hold what you filled in.")
    if separator is not None and len(separator) != 1:
        raise ValueError(f"Expected a separator of one character, found {separator!r}.")
    found = infer_schema(table, header, separator)
    if names is not None:
        given = [name.strip() for name in names.split(",")]
        named = found.header
        if named or len(given) != len(found.columns) or len(set(given)) < len(given):
            raise ValueError(
                f"Expected --no-header and {len(found.columns)} different names, found "
                f"{len(given)}{' and a header' if named else ''}."
            )
        pairs = zip(found.columns, given, strict=True)
        found = replace(found, columns=tuple(replace(c, name=name) for c, name in pairs))
    if target is not None:
        found.column(target)
        found = replace(found, target=target)
    text = template(found, table.name)
    if out is None:
        if not as_json:
            print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")
        if not as_json:
            say(f"wrote {out}: fill it in, then privagrad fit {table.name} --schema {out} ...")
    return as_values(found)


@command
def fit(
    table: Annotated[Path, typer.Argument(help="A .csv, .tsv, .parquet, .arrow or LIBSVM file.")],
    epsilon: Annotated[float, typer.Option("--epsilon", "-e", help="What this run may cost.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The model file to write.", dir_okay=False)
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="The column to predict.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Default: the budget's, or below 1/(10 rows).")
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="logistic or hinge for classes; huber, absolute or quantile for numbers. "
            "Default by the target's kind: logistic or huber."
        ),
    ] = None,
    quantile: Annotated[float, typer.Option(help="With --loss quantile: in (0, 1).")] = 0.5,
    method: Annotated[str, typer.Option(help="pagan; pasan and dp-adagrad to compare.")] = "pagan",
    schema: Annotated[
        Path | None, typer.Option(help="What is public about the table: see privagrad schema.")
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="All labels, by commas; default: found privately.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="The budget that pays: see privagrad budget.")
    ] = None,
    ledger: LedgerPath = None,
    test: Annotated[
        Path | None, typer.Option(help="A table to test on; its figures are NOT private.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Also write a report, one HTML file.", dir_okay=False)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be spent on what; spend nothing.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    step_size: Annotated[float | None, typer.Option(help="Instead of the recipe's.")] = None,
    radius: Annotated[float | None, typer.Option(help="Instead of the recipe's.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Repeatable noise: the model is then NOT private.")
    ] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Fit a linear model to a table under differential privacy, without tuning.

    Everything is paid from --epsilon: categories and ranges of columns that the schema leaves open,
    training, and the figures that are printed and reported. Public are the number of rows and what
    the schema states. With --dataset the cost is reserved before the first release, and refused,
    before the table is read, where it does not fit.

    Examples:

    `privagrad fit people.csv --target income --epsilon 1 -o income.model`

    `privagrad fit people.csv --schema schema.toml -e 1 --dataset people --test held-out.csv
    --report report.html -o income.model`

    `privagrad fit a9a.libsvm -e 1 --classes=-1,1 -o a9a.model`

    `privagrad fit people.csv --schema schema.toml -e 1 --dry-run`
    """
    from privagrad import fitting
    from privagrad.data.schema import read_schema
    from privagrad.linear import Choices
    from privagrad.privacy.ledger import Ledger

    _check_places(out, report, test, dry_run, overwrite)
    if test is not None and table.is_file() and fitting.same_content(test, table):
        raise ValueError(
            "Expected another table to test on, found the rows to fit: their exact figures would "
            "tell about them. Private figures on these rows are printed anyway."
        )
    if ledger is not None and dataset is None:
        raise ValueError("Expected --dataset NAME with --ledger, found none.")
    labels = None if classes is None else tuple(part.strip() for part in classes.split(","))
    request = fitting.FitRequest(
        table,
        target,
        epsilon,
        delta,
        loss,
        quantile,
        None if schema is None else read_schema(schema),
        labels,
        Choices(steps, batch_size, step_size, radius, method),
        seed,
        dataset,
        None if dataset is None else Ledger(ledger),
        test,
    )
    with busy(f"reading {table.name}"):
        job = fitting.prepare(request)
    if not as_json:
        _show_plan(job)
        if loss is None and job.classes is None:
            note("the target holds numbers: Huber regression. For classes: --loss logistic.")
    planned = {"epsilon": job.epsilon, "delta": job.delta, "events": [str(e) for e in job.events]}
    if dry_run or out is None:
        return {"dry_run": True, **planned, "public": job.public}
    model = fitting.run(job, out, None if not as_json else False)
    account = request.ledger.account(dataset) if request.ledger and dataset else None
    if report is not None:
        from privagrad.report.fit import write_fit_report

        write_fit_report(report, model, account)
    if not as_json:
        _show_result(model, account, out, report)
    return {
        "model": str(out),
        "report": None if report is None else str(report),
        "privacy": model.privacy,
        "evaluation": model.evaluation,
        "made": model.made,
        "budget": None if account is None else {"total": account.epsilon, "spent": account.spent},
    }


def _check_places(
    out: Path | None, report: Path | None, test: Path | None, dry_run: bool, overwrite: bool
) -> None:
    """Before anything is spent: the places to write to are there."""
    if out is None and not dry_run:
        raise ValueError("Expected -o MODEL, the file to write, or --dry-run; found none.")
    if out is not None and out.exists() and not overwrite and not dry_run:
        raise ValueError(
            f"Expected a new file, found {out}: a model that was paid for. Give another name, or "
            "--overwrite."
        )
    for path in (out, report):
        if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            raise ValueError(
                f"Expected a folder to write {path.name} to, found none: {path.parent}."
            )
    if test is not None and not test.is_file():
        raise FileNotFoundError(f"Expected a table to test on, found nothing at {test}.")


def _show_plan(job: Any) -> None:
    rows = [
        (e.purpose, e.count, f"{e.noise_multiplier:.4g}", e.sampling or "all rows")
        for e in job.events
    ]
    title = f"Planned releases: together epsilon {job.epsilon:.4g} at delta {job.delta:.3g}"
    show_table(title, ("what", "times", "noise multiplier", "rows"), rows)
    say("Public, not protected: " + "; ".join(job.public) + ".")
    if job.account:
        after = job.account.spent_with(job.events)
        say(
            f"Budget {job.account.name}: {job.account.spent:.4g} of {job.account.epsilon:g} spent, "
            f"{after:.4g} after this run."
        )
    else:
        note("No --dataset given: this run is not charged to any budget.")


def _show_result(model: Any, account: Any, out: Path, report: Path | None) -> None:
    from privagrad.cli.models import figures

    for line in figures(model):
        say(line)
    if model.privacy["seeded"]:
        note("seeded noise: this model is NOT private.", "warning")
    if account:
        say(f"Budget {account.name}: {account.spent:.4g} of {account.epsilon:g} spent.")
    say(f"wrote {out}" + (f" and {report}" if report else ""))
