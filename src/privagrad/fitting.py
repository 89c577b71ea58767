"""A model from a file: read, plan, reserve, fit, evaluate, save, in this order."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad import _validate
from privagrad._validate import Vector
from privagrad.accounting import PrivacyPlan
from privagrad.categories import discover, discovery, threshold
from privagrad.encoding import Encoder
from privagrad.events import Event, GaussianEvent
from privagrad.files import count_categories, read_rows, require_table, sketch
from privagrad.ledger import Account, BudgetError, Ledger, as_json
from privagrad.libsvm import is_libsvm, read_libsvm
from privagrad.linear import (
    EVALUATION,
    METHODS,
    Bounds,
    Choices,
    Facts,
    LinearModel,
    Plan,
    Problem,
    default_delta,
    is_regression,
    plan_fit,
    run_fit,
    warn_if_hopeless,
)
from privagrad.losses import Loss
from privagrad.models import SavedModel, save_model
from privagrad.noise import random_source
from privagrad.schema import Schema
from privagrad.tables import as_rows

LOSSES = {
    "logistic": Loss("logistic"),
    "hinge": Loss("hinge"),
    "huber": Loss("huber"),
    "absolute": Loss("quantile", 0.5),
    "quantile": Loss("quantile"),
}
_SEVERAL = {"logistic": "softmax", "hinge": "multiclass-hinge"}
_GUESSED_CATEGORIES = 20
"""Of a column whose categories nobody knows yet: for the size of batches alone."""


@dataclass(frozen=True)
class Wish:
    """What a user asks for.

    Attributes
    ----------
    loss : a name of `LOSSES`; None: logistic for a target of categories, huber for numbers
    quantile : for the quantile loss
    schema : None for a file of numbers alone
    classes : all labels that can occur; None: the schema's, or else discovered privately
    delta : None: the data set's, or else below 1/(10 n)
    seed : None for secure noise; a seeded model is not private
    dataset, ledger : the budget that pays; None: nobody keeps account
    """

    table: Path
    target: str | None
    epsilon: float
    delta: float | None = None
    loss: str | None = None
    quantile: float = 0.5
    schema: Schema | None = None
    classes: tuple[str, ...] | None = None
    choices: Choices = field(default_factory=Choices)
    seed: int | None = None
    dataset: str | None = None
    ledger: Ledger | None = None


@dataclass(frozen=True)
class Job:
    """A fit before its first release: everything is read and checked, nothing is spent.

    `schema` None: a LIBSVM file. `counts` are of columns whose categories are to be discovered.
    """

    wish: Wish
    schema: Schema | None
    loss: Loss
    classes: tuple[str, ...] | None
    n: int
    delta: float
    choices: Choices
    events: tuple[Event, ...]
    discovery: GaussianEvent | None
    counts: dict[str, Counter[str]]
    account: Account | None

    @property
    def epsilon(self) -> float:
        """What the releases cost alone."""
        return PrivacyPlan(self.events).epsilon(self.delta) if self.events else math.inf

    @property
    def public(self) -> list[str]:
        """What the guarantee does not cover, because it is taken to be known."""
        columns = "names, kinds, bounds and categories of columns that the schema states"
        known = ["the columns' number" if self.schema is None else columns]
        if self.classes is not None and "(target)" not in self.counts:
            known.append(f"the labels: {', '.join(self.classes)}")
        return [f"the number of rows: {self.n}", *known, "all settings of this run"]


def prepare(wish: Wish) -> Job:
    """Check the budget before anything is read; then read, check and plan. Releases nothing."""
    _validate.positive("epsilon", wish.epsilon)
    account = _account(wish)
    require_table(wish.table)
    if account and account.fingerprint and fingerprint(wish.table) != account.fingerprint:
        raise ValueError(
            f"Expected the file that the budget of {account.name!r} was opened for, found other "
            f"content in {wish.table.name}: rows that changed are another data set. Open a budget "
            "for it."
        )
    schema = None if is_libsvm(wish.table) else _schema(wish)
    loss = _loss(wish, schema)
    if schema is not None and not is_regression(loss):
        target = schema.column(str(schema.target))
        categories = wish.classes or target.categories
        schema = schema.with_columns([replace(target, kind="category", categories=categories)])
    classes = None if is_regression(loss) else _stated_classes(wish, schema)
    n, width, counts = _survey(wish, schema, loss)
    size = wish.choices.batch_size
    if size is not None and size > n:
        raise ValueError(f"Expected a batch size of at most {n}, the rows; found {size}.")
    delta = wish.delta or (account.delta if account else default_delta(n))
    _validate.delta_of(delta, n)
    found = discovery(len(counts), wish.epsilon, delta) if counts else None
    encoder = None if schema is None else Encoder(schema)
    facts = Facts(
        n,
        (width + 1) * (len(classes) if classes and len(classes) > 2 else 1),
        schema is None or (encoder is not None and encoder.sparse),
        is_regression(loss),
        True,
        encoder is not None and encoder.bounds is not None,
        schema is not None and schema.column(str(schema.target)).bounded,
    )
    first = _plan(facts, wish, delta, wish.choices, found)
    warn_if_hopeless(n, wish.epsilon, first.relative_noise)
    # The number of columns may change when categories are known, the releases must not.
    choices = replace(wish.choices, batch_size=first.batches.size)
    events = first.privacy.events if first.privacy else ()
    return Job(
        wish, schema, loss, classes, n, delta, choices, events, found, counts, account
    )  # fmt: skip


def run(job: Job, out: Path, progress: bool | None = None) -> SavedModel:
    """Reserve, make the releases, write the model to `out`, tell the ledger."""
    wish, ledger = job.wish, job.wish.ledger
    run_name = None
    if job.account and ledger:
        run_name = _reserve(job, ledger)
    source = random_source(wish.seed)
    schema, classes = job.schema, job.classes
    if job.discovery is not None:
        found = discover(job.counts, job.n, job.discovery, source)
        if schema is not None:
            columns = [replace(schema.column(name), categories=c) for name, c in found.items()]
            schema = schema.with_columns(columns)
            classes = schema.column(str(schema.target)).categories if classes is not None else None
        else:
            classes = found["(target)"]
        if classes is not None:
            classes = tuple(sorted(classes))
            _require_classes(classes, job)
    problem, names = _problem(job, schema, classes)
    plan = _plan(problem.facts, wish, job.delta, job.choices, job.discovery)
    if plan.privacy and plan.privacy.events != job.events:
        raise RuntimeError("Expected the releases that were planned, found others.")
    model = run_fit(problem, plan, source, progress)
    saved = _saved(job, plan, model, schema, classes, names, run_name)
    save_model(saved, out)
    if run_name and ledger:
        ledger.finish(run_name, model.privacy.events)
    return saved


def test_scores(model: SavedModel, table: Path) -> dict[str, Any]:
    """How well a model predicts another table, beside a constant prediction. NOT private."""
    from privagrad.files import chunks

    right = count = 0
    labels: Counter[str] = Counter()
    errors: list[Vector] = []
    if model.schema is None:
        X, y = read_libsvm(table, len(model.features))
        parts: Any = [(X, _label_texts(y) if model.classes else y)]
    else:
        parts = ((part.X, part.y) for part in chunks(table, model.schema))
    for X, y in parts:
        predicted = model.predict(X)
        if model.classes is None:
            errors.append(np.stack([predicted, y])[:, np.isfinite(y)])
            continue
        known = np.array([value is not None for value in y])
        right += int((predicted[known] == y[known]).sum())
        count += int(known.sum())
        labels.update(y[known].tolist())
    if model.classes is not None:
        if not count:
            raise ValueError(f"Expected rows with a target in {table.name}, found none.")
        majority = max(labels.values()) / count
        return {"rows": count, "accuracy": right / count, "majority": majority, "private": False}
    predicted, truth = np.concatenate(errors, axis=1)
    if not truth.size:
        raise ValueError(f"Expected rows with a target in {table.name}, found none.")
    return {
        "rows": int(truth.size),
        "mean_absolute_error": float(np.abs(predicted - truth).mean()),
        "mean_absolute_error_of_median": float(np.abs(truth - np.median(truth)).mean()),
        "private": False,
    }


def with_test(model: SavedModel, scores: dict[str, Any], table: str) -> SavedModel:
    """The same with what a test table said of it."""
    return replace(model, evaluation={**model.evaluation, "test": {"table": table, **scores}})


def fingerprint(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def _account(wish: Wish) -> Account | None:
    """The budget that pays, if it is likely to: exactly this is known only with the plan."""
    if wish.dataset is None or wish.ledger is None:
        return None
    if wish.seed is not None:
        raise ValueError(
            "Expected no --seed for a run that a budget pays: seeded noise protects nobody."
        )
    account = wish.ledger.account(wish.dataset)
    after = account.spent_with(_typical(wish.epsilon, account.delta))
    if after > 1.01 * account.epsilon:
        raise refusal(account, wish.epsilon, after)
    return account


def refusal(account: Account, epsilon: float, after: float) -> BudgetError:
    """Why a run is refused, what is left, and what would fit."""
    largest = 0.99 * account.largest(lambda e: _typical(e, account.delta))
    fits = f"the largest epsilon that fits is about {math.floor(1000 * largest) / 1000:g}"
    return BudgetError(
        f"Expected a run within the budget of {account.name!r}, found that epsilon {epsilon:g} "
        f"would bring what is spent from {account.spent:.4g} to {after:.4g} of {account.epsilon:g} "
        f"(delta {account.delta:g}). Left: {max(account.epsilon - account.spent, 0):.4g}; "
        f"{fits if largest >= 0.001 else 'nothing fits any more'}. Nothing was spent."
    )


def _typical(epsilon: float, delta: float) -> tuple[Event, ...]:
    """One Gaussian release of this cost, which composes much as a fit does."""
    return PrivacyPlan.calibrate_event(GaussianEvent(1.0), epsilon, delta).events


def _reserve(job: Job, ledger: Ledger) -> str:
    assert job.account is not None
    note = f"fit {job.wish.table.name}: {job.loss.name}, epsilon {job.wish.epsilon:g}"
    try:
        return ledger.reserve(job.account.name, job.events, note)
    except BudgetError:
        account = ledger.account(job.account.name)
        raise refusal(account, job.wish.epsilon, account.spent_with(job.events)) from None


def _schema(wish: Wish) -> Schema:
    schema = wish.schema
    if schema is None:
        schema = sketch(wish.table)
        texts = [c.name for c in schema.columns if c.kind == "category" and c.name != wish.target]
        if texts:
            shown = ", ".join(map(repr, texts[:5])) + (", ..." if len(texts) > 5 else "")
            raise ValueError(
                f"Expected numbers alone in a table without a schema, found text in {shown}. Write "
                f"a schema and fill it in: privagrad schema {wish.table.name} -o schema.toml"
            )
    target = wish.target or schema.target
    if target is None:
        raise ValueError("Expected --target COLUMN, or a target in the schema; found none.")
    if schema.column(target).kind == "ignore":
        raise ValueError(f"Expected a target that is not ignored, found {target!r}.")
    schema = replace(schema, target=target)
    if not schema.features:
        raise ValueError("Expected columns beside the target, found none that is not ignored.")
    return schema


def _loss(wish: Wish, schema: Schema | None) -> Loss:
    _validate.choice("method", wish.choices.method, METHODS)
    kind = "category" if schema is None else schema.column(str(schema.target)).kind
    name = wish.loss or ("logistic" if kind == "category" else "huber")
    loss = LOSSES[_validate.choice("loss", name, LOSSES)]
    if name == "quantile":
        loss = Loss("quantile", wish.quantile)
    if schema is not None and kind == "category" and is_regression(loss):
        raise ValueError(
            f"Expected --loss logistic or hinge for a target of categories, found {name!r}."
        )
    if is_regression(loss) and wish.classes:
        raise ValueError(f"Expected no classes for a regression, found --classes and {name!r}.")
    return loss


def _stated_classes(wish: Wish, schema: Schema | None) -> tuple[str, ...]:
    """The labels as far as they are public; empty: to be discovered."""
    stated = wish.classes or ()
    if schema is not None:
        stated = schema.column(str(schema.target)).categories
    if len(stated) == 1:
        raise ValueError(f"Expected at least two classes, found {stated[0]!r} alone.")
    return stated


def _survey(
    wish: Wish, schema: Schema | None, loss: Loss
) -> tuple[int, int, dict[str, Counter[str]]]:
    """Rows, columns after encoding, counts of what is to be discovered; all rows are checked."""
    if schema is None:
        X, y = read_libsvm(wish.table)
        unknown = not is_regression(loss) and not wish.classes
        counts = {"(target)": Counter(_label_texts(y).tolist())} if unknown else {}
        return X.shape[0], X.shape[1], counts
    columns = list(schema.features)
    if not is_regression(loss):
        columns.append(schema.column(str(schema.target)))
    unknown_names = [c.name for c in columns if c.kind == "category" and not c.categories]
    rows = read_rows(wish.table, _without(schema, unknown_names))
    if not is_regression(loss) and str(schema.target) not in unknown_names:
        _labels(rows.y, schema.column(str(schema.target)).categories, discovered=False)
    counts = count_categories(wish.table, schema, unknown_names) if unknown_names else {}
    guessed = _GUESSED_CATEGORIES * sum(name != schema.target for name in unknown_names)
    return rows.X.shape[0], rows.X.shape[1] + guessed, counts


def _without(schema: Schema, names: list[str]) -> Schema:
    """The schema with a stand-in category where none is known, so that rows can be checked."""
    return schema.with_columns(
        replace(schema.column(name), categories=("",)) for name in names if name != schema.target
    )


def _problem(
    job: Job, schema: Schema | None, classes: tuple[str, ...] | None
) -> tuple[Problem, list[str]]:
    bounds: Bounds | None = None
    target_bounds: Bounds | None = None
    groups: tuple[tuple[int, int], ...] = ()
    limits: Vector | None = None
    if schema is None:
        X, y = read_libsvm(job.wish.table)
        names = [str(j + 1) for j in range(X.shape[1])]
        y = _label_texts(y) if classes is not None else y
    else:
        encoder = Encoder(schema)
        if not encoder.names:
            raise ValueError(
                "Expected columns to learn from, found none: no category was frequent enough to be "
                "discovered. State categories in the schema."
            )
        X, labels, names = read_rows(job.wish.table, schema)
        y = np.asarray(labels)
        bounds, groups, limits = encoder.bounds, encoder.groups, encoder.limits
        column = schema.column(str(schema.target))
        if column.low is not None and column.high is not None:
            target_bounds = np.array([column.low]), np.array([column.high])
    loss, outputs = job.loss, 1
    if classes is None:
        targets = np.asarray(y, dtype=np.float64)
        left_out = np.isnan(targets)
        targets = np.where(left_out, 0.0, targets)
    else:
        targets, left_out = _labels(y, classes, discovered=job.discovery is not None)
        if len(classes) == 2:
            targets = 2 * targets - 1
        else:
            loss, outputs = Loss(_SEVERAL[loss.name]), len(classes)
    missing = left_out if left_out.any() else None
    rows = as_rows(X)
    return (
        Problem(loss, rows, targets, outputs, True, bounds, target_bounds, missing, groups, limits),
        names,
    )


def _labels(
    y: Any, classes: tuple[str, ...], *, discovered: bool
) -> tuple[Vector, NDArray[np.bool_]]:
    """Class numbers, and which rows have none: blanks, and what was too rare to be discovered."""
    number = {label: float(k) for k, label in enumerate(classes)}
    targets = np.array([number.get(value, math.nan) for value in y])
    left_out = np.isnan(targets)
    if not discovered:
        strange = [k for k in np.flatnonzero(left_out) if y[k] is not None]
        if strange:
            raise ValueError(
                f"Expected labels among {', '.join(classes)}, found {y[strange[0]]!r} in row "
                f"{strange[0] + 1} ({len(strange)} such rows): state all classes, or other "
                "spellings as `aliases` in the schema."
            )
    return np.where(left_out, 0.0, targets), left_out


def _require_classes(classes: tuple[str, ...], job: Job) -> None:
    if len(classes) < 2:
        assert job.discovery is not None
        least = threshold(len(job.counts), job.discovery)
        raise ValueError(
            f"Expected at least two classes, found {len(classes)} with more than about "
            f"{least:.0f} rows, which is what shows under this epsilon. State the classes, in the "
            "schema or with --classes. The run stays charged: finding this out was a release."
        )


def _label_texts(y: Vector) -> NDArray[Any]:
    return np.array([f"{value:g}" for value in y], dtype=object)


def _plan(
    facts: Facts, wish: Wish, delta: float, choices: Choices, found: GaussianEvent | None
) -> Plan:
    also = [] if found is None else [found]
    return plan_fit(facts, wish.epsilon, delta, choices, also, EVALUATION)


def _saved(
    job: Job,
    plan: Plan,
    model: LinearModel,
    schema: Schema | None,
    classes: tuple[str, ...] | None,
    names: list[str],
    run_name: str | None,
) -> SavedModel:
    from privagrad import __version__

    trace, report = model.trace, model.privacy
    assert trace is not None
    assert trace.ellipsoid is not None
    privacy = {
        "epsilon": report.epsilon,
        "delta": report.delta,
        "relation": report.relation,
        "sampling": report.sampling or "all rows in every step",
        "accountant": report.accountant,
        "seeded": report.seeded,
        "events": [as_json(event) for event in report.events],
        "public": job.public,
    }
    made = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "table": job.wish.table.name,
        "rows": job.n,
        "loss_parameter": job.loss.parameter,
        "method": plan.method,
        "steps": plan.steps,
        "batch_size": plan.batches.size,
        "step_size": plan.step_size,
        "radius": trace.ellipsoid.radius,
        "dataset": job.wish.dataset,
        "run": run_name,
    }
    evaluation = asdict(trace.evaluation) if trace.evaluation else {}
    dim = len(names)
    return SavedModel(
        job.loss.name,
        names,
        None if classes is None else list(classes),
        schema,
        privacy,
        made,
        _without_nan(evaluation),
        model.coef,
        model.intercept,
        trace.noise,
        trace.intercept_noise,
        trace.columns.centre,
        trace.columns.unit,
        trace.ellipsoid.scale[:dim],
    )


def _without_nan(value: Any) -> Any:
    """JSON knows no NaN."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
