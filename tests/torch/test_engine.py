"""The engine's mechanism, its sampling and its accounts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.privacy.noise import random_source
from privagrad.torch import BatchMemoryManager, PrivacyEngine
from privagrad.torch.agreement import agreed_seed
from privagrad.torch.loaders import CollateAny, PrivateLoader
from privagrad.torch.processes import Processes
from privagrad.torch.samplers import PoissonBatches
from tests.statistics import assert_scale, rate_accepted, scale_accepted
from tests.torch.reference import assert_same, looped, scales_of
from tests.torch.small import Run, private, table

KINDS = ("ball", "general", "rank-one")


def nothing(output: Tensor, target: Tensor) -> Tensor:
    """A loss without gradients."""
    return (0.0 * output).sum(1).mean()


def samples(run: Run, loss: Callable[[Any, Tensor], Tensor], passes: int) -> list[list[Tensor]]:
    found = []
    for _ in range(passes):
        for x, y in run.loader:
            run.step(loss, x, y)
            if run.optimizer.last_chunk:
                found.append([g.clone() for g in run.gradients])
    return found


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


class TestNoise:
    @pytest.mark.parametrize("kind", KINDS)
    def test_gradients_are_normal_around_the_bounded_mean(self, kind: str) -> None:
        """N(mean, (z B / b)² / C) in each coordinate."""
        torch.manual_seed(0)
        module, data = nn.Linear(5, 30), table(32, 5, 30)
        x, y = data.tensors
        mean = looped(module, F.cross_entropy, x, y, kind, 0.4)
        scales = scales_of(module, kind)
        run = private(
            module, data, 32, still, noise_multiplier=1.5, max_grad_norm=0.4, ellipsoid=scales
        )
        roots = [torch.ones_like(m) if scales is None else s.sqrt() for m, s in zip(
            mean, scales or mean, strict=True)]  # fmt: skip
        noise = [
            [((g - m) * root).numpy() for g, m, root in zip(found, mean, roots, strict=True)]
            for found in samples(run, F.cross_entropy, 20)
        ]
        for parameter in range(len(mean)):
            assert_scale(np.array([found[parameter] for found in noise]), 1.5 * 0.4 / 32)

    def test_is_of_the_sum_where_losses_are_sums(self) -> None:
        run = private(
            nn.Linear(40, 30), table(32, 40), 16,
            noise_multiplier=2.0, max_grad_norm=3.0, loss_reduction="sum",
        )  # fmt: skip
        run.epoch(lambda out, y: (0.0 * out).sum())
        assert_scale(run.gradients[0].numpy(), 6.0)

    def test_of_parameters_and_steps_is_independent(self) -> None:
        """Sums and differences of two of them have the same scale."""
        module = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(3)))
        run = private(module, table(32, 24), 16, still, noise_multiplier=1.0)
        first, second = samples(run, nothing, 1)
        for a, b in [(0, 1), (0, 2), (1, 2)]:
            assert_scale((first[a] + first[b]).numpy(), math.sqrt(2) / 16)
            assert_scale((first[a] - first[b]).numpy(), math.sqrt(2) / 16)
        for one, other in zip(first, second, strict=True):
            assert_scale((one + other).numpy(), math.sqrt(2) / 16)
            assert_scale((one - other).numpy(), math.sqrt(2) / 16)

    def test_of_parameters_that_no_example_used(self) -> None:
        class Spare(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.used, self.spare = nn.Linear(5, 3), nn.Linear(20, 20)

            def forward(self, x: Tensor) -> Tensor:
                return self.used(x)

        run = private(Spare(), noise_multiplier=1.0)
        run.epoch()
        assert_scale(run.module.spare.weight.grad.numpy(), 1 / 16)

    def test_of_an_empty_batch_is_there_and_is_charged(self) -> None:
        run = private(
            nn.Linear(20, 20), table(64, 20, 20), 1, still,
            noise_multiplier=1.0, poisson_sampling=True, random_state=0,
        )  # fmt: skip
        empty = 0
        for steps, (x, y) in enumerate(run.loader, start=1):
            run.step(F.cross_entropy, x, y)
            assert len(run.engine.accountant) == steps
            if len(x) == 0:
                empty += 1
                assert_scale(run.gradients[0].numpy(), 1.0)
        assert empty > 5

    def test_sources_are_secure_unless_seeded(self) -> None:
        a, b = (private(noise_multiplier=1.0) for _ in range(2))
        c, d = (private(nn.Linear(5, 3), noise_multiplier=1.0, random_state=1) for _ in range(2))
        for run in (a, b, c, d):
            run.epoch(nothing)
        assert not torch.equal(a.gradients[0], b.gradients[0])
        assert torch.equal(c.gradients[0], d.gradients[0])
        assert not a.engine.report(1e-5).seeded
        assert c.engine.report(1e-5).seeded
        assert "NOT PRIVATE" in str(c.engine.report(1e-5))


class TestBounds:
    def test_means_are_over_the_expected_batch_size(self) -> None:
        torch.manual_seed(0)
        module = nn.Linear(5, 3)
        run = private(
            copy.deepcopy(module), batch_size=8, optimizer=still, poisson_sampling=True,
            random_state=0,
        )  # fmt: skip
        sizes = set()
        for x, y in run.loader:
            run.step(F.cross_entropy, x, y)
            sizes.add(len(y))
            if len(y):
                mean = looped(module, F.cross_entropy, x, y, "ball", 1.0)
                assert_same(run.gradients, [m * len(y) / 8 for m in mean])
        assert len(sizes) > 2

    @pytest.mark.parametrize("kind", KINDS)
    def test_huge_gradients_count_exactly_as_the_bound(self, kind: str) -> None:
        torch.manual_seed(0)
        module = nn.Linear(5, 3)
        data = TensorDataset(1e6 * torch.randn(1, 5), torch.zeros(1))
        run = private(module, data, 1, still, max_grad_norm=0.7, ellipsoid=scales_of(module, kind))
        run.epoch(lambda out, y: out.square().sum(1).mean())
        scales = scales_of(module, kind) or [torch.ones_like(g) for g in run.gradients]
        squares = [(c * g * g).sum() for c, g in zip(scales, run.gradients, strict=True)]
        assert float(torch.stack(squares).sum().sqrt()) == pytest.approx(0.7, rel=1e-5)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
    def test_examples_that_are_not_finite_count_as_zero(self, bad: float) -> None:
        torch.manual_seed(0)
        module, (x, y) = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), table(8).tensors
        poisoned = x.clone()
        poisoned[[2, 5]] = bad

        def loss(out: Tensor, target: Tensor) -> Tensor:
            return out.square().sum(1).mean()

        run = private(copy.deepcopy(module), TensorDataset(poisoned, y), 8, still)
        run.epoch(loss)
        others = [0, 1, 3, 4, 6, 7]
        expected = looped(module, loss, x[others], y[others], "ball", 1.0)
        assert_same(run.gradients, [e * 6 / 8 for e in expected])
        assert run.optimizer.non_finite == 2


class TestSampling:
    def test_every_row_is_drawn_independently_at_the_rate(self) -> None:
        batches = PoissonBatches(range(50), 10, 5, random_source(3).sampler, Processes())
        drawn = np.zeros((400 * len(batches), 50), dtype=bool)
        step = 0
        for _ in range(400):
            for batch in batches:
                assert len(set(batch)) == len(batch)
                drawn[step, batch] = True
                step += 1
        assert step == 2000
        assert rate_accepted(int(drawn.sum()), drawn.size, 0.2)
        assert not rate_accepted(int(drawn.sum()), drawn.size, 0.19)
        assert all(rate_accepted(int(count), step, 0.2) for count in drawn.sum(0))
        together = drawn[:, :-1] & drawn[:, 1:]
        assert rate_accepted(int(together.sum()), together.size, 0.04)
        again = drawn[:-1] & drawn[1:]
        assert rate_accepted(int(again.sum()), again.size, 0.04)

    def test_a_pass_has_as_many_steps_as_the_loader_had(self) -> None:
        run = private(data=table(65), noise_multiplier=1.0, poisson_sampling=True)
        assert len(run.loader) == len(list(run.loader)) == 5

    def test_rate_is_that_of_the_accounts(self) -> None:
        run = private(data=table(65), noise_multiplier=1.0, poisson_sampling=True)
        run.epoch()
        event = run.engine.accountant.events[0]
        assert isinstance(run.loader, PrivateLoader)
        assert run.loader.batches.rate == event.rate == 16 / 65
        assert event.sampling == "poisson"

    def test_empty_batches_have_the_shapes_of_the_rows(self) -> None:
        rows = [({"image": torch.zeros(3, 4), "name": "a"}, 1), ({"image": torch.ones(3, 4)}, 2)]
        collate = CollateAny(torch.utils.data.default_collate, rows)
        features, target = collate([]).batch
        assert features["image"].shape == (0, 3, 4)
        assert target.shape == (0,)
        assert target.dtype == torch.int64
        assert collate([rows[1], rows[1]]).batch[0]["image"].shape == (2, 3, 4)

    def test_streams_are_refused(self) -> None:
        class Stream(IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(table())

        module = nn.Linear(5, 3)
        with pytest.raises(TypeError, match="IterableDataset"):
            PrivacyEngine().make_private(
                module=module, optimizer=still(module.parameters()),
                data_loader=DataLoader(Stream(), batch_size=4),
                noise_multiplier=1.0, max_grad_norm=1.0,
            )  # fmt: skip

    def test_parts_of_a_batch_that_was_left_are_in_no_step(self) -> None:
        """Their rows may be in the next batch as well: they would count twice."""
        torch.manual_seed(0)
        run = private(batch_size=32, optimizer=still, max_physical_batch_size=8)
        whole = private(copy.deepcopy(run.module._module), batch_size=32, optimizer=still)
        for x, y in run.loader:
            run.step(F.cross_entropy, x, y)
            break
        for expected, found in zip(
            samples(whole, F.cross_entropy, 1), samples(run, F.cross_entropy, 1), strict=True
        ):
            assert_same(found, expected)


def rows_twice(loader_of: Callable[[TensorDataset], DataLoader[Any]]) -> Run:
    module, engine = nn.Linear(5, 3), PrivacyEngine()
    return Run(
        engine,
        *engine.make_private(
            module=module, optimizer=still(module.parameters()), data_loader=loader_of(table()),
            noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
        ),
    )  # fmt: skip


class Twice(Sampler[int]):
    """Every row twice in a row."""

    def __len__(self) -> int:
        return 128

    def __iter__(self) -> Any:
        return iter(row // 2 for row in range(128))


class TestAccounts:
    def test_steps_are_one_event(self) -> None:
        run = private(batch_size=10, noise_multiplier=1.3, poisson_sampling=True)
        run.epoch()
        assert run.engine.accountant.events == (
            GaussianEvent(1.3, 7, "poisson", 64, 10, "gradients"),
        )
        plan = PrivacyPlan(run.engine.accountant.events)
        assert run.engine.get_epsilon(1e-5) == plan.epsilon(1e-5) > 0

    def test_nothing_released_costs_nothing(self) -> None:
        assert private(noise_multiplier=1.0).engine.get_epsilon(1e-5) == 0.0

    def test_a_step_is_charged_before_its_release(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise OSError("no randomness left")

        run = private(noise_multiplier=1.0, poisson_sampling=True)
        monkeypatch.setattr(GaussianSum, "release", fail)
        with pytest.raises(OSError, match="no randomness"):
            run.epoch()
        assert run.engine.accountant.events[0].count == 1

    @pytest.mark.parametrize("manager", [False, True])
    def test_parts_of_a_batch_are_one_release_equal_to_the_whole(self, manager: bool) -> None:
        torch.manual_seed(0)
        module = nn.Linear(5, 3)
        options: dict[str, Any] = {
            "poisson_sampling": True, "random_state": 4, "noise_multiplier": 1.0
        }  # fmt: skip
        whole = private(copy.deepcopy(module), batch_size=24, **options)
        whole.epoch()
        most: dict[str, Any] = {} if manager else {"max_physical_batch_size": 5}
        parts = private(copy.deepcopy(module), batch_size=24, **options, **most)
        sizes = []

        def train(loader: DataLoader[Any]) -> None:
            for x, y in loader:
                sizes.append(len(x))
                parts.step(F.cross_entropy, x, y)

        if manager:
            with BatchMemoryManager(
                data_loader=parts.loader, max_physical_batch_size=5, optimizer=parts.optimizer
            ) as loader:
                train(loader)
        else:
            train(parts.loader)
        assert max(sizes) <= 5
        assert len(sizes) > 3
        assert parts.engine.accountant.events == whole.engine.accountant.events
        for a, b in zip(parts.optimizer.params, whole.optimizer.params, strict=True):
            assert torch.allclose(a, b, atol=1e-6)

    @pytest.mark.parametrize("poisson", [True, False])
    def test_target_is_kept_and_used(self, poisson: bool) -> None:
        module, engine = nn.Linear(5, 3), PrivacyEngine()
        run = Run(engine, *engine.make_private_with_epsilon(
            module=module, optimizer=still(module.parameters()),
            data_loader=DataLoader(table(), batch_size=10), poisson_sampling=poisson,
            target_epsilon=2.0, target_delta=1e-3, epochs=3, max_grad_norm=1.0,
        ))  # fmt: skip
        for _ in range(3):
            run.epoch()
        assert 0.95 * 2 < engine.get_epsilon(1e-3) <= 2

    def test_a_second_training_is_paid_from_what_is_left(self) -> None:
        engine = PrivacyEngine()
        private(engine=engine, noise_multiplier=3.0, poisson_sampling=True).epoch()
        module = nn.Linear(5, 3)
        run = Run(engine, *engine.make_private_with_epsilon(
            module=module, optimizer=still(module.parameters()),
            data_loader=DataLoader(table(), batch_size=16),
            target_epsilon=3.0, target_delta=1e-3, epochs=2, max_grad_norm=1.0,
        ))  # fmt: skip
        for _ in range(2):
            run.epoch()
        assert 0.95 * 3 < engine.get_epsilon(1e-3) <= 3

    def test_without_noise_epsilon_is_infinite(self) -> None:
        run = private(poisson_sampling=True)
        run.epoch()
        assert run.engine.get_epsilon(1e-5) == math.inf
        assert "not private" in str(run.engine.report(1e-5))
        with pytest.raises(ValueError, match="infinite already"):
            run.engine.make_private_with_epsilon(
                module=nn.Linear(5, 3), optimizer=run.optimizer.original_optimizer,
                data_loader=DataLoader(table(), batch_size=16),
                target_epsilon=1.0, target_delta=1e-3, epochs=1, max_grad_norm=1.0,
            )  # fmt: skip

    def test_a_pass_in_the_loaders_order_is_one_release_under_replace_one(self) -> None:
        run = private(noise_multiplier=2.0)
        for passes in (1, 2, 3):
            run.epoch()
            assert run.engine.accountant.events == (
                GaussianEvent(2.0, passes, purpose="gradients", under="replace-one"),
            )
        assert run.engine.report(1e-5).relation == "replace-one"

    def test_steps_on_one_batch_are_paid_one_by_one(self) -> None:
        run = private(noise_multiplier=2.0)
        x, y = next(iter(run.loader))
        for _ in range(5):
            run.step(F.cross_entropy, x, y)
        assert run.engine.accountant.events[0].count == 5

    @pytest.mark.parametrize(
        "loader_of",
        [
            lambda data: DataLoader(
                data, batch_size=16, sampler=RandomSampler(data, replacement=True)
            ),
            lambda data: DataLoader(
                data, batch_size=16, sampler=RandomSampler(data, num_samples=128)
            ),
            lambda data: DataLoader(data, batch_size=16, sampler=Twice()),
        ],
        ids=["replacement", "two passes in one", "custom"],
    )
    def test_other_samplers_are_paid_step_by_step(
        self, loader_of: Callable[[TensorDataset], DataLoader[Any]]
    ) -> None:
        run = rows_twice(loader_of)
        run.epoch()
        assert run.engine.accountant.events[0].count == len(run.loader)

    def test_a_row_counts_once_in_a_batch(self) -> None:
        run = rows_twice(lambda data: DataLoader(data, batch_size=16, sampler=Twice()))
        assert [len(x) for x, _ in run.loader] == [8] * 8

    def test_samplings_that_do_not_compose_are_refused_before_training(self) -> None:
        run = private(noise_multiplier=1.0, poisson_sampling=True)
        run.epoch()
        with pytest.raises(ValueError, match="one neighbouring relation"):
            private(engine=run.engine, noise_multiplier=1.0)


@pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning")
@pytest.mark.parametrize(
    ("rows", "batch_size", "epochs", "epsilon"),
    [(2000, 100, 50, 8.0), (5000, 50, 20, 2.0), (10_000, 10, 1, 0.5)],
)
def test_accounts_agree_with_opacus(
    rows: int, batch_size: int, epochs: int, epsilon: float
) -> None:
    from opacus import accountants

    steps, rate = epochs * rows // batch_size, batch_size / rows
    module, engine = nn.Linear(1, 1), PrivacyEngine()
    _, optimizer, _ = engine.make_private_with_epsilon(
        module=module, optimizer=still(module.parameters()),
        data_loader=DataLoader(TensorDataset(torch.zeros(rows, 1)), batch_size=batch_size),
        target_epsilon=epsilon, target_delta=1e-5, epochs=epochs, max_grad_norm=1.0,
    )  # fmt: skip
    theirs = accountants.utils.get_noise_multiplier(
        target_epsilon=epsilon, target_delta=1e-5, sample_rate=rate, steps=steps, accountant="prv"
    )
    assert optimizer.noise_multiplier == pytest.approx(theirs, rel=0.02)
    accountant = accountants.PRVAccountant()
    accountant.history = [(optimizer.noise_multiplier, rate, steps)]
    event = GaussianEvent(optimizer.noise_multiplier, 1, "poisson", rows, batch_size)
    for _ in range(steps):
        engine.accountant.charge(event)
    assert engine.get_epsilon(1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=0.02)


def test_scales_are_told_apart() -> None:
    """The tests above would see noise that is off by a third."""
    noise = np.random.default_rng(0).normal(size=630)
    assert scale_accepted(noise, 1.0)
    assert not scale_accepted(noise * 2 / 3, 1.0)


class TestBatchesFromElsewhere:
    """No sampling makes them cheaper: each costs a release over all rows."""

    def test_twice_on_a_poisson_batch(self) -> None:
        run = private(noise_multiplier=1.0, poisson_sampling=True)
        x, y = next(iter(run.loader))
        run.step(F.cross_entropy, x, y)
        with pytest.warns(UserWarning, match="charged as if it held all rows"):
            run.step(F.cross_entropy, x, y)
        first, second = run.engine.accountant.events
        assert (first.sampling, first.count) == ("poisson", 1)
        assert (second.sampling, second.rate, second.count) == (None, 1.0, 1)
        assert PrivacyPlan((first, second)).relation == "zero-out"

    def test_batches_that_were_drawn_and_left_out_are_no_credit(self) -> None:
        run = private(noise_multiplier=1.0, poisson_sampling=True)
        for x, y in run.loader:
            last = x, y
        run.step(F.cross_entropy, *last)
        with pytest.warns(UserWarning, match="all rows"):
            run.step(F.cross_entropy, *last)

    def test_rows_of_ones_own(self) -> None:
        run = private(noise_multiplier=1.0, poisson_sampling=True)
        with pytest.warns(UserWarning, match="make_private"):
            run.step(F.cross_entropy, *table(16).tensors)
        assert [event.sampling for event in run.engine.accountant.events] == [None]


def test_a_distributed_sampler_that_repeats_rows_is_refused() -> None:
    data = table(33)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0)
    module = nn.Linear(5, 3)
    with pytest.raises(ValueError, match="drop_last=True"):
        PrivacyEngine().make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=4, sampler=sampler),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )


def test_lbfgs_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        private(optimizer=torch.optim.LBFGS)


class TestSeveralProcesses:
    """What one process says of the noise that another one draws."""

    class Others(Processes):
        def gathered(self, numbers: Sequence[float]) -> list[list[float]]:
            return [list(numbers), [1.0]]

    def test_seeded_noise_of_another_process_is_reported(self) -> None:
        assert agreed_seed(self.Others(1, 2), random_source(None, "discrete"))
