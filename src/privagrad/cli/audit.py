"""`privagrad audit`: what an attacker really achieves, beside what is claimed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privagrad._internal import validate
from privagrad.cli._output import BUG, Json, JsonObject, ReportPath, command, note, say, show_table
from privagrad.cli.compare import parse_epsilons

if TYPE_CHECKING:
    from privagrad.audit import Audit

_MOST_DENSE = 5000
"""Canaries whose rows fit into memory as an array; the same rows in CSR are small."""


@command
def audit(
    epsilon: Annotated[
        str, typer.Option("--epsilon", "-e", help="Claims to audit, separated by commas.")
    ] = "1",
    delta: Annotated[
        float, typer.Option("--delta", help="Probability that the guarantee may fail.")
    ] = 1e-5,
    door: Annotated[str, typer.Option(help="dense, csr, partitions, or torch.")] = "dense",
    method: Annotated[str, typer.Option(help="pagan, pasan, dp-adagrad, dp-sgd, ...")] = "pagan",
    sampling: Annotated[
        str, typer.Option(help="poisson, with_replacement or without_replacement.")
    ] = "poisson",
    rate: Annotated[float, typer.Option(help="The expected part of the rows in a step.")] = 1.0,
    noise: Annotated[str, typer.Option(help="gaussian or discrete.")] = "gaussian",
    steps: Annotated[
        int, typer.Option(min=1, help="1: single releases. More: one whole training of so many.")
    ] = 1,
    view: Annotated[
        str, typer.Option(help="What the attacker of a training sees: releases, or the model.")
    ] = "releases",
    bound: Annotated[
        str,
        typer.Option(
            help="guesses: assumes nothing about a training. curve: assumes the kind of the noise. "
            "test: also assumes that canaries are independent. Each shows more than the one before."
        ),
    ] = "guesses",
    canaries: Annotated[
        int | None,
        typer.Option(min=10, help="Rows that are attacked. Default: 500, 20000 with --steps."),
    ] = None,
    draws: Annotated[int, typer.Option(min=100, help="Scores of single releases.")] = 1_000_000,
    confidence: Annotated[float, typer.Option(help="Of the lower bounds.")] = 0.95,
    scores: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A CSV file of an attack of your own: columns included (0 or 1) and score, one "
            "line for each canary of one training.",
        ),
    ] = None,
    report: ReportPath = None,
    as_json: Json = False,
) -> JsonObject:
    """Attack privagrad in a configuration of your choice; show a lower bound on epsilon.

    A bound below the claim proves nothing by itself: it shows how far the attack came. A bound
    above the claim is a proof that the claim is wrong. The command then ends with exit code 1.

    Examples:

    `privagrad audit --epsilon 0.5,1,4`

    `privagrad audit --door csr --sampling poisson --rate 0.1 --steps 100 --epsilon 4`

    `privagrad audit --scores canaries.csv --epsilon 4 --delta 1e-6`
    """
    from privagrad.audit import one_release, whole_run

    epsilons = parse_epsilons(epsilon)
    chosen: dict[str, Any] = {
        "door": door, "method": method, "sampling": sampling, "rate": rate, "noise": noise,
        "canaries": canaries or (500 if steps == 1 else 20_000), "confidence": confidence,
    }  # fmt: skip
    if scores is not None:
        included, values = read_scores(scores)
        found = [
            _of_scores(included, values, claim, delta, confidence, scores.name, bound)
            for claim in epsilons
        ]
    elif steps > 1:
        if door == "dense" and chosen["canaries"] > _MOST_DENSE:
            chosen["door"] = "csr"
        chosen |= {"steps": steps, "view": view, "bound": bound}
        found = [whole_run(claim, delta, **chosen) for claim in epsilons]
    else:
        found = [one_release(claim, delta, draws=draws, **chosen) for claim in epsilons]
    rows = [(a.attack, f"{a.claimed:.4g}", f"{a.measured:.4g}", f"{a.fraction:.0%}") for a in found]
    title = f"Lower bounds on epsilon at delta {delta:g}, confidence {confidence:g}"
    show_table(title, ("attack", "claimed", "measured", "fraction"), rows)
    for one in found:
        say(one.verdict)
    if report is not None:
        from privagrad.report.audit import write_audit_report

        write_audit_report(report, found)
        say(f"wrote {report}")
    worst = max(found, key=lambda one: one.fraction)
    if worst.violated and not as_json:
        bug = "" if scores is not None else " This is a bug in privagrad; please report it."
        note(f"A claim is refuted.{bug}", "error", "red")
        raise typer.Exit(BUG)
    return {**worst.as_json(), "audits": [one.as_json() for one in found]}


def _of_scores(
    included: list[bool], values: list[float], epsilon: float, delta: float, confidence: float,
    name: str, bound: str,
) -> Audit:  # fmt: skip
    """The bound from a training of the user's own; a curve is that of a Gaussian release."""
    from privagrad.audit import measure_run, measure_run_by_curve
    from privagrad.privacy.accounting import PrivacyPlan
    from privagrad.privacy.events import GaussianEvent

    validate.choice("bound", bound, ("guesses", "curve"))
    if bound == "guesses":
        return measure_run(included, values, epsilon, delta, confidence, name)
    plan = PrivacyPlan.calibrate_event(GaussianEvent(1.0), epsilon, delta)
    return measure_run_by_curve(included, values, plan.events, delta, confidence, name)


def read_scores(path: Path) -> tuple[list[bool], list[float]]:
    """The columns `included` and `score` of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file)
        if not {"included", "score"} <= set(lines.fieldnames or ()):
            raise ValueError(
                f"Expected columns named included and score in {path.name}, found "
                f"{', '.join(lines.fieldnames or ()) or 'none'}."
            )
        included, scores = [], []
        for number, line in enumerate(lines, 2):
            try:
                score = float(line["score"])
            except (TypeError, ValueError):
                raise ValueError(f"Expected a number as score in line {number}.") from None
            if line["included"] not in ("0", "1"):
                raise ValueError(f"Expected 0 or 1 as included in line {number}.")
            included.append(line["included"] == "1")
            scores.append(score)
    return included, scores
