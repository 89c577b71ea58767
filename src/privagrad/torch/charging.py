"""What a training is charged for: the batches that it draws and the sums that it releases."""

from __future__ import annotations

import math
import warnings
import zlib
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from privagrad.privacy.events import GaussianEvent
from privagrad.torch.accountant import Accountant, Charge
from privagrad.torch.guards.collation import UnpaddedRows
from privagrad.torch.guards.loss import LossGuard
from privagrad.torch.optimizer import PrivateOptimizer


@dataclass(frozen=True)
class BatchPart:
    """A batch, or a part of one, that the loader hands out; size None: any.

    `shares` is with how much each row counts, where users are protected; `number` which batch of
    the training it is, where noise is correlated.
    """

    size: int | None
    first: bool
    last: bool
    shares: Tensor | None = None
    number: int | None = None


class BatchCharges:
    """Charges one training for every batch that its loaders hand out and for every release.

    A batch is charged when its first part is handed out, whether the loop then takes a step or
    not: a loop that skips batches has looked at them. That pays for one release from this batch,
    which is charged again if its noise is not what it was when the batch was drawn. Every other
    release costs a release over all rows.

    Correlated noise is charged by blocks of as many batches as it has bands, at the first one that
    is handed out; other releases, and other noise, are refused.

    Parameters
    ----------
    accountant : Accountant
    event : GaussianEvent
        A release of one batch, at any noise; of all batches of a block of correlated noise.
    once : bool
        Whether a pass holds every row at most once: a pass then costs one release, that of its
        least noise.
    """

    _optimizer: PrivateOptimizer
    _guard: LossGuard

    def __init__(self, accountant: Accountant, event: GaussianEvent, once: bool) -> None:
        self.accountant, self.event, self.once = accountant, event, once
        self._iterator = self._paid_iterator = 0
        self._fresh = False
        self._block = -1
        self._paid: Charge | None = None
        self._paid_run = ""
        self._paid_noise = math.inf

    def connect(self, optimizer: PrivateOptimizer, guard: LossGuard) -> None:
        """Announce every part of a batch to the optimizer and the guard of the training."""
        self._optimizer, self._guard = optimizer, guard
        optimizer.step_done, guard.other_batch = guard.step_done, self.spoil

    def __deepcopy__(self, memo: Any) -> BatchCharges:
        """A copy of a loader draws for the same training."""
        return self

    def begin(self) -> int:
        """A new pass over the rows; all iterators that were begun before have ended."""
        self._iterator += 1
        return self._iterator

    def order(self, settings: object) -> None:
        """The order in which the loader of this process takes rows in this pass."""
        self._optimizer.order_of_rows = float(zlib.crc32(repr(settings).encode()))

    def check(self, iterator: int) -> None:
        """Refuse an iterator that has ended because another has begun."""
        if iterator != self._iterator:
            raise RuntimeError(
                "Expected one iterator at a time over the private data loader, found that a newer "
                "one has begun: steps could not be told which batch they use. Finish one loop "
                "before the next, and look at rows with a data loader of your own."
            )

    def hand_out(self, iterator: int, part: BatchPart, batch: Any, unpadded: UnpaddedRows) -> Any:
        """Charge and announce what this iterator gives the loop next, and return it.

        `unpadded` are rows that are padded in the batch, as they are without padding.
        """
        self.check(iterator)
        if part.first:
            if self._begins_to_cost(iterator, part):
                self._paid, self._paid_iterator = None, iterator
            self._pay(self._optimizer.noise_multiplier)
            self._fresh = True
        return self._announce(part, batch, unpadded)

    def _begins_to_cost(self, iterator: int, part: BatchPart) -> bool:
        """Whether this batch is not paid for by the charge of an earlier one."""
        if part.number is None:
            return not self.once or iterator != self._paid_iterator
        before, self._block = self._block, part.number // self.event.bands
        return self._block != before

    def _announce(self, part: BatchPart, batch: Any, unpadded: UnpaddedRows) -> Any:
        self._optimizer.tape.begin_batch()
        self._optimizer.tape.drawn = part.size
        self._optimizer.begin_part(part.first, part.last, part.shares, part.number)
        return self._guard.batch(batch, part.size or 0, unpadded)

    def leave(self) -> None:
        """Drop whatever was added of the last batch; it pays for no later release."""
        self._fresh = False
        self._announce(BatchPart(None, first=True, last=True), None, {})

    def spoil(self) -> None:
        """Another batch than the last one is used: it pays for no release."""
        self._fresh = False
        self._optimizer.shares = None

    def release(self, noise: float) -> bool:
        """Charge a release with this noise, before it is made; whether a drawn batch pays for it.

        It is else charged as one over all rows.
        """
        self.accountant.check_process()
        if self.event.bands > 1 and not self._fresh:
            raise RuntimeError(
                "Expected one step for each batch of the data loader that make_private returned, "
                "with correlated noise, found a step on a batch from elsewhere, or a second one: "
                "rows would be in several of the steps whose noise is correlated. Nothing was "
                "released. Leave correlation= out for such loops."
            )
        if self._fresh:
            self._fresh = False
            self._pay(noise)
            return True
        # No sampling makes a batch from elsewhere, or one used before, cheaper.
        of_all_rows = GaussianEvent(
            1.0, purpose=self.event.purpose, under=self.event.relation, unit=self.event.unit
        )
        self.accountant.charge(_at(of_all_rows, noise))
        if self.event.sampling == "poisson" and noise > 0:
            warnings.warn(
                "A step was taken on a batch that the private data loader did not draw for it: it "
                "is charged as if it held all rows. Take one step for each batch of the data "
                "loader that make_private returned, or set poisson_sampling=False.",
                UserWarning,
                stacklevel=4,
            )
        return False

    def _pay(self, noise: float) -> None:
        """Charge the last batch, or in a pass of distinct rows the pass, for this noise.

        With correlated noise the block.
        """
        if self.event.bands > 1 and noise != self._paid_noise < math.inf:
            self._fresh = False
            raise RuntimeError(
                f"Expected noise_multiplier={self._paid_noise!r} for the whole training with "
                f"correlated noise, found {noise!r}: what is taken away of earlier noise would not "
                "be as large. Leave correlation= out, or make another training private."
            )
        if self._paid_run != self.accountant.run:
            # Paid before a checkpoint was loaded: whoever resumes from that one does not see it.
            self._paid, self._paid_run = None, self.accountant.run
        if self._paid is None:
            self._paid = self.accountant.charge(_at(self.event, noise))
        elif noise < self._paid_noise or (noise != self._paid_noise and not self.once):
            self._paid = self.accountant.exchange(self._paid, _at(self.event, noise))
        else:
            return
        self._paid_noise = noise


def _at(event: GaussianEvent, noise: float) -> GaussianEvent | None:
    """The event at this noise; None without noise."""
    if noise == event.noise_multiplier:
        return event
    return replace(event, noise_multiplier=noise) if noise > 0 else None
