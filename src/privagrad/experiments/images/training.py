"""One run: a linear model of several classes on rows that are fixed, by private gradients."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from privagrad._internal.validate import Integers, Vector
from privagrad.experiments import DELTA
from privagrad.experiments.images.data import CLASSES
from privagrad.experiments.images.scattering import Features
from privagrad.experiments.images.settings import Setting
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.methods.loop import Result
from privagrad.methods.minimize import minimize
from privagrad.privacy.events import GaussianEvent


@dataclass(frozen=True)
class Table:
    """Rows with labels, rows that measure, and the public variance of every column."""

    rows: Features
    labels: Integers
    test_rows: Features
    test_labels: Integers
    variances: Vector


class RunResult(TypedDict):
    """What a run found; accuracies are shares of the rows that measure it."""

    accuracy: float
    epsilon_spent: float
    noise_multiplier: float
    seconds: float


def train(setting: Setting, table: Table) -> RunResult:
    """Train on all rows in every step, and measure the last iterate."""
    started = time.monotonic()
    result = fit(setting, table)
    (event,) = (e for e in result.privacy.events if isinstance(e, GaussianEvent))
    rows = _unit(table.test_rows, setting.columns(table.variances))
    guesses = (rows @ result.last.reshape(CLASSES, -1).T).argmax(axis=1)
    return {
        "accuracy": float((guesses == table.test_labels).mean()),
        "epsilon_spent": result.privacy.epsilon,
        "noise_multiplier": event.noise_multiplier,
        "seconds": time.monotonic() - started,
    }


def fit(setting: Setting, table: Table) -> Result:
    """The private model of the table's rows.

    Rows are brought to norm 1 in the norm of the ellipsoid: that is a function of each row alone.
    """
    columns = setting.columns(table.variances)
    return minimize(
        "softmax", _unit(table.rows, columns), table.labels, method=setting.recipe.method,
        epsilon=setting.epsilon, delta=DELTA,
        ellipsoid=Ellipsoid(np.tile(columns.scale, CLASSES), setting.radius),
        batch_size=len(table.rows), steps=setting.steps, step_size=setting.step_size,
        schedule="linear", random_state=setting.seed,
    )  # fmt: skip


def _unit(rows: Features, columns: Ellipsoid) -> Features:
    """Every row over its norm."""
    norms = np.asarray(columns.norm(rows))
    scaled: Features = (rows / np.maximum(norms, 1e-12)[:, None]).astype(np.float32)
    return scaled
