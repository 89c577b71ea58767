"""What a method is: how it gets private gradients, and the step it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain
from privagrad.geometry.ellipsoid import Ellipsoid, Projection
from privagrad.glm.losses import Loss
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.bounded import BoundedSum
from privagrad.privacy.correlation import spread_of
from privagrad.privacy.events import Release, training_event
from privagrad.privacy.sampling import Batches, Rows, Samples

Shape = Literal["none", "ball", "ellipsoid"]
Schedule = Literal["constant", "linear"]
SCHEDULES: tuple[Schedule, ...] = ("constant", "linear")

EllipsoidRule = Callable[[Sequence[Vector]], Ellipsoid]
"""Chooses the ellipsoid of a step from the private gradients released so far, oldest first."""


Batch = Any
"""The examples of a step, as `Gradients.draw` gives them: their numbers, or a `StepOfRun`."""


class Gradients(Protocol):
    """Gradients of F(x; z_i) for numbered examples i, bounded and summed batch by batch."""

    @property
    def dim(self) -> int:
        """The dimension of x."""

    @property
    def n_examples(self) -> int:
        """The number of examples."""

    def draw(self, samples: Samples) -> Iterator[Batch]:
        """The examples of every step of a run."""

    def slack(self, batch_size: float) -> float:
        """How far rounding lets an example move a sum beyond its own vector."""

    def add_bounded(
        self,
        total: BoundedSum,
        x: Vector,
        batch: Batch,
        projection: Projection = "radial",
        pool: Executor | None = None,
    ) -> None:
        """Add the batch's gradients, each bounded to the sum's ellipsoid, in its coordinates."""

    def add_plain(
        self, total: Vector, x: Vector, batch: Batch, pool: Executor | None = None
    ) -> tuple[int, int]:
        """Add the batch's gradients as they are; 0, and how many were not finite."""

    def per_example(self, x: Vector, batch: Batch) -> Vector:
        """The batch's gradients that are finite, as rows."""


@dataclass(frozen=True)
class Setting:
    """What a method may know before the first step: all of it public.

    Attributes
    ----------
    dim : int
        The dimension of x.
    batches : Batches
        How many steps there are and how each draws its rows.
    domain : Domain
        The set to optimise over.
    plan : PrivacyPlan
        What will be released; by default nothing is protected.
    ellipsoid : Ellipsoid or EllipsoidRule or None
        The set that gradients are bounded to; None where nothing is bounded.
    public : Gradients or None
        Gradients of rows that need no protection.
    step_size : float
        α.
    projection : {"radial", "euclidean", "rows"}
        How gradients are brought into the ellipsoid.
    schedule : {"constant", "linear"}
        Whether α stays or falls linearly towards 0.
    """

    dim: int
    batches: Batches
    domain: Domain
    plan: PrivacyPlan = field(default_factory=lambda: PrivacyPlan((), unprotected=True))
    ellipsoid: Ellipsoid | EllipsoidRule | None = None
    public: Gradients | None = None
    step_size: float = 1.0
    projection: Projection = "radial"
    schedule: Schedule = "constant"

    def step_size_at(self, step: int) -> float:
        """α of the step after `step` others."""
        if self.schedule == "constant":
            return self.step_size
        return self.step_size * (1 - step / self.batches.steps)

    @property
    def noise_multiplier(self) -> float:
        """z, or 0 without privacy."""
        return self.plan.noise_multiplier

    @property
    def radius(self) -> float:
        """B, or 1 where no ellipsoid is given."""
        return self.ellipsoid.radius if isinstance(self.ellipsoid, Ellipsoid) else 1.0

    @property
    def noise_std(self) -> Vector | float:
        """The standard deviation of the noise in a coordinate of a private gradient."""
        if not isinstance(self.ellipsoid, Ellipsoid):
            return 0.0
        noise: Vector = (
            self.noise_multiplier / self.batches.expected_size * self.ellipsoid.noise_std
        )
        return noise * spread_of(self.batches.bands)


class Oracle(Protocol):
    """Where methods get gradients from: private under a plan, plain without one."""

    @property
    def loss(self) -> Loss:
        """The loss of a generalized linear model, which is public."""

    def bounded(
        self, x: Vector, batch: Rows, ellipsoid: Ellipsoid | EllipsoidRule | None
    ) -> Vector:
        """The mean of the gradients, each bounded to the ellipsoid, with noise of its shape."""

    def private_mean_of(
        self, x: Vector, batch: Rows, transform: Callable[[Vector], Vector], dim: int
    ) -> Vector:
        """The mean of `transform` of the gradients, each bounded to norm 1, with isotropic noise.

        `transform` takes gradients as the rows of a matrix to vectors of length `dim`. It must be
        public, and each vector must depend on its gradient alone, to the last bit: arithmetic
        coordinate by coordinate does, products of matrices do not.
        """

    def minimum(self, ridge: float, smoothing: float) -> Vector:
        """The minimiser of the risk with this ridge, with noise on it."""

    def perturbed_minimum(self, ridge: float, smoothing: float) -> Vector:
        """The minimiser of the risk with noise in the objective.

        A little noise on the result covers the tolerance of the solver.
        """


class Method(ABC):
    """One optimizer. `start` makes its state; `gradient` and `step` move the point once.

    Attributes
    ----------
    name : str
        What users call it.
    shape : {"none", "ball", "ellipsoid"}
        "none" for methods without bound and noise, "ball" for A = I, "ellipsoid" for any A.
    needs_public : bool
        Whether it learns something from public rows.
    one_shot : bool
        Whether it makes one release over all rows instead of steps over batches.
    scale_power : float
        Its ellipsoid's best scale is σ^scale_power for gradients of scales σ.
    adds_up : bool
        Whether its iterates are sums of step size times gradient, up to projections: then noise
        that cancels in sums cancels in them.
    """

    name: ClassVar[str]
    shape: ClassVar[Shape]
    needs_public: ClassVar[bool] = False
    one_shot: ClassVar[bool] = False
    scale_power: ClassVar[float] = 0.0
    adds_up: ClassVar[bool] = False

    def training(self, batches: Batches, epsilon: float) -> Release:
        """The release whose noise multiplier calibration sets."""
        return training_event(batches)

    def other_events(self) -> tuple[Release, ...]:
        """What it releases besides gradients, at a fixed cost."""
        return ()

    def ellipsoid(self, given: Ellipsoid) -> Ellipsoid:
        """The ellipsoid it uses: the one given, or for A = I the ball of the same radius."""
        return Ellipsoid.ball(given.dim, given.radius) if self.shape == "ball" else given

    @abstractmethod
    def default_step_size(self, domain: Domain, dim: int) -> float:
        """α where the user gives none; infinite where the domain does not determine one."""

    @abstractmethod
    def start(self, setting: Setting) -> Any:
        """The state before the first step."""

    def gradient(self, state: Any, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        """The private gradient at `x`; by default bounded to the setting's ellipsoid."""
        return oracle.bounded(x, batch, state.setting.ellipsoid)

    @abstractmethod
    def step(self, state: Any, x: Vector, gradient: Vector, step_size: float) -> Vector | None:
        """Move `x` in place, update `state`, return the metric to project in (None: Euclidean)."""
