"""What is released, as values: events and their neighbouring relation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

from privagrad._internal import validate
from privagrad._internal.markup import html_table
from privagrad.privacy.sampling import Batches, Sampling

Relation = Literal["zero-out", "replace-one"]
"""Which tables are neighbours. The number of rows n is public and fixed under both.

zero-out: one row's contribution is replaced by nothing. replace-one: by that of any other row.
"""

TRAINING, SOLVER_TOLERANCE = "gradients", "solver tolerance"
"""Purposes of the events of a training, and of the noise that covers a solver's tolerance."""

Unit = Literal["row", "user"]
"""Whose contribution neighbours differ in: that of one row, or of all rows of one user. The number
of units is public; under "user" the number of rows is not."""

UNITS: tuple[Unit, ...] = ("row", "user")
_RELATIONS: tuple[Relation, ...] = ("zero-out", "replace-one")
_FORMER_NAME = "add-or-remove-one"
"""What version 0.1.0 called zero-out: its privacy loss is the same."""


@dataclass(frozen=True)
class GaussianEvent:
    """`count` releases of a sum of vectors of norm ≤ 1 plus N(0, noise_multiplier² I).

    Attributes
    ----------
    noise_multiplier : float
        The noise's standard deviation over the bound on one example's vector; under replace-one
        the sensitivity is twice that bound, and the accountant counts it so.
    count : int
        The number of releases.
    sampling : Sampling or None
        How each release draws its rows, or users; None: all of them. "random_allocation": in every
        epoch of t = round(n_examples/batch_size) releases each row is in exactly one, uniformly at
        random and independently of all others; `count` is a multiple of t. "cyclic_poisson": in
        each of any `bands` releases in a row another part of the rows may be drawn, each row
        independently with probability bands · batch_size/n_examples; `count` is a multiple of
        `bands`.
    n_examples, batch_size : int
        Public; needed where rows are sampled. `batch_size` is the expected one, under random
        allocation up to the rounding of t.
    purpose : str
        For people: "gradients", "moments", ...
    under : {"zero-out", "replace-one"} or None
        The neighbouring relation, where the sampling does not say it.
    leak : float
        The probability with which each release may show everything about one row, or user.
    unit : {"row", "user"}
        Whose vectors have norm ≤ 1: those of rows, or one for all rows of a user together.
    bands : int
        With "cyclic_poisson" over how many releases in a row the noise is correlated, so that what
        a row adds to one moves all of them; together they are one Gaussian mechanism of this noise
        multiplier. Otherwise 1.
    """

    noise_multiplier: float
    count: int = 1
    sampling: Sampling | None = None
    n_examples: int = 1
    batch_size: int = 1
    purpose: str = "query"
    under: Relation | None = None
    leak: float = 0.0
    unit: Unit = "row"
    bands: int = 1

    def __post_init__(self) -> None:
        # dp-accounting under-accounts integer noise multipliers: always a float.
        noise = validate.positive("noise_multiplier", self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", noise)
        validate.choice("unit", self.unit, UNITS)
        if self.bands > 1 and self.unit != "row":
            raise ValueError(
                "Expected unit='row' with bands > 1, found 'user': rows take turns, and a user "
                "with rows in several turns would count more than once."
            )
        if not 0 <= self.leak < 1:
            raise ValueError(f"Expected a leak in [0, 1), found {self.leak!r}.")
        # Counts are added up: Python's integers do not wrap around, NumPy's do.
        for name in ("count", "n_examples", "batch_size", "bands"):
            object.__setattr__(self, name, validate.integer(name, getattr(self, name)))
        if self.sampling is not None:
            validate.choice("sampling", self.sampling, get_args(Sampling))
        if self.under is not None:
            object.__setattr__(self, "under", relation_named(self.under))
            if self.sampling is not None and self.under != relation_of(self.sampling):
                raise ValueError(
                    f"Expected under={relation_of(self.sampling)!r} or None with sampling="
                    f"{self.sampling!r}, found under={self.under!r}."
                )
        if self.batch_size > self.n_examples:
            raise ValueError(
                f"Expected batch_size <= n_examples, found batch_size={self.batch_size} and "
                f"n_examples={self.n_examples}."
            )
        Batches(self.n_examples, self.batch_size, 1, self.sampling, self.bands)  # refuses bands
        if self.bands > 1 and self.leak > 0:
            raise ValueError("Expected no leak with bands > 1, found one: none is known to hold.")
        self._require_whole_draws()

    def _require_whole_draws(self) -> None:
        together = releases_per_draw(self)
        if self.count % together and self.bands > 1:
            raise ValueError(
                f"Expected whole blocks of bands={together} releases of correlated noise, found "
                f"count={self.count}: count a block that ends early as a whole one."
            )
        if self.count % together:
            raise ValueError(
                f"Expected whole epochs of {together} steps (n_examples/batch_size, "
                f"rounded) under random allocation, found count={self.count}: count an epoch that "
                "ends early as a whole one."
            )

    @property
    def relation(self) -> Relation | None:
        """The neighbouring relation it is accounted under; None: either."""
        return self.under if self.sampling is None else relation_of(self.sampling)

    def __str__(self) -> str:
        text = f"{self.count} x {self.purpose} at noise multiplier {self.noise_multiplier:.4g}"
        return text if self.bands == 1 else f"{text}, correlated over {self.bands} in a row"

    @property
    def rate(self) -> float:
        """The probability that one given row is in a given batch for which it may be drawn."""
        if self.sampling is None:
            return 1.0
        if self.sampling == "with_replacement" and self.n_examples > 1:
            return -math.expm1(self.batch_size * math.log1p(-1 / self.n_examples))
        if self.sampling == "random_allocation":
            return 1 / releases_per_draw(self)
        return self.bands * self.batch_size / self.n_examples


def releases_per_draw(event: Event) -> int:
    """How many releases share one random choice of a row: those of an epoch, `bands`, or one."""
    if isinstance(event, GaussianEvent) and event.sampling == "random_allocation":
        return Batches(event.n_examples, event.batch_size, 1, event.sampling).epoch
    return event.bands if isinstance(event, GaussianEvent) else 1


def single(event: E) -> E:
    """The event with as few releases as it can have: one, those of an epoch, or `bands`."""
    return replace(event, count=releases_per_draw(event))


def training_event(batches: Batches, noise_multiplier: float = 1.0) -> GaussianEvent:
    """The releases of all steps of a training, and of all epochs or blocks of bands begun."""
    together = batches.epoch if batches.sampling == "random_allocation" else batches.bands
    steps = -(-batches.steps // together) * together
    return GaussianEvent(
        noise_multiplier, steps, batches.sampling, batches.n_examples, batches.batch_size,
        TRAINING, bands=batches.bands,
    )  # fmt: skip


@dataclass(frozen=True)
class ObjectiveEvent:
    """A minimiser released with Gaussian noise in the objective, over all rows.

    The minimiser θ of Σ_i ℓ_i + Λ/2 ‖θ‖² + ⟨b, θ⟩, b ~ N(0, σ² I), with gradients g_i(θ) = ℓ_i' a_i
    of norm ≤ L: θ ↔ b is one to one. Without row i the same θ comes from b + g_i(θ), and the
    determinant of db/dθ changes by a factor between 1 and 1 + ℓ_i'' ‖a_i‖²/Λ ≤ exp(log_volume). As
    g_i(θ) lies along a_i whatever b is, the privacy loss is at most

        log_volume + μ |Z| + μ²/2,    Z ~ N(0, 1), μ = L/σ = 1/noise_multiplier,

    in both directions (Chaudhuri et al. 2011; Kifer, Smith, Thakurta 2012; the fixed direction of
    linear models: Redberg, Koskela, Wang 2023). Sums of such bounds compose.
    """

    noise_multiplier: float
    log_volume: float
    purpose: str = "objective"
    count: int = 1
    sampling: None = None
    rate: float = 1.0
    unit: Unit = "row"

    def __post_init__(self) -> None:
        noise = validate.positive("noise_multiplier", self.noise_multiplier)
        volume = validate.not_negative("log_volume", self.log_volume)
        object.__setattr__(self, "noise_multiplier", noise)
        object.__setattr__(self, "log_volume", volume)
        object.__setattr__(self, "count", validate.integer("count", self.count))
        validate.choice("unit", self.unit, UNITS)
        if self.sampling is not None or self.rate != 1:
            raise ValueError(
                "Expected an objective over all rows (sampling=None, rate=1.0), found "
                f"sampling={self.sampling!r} and rate={self.rate!r}: no cheaper price is known for "
                "samples."
            )

    def __str__(self) -> str:
        return f"{self.count} x {self.purpose} at noise multiplier {self.noise_multiplier:.4g}"

    @property
    def relation(self) -> Relation:
        return "zero-out"


@dataclass(frozen=True)
class SelectEvent:
    """The best of a random number of runs, each of which releases `events` with a noisy score.

    The number of runs is geometric of the given mean and stays secret; runs do not see each
    other (Papernot and Steinke 2022).
    """

    events: tuple[GaussianEvent, ...]
    mean: float
    purpose: str = "selection"
    count: int = 1

    def __post_init__(self) -> None:
        events = tuple(self.events)
        if not events or not all(isinstance(event, GaussianEvent) for event in events):
            raise TypeError(
                f"Expected the GaussianEvents of one run, at least one; found {self.events!r}."
            )
        unit_of(events)
        mean = validate.positive("mean", self.mean)
        if mean < 1:
            raise ValueError(f"Expected mean >= 1 (at least one run is made), found {mean!r}.")
        object.__setattr__(self, "events", events)
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "count", validate.integer("count", self.count))

    @property
    def relation(self) -> Relation:
        return "zero-out"

    @property
    def unit(self) -> Unit:
        return self.events[0].unit

    @property
    def sampling(self) -> Sampling | None:
        return next((event.sampling for event in self.events if event.sampling), None)

    def __str__(self) -> str:
        inner = ", ".join(str(event) for event in self.events)
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{times}the best of {self.mean:g} runs on average, each of {inner}"


Release = GaussianEvent | ObjectiveEvent
Event = Release | SelectEvent
E = TypeVar("E", bound=Event)


def unit_of(events: Iterable[Event]) -> Unit | None:
    """The unit of all events, None where there are none; events of two units are refused."""
    units = {event.unit for event in events}
    if len(units) > 1:
        raise ValueError(
            "Expected releases that all protect rows, or all protect users, found both: what a "
            "user's rows add up to would not be counted. Give groups= to all of them, or to none."
        )
    return units.pop() if units else None


def merged(events: Iterable[E]) -> tuple[E, ...]:
    """The same releases as fewer events: counts of equal ones are added."""
    counts: dict[E, int] = {}
    for event in events:
        one = single(event)
        counts[one] = counts.get(one, 0) + event.count
    return tuple(replace(event, count=count) for event, count in counts.items())


def events_table(title: str, events: Iterable[Event]) -> str:
    """The releases as an HTML table."""
    rows = [
        (e.purpose, str(e), "", "") if isinstance(e, SelectEvent) else
        (e.purpose, e.count, e.noise_multiplier, e.sampling or "all rows")
        for e in events
    ]  # fmt: skip
    return html_table(title, ("purpose", "times", "noise multiplier", "rows"), rows)


def relation_of(sampling: Sampling) -> Relation:
    """Zero-out where rows are drawn independently, replace-one for samples of fixed size."""
    fixed_size = sampling in ("with_replacement", "without_replacement")
    return "replace-one" if fixed_size else "zero-out"


def relation_named(name: str) -> Relation:
    """A relation by its name, also by the one that files of version 0.1.0 have for it."""
    if name == _FORMER_NAME:
        return "zero-out"
    validate.choice("relation", name, _RELATIONS)
    return "replace-one" if name == "replace-one" else "zero-out"
