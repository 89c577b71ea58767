"""One private training of a small network, measured on rows that it has not seen."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from privagrad.experiments.networks.optimizers import make_optimizer, widths_of_moments
from privagrad.experiments.networks.settings import NETWORK_METHODS, NetworkMethod
from privagrad.experiments.networks.shapes import (
    first_step_size,
    gradient_sizes,
    loss_of,
    scales_of,
)
from privagrad.experiments.networks.tasks import NetworkProblem, Part, Task, load_task
from privagrad.experiments.ring import Outcome, Trial
from privagrad.torch.damping import start_from_noise
from privagrad.torch.engine import PrivacyEngine
from privagrad.torch.kronecker import dp_kfc_steps, precondition
from privagrad.torch.moments import second_moments
from privagrad.torch.scales import given_scales

_LEAST = 0.01
"""AdaDPS's A has at least this part of its first size: as in `privagrad.methods.adadps`."""
_MOMENT_FLOOR = 1e-6
"""Public moments of AdaDPS have the floor of their widths alone."""


def run_network(trial: Trial) -> Outcome:
    """Train once for every seed; losses are scores on the test rows after the last step."""
    assert isinstance(trial.problem, NetworkProblem)
    method = NETWORK_METHODS[trial.variant]
    task = _task(trial.problem, method.standardised)
    outcome: Outcome = {
        "losses": [], "averaged": [], "epsilon": math.nan, "seconds": math.inf, "validation": [],
    }  # fmt: skip
    for seed in trial.seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            start = time.process_time()
            training = _Training(trial, task, method, seed)
            epsilon = training.run()
            seconds = time.process_time() - start
        test = training.score(task.test)
        outcome["losses"].append([test])
        outcome["averaged"].append([test])
        outcome["validation"].append(training.score(task.validation))
        outcome["epsilon"] = epsilon
        outcome["seconds"] = min(outcome["seconds"], seconds)
    return outcome


@lru_cache(maxsize=4)
def _task(problem: NetworkProblem, standardised: bool) -> Task:
    task = load_task(problem)
    return task.standardised() if standardised else task


def make_network(task: Task, divide: bool) -> nn.Sequential:
    """Linear layers with ReLU between them.

    With `divide` the first weights are divided by the public scales of the columns: columns in
    units of their own and standardised ones start from networks alike.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in zip(task.widths, task.widths[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    first = layers[0]
    assert isinstance(first, nn.Linear)
    if divide:
        with torch.no_grad():
            first.weight /= torch.from_numpy(task.scales()).float()
    return nn.Sequential(*layers[:-1])


@dataclass
class _Training:
    trial: Trial
    task: Task
    method: NetworkMethod
    seed: int

    def __post_init__(self) -> None:
        trial, method, task = self.trial, self.method, self.task
        self.public = _tensors(task.public)
        self.model: nn.Module = make_network(task, task.own_units and not method.standardised)
        if method.kronecker != "none":
            self.model = precondition(
                self.model, self._public_batches(), loss_of, sides=method.kronecker
            )
        self.module = self.model
        self.twin = copy.deepcopy(self.model)  # stays plain: for public rows
        self.loader: Any = DataLoader(
            TensorDataset(*_tensors(task.private)), trial.batch_size, shuffle=True
        )
        self.epochs = max(1, round(trial.steps / len(self.loader)))
        self.optimizer = make_optimizer(method, self.model.parameters())
        if method.steps == "kfc":
            dp_kfc_steps(self.optimizer, self.model)
        self.engine = PrivacyEngine()
        if method.private:
            self._make_private()
            scales = scales_of(self.optimizer)
        else:
            scales = {name: torch.ones_like(p) for name, p in self.model.named_parameters()}
        sizes = gradient_sizes(self.twin, *self.public, scales)
        factor = trial.radius_factor
        self.step_size = trial.step_size * first_step_size(method, sizes, factor)
        if method.private:
            self.optimizer.max_grad_norm = factor * sizes.own_norm
            if method.steps in ("adagrad", "adaptive-sgd"):
                start_from_noise(self.optimizer, self.epochs * len(self.loader))

    def _make_private(self) -> None:
        method, trial = self.method, self.trial
        following = method.shape if method.shape not in ("ball", "widths") else None
        self.module, self.optimizer, self.loader = self.engine.make_private_with_epsilon(
            module=self.model,
            optimizer=self.optimizer,
            data_loader=self.loader,
            target_epsilon=trial.epsilon,
            target_delta=trial.delta,
            epochs=self.epochs,
            max_grad_norm=1.0,
            ellipsoid=following,
            public_loader=self._public_batches() if following and method.public_shape else None,
            criterion=loss_of,
            random_state=self.seed,
        )
        self._first_size = 0.0
        self._look_at_public()

    def _public_batches(self) -> list[tuple[Tensor, Tensor]]:
        return [self.public]

    def _look_at_public(self) -> None:
        """The ellipsoid and its widths from the public rows at the current weights.

        In whitened coordinates they stay as they are at the first weights.
        """
        if not self.method.scaled or (self._first_size and self.method.steps != "divided"):
            return
        self.twin.load_state_dict(self.model.state_dict())
        moments = second_moments(self.twin, self._public_batches(), loss_of, floor=_MOMENT_FLOOR)
        widths, size = widths_of_moments(moments)
        self._first_size = self._first_size or size
        size = max(size / self._first_size, _LEAST)
        parameters = self.optimizer.tape.parameters
        self.optimizer.scales = given_scales({k: w**-2 for k, w in widths.items()}, parameters)
        factor = size if self.method.steps == "divided" else 1.0
        self.optimizer.original_optimizer.widths = {
            parameters[name]: factor * width for name, width in widths.items()
        }

    def run(self) -> float:
        """Train with steps that fall linearly to 0; returns the epsilon that was spent."""
        steps, done = self.epochs * len(self.loader), 0
        for epoch in range(self.epochs):
            if epoch:
                self._look_at_public()
            for X, y in self.loader:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.step_size * (1 - done / steps)
                self.optimizer.zero_grad()
                loss: Any = loss_of(self.module(X), y)
                loss.backward()
                self.optimizer.step()
                done += 1
        return self.engine.get_epsilon(self.trial.delta) if self.method.private else math.inf

    def score(self, part: Part) -> float:
        """The mean absolute error in the target's own units, or the share of wrong classes."""
        X, y = _tensors(part)
        with torch.no_grad():
            outputs = self.model(X)
        if self.task.loss == "absolute":
            return self.task.unit * float((outputs - y).abs().mean())
        return float((outputs.argmax(1) != y).float().mean())


def _tensors(part: Part) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(part.X), torch.from_numpy(part.y)
