"""Texts as numbers: a vocabulary, and sequences of words, which are the units of privacy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from privagrad._internal import validate

Batch = tuple[Tensor, Tensor]

UNKNOWN, END = "<unk>", "<eos>"
VOCABULARY = 8000
LENGTH = 35
_SORTED = 0.9
"""The share of neighbouring lines in alphabetical order above which a file is a sorted list."""
_QUICK = {"vocabulary": 1000, "train": 40_000, "valid": 4_000, "public": 20_000}
"""Sizes in words of the vocabulary and the texts of a quick run."""


def read_tokens(path: Path) -> list[str]:
    """The words of a file; every line ends with the word <eos>."""
    if not path.is_file():
        raise FileNotFoundError(f"Expected a text file, found nothing at {path}.")
    with path.open(encoding="utf-8") as lines:
        return _words(lines)


def _words(lines: Iterable[str]) -> list[str]:
    return [token for line in lines for token in (*line.split(), END)]


def read_folder(folder: Path) -> list[str]:
    """The words of all text files in a folder."""
    files = sorted(p for p in folder.glob("*") if p.suffix in (".txt", ".tokens"))
    if not files:
        raise FileNotFoundError(f"Expected .txt or .tokens files in {folder}, found none.")
    return [token for file in files for token in _words(_unsorted(file))]


def _unsorted(file: Path) -> list[str]:
    """The lines of a file; in random order if it is a sorted list.

    In alphabetical order every line would predict the first words of the next, which is of no use
    for any other text.
    """
    with file.open(encoding="utf-8") as text:
        lines = list(text)
    in_order = sum(line <= following for line, following in pairwise(lines))
    if in_order > _SORTED * (len(lines) - 1):
        random.Random(0).shuffle(lines)
    return lines


@dataclass(frozen=True)
class Vocabulary:
    """A number for each of the most frequent words, and 0 for all others."""

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
    """Examples of `length` words, each word with the word that follows it as target.

    The last target of an example is the first word of the next example.
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

    def __getitems__(self, rows: list[int]) -> Batch:
        return self.inputs[rows], self.targets[rows]


def collate(batch: Batch | list[Batch]) -> Batch:
    """A batch of `Sequences` as it is; a list of examples stacked."""
    if isinstance(batch, tuple):
        return batch
    inputs, targets = zip(*batch, strict=True)
    return torch.stack(inputs), torch.stack(targets)


@dataclass(frozen=True)
class Texts:
    """The private text, the held-out texts and the public text as numbers."""

    vocabulary: Vocabulary
    train: Tensor
    valid: Tensor
    test: Tensor | None
    public: Tensor | None

    def require_public(self, method: str) -> Tensor:
        """The public text; an error if `method` needs it and there is none."""
        if self.public is None:
            raise ValueError(
                f"Expected public text for {method}, found none: give --public-dir, or leave the "
                "method out."
            )
        return self.public


def read_texts(
    folder: Path, public: Path | None, vocabulary: str = "train", quick: bool = False
) -> Texts:
    """Read train.txt, valid.txt and, if it exists, test.txt of a folder; and the public text.

    The vocabulary is that of the text "train", which is not private, or "public". A quick run reads
    the beginning of the texts only.
    """
    validate.choice("vocabulary", vocabulary, ("train", "public"))
    train, valid = read_tokens(folder / "train.txt"), read_tokens(folder / "valid.txt")
    test = folder / "test.txt"
    others = read_folder(public) if public is not None else None
    if quick:
        train, valid = train[: _QUICK["train"]], valid[: _QUICK["valid"]]
        others = others and others[: _QUICK["public"]]
    source = train if vocabulary == "train" else others
    if source is None:
        raise ValueError("Expected --public-dir with --vocabulary public, found none.")
    words = Vocabulary.of(source, _QUICK["vocabulary"] if quick else VOCABULARY)
    return Texts(
        words,
        words.encode(train),
        words.encode(valid),
        words.encode(read_tokens(test)) if test.is_file() and not quick else None,
        None if others is None else words.encode(others),
    )
