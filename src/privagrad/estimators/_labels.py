"""Labels as texts, which model files hold, and back in their own type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.validate import Vector
from privagrad.data.schema import Column

_BOOLEANS = {"True": "true", "False": "false"}


def text_of(label: Any, *, sparse: bool) -> str:
    """A label as it stands in a CSV file, or for sparse rows in a LIBSVM file."""
    if isinstance(label, (bool, np.bool_)):
        return str(bool(label)).lower()
    if isinstance(label, (float, np.floating)):
        return f"{label:g}" if sparse else repr(float(label))
    return str(label)


def class_column(name: str, labels: NDArray[Any], *, sparse: bool) -> Column:
    """The target whose categories are these labels."""
    texts = tuple(text_of(label, sparse=sparse) for label in labels)
    aliases = _BOOLEANS if labels.dtype.kind == "b" else {}
    return Column(name, "category", categories=texts, aliases=aliases)


def codes_of(y: NDArray[Any], classes: Iterable[str], *, sparse: bool) -> Vector:
    """Numbers of the classes; -1 for other labels."""
    places = {text: place for place, text in enumerate(classes)}
    labels, found = np.unique(y, return_inverse=True)
    codes = [places.get(text_of(label, sparse=sparse), -1) for label in labels]
    return np.array(codes, dtype=np.float64)[found]


def typed(texts: Iterable[str], kind: str) -> NDArray[Any]:
    """Texts of categories as labels of a kind of NumPy's types; texts where they are none."""
    told = list(texts)
    try:
        if kind == "b":
            return np.array([{"true": True, "false": False}[text] for text in told])
        if kind in "iu":
            return np.array([int(text) for text in told])
        if kind == "f":
            return np.array([float(text) for text in told])
    except (KeyError, ValueError):
        pass
    return np.array(told)


def as_json(labels: NDArray[Any]) -> dict[str, Any]:
    """Labels in their own type as a model's file keeps them; only texts, where JSON has no such."""
    values = labels.tolist()
    if all(isinstance(value, (str, bool, int, float)) for value in values):
        return {"labels": values, "label_dtype": labels.dtype.str}
    return {}


def from_json(made: Mapping[str, Any], classes: list[str]) -> NDArray[Any]:
    """The labels of a model's file, in the order of its classes."""
    if "labels" not in made:
        return np.array(classes)
    labels = np.array(made["labels"], dtype=np.dtype(made["label_dtype"]))
    if labels.shape != (len(classes),):
        raise ValueError(
            f"Expected {len(classes)} labels in the model's file, found {labels.size}."
        )
    return labels
