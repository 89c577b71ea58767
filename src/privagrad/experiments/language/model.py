"""Embedding, two LSTM layers, linear: 2,160,320 parameters at the paper's sizes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from privagrad.torch.per_example.linear_cross_entropy import LinearCrossEntropy

WIDTH = 120
_EVALUATED = 35


class LanguageModel(nn.Module):
    """Predicts the next word. `forward(words, next_words)` is the mean loss.

    Everything starts as PyTorch has it. Embeddings of N(0, 1) matter: from the small ones usual in
    language models hardly any gradient comes through the LSTM, and noise drowns it.
    """

    def __init__(self, vocabulary: int, width: int = WIDTH, layers: int = 2) -> None:
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
    """exp of the mean loss over a stream of words, all of them or the first `words`.

    The LSTM's state is carried along the stream, or reset every 35 words.
    """
    model.eval()
    stream = stream[: len(stream) if words is None else words + 1]
    inputs, targets = stream[:-1], stream[1:]
    total, state = 0.0, None
    if carried:
        for start in range(0, len(inputs), 4096):
            part = slice(start, start + 4096)
            hidden, state = model.lstm(model.embedding(inputs[None, part]), state)
            total += float(model.decoder(hidden, targets[None, part])) * len(inputs[part])
    else:
        for start in range(0, len(inputs), 128 * _EVALUATED):
            part = slice(start, min(start + 128 * _EVALUATED, len(inputs)))
            count = (part.stop - start) // _EVALUATED
            ends = [(start, count, _EVALUATED), (start + count * _EVALUATED, 1, part.stop)]
            for first, rows, length in ends:
                length = min(length, part.stop - first)
                if rows and length:
                    span = slice(first, first + rows * length)
                    hidden, _ = model.lstm(model.embedding(inputs[span].view(rows, length)))
                    loss = float(model.decoder(hidden, targets[span].view(rows, length)))
                    total += loss * rows * length
    model.train()
    return math.exp(min(total / len(inputs), 50.0))
