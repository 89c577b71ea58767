"""A warning for rows that are fitted again without a budget: the epsilons add up."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from threading import Lock

from privagrad.data.tables import Table

_MOST = 1024
_fits: OrderedDict[int, int] = OrderedDict()
"""Checksums of tables and how often each was fitted: in this process alone, never written."""

_lock = Lock()


def warn_of_repeated_fit(table: Table) -> None:
    """Count a private fit of these rows that no budget pays; the second one warns."""
    checksum = table.checksum
    with _lock:
        count = _fits.pop(checksum, 0) + 1
        _fits[checksum] = count
        if len(_fits) > _MOST:
            _fits.popitem(last=False)
    if count == 2:
        warnings.warn(
            f"{count} private fits of the same rows in this process: their epsilons add up, and "
            "so do those of further ones. State a budget that is charged for each of them: "
            "ledger= and dataset=.",
            UserWarning,
            stacklevel=4,
        )
