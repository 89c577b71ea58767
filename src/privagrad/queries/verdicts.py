"""Figures of an evaluation in words: how they are called, and whether a model is any good."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_SURE = 2.0
"""Standard deviations of noise from which on a difference counts."""

_SMALL_GAIN, _SMALL_PART = 0.02, 0.1
"""Of the rows, and of the error of the best constant: smaller gains count as none."""

_LABELS = {
    "accuracy": ("Accuracy", "share of right answers"),
    "baseline_accuracy": ("Accuracy of the constant", "always the most frequent class"),
    "auc": ("AUC", "0.5: scores are worth nothing; 1: they tell the classes apart"),
    "log_loss": ("Log loss", "of the probabilities; less is better"),
    "baseline_log_loss": ("Log loss of the constant", "the shares of the classes"),
    "calibration_error": ("Calibration error", "typical gap between predicted and observed"),
    "error": ("Mean absolute error", "in the units of the target"),
    "baseline_error": ("Mean absolute error of the constant", ""),
    "half_within": ("Half of the predictions are off by at most", ""),
    "ninety_within": ("90 % of the predictions are off by at most", ""),
    "below": ("Targets below their predictions", "share"),
    "score": ("Score", "1 - mean loss / cap"),
    "baseline_score": ("Score of the constant", "the centre of the target"),
}
"""How figures are called, in the order in which they are shown; `gain` and `removed` are in the
verdict."""


@dataclass(frozen=True)
class Estimate:
    """A figure and the standard deviation of the noise in it."""

    value: float
    noise: float = 0.0


Figures = Mapping[str, Estimate]


def labelled(figures: Figures, quantile: float | None) -> Iterator[tuple[str, Estimate, str]]:
    """Name, figure and meaning of each."""
    for key, (label, note) in _LABELS.items():
        if key not in figures:
            continue
        if "error" in key and key != "calibration_error" and quantile not in (None, 0.5):
            label = label.replace("absolute error", "quantile loss")
        if key == "below" and quantile is not None:
            note = f"share; {quantile:g} for the quantile {quantile:g}"
        yield label, figures[key], note


def verdict_on_classes(figures: Figures, constant: str) -> str:
    """Whether the answers are better than always the same one, and the scores than none."""
    gain, auc = figures["gain"], figures.get("auc")
    reach = _SURE * gain.noise
    if abs(gain.value) > reach and gain.value != 0:
        better = "Better" if gain.value > 0 else "Worse"
        return (
            f"{better} than always answering {constant}: right for "
            f"{figures['accuracy'].value:.1%} of the rows instead of "
            f"{figures['baseline_accuracy'].value:.1%}."
        )
    clear = gain.noise == 0 or gain.value + reach <= _SMALL_GAIN
    better = f"{'no' if clear else 'not clearly'} better than always answering {constant}"
    if auc is not None and auc.value > 0.5 + max(_SURE * auc.noise, 0.01):
        return (
            f"Its answers are {better}, but its scores tell the classes apart: AUC {auc.value:.3f}."
        )
    hidden = "" if clear else f": the noise hides differences below {reach:.1%} of the rows"
    return f"{better[0].upper()}{better[1:]}{hidden}."


def verdict_on_numbers(figures: Figures, answer: float) -> str:
    """Whether predictions are nearer to the targets than the best constant is."""
    if "removed" not in figures:
        return "Compared with the centre of the target by the loss alone."
    constant, removed = f"always answering {answer:.4g}", figures["removed"]
    # A difference has normal noise; a ratio of noisy errors may be anything.
    gain = figures.get("error_gain", removed)
    reach = _SURE * gain.noise
    if abs(gain.value) > reach and gain.value != 0:
        if gain.value < 0:
            return f"Worse than {constant}."
        return f"Removes {min(removed.value, 1.0):.0%} of the error of {constant}."
    whole = figures["baseline_error"].value if gain is not removed else 1.0
    if gain.noise == 0 or gain.value + reach <= _SMALL_PART * whole:
        return f"No better than {constant}."
    return (
        f"Not clearly better than {constant}: the noise hides differences below {reach:.2g} in the "
        "mean error."
    )
