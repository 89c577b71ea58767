"""What a user asks for, made complete: schema and loss."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from privagrad._internal import validate
from privagrad.data.files import TableFiles
from privagrad.data.libsvm import libsvm_schema
from privagrad.data.readers import require_usual_numbers
from privagrad.data.schema import Column, Schema
from privagrad.fitting.settings import SQUARED, FitSettings
from privagrad.glm.losses import Loss
from privagrad.linear import BY_GRADIENTS, Choices
from privagrad.privacy.ledger import Ledger
from privagrad.privacy.noise import Noise

Task = Literal["classification", "regression"]
LOSSES = {
    "logistic": Loss("logistic"),
    "hinge": Loss("hinge"),
    "huber": Loss("huber"),
    "absolute": Loss("quantile", 0.5),
    "quantile": Loss("quantile"),
    SQUARED: BY_GRADIENTS,
}


@dataclass(frozen=True)
class FitRequest:
    """What a user asks for.

    Without a `target` the schema's is predicted. Without a `delta` it is the budget's, or else
    below 1/(10 n). A target of numbers needs a `task`, a `loss` of `LOSSES` or `classes`, because
    numbers may be labels. The loss is logistic for classification and huber for regression by
    default. A file without a `schema` has numbers alone. `classes` are all labels that can occur:
    by default the schema's, or else discovered privately. `choices` override the recipe. A `seed`
    makes a model that is not private. `dataset` names the budget in `ledger` that pays; without it
    the run is not charged to any budget, and refused on rows that have one there. Scores on `test`
    are not private. `noise` is "gaussian" or "discrete". `encoding` is that of a text file without
    a schema. `class_weight` "balanced" gives all classes the same weight, within bounds. A
    `user_column` names the user of each row: users are then protected, each with all of their
    rows; the schema may state it, too. With a `cluster`, a `distributed.Client`, its workers read
    the table, at the same path.
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
    test: Path | None = None
    noise: Noise = "gaussian"
    task: Task | None = None
    encoding: str = "utf-8"
    class_weight: str | None = None
    user_column: str | None = None
    cluster: Any = None


def complete(request: FitRequest, files: TableFiles) -> tuple[Schema, FitSettings]:
    """The schema of the rows in `files`, with the target as the loss needs it, and the settings."""
    schema = _schema(request, files)
    target = schema.column(str(schema.target))
    if schema.libsvm:
        target = replace(target, kind="number")  # labels of such files are always numbers
    loss = _loss(request, target)
    schema = with_classes(schema.with_columns([target]), loss, request.classes or ())
    return schema, _settings(request, loss)


def with_classes(schema: Schema, loss: Loss, classes: tuple[str, ...]) -> Schema:
    """The schema with its target as the loss needs it; `classes` instead of its categories."""
    target = schema.column(str(schema.target))
    _require_target(schema)
    if loss.regression:
        if target.kind == "category":
            raise ValueError(
                f"Expected a target of numbers for a regression, found that {target.name!r} is a "
                "category: make it a number in the schema."
            )
        return schema
    classes = classes or target.categories
    if len(classes) == 1:
        raise ValueError(f"Expected at least two classes, found {classes[0]!r} alone.")
    return schema.with_columns([replace(target, kind="category", categories=classes)])


def _settings(request: FitRequest, loss: Loss) -> FitSettings:
    weights = request.class_weight
    if weights is not None:
        validate.choice("class_weight", weights, ["balanced"])
        if loss.regression:
            raise ValueError("Expected --class-weight for classes alone, found a regression.")
    return FitSettings(
        request.epsilon, loss, request.delta, "auto" if request.loss == SQUARED else None,
        class_weights=None if weights is None else "balanced", choices=request.choices,
        random_state=request.seed, noise=request.noise, dataset=request.dataset,
        ledger=request.ledger, table=request.table.name,
    )  # fmt: skip


def _schema(request: FitRequest, files: TableFiles) -> Schema:
    if files.libsvm:
        found = libsvm_schema("category")
        return found if request.user_column is None else found.with_user(request.user_column)
    schema = _schema_of_numbers(request, files) if request.schema is None else request.schema
    target = request.target or schema.target
    if target is None:
        raise ValueError("Expected --target COLUMN, or a target in the schema; found none.")
    schema = replace(schema, target=target)
    if request.user_column is not None:
        schema = schema.with_user(request.user_column)
    _require_target(schema)
    return schema


def _require_target(schema: Schema) -> None:
    """Refuse a target that no model predicts, and one without columns beside it."""
    target = schema.column(str(schema.target))
    if target.kind == "user":
        raise ValueError(f"Expected a target beside the users, found {target.name!r} to be both.")
    if target.kind == "ignore":
        raise ValueError(f"Expected a target that is not ignored, found {target.name!r}.")
    if target.kind in ("date", "duration"):
        raise ValueError(
            f"Expected a target of numbers or categories, found that {target.name!r} is a "
            f"{target.kind}: write it as a number, or make it a category in the schema. Nothing "
            "was spent."
        )
    if not schema.features and not schema.libsvm:
        raise ValueError("Expected columns beside the target, found none that is not ignored.")


def _schema_of_numbers(request: FitRequest, files: TableFiles) -> Schema:
    """The schema of a table whose columns but for the target hold numbers."""
    schema = files.infer_schema(request.encoding)
    require_usual_numbers(schema, files.name)
    other = (request.target, request.user_column)
    texts = [c.name for c in schema.columns if c.kind != "number" and c.name not in other]
    if texts:
        shown = ", ".join(map(repr, texts[:5])) + (", ..." if len(texts) > 5 else "")
        raise ValueError(
            f"Expected numbers alone in a table without a schema, found text in {shown}. Write "
            f"a schema and fill it in: privagrad schema {files.name} -o schema.toml"
        )
    return schema


def _loss(request: FitRequest, target: Column) -> Loss:
    categories = target.kind == "category"
    task = _task(request, target)
    name = request.loss or ("logistic" if task == "classification" else "huber")
    loss = LOSSES[validate.choice("loss", name, LOSSES)]
    if name == "quantile":
        loss = Loss("quantile", request.quantile)
    if categories and loss.regression:
        raise ValueError(
            f"Expected --loss logistic or hinge for a target of categories, found {name!r}."
        )
    if loss.regression and request.classes:
        raise ValueError(f"Expected no classes for a regression, found --classes and {name!r}.")
    if loss.regression != (task == "regression"):
        fitting = (
            "huber, absolute, quantile or squared" if task == "regression" else "logistic or hinge"
        )
        raise ValueError(f"Expected --loss {fitting} for --task {task}, found {name!r}.")
    return loss


def _task(request: FitRequest, target: Column) -> Task:
    """What is to be learned; numbers are not guessed to be quantities, nor to be labels."""
    if request.task is not None:
        task = validate.choice("task", request.task, get_args(Task))
        if task == "regression" and target.kind == "category":
            raise ValueError(
                f"Expected a target of numbers for --task regression, found that {target.name!r} "
                "is a category: make it a number in the schema, or give --task classification."
            )
        return "regression" if task == "regression" else "classification"
    if request.loss is not None:
        loss = LOSSES[validate.choice("loss", request.loss, LOSSES)]
        return "regression" if loss.regression else "classification"
    if target.kind == "category" or request.classes:
        return "classification"
    raise ValueError(
        f"Expected --task for the target {target.name!r}, which holds numbers: they may be labels "
        "or quantities. Give --task classification --classes 0,1 (all labels), or --task "
        "regression. Nothing was spent."
    )
