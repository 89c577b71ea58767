"""Users with several rows: sampled whole, averaged, bounded together, and charged as users."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, default_collate

from privagrad.privacy.bounded import SumOfParts
from privagrad.privacy.noise import random_source
from privagrad.privacy.users import Users
from privagrad.torch import BatchMemoryManager, DPDataLoader, PrivacyEngine
from privagrad.torch.processes import Processes
from privagrad.torch.release import slack_of
from privagrad.torch.samplers import PoissonBatches
from privagrad.torch.users import UserBatches, user_batches
from tests.torch.reference import assert_same, one_by_one, scales_of
from tests.torch.small import Run, gradient_of, private, table

GENERATOR = np.random.default_rng(0)
ROWS = 60
OWNERS = GENERATOR.permutation(np.repeat(np.arange(20), GENERATOR.permutation([1, 2, 3, 6] * 5)))
DATA = table(ROWS)
INPUTS, TARGETS = DATA.tensors
USERS = 20


def owners_private(**options: Any) -> Run:
    given: dict[str, Any] = {
        "poisson_sampling": True,
        "data": DATA,
        "groups": OWNERS,
        "batch_size": 5,
    } | options
    return private(**given)


def everyone(**options: Any) -> Run:
    """A pass is one step on all users, without noise and without learning."""
    module = options.pop("module", None) or model()
    return owners_private(module=module, batch_size=USERS, **options)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def looped(module: nn.Module, radius: float, kind: str, gamma: float, owners: Any) -> list[Tensor]:
    """The mean over users of the mean over each user's rows of the bounded gradients."""
    counts = np.bincount(owners)
    totals = [torch.zeros_like(p) for p in module.parameters()]
    found = one_by_one(module, F.cross_entropy, INPUTS, TARGETS, kind)
    for (norm, gradients), owner in zip(found, owners, strict=True):
        factor = radius / (norm + gamma) if gamma else min(1.0, radius / norm)
        for total, g in zip(totals, gradients, strict=True):
            total += g * factor / counts[owner] / (counts > 0).sum()
    return totals


@pytest.mark.parametrize("most", [None, 7])
@pytest.mark.parametrize("kind", ["ball", "general"])
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_a_step_is_the_mean_of_means_of_bounded_gradients(
    clipping: str, kind: str, most: int | None
) -> None:
    """Also in parts of 7 rows, which cut users in two."""
    module = model()
    gamma = {"gamma": 0.1} if clipping == "automatic" else {}
    expected = looped(module, 0.5, kind, gamma.get("gamma", 0.0), OWNERS)
    run = everyone(
        module=module, max_grad_norm=0.5, clipping=clipping, ellipsoid=scales_of(module, kind),
        max_physical_batch_size=most, **gamma,
    )  # fmt: skip
    before = [p.detach().clone() for p in module.parameters()]
    run.epoch()
    assert run.engine.accountant.unprotected == 1
    assert_same(run.gradients, expected)
    for p, was, g in zip(module.parameters(), before, expected, strict=True):
        assert torch.allclose(p.detach(), was - 0.1 * g, atol=1e-6)


def test_per_layer_each_tensor_is_averaged() -> None:
    module = model()
    norms = [0.3, 0.1, 0.4, 0.2]
    totals = [torch.zeros_like(p) for p in module.parameters()]
    counts = np.bincount(OWNERS)
    found = one_by_one(module, F.cross_entropy, INPUTS, TARGETS, "ball")
    for (_, gradients), owner in zip(found, OWNERS, strict=True):
        for total, g, norm in zip(totals, gradients, norms, strict=True):
            total += g * min(1.0, norm / float(g.norm())) / counts[owner] / USERS
    run = everyone(module=module, max_grad_norm=norms, clipping="per_layer")
    run.epoch()
    assert_same(run.gradients, totals)


class Tokens(nn.Module):
    """Layers whose gradients are formed a few examples at a time, or one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.lstm = nn.Embedding(11, 6), nn.LSTM(6, 5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(x))[0].sum(1))


@pytest.mark.parametrize("kind", ["ball", "general"])
def test_layers_that_form_gradients_in_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privagrad.torch.per_example.chunked._CACHED", 2000)
    monkeypatch.setattr("privagrad.torch.per_example.gradients._SMALL", 10)
    module = Tokens()
    x, y = torch.randint(0, 11, (ROWS, 9)), torch.randint(0, 3, (ROWS,))
    counts = np.bincount(OWNERS)
    totals = [torch.zeros_like(p) for p in module.parameters()]
    found = one_by_one(module, F.cross_entropy, x, y, kind)
    for (norm, gradients), owner in zip(found, OWNERS, strict=True):
        for total, g in zip(totals, gradients, strict=True):
            total += g * min(1.0, 0.5 / norm) / counts[owner] / USERS
    run = everyone(
        module=module,
        data=TensorDataset(x, y),
        max_grad_norm=0.5,
        ellipsoid=scales_of(module, kind),
    )
    run.epoch()
    assert_same(run.gradients, totals)


def test_sums_of_losses_are_sums_over_users() -> None:
    module = model()
    expected = [USERS * g for g in looped(module, 0.5, "ball", 0.0, OWNERS)]
    run = everyone(module=module, max_grad_norm=0.5, loss_reduction="sum")
    run.epoch(lambda out, y: F.cross_entropy(out, y, reduction="sum"))
    assert_same(run.gradients, expected)


def whitened_sums(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What every release adds its noise to, in coordinates where the bound is 1."""
    seen: list[Tensor] = []
    made = SumOfParts.__init__

    def note(self: Any, maker: Any, mechanism: Any, parts: Any, radius: float, *rest: Any) -> None:
        own = [torch.tensor(p.totals[0] * p.root_scale, dtype=torch.float64) for p in parts]
        seen.append(torch.cat(own) / radius)
        made(self, maker, mechanism, parts, radius, *rest)

    monkeypatch.setattr(SumOfParts, "__init__", note)
    return seen


@pytest.mark.parametrize("most", [None, 50])
@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
def test_a_user_with_very_many_rows_moves_the_sum_by_the_bound_at_most(
    clipping: str, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """900 rows whose long gradients all point the same way, between the rows of others."""
    x, y = table(40).tensors
    bad_x, bad_y = 1000 * torch.ones(900, 5), torch.zeros(900, dtype=torch.long)
    labels = [*range(20), *[99] * 900, *range(20, 40)]
    seen = whitened_sums(monkeypatch)
    for inputs, targets, groups in (
        (torch.cat([x[:20], bad_x, x[20:]]), torch.cat([y[:20], bad_y, y[20:]]), labels),
        (x, y, list(range(40))),
    ):
        torch.manual_seed(0)
        run = private(
            nn.Linear(5, 3), TensorDataset(inputs, targets), 41, poisson_sampling=True,
            noise_multiplier=1.0, groups=groups, clipping=clipping, max_physical_batch_size=most,
            max_grad_norm=[0.6, 0.8] if clipping == "per_layer" else 1.0,
        )  # fmt: skip
        run.epoch()
    moved = float((seen[0] - seen[1]).norm())
    assert 0.5 < moved <= 1 + slack_of(41, 1024)


def test_shares_of_a_user_add_up_to_1_at_most() -> None:
    counts = np.array([*range(1, 200), 1023, 1024, 10007])
    users = Users.numbered(np.repeat(np.arange(counts.size), counts).tolist())
    rows = int(counts.sum())
    drawn = PoissonBatches(range(counts.size), 5, 3, np.random.default_rng(0), Processes())
    batches = user_batches(drawn, range(rows), rows, users, 20000, np.random.default_rng(0))
    of_users = np.split(batches.shares.numpy(), np.cumsum(counts)[:-1])
    for shares, count in zip(of_users, counts, strict=True):
        assert len(set(shares)) == 1
        assert shares[0] == np.float32(shares[0])
        assert 1 - 2**-22 < shares[0] * count <= 1


@pytest.mark.parametrize("most", [None, 3])
def test_where_every_user_has_one_row_nothing_changes(most: int | None) -> None:
    """With the cap of 1 to the last bit; another cap counts for a little more rounding."""
    runs = []
    named: dict[str, Any] = {"groups": [f"user {i}" for i in range(64)], "max_rows_per_user": 1}
    for options in ({}, named):
        torch.manual_seed(0)
        run = private(
            nn.Linear(5, 3), poisson_sampling=True, noise_multiplier=1.0, random_state=4,
            max_physical_batch_size=most, **options,
        )  # fmt: skip
        run.epoch()
        runs.append(run)
    rows, users = runs
    for a, b in zip(rows.module.parameters(), users.module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert rows.engine.get_epsilon(1e-5) == users.engine.get_epsilon(1e-5)
    assert (rows.engine.report(1e-5).unit, users.engine.report(1e-5).unit) == ("row", "user")


def marked(labels: Any) -> TensorDataset:
    """Rows that hold their own number, and their user's."""
    users = torch.tensor(np.unique(labels, return_inverse=True)[1])
    return TensorDataset(torch.arange(len(labels)).float(), users)


def drawn_batches(run: Run) -> Iterator[tuple[list[int], list[int]]]:
    for _ in range(10):
        for x, y in run.loader:
            yield x.int().tolist(), y.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_hold_users_with_all_of_their_rows(workers: int) -> None:
    module = nn.Linear(1, 2)
    engine = PrivacyEngine()
    loader = DataLoader(marked(OWNERS), batch_size=5, num_workers=workers)
    *_, loader = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=1.0, groups=OWNERS, random_state=1,
    )  # fmt: skip
    seen = np.zeros(USERS)
    passes = 2 if workers else 60
    for _ in range(passes):
        batches = [(x.int().numpy(), y.numpy()) for x, y in loader]
        assert len(batches) == USERS // 5
        for rows, users in batches:
            assert len(set(rows)) == len(rows)
            assert np.isin(OWNERS, users).sum() == len(rows)
            seen[np.unique(users)] += 1
    if not workers:
        # 240 draws at the rate 1/4 for each of 20 users: beyond 6 deviations once in 10⁸ runs.
        assert (abs(seen - 60) < 6 * math.sqrt(240 / 4 * 3 / 4)).all()
        # A rate over rows would draw users with 6 rows more often than those with one.
        many = np.bincount(OWNERS) == 6
        assert abs(seen[many].mean() - seen[~many].mean()) < 6 * math.sqrt(45 * (1 / 5 + 1 / 15))


def test_of_many_rows_a_fixed_random_choice_counts() -> None:
    labels = np.array([0] * 30 + [1, 2])
    chosen = set()
    for seed in range(5):
        run = private(
            nn.Linear(1, 2), marked(labels), 3, poisson_sampling=True, noise_multiplier=1.0,
            groups=labels, max_rows_per_user=4, random_state=seed,
        )  # fmt: skip
        batches = {frozenset(rows) for rows, _ in drawn_batches(run)}
        assert len(batches) == 1
        own = [row for row in batches.pop() if row < 30]
        assert len(own) == 4
        chosen.add(tuple(own))
        batch = run.loader.batch_sampler.batches  # type: ignore[union-attr]
        assert isinstance(batch, UserBatches)
        assert batch.shares[own].tolist() == [0.25] * 4
    assert len(chosen) > 1


def test_parts_of_a_batch_sum_up_to_the_whole() -> None:
    found = []
    for most in (None, 1, 4, 1000):
        module = model()
        run = everyone(module=module, max_grad_norm=0.5)
        manager = BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=most or ROWS, optimizer=run.optimizer
        )
        with manager as parts:
            for x, y in run.loader if most is None else parts:
                run.step(F.cross_entropy, x, y)
        assert run.optimizer.releases == 1
        found.append(run.gradients)
    for other in found[1:]:
        assert_same(other, found[0])


def test_processes_have_whole_users() -> None:
    users = Users.of(OWNERS, ROWS)
    rows: list[set[int]] = []
    for rank in range(2):
        drawn = PoissonBatches(
            range(USERS), USERS, 1, np.random.default_rng(rank), Processes(rank, 2)
        )
        batches = user_batches(drawn, range(ROWS), ROWS, users, 1024, np.random.default_rng(rank))
        (batch,) = batches
        rows.append(set(batch))
    assert not rows[0] & rows[1]
    assert len(rows[0] | rows[1]) == ROWS
    assert not set(OWNERS[list(rows[0])]) & set(OWNERS[list(rows[1])])


def test_rows_that_the_sampler_leaves_out_do_not_count() -> None:
    kept = [row for row in reversed(range(ROWS)) if OWNERS[row] < 10 and row % 3]
    sampler = SubsetRandomSampler(kept)
    module = nn.Linear(1, 2)
    engine = PrivacyEngine()
    *_, loader = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(marked(OWNERS), batch_size=50, sampler=sampler),
        noise_multiplier=1.0, max_grad_norm=1.0, groups=OWNERS,
    )  # fmt: skip
    ((rows, _),) = [(x.int().tolist(), y) for x, y in loader]
    assert sorted(rows) == sorted(kept)
    users = len(set(OWNERS[kept]))
    (event,) = engine.accountant.events
    assert (event.n_examples, event.batch_size) == (users, users)
    shares = loader.batch_sampler.batches.shares
    counts = np.bincount(OWNERS[kept], minlength=USERS)
    assert torch.allclose(shares[kept], torch.tensor(1 / counts[OWNERS[kept]]))
    assert float(shares.sum()) == pytest.approx(users)


def test_releases_are_charged_as_those_of_users() -> None:
    run = owners_private(noise_multiplier=1.5)
    run.epoch()
    (event,) = run.engine.accountant.events
    assert (event.unit, event.n_examples, event.batch_size, event.count) == ("user", USERS, 5, 4)
    report = run.engine.report(1e-5)
    assert report.unit == "user"
    # Of 60 rows nothing is told.
    for text in (str(report), report._repr_html_(), repr(report)):
        assert str(ROWS) not in text.replace(f"{report.epsilon}", "")
        assert "user" in text
    alone = private(poisson_sampling=True, data=table(USERS), batch_size=5, noise_multiplier=1.5)
    alone.epoch()
    assert alone.engine.get_epsilon(1e-5) == run.engine.get_epsilon(1e-5)


def test_noise_is_calibrated_for_users() -> None:
    found = []
    kinds: list[tuple[Any, dict[str, Any]]] = [(DATA, {"groups": OWNERS}), (table(USERS), {})]
    for data, options in kinds:
        module, engine = nn.Linear(5, 3), PrivacyEngine()
        _, optimizer, _ = engine.make_private_with_epsilon(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=5), target_epsilon=2.0, target_delta=1e-4,
            epochs=3, max_grad_norm=1.0, **options,
        )  # fmt: skip
        found.append(optimizer.noise_multiplier)
    assert found[0] == found[1]


def test_the_rate_of_a_poisson_loader_is_that_of_users() -> None:
    module, engine = nn.Linear(5, 3), PrivacyEngine()
    *_, loader = engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DPDataLoader(DATA, sample_rate=0.3), noise_multiplier=1.0, max_grad_norm=1.0,
        groups=OWNERS,
    )  # fmt: skip
    assert loader.batch_sampler.batches.rate == 6 / USERS


def test_noise_covers_the_rounding_of_more_rows() -> None:
    assert slack_of(100, 1) == 2**-10 * (1 + 100 * 2**-10)
    slacks = [slack_of(100, most) for most in (1, 2, 1024)]
    assert slacks == sorted(set(slacks))
    # A rounding each of the sum of 100 vectors of length 1.
    assert slacks[-1] >= 1024 * 100 * 2**-24


class TestRefused:
    def test_labels_that_do_not_name_every_row(self) -> None:
        for groups in (OWNERS[:-1], [*OWNERS, 0]):
            with pytest.raises(ValueError, match="one user for each row") as found:
                owners_private(groups=groups)
            assert str(ROWS) not in str(found.value)
        for missing in (None, float("nan")):
            with pytest.raises(ValueError, match="a user for every row"):
                owners_private(groups=[missing, *OWNERS[1:].tolist()])
        with pytest.raises(ValueError, match="at least two different users"):
            owners_private(groups=[1] * ROWS)
        with pytest.raises(ValueError, match="max_rows_per_user"):
            owners_private(max_rows_per_user=0)

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"clipping": "adaptive"}, "counts the rows within the bound"),
            ({"poisson_sampling": False}, "in many batches of a pass"),
            ({"verify": False}, "whose rows the module is given"),
        ],
    )
    def test_what_users_cannot_be_protected_with(self, options: Any, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            owners_private(**options)
        module = nn.Linear(5, 3)
        with pytest.raises(ValueError, match=why):
            PrivacyEngine().make_private_with_epsilon(
                module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
                data_loader=DataLoader(DATA, batch_size=5), target_epsilon=2.0, target_delta=1e-4,
                epochs=3, max_grad_norm=1.0, groups=OWNERS, **options,
            )  # fmt: skip

    def test_passes_that_are_counted_in_rows(self) -> None:
        module = nn.Linear(5, 3)
        sampler = torch.utils.data.RandomSampler(DATA, num_samples=30)
        with pytest.raises(ValueError, match="without num_samples"):
            PrivacyEngine().make_private(
                module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
                data_loader=DataLoader(DATA, batch_size=5, sampler=sampler), noise_multiplier=1.0,
                max_grad_norm=1.0, groups=OWNERS,
            )  # fmt: skip

    def test_a_second_step_on_a_batch(self) -> None:
        run = owners_private(noise_multiplier=1.0, random_state=0)
        x, y = next(iter(run.loader))
        run.step(F.cross_entropy, x, y)
        with pytest.raises(RuntimeError, match="one step"):
            run.step(F.cross_entropy, x, y)
        assert run.optimizer.releases == 1

    def test_rows_from_elsewhere(self) -> None:
        run = owners_private(noise_multiplier=1.0, random_state=0)
        with pytest.raises(RuntimeError, match="whose rows these are"):
            run.step(F.cross_entropy, *DATA[:8])
        for x, _ in run.loader:
            with pytest.raises(RuntimeError, match="whose rows these are"):
                run.step(F.cross_entropy, torch.randn(len(x), 5), torch.zeros(len(x)).long())
        assert run.optimizer.releases == 0

    def test_another_batch_of_the_same_size(self) -> None:
        run = owners_private(noise_multiplier=1.0, batch_size=USERS)
        (x, y), = run.loader  # fmt: skip
        ((_, _),) = run.loader
        with pytest.raises(RuntimeError):
            run.step(F.cross_entropy, x, y)
        assert run.optimizer.releases == 0

    @pytest.mark.parametrize("order", ["flip", "random", "sorted"])
    def test_rows_in_another_order(self, order: str) -> None:
        """A row would count as much as the row in whose place it is."""
        run = everyone(noise_multiplier=1.0)
        for x, y in run.loader:
            places = {"flip": torch.arange(len(x)).flip(0), "sorted": torch.argsort(x[:, 0])}
            index = places.get(order, torch.randperm(len(x)))
            with pytest.raises(RuntimeError):
                run.step(F.cross_entropy, x[index], y[index])
        assert run.optimizer.releases == 0

    def test_a_collate_function_that_sorts(self) -> None:
        def collate(rows: list[Any]) -> Any:
            return default_collate(sorted(rows, key=lambda row: float(row[0][0])))

        module, engine = nn.Linear(5, 3), PrivacyEngine()
        *_, loader = engine.make_private(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=USERS, collate_fn=collate),
            noise_multiplier=1.0, max_grad_norm=1.0, groups=OWNERS,
        )  # fmt: skip
        with pytest.raises(ValueError, match="keeps each row by itself"):
            next(iter(loader))

    def test_rows_and_users_in_one_engine(self) -> None:
        run = owners_private(noise_multiplier=1.0)
        with pytest.raises(ValueError, match="whose unit is 'user'"):
            private(engine=run.engine, noise_multiplier=1.0, poisson_sampling=True)
        rows = private(noise_multiplier=1.0, poisson_sampling=True)
        with pytest.raises(ValueError, match="whose unit is 'row'"):
            owners_private(engine=rows.engine, noise_multiplier=1.0)


class TestCheckpoints:
    def test_a_resumed_run_counts_users_on(self, tmp_path: Path) -> None:
        path = tmp_path / "run.pt"
        run = owners_private(noise_multiplier=1.0)
        run.epoch()
        run.engine.save_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
        again = owners_private(noise_multiplier=1.0)
        again.engine.load_checkpoint(path=path, module=again.module, optimizer=again.optimizer)
        again.epoch()
        (event,) = again.engine.accountant.events
        assert (event.unit, event.n_examples, event.count) == ("user", USERS, 8)
        only = PrivacyEngine()
        only.load_checkpoint(path=path, module=again.module)
        assert only.report(1e-5).unit == "user"
        assert only.get_epsilon(1e-5) == again.engine.get_epsilon(1e-5)
        with pytest.raises(ValueError, match="found both"):
            private(engine=only, noise_multiplier=1.0, poisson_sampling=True)

    @pytest.mark.parametrize("steps", [0, 1])
    def test_one_of_the_other_unit_is_refused(self, tmp_path: Path, steps: int) -> None:
        """Also before the first release."""
        path = tmp_path / "run.pt"
        rows: dict[str, Any] = {"noise_multiplier": 1.0, "poisson_sampling": True}
        for saved, other in (
            (owners_private(noise_multiplier=1.0), private(**rows)),
            (private(**rows), owners_private(noise_multiplier=1.0)),
        ):
            for _ in range(steps):
                saved.epoch()
            saved.engine.save_checkpoint(path=path, module=saved.module, optimizer=saved.optimizer)
            before = [p.detach().clone() for p in other.module.parameters()]
            with pytest.raises(ValueError, match="do not add up"):
                other.engine.load_checkpoint(path=path, module=other.module)
            assert len(other.engine.accountant) == 0
            for p, was in zip(other.module.parameters(), before, strict=True):
                assert torch.equal(p, was)


def test_random_choices_do_not_disturb_the_noise() -> None:
    source = random_source(3)
    first = random_source(3)
    source.another_generator()
    assert source.sampler.random() == first.sampler.random()


def test_an_empty_batch_is_a_step_of_noise() -> None:
    run = owners_private(noise_multiplier=1.0, batch_size=1)
    sizes = []
    for _ in range(5):
        for x, y in run.loader:
            run.step(F.cross_entropy, x, y)
            sizes.append(len(x))
    assert 0 in sizes
    assert all(bool(gradient_of(p).all()) for p in run.optimizer.params)
