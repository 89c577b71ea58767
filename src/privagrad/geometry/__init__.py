"""Ellipsoids and convex domains with exact projections."""

from privagrad.geometry.domains import Box, L1Ball, L2Ball, Simplex, WholeSpace
from privagrad.geometry.ellipsoid import Ellipsoid

__all__ = ["Box", "Ellipsoid", "L1Ball", "L2Ball", "Simplex", "WholeSpace"]
