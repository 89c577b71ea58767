"""Which coordinates of all parameters belong to which process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from privagrad.torch.processes import Processes
from privagrad.torch.scales import accurate

_EXCHANGED = 2**18
"""Coordinates of all shares together that are exchanged at once: what a buffer holds."""


class Piece(NamedTuple):
    """Coordinates of one tensor, flat, and where they are in a row that is exchanged."""

    name: str
    place: slice
    at: slice


class Received(NamedTuple):
    """Coordinates of a tensor that this process owns, and every process's values of them."""

    name: str
    place: slice
    values: list[Tensor]


class Shares:
    """Equal ranges of the coordinates of all tensors, one range for each process.

    All tensors one after the other are cut into as many ranges of ceil(total / count) coordinates
    as there are processes; the last ones may be shorter, or empty. Every coordinate is in exactly
    one of them.

    Parameters
    ----------
    processes : Processes
    tensors : mapping of str to Tensor
        The same names and shapes in all processes.

    Attributes
    ----------
    size : int
        The number of all coordinates.
    own : dict of str to slice
        Those of this process, by tensor.
    width : int
        How many of each process's coordinates are exchanged at once.
    """

    def __init__(self, processes: Processes, tensors: Mapping[str, Tensor]) -> None:
        self.processes = processes
        self._starts, self.size = {}, 0
        for name, tensor in tensors.items():
            self._starts[name] = (self.size, self.size + tensor.numel())
            self.size += tensor.numel()
        self._each = -(-self.size // processes.count)
        kinds = {accurate(tensor.detach()).dtype for tensor in tensors.values()}
        self._kind = torch.float64 if torch.float64 in kinds else torch.float32
        self.own = {piece.name: piece.place for piece in self._of(processes.rank, 0, self._each)}
        self.width = min(max(self._each, 1), max(1, _EXCHANGED // processes.count))
        self._rounds = [
            [list(self._of(rank, start, start + self.width)) for rank in range(processes.count)]
            for start in range(0, self._each, self.width)
        ]

    def _of(self, rank: int, start: int, stop: int) -> Iterator[Piece]:
        """The pieces of the coordinates from `start` to before `stop` of a process's share."""
        first = rank * self._each + start
        last = min(rank * self._each + stop, (rank + 1) * self._each, self.size)
        for name, (low, high) in self._starts.items():
            begin, end = max(first, low), min(last, high)
            if begin < end:
                yield Piece(name, slice(begin - low, end - low), slice(begin - first, end - first))

    def exchanged(self, tensors: Mapping[str, Tensor]) -> Iterator[list[Received]]:
        """Every process's values of this process's coordinates, some coordinates at a time.

        `tensors` are flat. They may be written to where they have been received.
        """
        if self.processes.count == 1:
            yield [Received(name, slice(None), [tensor]) for name, tensor in tensors.items()]
            return
        for pieces in self._rounds:
            rows = self._rows(tensors, pieces)
            received = self.processes.exchange(rows).cpu()
            yield [
                Received(name, place, [row[at] for row in received])
                for name, place, at in pieces[self.processes.rank]
            ]

    def gather(self, tensors: Mapping[str, Tensor]) -> None:
        """Give all processes the values that the owners of the coordinates have, in place."""
        for pieces in self._rounds if self.processes.count > 1 else ():
            (row,) = self._rows(tensors, [pieces[self.processes.rank]])
            received = self.processes.gather(row)
            for of_process, values in zip(pieces, received, strict=True):
                for name, place, at in of_process:
                    tensors[name][place] = values[at]

    def _rows(self, tensors: Mapping[str, Tensor], pieces: list[list[Piece]]) -> Tensor:
        """The values of the pieces, a row for each list of them."""
        device = self.processes.device
        rows = torch.zeros(len(pieces), self.width, dtype=self._kind, device=device)
        for row, of_process in zip(rows, pieces, strict=True):
            for name, place, at in of_process:
                row[at] = tensors[name][place]
        return rows
