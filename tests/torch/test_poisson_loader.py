"""Opacus's loader of Poisson batches, by itself and made private."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from privagrad.privacy.events import GaussianEvent
from privagrad.torch import DPDataLoader
from tests.statistics import rate_accepted
from tests.torch.small import Run, sgd, table
from tests.torch.test_charging import of_loader


def test_rows_are_drawn_independently_at_the_rate() -> None:
    data = TensorDataset(torch.arange(50))
    loader = DPDataLoader(data, sample_rate=0.2)
    drawn = np.zeros((1000, 50), dtype=bool)
    for first in range(0, 1000, len(loader)):
        for step, (rows,) in enumerate(loader):
            drawn[first + step, rows.numpy()] = True
    assert len(loader) == 5
    assert rate_accepted(int(drawn.sum()), drawn.size, 0.2)
    assert not rate_accepted(int(drawn.sum()), drawn.size, 0.22)


def test_the_rate_is_the_one_that_is_charged() -> None:
    """A rate that gives no whole batch size is rounded, and the account has the rounded one."""
    loader = DPDataLoader(table(65), sample_rate=0.09)
    assert loader.sample_rate == 6 / 65
    run = of_loader(loader)
    run.epoch()
    assert run.engine.accountant.events == (GaussianEvent(1.0, 11, "poisson", 65, 6, "gradients"),)
    batches: Any = run.loader
    assert batches.batches.rate == 6 / 65


def test_a_loader_keeps_its_batch_size_in_expectation() -> None:
    loader = DPDataLoader.from_data_loader(DataLoader(table(64), 16, shuffle=True))
    assert DPDataLoader.from_data_loader(loader) is loader
    run = of_loader(loader)
    assert run.engine.accountant.events == ()
    run.epoch()
    assert run.engine.accountant.history == [(1.0, 0.25, 4)]


def test_batches_are_collated_as_they_were() -> None:
    def shifted(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.utils.data.default_collate(rows)
        return x + 100, y

    loader = DPDataLoader(table(64), sample_rate=0.25, collate_fn=shifted)
    assert all(float(x.min()) > 50 for x, _ in loader if len(x))
    assert all(float(x.min()) > 50 for x, _ in of_loader(loader).loader if len(x))
    small = DPDataLoader(table(64), sample_rate=1 / 64)
    assert {x.shape[1:] for x, _ in small} == {torch.Size([5])}


def test_what_it_cannot_do_is_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(table())

    data = table(8)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sample_rate": 0.0}, "sample_rate above 0"),
        ({"sample_rate": 1.5}, "sample_rate above 0"),
        ({"sample_rate": 0.5, "generator": torch.Generator()}, "secure source"),
        ({"sample_rate": 0.5, "rand_on_empty": True}, "length 0"),
        ({"sample_rate": 0.5, "batch_first": False}, "make_private batch_first"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            DPDataLoader(data, **options)
    with pytest.raises(TypeError, match="IterableDataset"):
        DPDataLoader(Stream(), sample_rate=0.5)
    with pytest.raises(ValueError, match="leaves some out"):
        DPDataLoader.from_data_loader(DataLoader(data, 2, sampler=SubsetRandomSampler([1, 2])))
    with pytest.raises(ValueError, match="poisson_sampling=True with a data loader of Poisson"):
        of_loader(DPDataLoader(data, sample_rate=0.5), poisson_sampling=False)


def test_a_target_is_met_with_it() -> None:
    from privagrad.torch import PrivacyEngine

    engine, module = PrivacyEngine(), nn.Linear(5, 3)
    run = Run(
        engine,
        *engine.make_private_with_epsilon(
            module=module, optimizer=sgd(module.parameters()), max_grad_norm=1.0, epochs=2,
            data_loader=DPDataLoader(table(), sample_rate=0.25), target_epsilon=4.0,
            target_delta=1e-3,
        ),
    )  # fmt: skip
    for _ in range(2):
        run.epoch(F.cross_entropy)
    assert 3.9 < engine.get_epsilon(1e-3) <= 4.0
