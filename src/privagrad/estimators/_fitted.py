"""What a fitted estimator is: one model, which predicts, is saved, loaded and reported."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from privagrad.data.memory import encode_frame, open_frame
from privagrad.data.models import SavedModel, load_model, save_model
from privagrad.data.schema import Column, Schema
from privagrad.data.tables import Table
from privagrad.estimators import _labels
from privagrad.estimators._tables import SchemaLike, matrix_table, read_rows, read_xy
from privagrad.fitting import exact_figures, require_test_rows, require_writable
from privagrad.glm.losses import Loss
from privagrad.glm.rows import DenseRows, SparseRows, as_rows
from privagrad.privacy.accounting import PrivacyReport
from privagrad.privacy.ledger import Account, Ledger
from privagrad.privacy.ledger_url import has_password, is_url
from privagrad.privacy.report_codec import report_as_json, report_from_json
from privagrad.queries.figures import Evaluation
from privagrad.report.card import StatementLike, privacy_card
from privagrad.report.fit import write_fit_report
from privagrad.report.statement import read_statement

LedgerLike = Ledger | Path | str | None
ARRAY = "array"
"""What model files call rows that were given without a schema."""


class FittedEstimator(BaseEstimator):  # type: ignore[misc]
    """A linear model and what is done with it after the fit."""

    # Of estimators that were pickled without them:
    schema: SchemaLike = None
    ledger: LedgerLike = None
    dataset: str | None = None

    _losses: ClassVar[tuple[str, ...]]
    """What model files call the loss."""

    @property
    @abstractmethod
    def _loss(self) -> Loss:
        """The loss that is minimised: with two classes, where there are classes."""

    @abstractmethod
    def _take(self, model: SavedModel) -> None:
        """Set the fitted attributes that depend on the kind of the target."""

    @property
    def _ledger(self) -> Ledger | None:
        """Where the budget is that is charged, if one is."""
        if self.dataset is not None:
            if isinstance(self.ledger, str) and is_url(self.ledger) and has_password(self.ledger):
                raise ValueError(
                    "Expected ledger=Ledger(URL) for a URL with a password, found text: "
                    "scikit-learn prints parameters. Nothing was spent."
                )
            return self.ledger if isinstance(self.ledger, Ledger) else Ledger(self.ledger)
        if self.ledger is not None:
            raise ValueError("Expected dataset=NAME, the budget to charge, with ledger=.")
        return None

    def _keep(self, model: SavedModel) -> Self:
        """Set the fitted attributes: all of them come from the model."""
        self.model_, self.privacy_ = model, report_from_json(model.privacy)
        self.n_iter_ = int(model.made["steps"])
        # A test table's figures alone are no evaluation of the rows.
        private = {key: value for key, value in model.evaluation.items() if key != "test"}
        self.evaluation_ = Evaluation.read(private) if private else None
        self._take(model)
        return self

    def _charge(self, report: PrivacyReport, rows: int) -> None:
        """State the cost of a search of so many rows, whose result the model is, as its cost."""
        model = self.model_
        fitted, every = f": {model.made['rows']:,}", f": {rows:,}"
        public = [fact.replace(fitted, every, 1) for fact in model.privacy["public"][:1]]
        public += model.privacy["public"][1:]
        self._keep(
            replace(
                model,
                privacy={**model.privacy, **report_as_json(report), "public": public},
                made={**model.made, "rows": rows},
            )
        )

    def save(self, path: Path | str) -> None:
        """Write the model to a file, which holds no pickle: see `privagrad.load_model`."""
        check_is_fitted(self)
        require_writable(Path(path))
        save_model(self.model_, Path(path))

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """The fitted estimator of a model file, of an estimator or of ``privagrad fit``."""
        model = load_model(Path(path))
        if model.loss not in cls._losses:
            raise ValueError(
                f"Expected a model of {cls.__name__}, found the loss {model.loss!r}. Load it with "
                "privagrad.load_model."
            )
        return cls._of(model)

    @classmethod
    def _of(cls, model: SavedModel) -> Self:
        """The fitted estimator of a model."""
        known, made = set(cls._get_param_names()), model.made
        told = {"epsilon": model.privacy["epsilon"], "delta": model.privacy["delta"]}
        if model.loss in ("quantile", "huber"):
            told |= dict.fromkeys(("quantile", "bend"), made.get("loss_parameter"))
        told |= made.get("parameters", {})
        framed = model.schema is not None and made.get("input") != ARRAY
        told["schema"] = model.schema if framed else None
        estimator = cls(**{name: value for name, value in told.items() if name in known})
        names = model.features
        if framed and model.schema is not None:
            names = [column.name for column in model.schema.features]
        if framed or made.get("named"):
            estimator.feature_names_in_ = np.array(names, dtype=object)
        estimator.n_features_in_ = len(names)
        return estimator._keep(model)

    def report(self, path: Path | str, statement: StatementLike = None) -> None:
        """Write one HTML file about the model, what it cost and the budget that was charged.

        Parameters
        ----------
        path : path
            The file to write.
        statement : Statement or path of a TOML file, optional
            What only the data owner can say: `privagrad.report.statement.Statement`.
        """
        check_is_fitted(self)
        require_writable(Path(path))
        if isinstance(statement, (Path, str)):
            statement = read_statement(statement)
        write_fit_report(Path(path), self.model_, self._account(), statement)

    def card(self, statement: StatementLike = None) -> dict[str, Any]:
        """The privacy card of the model, as plain JSON values: see ``privagrad.report.card``.

        Parameters
        ----------
        statement : Statement or path or None
            What only the owner of the data can say. Without it, these questions stay open.
        """
        check_is_fitted(self)
        return privacy_card(self.model_, statement=statement, account=self._account())

    def _account(self) -> Account | None:
        """The budget that was charged, if this estimator knows it."""
        name, ledger = self.model_.made["dataset"], self._ledger
        if name is None or name != self.dataset or ledger is None:
            return None
        return ledger.account(name)

    def evaluate_on(self, X: Any, y: Any) -> Evaluation:
        """Exact figures on other rows. They are NOT private, and charged to no budget.

        Parameters
        ----------
        X : array, CSR matrix or data frame of shape (n, d)
            Rows with the columns of the fit, which were not fitted.
        y : array of shape (n,)
            Their targets.
        """
        check_is_fitted(self)
        model, regression = self.model_, self._loss.regression
        if (schema := self._frame_schema) is not None:
            table: Table = open_frame(X, y, schema, double=True)
        else:
            rows, targets = read_xy(self, X, y, regression=regression, reset=False)
            column, classes = Column("y"), model.classes
            if classes is not None:
                column = Column("y", "category", categories=tuple(classes))
                targets = _labels.codes_of(targets, classes, sparse=model.schema is None)
            table = matrix_table(self, rows, np.asarray(targets, dtype=np.float64), column)
        require_test_rows(table, "y", stated=not regression)
        return exact_figures(model, table)

    @property
    def _frame_schema(self) -> Schema | None:
        """The schema by which rows are encoded; None: they are arrays."""
        model: SavedModel | None = getattr(self, "model_", None)
        return None if model is None or model.made.get("input") == ARRAY else model.schema

    def _margins(self, rows: DenseRows | SparseRows) -> NDArray[np.float64]:
        # Row by row: the score of one row of a private search must not depend on the others.
        return np.asarray(rows.margins(self.coef_.T) + self.intercept_)

    def _margins_of(self, X: Any) -> NDArray[np.float64]:
        check_is_fitted(self)
        if (schema := self._frame_schema) is None:
            return self._margins(read_rows(self, X))
        return self._margins(as_rows(self.model_.filled(encode_frame(X, schema))))
