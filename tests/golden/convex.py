"""Seeded runs of the convex doors: pieces, plans, `minimize` and the estimators."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from privagrad.events import ObjectiveEvent, SelectEvent
from privagrad.moments import algorithm3
from privagrad.noise import random_source
from privagrad.sampling import batches
from scipy.sparse import csr_array

import privagrad as pg

Vector = NDArray[np.float64]
Recorded = dict[str, Any]
Run = Callable[[], Recorded]

N, DIM, CLASSES = 300, 7, 3
SIGMA = np.arange(1.0, DIM + 1) ** -1.0
LOSS_OF = {
    "sgd": "logistic",
    "adagrad": "hinge",
    "dp-sgd": "huber",
    "dp-adagrad": "quantile",
    "pasan": "absolute",
    "pagan": "softmax",
    "pagan-history": "multiclass-hinge",
    "pdp-sgd": "absolute",
    "adaclip": "logistic",
    "geoclip": "huber",
    "gep": "hinge",
    "subspace-adagrad": "huber",
    "mirror-descent": "linear",
    "output-perturbation": "logistic",
    "objective-perturbation": "huber",
    "adam": "logistic",
    "dp-adam": "softmax",
    "dp-adambc": "hinge",
    "scale-then-privatize": "absolute",
    "adadps": "huber",
    "dp2": "quantile",
    "disk": "multiclass-hinge",
}
"""Every method, each with one of the losses."""
PLAIN = ("sgd", "adagrad", "adam")
NEEDS_PUBLIC = ("pdp-sgd", "gep", "subspace-adagrad", "adadps")


def table(n: int, seed: int) -> tuple[Vector, Vector]:
    """Columns of different scales with zeros in them, and the margins of a fixed point."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, DIM)) * SIGMA * (rng.random((n, DIM)) < 0.6)
    signs = np.array([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0])
    return X, (X * signs).sum(axis=1) + 0.1 * rng.standard_normal(n)


def targets(loss: str, margins: Vector) -> Vector | None:
    if loss == "linear":
        return None
    if loss in ("softmax", "multiclass-hinge"):
        return np.digitize(margins, [-0.5, 0.5]).astype(np.float64)
    return np.where(margins > 0, 1.0, -1.0) if loss in ("logistic", "hinge") else margins


def minimized(method: str, loss: str, sparse: bool = False, **options: Any) -> Recorded:
    X, margins = table(N, seed=1)
    settings: dict[str, Any] = {
        "epsilon": math.inf if method in PLAIN else 4.0,
        "domain": pg.Box(-3, 3),
        "batch_size": 30,
        "steps": 40,
        "step_size": 0.2,
        "random_state": 7,
    }
    if method in NEEDS_PUBLIC or options.pop("public", False):
        public, shown = table(60, seed=2)
        settings["public"] = (public, targets(loss, shown))
    result = pg.minimize(
        loss,
        csr_array(X) if sparse else X,
        targets(loss, margins),
        method=method,
        **(settings | options),
    )
    return {
        "last": result.last.tolist(),
        "average": result.average.tolist(),
        "suffix_average": result.suffix_average.tolist(),
        "epsilon": result.privacy.epsilon,
        "text": str(result.privacy),
    }


def ellipsoid(copies: int = 1) -> pg.Ellipsoid:
    return pg.Ellipsoid(np.tile(SIGMA ** (-4 / 3), copies), 1.5)


def minimisations() -> Iterator[tuple[str, Run]]:
    for method, loss in LOSS_OF.items():
        for kind in ("dense", "csr"):
            run = partial(minimized, method, loss, kind == "csr")
            yield f"minimize/{method}/{loss}/{kind}", run
            if method not in PLAIN:
                copies = CLASSES if loss in ("softmax", "multiclass-hinge") else 1
                shaped = partial(run, ellipsoid=ellipsoid(copies))
                yield f"minimize/{method}/{loss}/{kind}/ellipsoid", shaped
    given: dict[str, Any] = {"ellipsoid": ellipsoid()}
    for sampling in ("poisson", "with_replacement", "without_replacement"):
        for method in ("pagan", "dp-sgd"):
            run = partial(minimized, method, "logistic", sampling=sampling, **given)
            yield f"minimize/{method}/sampling/{sampling}", run
    yield (
        "minimize/pagan/sampling/without_replacement/learned",
        partial(minimized, "pagan", "logistic", sampling="without_replacement"),
    )
    for projection in ("radial", "euclidean", "rows"):
        for kind in ("dense", "csr"):
            run = partial(minimized, "pagan", "quantile", kind == "csr", projection=projection)
            yield f"minimize/pagan/projection/{projection}/{kind}", partial(run, **given)
    for name, domain in DOMAINS.items():
        run = partial(minimized, "pagan", "absolute", domain=domain, **given)
        yield f"minimize/pagan/domain/{name}", run
    yield from _other_options(given)


def _other_options(given: dict[str, Any]) -> Iterator[tuple[str, Run]]:
    pagan = partial(minimized, "pagan", "absolute")
    yield "minimize/pagan/plain", partial(pagan, epsilon=math.inf)
    yield "minimize/pagan/public", partial(pagan, public=True)
    yield "minimize/pasan/public", partial(minimized, "pasan", "hinge", public=True)
    yield "minimize/pagan/linear-schedule", partial(pagan, schedule="linear", **given)
    yield "minimize/pagan/x0", partial(pagan, x0=np.full(DIM, 0.5), **given)
    for threads in (1, 3):
        yield f"minimize/pagan/threads/{threads}", partial(pagan, threads=threads, **given)
    yield "minimize/pagan/default-step-size", partial(pagan, step_size=None, **given)
    yield "minimize/pasan/default-step-size", partial(minimized, "pasan", "hinge", step_size=None)
    tuned = pg.Loss("huber", 0.5), pg.Loss("quantile", 0.8)
    for loss in tuned:
        yield f"minimize/pagan/{loss.name}/parameter", partial(_with_loss, loss)


def _with_loss(loss: pg.Loss) -> Recorded:
    X, margins = table(N, seed=1)
    result = pg.minimize(
        loss, X, margins, epsilon=4.0, domain=pg.L2Ball(2.0), batch_size=30, steps=40,
        step_size=0.2, random_state=8,
    )  # fmt: skip
    return {"last": result.last.tolist(), "epsilon": result.privacy.epsilon}


DOMAINS: dict[str, Any] = {
    "box": pg.Box(-np.linspace(0.1, 0.7, DIM), np.linspace(0.7, 0.1, DIM)),
    "l2-ball": pg.L2Ball(1.5),
    "l1-ball": pg.L1Ball(3.0),
    "simplex": pg.Simplex(3.0),
    "whole-space": pg.WholeSpace(),
}


def projections() -> Recorded:
    points = np.random.default_rng(3).standard_normal((3, DIM))
    metric = np.linspace(0.5, 3.0, DIM)
    found: Recorded = {
        f"{name} {'euclidean' if m is None else 'in a metric'}": [
            domain.project(x, metric=m).tolist() for x in points
        ]
        for name, domain in DOMAINS.items()
        for m in (None, metric)
    }
    shape = ellipsoid()
    found |= {how: shape.project(3 * points, how=how).tolist() for how in ("radial", "euclidean")}
    return found | {
        "norm": np.asarray(shape.norm(points)).tolist(),
        "noise_std": shape.noise_std.tolist(),
    }


def draws() -> Recorded:
    """Random sources, batches and Algorithm 3."""
    source = random_source(5)
    found: Recorded = {"words": [stream.words(2).tolist() for stream in source.streams]}
    for sampling in ("poisson", "with_replacement", "without_replacement"):
        drawn = batches(sampling, 50, 6, 4, random_source(6).sampler)
        found[sampling] = [batch.tolist() for batch in drawn]
    X, _ = table(N, seed=4)
    found["algorithm 3"] = algorithm3(X, 2.0, 4.0, 1e-5, random_source(9)).tolist()
    return found


def calibrated(sampling: Any, epsilon: float, delta: float, n: int, size: int, steps: int) -> Any:
    plan = pg.PrivacyPlan.calibrate(
        epsilon=epsilon, delta=delta, n_examples=n, batch_size=size, steps=steps, sampling=sampling
    )
    return {
        "noise_multiplier": plan.noise_multiplier,
        "epsilon": plan.epsilon(delta),
        "epsilon at another delta": plan.epsilon(delta / 10),
        "relation": plan.relation,
    }


QUERY = pg.GaussianEvent(8.0, 2, purpose="moments")
TRAINING = pg.GaussianEvent(2.0, 50, "poisson", 10_000, 100, "gradients")
PLANS: dict[str, tuple[Any, ...]] = {
    "queries": (QUERY,),
    "training": (TRAINING,),
    "queries and training": (QUERY, TRAINING),
    "a leak": (pg.GaussianEvent(5.0, purpose="categories", leak=1e-7), TRAINING),
    "full batches under replace-one": (pg.GaussianEvent(5.0, 3, under="replace-one"),),
    "fixed batches": (pg.GaussianEvent(2.0, 50, "without_replacement", 10_000, 100, "gradients"),),
    "with replacement": (pg.GaussianEvent(2.0, 50, "with_replacement", 10_000, 100, "gradients"),),
    "objective": (pg.GaussianEvent(200.0), ObjectiveEvent(3.0, 0.2)),
    "selection": (SelectEvent((QUERY, TRAINING), 3.0),),
}


def composed(events: tuple[Any, ...]) -> Recorded:
    plan = pg.PrivacyPlan(events)
    return {"epsilon": plan.epsilon(1e-5), "delta": plan.delta(1.0), "relation": plan.relation}


def plans() -> Iterator[tuple[str, Run]]:
    for sampling in ("poisson", "with_replacement", "without_replacement"):
        for setting in ((1.0, 1e-5, 5000, 70, 1000), (0.2, 1e-6, 1000, 100, 50)):
            name = " ".join(f"{value:g}" for value in setting)
            yield f"plan/{sampling}/{name}", partial(calibrated, sampling, *setting)
    yield "plan/poisson/all rows", partial(calibrated, "poisson", 3.0, 1e-5, 500, 500, 10)
    yield "plan/poisson/large epsilon", partial(calibrated, "poisson", 20.0, 1e-5, 5000, 70, 1000)
    for name, events in PLANS.items():
        yield f"events/{name}", partial(composed, events)


def fitted(name: str, kind: str = "dense", classes: bool = False, **options: Any) -> Recorded:
    """The estimator's numbers. Rows are few: its warning about that is not the subject here."""
    X, margins = table(2000, seed=10)
    rows: Any = csr_array(X) if kind == "csr" else X + (3.0 if kind == "offset" else 0.0)
    regression = name.endswith("Regressor")
    y = margins if regression else targets("softmax" if classes else "logistic", margins)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = getattr(pg, name)(3.0, random_state=11, **options).fit(rows, y)
    return _numbers_of(model, rows[:3])


def _numbers_of(model: Any, rows: Any) -> Recorded:
    return {
        "coef_": model.coef_.tolist(),
        "intercept_": np.asarray(model.intercept_).tolist(),
        "epsilon": model.privacy_.epsilon,
        "text": str(model.privacy_),
        "predictions": model.predict(rows).tolist(),
    }


def searched() -> Recorded:
    X, margins = table(2000, seed=10)
    search = pg.PrivateSearch(
        pg.PrivateLogisticRegression(steps=40, batch_size=200),
        {"step_size": [0.3, 1.0], "radius": [0.3, 1.0]},
        epsilon=8.0,
        mean_runs=3.0,
        random_state=12,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        search.fit(X, targets("logistic", margins))
    return {
        "best": _numbers_of(search.best_estimator_, X[:3]),
        "best_params_": search.best_params_,
        "best_score_": search.best_score_,
        "epsilon": search.privacy_.epsilon,
        "text": str(search.privacy_),
    }


def estimators() -> Iterator[tuple[str, Run]]:
    for name in ("PrivateLogisticRegression", "PrivateLinearSVC"):
        for kind in ("dense", "csr", "offset"):
            yield f"estimator/{name}/{kind}", partial(fitted, name, kind)
        yield f"estimator/{name}/bounds", partial(fitted, name, bounds=(-3.0, 3.0))
        yield f"estimator/{name}/classes", partial(fitted, name, classes=True)
        balanced = partial(fitted, name, class_weight="balanced")
        yield f"estimator/{name}/balanced", balanced
        yield f"estimator/{name}/balanced classes", partial(balanced, classes=True)
    for name in ("PrivateQuantileRegressor", "PrivateHuberRegressor"):
        for kind in ("dense", "csr", "offset"):
            yield f"estimator/{name}/{kind}", partial(fitted, name, kind)
        both: dict[str, Any] = {"bounds": (-3.0, 3.0), "target_bounds": (-5.0, 5.0)}
        yield f"estimator/{name}/bounds", partial(fitted, name, **both)
    logistic = "PrivateLogisticRegression"
    own: dict[str, Any] = {"steps": 30, "batch_size": 100, "step_size": 0.5, "radius": 0.5}
    yield f"estimator/{logistic}/classes csr", partial(fitted, logistic, "csr", True)
    yield f"estimator/{logistic}/own settings", partial(fitted, logistic, **own)
    yield f"estimator/{logistic}/no intercept", partial(fitted, logistic, fit_intercept=False)
    yield f"estimator/{logistic}/float32", partial(_of_floats, logistic)
    yield "estimator/PrivateSearch", searched


def _of_floats(name: str) -> Recorded:
    X, margins = table(2000, seed=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        rows = X.astype(np.float32)
        model = getattr(pg, name)(3.0, random_state=11).fit(rows, targets("logistic", margins))
    return _numbers_of(model, rows[:3])


def runs() -> Iterator[tuple[str, Run]]:
    yield "projections", projections
    yield "draws", draws
    yield from plans()
    yield from minimisations()
    yield from estimators()
