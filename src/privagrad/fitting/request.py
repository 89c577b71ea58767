"""What a user asks for, made complete: schema, loss, classes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from privagrad._internal import validate
from privagrad.data.readers import infer_schema
from privagrad.data.schema import Schema
from privagrad.glm.losses import Loss
from privagrad.linear import (
    METHODS,
    Choices,
)
from privagrad.privacy.ledger import Ledger

LOSSES = {
    "logistic": Loss("logistic"),
    "hinge": Loss("hinge"),
    "huber": Loss("huber"),
    "absolute": Loss("quantile", 0.5),
    "quantile": Loss("quantile"),
}


@dataclass(frozen=True)
class FitRequest:
    """What a user asks for.

    Attributes
    ----------
    loss : a name of `LOSSES`; None: logistic for a target of categories, huber for numbers
    quantile : for the quantile loss
    schema : None for a file of numbers alone
    classes : all labels that can occur; None: the schema's, or else discovered privately
    delta : None: the data set's, or else below 1/(10 n)
    seed : None for secure noise; a seeded model is not private
    dataset, ledger : the budget that pays; None: the run is not charged to any budget
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


def schema_of(request: FitRequest) -> Schema:
    schema = request.schema
    if schema is None:
        schema = infer_schema(request.table)
        texts = [
            c.name for c in schema.columns if c.kind == "category" and c.name != request.target
        ]
        if texts:
            shown = ", ".join(map(repr, texts[:5])) + (", ..." if len(texts) > 5 else "")
            raise ValueError(
                f"Expected numbers alone in a table without a schema, found text in {shown}. Write "
                f"a schema and fill it in: privagrad schema {request.table.name} -o schema.toml"
            )
    target = request.target or schema.target
    if target is None:
        raise ValueError("Expected --target COLUMN, or a target in the schema; found none.")
    if schema.column(target).kind == "ignore":
        raise ValueError(f"Expected a target that is not ignored, found {target!r}.")
    schema = replace(schema, target=target)
    if not schema.features:
        raise ValueError("Expected columns beside the target, found none that is not ignored.")
    return schema


def loss_of(request: FitRequest, schema: Schema | None) -> Loss:
    validate.choice("method", request.choices.method, METHODS)
    kind = "category" if schema is None else schema.column(str(schema.target)).kind
    name = request.loss or ("logistic" if kind == "category" else "huber")
    loss = LOSSES[validate.choice("loss", name, LOSSES)]
    if name == "quantile":
        loss = Loss("quantile", request.quantile)
    if schema is not None and kind == "category" and loss.regression:
        raise ValueError(
            f"Expected --loss logistic or hinge for a target of categories, found {name!r}."
        )
    if loss.regression and request.classes:
        raise ValueError(f"Expected no classes for a regression, found --classes and {name!r}.")
    return loss


def stated_classes(request: FitRequest, schema: Schema | None) -> tuple[str, ...]:
    """The labels as far as they are public; empty: to be discovered."""
    stated = request.classes or ()
    if schema is not None:
        stated = schema.column(str(schema.target)).categories
    if len(stated) == 1:
        raise ValueError(f"Expected at least two classes, found {stated[0]!r} alone.")
    return stated
