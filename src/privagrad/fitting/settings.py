"""How rows are fitted, whichever door they come through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from privagrad._internal.validate import Vector
from privagrad.glm.losses import Loss
from privagrad.linear import BY_GRADIENTS, Choices, Solver
from privagrad.privacy.ledger import Ledger
from privagrad.privacy.noise import Noise, RandomState

SQUARED = "squared"
"""The name of least squares, whose loss is that of `BY_GRADIENTS` where gradients minimise it."""


@dataclass(frozen=True)
class FitSettings:
    """How a table is fitted, and which budget pays.

    Attributes
    ----------
    epsilon : float
        The budget; infinite: no privacy.
    loss : Loss
        What is minimised, with two classes where there are classes.
    delta : float or None
        None: that of the budget that pays, or else below 1/(10 n).
    squares : {"auto", "moments", "gradients"} or None
        How squared errors are minimised, if they are.
    intercept : bool
        Whether there is one.
    class_weights : array, "balanced" or None
        Public weights in the order of the target's categories; "balanced": learned.
    choices : Choices
        What the user sets instead of the recipe.
    random_state : None, int or Generator
        A seed makes a model that is not private.
    noise : {"gaussian", "discrete"}
        The kind of noise.
    evaluated : bool
        Whether the same epsilon pays for an evaluation and for the curvature.
    strict : bool
        Whether fits that noise makes useless are refused, rather than warned of.
    dataset, ledger : str and Ledger, or None
        The budget that pays; None: the run is not charged to any budget.
    table : str
        What the rows are called.
    """

    epsilon: float
    loss: Loss
    delta: float | None = None
    squares: Solver | None = None
    intercept: bool = True
    class_weights: Vector | Literal["balanced"] | None = None
    choices: Choices = field(default_factory=Choices)
    random_state: RandomState = None
    noise: Noise = "gaussian"
    evaluated: bool = True
    strict: bool = True
    dataset: str | None = None
    ledger: Ledger | None = None
    table: str = "rows in memory"

    @property
    def loss_name(self) -> str:
        return self.loss.name if self.squares is None else SQUARED


def loss_named(name: str, parameter: float | None) -> Loss:
    """The loss of a model's file."""
    return BY_GRADIENTS if name == SQUARED else Loss(name, parameter)
