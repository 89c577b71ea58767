"""How each example's gradient is bounded: `make_private(clipping=...)`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from privagrad._internal import validate
from privagrad.torch.per_example.chunked import Bound, BoundedGradients, Named, bounded_sums
from privagrad.torch.processes import Processes
from privagrad.torch.scales import Scale

Norms = float | Sequence[float] | Mapping[str, float]
"""One bound, or one for each trainable parameter: in their order, or by name."""

_LEAST_GAMMA = 1e-6


class Clipping:
    """Flat: g_i min(1, B/‖g_i‖_C), all tensors of an example together."""

    name = "flat"

    def bounded(
        self, gradients: Sequence[Named], scales: dict[str, Scale], radius: float, factor: float,
        shares: Tensor | None = None,
    ) -> BoundedGradients:  # fmt: skip
        """The sums of bounded gradients; `factor` is what the gradients still need.

        `shares` is what each bounded gradient is multiplied with before it is added.
        """
        return bounded_sums(gradients, scales, Bound(radius, factor, shares=shares))

    def check(self, noise: float) -> None:
        """Refuse noise multipliers with which nothing could be released."""

    def agree(self, processes: Processes) -> None:
        """Take the first process's numbers."""

    @property
    def counts(self) -> bool:
        """Whether a noisy count of the examples within the bound is released with each sum."""
        return False


class AutomaticClipping(Clipping):
    """Automatic: g_i B/(‖g_i‖_C + γ), AUTO-S of Bu et al. (2023). Norms stay below B."""

    name = "automatic"

    def __init__(self, gamma: float = 0.01) -> None:
        self.gamma = validate.positive("gamma", gamma)
        if self.gamma < _LEAST_GAMMA:
            raise ValueError(
                f"Expected gamma >= {_LEAST_GAMMA:g}, found {gamma!r}: gradients smaller than "
                "float32 can square would be made as long as the others."
            )

    def bounded(
        self, gradients: Sequence[Named], scales: dict[str, Scale], radius: float, factor: float,
        shares: Tensor | None = None,
    ) -> BoundedGradients:  # fmt: skip
        return bounded_sums(gradients, scales, Bound(radius, factor, self.gamma, shares))

    def agree(self, processes: Processes) -> None:
        self.gamma = processes.agreed([self.gamma])[0]


class PerLayerClipping(Clipping):
    """Per layer: each tensor g_p of an example is bounded to its own norm B_p.

    Guarantees
    ----------
    ‖g_i‖_C² = Σ_p ‖g_ip‖_C² ≤ Σ_p B_p² = B². The noise is that of the ellipsoid of radius B, the
    same for all tensors as far as C is.

    Parameters
    ----------
    norms : mapping of str to float
        B_p. What is kept are the shares B_p/B: a schedule of B changes all bounds alike.
    """

    name = "per_layer"

    def __init__(self, norms: Mapping[str, float]) -> None:
        total = math.hypot(*norms.values())
        self.shares = {name: norm / total for name, norm in norms.items()}

    def bounded(
        self, gradients: Sequence[Named], scales: dict[str, Scale], radius: float, factor: float,
        shares: Tensor | None = None,
    ) -> BoundedGradients:  # fmt: skip
        squares: dict[str, Tensor] = {}
        for name, g in gradients:
            own = g.squared_norms(scales[name].part(g.part))
            squares[name] = squares[name] + own if name in squares else own
        weights, every_finite = {}, []
        for name, own in squares.items():
            bound = Bound(radius * self.shares[name], factor, shares=shares)
            weights[name], finite = bound.weights(own)
            every_finite.append(finite)
        # An example counts with all its tensors or with none.
        finite = torch.stack(every_finite).all(0)
        if not bool(finite.all()):
            for _, g in gradients:
                g.keep_only(finite)
        weights = {name: torch.where(finite, own, 0.0) for name, own in weights.items()}
        totals = [(name, g.part, g.weighted_sum(weights[name])) for name, g in gradients]
        return BoundedGradients(totals, torch.stack(list(weights.values())).amin(0), finite)

    def agree(self, processes: Processes) -> None:
        self.shares = dict(
            zip(self.shares, processes.agreed(list(self.shares.values())), strict=True)
        )


class AdaptiveClipping(Clipping):
    """Adaptive: B follows a quantile of the norms (Andrew et al. 2021).

    Each step releases, besides the sum of gradients, how many of the batch's examples have a norm
    within B: Σ_i (1[‖g_i‖_C ≤ B] - ½), with noise of standard deviation s. Divided by the expected
    batch size b and with ½ added that is a share q̂ of the examples, and then

        B ← B exp(-η (q̂ - q)),   kept between two public numbers.

    Guarantees
    ----------
    Both are one Gaussian release of noise multiplier z, the one that is charged. An example moves
    the count by at most ½ and the sum by at most B. With noise of standard deviation s = ½ z_count
    and B z_sum it is a release of 1/z² = 1/z_sum² + 1/z_count², so that the sum gets the noise

        z_sum = (1/z² - 1/(2s)²)^(-1/2) > z.

    Parameters
    ----------
    batch_size : float
        b.
    target_unclipped_quantile : float
        q, between 0 and 1.
    clipbound_learning_rate : float
        η.
    max_clipbound, min_clipbound : float
        The largest and the smallest B.
    unclipped_num_std : float, optional
        s; more than z/2. None: b/20.
    """

    name = "adaptive"

    def __init__(
        self,
        batch_size: float,
        *,
        target_unclipped_quantile: float = 0.5,
        clipbound_learning_rate: float = 0.2,
        max_clipbound: float = 1e6,
        min_clipbound: float = 1e-6,
        unclipped_num_std: float | None = None,
    ) -> None:
        self.quantile = validate.not_negative(
            "target_unclipped_quantile", target_unclipped_quantile
        )
        if self.quantile > 1:
            raise ValueError(
                "Expected target_unclipped_quantile between 0 and 1, found "
                f"{target_unclipped_quantile!r}."
            )
        self.rate = validate.positive("clipbound_learning_rate", clipbound_learning_rate)
        self.least = validate.positive("min_clipbound", min_clipbound)
        self.most = validate.positive("max_clipbound", max_clipbound)
        if self.least >= self.most:
            raise ValueError(
                f"Expected min_clipbound < max_clipbound, found {min_clipbound!r} and "
                f"{max_clipbound!r}."
            )
        self.count_std = batch_size / 20
        if unclipped_num_std is not None:
            self.count_std = validate.positive("unclipped_num_std", unclipped_num_std)

    @property
    def counts(self) -> bool:
        return True

    def check(self, noise: float) -> None:
        if noise >= 2 * self.count_std:
            raise ValueError(
                "Expected a noise multiplier below 2 · unclipped_num_std = "
                f"{2 * self.count_std:g} with clipping='adaptive', found {noise:g}: the count of "
                "unclipped examples alone would cost more than that. Raise unclipped_num_std (by "
                "default a twentieth of the batch size) or lower the noise."
            )

    def agree(self, processes: Processes) -> None:
        numbers = [self.quantile, self.rate, self.least, self.most, self.count_std]
        agreed = processes.agreed(numbers)
        self.quantile, self.rate, self.least, self.most, self.count_std = agreed

    def count_share(self, noise: float) -> float:
        """z/(2s): the length that the count may have of a whitened vector of length 1."""
        self.check(noise)
        return noise / (2 * self.count_std)

    def next_radius(self, radius: float, unclipped: float) -> float:
        """B of the next batch, from the released share of examples within the last one's."""
        step = math.exp(min(700.0, max(-700.0, -self.rate * (unclipped - self.quantile))))
        return min(self.most, max(self.least, radius * step))


_OPTIONS = {
    "flat": (),
    "per_layer": (),
    "automatic": ("gamma",),
    "adaptive": (
        "target_unclipped_quantile", "clipbound_learning_rate", "max_clipbound", "min_clipbound",
        "unclipped_num_std",
    ),
}  # fmt: skip


def choose_clipping(
    name: str,
    norms: Norms,
    parameters: Mapping[str, nn.Parameter],
    stepped: Iterable[nn.Parameter],
    batch_size: float,
    options: Mapping[str, Any],
) -> tuple[Clipping, float]:
    """What `make_private` was asked for, and B.

    `stepped` are the parameters in the order of the optimizer, `parameters` in the module's.
    """
    validate.choice("clipping", name, _OPTIONS)
    validate.known_options(f"make_private with clipping={name!r}", options, _OPTIONS[name])
    if name == "per_layer":
        by_name = _by_name(norms, parameters, stepped)
        return PerLayerClipping(by_name), math.hypot(*by_name.values())
    if isinstance(norms, Sequence | Mapping):
        raise TypeError(
            f"Expected one max_grad_norm with clipping={name!r}, found several: use "
            "clipping='per_layer' to bound every tensor by itself."
        )
    radius = validate.positive("max_grad_norm", norms)
    if name == "automatic":
        return AutomaticClipping(**options), radius
    if name == "adaptive":
        adaptive = AdaptiveClipping(batch_size, **options)
        if not adaptive.least <= radius <= adaptive.most:
            raise ValueError(
                "Expected max_grad_norm, with which adaptive clipping begins, between "
                f"min_clipbound={adaptive.least:g} and max_clipbound={adaptive.most:g}, found "
                f"{radius:g}."
            )
        return adaptive, radius
    return Clipping(), radius


def _by_name(
    norms: Norms, parameters: Mapping[str, nn.Parameter], stepped: Iterable[nn.Parameter]
) -> dict[str, float]:
    """One positive bound for each trainable parameter."""
    names = ", ".join(parameters)
    if not isinstance(norms, Sequence | Mapping) or isinstance(norms, str):
        raise TypeError(
            "Expected a list of bounds, or a dict of them by name, as max_grad_norm with "
            f"clipping='per_layer', found {norms!r}: one for each of {names}. For a bound B on the "
            f"whole gradient give each of them B / sqrt({len(parameters)})."
        )
    if isinstance(norms, Mapping):
        by_name = {name.removeprefix("_module."): norm for name, norm in norms.items()}
    else:
        if len(norms) != len(parameters):
            raise ValueError(
                f"Expected {len(parameters)} bounds in max_grad_norm, one for each of {names}, "
                f"found {len(norms)}."
            )
        trained = [id(p) for p in stepped if p.requires_grad]
        if trained != [id(p) for p in parameters.values()]:
            raise ValueError(
                "Expected the optimizer's parameters in the order of the module's with a list of "
                "bounds, found another order: give max_grad_norm as a dict of bounds by name."
            )
        by_name = dict(zip(parameters, norms, strict=True))
    if by_name.keys() != parameters.keys():
        raise ValueError(
            f"Expected one bound for each of {names} in max_grad_norm, found them for "
            f"{', '.join(by_name) or 'none'}."
        )
    return {name: validate.positive(f"max_grad_norm[{name!r}]", by_name[name]) for name in by_name}
