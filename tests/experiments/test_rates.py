import csv
import json
import math

import numpy as np
import pytest

from privagrad.experiments.rates import LABELS, METHODS, QUICK, Problem, run


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    out = tmp_path_factory.mktemp("rates") / "new"
    return out, run(out, quick=True)


def test_a_run_writes_its_table_its_settings_and_its_plot(outcome):
    out, result = outcome
    assert all(path.parent == out for path in result.files)
    assert (out / "rates.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (out / "rates.svg").read_text()
    with (out / "rates.csv").open() as file:
        lines = list(csv.DictReader(file))
    columns = ["varied", "value", "method", "excess", "low", "high", "upper", "lower"]
    assert list(lines[0]) == columns
    assert len(lines) == len(METHODS) * sum(map(len, QUICK.values.values()))
    written = json.loads((out / "rates.json").read_text())
    assert written["settings"]["steps"] == QUICK.steps
    assert len(written["slopes"]) == len(METHODS) * len(LABELS)


def test_what_is_measured_lies_between_the_bounds(outcome):
    for point in outcome[1].points:
        assert point.lower < point.low <= point.excess <= point.high < point.upper


def test_measured_slopes_are_the_theorems(outcome):
    """-1 in n and epsilon. Medians of three seeds: 0.35 is wide enough for any seeds, and far from
    the -1/2 of sampling error and from a bound that does not depend on epsilon."""
    for slope in outcome[1].slopes:
        assert math.isfinite(slope.measured)
        assert slope.measured == pytest.approx(slope.predicted, abs=0.35)
        if slope.varied in ("n", "epsilon"):
            assert slope.predicted == pytest.approx(-1)


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_within_sigma_and_inside_the_ellipsoid_with_the_means_asked_for(method):
    problem = Problem(n=500, dim=12, epsilon=0.5)
    rows = problem.rows(method, 4.0, seed=3)
    assert np.array_equal(np.abs(rows), np.broadcast_to(problem.sigma, rows.shape))
    ellipsoid = problem.ellipsoid(method)
    assert ellipsoid.norm(rows) == pytest.approx(np.full(500, ellipsoid.radius))
    count = problem.sigma / problem.n
    means = np.abs(rows.mean(axis=0))
    assert np.all(np.abs(means - problem.means(method, 4.0)) <= count * (1 + 1e-9))
