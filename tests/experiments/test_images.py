"""Digits by a linear model on fixed features: the features, the noise, and resumable runs."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from privagrad.cli import app
from privagrad.experiments.images import runs
from privagrad.experiments.images.basis import Basis, cached, normalised
from privagrad.experiments.images.data import Digits, read_digits
from privagrad.experiments.images.scattering import (
    CHANNELS,
    FEATURES,
    GRID,
    Images,
    morlet_filters,
    scattering,
)
from privagrad.experiments.images.settings import RECIPES, Plan, Setting
from privagrad.experiments.images.strokes import random_strokes
from privagrad.experiments.images.tables import COLUMNS, spread
from privagrad.experiments.images.training import Table, fit

_SEGMENTS = (
    "abcdef",
    "bc",
    "abged",
    "abgcd",
    "fgbc",
    "afgcd",
    "afgedc",
    "abc",
    "abcdefg",
    "abcdfg",
)
"""Seven-segment digits."""
_PLACES = {
    "a": (4, 8, 3, 12), "g": (12, 8, 3, 12), "d": (21, 8, 3, 12), "f": (4, 8, 10, 3),
    "b": (4, 17, 10, 3), "e": (13, 8, 10, 3), "c": (13, 17, 10, 3),
}  # fmt: skip


def digits(count: int, seed: int) -> tuple[Images, np.ndarray]:
    """Digits of a pocket calculator, shifted, of varying brightness, with spots of dirt."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count)
    images = rng.integers(0, 60, (count, 28, 28)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        for segment in _SEGMENTS[label]:
            top, left, height, width = _PLACES[segment]
            down, across = rng.integers(-2, 3, 2)
            image[top + down : top + down + height, left + across : left + across + width] = (
                rng.integers(150, 256)
            )
    return images, labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("digits")
    (x_train, y_train), (x_test, y_test) = digits(900, 0), digits(200, 1)
    np.savez(data / "mnist.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return data


@pytest.fixture(scope="module")
def basis() -> Basis:
    return Basis.of_strokes(dim=20, pictures=60)


def test_waves_have_mean_zero_and_norm_one_and_turn() -> None:
    waves = morlet_filters()
    assert np.abs(waves.sum(axis=(2, 3))).max() < 1e-6
    assert (waves**2).sum(axis=(1, 2, 3)) == pytest.approx(np.ones(8), rel=1e-5)
    # A quarter of a turn later the same wave runs along the other axis.
    assert waves[4, 0] == pytest.approx(waves[0, 0].T, abs=1e-6)


def test_first_order_features_are_averaged_sizes_of_convolutions() -> None:
    """Against the definition in NumPy: convolve, take sizes, average over a Gaussian window."""
    from scipy.signal import correlate2d

    image = random_strokes(1, seed=5)[0]
    page = np.zeros((32, 32))
    page[2:30, 2:30] = image / 255
    real, imaginary = morlet_filters()[3].astype(float)
    size = np.hypot(correlate2d(page, real, "same"), correlate2d(page, imaginary, "same"))
    taps = np.exp(-(np.arange(-4, 5) ** 2) / (2 * 1.6**2))
    taps /= taps.sum()
    window = np.outer(taps, taps)
    cells = correlate2d(size, window, "same")[4:32:4, 4:32:4]
    found = scattering(image[None], straighten=False)[0].reshape(CHANNELS, GRID, GRID)
    # Before the fourth wave: the image, the coarse sizes, and three waves with eight others each.
    assert found[1 + 8 + 3 * 9] == pytest.approx(cells, abs=1e-5)


def test_straightened_images_forget_shears_and_shifts() -> None:
    image = np.zeros((28, 28), np.uint8)
    image[6:22, 12:15] = 255
    slanted = np.zeros_like(image)
    for row in range(6, 22):
        shift = (row - 14) // 2 + 2
        slanted[row, 12 + shift : 15 + shift] = 255
    straight, other = scattering(np.stack([image, slanted]))
    raw, raw_other = scattering(np.stack([image, slanted]), straighten=False)
    assert np.linalg.norm(straight - other) < 0.35 * np.linalg.norm(raw - raw_other)


def test_an_images_coordinates_depend_on_the_image_alone(basis: Basis) -> None:
    """Not on its place or its batch, to the last bit: also where blocks and tiles end."""
    images = np.concatenate([digits(37, 3)[0], np.zeros((1, 28, 28), np.uint8)])
    together = basis.coordinates(images)
    assert np.isfinite(together).all()
    assert np.array_equal(basis.coordinates(images[::-1])[::-1], together)
    for row in (0, 17, 36, 37):
        assert np.array_equal(basis.coordinates(images[row : row + 1])[0], together[row])


def test_the_basis_is_that_of_the_public_pictures(basis: Basis) -> None:
    """Coordinates of the pictures have mean 0, and the basis's variances without correlation."""
    found = basis.coordinates(random_strokes(60)).astype(float)
    scale = np.sqrt(basis.variances)
    assert found.mean(axis=0) / scale == pytest.approx(np.zeros(20), abs=1e-3)
    covariance = found.T @ found / 60 / np.outer(scale, scale)
    assert covariance == pytest.approx(np.eye(20), abs=1e-3)
    assert (basis.axes.T @ basis.axes) == pytest.approx(np.eye(20), abs=1e-4)


def test_normalised_groups_have_mean_zero_and_variance_one() -> None:
    groups = normalised(scattering(random_strokes(3))).reshape(3, 27, -1).astype(float)
    assert groups.mean(axis=2) == pytest.approx(np.zeros((3, 27)), abs=1e-5)
    assert groups.std(axis=2) == pytest.approx(np.ones((3, 27)), abs=1e-2)
    assert groups.size == 3 * FEATURES


def random_table() -> Table:
    rng = np.random.default_rng(4)
    variances = 1.1 ** -np.arange(80.0)
    rows = (rng.standard_normal((300, 80)) * np.sqrt(variances)).astype(np.float32)
    labels = np.arange(300) % 10
    return Table(rows, labels, rows, labels, variances)


@pytest.mark.parametrize("steps", [1, 4])
def test_the_noise_in_the_weights_is_that_of_the_plan(steps: int) -> None:
    """With a tiny radius DP-SGD's weights are noise, whose deviation follows from the step sizes.

    The deviation of 800 normal numbers is within 17 % of theirs but for one time in 1e10; noise a
    third too small is not. Gradients that are not bounded would be 1e6 times as large.
    """
    table = random_table()
    result = fit(Setting("dp-sgd", 1.0, 10.0, 1e-9, steps=steps, seed=7), table)
    # All rows in every step: one Gaussian mechanism of multiplier 3.73, cut into steps.
    assert result.privacy.epsilon == pytest.approx(1.0, abs=1e-3)
    noise = 3.7307 * math.sqrt(steps) * 1e-9 / len(table.rows)
    expected = math.hypot(*(10.0 * (1 - k / steps) for k in range(steps))) * noise
    assert np.std(result.last / expected) == pytest.approx(1.0, abs=0.17)


def test_the_noise_has_the_shape_of_the_public_variances(monkeypatch: pytest.MonkeyPatch) -> None:
    """PASAN's first step is along the private gradient, here noise: its deviations are those of
    the ellipsoid. A ball's would have a correlation of 0 with them, within 0.2."""
    recipe = replace(RECIPES["pagan"], method="pasan")
    monkeypatch.setitem(RECIPES, "pagan", recipe)
    table = random_table()
    step = fit(Setting("pagan", 1.0, 1.0, 1e-9, steps=1, seed=7), table).last.reshape(10, -1)
    expected = table.variances ** (recipe.power / 2)
    sizes = np.sqrt((step**2).mean(axis=0))
    assert np.std(np.log(sizes / expected)) < 0.3
    assert np.std(np.log(expected)) > 0.6


def test_rows_have_norm_one_in_the_ellipsoid() -> None:
    """A gradient's norm is then that of the slopes, at most sqrt(2): none is shrunk beyond it."""
    table = random_table()
    for name, radius in (("pagan", 1.42), ("dp-sgd", 1.42), ("pagan", 0.9), ("dp-sgd", 0.9)):
        found = fit(Setting(name, 1.0, 1e-3, radius, steps=1, seed=1), table)
        # At 0 the slopes are 0.1 and once -0.9: their norm is sqrt(0.9) = 0.949.
        assert found.diagnostics.clipped == (300 if radius < 0.94 else 0)


def test_a_quick_run_learns_and_is_resumed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_PICTURES", (20, 60))
    command = ["reproduce", "images", "--data-dir", str(folder), "--quick", "--epsilons", "8"]
    command += ["--seeds", "2", "--out", str(tmp_path), "--report", str(tmp_path / "r.html")]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    with (tmp_path / "images.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS
    assert len(lines) == 2 * len(RECIPES)
    assert all(7.9 < float(line["epsilon_spent"]) <= 8 for line in lines)
    assert min(float(line["accuracy"]) for line in lines if line["method"] == "pagan") > 0.5
    assert "± " in (tmp_path / "images.md").read_text(encoding="utf-8")
    assert "95 % interval" in (tmp_path / "images.md").read_text(encoding="utf-8")
    assert (tmp_path / "images.png").read_bytes().startswith(b"\x89PNG")
    assert "Digits" in (tmp_path / "r.html").read_text(encoding="utf-8")

    def fails(*_: object) -> None:
        raise AssertionError("a finished run was made again")

    monkeypatch.setattr(runs, "train", fails)
    before = (tmp_path / "images.csv").read_bytes()
    assert CliRunner().invoke(app, command).exit_code == 0
    assert (tmp_path / "images.csv").read_bytes() == before


def test_rows_held_out_are_the_last_training_rows() -> None:
    images, labels = digits(60, 2)
    found = Digits(images, labels, images[:0], labels[:0]).held_out()
    assert np.array_equal(found.images, images[:50])
    assert np.array_equal(found.test_images, images[50:])
    assert np.array_equal(found.test_labels, labels[50:])


def test_what_is_kept_is_made_once_for_each_input(tmp_path: Path) -> None:
    made = cached(tmp_path, (np.zeros(3),), lambda: np.ones(2, np.float32))
    assert np.array_equal(cached(tmp_path, (np.zeros(3),), lambda: 0 * made), made)
    assert np.array_equal(cached(tmp_path, (np.ones(3),), lambda: 0 * made), 0 * made)


def test_a_spread_is_in_percent() -> None:
    assert spread([0.98, 0.99]) == "98.50 ± 0.71"
    assert spread([0.9]) == "90.00"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros((5, 28, 27), np.uint8)}, "Expected images of bytes"),
        ({"x_train": np.zeros((5, 28, 28))}, "Expected images of bytes"),
        ({"y_test": np.array([10])}, "Expected labels from 0 to 9"),
        ({"y_test": None}, "Expected the array y_test"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    arrays: dict[str, Any] = {"x_train": np.zeros((5, 28, 28), np.uint8), "y_train": np.arange(5)}
    arrays |= {"x_test": np.zeros((1, 28, 28), np.uint8), "y_test": np.array([3])}
    arrays = {name: value for name, value in (arrays | change).items() if value is not None}
    np.savez(tmp_path / "mnist.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read_digits(tmp_path)


def test_missing_files_and_unknown_methods_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="found nothing at"):
        read_digits(tmp_path)
    done = CliRunner().invoke(app, ["reproduce", "images"])
    assert done.exit_code == 2
    assert "Expected --data-dir" in done.output
    with pytest.raises(ValueError, match="method"):
        Plan(("sgd",))
    with pytest.raises(ValueError, match="28 × 28"):
        scattering(np.zeros((2, 28, 27), np.uint8))
