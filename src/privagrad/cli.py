"""The command line: `privagrad --help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

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
