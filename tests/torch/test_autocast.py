"""Autocast to bfloat16: the gradient that is used is the one that is bounded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.torch.reference import assert_same, looped, middle_radius, squared
from tests.torch.small import private

SEQUENCES = torch.randn(8, 6, 5, generator=torch.Generator().manual_seed(1))
NUMBERS = torch.linspace(-1, 1, 8)


class Last(nn.Module):
    """A recurrent layer between linear ones, and the last time."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.first, self.layer, self.out = nn.Linear(5, 5), layer, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.first(x))[0][:, -1])


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        assert state is not None
        return self.out(state[0])


def cases() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "linear": nn.Sequential(nn.Flatten(), nn.Linear(30, 8), nn.Tanh(), nn.Linear(8, 3)),
        "tokens": nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)),
        "lstm": Last(nn.LSTM(5, 4, batch_first=True)),
        "gru": Last(nn.GRU(5, 4, batch_first=True)),
        "rnn": Last(nn.RNN(5, 4, batch_first=True)),
        "cells": Cells(),
    }


def autocast_sum(module: nn.Module, radius: float, rows: slice = slice(None)) -> list[Tensor]:
    data = TensorDataset(SEQUENCES[rows], NUMBERS[rows])
    run = private(module, data, len(data), max_grad_norm=radius)
    for x, y in run.loader:
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = run.module(x)
        squared(output.float(), y).backward()
        run.optimizer.step()
    return run.gradients


@pytest.mark.parametrize("name", cases())
def test_bounded_sum_is_that_of_the_loop_up_to_rounding(name: str) -> None:
    module = cases()[name]
    radius = middle_radius(module, squared, SEQUENCES, NUMBERS, "ball")
    expected = looped(module, squared, SEQUENCES, NUMBERS, "ball", radius)
    found = autocast_sum(module, radius)
    assert all(g.dtype is torch.float32 for g in found)
    assert_same(found, expected, tolerance=0.05)


@pytest.mark.parametrize("name", cases())
def test_what_is_released_of_one_example_has_the_norm_of_the_bound(name: str) -> None:
    for row in range(3):
        found = autocast_sum(cases()[name], 1e-3, slice(row, row + 1))
        norm = float(torch.cat([g.double().flatten() for g in found]).norm())
        assert norm == pytest.approx(1e-3, rel=1e-5)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_a_statistic_of_the_batch_is_refused() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(30, 8), Centred(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="treats every example by itself"):
        autocast_sum(module, 1.0)


class SlightlyMixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-3 * x.nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1).mean(0)


def test_a_mixture_below_the_precision_of_bfloat16_is_refused() -> None:
    """An example with a huge loss would turn the gradients of all others."""
    layers = (nn.Linear(30, 8), nn.Tanh(), SlightlyMixed(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="treats every example by itself"):
        autocast_sum(nn.Sequential(nn.Flatten(), *layers), 1.0)


@pytest.mark.parametrize("inside", [False, True])
def test_so_is_a_loss_that_mixes_as_little(inside: bool) -> None:
    run = private(nn.Linear(5, 3))
    for x, y in run.loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = run.module(x)
            mixed = output + 1e-3 * output.mean(0)
            loss = F.mse_loss(mixed, F.one_hot(y, 3).float())
        loss = loss if inside else F.mse_loss(mixed, F.one_hot(y, 3).float())
        with pytest.raises(RuntimeError, match="a sum or a mean over examples"):
            loss.backward()
        break


def test_half_precision_in_a_loss_is_followed() -> None:
    """Casts, new tensors, indices and constants of the type of the outputs."""
    run = private(nn.Linear(5, 3))
    shift = torch.tensor([0.5, 0.0, -0.5], dtype=torch.bfloat16)
    for x, y in run.loader:
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = run.module(x)
        own = (output.bfloat16() + shift).to(torch.bfloat16)
        kept = output.new_zeros(output.shape)
        kept[:, :2] = own[:, :2]
        loss = F.linear(kept, torch.ones(3, 3, dtype=torch.bfloat16)).square().mean(1)
        (loss.mean() + F.cross_entropy(own, y)).backward()
        run.optimizer.step()


class InHalf(nn.Module):
    """Runs under autocast only: its inner product is of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.register_buffer("matrix", torch.ones(4, 3, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.first(x) @ self.matrix
        return product


def test_a_module_that_needs_autocast_is_taken() -> None:
    run = private(InHalf())
    for x, y in run.loader:
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = run.module(x)
        F.cross_entropy(output, y).backward()
        run.optimizer.step()


def test_float16_is_refused() -> None:
    run = private()
    for x, y in run.loader:
        with (
            torch.autocast("cpu", dtype=torch.float16),
            pytest.raises(RuntimeError, match="in bfloat16"),
        ):
            run.step(F.cross_entropy, x, y)
