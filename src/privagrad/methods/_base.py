"""What a method is: how it asks for private gradients, and the step it takes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Domain
from privagrad.geometry.ellipsoid import Ellipsoid, Projection
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import Loss
from privagrad.privacy.events import GaussianEvent, Release
from privagrad.privacy.sampling import Rows, Sampling

Shape = Literal["none", "ball", "ellipsoid"]
Schedule = Literal["constant", "linear"]
SCHEDULES: tuple[Schedule, ...] = ("constant", "linear")


@dataclass(frozen=True)
class Setting:
    """What a method may know before the first step: all of it public.

    `noise_multiplier` is 0 without privacy; `ellipsoid` is then None unless the user gave one.
    """

    dim: int
    steps: int
    batch_size: int
    noise_multiplier: float
    domain: Domain
    ellipsoid: Ellipsoid | None = None
    public: GlmGradients | None = None
    n_examples: int = 1
    step_size: float = 1.0
    epsilon: float = math.inf
    sampling: Sampling | None = "poisson"
    projection: Projection = "radial"
    schedule: Schedule = "constant"

    def step_size_at(self, step: int) -> float:
        """α of the step after `step` others: constant, or falling in a line towards 0."""
        return self.step_size * (1 - step / self.steps if self.schedule == "linear" else 1)

    @property
    def epoch(self) -> int:
        """The steps in which a row is seen once on average."""
        return max(1, round(self.n_examples / self.batch_size))

    @property
    def radius(self) -> float:
        return self.ellipsoid.radius if self.ellipsoid else 1.0


class Oracle(Protocol):
    """Where methods get gradients from: private under a plan, plain without one."""

    @property
    def loss(self) -> Loss:
        """The loss, which is public."""

    def bounded(self, x: Vector, batch: Rows, ellipsoid: Ellipsoid | None) -> Vector:
        """The mean gradient, each example's bounded to the ellipsoid, noise of its shape."""

    def private_mean_of(
        self, x: Vector, batch: Rows, transform: Callable[[Vector], Vector], dim: int
    ) -> Vector:
        """The mean of `transform` of the gradients, each example's bounded to norm 1, round noise.

        `transform` takes gradients as the rows of a matrix to vectors of length `dim`. It must be
        public, and each vector must depend on its gradient alone, to the last bit: arithmetic
        coordinate by coordinate does, products of matrices do not.
        """

    def minimum(self, ridge: float, smoothing: float, cover: float | None = None) -> Vector:
        """The minimiser of the risk with this ridge, with noise on it.

        With `cover` the noise is in the objective, and noise of that multiplier covers what the
        solver's tolerance lets the answer move.
        """


class Method(ABC):
    """One optimizer. `start` makes its state; `gradient` and `step` move the point once.

    Attributes
    ----------
    name : what users call it
    shape : "none" for methods without bound and noise, "ball" for A = I, "ellipsoid" for any A
    needs_public : whether it learns something from public rows
    one_shot : whether it makes one release over all rows instead of steps over batches
    scale_power : its ellipsoid's best scale is σ^scale_power for gradients of scales σ
    """

    name: ClassVar[str]
    shape: ClassVar[Shape]
    needs_public: ClassVar[bool] = False
    one_shot: ClassVar[bool] = False
    scale_power: ClassVar[float] = 0.0

    def events(
        self, epsilon: float, n: int, batch_size: int, steps: int, sampling: Sampling | None
    ) -> tuple[Release, ...]:
        """What it will release; the last one's noise multiplier is what calibration sets."""
        return (GaussianEvent(1.0, steps, sampling, n, batch_size, "gradients"),)

    def ellipsoid(self, given: Ellipsoid) -> Ellipsoid:
        """The ellipsoid it uses: the one given, or for A = I the ball of the same radius."""
        return Ellipsoid.ball(given.dim, given.radius) if self.shape == "ball" else given

    @abstractmethod
    def default_step_size(self, domain: Domain, dim: int) -> float:
        """α where the user gives none; infinite where the domain does not tell one."""

    @abstractmethod
    def start(self, setting: Setting) -> Any:
        """The state before the first step."""

    def gradient(self, state: Any, oracle: Oracle, x: Vector, batch: Rows) -> Vector:
        """The private gradient at `x`; by default bounded to the setting's ellipsoid."""
        return oracle.bounded(x, batch, state.setting.ellipsoid)

    @abstractmethod
    def step(self, state: Any, x: Vector, gradient: Vector, step_size: float) -> Vector | None:
        """Move `x` in place, update `state`, return the metric to project in (None: Euclidean)."""
