"""`privagrad predict` and `privagrad show`: what a model file is good for."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from privagrad._internal.atomic import atomic_write
from privagrad.cli._output import Json, LedgerPath, busy, command, say
from privagrad.cli._output import table as show_table
from privagrad.data.models import SavedModel, load_model

ModelFile = Annotated[Path, typer.Argument(help="A file that privagrad fit wrote.")]


def add_to(app: typer.Typer) -> None:
    app.command()(predict)
    app.command()(show)


@command
def predict(
    model: ModelFile,
    table: Annotated[Path, typer.Argument(help="Rows to predict; a target column is not needed.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The CSV file to write.")],
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also a column for each class (logistic).")
    ] = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Predict the rows of a table: a CSV file with a column `prediction`, in the rows' order.

    Predictions on other people's rows cost no privacy of those the model was fitted to.

    Example: `privagrad predict income.model new-people.csv -o predictions.csv`
    """
    fitted = load_model(model)
    if probabilities and (fitted.classes is None or fitted.loss != "logistic"):
        raise ValueError(f"Expected a logistic model for --probabilities, found {fitted.loss}.")
    labels = fitted.classes if probabilities and fitted.classes else []
    count = 0
    with atomic_write(out) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["prediction", *(f"probability of {label}" for label in labels)])
        with busy(f"predicting {table.name}"):
            for X, _, _ in fitted.rows(table):
                columns = [fitted.predict(X).tolist()]
                if labels:
                    columns += _probabilities(fitted.margins(X)).T.tolist()
                writer.writerows(zip(*columns, strict=True))
                count += X.shape[0]
        text.flush()
        text.detach()
    if not as_json:
        say(f"wrote {count} predictions to {out}")
    return {"rows": count, "out": str(out)}


@command
def show(
    model: ModelFile,
    everything: Annotated[bool, typer.Option("--all", help="All coefficients.")] = False,
    report: Annotated[
        Path | None, typer.Option(help="Also write the report, one HTML file.", dir_okay=False)
    ] = None,
    ledger: LedgerPath = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """A model's coefficients in the columns' own units, what it cost and how it was made.

    Coefficients are sorted by what a typical change of the column does. `noise` is a standard
    deviation over trainings repeated on made-up rows with independent columns: columns that say the
    same thing share their effect more loosely.

    Example: `privagrad show income.model --report report.html`
    """
    fitted = load_model(model)
    if report is not None:
        from privagrad.privacy.ledger import Ledger
        from privagrad.report.fit import write_fit_report

        name = fitted.made["dataset"]
        account = Ledger(ledger).account(name) if name else None
        write_fit_report(report, fitted, account)
    if not as_json:
        _show(fitted, everything)
        if report is not None:
            say(f"wrote {report}")
    return {
        "loss": fitted.loss,
        "classes": fitted.classes,
        "intercept": fitted.intercept.tolist(),
        "coefficients": [
            {"feature": name, "coef": fitted.coef[:, j].tolist(),
             "noise": fitted.coef_noise[:, j].tolist()}
            for j, name in enumerate(fitted.features)
        ],
        "privacy": fitted.privacy,
        "evaluation": fitted.evaluation,
        "made": fitted.made,
    }  # fmt: skip


def figures(model: SavedModel) -> Iterator[str]:
    """The figures of a model in sentences, each with whether it is private."""
    found = model.evaluation
    error = 2 * found["score_noise"]
    if model.classes is not None:
        yield (
            f"Accuracy on its own rows: {found['score']:.4f} ± {error:.4f} (majority rule "
            f"{found['baseline']:.4f}). Private: paid from the same budget."
        )
    else:
        yield (
            f"Score on its own rows, 1 - loss/cap: {found['score']:.4f} ± {error:.4f} (the "
            f"target's centre alone {found['baseline']:.4f}). Private: paid from the same budget."
        )
    if test := found.get("test"):
        if "accuracy" in test:
            told = f"accuracy {test['accuracy']:.4f} (majority rule {test['majority']:.4f})"
        else:
            told = (
                f"mean absolute error {test['mean_absolute_error']:.5g} (the median alone "
                f"{test['mean_absolute_error_of_median']:.5g})"
            )
        yield (
            f"On {test['table']}, {test['rows']} rows: {told}. NOT private: it tells about those "
            "rows, exactly."
        )


def _show(model: SavedModel, everything: bool) -> None:
    names = model.classes if model.coef.shape[0] > 1 and model.classes else [""]
    effects = np.abs(model.coef * model.unit).max(axis=0)
    order = np.argsort(-effects)
    shown = order if everything else order[:20]
    columns = ["feature", *(f"coefficient {n}".strip() for n in names), "noise", "typical change"]
    rows = [
        (model.features[j], *(f"{c:.4g}" for c in model.coef[:, j]),
         f"{model.coef_noise[:, j].max():.2g}", f"{model.unit[j]:.4g}")
        for j in shown
    ]  # fmt: skip
    what = f"{model.loss} on {model.made['table']}"
    if model.classes and model.coef.shape[0] == 1:
        what += f": positive speaks for {model.classes[1]}"
    show_table(what, columns, rows)
    if len(shown) < len(order):
        say(f"and {len(order) - len(shown)} more: --all shows them.")
    say(f"Intercept: {', '.join(f'{value:.4g}' for value in model.intercept)}")
    for line in figures(model):
        say(line)
    privacy = model.privacy
    kind = "NOT PRIVATE (seeded noise); would be " if privacy["seeded"] else ""
    say(
        f"Privacy: {kind}({privacy['epsilon']:.4g}, {privacy['delta']:.3g})-differential privacy, "
        f"{privacy['relation']}, {privacy['accountant']}."
    )
    say("Public, not protected: " + "; ".join(privacy["public"]) + ".")


def _probabilities(margins: Any) -> Any:
    from scipy.special import expit, softmax

    if margins.shape[1] == 1:
        right = expit(margins[:, 0])
        return np.column_stack([1 - right, right])
    return softmax(margins, axis=1)
