"""What the methods take from the public text: a model, moments of gradients, word frequencies."""

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
from privagrad.experiments.language.pretraining import Report, pretrained
from privagrad.experiments.language.settings import PAPER_BATCH_SIZE, Setting
from privagrad.geometry.scales import SCALE_POWERS
from privagrad.torch.damping import damp_steps, start_from_counts, word_shares
from privagrad.torch.engine import PrivacyEngine
from privagrad.torch.moments import SecondMoments, second_moments, shaped_scales

_BATCH = 50
"""Examples whose moments are computed at once."""

_FLOOR = 2.0
"""Times the mean moment of a tensor: in embeddings worth a few hundred occurrences of a word."""


def public_moments(
    texts: Texts, setting: Setting, folder: Path, report: Report | None = None
) -> dict[str, Tensor]:
    """Second moments of per-example gradients of the public text, row by row; kept in `folder`.

    For runs that start from the public model they are those of that model. For others they are
    taken along one noisy epoch, whose model is not used: noisy because the private run is noisy
    too, and without its first quarter, because gradients are different there.
    """
    if setting.start == "public":
        return _kept(
            folder / f"moments-{_shape(texts, setting)}-public.pt",
            lambda: _moments_at_start(texts, setting, folder, report),
        )
    return _kept(
        folder / f"moments-{_shape(texts, setting)}.pt",
        lambda: _moments_along_a_run(texts, setting, report),
    )


def public_model(
    texts: Texts, setting: Setting, folder: Path, report: Report | None = None
) -> dict[str, Tensor]:
    """The weights of a model that was trained on the public text alone; kept in `folder`."""
    text = texts.require_public(setting.method)
    return _kept(
        folder / f"model-{_shape(texts, setting)}.pt",
        lambda: pretrained(text, len(texts.vocabulary), setting.width, report).state_dict(),
    )


def _shape(texts: Texts, setting: Setting) -> str:
    return f"{len(texts.vocabulary)}x{setting.width}"


def _kept(path: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a file, which are made if it is not there."""
    if path.exists():
        found: dict[str, Tensor] = torch.load(path, weights_only=True)
        return found
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        torch.save(made, file)
    return made


def _moments_at_start(
    texts: Texts, setting: Setting, folder: Path, report: Report | None
) -> dict[str, Tensor]:
    model = LanguageModel(len(texts.vocabulary), setting.width)
    model.load_state_dict(public_model(texts, setting, folder, report))
    data = Sequences(texts.require_public(setting.method))
    # The module takes the targets too, and gives the loss.
    batches = ((*batch, batch[1]) for batch in DataLoader(data, _BATCH, collate_fn=collate))
    return second_moments(model, batches, floor=_FLOOR, per="row")


def _moments_along_a_run(
    texts: Texts, setting: Setting, report: Report | None
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = LanguageModel(len(texts.vocabulary), setting.width)
    data = Sequences(texts.require_public(setting.method))
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
