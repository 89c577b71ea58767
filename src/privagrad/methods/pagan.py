"""PAGAN: AdaGrad with noise in the ellipsoid's shape (Algorithm 2)."""

from __future__ import annotations

from typing import ClassVar

from privagrad.geometry.scales import SCALE_POWERS
from privagrad.methods._base import Shape
from privagrad.methods.adagrad import AdaGrad


class PAGAN(AdaGrad):
    """AdaGrad's step on gradients bounded to E_A plus noise N(0, z² A⁻¹)/b."""

    name: ClassVar[str] = "pagan"
    shape: ClassVar[Shape] = "ellipsoid"
    scale_power: ClassVar[float] = SCALE_POWERS["pagan"]
