"""A fit before its first release: read, checked and planned."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.data.readers import open_table, open_test_table, require_table
from privagrad.data.tables import Table
from privagrad.fitting.budget import paying_account, require_own_rows
from privagrad.fitting.checks import (
    require_delta_of,
    require_enough_rows,
    require_test_rows,
    warn_if_weak,
)
from privagrad.fitting.notes import column_notes
from privagrad.fitting.request import FitRequest, complete
from privagrad.fitting.snapshots import fingerprint, snapshot
from privagrad.glm.losses import Loss
from privagrad.linear import Choices, Plan, PublicFacts, default_delta, plan_fit, warn_if_hopeless
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import Event
from privagrad.privacy.ledger import Account
from privagrad.queries.categories import PURPOSE as CATEGORIES
from privagrad.queries.categories import discovery

_GUESSED_CATEGORIES = 21
"""Of a column whose categories are not known yet: for the size of batches alone."""


@dataclass(frozen=True)
class PreparedFit:
    """A fit before its first release: everything is read and checked, nothing is spent.

    `choices` are the request's with a batch size, `privacy` holds all releases. `account` is the
    budget that pays, None if none does, and `fingerprint` that of the bytes it pays for.
    """

    request: FitRequest
    table: Table
    test: Table | None
    loss: Loss
    delta: float
    choices: Choices
    privacy: PrivacyPlan
    account: Account | None
    fingerprint: str | None

    @property
    def n(self) -> int:
        return self.table.n

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The labels as far as they are public; empty: to be discovered; None: a regression."""
        return None if self.loss.regression else self.table.target.categories

    @property
    def epsilon(self) -> float:
        """What the releases cost alone."""
        return self.privacy.epsilon(self.delta)

    @property
    def events(self) -> tuple[Event, ...]:
        """All releases, as the ledger charges them."""
        return self.privacy.events

    def events_at(self, epsilon: float) -> tuple[Event, ...]:
        """All releases of the same fit at another epsilon."""
        facts = _facts(self.table, self.loss)
        return _first_plan(self.table, facts, epsilon, self.delta, self.choices).privacy.events

    @property
    def discovers(self) -> bool:
        """Whether categories are to be discovered."""
        return CATEGORIES in self.privacy

    @property
    def notes(self) -> list[str]:
        """What the user should know about the columns."""
        return column_notes(self.table.schema, self.table.counts)

    @property
    def public(self) -> list[str]:
        """What the guarantee does not cover, because it is taken to be known."""
        columns = "names, kinds, bounds and categories of columns that the schema states"
        known = ["the columns' number" if self.table.schema.libsvm else columns]
        if self.classes:
            known.append(f"the labels: {', '.join(self.classes)}")
        return [f"the number of rows: {self.n}", *known, "all settings of this run"]

    def plan(self, facts: PublicFacts) -> Plan:
        """The fit of a problem with these public facts."""
        found = [self.privacy[CATEGORIES]] if self.discovers else []
        epsilon, delta = self.request.epsilon, self.delta
        return plan_fit(facts, epsilon, delta, self.choices, found, evaluated=True)


def prepare(request: FitRequest) -> PreparedFit:
    """Check the budget before anything is read; then read, check and plan. Releases nothing."""
    validate.positive("epsilon", request.epsilon)
    if request.delta is not None:
        validate.delta_of(request.delta)
    warn_if_weak(request.epsilon, request.delta)
    account = paying_account(request)
    if account is not None and request.delta is not None:
        require_delta_of(account, request.delta)
    require_table(request.table)
    path, content = request.table, None
    with ExitStack() as stack:
        if account is not None:
            path = stack.enter_context(snapshot(path))
            content = fingerprint(path)
            require_own_rows(request, account, content)
        schema, loss = complete(request, path)
        table = open_table(path, schema)
    if not loss.regression and table.target.categories:
        class_numbers(table.targets, discovered=False)
    size = request.choices.batch_size
    if size is not None and size > table.n:
        raise ValueError(f"Expected a batch size of at most {table.n}, the rows; found {size}.")
    delta = request.delta or (account.delta if account else default_delta(table.n))
    validate.delta_of(delta, table.n)
    test = None if request.test is None else open_test_table(request.test, table)
    if test is not None and request.test is not None:
        stated = not loss.regression and bool(table.target.categories)
        require_test_rows(test, request.test.name, stated=stated)
    facts = _facts(table, loss)
    first = _first_plan(table, facts, request.epsilon, delta, request.choices)
    require_enough_rows(table, first, request.epsilon)
    warn_if_hopeless(table.n, request.epsilon, first.relative_noise)
    # The number of columns may change when categories are known, the releases must not.
    size = first.batches.batch_size
    choices = replace(request.choices, batch_size=size, first=facts)
    privacy = first.privacy
    return PreparedFit(request, table, test, loss, delta, choices, privacy, account, content)


def _first_plan(
    table: Table, facts: PublicFacts, epsilon: float, delta: float, choices: Choices
) -> Plan:
    """The fit and the discovery of categories before it."""
    found = [discovery(len(table.counts), epsilon, delta)] if table.counts else []
    return plan_fit(facts, epsilon, delta, choices, found, evaluated=True)


def class_numbers(codes: Vector, *, discovered: bool) -> tuple[Vector, NDArray[np.bool_]]:
    """Class numbers, and which rows have none: blanks, and what was too rare to be discovered."""
    strange = np.flatnonzero(codes < 0)
    if strange.size and not discovered:
        raise ValueError(
            f"Expected the stated labels alone, found another one in row {strange[0] + 1} "
            f"({strange.size} such rows): state all classes, or other spellings as `aliases` in "
            "the schema."
        )
    left_out = ~(codes >= 0)
    return np.where(left_out, 0.0, codes), left_out


def _facts(table: Table, loss: Loss) -> PublicFacts:
    """What is public about the problem before categories are discovered."""
    encoding = table.encoding
    unknown = sum(name != table.target.name for name in table.counts)
    width = len(encoding.names) + _GUESSED_CATEGORIES * unknown
    classes = 0 if loss.regression else len(table.target.categories)
    outputs, bounded = classes if classes > 2 else 1, encoding.bounds is not None
    return PublicFacts(
        table.n, width, outputs, encoding.sparse, loss.regression, True, bounded,
        table.target.bounded, loss.name == "logistic", False,
        indicators=encoding.indicators,
    )  # fmt: skip
