"""Training on the public text, without privacy: nothing there needs protection."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam

from privagrad.experiments.language.corpus import Batch
from privagrad.experiments.language.model import LanguageModel
from privagrad.torch.damping import start_from_counts

Report = Callable[[int, int, float, float], None]
"""Called with the step, the number of steps, the perplexity and the epsilon so far."""

_STREAMS, _WINDOW = 20, 70
"""The text is cut into streams; a step sees the next words of each."""
_EPOCHS, _STEP, _RADIUS = 5, 3e-3, 0.5
_WARM_UP = 100
"""Steps in which the step size rises; at most a tenth of all."""
_DROPOUT = 0.2
_EMBEDDING = 0.1
"""Deviation of initial embeddings. Without noise, small ones are better for rare words."""


def pretrained(
    text: Tensor, vocabulary: int, width: int, report: Report | None = None
) -> LanguageModel:
    """A model of a text: epochs of Adam with dropout and with steps that fall linearly to 0.

    The LSTM's state is carried from step to step, as it is in the evaluation.
    """
    torch.manual_seed(0)
    model = _initial(text, vocabulary, width)
    optimizer = Adam(model.parameters(), lr=_STEP)
    sizes = _step_sizes(_EPOCHS * sum(1 for _ in _windows(text, 0)))
    step = 0
    for epoch in range(_EPOCHS):
        state = None
        for words, targets in _windows(text, epoch):
            optimizer.param_groups[0]["lr"] = sizes[step]
            optimizer.zero_grad()
            embedded = F.dropout(model.embedding(words), _DROPOUT)
            hidden, state = model.lstm(embedded, state)
            state = tuple(part.detach() for part in state)
            model.decoder(F.dropout(hidden, _DROPOUT), targets).backward()
            clip_grad_norm_(model.parameters(), _RADIUS)
            optimizer.step()
            step += 1
            if report is not None:
                report(step, len(sizes), math.nan, math.nan)
    model.lstm.dropout = 0.0
    return model


def _initial(text: Tensor, vocabulary: int, width: int) -> LanguageModel:
    model = LanguageModel(vocabulary, width)
    model.lstm.dropout = _DROPOUT
    with torch.no_grad():
        model.embedding.weight.mul_(_EMBEDDING)
    start_from_counts(model.decoder, text.bincount(minlength=vocabulary))
    return model


def _windows(text: Tensor, epoch: int) -> Iterator[Batch]:
    """Words and next words of all streams; each window continues the one before it.

    Every epoch starts at another place of the text, so that the windows differ.
    """
    text = text.roll(random.Random(epoch).randrange(len(text) - 1))
    streams = min(_STREAMS, len(text) - 1)
    length = (len(text) - 1) // streams
    inputs = text[: streams * length].view(streams, length)
    targets = text[1 : streams * length + 1].view(streams, length)
    used = length // _WINDOW * _WINDOW or length
    for start in range(0, used, _WINDOW):
        part = slice(start, start + _WINDOW)
        yield inputs[:, part], targets[:, part]


def _step_sizes(steps: int) -> list[float]:
    warm = max(1, min(_WARM_UP, steps // 10))
    return [_STEP * (1 - k / steps) * min(1, (k + 1) / warm) for k in range(steps)]
