"""`privagrad reproduce`, `theory` and `compare`: the paper, and private optimizers in one ring."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from privagrad import Box, L2Ball
from privagrad._internal import validate
from privagrad.cli._output import Json, command, say, say_where
from privagrad.cli._output import table as show_table

reproduce = typer.Typer(
    no_args_is_help=True,
    help="""Run the paper's experiments.

`privagrad reproduce figure1 --quick --report figure1.html`""",
)


def add_to(app: typer.Typer) -> None:
    app.command()(compare)
    app.command()(theory)
    app.add_typer(reproduce, name="reproduce")


Out = Annotated[Path, typer.Option(help="Folder for results; an interrupted run goes on there.")]
Quick = Annotated[bool, typer.Option("--quick", help="A small version, about a minute.")]
Report = Annotated[
    Path | None, typer.Option(help="Also write a report, one HTML file.", dir_okay=False)
]
Workers = Annotated[int | None, typer.Option(help="Processes; default all cores.", min=1)]


@reproduce.command()
@command
def figure1(
    out: Out = Path("figure1"),
    quick: Quick = False,
    workers: Workers = None,
    report: Report = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Figure 1: six methods on absolute regression at epsilon 0.1, 1 and 4.

    Tunes step size and radius of every method alike, then runs each 30 times. Writes figure1.csv,
    .png, .svg and .json, and figure1-average.* for the averaged iterate.

    Example: `privagrad reproduce figure1 --out results --quick`
    """
    from privagrad.experiments import figure1 as experiment

    settings = experiment.QUICK if quick else experiment.Settings()
    summary = experiment.run(out, settings, workers)
    if report is not None:
        from privagrad.report.experiments import write_figure1_report

        write_figure1_report(report, summary)
    if not as_json:
        _print_figure1(summary)
        say_where(out, "figure1.csv", "figure1.png", "figure1-average.png", "figure1.json")
    return summary


@reproduce.command()
@command
def rates(
    out: Out = Path("rates"), quick: Quick = False, report: Report = None, as_json: Json = False
) -> dict[str, Any]:
    """Measured excess loss against n, d, epsilon and the decay of σ, beside the paper's bounds.

    PAGAN on the box and PASAN on the ball, on the lower bound's own linear problems. Prints the
    measured slopes beside the predicted ones; writes rates.csv, .json, .png and .svg.

    Example: `privagrad reproduce rates --quick`
    """
    from privagrad.experiments import rates as experiment

    outcome = experiment.run(out, quick)
    slopes = [asdict(slope) for slope in outcome.slopes]
    if report is not None:
        from privagrad.report.experiments import write_rates_report

        points = [point._asdict() for point in outcome.points]
        write_rates_report(report, points, slopes, experiment.LABELS)
    if not as_json:
        rows = [
            (s.method.upper(), experiment.LABELS[s.varied], f"{s.measured:.2f}",
             f"{s.predicted:.2f}", f"{s.measured - s.predicted:+.2f}")
            for s in outcome.slopes
        ]  # fmt: skip
        columns = ("method", "against", "measured", "predicted", "difference")
        show_table("Slopes of log excess loss", columns, rows, left=2)
        say("Medians over seeds. Predicted: the privacy terms of Theorems 1 and 2.")
        say_where(out, *(path.name for path in outcome.files))
    return {"slopes": slopes, "files": [str(path) for path in outcome.files]}


@reproduce.command("figure2")
@reproduce.command()
@command
def table1(
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with train.txt, valid.txt, and test.txt if at hand.")
    ] = None,
    public_dir: Annotated[
        Path | None,
        typer.Option(help="Folder with public text: moments of pagan and pasan, word frequencies."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Names separated by commas; also dp-sgd+words, the best one, pasan+words and "
            "pagan+words: with the word frequencies of the public text."
        ),
    ] = "dp-sgd,pasan,pagan,sgd,adagrad",
    epsilons: Annotated[str, typer.Option(help="Budgets separated by commas.")] = "3,1,0.5",
    epochs: Annotated[int, typer.Option(min=1)] = 7,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting.")] = 1,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Expected examples of a step; SGD's step sizes grow with it. Default: each "
            "method's own.",
        ),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Foretell the runs by trials with so many examples a step, at a part of the time: "
            "60 came within 1 % at batches of 1000. Trials are not private.",
        ),
    ] = None,
    vocabulary: Annotated[
        str, typer.Option(help="train, as in the paper (not private), or public.")
    ] = "train",
    tune: Annotated[
        float,
        typer.Option(
            min=0,
            help="Minutes to spend on step sizes, radii and schedules, the same for every method.",
        ),
    ] = 0.0,
    download: Annotated[
        bool, typer.Option("--download", help="Fetch WikiText-2 into --data-dir first.")
    ] = False,
    out: Out = Path("table1"),
    quick: Quick = False,
    report: Report = None,
    as_json: Json = False,
) -> list[dict[str, Any]]:
    """Table 1 and Figure 2: an LSTM language model on WikiText-2 at epsilon 3, 1 and 0.5.

    8,000 words, sequences of 35 words as units of privacy, 2,160,320 parameters, batches of 250,
    7 epochs: 1,673 steps of about a second each on two cores. `table1` and `figure2` are one
    command: it writes table1.csv and .md, curves.csv, figure2.png and .svg, and an interrupted run
    goes on after its last epoch.

    Examples:

    `privagrad reproduce table1 --data-dir wikitext-2 --public-dir public --out results`

    `privagrad reproduce table1 --data-dir wikitext-2 --download --methods dp-sgd --quick`

    `privagrad reproduce table1 --data-dir wikitext-2 --methods dp-sgd --epsilons 3 --tune 120`

    `privagrad reproduce table1 --data-dir wikitext-2 --public-dir public --sample 60 --seeds 3`
    """
    if data_dir is None:
        raise ValueError(
            "Expected --data-dir with train.txt and valid.txt, found none: give the folder, or "
            "--data-dir NEW_FOLDER --download."
        )
    from privagrad.experiments.downloads import fetch_wikitext2
    from privagrad.experiments.language import runs as experiment

    names = tuple(methods.split(","))
    for name in names:
        validate.choice("method", name, experiment.RECIPES)
    budgets = tuple(validate.positive("epsilon", float(part)) for part in epsilons.split(","))
    if download:
        fetch_wikitext2(data_dir)
    texts = experiment.read_texts(data_dir, public_dir, vocabulary, quick)
    plan = experiment.Plan(names, budgets, epochs, seeds, batch_size, sample, quick, 60 * tune)
    out.mkdir(parents=True, exist_ok=True)
    rows = experiment.run(texts, plan, out)
    if report is not None:
        from privagrad.report.experiments import write_language_report

        write_language_report(report, rows)
    if not as_json:
        _print_table1(rows)
        if texts.test is None:
            say("no test.txt: that column is empty")
        say_where(out, "table1.csv", "table1.md", "curves.csv", "figure2.png", "figure2.svg")
    return rows


@command
def theory(
    rows: Annotated[int, typer.Option(min=1, help="Rows of the data set.")],
    scales: Annotated[
        Path | None, typer.Option(help="Text file with one public scale σ_j a line.")
    ] = None,
    dim: Annotated[int, typer.Option(min=1, help="Without --scales: σ_j = j^-decay.")] = 100,
    decay: Annotated[float, typer.Option(help="Without --scales: σ_j = j^-decay.")] = 1.5,
    epsilon: float = 1.0,
    delta: float = 1e-5,
    box: Annotated[float | None, typer.Option(help="Optimise over |x_j| <= BOX.")] = None,
    ball: Annotated[float | None, typer.Option(help="Optimise over ||x||_2 <= BALL.")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """What the paper's theorems promise for each method, and which one to use.

    Bounds on the expected excess loss for gradients with scales σ_j, split into what optimisation,
    noise and projection cost, beside the lower bound no private method can beat. Constants that the
    paper leaves open are ours: compare the methods, do not read the bounds as forecasts.

    Examples:

    `privagrad theory --rows 5000 --dim 100 --decay 1.5 --epsilon 1 --box 1`

    `privagrad theory --rows 20000 --scales sigma.txt --ball 10`
    """
    from privagrad import theory as theorems

    if (box is None) == (ball is None):
        raise ValueError("Expected one of --box and --ball, found both or none.")
    domain = Box(-box, box) if box is not None else L2Ball(ball or 0.0)
    if scales is None:
        sigma = np.arange(1.0, dim + 1) ** -decay
    else:
        sigma = np.loadtxt(scales, dtype=np.float64, ndmin=1)
    advised = theorems.advice(sigma, rows, epsilon, delta, domain)
    lower = theorems.box_lower_bound if box is not None else theorems.ball_lower_bound
    size = float(box if box is not None else ball or 0.0)
    least = size * lower(sigma, rows, epsilon)
    if not as_json:
        told = [
            (r.method, *(f"{part:.3g}" for part in _parts(r)), f"{r.radius:.3g}") for r in advised
        ]
        columns = ("method", "bound", "optimisation", "noise", "projection", "radius")
        show_table(f"Bounds on the excess loss over {domain!r}", columns, told)
        say(
            f"Use {advised[0].method}. No private method can have an excess below about "
            f"{least:.2g} on every such data set."
        )
    names = ("bound", "optimization", "noise", "projection")
    return {
        "lower_bound": least,
        "methods": [
            {"method": r.method, "radius": r.radius, **dict(zip(names, _parts(r), strict=True))}
            for r in advised
        ],
    }


def _parts(advised: Any) -> tuple[float, float, float, float]:
    bound = advised.bound
    return bound.total, bound.optimization, bound.privacy, bound.bias


@command
def compare(
    problem: Annotated[
        str, typer.Argument(help="A built-in problem, or a .csv, .parquet or LIBSVM file.")
    ] = "absolute-regression",
    methods: Annotated[
        str, typer.Option(help="Names separated by commas, or 'all'.")
    ] = "adagrad,pagan,pasan,dp-adagrad,dp-sgd",
    epsilons: Annotated[str, typer.Option(help="Budgets separated by commas.")] = "1",
    delta: float = 1e-5,
    target: Annotated[str | None, typer.Option(help="The column to predict, in a file.")] = None,
    loss: Annotated[str, typer.Option(help="For a file: absolute, logistic, ...")] = "logistic",
    public_share: Annotated[
        float, typer.Option(help="Share of a file's rows that counts as public.", min=0, max=0.9)
    ] = 0.1,
    box: Annotated[
        float | None, typer.Option(help="For a file: bound on every coefficient.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1)] = None,
    steps: Annotated[int, typer.Option(min=1)] = 1000,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each method's best setting.")] = 10,
    tuning_runs: Annotated[int, typer.Option(min=1, help="Runs of each setting tried.")] = 2,
    out: Out = Path("compare"),
    workers: Workers = None,
    report: Report = None,
    as_json: Json = False,
) -> list[dict[str, Any]]:
    """Put private optimizers into one ring: same tuning, same budget, same rows.

    Every method tries the same step sizes and radii; its best setting is run afresh. Tuning looks
    at the rows without privacy: this compares methods, it does not release a model.

    Examples:

    `privagrad compare --methods all --epsilons 0.5,1,4`

    `privagrad compare a9a --loss logistic --methods pagan,dp-sgd --out ring`
    """
    from privagrad.experiments import compare as ring
    from privagrad.experiments.arena import CONTENDERS
    from privagrad.experiments.problems import BUILT_IN, FileProblem

    names = tuple(CONTENDERS) if methods == "all" else tuple(methods.split(","))
    for name in names:
        validate.choice("method", name, CONTENDERS)
    budgets = tuple(validate.positive("epsilon", float(part)) for part in epsilons.split(","))
    chosen: str | FileProblem = problem
    if problem not in BUILT_IN:
        path = Path(problem)
        if not path.is_file():
            known = ", ".join(BUILT_IN)
            raise FileNotFoundError(
                f"Expected a built-in problem ({known}) or a file, found {problem!r}."
            )
        stamp = path.stat().st_mtime_ns
        chosen = FileProblem(str(path), target, loss, public_share, box, stamp)
    table = ring.compare(
        chosen, names, budgets, out, delta, batch_size, steps, runs, tuning_runs,
        workers=workers,
    )  # fmt: skip
    if report is not None:
        from privagrad.report.experiments import write_compare_report

        write_compare_report(report, problem, [asdict(row) for row in table])
    if not as_json:
        rows = [
            (r.method, f"{r.epsilon:g}", f"{r.loss:.5g}", f"{r.excess:.3g}",
             f"{r.epsilon_spent:.4g}", f"{r.seconds:.3f}")
            for r in table
        ]  # fmt: skip
        columns = ("method", "epsilon", "loss", "excess", "spent", "seconds")
        show_table("Private optimizers", columns, rows)
        say_where(out, "compare.csv", "compare.png", "compare.svg")
    return [asdict(row) for row in table]


def _print_table1(rows: list[dict[str, Any]]) -> None:
    columns = ("method", "epsilon", "seed", "valid", "reset", "test", "spent", "minutes")
    told = []
    for row in rows:
        test = row["test_perplexity"]
        told.append(
            (
                row["method"],
                f"{row['epsilon']:g}",
                row["seed"],
                f"{row['valid_perplexity']:.1f}",
                f"{row['valid_perplexity_reset']:.1f}",
                "" if test is None else f"{test:.1f}",
                f"{row['epsilon_spent']:.3g}",
                f"{row['seconds'] / 60:.1f}",
            )
        )
    show_table("Perplexity", columns, told)


def _print_figure1(summary: dict[str, Any]) -> None:
    columns = ("method", "epsilon", "loss", "95 % band", "excess", "step size")
    rows = [
        (r["method"], f"{r['epsilon']:g}", f"{r['loss']:.4f}",
         f"{r['low']:.4f}-{r['high']:.4f}", f"{r['excess']:.4f}", f"{r['step_size']:g}")
        for r in summary["results"]
    ]  # fmt: skip
    show_table(f"Figure 1: final losses (optimum {summary['optimum']:.5f})", columns, rows)
    for row in summary["excess_ratio_of_pagan"]:
        say(
            f"epsilon {row['epsilon']:g}: excess loss of pagan / {row['over']} = "
            f"{row['ratio']:.3f} ({row['low']:.3f} .. {row['high']:.3f})"
        )
