"""The language model: embedding, two LSTM layers, linear layer; 2,160,320 parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from privagrad.experiments.language.corpus import LENGTH
from privagrad.experiments.language.settings import PAPER_WIDTH
from privagrad.torch.per_example.linear_cross_entropy import LinearCrossEntropy

_CARRIED_WORDS, _RESET_EXAMPLES = 4096, 128
"""Words and examples that are evaluated at once."""


class LanguageModel(nn.Module):
    """Predicts the next word. `forward(words, next_words)` is the mean loss.

    All parameters are initialised as in PyTorch. Embeddings of N(0, 1) matter: with the small
    embeddings that are usual in language models, gradients through the LSTM are much smaller than
    the noise.
    """

    def __init__(self, vocabulary: int, width: int = PAPER_WIDTH, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.decoder = LinearCrossEntropy(width, vocabulary)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(words))
        loss: Tensor = self.decoder(hidden, targets)
        return loss


@torch.no_grad()
def perplexity(
    model: LanguageModel, stream: Tensor, carried: bool = True, words: int | None = None
) -> float:
    """exp of the mean loss over a stream of words, or over its first `words` words.

    The LSTM's state is carried along the stream, or reset after every example.
    """
    model.eval()
    stream = stream[: len(stream) if words is None else words + 1]
    inputs, targets = stream[:-1], stream[1:]
    parts = _carried(model, inputs, targets) if carried else _reset(model, inputs, targets)
    total = sum(parts)
    model.train()
    return math.exp(min(total / len(inputs), 50.0))


def _carried(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Iterator[float]:
    """Sums of losses, with the state carried along."""
    state = None
    for start in range(0, len(inputs), _CARRIED_WORDS):
        part = slice(start, start + _CARRIED_WORDS)
        hidden, state = model.lstm(model.embedding(inputs[None, part]), state)
        yield float(model.decoder(hidden, targets[None, part])) * len(inputs[part])


def _reset(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Iterator[float]:
    """Sums of losses, with a new state for every example; the last one may be shorter."""
    whole = len(inputs) // LENGTH * LENGTH
    size = _RESET_EXAMPLES * LENGTH
    parts = [slice(start, min(start + size, whole)) for start in range(0, whole, size)]
    for part in [*parts, slice(whole, len(inputs))]:
        if words := part.stop - part.start:
            shape = (-1, min(LENGTH, words))
            hidden, _ = model.lstm(model.embedding(inputs[part].view(shape)))
            yield float(model.decoder(hidden, targets[part].view(shape))) * words
