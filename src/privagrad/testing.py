"""Tests that users run on their own objectives for `privagrad.minimize`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.random import Generator

from privagrad._internal import validate
from privagrad._internal.validate import Vector
from privagrad.methods.objective import APART, Objective, ObjectiveGradients
from privagrad.privacy.sampling import Rows

_BATCHES = 12
_LARGEST_BATCH = 40
_MOST_AT_ONCE = 2000
_CLOSE = 1e-6
"""How far rounding may violate the inequality of convexity."""


def check_objective(
    objective: Objective,
    *,
    make: Callable[[Rows], Objective] | None = None,
    points: int = 4,
    scale: float = 1.0,
    random_state: int = 0,
) -> None:
    """Search for violations of the contract of `Objective`.

    Parameters
    ----------
    objective : Objective
        The objective to check.
    make : callable, optional
        Builds the same objective from some of its examples: ``make(rows)`` numbers example
        ``rows[k]`` as k. With it the check also finds statistics of all examples that were
        computed when the objective was built, such as a mean that is subtracted.
    points : int
        The number of random points to check, besides 0.
    scale : float
        The standard deviation of the coordinates of these points.
    random_state : int
        The seed of the points and batches.

    Raises
    ------
    AssertionError
        If the gradient of an example depends on the other examples of the batch, on earlier calls
        or, with `make`, on examples outside the batch; if a call changes its arguments; if shapes
        are wrong; and, if there is a `value`, if the gradients are not its subgradients.

    Notes
    -----
    A check can find a violation, but cannot prove that there is none: the guarantee of `minimize`
    rests on the code of the objective. A branch that is taken only for rare examples or for distant
    points is not checked.

    Examples
    --------
    >>> import numpy as np
    >>> class Mean:
    ...     def __init__(self, Z):
    ...         self.Z, (self.n_examples, self.dim) = Z, Z.shape
    ...     def per_example_gradients(self, x, rows):
    ...         return x - self.Z[rows]
    >>> Z = np.random.default_rng(0).normal(size=(100, 3))
    >>> check_objective(Mean(Z), make=lambda rows: Mean(Z[rows]))
    """
    if not isinstance(objective, Objective):
        raise TypeError(
            "Expected an objective with dim, n_examples and per_example_gradients(x, rows), found "
            f"{type(objective).__name__}."
        )
    validate.integer("points", points, least=0)
    rng = np.random.default_rng(random_state)
    dim = ObjectiveGradients(objective).dim
    places = [np.zeros(dim), *(scale * rng.standard_normal((points, dim)))]
    for x in places:
        _check_shapes(objective, x)
        _check_rows(objective, x, rng)
        if make is not None:
            _check_rebuilt(objective, make, x, rng)
    value = getattr(objective, "value", None)
    if value is not None:
        _check_value(objective, value, places)


def _gradients(objective: Objective, x: Vector, rows: Rows) -> Vector:
    """The gradients, with checks of their shape and of the arguments afterwards."""
    given, asked = x.copy(), rows.copy()
    found = np.array(objective.per_example_gradients(given, asked), dtype=np.float64)
    expected = (rows.size, objective.dim)
    _require(
        found.shape == expected,
        f"Expected per_example_gradients of shape {expected}, found shape {found.shape}.",
    )
    _require(
        np.array_equal(given, x) and np.array_equal(asked, rows),
        "Expected per_example_gradients to leave x and rows as they are, found that it changed "
        "them: work on a copy.",
    )
    return found


def _check_shapes(objective: Objective, x: Vector) -> None:
    for rows in (np.arange(0), np.arange(1), np.arange(objective.n_examples)[-2:]):
        _gradients(objective, x, rows)


def _check_rows(objective: Objective, x: Vector, rng: Generator) -> None:
    """An example's gradient is the same alone, in any batch, in any order, at any time."""
    n = objective.n_examples
    alone: dict[int, Vector] = {}
    batches = [rng.integers(n, size=rng.integers(1, _LARGEST_BATCH + 1)) for _ in range(_BATCHES)]
    for row in np.unique(np.concatenate(batches)).tolist():
        alone[row] = _gradients(objective, x, np.array([row]))[0]
    sizes = _coordinate_sizes(list(alone.values()))
    for rows in (*batches, rng.permutation(n)[:_MOST_AT_ONCE]):
        found = _gradients(objective, x, rows)
        for row, gradient in zip(rows.tolist(), found, strict=True):
            if row in alone:
                when = "in a batch with others and alone"
                _require_same(gradient, alone[row], row, when, sizes)
    for row in list(alone)[:_LARGEST_BATCH]:
        again = _gradients(objective, x, np.array([row]))[0]
        _require_same(again, alone[row], row, "before and after calls for other examples", sizes)


def _coordinate_sizes(gradients: list[Vector]) -> Vector:
    """The largest entry of each coordinate: an ellipsoid may weigh a small one up."""
    entries = np.abs(gradients)
    return np.asarray(np.where(np.isfinite(entries), entries, 0.0).max(axis=0))


def _check_rebuilt(
    objective: Objective, make: Callable[[Rows], Objective], x: Vector, rng: Generator
) -> None:
    """An example's gradient is the same whatever other examples the objective was built from."""
    n = objective.n_examples
    kept = np.sort(rng.permutation(n)[: max(1, n // 2)])
    part = make(kept)
    _require(
        (part.dim, part.n_examples) == (objective.dim, kept.size),
        f"Expected make(rows) of dimension {objective.dim} with {kept.size} examples, found "
        f"{part.dim} and {part.n_examples}.",
    )
    places = rng.integers(kept.size, size=min(kept.size, _LARGEST_BATCH))
    whole, rebuilt = _gradients(objective, x, kept[places]), _gradients(part, x, places)
    sizes = _coordinate_sizes(list(whole))
    for row, one, other in zip(kept[places].tolist(), whole, rebuilt, strict=True):
        when = "built from all examples and built from half of them"
        _require_same(one, other, row, when, sizes)


def _check_value(
    objective: Objective, value: Callable[[Vector], float], places: list[Vector]
) -> None:
    """f(y) ≥ f(x) + ⟨∇f(x), y - x⟩ for the mean f over all examples."""
    everything = np.arange(objective.n_examples)
    for x in places:
        gradient = _gradients(objective, x, everything).mean(axis=0)
        here = float(value(x.copy()))
        for y in places:
            there = float(value(y.copy()))
            line = here + float(gradient @ (y - x))
            slack = _CLOSE * (1 + abs(here) + abs(there) + abs(line))
            _require(
                there >= line - slack,
                "Expected value(y) >= value(x) + <mean gradient at x, y - x>, as for a convex "
                f"objective and its gradients, found {there:.6g} < {line:.6g}: value and "
                "per_example_gradients disagree, or the objective is not convex.",
            )


def _require_same(one: Vector, other: Vector, row: int, when: str, sizes: Vector) -> None:
    """The same up to rounding: as vectors, and in each coordinate beside its size in others."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart = float(np.linalg.norm(one - other))
        size = max(float(np.linalg.norm(one)), float(np.linalg.norm(other)))
        close = apart <= APART * size and bool((np.abs(one - other) <= APART * sizes).all())
    same = np.array_equal(one, other, equal_nan=True) or close
    _require(
        same,
        f"Expected one gradient of example {row}, found two that differ by {apart:.3g} (norm "
        f"{size:.3g}): {when}. It must depend on x, on this example and on public numbers alone.",
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
