"""What fits would cost and how good they may be, before anything is spent: from public facts alone.

No value of the table is looked at: only its number of rows, the names and kinds of its columns and
what the schema states. Of a LIBSVM file the number of columns counts too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from privagrad._internal import validate
from privagrad.data.columns import Column, Schema
from privagrad.data.files import LocalFiles
from privagrad.data.frames import row_count
from privagrad.data.readers import open_table, require_table
from privagrad.data.tables import Table
from privagrad.fitting.checks import require_delta_of, require_enough_rows, warn_if_weak
from privagrad.fitting.outline import Outline
from privagrad.fitting.plan import first_plan
from privagrad.fitting.request import LOSSES, FitRequest, complete
from privagrad.fitting.settings import FitSettings
from privagrad.linear import default_delta
from privagrad.linear.recipe import kept_advantage, rows_needed
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import Event
from privagrad.privacy.ledger import Account, Run, require_unit

HONESTY = (
    "Expected quality is a rough guess from the number of rows and columns alone: what is kept of "
    "the advantage that a model without privacy has over a constant prediction. It was measured on "
    "classifiers of 10 to 123 columns, where it is right to within 15 points. Where columns are "
    "strongly correlated, as in images and text, much more is kept."
)
MOST_RUNS = 1000
"""More are not counted."""

_TARGET = "target"


@dataclass(frozen=True)
class Cost:
    """What a budget says of a run: what is spent with it, and how many such runs still fit.

    `out_of_delta` says that one more would not fit because of delta, however small its epsilon.
    """

    after: float
    left: float
    runs: int
    out_of_delta: bool


@dataclass(frozen=True)
class Outlook:
    """A fit at one epsilon.

    `kept` is the expected part of the advantage of a model without privacy, and `rows` about how
    many rows would keep 90 % of it. `refused` says why the fit would be refused, whatever the
    budget. `cost` is None without a budget.
    """

    epsilon: float
    plan: PrivacyPlan
    kept: float
    rows: float
    refused: str | None
    cost: Cost | None

    @property
    def events(self) -> tuple[Event, ...]:
        """All releases, as the ledger would charge them."""
        return self.plan.events


@dataclass(frozen=True)
class Forecast:
    """What fits of one table would cost, at several epsilons."""

    table: Outline
    settings: FitSettings
    delta: float
    account: Account | None
    outlooks: tuple[Outlook, ...]

    def alone(self, event: Event) -> float:
        """The epsilon of one kind of release without the others."""
        return PrivacyPlan((event,)).epsilon(self.delta)


def forecast_table(
    request: FitRequest, epsilons: Sequence[float], account: Account | None = None
) -> Forecast:
    """The fits of a file that `prepare` would plan for this request, at other epsilons.

    An `account` that is not in the ledger yet takes the place of the request's.
    """
    account = account or _account(request)
    require_table(request.table)
    schema, settings = complete(request, LocalFiles(request.table))
    if schema.libsvm:
        table = Outline.of_table(open_table(request.table, schema))
    else:
        table = Outline.of_schema(schema, row_count(request.table, schema))
    if account is not None:
        require_unit(account, table.unit)
    if not table.n:
        raise ValueError(f"Expected rows in {request.table.name}, found none.")
    return _forecast(table, settings, epsilons, account)


def forecast_size(
    rows: int,
    columns: int,
    classes: int | None,
    epsilons: Sequence[float],
    delta: float | None = None,
    account: Account | None = None,
) -> Forecast:
    """The fits of a table of numbers without known bounds; without `classes` a regression.

    `rows` is the number of users where the budget's runs protect users.
    """
    validate.integer("rows", rows)
    validate.integer("columns", columns)
    target = Column(_TARGET)
    if classes is not None:
        if validate.integer("classes", classes) < 2:
            raise ValueError(f"Expected at least two classes, found {classes}.")
        target = Column(_TARGET, "category", categories=tuple(map(str, range(classes))))
    numbers = tuple(Column(f"column{k}") for k in range(1, columns + 1))
    schema = Schema((*numbers, target), _TARGET)
    loss = LOSSES["huber" if classes is None else "logistic"]
    if account is not None:
        require_delta_of(account, delta)
    settings = FitSettings(1.0, loss, delta)
    table = Outline.of_schema(schema, rows)
    if account is not None:
        require_unit(account, None)
        table = replace(table, unit=account.unit or "row")
    return _forecast(table, settings, epsilons, account)


def _account(request: FitRequest) -> Account | None:
    if request.dataset is None or request.ledger is None:
        return None
    account = request.ledger.account(request.dataset)
    require_delta_of(account, request.delta)
    return account


def _forecast(
    table: Outline,
    settings: FitSettings,
    epsilons: Iterable[float],
    account: Account | None,
) -> Forecast:
    delta = settings.delta or (account.delta if account else default_delta(table.n))
    validate.delta_of(delta, table.n)
    asked = [validate.positive("epsilon", epsilon) for epsilon in epsilons]
    if not asked:
        raise ValueError("Expected values of epsilon such as 0.1,1,3, found none.")
    warn_if_weak(max(asked), delta)
    fits = (replace(settings, epsilon=epsilon) for epsilon in asked)
    outlooks = tuple(_outlook(table, fit, delta, account) for fit in fits)
    return Forecast(table, settings, delta, account, outlooks)


def _outlook(
    table: Outline, settings: FitSettings, delta: float, account: Account | None
) -> Outlook:
    like, epsilon, refused = cast(Table, table), settings.epsilon, None
    plan = first_plan(like, settings, delta)
    try:
        require_enough_rows(like, plan, epsilon)
    except ValueError as error:
        refused = str(error)
    noise = plan.relative_noise
    cost = None if account is None else _cost(account, plan.privacy.events)
    rows = rows_needed(table.n, noise)
    return Outlook(epsilon, plan.privacy, kept_advantage(noise), rows, refused, cost)


def _cost(account: Account, events: tuple[Event, ...]) -> Cost:
    after = account.spent_with(events)
    runs = _runs_that_fit(account, events)
    one_more = _spent_with_runs(account, events, runs + 1)
    return Cost(after, max(account.epsilon - after, 0.0), runs, math.isinf(one_more))


def _spent_with_runs(account: Account, events: tuple[Event, ...], count: int) -> float:
    """What is spent after so many runs with these events, at least one."""
    earlier = (Run("", "", "", "reserved", "", events),) * (count - 1)
    return replace(account, runs=(*account.runs, *earlier)).spent_with(events)


def _runs_that_fit(account: Account, events: tuple[Event, ...]) -> int:
    """How many runs with these events fit into what is left, at most `MOST_RUNS`."""

    def fits(count: int) -> bool:
        return _spent_with_runs(account, events, count) <= account.epsilon

    low, high = 0, 1
    while high <= MOST_RUNS and fits(high):
        low, high = high, 2 * high
    high = min(high, MOST_RUNS + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
