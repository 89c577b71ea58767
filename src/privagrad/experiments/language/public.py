"""What the methods take from the public text: second moments of gradients, word frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from privagrad._internal.atomic import atomic_write
from privagrad.experiments.language.corpus import Sequences, Texts, collate
from privagrad.experiments.language.model import LanguageModel
from privagrad.experiments.language.settings import PAPER_BATCH_SIZE, Setting
from privagrad.geometry.scales import SCALE_POWERS
from privagrad.torch.damping import damp_steps, start_from_counts, word_shares
from privagrad.torch.engine import PrivacyEngine
from privagrad.torch.moments import SecondMoments, shaped_scales

Report = Callable[[int, int, float, float], None]
"""Called with the step, the number of steps, the perplexity and the epsilon so far."""

_FLOOR = 2.0
"""Times the mean moment of a tensor: in embeddings worth a few hundred occurrences of a word."""


def public_moments(
    texts: Texts, setting: Setting, folder: Path, report: Report | None = None
) -> dict[str, Tensor]:
    """Second moments of per-example gradients, row by row, along one noisy epoch of public text.

    The run is noisy because the private run is noisy too. Its first quarter is left out: gradients
    are different there. Its model is not used; `folder` keeps the moments.
    """
    path = folder / f"moments-{len(texts.vocabulary)}x{setting.width}.pt"
    if path.exists():
        moments: dict[str, Tensor] = torch.load(path, weights_only=True)
        return moments
    public = texts.require_public(setting.method)
    torch.manual_seed(0)
    model = LanguageModel(len(texts.vocabulary), setting.width)
    data = Sequences(public)
    batch_size = min(setting.batch_size, PAPER_BATCH_SIZE, len(data))
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=SGD(model.parameters(), lr=8.0),
        data_loader=DataLoader(data, batch_size, collate_fn=collate),
        noise_multiplier=0.6,
        max_grad_norm=0.5,
        random_state=0,
    )
    observed = SecondMoments(dict(model.named_parameters()), floor=_FLOOR, per="row")
    for step, (words, targets) in enumerate(loader):
        optimizer.observe = observed.add if 4 * step >= len(loader) else None
        optimizer.zero_grad()
        private(words, targets).backward()
        optimizer.step()
        if report is not None:
            report(step, len(loader), math.nan, math.nan)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        torch.save(observed.means(), file)
    return observed.means()


def ellipsoid_of(setting: Setting, texts: Texts, folder: Path) -> dict[str, Tensor] | None:
    """The scales of the method's ellipsoid; None for a ball."""
    if not setting.shaped:
        return None
    return shaped_scales(public_moments(texts, setting, folder), SCALE_POWERS[setting.kind])


def start_from_words(
    texts: Texts, setting: Setting, model: LanguageModel, optimizer: Optimizer
) -> None:
    """Initialise the biases with the word frequencies; make the steps of rare words smaller."""
    public = texts.require_public(setting.method)
    counts = public.bincount(minlength=len(texts.vocabulary))
    start_from_counts(model.decoder, counts)
    damp_steps(optimizer, {model.decoder.weight: word_shares(counts)[:, None]})
