"""What a training is charged for: the batches it draws and the sums it releases."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from privagrad.privacy.events import GaussianEvent
from privagrad.torch.guards.collation import Alone
from privagrad.torch.spending import Charge, Spending


@dataclass(frozen=True)
class Part:
    """A batch, or a part of one, that the loader hands out; size None: any."""

    size: int | None
    first: bool
    last: bool


class Draws:
    """Charges one training for every batch that its loaders hand out and for every release.

    A batch is charged when its first part is handed out, whether the loop then takes a step or
    not: a loop that skips batches has looked at them. One release from this batch is paid by
    that, and is charged anew if its noise is not what it was when the batch was drawn. Every
    other release costs a release over all rows.

    Parameters
    ----------
    account : Spending
    event : GaussianEvent
        A release of one batch, at any noise.
    once : bool
        Whether a pass holds every row at most once: a pass then costs one release, that of its
        least noise.
    announce : callable
        Told of each part before the loop has it, and of rows that were padded in it as they are
        alone; returns what the loop gets.
    noise : callable
        The noise multiplier that the next release is expected to have.
    """

    def __init__(
        self,
        account: Spending,
        event: GaussianEvent,
        once: bool,
        announce: Callable[[Part, Any, Alone], Any],
        noise: Callable[[], float],
    ) -> None:
        self.account, self.event, self.once = account, event, once
        self._announce, self._noise = announce, noise
        self._iterator = self._paid_iterator = 0
        self._fresh = False
        self._paid: Charge | None = None
        self._paid_noise = math.inf

    def __deepcopy__(self, memo: Any) -> Draws:
        """A copy of a loader draws for the same training."""
        return self

    def begin(self) -> int:
        """A new pass over the rows; all iterators that were begun before have ended."""
        self._iterator += 1
        return self._iterator

    def check(self, iterator: int) -> None:
        """Refuse an iterator that has ended because another has begun."""
        if iterator != self._iterator:
            raise RuntimeError(
                "Expected one iterator at a time over the private data loader, found that a newer "
                "one has begun: steps could not be told which batch they use. Finish one loop "
                "before the next, and look at rows with a data loader of your own."
            )

    def hand_out(self, iterator: int, part: Part, batch: Any, alone: Alone) -> Any:
        """Charge and announce what this iterator gives the loop next, and return it."""
        self.check(iterator)
        if part.first:
            if not self.once or iterator != self._paid_iterator:
                self._paid, self._paid_iterator = None, iterator
            self._pay(self._noise())
            self._fresh = True
        return self._announce(part, batch, alone)

    def leave(self) -> None:
        """Whatever was added of the last batch is dropped; it pays for no later release."""
        self._fresh = False
        self._announce(Part(None, first=True, last=True), None, {})

    def spoil(self) -> None:
        """Another batch than the last one is used: it pays for no release."""
        self._fresh = False

    def release(self, noise: float) -> None:
        """Charge a release with this noise, before it is made."""
        self.account.check_process()
        if self._fresh:
            self._fresh = False
            self._pay(noise)
            return
        # No sampling makes a batch from elsewhere, or one used before, cheaper.
        whole = GaussianEvent(1.0, purpose=self.event.purpose, under=self.event.relation)
        self.account.charge(_at(whole, noise))
        if self.event.sampling == "poisson" and noise > 0:
            warnings.warn(
                "A step was taken on a batch that the private data loader did not draw for it: it "
                "is charged as if it held all rows. Take one step for each batch of the data "
                "loader that make_private returned, or say poisson_sampling=False.",
                UserWarning,
                stacklevel=4,
            )

    def _pay(self, noise: float) -> None:
        """Charge the last batch, or in a pass of distinct rows the pass, for this noise."""
        if self._paid is None:
            self._paid = self.account.charge(_at(self.event, noise))
        elif noise < self._paid_noise or (noise != self._paid_noise and not self.once):
            self._paid = self.account.exchange(self._paid, _at(self.event, noise))
        else:
            return
        self._paid_noise = noise


def _at(event: GaussianEvent, noise: float) -> GaussianEvent | None:
    """The event at this noise; None without noise."""
    return replace(event, noise_multiplier=noise) if noise > 0 else None
