"""Text as numbers: a vocabulary, and sequences of words that are the units of privacy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

UNKNOWN, END = "<unk>", "<eos>"
VOCABULARY = 8000
LENGTH = 35


def read_tokens(path: Path) -> list[str]:
    """The words of a file, each line ended by a word of its own."""
    if not path.is_file():
        raise FileNotFoundError(f"Expected a text file, found nothing at {path}.")
    tokens: list[str] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            tokens.extend(line.split())
            tokens.append(END)
    return tokens


def read_folder(folder: Path) -> list[str]:
    """The words of all text files in a folder."""
    files = sorted(p for p in folder.glob("*") if p.suffix in (".txt", ".tokens"))
    if not files:
        raise FileNotFoundError(f"Expected .txt or .tokens files in {folder}, found none.")
    return [token for file in files for token in read_tokens(file)]


@dataclass(frozen=True)
class Vocabulary:
    """The most frequent words, and one number for all others."""

    numbers: dict[str, int]

    @classmethod
    def of(cls, tokens: Iterable[str], size: int = VOCABULARY) -> Vocabulary:
        counts = Counter(tokens)
        counts.pop(UNKNOWN, None)
        words = [word for word, _ in counts.most_common(size - 1)]
        return cls({word: number for number, word in enumerate([UNKNOWN, *words])})

    def __len__(self) -> int:
        return len(self.numbers)

    def encode(self, tokens: Iterable[str]) -> Tensor:
        return torch.tensor([self.numbers.get(token, 0) for token in tokens])


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """A stream of words cut into examples: `length` words, and the word that follows each.

    The last target of an example is the first word of the next one.
    """

    def __init__(self, stream: Tensor, length: int = LENGTH) -> None:
        count = (len(stream) - 1) // length
        if count < 1:
            raise ValueError(
                f"Expected a text of more than {length} words, found {len(stream)}: too short for "
                "one example."
            )
        self.inputs = stream[: count * length].view(count, length)
        self.targets = stream[1 : count * length + 1].view(count, length)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.inputs[row], self.targets[row]

    def __getitems__(self, rows: list[int]) -> Any:
        return self.inputs[rows], self.targets[rows]


def collate(batch: Any) -> Any:
    """Batches as `Sequences` gives them; single examples, for templates, stacked."""
    if isinstance(batch, tuple):
        return batch
    inputs, targets = zip(*batch, strict=True)
    return torch.stack(inputs), torch.stack(targets)
