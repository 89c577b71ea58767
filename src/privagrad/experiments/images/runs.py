"""All runs of a plan: compute the features, train what is missing, write the results."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from privagrad._internal.atomic import atomic_write
from privagrad.experiments.images.basis import VERSION, Basis, cached
from privagrad.experiments.images.data import Digits
from privagrad.experiments.images.scattering import Features, Images
from privagrad.experiments.images.settings import Plan, Rows, Setting
from privagrad.experiments.images.tables import Row, write_results
from privagrad.experiments.images.training import Table, train

_AXES, _PICTURES = (500, 4000), (100, 400)
"""Axes and public pictures of a plan, and of a quick one."""


def run(digits: Digits, plan: Plan, out: Path) -> list[Row]:
    """Make every run that is not in `out` yet; write the tables and the plot.

    The features are kept in `out` too, about 140 MB. An interrupted plan is resumed after the last
    finished run.
    """
    if plan.quick:
        digits = digits.beginning()
    if plan.held_out:
        digits = digits.held_out()
    folder = out / f"runs-{_digest(digits, plan)}"
    settings = plan.settings()
    tables: dict[Rows, Table] = {}
    rows: list[Row] = []
    for number, setting in enumerate(settings):
        finished = folder / f"{_name(setting)}.json"
        if not finished.exists():
            kind = setting.recipe.rows
            if kind not in tables:
                tables[kind] = _table(digits, plan, kind, out / "features")
            title = f"{setting.method}, epsilon {setting.epsilon:g}, seed {setting.seed}"
            print(f"run {number + 1} of {len(settings)}: {title}", file=sys.stderr, flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            result = train(setting, tables[kind])
            with atomic_write(finished) as file:
                file.write(json.dumps(result).encode())
        found = json.loads(finished.read_text(encoding="utf-8"))
        rows.append({**asdict(setting), **found})
        write_results(out, rows, plan)
    return rows


def _table(digits: Digits, plan: Plan, kind: Rows, folder: Path) -> Table:
    """The rows of a method, which the first run computes and the others read."""
    if kind == "pixels":
        rows, tests = _pixels(digits.images), _pixels(digits.test_images)
        return Table(rows, digits.labels, tests, digits.test_labels, np.ones(rows.shape[1]))
    axes, pictures = _PICTURES if plan.quick else _AXES
    basis = Basis.of_strokes(axes, pictures)

    def coordinates(images: Images) -> Features:
        # With the axes, of which another machine might find the opposite ones.
        parts = (images, basis.mean, basis.axes)
        return cached(folder, parts, partial(basis.coordinates, images))

    rows, tests = coordinates(digits.images), coordinates(digits.test_images)
    return Table(rows, digits.labels, tests, digits.test_labels, basis.variances)


def _pixels(images: Images) -> Features:
    flat: Features = images.reshape(len(images), -1).astype(np.float32) / np.float32(255)
    return flat


def _digest(digits: Digits, plan: Plan) -> str:
    """A name for the images and the features, so that different ones are not mixed."""
    digest = hashlib.sha256(repr((VERSION, plan.quick, _AXES, _PICTURES)).encode())
    for part in (digits.images, digits.labels, digits.test_images, digits.test_labels):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()[:8]


def _name(setting: Setting) -> str:
    recipe = setting.recipe
    parts = (recipe.power, setting.epsilon, setting.step_size, setting.radius)
    numbers = "-".join(f"{part:g}" for part in parts)
    return f"{recipe.method}-{recipe.rows}-{numbers}-{setting.steps}-seed{setting.seed}"
