"""Privacy cards of every kind of run, each made once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array

import privagrad as pg
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import Event, GaussianEvent, ObjectiveEvent, training_event
from privagrad.privacy.ledger import BudgetError, Ledger
from privagrad.privacy.sampling import Batches
from privagrad.report.card import Card, card_of_report

ROWS = 2000


def table(classes: int = 2) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    X = rng.standard_normal((ROWS, 3))
    if classes == 0:
        return X, X @ [1.0, -2.0, 0.5] + rng.standard_normal(ROWS)
    return X, (X[:, :1] + rng.gumbel(size=(ROWS, classes)) * 0.5 + np.arange(classes)).argmax(1)


def two_classes() -> Card:
    return pg.PrivateLogisticRegression(epsilon=1.0, delta=1e-6, evaluate=True).fit(*table()).card()


def many_classes() -> Card:
    model = pg.PrivateLogisticRegression(epsilon=3.0, delta=1e-6, evaluate=True)
    return model.fit(*table(4)).card()


def regression() -> Card:
    return pg.PrivateHuberRegressor(epsilon=2.0, delta=1e-6, evaluate=True).fit(*table(0)).card()


def ridge() -> Card:
    return pg.PrivateRidge(epsilon=1.0, delta=1e-6).fit(*table(0)).card()


def seeded() -> Card:
    model = pg.PrivateLinearSVC(epsilon=1.0, delta=1e-6, random_state=1, evaluate=True)
    return model.fit(*table()).card()


def not_private() -> Card:
    return pg.PrivateLogisticRegression(epsilon=float("inf"), evaluate=True).fit(*table()).card()


def sparse() -> Card:
    X, y = table()
    return pg.PrivateLogisticRegression(epsilon=1.0, delta=1e-6).fit(csr_array(X), y).card()


def charged() -> Card:
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.db")
        ledger.create("stays", 3.0, 1e-6)
        for _ in range(2):
            model = pg.PrivateLogisticRegression(epsilon=1.0, ledger=ledger, dataset="stays")
            model.fit(*table())
        return model.card()


def users() -> Card:
    X, y = table()
    model = pg.PrivateLogisticRegression(epsilon=1.0, delta=1e-6)
    return model.fit(X, y, groups=np.arange(len(y)) // 2).card()


def search() -> Card:
    model = pg.PrivateSearch(
        pg.PrivateLogisticRegression(), {"step_size": [0.3, 1.0]}, epsilon=2.0, delta=1e-6
    )
    return model.fit(*table()).card()


def minimized(sampling: Any) -> Callable[[], Card]:
    def made() -> Card:
        X, y = table()
        found = pg.minimize(
            "logistic", X, 2 * y - 1, method="pagan", epsilon=1.0, delta=1e-6, batch_size=50,
            steps=100, sampling=sampling, ellipsoid=pg.Ellipsoid.ball(3, 1.0),
            domain=pg.Box(-1, 1), step_size=0.1,
        )  # fmt: skip
        return card_of_report(found.privacy, kind="minimiser", algorithm="PAGAN")

    return made


def objective() -> Card:
    plan = PrivacyPlan((ObjectiveEvent(5.0, 0.2), GaussianEvent(20.0)))
    return card_of_report(plan.report(1e-6, seeded=False), rows=ROWS)


def allocated() -> Card:
    plan = PrivacyPlan.calibrate(1.0, 1e-6, ROWS, 50, 100, "random_allocation")
    return card_of_report(plan.report(1e-6, seeded=False), algorithm="DP-SGD")


def correlated() -> Card:
    batches = Batches(ROWS, 25, 101, "cyclic_poisson", 4)
    plan = PrivacyPlan.calibrate_event(training_event(batches), 1.0, 1e-6)
    return card_of_report(plan.report(1e-6, seeded=False), algorithm="DP-SGD")


def leaky() -> Card:
    plan = PrivacyPlan((GaussianEvent(9.0, leak=1e-7, purpose="categories"), GaussianEvent(5.0)))
    return card_of_report(plan.report(1e-6, seeded=False, noise="discrete"), rows=ROWS)


def deep() -> Card:
    from tests.torch.small import private

    run = private(noise_multiplier=2.0, poisson_sampling=True)
    run.epoch()
    return card_of_report(run.engine.report(1e-5), kind="PyTorch model", algorithm="DP-SGD")


KINDS: dict[str, Callable[[], Card]] = {
    "two classes": two_classes,
    "many classes": many_classes,
    "regression": regression,
    "ridge": ridge,
    "seeded": seeded,
    "not private": not_private,
    "sparse": sparse,
    "charged": charged,
    "users": users,
    "search": search,
    "poisson": minimized("poisson"),
    "without replacement": minimized("without_replacement"),
    "with replacement": minimized("with_replacement"),
    "random allocation": allocated,
    "correlated": correlated,
    "objective": objective,
    "leak": leaky,
    "torch": deep,
}


def charge_too_much(ledger: Ledger, dataset: str) -> None:
    """Let a budget be exceeded, by a run that was given back while it was alive."""
    account = ledger.account(dataset)
    most = account.largest(lambda epsilon: calibrated(epsilon, account.delta))
    events = calibrated(0.95 * most, account.delta)
    first = ledger.reserve(dataset, events, "")
    ledger.release(first, "believed to be dead")
    ledger.reserve(dataset, events, "")
    with suppress(BudgetError):
        ledger.finish(first, events)
    assert ledger.account(dataset).spent > account.epsilon


def calibrated(epsilon: float, delta: float) -> tuple[Event, ...]:
    return PrivacyPlan.calibrate_event(GaussianEvent(1.0), epsilon, delta).events


@cache
def card_named(kind: str) -> Card:
    return KINDS[kind]()
