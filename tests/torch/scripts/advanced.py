"""Schedules of noise and bound, a bound that adapts, step hooks, the account's history."""

import torch
import torch.nn as nn
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from opacus.schedulers import ExponentialGradClip, StepNoise
from torch.utils.data import DataLoader, TensorDataset


def loader_of(n):
    inputs = torch.randn(n, 6)
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=n // 8)


def train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def adaptive(engine, n):
    model = nn.Linear(6, 2)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=loader_of(n),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        clipping="adaptive",
        target_unclipped_quantile=0.5,
        clipbound_learning_rate=0.2,
        max_clipbound=10.0,
        min_clipbound=0.05,
        unclipped_num_std=3.0,
    )
    train(model, optimizer, loader)
    assert float(optimizer.max_grad_norm) != 1.0


def main(epochs, n):
    engine = PrivacyEngine(accountant="prv")
    adaptive(engine, n)
    noise = get_noise_multiplier(
        target_epsilon=5.0, target_delta=1e-3, sample_rate=1 / 8, epochs=epochs, accountant="prv"
    )
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=loader_of(n),
        noise_multiplier=noise,
        max_grad_norm=1.0,
    )
    noise_schedule = StepNoise(optimizer, step_size=1, gamma=0.9)
    clip_schedule = ExponentialGradClip(optimizer, gamma=0.95)
    for _ in range(epochs):
        train(model, optimizer, loader)
        noise_schedule.step()
        clip_schedule.step()
    steps = sum(count for _, _, count in engine.accountant.history)
    assert steps == 8 * (1 + epochs)
    return noise, engine.get_epsilon(delta=1e-3)
