"""`privagrad compare` and `privagrad theory`: which method to use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from privagrad import Box, L2Ball
from privagrad._internal import validate
from privagrad.cli._output import Json, JsonObject, ReportPath, command, say, say_where, show_table
from privagrad.experiments import DELTA

Out = Annotated[
    Path, typer.Option(help="Folder for the results. An interrupted run is resumed from there.")
]
Workers = Annotated[
    int | None, typer.Option(help="Number of processes. Default: one for each core.", min=1)
]
Epsilons = Annotated[str, typer.Option(help="Values of epsilon, separated by commas.")]
Delta = Annotated[float, typer.Option(help="Probability that the guarantee may fail.")]


def parse_epsilons(text: str) -> tuple[float, ...]:
    """Numbers separated by commas."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"Expected values of epsilon like 0.1,1,3, found {text!r}: give numbers with "
            "decimal points, separated by commas."
        ) from None
    return tuple(validate.positive("epsilon", epsilon) for epsilon in found)


@command
def compare(
    problem: Annotated[
        str,
        typer.Argument(
            help="absolute-regression, sparse-text, or a .csv, .parquet or LIBSVM file of numbers."
        ),
    ] = "absolute-regression",
    methods: Annotated[
        str, typer.Option(help="Names separated by commas, or 'all'.")
    ] = "adagrad,pagan,pasan,dp-adagrad,dp-sgd",
    epsilons: Epsilons = "1",
    delta: Delta = DELTA,
    target: Annotated[str | None, typer.Option(help="For a file: the column to predict.")] = None,
    loss: Annotated[str, typer.Option(help="For a file: absolute, logistic, ...")] = "logistic",
    public_share: Annotated[
        float, typer.Option(help="For a file: the share of public rows.", min=0, max=0.9)
    ] = 0.1,
    box: Annotated[
        float | None, typer.Option(help="For a file: a bound on every coefficient.")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Expected rows of a step. Default: √n, or n/100 if larger."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps.")] = 1000,
    schedules: Annotated[
        str,
        typer.Option(help="Schedules of the step size to try: constant, linear (falls to 0)."),
    ] = "constant,linear",
    runs: Annotated[int, typer.Option(min=1, help="Runs of each method's best setting.")] = 10,
    tuning_runs: Annotated[int, typer.Option(min=1, help="Runs of each setting in tuning.")] = 2,
    out: Out = Path("compare"),
    workers: Workers = None,
    report: ReportPath = None,
    as_json: Json = False,
) -> list[JsonObject]:
    """Compare private optimizers under equal conditions: same rows, same budget, same tuning.

    Every method tries the same step sizes, schedules and radii; its best setting is then run with
    new seeds. The tuning reads the rows without privacy: this compares methods, it does not release
    a model.

    Examples:

    `privagrad compare --methods all --epsilons 0.5,1,4`

    `privagrad compare people.csv --target label --methods pagan,dp-sgd --out results`
    """
    from privagrad.experiments import compare as experiment
    from privagrad.experiments.arena import VARIANTS, Conditions
    from privagrad.experiments.problems import BUILT_IN, FileProblem
    from privagrad.fitting import require_no_budget
    from privagrad.methods import SCHEDULES
    from privagrad.privacy.ledger import Ledger
    from privagrad.report.experiments import write_compare_report

    names = tuple(VARIANTS) if methods == "all" else tuple(methods.split(","))
    for name in names:
        validate.choice("method", name, VARIANTS)
    chosen: str | FileProblem = problem
    if problem not in BUILT_IN:
        path = Path(problem)
        if not path.is_file():
            raise FileNotFoundError(
                f"Expected a built-in problem ({', '.join(BUILT_IN)}) or a file, found {problem!r}."
            )
        advice = "Take public rows, or one of the built-in problems."
        require_no_budget(Ledger(), path, "a comparison, whose tuning is not private", advice)
        stamp = path.stat().st_mtime_ns
        chosen = FileProblem(str(path), target, loss, public_share, box, stamp)
    budgets = parse_epsilons(epsilons)
    wanted = {validate.choice("schedule", name, SCHEDULES) for name in schedules.split(",")}
    tried = tuple(schedule for schedule in SCHEDULES if schedule in wanted)
    conditions = Conditions(
        chosen, budgets, delta, batch_size, steps, schedules=tried, tuning_runs=tuning_runs,
        runs=runs,
    )  # fmt: skip
    table = experiment.run(out, conditions, names, workers)
    if report is not None:
        write_compare_report(report, problem, [row._asdict() for row in table])
    rows = [
        (r.method, f"{r.epsilon:g}", f"{r.loss:.5g}", f"{r.excess:.3g}",
         f"{r.epsilon_spent:.4g}", f"{r.seconds:.3f}")
        for r in table
    ]  # fmt: skip
    columns = ("method", "epsilon", "loss", "excess", "spent", "seconds")
    show_table("Private optimizers", columns, rows)
    say_where(out, "compare.csv", "compare.png", "compare.svg")
    return [row._asdict() for row in table]


@command
def theory(
    rows: Annotated[int, typer.Option(min=1, help="Number of rows.")],
    scales: Annotated[
        Path | None, typer.Option(help="Text file with one public scale σ_j per line.")
    ] = None,
    dim: Annotated[int, typer.Option(min=1, help="Without --scales: number of columns.")] = 100,
    decay: Annotated[float, typer.Option(help="Without --scales: σ_j = j^-decay.")] = 1.5,
    epsilon: Annotated[float, typer.Option(help="The privacy budget.")] = 1.0,
    delta: Delta = DELTA,
    box: Annotated[float | None, typer.Option(help="Optimise over |x_j| <= BOX.")] = None,
    ball: Annotated[float | None, typer.Option(help="Optimise over ||x||_2 <= BALL.")] = None,
    as_json: Json = False,
) -> JsonObject:
    """Show what the paper's theorems guarantee for each method, and which method to use.

    Prints upper bounds on the expected excess loss for gradients with scales σ_j: the parts due to
    optimisation, noise and projection, and the lower bound for every private method. The paper does
    not state all constants; where it does not, privagrad chooses them. Use the bounds to compare
    methods, not to predict losses.

    Examples:

    `privagrad theory --rows 5000 --dim 100 --decay 1.5 --epsilon 1 --box 1`

    `privagrad theory --rows 20000 --scales sigma.txt --ball 10`
    """
    from privagrad import theory as theorems

    if box is not None and ball is None:
        domain: Box | L2Ball = Box(-box, box)
        size, lower = box, theorems.box_lower_bound
    elif ball is not None and box is None:
        domain, size, lower = L2Ball(ball), ball, theorems.ball_lower_bound
    else:
        raise ValueError("Expected one of --box and --ball, found both or none.")
    if scales is None:
        sigma = np.arange(1.0, dim + 1) ** -decay
    else:
        sigma = np.loadtxt(scales, dtype=np.float64, ndmin=1)
    advice = theorems.advice(sigma, rows, epsilon, delta, domain)
    least = float(size * lower(sigma, rows, epsilon))
    values = [
        {"method": a.method, "radius": a.radius, "bound": a.bound.total,
         "optimization": a.bound.optimization, "noise": a.bound.privacy, "projection": a.bound.bias}
        for a in advice
    ]  # fmt: skip
    keys = ("bound", "optimization", "noise", "projection", "radius")
    shown = [(v["method"], *(f"{v[key]:.3g}" for key in keys)) for v in values]
    columns = ("method", "bound", "optimisation", "noise", "projection", "radius")
    show_table(f"Upper bounds on the excess loss over {domain!r}", columns, shown)
    say(
        f"Use {advice[0].method}. Every private method has an excess loss of at least about "
        f"{least:.2g} on some such data set."
    )
    return {"lower_bound": least, "methods": values}
