"""Batches of rows that take turns, for correlated noise: `make_private(correlation=...)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from numpy.random import Generator
from torch.utils.data import Sampler

from privagrad._internal import validate
from privagrad.privacy.correlation import coefficients_of
from privagrad.privacy.sampling import Batches
from privagrad.torch.processes import Processes

_ENDLESS = 2**40
"""More batches than any training draws."""

MOST_IN_MEMORY = 5
"""As many bands "auto" takes at most: the history then has four numbers of 4 bytes a parameter."""


class CyclicBatches(Sampler[list[int]]):
    """Poisson batches of one of `bands` groups of rows after the other, over all passes.

    Attributes
    ----------
    number : int
        That of the batch that was drawn last, counted from 0 over all passes.

    Guarantees
    ----------
    Batch number t holds the rows in places t, t + bands, t + 2 bands, ... of `rows`, taken modulo
    bands, each independently with probability bands · batch_size over the number of rows. No
    number is drawn twice.
    """

    def __init__(
        self, rows: Sequence[int], batch_size: int, steps: int, bands: int, generator: Generator
    ) -> None:
        self.rows, self.share, self.batch_size, self.steps = rows, rows, batch_size, steps
        batches = Batches(len(rows), batch_size, _ENDLESS, "cyclic_poisson", bands)
        self.rate = batch_size / len(rows)
        self.number = -1
        self._samples = batches.draw(generator)

    def __len__(self) -> int:
        return self.steps

    def __deepcopy__(self, memo: Any) -> CyclicBatches:
        """A copy of a loader draws on: with a copy of the key it would repeat batches."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "Expected one data loader for one private training, found a pickle of it: it would "
            "draw the same batches again. Call make_private in the other process."
        )

    def __iter__(self) -> Iterator[list[int]]:
        rows = self.rows
        for _ in range(self.steps):
            self.number += 1
            yield [rows[row] for row in self._samples.of_step(self.number).tolist()]


def bands_of(correlation: Any) -> int:
    """The number of bands, as `make_private` is given it."""
    if correlation is None:
        return 1
    if correlation == "auto":
        raise ValueError(
            "Expected a number of bands as correlation=, found 'auto': it needs the budget and the "
            "number of steps. Use make_private_with_epsilon, or give a number."
        )
    bands = validate.integer("correlation", correlation)
    coefficients_of(bands)  # refuses too many
    return bands


def refuse_learned(bands: int, learned: bool) -> None:
    """Refuse an ellipsoid that changes during a training with correlated noise."""
    if bands > 1 and learned:
        raise ValueError(
            "Expected one ellipsoid for the whole training with correlation=, found one that is "
            "learned from the private gradients: noise of another shape does not cancel. Give "
            "public_loader=, tensors, or no ellipsoid."
        )


def refuse_with_correlation(
    *, processes: Processes, poisson: bool, grouped: bool, clipping: str, noise_multiplier: float
) -> None:
    """Refuse what correlated noise is not known to be private with, or would not cancel in."""
    if noise_multiplier == 0:
        raise ValueError(
            "Expected noise_multiplier > 0 with correlation=, found 0: there is no noise to "
            "correlate. Leave correlation= out."
        )
    if processes.count > 1:
        raise ValueError(
            f"Expected one process with correlation=, found {processes.count}: the noise of "
            "earlier steps would have to stay with its coordinates in each. Leave correlation= out."
        )
    if not poisson:
        raise ValueError(
            "Expected poisson_sampling=True with correlation=, found False: a row must not be in "
            "two of the batches whose noise is correlated. Leave poisson_sampling out."
        )
    if grouped:
        raise ValueError(
            "Expected no groups= with correlation=, found some: rows take turns, and a user with "
            "rows in several turns would count more than once."
        )
    if clipping == "adaptive":
        raise ValueError(
            "Expected clipping='flat', 'automatic' or 'per_layer' with correlation=, found "
            "'adaptive': where the bound changes, noise of earlier steps does not cancel."
        )
