"""The command line: `privagrad --help`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from privagrad import _validate

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    help="Differentially private training with noise that follows the gradients' geometry.",
)
reproduce = typer.Typer(no_args_is_help=True, help="Run the paper's experiments.")
app.add_typer(reproduce, name="reproduce")

Out = Annotated[Path, typer.Option(help="Folder for results; an interrupted run goes on there.")]
Quick = Annotated[bool, typer.Option("--quick", help="A small version, about a minute.")]
Workers = Annotated[int | None, typer.Option(help="Processes; default all cores.", min=1)]


@reproduce.command()
def figure1(out: Out = Path("figure1"), quick: Quick = False, workers: Workers = None) -> None:
    """Figure 1: six methods on absolute regression at epsilon 0.1, 1 and 4.

    Tunes step size and radius of every method alike, then runs each 30 times. Writes figure1.csv,
    .png, .svg and .json, and figure1-average.* for the averaged iterate.

    Example: `privagrad reproduce figure1 --out results --quick`
    """
    from privagrad.experiments import figure1 as experiment

    settings = experiment.QUICK if quick else experiment.Settings()
    summary = experiment.run(out, settings, workers)
    _print_figure1(summary)
    _say_where(out, "figure1.csv", "figure1.png", "figure1-average.png", "figure1.json")


@app.command()
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
) -> None:
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

    with _errors():
        names = tuple(CONTENDERS) if methods == "all" else tuple(methods.split(","))
        for name in names:
            _validate.choice("method", name, CONTENDERS)
        budgets = tuple(_validate.positive("epsilon", float(part)) for part in epsilons.split(","))
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
    shown = _table(
        "Private optimizers", ("method", "epsilon", "loss", "excess", "spent", "seconds")
    )
    for row in table:
        shown.add_row(
            row.method,
            f"{row.epsilon:g}",
            f"{row.loss:.5g}",
            f"{row.excess:.3g}",
            f"{row.epsilon_spent:.4g}",
            f"{row.seconds:.3f}",
        )
    Console().print(shown)
    _say_where(out, "compare.csv", "compare.png", "compare.svg")


@contextmanager
def _errors() -> Iterator[None]:
    """Errors of users without a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def _print_figure1(summary: dict[str, Any]) -> None:
    console = Console()
    columns = ("epsilon", "method", "loss", "95 % band", "excess", "step size")
    table = _table(f"Figure 1: final losses (optimum {summary['optimum']:.5f})", columns)
    for row in summary["results"]:
        table.add_row(
            f"{row['epsilon']:g}",
            row["method"],
            f"{row['loss']:.4f}",
            f"{row['low']:.4f}-{row['high']:.4f}",
            f"{row['excess']:.4f}",
            f"{row['step_size']:g}",
        )
    console.print(table)
    for row in summary["excess_ratio_of_pagan"]:
        console.print(
            f"epsilon {row['epsilon']:g}: excess loss of pagan / {row['over']} = "
            f"{row['ratio']:.3f} ({row['low']:.3f} .. {row['high']:.3f})",
            highlight=False,
        )


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    return table


def _say_where(out: Path, *names: str) -> None:
    Console().print(f"wrote {', '.join(names)} in {out}", highlight=False, soft_wrap=True)
