"""The networks that methods are compared on, the methods, and what every method tries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shape = Literal["ball", "pasan", "pagan", "adadps", "scale-then-privatize"]
"""The ellipsoid: C = 1, the paper's powers of the second moments, σ⁻², or 1/v of Adam."""
Steps = Literal["sgd", "momentum", "adam", "adam-bc", "adagrad", "adaptive-sgd", "divided"]
"""The optimizer: `divided` is SGD whose steps are divided by the widths of the ellipsoid."""
Filter = Literal["none", "low-pass", "kalman"]

STEP_SIZES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""In units in which a first step of 1 changes the loss of a typical public example by about 1."""
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
    standardised : bool
        Whether columns are first centred and divided by their deviations in the public rows.
    private : bool
        False: no bound and no noise.
    """

    steps: Steps
    shape: Shape = "ball"
    given: Literal["nothing", "public rows"] = "nothing"
    filter: Filter = "none"
    standardised: bool = False
    private: bool = True

    @property
    def public_shape(self) -> bool:
        """Whether public rows determine the ellipsoid."""
        return self.shape != "ball" and self.given == "public rows"


def _public(steps: Steps, shape: Shape = "ball", standardised: bool = False) -> NetworkMethod:
    return NetworkMethod(steps, shape, "public rows", standardised=standardised)


NETWORK_METHODS = {
    "adam": NetworkMethod("adam", private=False),
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
    "adadps": _public("divided", "adadps"),
    "scale-then-privatize": NetworkMethod("adam", "scale-then-privatize"),
    "dp-sgd-standardised": _public("sgd", standardised=True),
    "dp-adam-standardised": _public("adam", standardised=True),
    "pagan-standardised": _public("adagrad", "pagan", standardised=True),
    "adadps-standardised": _public("divided", "adadps", standardised=True),
    "scale-then-privatize-standardised": NetworkMethod(
        "adam", "scale-then-privatize", "public rows", standardised=True
    ),
}
"""Methods of other papers, each by `privagrad.torch` or as in `privagrad.methods`: DP-AdamBC (Tang
et al. 2024), the low-pass filter of DOPPLER (Zhang et al. 2024), the Kalman filter (the idea of
DiSK, Zhang et al. 2024), AdaDPS (Li et al. 2022), scale-then-privatize (Ganesh et al. 2025)."""
