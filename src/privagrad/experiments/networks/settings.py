"""The networks that methods are compared on, the methods, and what every method tries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shape = Literal["ball", "pasan", "pagan", "widths", "scale-then-privatize"]
"""The ellipsoid: C = 1, the paper's powers of the second moments, σ⁻², or 1/v of Adam."""
Steps = Literal[
    "sgd", "momentum", "adam", "adam-bc", "adagrad", "adaptive-sgd",
    "divided", "whitened", "adam-whitened", "kfc",
]  # fmt: skip
"""The optimizer. `divided` is SGD whose gradients are divided by the widths of the ellipsoid;
`whitened` are those in the coordinates in which the ellipsoid is a ball; `kfc` is SGD with the
steps of DP-KFC."""
Filter = Literal["none", "low-pass", "kalman"]

_ADAM_STEP_SIZES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_WHITENED_ADAM_STEP_SIZES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_SGD_STEP_SIZES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_STEP_SIZES = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
RADIUS_FACTORS = (0.1, 0.5, 2.0)
"""Multiples of the median norm of the public gradients at the start, in the method's own shape."""


@dataclass(frozen=True)
class NetworkMethod:
    """An ellipsoid, an optimizer, and a filter between both.

    Parameters
    ----------
    steps : str
        The optimizer.
    shape : str
        The ellipsoid.
    given : str
        What it is given besides private rows: "nothing" or "public rows".
    filter : str
        Of the private gradients, before the optimizer.
    kronecker : {"none", "inputs", "both"}
        The sides of `privagrad.torch.precondition`, whose ellipsoids have axes of any direction in
        every layer.
    standardised : bool
        Whether columns are first centred and divided by their deviations in the public rows.
    private : bool
        False: no bound and no noise.
    """

    steps: Steps
    shape: Shape = "ball"
    given: Literal["nothing", "public rows"] = "nothing"
    filter: Filter = "none"
    kronecker: Literal["none", "inputs", "both"] = "none"
    standardised: bool = False
    private: bool = True

    @property
    def step_sizes(self) -> tuple[float, ...]:
        """What is tried: as many for every optimizer, in the range where it is good.

        In units in which a first step of 1 changes the loss of a typical public example by about 1.
        """
        if self.steps == "adam-whitened":
            return _WHITENED_ADAM_STEP_SIZES
        if self.steps in ("adam", "adam-bc"):
            return _ADAM_STEP_SIZES
        return _SGD_STEP_SIZES if self.steps in ("sgd", "whitened", "kfc") else _STEP_SIZES

    @property
    def scaled(self) -> bool:
        """Whether the optimizer uses the widths of the ellipsoid."""
        return self.steps in ("divided", "whitened", "adam-whitened")

    @property
    def public_shape(self) -> bool:
        """Whether public rows determine the ellipsoid."""
        return self.shape in ("pasan", "pagan", "widths") and self.given == "public rows"


def _public(steps: Steps, shape: Shape = "ball", standardised: bool = False) -> NetworkMethod:
    return NetworkMethod(steps, shape, "public rows", standardised=standardised)


NETWORK_METHODS = {
    "adam": NetworkMethod("adam", private=False),
    "adam-standardised": NetworkMethod("adam", standardised=True, private=False),
    "dp-sgd": NetworkMethod("sgd"),
    "dp-sgd-momentum": NetworkMethod("momentum"),
    "dp-sgd-low-pass": NetworkMethod("sgd", filter="low-pass"),
    "dp-sgd-kalman": NetworkMethod("sgd", filter="kalman"),
    "dp-adam": NetworkMethod("adam"),
    "dp-adambc": NetworkMethod("adam-bc"),
    "dp-adagrad": NetworkMethod("adagrad"),
    "pasan": _public("adaptive-sgd", "pasan"),
    "pagan": _public("adagrad", "pagan"),
    "pagan-adam": _public("adam", "pagan"),
    "pasan-learned": NetworkMethod("adaptive-sgd", "pasan"),
    "pagan-learned": NetworkMethod("adagrad", "pagan"),
    "adadps": _public("divided", "widths"),
    "dp-sgd-whitened": _public("whitened", "widths"),
    "dp-adam-whitened": _public("adam-whitened", "widths"),
    "scale-then-privatize": NetworkMethod("adam", "scale-then-privatize"),
    "dp-kfc": NetworkMethod("kfc", given="public rows", kronecker="both"),
    "kronecker-adam": NetworkMethod("adam", given="public rows", kronecker="inputs"),
    "dp-sgd-standardised": _public("sgd", standardised=True),
    "dp-adam-standardised": _public("adam", standardised=True),
    "pagan-adam-standardised": _public("adam", "pagan", standardised=True),
    "scale-then-privatize-standardised": NetworkMethod(
        "adam", "scale-then-privatize", "public rows", standardised=True
    ),
}
"""Methods of other papers, each by `privagrad.torch` or as in `privagrad.methods`: DP-AdamBC (Tang
et al. 2024), the low-pass filter of DOPPLER (Zhang et al. 2024), the Kalman filter (the idea of
DiSK, Zhang et al. 2024), AdaDPS (Li et al. 2022), scale-then-privatize (Ganesh et al. 2025), DP-KFC
(Molina et al. 2026, here with factors from the public rows)."""

DEFAULT_METHODS = "adam,dp-sgd,dp-adam,pagan,pagan-adam,scale-then-privatize"


def methods_for(columns: bool) -> tuple[str, ...]:
    """The methods for a task; only raw columns can be standardised."""
    return tuple(
        name for name, method in NETWORK_METHODS.items() if columns or not method.standardised
    )
