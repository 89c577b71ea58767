"""How our plots look: colours that colour-blind people can tell apart, no clutter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from privagrad._internal.validate import Vector

# Okabe and Ito's palette.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")


def figure(panels: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure with this many panels side by side, sharing the vertical axis."""
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


def band(
    axes: Any, x: Vector, middle: Vector, low: Vector, high: Vector, colour: str, label: str
) -> None:
    """A curve with its band."""
    axes.plot(x, middle, color=colour, label=label, linewidth=1.8)
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def save(fig: Any, stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    for path in paths:
        fig.savefig(path, dpi=150)
    return paths
