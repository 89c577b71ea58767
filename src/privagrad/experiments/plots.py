"""The style of all plots: colours that colour-blind people can tell apart, no clutter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from privagrad._internal.validate import Vector

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")


def figure(panels: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels side by side, which share the vertical axis."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Expected Matplotlib for plots, found none: pip install 'privagrad[plots]'."
        ) from error

    fig = Figure(figsize=(width, height), layout="constrained")
    grid = fig.subplots(1, panels, sharey=True, squeeze=False)[0]
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.5, alpha=0.4)
    return fig, list(grid)


def draw_band(
    axes: Axes, x: Vector, curve: tuple[Vector, Vector, Vector], colour: str, label: str
) -> None:
    """A curve (middle, low, high) with the band between low and high."""
    middle, low, high = curve
    axes.plot(x, middle, color=colour, label=label, linewidth=1.8)
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def label_losses(axes: Axes) -> None:
    """Label a log axis of losses by plain numbers from 0.01 to 1."""
    ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def save(fig: Figure, stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    for path in paths:
        fig.savefig(path, dpi=150)
    return paths
