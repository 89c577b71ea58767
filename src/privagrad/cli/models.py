"""`privagrad predict`, `privagrad evaluate` and `privagrad show`: the use of a model file."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import numpy as np
import typer

from privagrad._internal.atomic import atomic_write
from privagrad.cli._output import (
    Json,
    JsonObject,
    LedgerPath,
    ReportPath,
    StatementPath,
    account_of,
    busy,
    command,
    note,
    read_statement_for,
    require_outputs,
    say,
    show_table,
)
from privagrad.data.models import INTERVAL, SavedModel, load_model
from privagrad.data.parsing import Tally
from privagrad.data.readers import columns_of
from privagrad.data.schema import encoding_named

if TYPE_CHECKING:
    from privagrad.privacy.ledger import Account

ModelFile = Annotated[Path, typer.Argument(help="A model file of privagrad fit.")]


@command
def predict(
    model: ModelFile,
    table: Annotated[Path, typer.Argument(help="The rows to predict. The target is not needed.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The CSV file to write; - for standard output.")
    ],
    probabilities: Annotated[
        bool,
        typer.Option("--probabilities", help="Add the probability of each class (logistic loss)."),
    ] = False,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Columns to copy before the predictions, separated by commas. Default: those that "
            'the schema ignores and that are named like identifiers. "" for none.',
        ),
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Of a text file. Default: that of the training table.")
    ] = None,
    as_json: Json = False,
) -> JsonObject:
    """Predict the rows of a table. Writes a CSV file with a column `prediction`.

    Predictions cost no privacy: they use the model, not the rows it was fitted to. They do reveal
    something about the rows that are predicted.

    Missing numbers count as the learned centre of their column, together with what the model
    learned of rows where they are missing.

    Examples:

    `privagrad predict income.model new-people.csv -o predictions.csv`

    `privagrad predict income.model new-people.xlsx --keep name,email -o -`
    """
    printed = str(out) == "-"
    require_outputs([None if printed else out], [model, table])
    fitted = load_model(model)
    if encoding is not None and fitted.schema is not None:
        told = replace(fitted.schema, encoding=encoding_named(encoding))
        fitted = replace(fitted, schema=told)
    kept = _kept(fitted, table, keep)
    if probabilities and (fitted.classes is None or fitted.loss != "logistic"):
        raise ValueError(
            f"Expected a model with logistic loss for --probabilities, found {fitted.loss}. Leave "
            "the option out."
        )
    labels = fitted.classes if probabilities and fitted.classes else []
    count, tally = 0, Tally()
    if printed and as_json:
        raise ValueError("Expected a file to write with --json, found -o -.")
    with _printed() if printed else atomic_write(out) as file:
        writer = csv.writer(codecs.getwriter("utf-8")(file), lineterminator="\n")
        chances = [f"probability of {label}" for label in labels]
        writer.writerow([*kept, "prediction", *chances])
        with busy(f"predicting {table.name}"):
            for rows in fitted.rows(table, tally=tally, keep=kept):
                columns = [*rows.kept, fitted.predict(rows.X).tolist()]
                if labels:
                    columns += _probabilities(fitted.margins(rows.X)).T.tolist()
                writer.writerows(zip(*columns, strict=True))
                count += rows.X.shape[0]
    if not printed:
        say(f"wrote {count} predictions to {out}")
    for line in tally.sentences():
        note(line)
    found = {"missing": tally.blanks, "unseen": tally.unseen}
    counts = {what: {k: v for k, v in each.items() if v} for what, each in found.items()}
    return {"rows": count, "out": str(out), "kept": kept, **counts}


def _kept(model: SavedModel, table: Path, asked: str | None) -> list[str]:
    """The columns that are copied: those asked for, or ignored ones with names of identifiers."""
    from privagrad.fitting.notes import looks_like_code

    if model.schema is None:
        if asked:
            raise ValueError(f"Expected no --keep for a LIBSVM file, found {asked!r}.")
        return []
    if asked is not None:
        return [name.strip() for name in asked.split(",") if name.strip()]
    ignored = [c.name for c in model.schema.columns if c.kind in ("ignore", "user")]
    codes = [name for name in ignored if looks_like_code(name)]
    there = columns_of(table, model.schema) if codes and table.is_file() else []
    return [name for name in codes if name in there]


@command
def show(
    model: ModelFile,
    everything: Annotated[bool, typer.Option("--all", help="Show all coefficients.")] = False,
    report: ReportPath = None,
    statement: StatementPath = None,
    ledger: LedgerPath = None,
    as_json: Json = False,
) -> JsonObject:
    """Show a model: coefficients in the original units, scores, and privacy cost.

    The coefficients are sorted by the effect of a typical change of the column. Coefficient ± the
    number beside it is a 95 % interval: how far the noise of privacy may have moved it, other rows
    not counted. Columns of too few rows to be measured come last.

    Example: `privagrad show income.model --report report.html`
    """
    require_outputs([report], [model])
    fitted = load_model(model)
    low, high = fitted.intervals
    said = read_statement_for(report, statement)
    account = account_of(fitted, ledger, "The verdict is that of this run alone")
    if report is not None:
        from privagrad.report.fit import write_fit_report

        write_fit_report(report, fitted, account, said)
    _show(fitted, everything, account)
    if report is not None:
        say(f"wrote {report}")
    return {
        "loss": fitted.loss,
        "classes": fitted.classes,
        "intercept": fitted.intercept.tolist(),
        "coefficients": [
            {"feature": name, "coef": fitted.coef[:, j].tolist(),
             "noise": fitted.coef_noise[:, j].tolist(), "low": low[:, j].tolist(),
             "high": high[:, j].tolist(), "measurable": bool(fitted.measurable[j])}
            for j, name in enumerate(fitted.features)
        ],
        "privacy": fitted.privacy,
        "evaluation": fitted.evaluation,
        "made": fitted.made,
    }  # fmt: skip


def scores(model: SavedModel) -> Iterator[str]:
    """The figures of a model in sentences. Each says whether they are private."""
    if "figures" in model.evaluation or "score" in model.evaluation:
        yield from _scores(model.evaluation, model.classes, "the training rows")
    else:
        yield "Not evaluated on the training rows: fit with evaluate=True, or privagrad evaluate."
    if test := model.evaluation.get("test"):
        yield from _scores(test, model.classes, f"{test['table']}, {test['rows']} rows")


def _scores(found: JsonObject, classes: list[str] | None, where: str) -> Iterator[str]:
    from privagrad.report.figures import figure_lines, verdict

    exact = not found.get("private", "table" not in found)
    yield f"On {where}: {verdict(found, classes)}"
    lines = [f"{name[0].lower() + name[1:] if name != 'AUC' else name} {value}"
             for name, value, _ in figure_lines(found)]  # fmt: skip
    yield (
        "; ".join(lines)
        + ". "
        + (
            "NOT private: exact figures, which reveal something about those rows."
            if exact
            else "Private: measured with noise and charged to epsilon."
        )
    )


@command
def evaluate(
    model: ModelFile,
    table: Annotated[Path, typer.Argument(help="Rows with their targets, not the training rows.")],
    epsilon: Annotated[
        float | None,
        typer.Option(
            "--epsilon", "-e",
            help="The privacy cost of the figures. Without it they are exact and NOT private.",
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            help="Probability that the guarantee may fail. Default: that of the budget, or less "
            "than 1/(10 rows)."
        ),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="The budget that is charged: see privagrad budget.")
    ] = None,
    ledger: LedgerPath = None,
    user_column: Annotated[
        str | None,
        typer.Option(
            help="With --epsilon: the column that names the user of each row. Default: the model's."
        ),
    ] = None,
    report: ReportPath = None,
    statement: StatementPath = None,
    as_json: Json = False,
) -> JsonObject:  # fmt: skip
    """Show how well a model predicts a table: a verdict, and the figures behind it.

    Without --epsilon the figures are exact. They are NOT private, and charged to no budget. With
    --epsilon they are measured with noise, in one release that is charged to the budget of
    --dataset. Rows that have a budget are refused without --epsilon.

    Examples:

    `privagrad evaluate income.model held-out.csv --report report.html`

    `privagrad evaluate income.model patients.csv -e 0.2 --dataset patients`
    """
    from privagrad import fitting
    from privagrad.privacy.ledger import Ledger

    require_outputs([report], [model, table])
    fitted, budgets = load_model(model), Ledger(ledger)
    said = read_statement_for(report, statement)
    request = fitting.EvaluationRequest(
        fitted, table, epsilon, delta, dataset, budgets, user_column=user_column
    )
    with busy(f"reading {table.name}"):
        job = fitting.prepare_evaluation(request)
    if epsilon is not None and dataset is None:
        note("No --dataset given: this run is not charged to any budget.")
    found = fitting.run_evaluation(job)
    unit = found.get("privacy", {}).get("unit", "row")
    for line in _scores(found, fitted.classes, f"{table.name}, {found['rows']} {unit}s"):
        say(line)
    if cost := found.get("privacy"):
        _say_verdict(cost, found["rows"])
    if report is not None:
        from privagrad.report.fit import write_evaluation_report

        account = None if found["run"] is None or dataset is None else budgets.account(dataset)
        write_evaluation_report(report, fitted, found, account, said)
        say(f"wrote {report}")
    return found


def _show(model: SavedModel, everything: bool, account: Account | None) -> None:
    from privagrad.report.card_run import LINEAR_MODEL, kind_of

    names = model.classes if model.coef.shape[0] > 1 and model.classes else [""]
    order, measurable = model.ranking, model.measurable
    shown = order if everything else order[:20]
    columns = ["feature", *(f"coefficient {n}".strip() for n in names), "± 95%", "typical change"]
    reach = INTERVAL * model.coef_noise.max(axis=0)
    rows = [
        (model.features[j], *(f"{c:.4g}" for c in model.coef[:, j]),
         f"{reach[j]:.2g}", f"{model.unit[j]:.4g}" if measurable[j] else "not measurable")
        for j in shown
    ]  # fmt: skip
    show_table(f"{model.loss} on {model.made['table']}", columns, rows)
    if model.classes and model.coef.shape[0] == 1:
        say(f"Positive coefficients raise the probability of {model.classes[1]}.")
    say("Coefficient ± the number beside it: 95 % intervals of the noise that privacy added.")
    if len(shown) < len(order):
        say(f"{len(order) - len(shown)} more coefficients: give --all to show them.")
    say(f"Intercept: {', '.join(f'{value:.4g}' for value in model.intercept)}")
    for line in scores(model):
        say(line)
    privacy = model.privacy
    if (what := kind_of(model)) != LINEAR_MODEL:
        say(f"This is a {what}: the cost is that of all its runs together.")
    kind = "NOT PRIVATE (seeded noise). With secure noise: " if privacy["seeded"] else ""
    say(
        f"Privacy: {kind}({privacy['epsilon']:.4g}, {privacy['delta']:.3g})-differential privacy, "
        f"{privacy['relation']}, {privacy['accountant']}."
    )
    _say_verdict(privacy, model.made["rows"], account)
    say("Public, not protected: " + "; ".join(privacy["public"]) + ".")
    for line in model.made.get("notes", []):
        note(line)


def _say_verdict(privacy: JsonObject, rows: int, account: Account | None = None) -> None:
    """What a guarantee is worth."""
    from privagrad.report.verdict import verdict_of_model

    found = verdict_of_model(privacy, rows, account)
    say(" ".join([found.headline, *found.sentences]))


@contextmanager
def _printed() -> Iterator[BinaryIO]:
    """A file whose text is printed when all of it is there."""
    file = io.BytesIO()
    yield file
    print(file.getvalue().decode("utf-8"), end="")


def _probabilities(margins: Any) -> Any:
    from scipy.special import expit, softmax

    if margins.shape[1] == 1:
        right = expit(margins[:, 0])
        return np.column_stack([1 - right, right])
    return softmax(margins, axis=1)
