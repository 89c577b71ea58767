"""A fit before its first release: read, checked and planned."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from privagrad._internal import validate
from privagrad.data.files import LocalFiles, TableFiles
from privagrad.data.readers import open_test_table, require_table
from privagrad.data.tables import Table
from privagrad.fitting.budget import paying_account, require_no_budget, require_own_rows
from privagrad.fitting.checks import (
    require_delta_of,
    require_enough_rows,
    require_known_weights,
    require_test_rows,
    warn_if_weak,
)
from privagrad.fitting.notes import column_notes
from privagrad.fitting.pose import public_facts, require_stated_labels
from privagrad.fitting.request import FitRequest, complete
from privagrad.fitting.settings import FitSettings
from privagrad.fitting.snapshots import snapshot
from privagrad.glm.losses import Loss
from privagrad.linear import Plan, PublicFacts, default_delta, plan_fit, warn_if_hopeless
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import Event
from privagrad.privacy.ledger import Account, require_unit
from privagrad.privacy.noise import noise_kind
from privagrad.queries.categories import PURPOSE as CATEGORIES
from privagrad.queries.categories import discovery


@dataclass(frozen=True)
class PreparedFit:
    """A fit before its first release: everything is read and checked, nothing is spent.

    `first` is its plan, which the number of categories that are discovered later does not change.
    `account` is the budget that pays, None if none does, and `fingerprint` that of the bytes of the
    file it pays for. Scores on `test` are not private.
    """

    settings: FitSettings
    table: Table
    delta: float
    first: Plan
    account: Account | None = None
    fingerprint: str | None = None
    test: Table | None = None
    test_name: str = ""

    @property
    def n(self) -> int:
        return self.table.n

    @property
    def loss(self) -> Loss:
        return self.settings.loss

    @property
    def privacy(self) -> PrivacyPlan:
        """All releases."""
        return self.first.privacy

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
        settings = replace(self.settings, epsilon=epsilon)
        return first_plan(self.table, settings, self.delta).privacy.events

    @property
    def discovers(self) -> bool:
        """Whether categories are to be discovered."""
        return bool(self.table.counts)

    @property
    def notes(self) -> list[str]:
        """What the user should know about the columns."""
        return column_notes(self.table.schema, self.table.counts)

    @property
    def public(self) -> list[str]:
        """What the guarantee does not cover, because it is taken to be known."""
        known = [f"the number of {self.table.unit}s: {self.n:,}", self.table.public_columns]
        if self.classes:
            known.append(f"the labels: {', '.join(self.classes)}")
        return [*known, "all settings of this run"]

    def plan(self, facts: PublicFacts) -> Plan:
        """The fit of a problem with these public facts."""
        before = public_facts(self.table, self.settings)
        if facts == before:
            return self.first
        found = [self.privacy[CATEGORIES]] if CATEGORIES in self.privacy else []
        # The number of columns may change when categories are known, the releases must not.
        size = None if self.first.from_moments else self.first.batches.batch_size
        choices = replace(self.settings.choices, batch_size=size, first=before)
        epsilon, evaluated = self.settings.epsilon, self.settings.evaluated
        return plan_fit(facts, epsilon, self.delta, choices, found, evaluated)


def prepare(request: FitRequest) -> PreparedFit:
    """Check the budget before anything is read; then read, check and plan. Releases nothing."""
    validate.positive("epsilon", request.epsilon)
    if request.delta is not None:
        validate.delta_of(request.delta)
    warn_if_weak(request.epsilon, request.delta)
    account = paying_account(
        request.ledger, request.dataset, request.epsilon, seeded=request.seed is not None
    )
    content = None
    with ExitStack() as stack:
        files = _files(request, stack, copied=account is not None)
        if account is not None and request.ledger is not None:
            require_delta_of(account, request.delta)
            content = files.fingerprint()
            require_own_rows(request.ledger, account, content, files.name)
        else:
            what = "a run that is charged to no budget"
            require_no_budget(request.ledger, files, what, "Give --dataset {name}.")
        if request.test is not None:
            require_table(request.test)
            _require_other_rows(files, request.test)
            advice = "Leave out --test, or use privagrad evaluate with --epsilon and --dataset."
            require_no_budget(request.ledger, request.test, "exact scores (--test)", advice)
        schema, settings = complete(request, files)
        table = files.open(schema)
    job = prepare_table(table, settings, account, content)
    if request.test is None:
        return job
    test, name = open_test_table(request.test, table), request.test.name
    stated = not job.loss.regression and bool(table.target.categories)
    require_test_rows(test, name, stated=stated)
    return replace(job, test=test, test_name=name)


def _files(request: FitRequest, stack: ExitStack, *, copied: bool) -> TableFiles:
    """The table's files; of local ones a copy that nobody else writes to, where a budget pays."""
    if request.cluster is not None:
        from privagrad.data.cluster_files import ClusterFiles

        return ClusterFiles.of(request.cluster, request.table)
    require_table(request.table)
    return LocalFiles(stack.enter_context(snapshot(request.table)) if copied else request.table)


def _require_other_rows(files: TableFiles, test: Path) -> None:
    if files.has_content_of(test):
        raise ValueError(
            "Expected another table to test on, found the training rows: exact scores on them "
            "would not be private. Leave out --test: private scores on the training rows are "
            "always printed."
        )


def prepare_table(
    table: Table,
    settings: FitSettings,
    account: Account | None = None,
    fingerprint: str | None = None,
) -> PreparedFit:
    """Check and plan a fit of rows that were read. Releases nothing.

    The budget of the settings pays, which the caller may have looked up before.
    """
    epsilon = validate.positive("epsilon", settings.epsilon, allow_inf=True)
    if account is None:
        seeded = settings.random_state is not None
        account = paying_account(settings.ledger, settings.dataset, epsilon, seeded=seeded)
    if account is not None:
        require_delta_of(account, settings.delta)
        require_unit(account, table.unit)
    check_settings(table, settings)
    delta = settings.delta
    if delta is None:
        delta = account.delta if account else default_delta(table.n)
    validate.delta_of(delta, table.n)
    first = first_plan(table, settings, delta)
    if settings.strict and not math.isinf(epsilon):
        require_enough_rows(table, first, epsilon)
    warn_if_hopeless(table.n, epsilon, first.relative_noise, table.unit)
    return PreparedFit(settings, table, delta, first, account, fingerprint)


def check_settings(table: Table, settings: FitSettings) -> None:
    """Refuse settings with which a fit of this table is certain to fail."""
    if not settings.loss.regression and table.target.categories:
        require_stated_labels(table)
    size = settings.choices.batch_size
    if size is not None and size > table.n:
        raise ValueError(
            f"Expected batch_size <= {table.n}, the {table.unit}s; found batch_size={size}."
        )
    require_known_weights(table, settings)
    noise_kind(settings.noise)


def first_plan(table: Table, settings: FitSettings, delta: float) -> Plan:
    """The fit, and the discovery of categories before it."""
    epsilon, found = settings.epsilon, []
    if table.counts and not math.isinf(epsilon):
        found = [replace(discovery(len(table.counts), epsilon, delta), unit=table.unit)]
    facts = public_facts(table, settings)
    return plan_fit(facts, epsilon, delta, settings.choices, found, settings.evaluated)
