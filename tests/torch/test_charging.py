"""Every batch that is drawn and every release is charged, with the noise it is made with."""

from __future__ import annotations

import copy
import math
import os
import pickle
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.torch import BatchMemoryManager, PrivacyEngine
from privagrad.torch.loaders import PrivateLoader
from privagrad.torch.processes import Processes
from tests.torch.small import Run, private, sgd, table


def charged(run: Run) -> int:
    return len(run.engine.accountant)


def poisson(noise: float, count: int, rows: int = 64, batch_size: int = 16) -> GaussianEvent:
    return GaussianEvent(noise, count, "poisson", rows, batch_size, "gradients")


def of_loader(loader: DataLoader[Any], **options: Any) -> Run:
    module, engine = nn.Linear(5, 3), PrivacyEngine()
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    return Run(
        engine,
        *engine.make_private(
            module=module, optimizer=sgd(module.parameters()), data_loader=loader, **options
        ),
    )


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The noise multipliers of all sums that are really released."""
    return spied(monkeypatch)


def spied(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    original = GaussianSum.release

    def release(self: GaussianSum, *args: Any) -> Any:
        made.append(self.noise_multiplier)
        return original(self, *args)

    monkeypatch.setattr(GaussianSum, "release", release)
    return made


@pytest.mark.parametrize("verify", [True, False])
def test_batches_of_the_loader_are_charged_once(verify: bool) -> None:
    run = private(noise_multiplier=2.0, poisson_sampling=True, verify=verify)
    run.epoch()
    assert run.engine.report(1e-5).events == (poisson(2.0, 4),)


class TestNoise:
    """Noise that is used is noise that is charged."""

    def test_a_release_costs_what_its_own_noise_costs(self, releases: list[float]) -> None:
        run = private(noise_multiplier=2.0, poisson_sampling=True)
        run.epoch()
        run.optimizer.noise_multiplier = 0.001
        run.epoch()
        assert releases == [2.0] * 4 + [0.001] * 4
        assert run.engine.accountant.events == (poisson(2.0, 4), poisson(0.001, 4))
        assert run.engine.get_epsilon(1e-5) > 1e5

    def test_none_at_all_is_unprotected(self) -> None:
        run = private(noise_multiplier=2.0, poisson_sampling=True)
        run.epoch()
        run.optimizer.noise_multiplier = 0
        run.epoch()
        assert run.engine.get_epsilon(1e-5) == math.inf

    def test_noise_after_a_start_without_is_charged(self) -> None:
        run = private(noise_multiplier=0.0, poisson_sampling=True)
        run.optimizer.noise_multiplier = 2.0
        run.epoch()
        assert run.engine.accountant.events == (poisson(2.0, 4),)

    def test_noise_that_changes_between_the_draw_and_the_step(self, releases: list[float]) -> None:
        run = private(noise_multiplier=2.0, poisson_sampling=True)
        for batch, (x, y) in enumerate(run.loader):
            run.optimizer.noise_multiplier = 3.0 + batch
            run.step(F.cross_entropy, x, y)
        assert releases == [3.0, 4.0, 5.0, 6.0]
        assert run.engine.accountant.events == tuple(poisson(z, 1) for z in releases)

    def test_noise_that_changes_amid_a_batch_counts_from_the_next(
        self, releases: list[float]
    ) -> None:
        """All parts of a batch are released, and charged, with the noise of the first."""
        run = private(
            batch_size=32, max_physical_batch_size=4, noise_multiplier=2.0, poisson_sampling=True
        )
        for x, y in run.loader:
            run.step(F.cross_entropy, x, y)
            run.optimizer.noise_multiplier += 1.0
        charges = {event.noise_multiplier: event.count for event in run.engine.accountant.events}
        assert len(releases) == 2
        assert charges == Counter(releases)

    def test_a_batch_without_a_step_costs_what_it_was_drawn_for(self) -> None:
        run = private(noise_multiplier=2.0, poisson_sampling=True)
        for _ in run.loader:
            run.optimizer.noise_multiplier = 100.0
        assert run.engine.accountant.events == (poisson(2.0, 1), poisson(100.0, 3))

    def test_a_pass_costs_its_least_noise(self) -> None:
        """Each row is in one step of a pass: the worst step bounds them all."""
        run = private(noise_multiplier=2.0)
        for noise in (3.0, 1.5, 2.5, 1.0):
            run.optimizer.noise_multiplier = noise
            run.epoch()
        steps = iter((5.0, 4.0, 6.0, 3.0))
        for x, y in run.loader:
            run.optimizer.noise_multiplier = next(steps)
            run.step(F.cross_entropy, x, y)
        counts = {e.noise_multiplier: e.count for e in run.engine.accountant.events}
        # Of the last pass the first batch was drawn while the noise was 1.
        assert counts == {3.0: 1, 1.5: 1, 2.5: 1, 1.0: 2}

    @pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, -math.inf, "2", None, True])
    @pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm", "expected_batch_size"])
    def test_what_is_no_noise_is_refused(self, name: str, bad: Any) -> None:
        run = private(noise_multiplier=2.0)
        before = getattr(run.optimizer, name)
        with pytest.raises((TypeError, ValueError), match=name):
            setattr(run.optimizer, name, bad)
        assert getattr(run.optimizer, name) == before
        run.epoch()

    def test_the_bound_of_a_batch_is_one_for_all_its_parts(self) -> None:
        """Otherwise one row could move the sum by more than the noise is made for."""
        x = 1e6 * torch.ones(8, 5)
        data = torch.utils.data.TensorDataset(x, torch.arange(8) % 3)
        for change in (0.01, 100.0):
            run = private(data=data, batch_size=8, max_physical_batch_size=4, max_grad_norm=1.0)
            for inputs, labels in run.loader:
                run.step(F.cross_entropy, inputs, labels)
                run.optimizer.max_grad_norm *= change
            norm = float(torch.stack([g.square().sum() for g in run.gradients]).sum().sqrt())
            assert 0 < 8 * norm <= 8 * 1.001, "every row is bounded by 1"
            run = private(
                data=data, batch_size=8, max_physical_batch_size=4, noise_multiplier=1.0,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
            )  # fmt: skip
            seen: list[float] = []
            original = GaussianSum.sum_of_parts

            def spy(*args: Any, seen: list[float] = seen, real: Any = original) -> Any:
                seen.append(args[2])
                return real(*args)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(GaussianSum, "sum_of_parts", spy)
                for inputs, labels in run.loader:
                    run.step(F.cross_entropy, inputs, labels)
                    run.optimizer.max_grad_norm *= change
            assert seen == [1.0], "the noise is that of the bound"

    def test_the_divisor_scales_and_does_nothing_else(self) -> None:
        """The noise's grid and allowances follow the batches, not what they are divided by."""
        results = []
        for divisor in (16.0, 16e-6):
            torch.manual_seed(0)
            run = private(noise_multiplier=1.0, random_state=3, max_grad_norm=0.3)
            run.optimizer.expected_batch_size = divisor
            for x, y in run.loader:
                run.optimizer.zero_grad()
                F.cross_entropy(run.module(x), y).backward()
                run.optimizer.step()
                break
            results.append(run.gradients[0] * divisor)
        assert torch.allclose(results[0], results[1], rtol=1e-6)

    def test_an_ellipsoid_that_changes_amid_a_batch_drops_its_parts(self) -> None:
        run = private(batch_size=8, max_physical_batch_size=4)
        for x, y in run.loader:
            run.step(F.cross_entropy, x, y)
            break
        assert run.optimizer._sums
        run.optimizer.scales = dict(run.optimizer.scales)
        assert not run.optimizer._sums

    def test_parts_cannot_be_declared(self) -> None:
        """Rows added under a batch declared unfinished would be added once more."""
        run = private()
        with pytest.raises(AttributeError):
            run.optimizer.last_chunk = False  # type: ignore[misc]


class TestDraws:
    def test_batches_that_the_loop_skips_are_charged(self) -> None:
        run = private(
            data=table(100), batch_size=1, noise_multiplier=1.0, poisson_sampling=True,
            random_state=0,
        )  # fmt: skip
        steps = 0
        for x, y in run.loader:
            if len(x) == 0:
                continue
            run.step(F.cross_entropy, x, y)
            steps += 1
        assert steps < 80
        assert run.engine.accountant.events == (poisson(1.0, 100, 100, 1),)

    def test_a_drawn_batch_is_in_the_report_before_its_step(self) -> None:
        run = private(noise_multiplier=1.0, poisson_sampling=True)
        for done, (x, y) in enumerate(run.loader):
            assert run.engine.accountant.events == (poisson(1.0, done + 1),)
            expected = PrivacyPlan((poisson(1.0, done + 1),)).epsilon(1e-5)
            assert run.engine.get_epsilon(1e-5) == expected
            assert run.engine.report(1e-5).epsilon == expected
            run.step(F.cross_entropy, x, y)
            assert charged(run) == done + 1

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    @pytest.mark.parametrize("workers", [0, 1])
    def test_batches_that_workers_fetch_ahead_are_not(self, workers: int) -> None:
        options: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 4} if workers else {}
        run = of_loader(DataLoader(table(), batch_size=8, **options))
        for x, y in run.loader:
            run.step(F.cross_entropy, x, y)
            break
        assert charged(run) == 1

    def test_parts_are_one_draw(self) -> None:
        run = private(
            batch_size=32, max_physical_batch_size=4, noise_multiplier=1.0, poisson_sampling=True
        )
        run.epoch()
        for _ in run.loader:
            pass
        assert charged(run) == 4

    @pytest.mark.parametrize("poisson_sampling", [True, False])
    def test_two_iterators_at_a_time_are_refused(self, poisson_sampling: bool) -> None:
        run = private(noise_multiplier=1.0, poisson_sampling=poisson_sampling)
        with pytest.raises(RuntimeError, match="one iterator at a time"):
            for _ in zip(run.loader, run.loader, strict=True):
                pass
        outer = iter(run.loader)
        next(outer)
        run.epoch()
        with pytest.raises(RuntimeError, match="one iterator at a time"):
            next(outer)

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_an_older_iterator_takes_nothing_from_the_newer(self) -> None:
        """Batches that workers have fetched keep their sizes: steps on them are accepted."""
        run = of_loader(DataLoader(table(), batch_size=8, num_workers=1, prefetch_factor=2))
        older = iter(run.loader)
        next(older)
        for batch, (x, y) in enumerate(run.loader):
            run.step(F.cross_entropy, x, y)
            if batch == 1:
                with pytest.raises(RuntimeError, match="one iterator at a time"):
                    next(older)
        assert charged(run) == 9

    def test_every_pass_that_is_begun_is_charged(self) -> None:
        """With rows in another order each time, a row could be in a step of each pass."""
        run = private(noise_multiplier=1.0)
        for _ in range(3):
            x, y = next(iter(run.loader))
        run.step(F.cross_entropy, x, y)
        assert charged(run) == 3

    @pytest.mark.parametrize("poisson_sampling", [True, False])
    def test_a_private_loader_is_what_it_was_made_from(self, poisson_sampling: bool) -> None:
        """Another training with it draws and charges for itself."""
        run = private(noise_multiplier=1.0, poisson_sampling=True)
        for loader in (run.loader, copy.deepcopy(run.loader)):
            other = of_loader(loader, poisson_sampling=poisson_sampling)
            other.epoch()
            one_pass = GaussianEvent(1.0, purpose="gradients", under="replace-one")
            expected = poisson(1.0, 4) if poisson_sampling else one_pass
            assert other.engine.accountant.events == (expected,)
        module = nn.Linear(5, 3)
        _, optimizer, again = PrivacyEngine().make_private_with_epsilon(
            module=module, optimizer=sgd(module.parameters()), data_loader=run.loader,
            target_epsilon=1.0, target_delta=1e-3, epochs=1, max_grad_norm=1.0,
        )  # fmt: skip
        assert len(again) == 4
        assert optimizer.noise_multiplier > 0
        assert charged(run) == 0

    def test_a_draw_is_noted_beside_a_checkpoint(self, tmp_path: Path) -> None:
        path = tmp_path / "checkpoint.pt"
        run = private(noise_multiplier=1.0, poisson_sampling=True)
        run.engine.save_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
        iterator = iter(run.loader)

        def resumed() -> int:
            other = private(noise_multiplier=1.0, poisson_sampling=True)
            other.engine.load_checkpoint(path=path, module=other.module, optimizer=other.optimizer)
            return charged(other)

        for drawn in range(1, 4):
            x, y = next(iterator)
            assert resumed() == drawn
            if drawn == 2:
                run.step(F.cross_entropy, x, y)
                assert resumed() == drawn
        run.optimizer.noise_multiplier = 2.0
        run.step(F.cross_entropy, x, y)
        assert charged(run) == 3
        assert resumed() >= 3

    @pytest.mark.parametrize("options", [{}, {"correlation": 4}, {"poisson_sampling": False}])
    def test_what_was_paid_before_a_checkpoint_is_loaded_is_paid_again(
        self, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        """Whoever resumes from the file sees all that was released from it."""
        options = {"noise_multiplier": 1.0, "poisson_sampling": True, **options}
        path = tmp_path / "checkpoint.pt"
        run = private(**options)
        run.engine.save_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
        other = private(**options)
        iterator = iter(other.loader)
        x, y = next(iterator)
        other.engine.load_checkpoint(path=path, module=other.module, optimizer=other.optimizer)
        if "correlation" not in options:
            other.step(F.cross_entropy, x, y)
        other.step(F.cross_entropy, *next(iterator))
        third = private(**options)
        third.engine.load_checkpoint(path=path, module=third.module, optimizer=third.optimizer)
        assert charged(third) == {None: 2, 4: 4}[options.get("correlation")] - (
            not options["poisson_sampling"]
        )

    def test_a_file_saved_amid_a_batch_counts_it_once(self, tmp_path: Path) -> None:
        path = tmp_path / "checkpoint.pt"
        run = private(noise_multiplier=1.0, poisson_sampling=True)
        for x, y in run.loader:
            run.engine.save_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
            run.step(F.cross_entropy, x, y)
            run.engine.load_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
        assert charged(run) == 4


class TestEarlierBatches:
    """What was computed from a batch is none of the next one's, which pays for itself alone."""

    @pytest.mark.parametrize("verify", [True, False])
    def test_a_backward_pass_of_an_earlier_batch_is_refused(self, verify: bool) -> None:
        run = private(noise_multiplier=1.0, poisson_sampling=True, verify=verify)
        batches = iter(run.loader)
        x, y = next(batches)
        loss = F.cross_entropy(run.module(x), y)
        next(batches)
        with pytest.raises(RuntimeError, match="before the data loader hands out the next one"):
            loss.backward()

    @pytest.mark.parametrize("verify", [True, False])
    def test_a_backward_pass_is_none_of_the_next_batch(self, verify: bool) -> None:
        run = private(noise_multiplier=1.0, poisson_sampling=True, verify=verify)
        batches = iter(run.loader)
        x, y = next(batches)
        F.cross_entropy(run.module(x), y).backward()
        next(batches)
        with pytest.raises(RuntimeError, match="found no private gradients"):
            run.optimizer.step()

    def test_a_batch_of_another_training_is_charged_for_all_rows(self) -> None:
        run, other = (
            private(noise_multiplier=1.0, poisson_sampling=True, batch_size=64) for _ in range(2)
        )
        next(iter(run.loader))
        x, y = next(iter(other.loader))
        assert len(x) == 64
        with pytest.warns(UserWarning, match="as if it held all rows"):
            run.step(F.cross_entropy, x, y)
        assert {event.sampling for event in run.engine.accountant.events} == {None, "poisson"}


class TestSplitBatches:
    def part(self, run: Run, rows: int) -> list[torch.Tensor]:
        """The sum of a step on the first rows alone."""
        twin = private(copy.deepcopy(run.module._module), batch_size=16)
        x, y = table().tensors
        twin.step(F.cross_entropy, x[:rows], y[:rows])
        return twin.gradients

    def test_that_are_left_are_in_no_later_step(self) -> None:
        run = private(batch_size=16, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
        expected = self.part(run, 8)
        x, y = table().tensors
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=8, optimizer=run.optimizer
        ) as parts:
            for inputs, labels in parts:
                run.step(F.cross_entropy, inputs, labels)
                break
        run.step(F.cross_entropy, x[:8], y[:8])
        for found, one in zip(run.gradients, expected, strict=True):
            assert torch.allclose(found, one, atol=1e-6)

    @pytest.mark.parametrize("traced", [True, False])
    def test_that_are_left_pay_for_no_later_step(self, traced: bool) -> None:
        run = private(noise_multiplier=1.0, poisson_sampling=True, batch_size=64)
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=8, optimizer=run.optimizer
        ) as parts:
            x, y = next(iter(parts))
        x, y = (x, y) if traced else table()[:8]
        with pytest.warns(UserWarning, match="charged as if it held all rows"):
            run.step(F.cross_entropy, x, y)
        assert charged(run) == 2

    def test_a_step_that_fails_leaves_nothing_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever catches the error and tries again would count some rows twice."""
        run = private(batch_size=16, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
        expected = self.part(run, 16)
        original = run.optimizer._sum_of
        for x, y in run.loader:
            with monkeypatch.context() as patch:
                patch.setattr(
                    run.optimizer, "_sum_of", lambda *_: (_ for _ in ()).throw(OSError("full"))
                )
                with pytest.raises(OSError, match="full"):
                    run.step(F.cross_entropy, x, y)
            assert run.optimizer._sum_of == original
            run.step(F.cross_entropy, x, y)
            break
        for found, one in zip(run.gradients, expected, strict=True):
            assert torch.allclose(found, one, atol=1e-6)


class Odd(Sampler[int]):
    """Of which nothing is known."""

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, 64, 2))


class Backwards(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(63, -1, -1))


class OddBatches(BatchSampler):
    pass


REFUSED: dict[str, Callable[[Any], DataLoader[Any]]] = {
    "weighted": lambda data: DataLoader(
        data, batch_size=8, sampler=WeightedRandomSampler([1.0] * 64, 64)
    ),
    "own": lambda data: DataLoader(data, batch_size=8, sampler=Odd()),
    "derived": lambda data: DataLoader(data, batch_size=8, sampler=Backwards(data)),
    "list": lambda data: DataLoader(data, batch_size=8, sampler=[1, 2, 3]),
    "own in batches": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(Odd(), 8, drop_last=False)
    ),
    "own batches": lambda data: DataLoader(
        data, batch_sampler=OddBatches(RandomSampler(data), 8, drop_last=False)
    ),
    "another table's": lambda data: DataLoader(
        data, batch_size=8, sampler=RandomSampler(table(32))
    ),
    "repeated": lambda data: DataLoader(data, batch_size=2, sampler=SubsetRandomSampler([1, 2, 1])),
    "beyond": lambda data: DataLoader(data, batch_size=2, sampler=SubsetRandomSampler([1, 64])),
    "negative": lambda data: DataLoader(data, batch_size=2, sampler=SubsetRandomSampler([1, -1])),
    "share of two": lambda data: DataLoader(
        data, batch_size=8, sampler=DistributedSampler(data, num_replicas=2, rank=0)
    ),
}
HONOURED: dict[str, Callable[[Any], DataLoader[Any]]] = {
    "order": lambda data: DataLoader(data, batch_size=8),
    "shuffle": lambda data: DataLoader(data, batch_size=8, shuffle=True),
    "batches": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(RandomSampler(data), 8, drop_last=False)
    ),
    "distributed": lambda data: DataLoader(
        data, batch_size=8, sampler=DistributedSampler(data, num_replicas=1, rank=0)
    ),
}


class TestSamplers:
    @pytest.mark.parametrize("name", REFUSED)
    def test_of_which_the_rows_are_not_known_are_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="poisson_sampling=True"):
            of_loader(REFUSED[name](table()))

    @pytest.mark.parametrize("name", HONOURED)
    def test_of_all_rows(self, name: str) -> None:
        run = of_loader(HONOURED[name](table()))
        run.epoch()
        assert run.engine.accountant.events == (poisson(1.0, 8, 64, 8),)

    @pytest.mark.parametrize("whole", [True, False])
    def test_a_subset_stays_the_subset(self, whole: bool) -> None:
        """Poisson over its rows alone, at the rate of their number; the others are held out."""
        data = torch.utils.data.TensorDataset(torch.randn(64, 5), torch.arange(64))
        rows = torch.arange(3, 64, 3)
        # PyTorch takes a tensor too, whatever its annotation says.
        sampler = SubsetRandomSampler(cast(Any, rows) if whole else rows.tolist())
        loader = (
            DataLoader(data, batch_size=4, sampler=sampler)
            if whole
            else DataLoader(data, batch_sampler=BatchSampler(sampler, 4, drop_last=True))
        )
        run = of_loader(loader, random_state=0)
        drawn = Counter[int]()
        for _ in range(40):
            drawn.update(row for _, labels in run.loader for row in labels.tolist())
        assert set(drawn) == set(rows.tolist())
        steps = math.ceil(len(rows) / 4)
        assert run.engine.accountant.events == (poisson(1.0, 40 * steps, len(rows), 4),)
        assert isinstance(run.loader, PrivateLoader)
        assert run.loader.batches.rate == 4 / len(rows)
        assert abs(sum(drawn.values()) / (40 * steps) - 4) < 1

    def test_a_target_is_planned_for_the_subset(self) -> None:
        module, engine = nn.Linear(5, 3), PrivacyEngine()
        run = Run(engine, *engine.make_private_with_epsilon(
            module=module, optimizer=sgd(module.parameters()),
            data_loader=DataLoader(
                table(), batch_size=4, sampler=SubsetRandomSampler(range(32))
            ),
            target_epsilon=2.0, target_delta=1e-3, epochs=2, max_grad_norm=1.0,
        ))  # fmt: skip
        for _ in range(2):
            run.epoch()
        assert charged(run) == 16
        assert 0.95 * 2 < engine.get_epsilon(1e-3) <= 2

    def test_short_passes_stay_short(self) -> None:
        loader = DataLoader(table(), batch_size=8, sampler=RandomSampler(table(), num_samples=24))
        run = of_loader(loader)
        run.epoch()
        assert run.engine.accountant.events == (poisson(1.0, 3, 64, 8),)

    @pytest.mark.parametrize("poisson_sampling", [True, False])
    def test_a_data_set_that_repeats_rows_is_refused(self, poisson_sampling: bool) -> None:
        data = table()
        twice = Subset(data, [0, 1, 1, 2])
        repeated: Dataset[Any]
        different: Dataset[Any]
        x, y = data.tensors
        overlapping: Dataset[Any] = ConcatDataset(
            [TensorDataset(x[:4], y[:4]), TensorDataset(x[3:], y[3:])]
        )
        for repeated in (
            twice, Subset(twice, [0, 1, 2]), ConcatDataset([data, data]), overlapping,
        ):  # fmt: skip
            with pytest.raises(ValueError, match="each row once"):
                of_loader(DataLoader(repeated, batch_size=2), poisson_sampling=poisson_sampling)
        apart: Dataset[Any] = ConcatDataset(
            [TensorDataset(x[:4], y[:4]), TensorDataset(x[4:], y[4:])]
        )
        for different in (Subset(data, [3, 1, 2]), ConcatDataset([data, table(8)]), apart):
            of_loader(DataLoader(different, batch_size=2), poisson_sampling=poisson_sampling)

    @pytest.mark.parametrize("batch_size", [1, 8])
    def test_rows_counted_from_the_end_are_refused(self, batch_size: int) -> None:
        """-1 and the last row's number are two names of one row."""
        data = table()
        loader = DataLoader(
            data, batch_size=batch_size, sampler=SubsetRandomSampler([-1, len(data) - 1, 0])
        )
        run = of_loader(loader, poisson_sampling=False)
        with pytest.raises(ValueError, match="would count twice under both numbers"):
            run.epoch()

    def test_a_sampler_within_batches_is_seen(self) -> None:
        """Rows that come twice in a pass are not paid by one release."""

        class Twice(Odd):
            def __iter__(self) -> Iterator[int]:
                return iter([*range(16), *range(16)])

        loader = DataLoader(table(), batch_sampler=BatchSampler(Twice(), 8, drop_last=False))
        run = of_loader(loader, poisson_sampling=False)
        run.epoch()
        assert charged(run) == 4

    def test_processes_that_could_take_the_same_row_are_refused(self) -> None:
        from privagrad.torch.samplers import refuse_repeats

        two = Processes(0, 2)
        shared: DistributedSampler[Any] = DistributedSampler(table(), num_replicas=2, rank=0)
        refuse_repeats(DataLoader(table(), batch_size=8, sampler=shared), two)

        class Own(DistributedSampler[Any]):
            pass

        own = Own(table(), num_replicas=2, rank=0)
        for loader in (
            DataLoader(table(), batch_size=8, shuffle=True),
            DataLoader(table(), batch_size=8, sampler=own),
            DataLoader(
                table(), batch_size=8, sampler=DistributedSampler(table(), num_replicas=2, rank=1)
            ),
        ):
            with pytest.raises(ValueError, match="could take the same row in one step"):
                refuse_repeats(loader, two)

    def test_a_target_counts_the_steps_of_a_sampler_that_repeats(self) -> None:
        module, engine = nn.Linear(5, 3), PrivacyEngine()
        run = Run(engine, *engine.make_private_with_epsilon(
            module=module, optimizer=sgd(module.parameters()),
            data_loader=DataLoader(
                table(), batch_size=16, sampler=RandomSampler(table(), num_samples=256)
            ),
            target_epsilon=2.0, target_delta=1e-3, epochs=1, max_grad_norm=1.0,
            poisson_sampling=False,
        ))  # fmt: skip
        run.epoch()
        assert charged(run) == 16
        assert engine.get_epsilon(1e-3) <= 2


class TestProcesses:
    def child(self, work: Callable[[], None]) -> str:
        """What `work` raises in a forked process."""
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks beside threads
            pid = os.fork()
        if pid == 0:  # pragma: no cover
            signal.alarm(100)  # a child that waits for ever ends, with an empty message
            message = "nothing"
            try:
                work()
            except BaseException as error:
                message = f"{type(error).__name__}: {error}"
            os.write(write, message.encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            message = file.read()
        os.waitpid(pid, 0)
        return message

    def test_a_forked_process_draws_nothing(self) -> None:
        run = private(noise_multiplier=1.0, poisson_sampling=True)
        run.epoch()
        for _ in range(2):
            found = self.child(lambda: next(iter(run.loader)))
            assert "RuntimeError" in found
            assert "in the process that trains" in found
        run.epoch()
        assert charged(run) == 8

    def test_a_forked_process_releases_nothing(self) -> None:
        """Not on a batch of its parent either, and with threads of its parent it does not wait."""
        run = private(
            nn.Linear(600, 300), table(8, 600, 300), 8, noise_multiplier=1.0,
            poisson_sampling=True, random_state=0,
        )  # fmt: skip
        run.epoch()
        x, y = next(iter(run.loader))
        assert "in the process that trains" in self.child(lambda: run.step(F.cross_entropy, x, y))
        run.step(F.cross_entropy, x, y)
        assert charged(run) == 2

    def test_an_account_that_was_sent_elsewhere_is_refused(self) -> None:
        engine = pickle.loads(pickle.dumps(PrivacyEngine()))
        run = private(engine=engine, noise_multiplier=1.0)
        run.epoch()
        assert charged(run) == 1
        sent = pickle.dumps(PrivacyEngine())

        def work() -> None:
            private(engine=pickle.loads(sent), noise_multiplier=1.0).epoch()

        assert "in the process that trains" in self.child(work)


class TestCopies:
    @pytest.mark.parametrize(
        "attempt", [copy.deepcopy, copy.copy, pickle.dumps], ids=["deepcopy", "copy", "pickle"]
    )
    def test_of_optimizers_are_refused_and_damage_nothing(
        self, attempt: Callable[[Any], Any]
    ) -> None:
        run, other = private(noise_multiplier=1.0), private()
        step = type(run.optimizer).step
        with pytest.raises(TypeError, match="state_dict"):
            attempt(run.optimizer)
        assert type(run.optimizer).step is step
        run.epoch()
        other.epoch()
        private().epoch()

    def test_of_loaders_draw_from_the_same_account(self) -> None:
        run = private(noise_multiplier=1.0, poisson_sampling=True)
        assert isinstance(run.loader, PrivateLoader)
        twin = copy.deepcopy(run.loader)
        assert twin.batches is run.loader.batches, "with a copied generator batches would repeat"
        for x, y in twin:
            run.step(F.cross_entropy, x, y)
        assert run.engine.accountant.events == (poisson(1.0, 4),)


@st.composite
def loops(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """What a training loop may do with the batches of a private loader."""
    actions = st.one_of(
        st.tuples(st.just("step"), st.none()),
        st.tuples(st.just("step"), st.none()),
        st.tuples(st.just("next"), st.none()),
        st.tuples(st.just("next"), st.none()),
        st.tuples(st.just("skip"), st.none()),
        st.tuples(st.just("begin"), st.sampled_from(["loader", "parts"])),
        st.tuples(st.just("older"), st.none()),
        st.tuples(st.just("noise"), st.sampled_from([0.5, 1.0, 2.0])),
        st.tuples(st.just("foreign"), st.none()),
    )
    return draw(st.lists(actions, max_size=25))


def attempt(run: Run, *batch: Tensor) -> None:
    """A step, which may be refused: on a part twice, or on other rows than were drawn."""
    try:
        run.step(F.cross_entropy, *batch)
    except RuntimeError as error:
        refusals = ("count twice", "loader drew", "origin is known")
        if not any(refusal in str(error) for refusal in refusals):
            raise


@settings(max_examples=300, deadline=None)
@given(loop=loops(), poisson_sampling=st.booleans(), most=st.sampled_from([None, 3]))
def test_no_loop_releases_more_than_is_charged(
    loop: list[tuple[str, Any]], poisson_sampling: bool, most: int | None
) -> None:
    """Released at noise z or less ≤ charged at z or less, at any moment, for every z.

    In the loader's own order one charge of a pass covers all its steps on new batches.
    """
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = spied(patch)
        run = private(
            data=table(12), batch_size=4, noise_multiplier=1.0, max_physical_batch_size=most,
            poisson_sampling=poisson_sampling, random_state=0,
        )  # fmt: skip
        parts = BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer
        ).parts
        firsts: list[bool] = []
        begin_part = run.optimizer.begin_part

        def note(first: bool, last: bool, *more: Any) -> None:
            firsts.append(first)
            begin_part(first, last, *more)

        patch.setattr(run.optimizer, "begin_part", note)
        iterators, batch, passes, repeats = [iter(run.loader)], None, 0, 0
        foreign = 0
        fresh, pending_pass = False, True
        for action, detail in loop:
            before = len(made)
            if action == "begin":
                iterators.append(iter(run.loader if detail == "loader" else parts))
                pending_pass = True
            elif action == "older" and len(iterators) > 1:
                with pytest.raises((RuntimeError, StopIteration)):
                    next(iterators[-2])
            elif action == "noise":
                run.optimizer.noise_multiplier = detail
            elif action in ("next", "skip"):
                batch = next(iterators[-1], None)
                if batch is None:
                    iterators.append(iter(run.loader))
                    pending_pass = True
                    continue
                passes += pending_pass
                pending_pass = False
                fresh |= firsts[-1]
            elif action == "step" and batch is not None:
                attempt(run, *batch)
            elif action == "foreign":
                size = 2 if batch is None else len(batch[0])
                attempt(run, *(t[:size] for t in table(12).tensors))
            if len(made) > before:
                repeats += not fresh
                fresh = False
            charges = {e.noise_multiplier: 0 for e in run.engine.accountant.events}
            for event in run.engine.accountant.events:
                charges[event.noise_multiplier] += event.count
            # Rows from elsewhere are not those that a batch has paid for.
            foreign += action == "foreign"
            due = (sum(firsts) if poisson_sampling else passes) + repeats
            assert due <= charged(run) <= due + foreign
            if poisson_sampling:
                events = run.engine.accountant.events
                whole = sum(event.count for event in events if event.sampling is None)
                assert repeats <= whole <= repeats + foreign
                for noise in (0.5, 1.0, 2.0):
                    least = sum(z <= noise for z in made)
                    assert sum(n for z, n in charges.items() if z <= noise) >= least
            elif made:
                assert min(charges) <= min(made)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 30),
    batch_size=st.integers(1, 12),
    epochs=st.integers(1, 3),
    most=st.sampled_from([None, 1, 3]),
    noise=st.sampled_from([0.7, 2.0]),
)
def test_ordinary_loops_cost_their_plan(
    rows: int, batch_size: int, epochs: int, most: int | None, noise: float
) -> None:
    run = private(
        data=table(rows), batch_size=batch_size, max_physical_batch_size=most,
        noise_multiplier=noise, poisson_sampling=True,
    )  # fmt: skip
    for _ in range(epochs):
        run.epoch()
    size = min(batch_size, rows)
    steps = epochs * math.ceil(rows / size)
    assert run.engine.accountant.events == (poisson(noise, steps, rows, size),)
