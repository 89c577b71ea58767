"""Every door offers exact discrete noise: for all its releases, and its report says so."""

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import privagrad as pg
from privagrad.cli import app
from privagrad.data.models import load_model
from privagrad.privacy import mechanism
from privagrad.torch import PrivacyEngine
from tests.torch.small import private

RNG = np.random.default_rng(0)
X = RNG.standard_normal((300, 3))
Y = (X[:, 0] > 0).astype(int)


@pytest.fixture
def no_gaussian_noise(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a release with Gaussian noise")

    monkeypatch.setitem(mechanism._ADD_NOISE, "gaussian", refuse)


@pytest.mark.usefixtures("no_gaussian_noise")
@pytest.mark.parametrize("method", ["pagan", "objective-perturbation", "gep"])
def test_minimize(method):
    public = (X[:50], 2 * Y[:50] - 1) if method == "gep" else None
    result = pg.minimize(
        "logistic", X, 2 * Y - 1, method=method, epsilon=1.0, delta=1e-5, domain=pg.L2Ball(1.0),
        batch_size=50, steps=5, step_size=0.1, public=public, noise="discrete",
    )  # fmt: skip
    assert result.privacy.noise == "discrete"
    assert "discrete Gaussian noise" in str(result.privacy)


@pytest.mark.parametrize(
    "model",
    [
        pg.PrivateLogisticRegression(noise="discrete"),
        pg.PrivateLinearSVC(noise="discrete"),
        pg.PrivateQuantileRegressor(noise="discrete"),
        pg.PrivateHuberRegressor(noise="discrete"),
        pg.PrivateSearch(
            pg.PrivateLogisticRegression(noise="discrete"), {"radius": [0.3, 1.0]}, mean_runs=2
        ),
    ],
)
@pytest.mark.usefixtures("no_gaussian_noise")
@pytest.mark.filterwarnings("ignore:.*rows:UserWarning")
def test_estimators(model):
    assert model.set_params(epsilon=3.0).fit(X, Y).privacy_.noise == "discrete"


def test_wrong_kinds_are_refused_before_anything_is_released():
    with pytest.raises(ValueError, match="Expected noise to be one of gaussian, discrete"):
        pg.PrivateLogisticRegression(noise="laplace").fit(X, Y)  # type: ignore[arg-type]


def test_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pl.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": np.where(Y, "yes", "no")}).write_csv("t.csv")
    fit = ["fit", "t.csv", "--target", "y", "--classes", "yes,no", "-e", "3", "-o", "m.model"]
    wrong = CliRunner().invoke(app, [*fit, "--noise", "none"])
    assert wrong.exit_code == 2
    assert "gaussian, discrete" in wrong.output
    done = CliRunner().invoke(app, [*fit, "--noise", "discrete", "--report", "r.html"])
    assert done.exit_code == 0, done.output
    assert load_model(tmp_path / "m.model").privacy["noise"] == "discrete"
    assert "discrete Gaussian" in (tmp_path / "r.html").read_text()


@pytest.mark.usefixtures("no_gaussian_noise")
def test_engine_and_its_checkpoints(tmp_path):
    run = private(nn.Linear(5, 3), noise_multiplier=1.0, noise="discrete")
    run.epoch(F.cross_entropy)
    assert run.engine.report(1e-5).noise == "discrete"
    run.engine.save_checkpoint(path=tmp_path / "c.pt", module=run.module, optimizer=run.optimizer)
    other = private(nn.Linear(5, 3), noise_multiplier=1.0, noise="discrete")
    other.engine.load_checkpoint(path=tmp_path / "c.pt", module=other.module)
    assert other.engine.report(1e-5).noise == "discrete"
    state = torch.load(tmp_path / "c.pt")
    del state["privagrad"]["noise"]  # as written before there was a choice
    torch.save(state, tmp_path / "old.pt")
    other.engine.load_checkpoint(path=tmp_path / "old.pt", module=other.module)
    assert other.engine.report(1e-5).noise == "gaussian"
    assert PrivacyEngine().report(1e-5).noise == "gaussian"
