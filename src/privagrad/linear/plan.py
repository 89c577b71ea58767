"""The plan of a fit of a linear model: what is public, what users set, what is released."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from privagrad._internal import validate
from privagrad.linear import least_squares, recipe
from privagrad.linear.least_squares import Solver
from privagrad.linear.uncertainty import curvature_is_affordable
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import Event, GaussianEvent, Unit, training_event
from privagrad.privacy.noise import RandomSource
from privagrad.privacy.releases import Releases
from privagrad.privacy.sampling import Batches
from privagrad.queries import moments
from privagrad.queries.calibration import CALIBRATION, CLASS_SHARES
from privagrad.queries.columns import Share, query_event, query_events
from privagrad.queries.covariance import COVARIANCE
from privagrad.queries.curvature import CURVATURE
from privagrad.queries.evaluation import EVALUATION
from privagrad.queries.moments import ColumnQueries
from privagrad.queries.second_moments import PURPOSE as SECOND_MOMENTS

_LARGEST_COST, _SMALLER = 0.75, 0.8
"""What all queries may cost alone, in parts of epsilon, and how their parts shrink till they do."""


@dataclass(frozen=True)
class PublicFacts:
    """What a plan needs to know of a problem: all of it public."""

    n: int
    columns: int
    outputs: int
    sparse: bool
    regression: bool
    intercept: bool
    bounded: bool
    target_bounded: bool
    calibrated: bool
    balanced: bool
    squares: Solver | None = None
    indicators: int = 0
    """Columns that say that others are missing: of each such pair a row has one entry."""
    quantities: int = 0
    """Columns that may be quantities: neither indicators nor categories, nor between 0 and 1."""
    unit: Unit = "row"
    """Whether n counts rows, or users."""

    @property
    def dim(self) -> int:
        """The number of coefficients, intercepts among them."""
        return (self.columns + self.intercept) * self.outputs

    @property
    def column_queries(self) -> ColumnQueries | Share:
        """The queries about the columns; a single share where their bounds are known."""
        if self.bounded:
            return moments.BOUNDED_COLUMNS
        return moments.COLUMNS if self.intercept else moments.SCALES

    @property
    def target_queries(self) -> ColumnQueries | Share | None:
        """The queries about the target; None for classes."""
        if not self.regression:
            return None
        return moments.BOUNDED_TARGET if self.target_bounded else moments.TARGET

    @property
    def entries(self) -> int:
        """How many entries a row may have."""
        return recipe.entries(self.columns - self.indicators, self.sparse)

    @property
    def informative(self) -> int:
        """The number of coefficients, less those of columns that are hardly ever anything but 0."""
        return (self.columns - self.indicators + self.intercept) * self.outputs

    @property
    def rare(self) -> bool:
        """Whether columns are asked once more whose ranges do not show at first."""
        many = self.columns - self.indicators >= recipe.MANY_COLUMNS
        return many and not self.sparse and not self.bounded

    @property
    def curved(self) -> bool:
        """Whether an evaluated fit releases the curvature of the loss, for the noise in weights."""
        return curvature_is_affordable(self.n, self.dim, self.outputs)

    def as_wide_as(self, other: PublicFacts) -> PublicFacts:
        """These facts with the columns and outputs of others."""
        return replace(
            self, columns=other.columns, outputs=other.outputs, sparse=other.sparse,
            quantities=other.quantities,
        )  # fmt: skip

    def queries(self, epsilon: float, delta: float) -> list[Share]:
        """The queries before and after the training, over all rows."""
        asked = ((self.column_queries, self.entries), (self.target_queries, 1), (moments.NORMS, 1))
        shares: list[Share] = []
        for one, size in asked:
            if isinstance(one, Share):
                shares.append(one)
            elif one is not None:
                shares += recipe.visible(one, self.n, size, epsilon, delta)
        shares[1:1] = [moments.RARE] * self.rare
        noise = query_event(COVARIANCE, epsilon, delta, "zero-out").noise_multiplier
        shares += [COVARIANCE] * recipe.shaped(self.n, self.quantities, self.sparse, noise)
        return shares + [CALIBRATION] * self.calibrated + [CLASS_SHARES] * self.balanced


@dataclass(frozen=True)
class Choices:
    """What users may set instead of the recipe.

    `first` are the facts before columns and classes were found, which the plan must not depend on.
    """

    steps: int | None = None
    batch_size: int | None = None
    step_size: float | None = None
    radius: float | None = None
    first: PublicFacts | None = None

    def __post_init__(self) -> None:
        # Products of NumPy's small integers wrap around.
        for name in ("steps", "batch_size"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, validate.integer(name, value))


@dataclass(frozen=True)
class Plan:
    """How a fit will be made.

    Attributes
    ----------
    batches : Batches
        How many steps there are, and how each draws its rows.
    privacy : PrivacyPlan
        What will be released, by purpose; with an event for `EVALUATION` the model is evaluated
        on the rows at the end, and with one for `CURVATURE` its noise is stated well.
    delta : float
        The delta of the report.
    relative_noise : float
        How much of the training is noise: see `recipe.relative_noise`.
    reach : float
        How far noise may move a margin, which sets the step size: see `recipe.step_size`.
    radius : float
        The bound on gradients: see `recipe.RADIUS`.
    """

    batches: Batches
    privacy: PrivacyPlan
    delta: float
    relative_noise: float
    reach: float
    radius: float

    @property
    def from_moments(self) -> bool:
        """Whether the model is computed from second moments, without steps."""
        return SECOND_MOMENTS in self.privacy

    def releases(self, source: RandomSource) -> Releases:
        """The plan, to be carried out with this randomness."""
        return Releases(self.privacy, source, self.delta)


def plan_fit(
    facts: PublicFacts,
    epsilon: float,
    delta: float,
    choices: Choices,
    other_events: Iterable[Event] = (),
    evaluated: bool = False,
) -> Plan:
    """How many steps of how many rows, and their noise, from public facts alone.

    Parameters
    ----------
    facts : PublicFacts
        The problem.
    epsilon, delta : float
        The budget.
    choices : Choices
        What the user sets instead of the recipe.
    other_events : iterable of events
        Further releases that the same budget pays for.
    evaluated : bool
        Whether the same budget pays for an evaluation too.
    """
    coefficients, set_steps, set_size = facts.informative, choices.steps, choices.batch_size
    batches = recipe.batches(facts.n, coefficients, facts.sparse, set_steps, set_size)
    privacy, noise = PrivacyPlan((), unprotected=True), 0.0
    if not math.isinf(epsilon):
        asked = facts if choices.first is None else facts.as_wide_as(choices.first)
        shares = [*asked.queries(epsilon, delta), *[EVALUATION] * evaluated]
        unit, curved = facts.unit, evaluated and asked.curved
        given, event = [*other_events], replace(training_event(batches), unit=unit)
        others = [*given, *_affordable(shares + [CURVATURE] * curved, epsilon, delta, unit)]
        if facts.squares:
            # Second moments need no shape, and state the noise of their weights by themselves.
            once = GaussianEvent(1.0, purpose=SECOND_MOMENTS, unit=unit)
            needed = [share for share in shares if share is not COVARIANCE]
            queries = [*given, *_affordable(needed, epsilon, delta, unit)]
            whole = PrivacyPlan.calibrate_event(once, epsilon, delta, queries)
            if _from_moments(asked, choices, whole.noise_multiplier):
                batches, event, others = Batches(facts.n, facts.n, 1, None), once, queries
        privacy = PrivacyPlan.calibrate_event(event, epsilon, delta, others)
        noise = recipe.relative_noise(privacy.noise_multiplier, batches, coefficients)
    reach = recipe.reach(facts.regression, facts.n, facts.columns - facts.indicators)
    return Plan(
        batches,
        privacy,
        delta,
        noise,
        reach if choices.step_size is None else choices.step_size,
        recipe.RADIUS if choices.radius is None else choices.radius,
    )


def _from_moments(facts: PublicFacts, choices: Choices, noise_multiplier: float) -> bool:
    """Whether least squares come from second moments with this noise, rather than by gradients."""
    if facts.squares != "auto":
        return facts.squares == "moments"
    if any(v is not None for v in (choices.steps, choices.batch_size, choices.step_size)):
        return False
    return least_squares.moments_are_better(facts.n, facts.dim, noise_multiplier)


def _affordable(
    shares: list[Share], epsilon: float, delta: float, unit: Unit
) -> list[GaussianEvent]:
    """The queries, with smaller parts where together they would leave little for the training."""
    asked = query_events(recipe.limited(shares), epsilon, delta, "zero-out")
    events = [replace(event, unit=unit) for event in asked]
    while PrivacyPlan(tuple(events)).epsilon(delta) > _LARGEST_COST * epsilon:
        events = [replace(e, noise_multiplier=e.noise_multiplier / _SMALLER) for e in events]
    return events
