"""One training of the language model: a method, a budget, a seed; resumable epoch by epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer
from torch.utils.data import DataLoader

from privagrad._internal import validate
from privagrad._internal.atomic import atomic_write
from privagrad.experiments.language.corpus import Sequences, Vocabulary, collate
from privagrad.experiments.language.model import LanguageModel, perplexity
from privagrad.geometry.scales import SCALE_POWERS
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.torch.adaptive_sgd import AdaptiveSGD
from privagrad.torch.damping import damp_steps, start_from_counts, word_shares
from privagrad.torch.engine import PrivacyEngine
from privagrad.torch.loaders import BatchMemoryManager
from privagrad.torch.moments import SecondMoments, shaped_scales

PRIVATE = ("dp-sgd", "pasan", "pagan")
SHAPED = ("pasan", "pagan")
WORDS = "+words"
"""After a method's name: it starts from the word frequencies of the public text."""

METHODS = (*PRIVATE, *(method + WORDS for method in PRIVATE), "sgd", "adagrad")
Schedule = Literal["constant", "linear", "warm-up"]
SCHEDULES: tuple[Schedule, ...] = ("constant", "linear", "warm-up")
DELTA = 1e-5
FLOOR = 2.0
"""Of the mean moment of a tensor: in embeddings a few hundred occurrences of a word."""

_PAPERS_BATCH = 250
_WARM = 0.1
_HEAD = 1 / 16
_TOGETHER = 320
"""Examples in memory at once: Poisson batches of 250 are hardly ever larger."""


@dataclass(frozen=True)
class Texts:
    """Numbered words: the private text, held-out texts, and the public one."""

    vocabulary: Vocabulary
    train: Tensor
    valid: Tensor
    test: Tensor | None
    public: Tensor | None


@dataclass(frozen=True)
class Setting:
    """What one run depends on, besides the texts."""

    method: str
    epsilon: float
    step_size: float
    """Of PASAN, the length of steps over the square root of the number of parameters."""
    radius: float = 0.5
    """The bound on every example's gradient; without privacy on their mean."""
    schedule: Schedule = "linear"
    epochs: int = 7
    batch_size: int = 250
    seed: int = 0
    width: int = 120
    sample: int | None = None
    """A trial: see `train`."""

    def __post_init__(self) -> None:
        validate.choice("method", self.method, METHODS)
        validate.choice("schedule", self.schedule, SCHEDULES)

    @property
    def kind(self) -> str:
        """The method by itself."""
        return self.method.removesuffix(WORDS)

    @property
    def words(self) -> bool:
        """Whether it knows how frequent words are."""
        return self.method.endswith(WORDS)

    @property
    def private(self) -> bool:
        return self.kind in PRIVATE

    @property
    def shaped(self) -> bool:
        return self.kind in SHAPED


Report = Callable[[int, int, float, float], None]


def public_text(texts: Texts, setting: Setting) -> Tensor:
    if texts.public is None:
        raise ValueError(
            f"Expected public text for {setting.method}, found none: give --public-dir, or leave "
            "the method out."
        )
    return texts.public


def public_moments(
    texts: Texts, setting: Setting, folder: Path, report: Report | None = None
) -> dict[str, Tensor]:
    """Second moments of per-example gradients, row by row, along one noisy epoch of public text.

    A noisy run, because the private one will be noisy too, without its first quarter, in which
    gradients are unlike later ones. Its model is thrown away; `folder` keeps the moments.
    """
    path = folder / f"moments-{len(texts.vocabulary)}x{setting.width}.pt"
    if path.exists():
        moments: dict[str, Tensor] = torch.load(path, weights_only=True)
        return moments
    public = public_text(texts, setting)
    torch.manual_seed(0)
    model = LanguageModel(len(texts.vocabulary), setting.width)
    data = Sequences(public)
    batch_size = min(setting.batch_size, _PAPERS_BATCH, len(data))
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=SGD(model.parameters(), lr=8.0),
        data_loader=DataLoader(data, batch_size, collate_fn=collate),
        noise_multiplier=0.6,
        max_grad_norm=0.5,
        random_state=0,
    )
    observed = SecondMoments(dict(model.named_parameters()), floor=FLOOR, per="row")
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


def train(
    setting: Setting, texts: Texts, folder: Path, report: Report | None = None
) -> dict[str, Any]:
    """Train, or go on; the validation perplexity after every epoch, and what it cost.

    A trial of `setting.sample` examples a step foretells the run with `batch_size` at a part of
    its time: it makes as many steps with as much noise in the mean gradient. That noise is far
    larger than what the fewer examples add; a trial is NOT private. Without noise it makes
    whole steps, in the same proportion fewer.
    """
    run = _Training(setting, texts, folder)
    while run.step < run.steps:
        run.epoch(report)
        if setting.sample is None:
            run.save()
        if report is not None:
            report(run.step, run.steps, run.curve[-1], run.cost())
    return run.result()


class _Training:
    """A model under way: at step `step` of `steps`, after as many epochs as `curve` is long."""

    def __init__(self, setting: Setting, texts: Texts, folder: Path) -> None:
        torch.manual_seed(setting.seed)
        self.setting, self.texts = setting, texts
        self.checkpoint = folder / "state.pt"
        self.model = LanguageModel(len(texts.vocabulary), setting.width)
        self.module: nn.Module = self.model
        self.optimizer = _optimizer(setting, self.model)
        if setting.words:
            _know_words(texts, setting, self.model, self.optimizer)
        data = Sequences(texts.train)
        self.batch = min(setting.batch_size, len(data))
        self.per_epoch = math.ceil(len(data) / self.batch)
        self.steps = setting.epochs * self.per_epoch
        part = 1.0 if setting.sample is None else min(1.0, setting.sample / self.batch)
        taken = round(part * self.batch) if setting.private else self.batch
        if not setting.private:
            self.steps = math.ceil(part * self.steps)
        self.loader: Any = DataLoader(data, taken, shuffle=True, collate_fn=collate)
        self.engine = PrivacyEngine()
        self.begun = time.monotonic()
        done, self.curve, self.spent = _resumed(self.checkpoint)
        self.noise_multiplier = self._calibrated() if setting.private else 0.0
        if setting.private:
            self._make_private(_ellipsoid(setting, texts, folder), done, taken / self.batch)
        self.step = done * self.per_epoch
        dim = sum(parameter.numel() for parameter in self.model.parameters())
        length = setting.step_size * (math.sqrt(dim) if setting.kind == "pasan" else 1.0)
        self.lengths = [length * factor for factor in _factors(setting.schedule, self.steps)]
        if setting.private:
            _head_start(self.optimizer, self.steps)
        if done:
            _restore(self.checkpoint, self.engine, self.module, self.optimizer, setting)

    def _calibrated(self) -> float:
        """The noise of the whole run, whatever a trial takes."""
        rows = len(self.loader.dataset)
        planned = GaussianEvent(1.0, self.steps, "poisson", rows, self.batch)
        return PrivacyPlan.calibrate_event(planned, self.setting.epsilon, DELTA).noise_multiplier

    def _make_private(self, ellipsoid: dict[str, Tensor] | None, done: int, part: float) -> None:
        setting = self.setting
        self.module, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=self.optimizer,
            data_loader=self.loader,
            noise_multiplier=part * self.noise_multiplier,
            max_grad_norm=setting.radius,
            ellipsoid=ellipsoid,
            # Another stream after every resumption: noise must not come twice.
            random_state=np.random.default_rng([setting.seed, done]),
        )

    def epoch(self, report: Report | None) -> None:
        """One pass over the text, or what is left of the steps; then the perplexity."""
        stop = min(self.step + self.per_epoch, self.steps)
        shown = self.curve[-1] if self.curve else math.nan
        cost = self.cost() if self.curve and report is not None else math.nan
        while self.step < stop:
            with self._parts() as parts:
                for words, targets in parts:
                    for group in self.optimizer.param_groups:
                        group["lr"] = self.lengths[self.step]
                    self.optimizer.zero_grad()
                    self.module(words, targets).backward()
                    if not self.setting.private:
                        nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.radius)
                    self.optimizer.step()
                    self.step += getattr(self.optimizer, "last_chunk", True)
                    if self.step == stop:
                        break
                    if report is not None:
                        report(self.step, self.steps, shown, cost)
        self.curve.append(perplexity(self.model, self.texts.valid))

    def _parts(self) -> Any:
        if not self.setting.private:
            return nullcontext(self.loader)
        return BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=_TOGETHER, optimizer=self.optimizer
        )

    def cost(self) -> float:
        charged = self.setting.private and self.setting.sample is None
        return self.engine.get_epsilon(DELTA) if charged else math.inf

    def seconds(self) -> float:
        return self.spent + time.monotonic() - self.begun

    def save(self) -> None:
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        extra = {"epoch": len(self.curve), "curve": self.curve, "seconds": self.seconds()}
        if not self.setting.private:
            extra["plain_optimizer"] = self.optimizer.state_dict()
        self.engine.save_checkpoint(
            path=self.checkpoint,
            module=self.module,
            optimizer=self.optimizer,
            checkpoint_dict=extra,
        )

    def result(self) -> dict[str, Any]:
        texts, model = self.texts, self.model
        return {
            "valid_curve": self.curve,
            "valid_perplexity": self.curve[-1],
            "valid_perplexity_reset": perplexity(model, texts.valid, carried=False),
            "test_perplexity": None if texts.test is None else perplexity(model, texts.test),
            "epsilon_spent": self.cost(),
            "noise_multiplier": self.noise_multiplier,
            "steps_made": self.steps,
            "seconds": self.seconds(),
        }


def _optimizer(setting: Setting, model: LanguageModel) -> Any:
    parameters = model.parameters()
    if setting.kind in ("dp-sgd", "sgd"):
        return SGD(parameters, lr=setting.step_size)
    if setting.kind == "pasan":
        return AdaptiveSGD(parameters, lr=setting.step_size)
    return Adagrad(parameters, lr=setting.step_size)


def _know_words(texts: Texts, setting: Setting, model: LanguageModel, optimizer: Any) -> None:
    """How frequent words are in public text: where biases start, how far rare words' rows go."""
    counts = public_text(texts, setting).bincount(minlength=len(texts.vocabulary))
    start_from_counts(model.decoder, counts)
    damp_steps(optimizer, {model.decoder.weight: word_shares(counts)[:, None]})


def _ellipsoid(setting: Setting, texts: Texts, folder: Path) -> dict[str, Tensor] | None:
    if not setting.shaped:
        return None
    moments = public_moments(texts, setting, folder.parent)
    return shaped_scales(moments, SCALE_POWERS[setting.kind])


def _head_start(optimizer: Any, steps: int) -> None:
    """Adaptive methods begin as if they had seen noise for a while.

    Gradients are mostly noise, so that steps fall as 1/sqrt(k): the first ones would otherwise
    carry the weights further than all others together.
    """
    inner: Optimizer = optimizer.original_optimizer
    noise = optimizer.noise_multiplier * optimizer.max_grad_norm / optimizer.expected_batch_size
    seen = _HEAD * steps * noise**2
    if isinstance(inner, Adagrad):
        for name, parameter in optimizer.tape.parameters.items():
            variance = seen / optimizer.scales[name].full
            inner.state[parameter]["sum"].copy_(variance.reshape(parameter.shape))
    elif isinstance(inner, AdaptiveSGD):
        energy = sum(float((seen / scale.full).sum()) for scale in optimizer.scales.values())
        for group in inner.param_groups:
            group["initial"] = energy


def _factors(schedule: Schedule, steps: int) -> list[float]:
    """The step size over its largest value, for each step."""
    if schedule == "constant":
        return [1.0] * steps
    fall = [1 - step / steps for step in range(steps)]
    if schedule == "linear":
        return fall
    warm = max(1, int(_WARM * steps))
    return [min((step + 1) / warm, (steps - step) / (steps - warm)) for step in range(steps)]


def _resumed(checkpoint: Path) -> tuple[int, list[float], float]:
    if not checkpoint.exists():
        return 0, [], 0.0
    state = torch.load(checkpoint, weights_only=True)
    return int(state["epoch"]), list(state["curve"]), float(state["seconds"])


def _restore(
    checkpoint: Path, engine: PrivacyEngine, module: Any, optimizer: Any, setting: Setting
) -> None:
    state = engine.load_checkpoint(path=checkpoint, module=module, optimizer=optimizer)
    if not setting.private:
        optimizer.load_state_dict(state["plain_optimizer"])
