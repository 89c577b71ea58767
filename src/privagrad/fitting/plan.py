"""A fit before its first release: read, checked and planned."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from privagrad._internal import validate
from privagrad.data.encoding import Encoder
from privagrad.data.libsvm import is_libsvm, read_libsvm
from privagrad.data.readers import count_categories, read_rows, require_table
from privagrad.data.schema import Schema
from privagrad.fitting.labels import class_numbers
from privagrad.fitting.request import FitRequest, loss_of, schema_of, stated_classes
from privagrad.fitting.reserve import covered_content, paying_account
from privagrad.fitting.snapshots import Snapshot
from privagrad.glm.losses import Loss
from privagrad.linear import (
    Choices,
    Plan,
    PublicFacts,
    default_delta,
    plan_fit,
    warn_if_hopeless,
)
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import Event, GaussianEvent
from privagrad.privacy.ledger import Account
from privagrad.queries.categories import discovery

_GUESSED_CATEGORIES = 20
"""Of a column whose categories nobody knows yet: for the size of batches alone."""


@dataclass(frozen=True)
class PreparedFit:
    """A fit before its first release: everything is read and checked, nothing is spent.

    `schema` None: a LIBSVM file. `counts` are of columns whose categories are to be discovered.
    `snapshot` holds the rows (`request.table` is its copy) where a budget pays.
    """

    request: FitRequest
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
    snapshot: Snapshot | None

    @property
    def epsilon(self) -> float:
        """What the releases cost alone."""
        return PrivacyPlan(self.events).epsilon(self.delta) if self.events else math.inf

    @property
    def public(self) -> list[str]:
        """What the guarantee does not cover, because it is taken to be known."""
        columns = "names, kinds, bounds and categories of columns that the schema states"
        known = ["the columns' number" if self.schema is None else columns]
        if self.classes:
            known.append(f"the labels: {', '.join(self.classes)}")
        return [f"the number of rows: {self.n}", *known, "all settings of this run"]


def prepare(request: FitRequest) -> PreparedFit:
    """Check the budget before anything is read; then read, check and plan. Releases nothing."""
    validate.positive("epsilon", request.epsilon)
    account = paying_account(request)
    require_table(request.table)
    snapshot = covered_content(request, account)
    if snapshot is not None:
        request = replace(request, table=snapshot.path)
    schema = None if is_libsvm(request.table) else schema_of(request)
    loss = loss_of(request, schema)
    if schema is not None and not loss.regression:
        target = schema.column(str(schema.target))
        categories = request.classes or target.categories
        schema = schema.with_columns([replace(target, kind="category", categories=categories)])
    classes = None if loss.regression else stated_classes(request, schema)
    n, width, counts = _survey(request, schema, loss)
    size = request.choices.batch_size
    if size is not None and size > n:
        raise ValueError(f"Expected a batch size of at most {n}, the rows; found {size}.")
    delta = request.delta or (account.delta if account else default_delta(n))
    validate.delta_of(delta, n)
    found = discovery(len(counts), request.epsilon, delta) if counts else None
    encoder = None if schema is None else Encoder(schema)
    facts = PublicFacts(
        n,
        (width + 1) * (len(classes) if classes and len(classes) > 2 else 1),
        schema is None or (encoder is not None and encoder.sparse),
        loss.regression,
        True,
        encoder is not None and encoder.bounds is not None,
        schema is not None and schema.column(str(schema.target)).bounded,
    )
    first = planned(facts, request, delta, request.choices, found)
    warn_if_hopeless(n, request.epsilon, first.relative_noise)
    # The number of columns may change when categories are known, the releases must not.
    choices = replace(request.choices, batch_size=first.batches.batch_size)
    events = first.privacy.events
    return PreparedFit(
        request, schema, loss, classes, n, delta, choices, events, found, counts, account, snapshot
    )  # fmt: skip


def _survey(
    request: FitRequest, schema: Schema | None, loss: Loss
) -> tuple[int, int, dict[str, Counter[str]]]:
    """Rows, columns after encoding, counts of what is to be discovered; all rows are checked."""
    if schema is None:
        X, y = read_libsvm(request.table)
        unknown = not loss.regression and not request.classes
        counts = {"(target)": Counter(f"{v:g}" for v in y)} if unknown else {}
        return X.shape[0], X.shape[1], counts
    columns = list(schema.features)
    if not loss.regression:
        columns.append(schema.column(str(schema.target)))
    unknown_names = [c.name for c in columns if c.kind == "category" and not c.categories]
    rows = read_rows(request.table, _without(schema, unknown_names))
    if not loss.regression and str(schema.target) not in unknown_names:
        class_numbers(rows.y, discovered=False)
    counts = count_categories(request.table, schema, unknown_names) if unknown_names else {}
    guessed = _GUESSED_CATEGORIES * sum(name != schema.target for name in unknown_names)
    return rows.X.shape[0], rows.X.shape[1] + guessed, counts


def _without(schema: Schema, names: list[str]) -> Schema:
    """The schema with a stand-in category where none is known, so that rows can be checked."""
    return schema.with_columns(
        replace(schema.column(name), categories=("",)) for name in names if name != schema.target
    )


def planned(
    facts: PublicFacts,
    request: FitRequest,
    delta: float,
    choices: Choices,
    found: GaussianEvent | None,
) -> Plan:
    also = [] if found is None else [found]
    return plan_fit(facts, request.epsilon, delta, choices, also, evaluated=True)
