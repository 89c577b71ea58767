"""Fitted models as files that are safe to load: a ZIP of JSON and plain arrays, no pickle.

`model.json` holds everything but arrays: what it is, the schema of its table, what it cost, how it
was made and evaluated. Every array is a `NAME.npy` of float64: see `docs/model-format.md`.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privagrad._internal.atomic import write_once_ready
from privagrad._internal.markup import html_table
from privagrad.data.archives import DAMAGED, read_archive
from privagrad.data.libsvm import is_libsvm, libsvm_schema
from privagrad.data.model_values import (
    check_evaluation,
    check_made,
    check_privacy,
    is_list_of_texts,
)
from privagrad.data.parsing import Tally
from privagrad.data.readers import chunks
from privagrad.data.schema import Kind, Schema, as_values, from_values
from privagrad.data.tables import Rows
from privagrad.privacy.events import relation_named

INTERVAL = 1.96
"""Half the length of a 95 % interval, in standard deviations of the noise."""

_SHOWN = 20
"""Coefficients in a notebook."""

FORMAT, VERSION, VERSION_OF_ROWS = "privagrad-model", 3, 2
_ARRAYS = ("coef", "intercept", "coef_noise", "intercept_noise", "centre", "unit", "scale")


@dataclass(frozen=True)
class SavedModel:
    """A linear model in original units: margins are X @ coef.T + intercept.

    Attributes
    ----------
    loss : str
        What was minimised: "logistic", "hinge", "softmax", "quantile", "huber", ...
    features : list of str
        Names of the columns after encoding.
    classes : list of str or None
        Labels in order; None for a regression.
    schema : Schema or None
        Of the table it was fitted to, with all categories; None: a LIBSVM file.
    privacy : dict
        epsilon, delta, relation, unit, sampling, accountant, seeded, noise, events, and what is
        public.
    made : dict
        When, with which version, method and settings, for which data set and run of the ledger.
        `rows` is the number of units: where users are protected, of users.
    evaluation : dict
        What the rows said of it, privately; and what a test table said, exactly.
    coef, intercept : arrays of shape (k, d) and (k,)
    coef_noise, intercept_noise : arrays of the same shapes
        How much of them is noise, in standard deviations.
    centre, unit, scale : arrays of shape (d,)
        What was learned of the columns, and the ellipsoid's scale in columns divided by their unit.
    """

    loss: str
    features: list[str]
    classes: list[str] | None
    schema: Schema | None
    privacy: dict[str, Any]
    made: dict[str, Any]
    evaluation: dict[str, Any]
    coef: NDArray[np.float64]
    intercept: NDArray[np.float64]
    coef_noise: NDArray[np.float64]
    intercept_noise: NDArray[np.float64]
    centre: NDArray[np.float64]
    unit: NDArray[np.float64]
    scale: NDArray[np.float64]

    def rows(
        self,
        path: Path,
        *,
        target: bool = False,
        tally: Tally | None = None,
        keep: Sequence[str] = (),
    ) -> Iterator[Rows]:
        """The rows of another file in this model's columns, some ten thousand at a time.

        Columns to `keep` come with them, as they are.
        """
        if self.schema is None:
            kind: Kind = "number" if self.classes is None else "category"
            schema = libsvm_schema(kind, tuple(self.classes or ()))
            return chunks(path, schema, target=target, columns=len(self.features))
        if is_libsvm(path):
            raise ValueError(
                f"Expected a table with the columns of {self.made['table']}, found {path.name}."
            )
        return chunks(path, self.schema, target=target, tally=tally, keep=keep)

    @property
    def privacy_unit(self) -> str:
        """Whether rows or users are protected; files of earlier versions do not say it."""
        return str(self.privacy.get("unit", "row"))

    @property
    def size(self) -> str:
        """How many rows, or users, it was fitted to."""
        count = self.made.get("rows")
        return f"{'?' if count is None else f'{count:,}'} {self.privacy_unit}s"

    @property
    def measurable(self) -> NDArray[np.bool_]:
        """Which columns had rows enough to show their scale; others have a guess."""
        hidden = set(self.made.get("not_measurable", []))
        return np.array([name not in hidden for name in self.features], dtype=bool)

    @property
    def ranking(self) -> NDArray[np.int64]:
        """The columns, the largest effects first; those that are not measurable last."""
        effects = np.abs(self.coef * self.unit).max(axis=0)
        return np.lexsort((-effects, ~self.measurable))

    @property
    def intervals(self) -> NDArray[np.float64]:
        """Ends of the 95 % intervals of all coefficients, of shape (2, k, d)."""
        reach = INTERVAL * self.coef_noise
        return np.stack([self.coef - reach, self.coef + reach])

    def _repr_html_(self) -> str:
        privacy = self.privacy
        cost = f"epsilon {privacy['epsilon']:.4g}, delta {privacy['delta']:.3g}"
        facts = [
            ("fitted to", f"{self.made.get('table', '')}, {self.size}"),
            ("predicts", "a number" if self.classes is None else ", ".join(self.classes)),
            ("privacy", f"NOT PRIVATE (seeded noise): {cost}" if privacy["seeded"] else cost),
            ("on the training rows", self.evaluation.get("verdict", "")),
        ]
        shown = self.ranking[:_SHOWN]
        names = self.classes if self.classes and len(self.coef) > 1 else ["coefficient"]
        reach = INTERVAL * self.coef_noise.max(axis=0)
        rows = [(self.features[j], *self.coef[:, j].tolist(), f"± {reach[j]:.2g}") for j in shown]
        title = f"The largest of {len(self.features)} effects, with 95 % intervals of the noise"
        return html_table(f"Private linear model ({self.loss})", (), facts, left=2) + html_table(
            title, ("feature", *names, "noise"), rows
        )

    def margins(self, X: Any) -> NDArray[np.float64]:
        """X @ coef.T + intercept, a missing entry, NaN, being its column's centre."""
        return np.asarray(self.filled(X) @ self.coef.T + self.intercept, dtype=np.float64)

    def filled(self, X: Any) -> Any:
        """The rows with every missing entry, NaN, at its column's centre."""
        if hasattr(X, "tocsr"):
            X = X.tocsr().copy()
            blank = np.isnan(X.data)
            X.data[blank] = self.centre[X.indices[blank]]
            return X
        return np.where(np.isnan(X), self.centre, X)

    def answers(self, X: Any) -> NDArray[np.float64]:
        """Numbers for a regression, or the numbers of the predicted classes."""
        margins = self.margins(X)
        if self.classes is None:
            return margins[:, 0]
        guess = margins.argmax(axis=1) if margins.shape[1] > 1 else margins[:, 0] > 0
        return np.asarray(guess, dtype=np.float64)

    def predict(self, X: Any) -> NDArray[Any]:
        """Labels, or numbers for a regression."""
        answers = self.answers(X)
        if self.classes is None:
            return answers
        labels: NDArray[Any] = np.asarray(self.classes, dtype=object)
        return labels.take(answers.astype(int))


def save_model(model: SavedModel, path: Path, ready: Callable[[], None] = lambda: None) -> None:
    """Write the file whole or not at all, after `ready`: see `write_once_ready`."""
    version = VERSION if model.privacy_unit == "user" else VERSION_OF_ROWS
    card: dict[str, Any] = {"format": FORMAT, "version": version}
    card |= {f.name: getattr(model, f.name) for f in fields(model) if f.name not in _ARRAYS}
    card["schema"] = None if model.schema is None else as_values(model.schema)
    try:
        content = _packed(card, {name: getattr(model, name) for name in _ARRAYS})
    except ValueError as error:
        # An archive whose writing was interrupted complains, while it is closed, of that.
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    write_once_ready(path, content, ready)


def _packed(card: dict[str, Any], arrays: dict[str, NDArray[np.float64]]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.json", json.dumps(card, indent=1, ensure_ascii=False))
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as entry:
                plain = np.ascontiguousarray(array, dtype=np.float64)
                np.save(entry, plain, allow_pickle=False)
    return content.getvalue()


def load_model(path: Path) -> SavedModel:
    """Read a model; anything that is not one is refused."""
    if not path.is_file():
        raise FileNotFoundError(f"Expected a model, found nothing at {path}.")
    try:
        card = read_archive(path, "model.json", _ARRAYS)
        if card.pop("format", None) != FORMAT:
            raise ValueError("no model of privagrad")
        if (version := card.pop("version")) > VERSION:
            raise ValueError(f"version {version}, newer than this privagrad's {VERSION}")
        if card["schema"] is not None:
            card["schema"] = from_values(card["schema"], indicators=version > 1)
        if "relation" in card["privacy"]:
            card["privacy"]["relation"] = relation_named(card["privacy"]["relation"])
        model = SavedModel(**card)
        _check_values(model)
        _check_shapes(model)
    except DAMAGED as error:
        raise ValueError(f"Expected a model in {path.name}, found: {error}.") from error
    return model


def _check_values(model: SavedModel) -> None:
    """What every use of a model takes for granted."""
    if not is_list_of_texts(model.features):
        raise ValueError("features that are no list of texts")
    if model.classes is not None and not is_list_of_texts(model.classes):
        raise ValueError("classes that are no list of texts")
    for name in ("privacy", "made", "evaluation"):
        if not isinstance(getattr(model, name), dict):
            raise ValueError(f"{name} that is no table of entries")
    if not isinstance(model.loss, str):
        raise ValueError("a loss that is no text")
    check_privacy(model.privacy)
    check_made(model.made)
    check_evaluation(model.evaluation)
    for name in ("coef", "intercept", "centre"):
        if not np.isfinite(getattr(model, name)).all():
            raise ValueError(f"{name} that is not finite")


def _check_shapes(model: SavedModel) -> None:
    k, dim = len(model.intercept), len(model.features)
    wanted: dict[str, tuple[int, ...]] = {"intercept_noise": (k,)}
    wanted |= dict.fromkeys(("coef", "coef_noise"), (k, dim))
    wanted |= dict.fromkeys(("centre", "unit", "scale"), (dim,))
    for name, shape in wanted.items():
        found = getattr(model, name).shape
        if found != shape:
            raise ValueError(f"{name} of shape {found} instead of {shape}")
    if model.classes is not None and len(model.classes) != max(k, 2):
        raise ValueError(f"{len(model.classes)} classes for {k} rows of coefficients")
