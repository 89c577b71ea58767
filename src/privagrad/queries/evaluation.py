"""How well the rows are fitted, in one private query: the curve and the figures to show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.jit import kernel
from privagrad._internal.threads import pool_of
from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.kernels import FlatRows, all_margins, all_norms
from privagrad.glm.losses import Loss, class_slopes, class_value, lipschitz, slope, value
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.releases import Releases
from privagrad.queries.columns import Share

EVALUATION = Share("evaluation", 0.12)

_CURVE = 0.25
"""Weight of the curve's points beside the last model's figures."""

_ROWS = 16_384


@dataclass(frozen=True)
class Evaluation:
    """Means over the rows, each with Gaussian noise of a known size.

    Attributes
    ----------
    steps, losses, clipped : list
        The curve: after each of the steps, the mean loss, in which no row counts more than
        `loss_cap`, and the share of rows whose gradients are shrunk.
    curve_noise : float
        The standard deviation of the noise in a point of `clipped`; times `loss_cap` that in a
        point of `losses`.
    loss_cap : float
        What no row's loss counts more than.
    score : float
        The share of right predictions, or 1 minus the mean loss over `loss_cap`.
    baseline : float
        The same for the most frequent class, or for the target's centre.
    score_noise : float
        The standard deviation of the noise in both.
    shares : list of float
        The shares of the classes; empty for a regression.
    """

    steps: list[int]
    losses: list[float]
    clipped: list[float]
    curve_noise: float
    loss_cap: float
    score: float
    baseline: float
    score_noise: float
    shares: list[float]


def evaluate(
    gradients: GlmGradients,
    ellipsoid: Ellipsoid,
    path: Sequence[tuple[int, Vector]],
    left_out: NDArray[np.bool_] | None,
    releases: Releases,
) -> Evaluation:
    """Evaluate the iterates of `path`, the last of which is the model, on the rows.

    Guarantees
    ----------
    One Gaussian release, the plan's event "evaluation": a row's vector holds numbers from 0 to 1
    and is bounded to norm 1 after division by the largest norm such a vector can have. It depends
    on that row alone, and is 0 where a loss is not a number.
    """
    loss, outputs, n = gradients.loss, gradients.outputs, gradients.rows.shape[0]
    regression = loss.regression
    if ellipsoid.dim != gradients.dim:
        raise ValueError(
            f"Expected an ellipsoid of dimension {gradients.dim}, found {ellipsoid.dim}."
        )
    cap = _cap(loss, outputs)
    classes = 0 if regression else max(outputs, 2)
    marks = len(path) - 1  # at the start all is known
    largest = math.sqrt((3 if regression else 2) + 2 * marks * _CURVE**2)
    first_mark = 1 + (classes or 2)
    dim = first_mark + 2 * marks
    mechanism = GaussianSum(dim, releases.noise_for(EVALUATION.purpose), n)
    total = mechanism.sum()
    points = np.concatenate([gradients.point(x) for _, x in path[1:]])
    data, indices, starts, dense = gradients.rows.flat
    adding = Lock()

    def add_answers(first: int) -> None:
        stop = min(first + _ROWS, n)
        table = FlatRows(data, indices, starts[first : stop + 1], dense)
        vectors = np.zeros((stop - first, dim))
        _answer(
            all_margins(table, points, marks * outputs).reshape(-1, marks, outputs),
            all_norms(table, ellipsoid.whitening), gradients.targets[first:stop], *loss.key, cap,
            classes, vectors,
        )  # fmt: skip
        if left_out is not None:
            vectors[left_out[first:stop]] = 0.0
        vectors /= largest
        with adding:
            total.add(vectors)

    with pool_of(None if n > _ROWS else 1) as pool:
        list((map if pool is None else pool.map)(add_answers, range(0, n, _ROWS)))
    noise = mechanism.noise_multiplier * largest / n
    means = mechanism.release(total, releases.source) * largest
    known = means[1 : 1 + classes] if classes else means[2:3]
    counted = max(float(known.sum()), noise)
    curve = means[first_mark:].reshape(marks, 2) / (_CURVE * counted)
    shares = np.clip(known / counted, 0.0, 1.0).tolist() if classes else []
    start = float(loss.value(*_at_start(outputs, classes))[0]) if classes else math.nan
    return Evaluation(
        [step for step, _ in path],
        [start, *(cap * curve[:, 0]).tolist()],
        [math.nan, *np.clip(curve[:, 1], 0.0, 1.0).tolist()],
        noise / (_CURVE * counted),
        cap,
        float(np.clip(means[0] / counted, 0.0, 1.0)),
        max(shares) if classes else float(np.clip(means[1] / counted, 0.0, 1.0)),
        noise / counted,
        shares,
    )


@kernel()
def _answer(
    margins: Any, norms: Any, targets: Any, code: Any, parameter: Any, cap: Any, classes: Any,
    answers: Any,
) -> None:  # fmt: skip
    """One row of numbers from 0 to 1 for each row, from its margins at all marks and its norm.

    NaN where a loss is.
    """
    _, marks, outputs = margins.shape
    slopes = np.empty(outputs)
    for i in range(answers.shape[0]):
        answer, target = answers[i], targets[i]
        label = np.int64(target if outputs > 1 else target > 0)
        share = 0.0
        for k in range(marks):
            if outputs > 1:
                share = class_value(code, margins[i, k], label) / cap
                slopes[:] = margins[i, k]
                class_slopes(code, slopes, label)
                steep = math.sqrt(np.square(slopes).sum())
            else:
                share = value(code, parameter, margins[i, k, 0], target) / cap
                # A regression's rows are shrunk by what the largest slope would need.
                steep = lipschitz(code, parameter)
                if classes:
                    steep = abs(slope(code, parameter, margins[i, k, 0], target))
            share = 1.0 if share > 1.0 else share
            at = answer.size - 2 * (marks - k)
            answer[at] = _CURVE * share
            answer[at + 1] = _CURVE if steep * norms[i] > 1.0 else 0.0
        if not classes:
            nothing = value(code, parameter, 0.0, target) / cap
            answer[0] = 1.0 - share
            answer[1] = 0.0 if nothing > 1.0 else 1.0 - nothing
            answer[2] = 1.0
            continue
        last = margins[i, marks - 1]
        guess = last.argmax() if outputs > 1 else np.int64(last[0] > 0.0)
        answer[0] = 1.0 if guess == label else 0.0
        answer[1 + label] = 1.0


def _cap(loss: Loss, outputs: int) -> float:
    """The largest loss that a row counts with: twice that at the start, or of four units."""
    if loss.regression:
        return 4 * loss.lipschitz
    return 2 * float(loss.value(*_at_start(outputs, max(outputs, 2)))[0])


def _at_start(outputs: int, classes: int) -> tuple[Vector, Vector]:
    """Margins and target of one row before the first step."""
    return (np.zeros((1, classes)), np.zeros(1)) if outputs > 1 else (np.zeros(1), np.ones(1))
