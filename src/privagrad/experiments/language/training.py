"""One run of the language model: a method, a budget, a seed; resumable after every epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad
from torch.utils.data import DataLoader

from privagrad.experiments import DELTA
from privagrad.experiments.language.corpus import Batch, Sequences, Texts, collate
from privagrad.experiments.language.model import LanguageModel, perplexity
from privagrad.experiments.language.pretraining import Report
from privagrad.experiments.language.public import ellipsoid_of, public_model, start_from_words
from privagrad.experiments.language.settings import Schedule, Setting
from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.bands import choose_bands, with_bands
from privagrad.privacy.events import training_event
from privagrad.privacy.sampling import Batches
from privagrad.torch.adaptive_sgd import AdaptiveSGD
from privagrad.torch.damping import start_from_noise
from privagrad.torch.engine import PrivacyEngine
from privagrad.torch.loaders import BatchMemoryManager
from privagrad.torch.turns import MOST_IN_MEMORY

_WARM_UP = 0.1
"""The share of the steps in which the warm-up schedule rises."""
_IN_MEMORY = 320
"""Examples in memory at once: Poisson batches of 250 are hardly ever larger."""


class RunResult(TypedDict):
    """What a run gives: validation perplexity after every epoch, final perplexities, cost."""

    valid_curve: list[float]
    valid_perplexity: float
    valid_perplexity_reset: float
    test_perplexity: float | None
    epsilon_spent: float
    noise_multiplier: float
    bands: int
    steps_made: int
    seconds: float


def train(setting: Setting, texts: Texts, folder: Path, report: Report | None = None) -> RunResult:
    """Train, or resume after the last finished epoch in `folder`.

    With `setting.sample` this is a trial, which predicts the result of the run in a fraction of its
    time. It makes as many steps, with as much noise in the mean gradient, on `sample` examples a
    step instead of `batch_size`. That noise is much larger than the sampling error of fewer
    examples. A trial is NOT private. Methods without privacy make fewer steps of full size instead.
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
    """The state of a run: step `step` of `steps`, and `curve` with an entry for every epoch."""

    def __init__(self, setting: Setting, texts: Texts, folder: Path) -> None:
        torch.manual_seed(setting.seed)
        self.setting, self.texts = setting, texts
        self.checkpoint = folder / "state.pt"
        self.model = LanguageModel(len(texts.vocabulary), setting.width)
        self.module: nn.Module = self.model
        self.optimizer = _optimizer(setting, self.model)
        if setting.start == "words":
            start_from_words(texts, setting, self.model, self.optimizer)
        elif setting.start == "public":
            self.model.load_state_dict(public_model(texts, setting, folder.parent))
        data = Sequences(texts.train)
        self.batch = min(setting.batch_size, len(data))
        self.steps_per_epoch = math.ceil(len(data) / self.batch)
        self.steps = setting.epochs * self.steps_per_epoch
        share = 1.0 if setting.sample is None else min(1.0, setting.sample / self.batch)
        taken = round(share * self.batch) if setting.private else self.batch
        if not setting.private:
            self.steps = math.ceil(share * self.steps)
        self.loader: Any = DataLoader(data, taken, shuffle=True, collate_fn=collate)
        self.engine = PrivacyEngine()
        self.started = time.monotonic()
        done, self.curve, self.seconds_before = _progress(self.checkpoint)
        factors = _factors(setting.schedule, self.steps)
        self.bands, self.noise_multiplier = self._calibrated(factors)
        if setting.private:
            scales = ellipsoid_of(setting, texts, folder.parent)
            self._make_private(scales, done, taken / self.batch)
            if setting.shaped:
                start_from_noise(self.optimizer, self.steps)
        self.step = done * self.steps_per_epoch
        dim = sum(parameter.numel() for parameter in self.model.parameters())
        length = setting.step_size * (math.sqrt(dim) if setting.kind == "pasan" else 1.0)
        self.step_sizes = [length * factor for factor in factors]
        if done:
            self._restore()

    def _calibrated(self, step_sizes: list[float]) -> tuple[int, float]:
        """The bands and the noise multiplier of the run, also for a trial."""
        setting = self.setting
        if not setting.private:
            return 1, 0.0
        batches = Batches(len(self.loader.dataset), self.batch, self.steps)
        budget, correlation = (setting.epsilon, DELTA), setting.correlation
        if correlation == "auto" and setting.kind != "dp-sgd":
            correlation = 1
        sizes = np.array(step_sizes)
        bands = choose_bands(correlation, batches, *budget, sizes, (), MOST_IN_MEMORY)
        # A run that is resumed, after an epoch, begins another block.
        steps = setting.epochs * -(-self.steps_per_epoch // bands) * bands
        planned = training_event(with_bands(replace(batches, steps=steps), bands))
        return bands, PrivacyPlan.calibrate_event(planned, *budget).noise_multiplier

    def _make_private(self, ellipsoid: dict[str, Tensor] | None, done: int, share: float) -> None:
        setting = self.setting
        self.module, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=self.optimizer,
            data_loader=self.loader,
            noise_multiplier=share * self.noise_multiplier,
            max_grad_norm=setting.radius,
            ellipsoid=ellipsoid,
            correlation=self.bands,
            # Another stream for each epoch that a run begins with.
            random_state=np.random.default_rng([setting.seed, done]),
        )

    def epoch(self, report: Report | None) -> None:
        """Train for one epoch, or for the steps that are left; then measure the perplexity."""
        stop = min(self.step + self.steps_per_epoch, self.steps)
        shown = self.curve[-1] if self.curve else math.nan
        cost = self.cost() if self.curve and report is not None else math.nan
        while self.step < stop:
            with self._batches() as batches:
                for words, targets in batches:
                    for group in self.optimizer.param_groups:
                        group["lr"] = self.step_sizes[self.step]
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

    def _batches(self) -> AbstractContextManager[Iterable[Batch]]:
        """Batches, or parts of them that fit into memory."""
        if not self.setting.private:
            return nullcontext(self.loader)
        return BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=_IN_MEMORY, optimizer=self.optimizer
        )

    def cost(self) -> float:
        charged = self.setting.private and self.setting.sample is None
        return self.engine.get_epsilon(DELTA) if charged else math.inf

    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _restore(self) -> None:
        state = self.engine.load_checkpoint(
            path=self.checkpoint, module=self.module, optimizer=self.optimizer
        )
        if not self.setting.private:
            self.optimizer.load_state_dict(state["plain_optimizer"])

    def save(self) -> None:
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        done = {"epoch": len(self.curve), "curve": self.curve, "seconds": self.seconds()}
        plain = {} if self.setting.private else {"plain_optimizer": self.optimizer.state_dict()}
        self.engine.save_checkpoint(
            path=self.checkpoint, module=self.module, optimizer=self.optimizer,
            checkpoint_dict={**done, **plain},
        )  # fmt: skip

    def result(self) -> RunResult:
        texts, model = self.texts, self.model
        return {
            "valid_curve": self.curve,
            "valid_perplexity": self.curve[-1],
            "valid_perplexity_reset": perplexity(model, texts.valid, carried=False),
            "test_perplexity": None if texts.test is None else perplexity(model, texts.test),
            "epsilon_spent": self.cost(),
            "noise_multiplier": self.noise_multiplier,
            "bands": self.bands,
            "steps_made": self.steps,
            "seconds": self.seconds(),
        }


def _optimizer(setting: Setting, model: LanguageModel) -> Any:
    """The plain optimizer; typed loosely, because the engine replaces it by a private one."""
    kinds: dict[str, Any] = {"dp-sgd": SGD, "sgd": SGD, "pasan": AdaptiveSGD}
    return kinds.get(setting.kind, Adagrad)(model.parameters(), lr=setting.step_size)


def _factors(schedule: Schedule, steps: int) -> list[float]:
    """The step size of each step as a share of the largest."""
    if schedule == "constant":
        return [1.0] * steps
    fall = [1 - step / steps for step in range(steps)]
    if schedule == "linear":
        return fall
    warm = max(1, int(_WARM_UP * steps))
    return [min((step + 1) / warm, (steps - step) / (steps - warm)) for step in range(steps)]


def _progress(checkpoint: Path) -> tuple[int, list[float], float]:
    """Finished epochs, the perplexity after each, and the seconds they took."""
    if not checkpoint.exists():
        return 0, [], 0.0
    state = torch.load(checkpoint, weights_only=True)
    return int(state["epoch"]), list(state["curve"]), float(state["seconds"])
