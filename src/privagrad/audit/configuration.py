"""What is audited: a training in which rows and noise are chosen for the attack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.geometry.domains import Box, Domain, WholeSpace
from privagrad.geometry.ellipsoid import PROJECTIONS, Ellipsoid, Projection
from privagrad.glm.examples import Examples, MemoryPartitions, PartitionedExamples
from privagrad.glm.gradients import GlmGradients
from privagrad.glm.losses import Loss
from privagrad.glm.partitioned import PartitionedGradients
from privagrad.glm.rows import as_rows
from privagrad.methods import METHODS, Method, Setting
from privagrad.methods.loop import train
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import relation_of, training_event
from privagrad.privacy.noise import Noise, RandomState, random_source
from privagrad.privacy.releases import Releases
from privagrad.privacy.sampling import SAMPLINGS, Batches, Sampling

Door = Literal["dense", "csr", "partitions", "torch"]
DOORS: tuple[Door, ...] = ("dense", "csr", "partitions", "torch")
_PARTS = 7
_HUGE = 1e3
"""The size of a canary's gradient, in radii: all of it but the radius is clipped."""


class Keywords(TypedDict, total=False):
    """The fields of `Configuration`."""

    door: Door
    method: str
    sampling: Sampling
    rate: float
    projection: Projection
    noise: Noise
    canaries: int
    random_state: RandomState


@dataclass(frozen=True)
class Configuration:
    """A training to audit.

    Attributes
    ----------
    door : {"dense", "csr", "partitions", "torch"}
        Whether `minimize` sees an array, a CSR matrix, or rows in partitions, which are summed as
        those of large files and clusters are; or `PrivacyEngine` a model.
    method : str
        A method that takes private steps: "pagan", "pasan", "dp-adagrad", "dp-sgd", ...
    sampling : {"poisson", "with_replacement", "without_replacement", "random_allocation"}
        How a step draws its rows.
    rate : float
        The expected part of the rows that a step sees.
    projection : {"radial", "euclidean", "rows"}
        How gradients are brought into the ellipsoid.
    noise : {"gaussian", "discrete"}
        The kind of noise.
    canaries : int
        How many rows are attacked. Each has a coordinate of its own.
    random_state : int or None
        A seed of the noise, for tests.
    """

    door: Door = "dense"
    method: str = "pagan"
    sampling: Sampling = "poisson"
    rate: float = 1.0
    projection: Projection = "radial"
    noise: Noise = "gaussian"
    canaries: int = 500
    random_state: RandomState = None

    def __post_init__(self) -> None:
        validate.choice("door", self.door, DOORS)
        validate.choice("method", self.method, METHODS)
        validate.choice("sampling", self.sampling, SAMPLINGS)
        validate.choice("projection", self.projection, PROJECTIONS)
        validate.integer("canaries", self.canaries, least=10)
        if not 0 < self.rate <= 1:
            raise ValueError(f"Expected a rate in (0, 1], found {self.rate!r}.")
        rule = METHODS[self.method]
        if rule.shape == "none" or type(rule).gradient is not Method.gradient or rule.needs_public:
            raise ValueError(
                "Expected a method that releases gradients bounded to one ellipsoid, found "
                f"{self.method!r}: audit 'pagan', 'pasan', 'dp-adagrad', 'dp-sgd' or "
                "'mirror-descent'."
            )
        if self.door == "torch" and (self.sampling, self.projection) != ("poisson", "radial"):
            raise ValueError(
                "Expected Poisson sampling and the radial projection for the door 'torch', found "
                f"{self.sampling!r} and {self.projection!r}."
            )

    @property
    def name(self) -> str:
        """The configuration in words."""
        how = f"{self.method}, {self.sampling} at rate {self.rate:g}"
        extra = "" if self.projection == "radial" else f", {self.projection} projection"
        return f"{self.door}, {how}{extra}{'' if self.noise == 'gaussian' else ', discrete noise'}"

    def batches(self, steps: int) -> Batches:
        """How the canaries are drawn."""
        size = max(1, round(self.rate * self.canaries))
        return Batches(self.canaries, size, steps, self.sampling)

    @property
    def ellipsoid(self) -> Ellipsoid:
        """Axes of very different lengths, so that the wrong shape of noise shows."""
        return Ellipsoid(np.geomspace(0.1, 10.0, self.canaries), 1.0)

    def rows(self, included: NDArray[np.bool_]) -> Any:
        """Canary i is a huge row along coordinate i where it is included.

        Where it is not, it is a row without contribution, or under replace-one the opposite row.
        """
        other = 0.0 if relation_of(self.sampling) == "zero-out" else -1.0
        sizes = np.where(included, 1.0, other) * _HUGE * self.ellipsoid.noise_std
        rows = sparse.csr_array(sparse.diags_array(sizes))
        return rows if self.door in ("csr", "partitions") else rows.toarray()


def calibrated(
    configuration: Configuration, epsilon: float, delta: float, steps: int
) -> PrivacyPlan:
    """The plan of a training of so many steps."""
    return PrivacyPlan.calibrate_event(training_event(configuration.batches(steps)), epsilon, delta)


def private_gradients(
    configuration: Configuration, rows: Any, plan: PrivacyPlan, steps: int, delta: float
) -> list[Vector]:
    """The private gradients of all steps, at a point that does not move.

    The loss is ⟨x, z⟩, the gradient of which is the row itself.
    """
    if configuration.door == "torch":
        from privagrad.torch.audited import released_gradients

        ellipsoid = METHODS[configuration.method].ellipsoid(configuration.ellipsoid)
        batches = configuration.batches(steps)
        return released_gradients(
            rows, ellipsoid, plan.noise_multiplier, batches, configuration.noise,
            configuration.random_state,
        )  # fmt: skip
    found: list[Vector] = []
    _train(configuration, rows, plan, steps, delta, WholeSpace(), 0.0, found.append)
    return found


def trained(
    configuration: Configuration, rows: Any, plan: PrivacyPlan, steps: int, delta: float
) -> tuple[Vector, Vector]:
    """The point after a whole training on a box, and the sum of its private gradients."""
    total = np.zeros(configuration.canaries)

    def see(gradient: Vector) -> None:
        np.add(total, gradient, out=total)

    box = Box(-1.0, 1.0)
    return _train(configuration, rows, plan, steps, delta, box, 0.02, see), total


def _gradients(configuration: Configuration, rows: Any) -> GlmGradients | PartitionedGradients:
    """Those of ⟨x, z⟩, over rows in memory or in partitions."""
    loss, whole = Loss("linear"), as_rows(rows)
    if configuration.door != "partitions":
        return GlmGradients.of(loss, whole, None)
    examples = Examples(whole, np.zeros(whole.shape[0]))
    cuts = np.array_split(np.arange(whole.shape[0]), _PARTS)
    parts = MemoryPartitions([examples.take(cut) for cut in cuts])
    return PartitionedGradients(loss, PartitionedExamples.of(parts))


def _train(
    configuration: Configuration,
    rows: Any,
    plan: PrivacyPlan,
    steps: int,
    delta: float,
    domain: Domain,
    step_size: float,
    see: Callable[[Vector], Any],
) -> Vector:
    method = METHODS[configuration.method]
    gradients = _gradients(configuration, rows)
    setting = Setting(
        configuration.canaries, configuration.batches(steps), domain, plan,
        method.ellipsoid(configuration.ellipsoid), step_size=step_size,
        projection=configuration.projection,
    )  # fmt: skip
    source = random_source(configuration.random_state, configuration.noise)
    x = np.zeros(configuration.canaries)
    train(
        method, gradients, setting, Releases(plan, source, delta), x, progress=False,
        observer=lambda step, before, after, gradient: see(gradient.copy()),
    )  # fmt: skip
    return x
