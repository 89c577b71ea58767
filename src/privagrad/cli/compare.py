"""`privagrad compare` and `privagrad theory`: which method to use."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer

from privagrad import Box, L2Ball
from privagrad._internal import validate
from privagrad.cli._output import Json, JsonObject, ReportPath, command, say, say_where, show_table
from privagrad.experiments import DELTA

if TYPE_CHECKING:
    from privagrad.experiments.ring import Comparison

_ADVICE = "Take public rows, or one of the built-in problems."
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
            help="Convex: absolute-regression, sparse-text, or a .csv, .parquet or LIBSVM "
            "file of numbers. A network: decaying-columns, raw-columns, housing or digits."
        ),
    ] = "absolute-regression",
    methods: Annotated[
        str | None, typer.Option(help="Names separated by commas, or 'all'. Default: a few.")
    ] = None,
    epsilons: Epsilons = "1",
    delta: Delta = DELTA,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="For housing and digits: the folder with housing.csv or mnist.npz."),
    ] = None,
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
        typer.Option(
            min=1,
            help="Expected rows of a step. Default: √n, or n/100 if larger; for a network 1000, "
            "for digits 2000.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of steps. Default: 1000; for a network 200, rounded to whole passes.",
        ),
    ] = None,
    schedules: Annotated[
        str | None,
        typer.Option(
            help="Convex problems: schedules of the step size to try: constant, linear (falls to "
            "0). Default: both. Steps of networks fall to 0."
        ),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each method's best setting. Default: 10; 5 of networks."),
    ] = None,
    tuning_runs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each setting in tuning. Default: 2; 1 of networks."),
    ] = None,
    out: Out = Path("compare"),
    workers: Workers = None,
    report: ReportPath = None,
    as_json: Json = False,
) -> list[JsonObject]:
    """Compare private optimizers under equal conditions: same rows, same budget, same tuning.

    Every method tries as many step sizes, schedules and radii; its best setting is then run with
    new seeds. The noise is seeded and the tuning reads the rows without privacy: the results are
    for figures. This compares methods, it does not release a model.

    Networks are trained by the PyTorch engine (pip install 'privagrad[torch]'), tuned on validation
    rows and measured on test rows. A twentieth of their rows counts as public.

    Examples:

    `privagrad compare --methods all --epsilons 0.5,1,4`

    `privagrad compare people.csv --target label --methods pagan,dp-sgd --out results`

    `privagrad compare decaying-columns --methods pagan-adam,dp-adam`

    `privagrad compare digits --data-dir mnist --methods all --epsilons 1`
    """
    from privagrad.experiments import compare as experiment
    from privagrad.experiments.networks.tasks import NETWORKS
    from privagrad.report.experiments import write_compare_report

    budgets = parse_epsilons(epsilons)
    if problem in NETWORKS:
        refused: dict[str, object] = {"--target": target, "--box": box, "--schedules": schedules}
        _refuse_for_networks(problem, refused)
        comparison, names = _networks(
            problem, methods, data_dir, epsilons=budgets, delta=delta, batch_size=batch_size,
            steps=steps, tuning_runs=tuning_runs or 1, runs=runs or 5,
        )  # fmt: skip
    else:
        file = FileOptions(target, loss, public_share, box)
        comparison, names = _convex(
            problem, methods, file, schedules or "constant,linear", epsilons=budgets, delta=delta,
            batch_size=batch_size, steps=steps or 1000, tuning_runs=tuning_runs or 2,
            runs=runs or 10,
        )  # fmt: skip
    table = experiment.run(out, comparison, names, workers)
    if report is not None:
        write_compare_report(report, problem, [row._asdict() for row in table])
    rows = [
        (r.method, f"{r.epsilon:g}", f"{r.loss:.5g}", f"{r.low:.5g}-{r.high:.5g}",
         f"{r.excess:.3g}", f"{r.epsilon_spent:.4g}", f"{r.seconds:.3f}")
        for r in table
    ]  # fmt: skip
    columns = ("method", "epsilon", "loss", "interval", "excess", "spent", "seconds")
    show_table("Private optimizers", columns, rows)
    say_where(out, "compare.csv", "compare.png", "compare.svg")
    return [row._asdict() for row in table]


class FileOptions(NamedTuple):
    """What is said about a file."""

    target: str | None
    loss: str
    public_share: float
    box: float | None


def _convex(
    problem: str, methods: str | None, file: FileOptions, schedules: str, **conditions: Any
) -> tuple[Comparison, tuple[str, ...]]:
    """A comparison on a built-in convex problem or a file, and the methods."""
    from privagrad.experiments.arena import VARIANTS, Conditions, ConvexComparison
    from privagrad.experiments.networks.tasks import NETWORKS
    from privagrad.experiments.problems import BUILT_IN, FileProblem
    from privagrad.fitting import require_no_budget
    from privagrad.methods import SCHEDULES
    from privagrad.privacy.ledger import Ledger

    names = _chosen(methods or "adagrad,pagan,pasan,dp-adagrad,dp-sgd", tuple(VARIANTS))
    chosen: str | FileProblem = problem
    if problem not in BUILT_IN:
        path = Path(problem)
        if not path.is_file():
            known = ", ".join((*BUILT_IN, *NETWORKS))
            raise FileNotFoundError(
                f"Expected a built-in problem ({known}) or a file, found {problem!r}."
            )
        require_no_budget(Ledger(), path, "a comparison, whose tuning is not private", _ADVICE)
        stamp = path.stat().st_mtime_ns
        chosen = FileProblem(str(path), file.target, file.loss, file.public_share, file.box, stamp)
    wanted = {validate.choice("schedule", name, SCHEDULES) for name in schedules.split(",")}
    tried = tuple(schedule for schedule in SCHEDULES if schedule in wanted)
    return ConvexComparison(Conditions(chosen, schedules=tried, **conditions)), names


def _networks(
    problem: str, methods: str | None, data_dir: Path | None, **conditions: Any
) -> tuple[Comparison, tuple[str, ...]]:
    """A comparison on a network, and the methods."""
    from privagrad.experiments.networks.comparison import NetworkComparison
    from privagrad.experiments.networks.settings import DEFAULT_METHODS, methods_for
    from privagrad.experiments.networks.tasks import FILES, data_file, find_network
    from privagrad.fitting import require_no_budget
    from privagrad.privacy.ledger import Ledger

    if find_spec("torch") is None:
        raise ModuleNotFoundError(
            f"Expected PyTorch for the network {problem}, found none: "
            "pip install 'privagrad[torch]'."
        )
    found = find_network(problem, data_dir)
    if problem in FILES:
        path = data_file(problem, data_dir)
        require_no_budget(Ledger(), path, "a comparison, whose tuning is not private", _ADVICE)
    names = _chosen(methods or DEFAULT_METHODS, methods_for(columns=problem != "digits"))
    return NetworkComparison(found, **conditions), names


def _chosen(methods: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The methods that were asked for."""
    names = known if methods == "all" else tuple(methods.split(","))
    for name in names:
        validate.choice("method", name, known)
    return names


def _refuse_for_networks(problem: str, options: dict[str, object]) -> None:
    """Refuse options of convex problems."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(
            f"Expected no {given[0]} with the network {problem}, found one: its rows, loss and "
            "schedule are fixed. Leave it out."
        )


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
