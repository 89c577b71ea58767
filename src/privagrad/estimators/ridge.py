"""Least squares: the estimator."""

from __future__ import annotations

from privagrad._internal import validate
from privagrad.estimators._fitted import LedgerLike
from privagrad.estimators._tables import BoundsLike, SchemaLike
from privagrad.estimators.linear import PrivateLinearRegressor
from privagrad.fitting import SQUARED
from privagrad.linear import BY_GRADIENTS, Solver
from privagrad.privacy.noise import Noise, RandomState

SOLVERS = ("auto", "moments", "gradients")


class PrivateRidge(PrivateLinearRegressor):
    """Linear least squares under differential privacy, without tuning: a mean is predicted.

    The parameters that are not listed here, the attributes and the guarantees are those of
    `PrivateQuantileRegressor`.

    "moments" releases the matrix of second moments of columns and target once, and solves the
    normal equations. It shrinks the weights in directions that noise hides, so that there is no
    penalty to choose. "gradients" is `PrivateHuberRegressor`, whose noise grows more slowly with
    the number of columns; where errors are skewed it does not predict the mean. "auto" chooses by
    a public rule: "moments" if the noise multiplier times d/n is at most 0.004, "gradients" if not
    or if `steps`, `batch_size` or `step_size` is given. These three and `radius` are for
    "gradients" alone. With ``epsilon=inf`` the result is that of ordinary least squares.

    Parameters
    ----------
    solver : {"auto", "moments", "gradients"}
        How squared errors are minimised.

    Attributes
    ----------
    coef_noise_, intercept_noise_ : array of shape (d,) and float
        The standard deviations of the noise in the coefficients and the intercept; with
        "gradients" and without `evaluate` upper bounds.
    """

    solver: Solver
    _loss = BY_GRADIENTS
    _losses = (SQUARED,)

    def __init__(
        self, epsilon: float = 1.0, *, delta: float | None = None, bounds: BoundsLike = None,
        target_bounds: BoundsLike = None, fit_intercept: bool = True, solver: Solver = "auto",
        steps: int | None = None, batch_size: int | None = None, step_size: float | None = None,
        radius: float | None = None, random_state: RandomState = None, verbose: bool | None = None,
        noise: Noise = "gaussian", schema: SchemaLike = None, ledger: LedgerLike = None,
        dataset: str | None = None, evaluate: bool = False,
    ) -> None:  # fmt: skip
        self._assign(locals())

    @property
    def _squares(self) -> Solver:
        validate.choice("solver", self.solver, SOLVERS)
        return self.solver
