"""Correlated noise in the PyTorch engine: its noise, its batches, its charges, its refusals."""

from __future__ import annotations

import copy
import math
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.correlation import coefficients_of, spread_of
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.torch import PrivacyEngine
from privagrad.torch.loaders import BatchMemoryManager
from tests.statistics import FALSE_ALARM, assert_scale, scale_accepted
from tests.torch.small import Run, gradient_of, private, sgd, table

BANDS = 3


def correlated(**options: Any) -> Run:
    return private(
        **{"poisson_sampling": True, "noise_multiplier": 1.3, "correlation": BANDS, **options}
    )


def nothing(outputs: Tensor, _: Tensor) -> Tensor:
    """A loss without gradients."""
    return (0.0 * outputs).sum(dim=-1).mean()


def noise_of(run: Run) -> np.ndarray:
    return torch.cat([g.reshape(-1) for g in run.gradients]).numpy().copy()


def white(noisy: list[np.ndarray], bands: int = BANDS) -> np.ndarray:
    """C times the releases, one a row."""
    c = coefficients_of(bands)
    return np.array(
        [sum(a * noisy[t - k] for k, a in enumerate(c[: t + 1])) for t in range(len(noisy))]
    )


@pytest.mark.parametrize("noise", ["gaussian", "discrete"])
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_the_noise_is_correlated_over_steps_and_passes(noise: Any, clipping: str) -> None:
    """With any ellipsoid C times the gradients is white noise of z |c| B C^{-1/2} over b."""
    module = nn.Linear(30, 20)
    shape = [torch.full((20, 30), 4.0), torch.full((20,), 0.25)]
    data = TensorDataset(torch.randn(64, 30), torch.zeros(64))
    run = correlated(
        module=module, data=data, max_grad_norm=0.5, ellipsoid=shape, noise=noise,
        clipping=clipping,
    )  # fmt: skip
    noisy = []
    for _ in range(3):
        for x, y in run.loader:
            run.step(nothing, x, y)
            noisy.append(noise_of(run))
    assert len(noisy) == 12
    roots = np.concatenate([np.full(600, 2.0), np.full(20, 0.5)])
    # The scales are made so that the ball of the same radius has as much noise.
    scales = torch.cat([s.full.reshape(-1) for s in run.optimizer.scales.values()]).numpy()
    assert np.ptp(np.sqrt(scales) / roots) < 1e-5 * roots.max()
    standard = white(noisy) * np.sqrt(scales) * 16 / 0.5
    deviation = 1.3 * math.hypot(*coefficients_of(BANDS))
    for row in standard:
        assert_scale(row, deviation * (1 + 2**-10))
    for first, second in pairwise(standard):
        assert scale_accepted(first + second, deviation * math.sqrt(2) * (1 + 2**-10))
    assert_scale(np.array(noisy[6:]) * np.sqrt(scales) * 16 / 0.5, 1.3 * spread_of(BANDS))


def test_one_row_is_as_visible_as_the_event_says() -> None:
    """Its blocks are (1 - r) N(0, 1) + r N(1/z, 1), of the event's r and z, slack aside."""
    n, batch, z, row = 13, 2, 0.5, 4
    inputs = torch.zeros(n, 1)
    inputs[row] = 100.0
    module = nn.Linear(1, 1, bias=False)
    run = correlated(
        module=module, data=TensorDataset(inputs, torch.zeros(n)), batch_size=batch,
        noise_multiplier=z,
    )  # fmt: skip
    noisy = []
    for _ in range(130):
        for x, y in run.loader:
            run.step(lambda outputs, _: outputs.mean(dim=-1).mean(), x, y)
            noisy.append(noise_of(run)[0] * batch)
    (event,) = run.engine.accountant.events
    assert event.noise_multiplier == z
    c = np.array(coefficients_of(BANDS))
    first = row % BANDS
    series = np.convolve(noisy, c)[: len(noisy)]
    blocks = series[first : first + (len(noisy) - first) // BANDS * BANDS].reshape(-1, BANDS)
    seen = blocks @ c / (c @ c) / z

    def law(x: Any, rate: float, noise: float = 1.0) -> Any:
        with_row = stats.norm.cdf(x, loc=1 / z, scale=noise)
        return (1 - rate) * stats.norm.cdf(x, scale=noise) + rate * with_row

    assert event.rate == BANDS * batch / n
    assert stats.kstest(seen, lambda x: law(x, event.rate)).pvalue > FALSE_ALARM
    assert stats.kstest(seen, lambda x: law(x, batch / n)).pvalue < FALSE_ALARM


def rows_released(run: Run, loader: Any = None) -> list[list[int]]:
    """Which rows are in each release of a pass over one-hot rows that are bounded to 1."""
    found = []
    for x, y in run.loader if loader is None else loader:
        run.step(F.mse_loss, x, y)
        weight = gradient_of(run.module.weight)[0]
        found.append(torch.nonzero(weight.abs() > 0.05).flatten().tolist())
    return found


def one_hot() -> tuple[nn.Linear, TensorDataset]:
    module = nn.Linear(12, 1, bias=False)
    module.weight.data.zero_()
    return module, TensorDataset(100 * torch.eye(12), torch.full((12, 1), 100.0))


def of_one_hot(**options: Any) -> Run:
    module, data = one_hot()
    return correlated(
        module=module, data=data, batch_size=4, noise_multiplier=1e-3,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0), **options,
    )  # fmt: skip


def test_whoever_looks_at_the_batch_sampler_moves_no_row() -> None:
    """A release has the number of the batch whose rows it is of."""
    run, numbers = of_one_hot(), []
    for x, y in run.loader:
        run.step(F.mse_loss, x, y)
        numbers.append(run.optimizer._release_sums._run.number)
        rows = torch.nonzero(gradient_of(run.module.weight)[0].abs() > 0.05).flatten()
        assert set((rows % BANDS).tolist()) == {numbers[-1] % BANDS}
        sampler: Any = run.loader.batch_sampler
        for _ in zip(range(1), sampler, strict=False):
            pass
    assert all(later > number for number, later in pairwise(numbers))


def test_a_batch_of_another_training_is_none_of_this_ones() -> None:
    run, other = of_one_hot(), of_one_hot()
    next(iter(run.loader))
    with pytest.raises(RuntimeError, match="found a step on a batch from elsewhere"):
        rows_released(run, other.loader)


def test_skipped_batches_keep_rows_apart() -> None:
    """A batch without a step counts as a step without a sum and noise."""
    module = nn.Linear(40, 30)
    data = TensorDataset(torch.randn(60, 40), torch.zeros(60))
    run = correlated(module=module, data=data, batch_size=5)
    noisy = []
    for number, (x, y) in enumerate(run.loader):
        if number in (1, 4, 5, 6, 7):
            noisy.append(np.zeros(1230))
            continue
        run.step(nothing, x, y)
        noisy.append(noise_of(run))
    deviation = 1.3 * math.hypot(*coefficients_of(BANDS)) / 5
    for number in (0, 2, 3, 8, 9, 10, 11):
        assert_scale(white(noisy)[number], deviation * (1 + 2**-10))
    assert run.engine.accountant.events[0].count == 12


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_is_in_one_of_any_bands_batches_in_a_row(workers: int) -> None:
    """Also where passes are broken off after batches were drawn ahead, and in parts."""
    rows = torch.arange(40.0)[:, None]
    module = nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(rows, torch.zeros(40)), batch_size=8, num_workers=workers)
    module, optimizer, loader = PrivacyEngine().make_private(
        module=module, optimizer=sgd(module.parameters()), data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=1.0, correlation=BANDS,
    )  # fmt: skip
    number_of_row: dict[int, list[int]] = {}
    last = -1
    for stop in (2, 5, 1, 5, 3):
        for k, (x, y) in enumerate(loader):
            number = optimizer._number
            assert number > last
            last = number
            for row in x[:, 0].long().tolist():
                assert row % BANDS == number % BANDS
                number_of_row.setdefault(row, []).append(number)
            nothing(module(x), y).backward()
            optimizer.step()
            if k + 1 == stop:
                break
    assert len(number_of_row) > 20
    for numbers in number_of_row.values():
        assert all(b - a >= BANDS for a, b in pairwise(numbers))


def test_blocks_are_charged_when_they_are_begun() -> None:
    run = correlated()
    for batches, charged in ((1, 3), (3, 3), (4, 6), (7, 9)):
        run = correlated()
        taken = 0
        while taken < batches:
            for x, y in run.loader:
                run.step(F.cross_entropy, x, y)
                taken += 1
                if taken == batches:
                    break
        (event,) = run.engine.accountant.events
        assert event == GaussianEvent(
            1.3, charged, "cyclic_poisson", 64, 16, "gradients", bands=BANDS
        )
        assert len(run.engine.accountant) == charged
        assert run.engine.get_epsilon(1e-4) == PrivacyPlan((event,)).epsilon(1e-4)
        assert run.engine.accountant.history == [(1.3, BANDS * 16 / 64, charged)]


def test_a_batch_that_is_only_looked_at_is_charged() -> None:
    run = correlated()
    next(iter(run.loader))
    assert len(run.engine.accountant) == BANDS


def test_parts_of_batches_are_one_step() -> None:
    run = correlated()
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer
    ) as parts:
        for _ in range(2):
            for x, y in parts:
                run.step(F.cross_entropy, x, y)
    assert run.optimizer.releases == 8
    assert run.engine.accountant.events[0].count == 9


def test_the_target_is_met_by_all_passes() -> None:
    module, engine = nn.Linear(5, 3), PrivacyEngine()
    for correlation in (2, "auto"):
        engine, module = PrivacyEngine(), nn.Linear(5, 3)
        module, optimizer, loader = engine.make_private_with_epsilon(
            module=module, optimizer=sgd(module.parameters()),
            data_loader=DataLoader(table(), batch_size=4), target_epsilon=6.0, target_delta=1e-4,
            epochs=2, max_grad_norm=1.0, correlation=correlation,
        )  # fmt: skip
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(module(x), y).backward()
                optimizer.step()
        (event,) = engine.accountant.events
        assert event.bands == 2 if correlation == 2 else 2 < event.bands <= 5
        assert 5.99 < engine.get_epsilon(1e-4) <= 6.0
        assert engine.report(1e-4).sampling == "cyclic_poisson"


def test_auto_is_independent_noise_for_optimizers_that_divide_by_squares() -> None:
    module = nn.Linear(5, 3)
    _, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
        module=module, optimizer=torch.optim.Adam(module.parameters()),
        data_loader=DataLoader(table(), batch_size=4), target_epsilon=6.0, target_delta=1e-4,
        epochs=2, max_grad_norm=1.0, correlation="auto",
    )  # fmt: skip
    assert optimizer._release_sums.bands == 1
    assert loader.charges.event.sampling == "poisson"


def test_only_steps_on_the_loaders_own_batches_are_made() -> None:
    run = correlated()
    x, y = next(iter(run.loader))
    run.step(F.cross_entropy, x, y)
    spent, before = run.engine.accountant.counts.copy(), noise_of(run)
    with pytest.raises(RuntimeError, match="one step for each batch"):
        run.step(F.cross_entropy, x, y)
    with pytest.raises(RuntimeError, match="one step for each batch"):
        run.step(F.cross_entropy, torch.randn_like(x), y)
    assert run.engine.accountant.counts == spent
    assert before.size


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm"])
@pytest.mark.parametrize("within", [True, False])
def test_noise_and_bound_stay_as_they_are(name: str, within: bool) -> None:
    """Also between the batch and its step; after a refusal the old value goes on."""
    run = correlated()
    batches = iter(run.loader)
    run.step(F.cross_entropy, *next(batches))
    drawn = next(batches) if within else None
    kept = getattr(run.optimizer, name)
    setattr(run.optimizer, name, 2 * kept)

    def go_on() -> None:
        run.step(F.cross_entropy, *(drawn or next(batches)))

    with pytest.raises(RuntimeError, match="for the whole training"):
        go_on()
    assert run.optimizer.releases == 1
    setattr(run.optimizer, name, kept)
    for x, y in run.loader:
        run.step(F.cross_entropy, x, y)
    (event,) = run.engine.accountant.events
    assert event.noise_multiplier == 1.3


def test_a_release_that_fails_before_it_begins_keeps_rows_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its step counts, or more than one: noise is never taken for that of a later step."""
    module = nn.Linear(40, 30)
    data = TensorDataset(torch.randn(60, 40), torch.zeros(60))
    run = correlated(module=module, data=data, batch_size=5)
    noisy, original = [], GaussianSum.release
    for number, (x, y) in enumerate(run.loader):
        fails = number in (1, 2)
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(GaussianSum, "release", _fail)
                with pytest.raises(OSError, match="no memory"):
                    run.step(nothing, x, y)
            else:
                run.step(nothing, x, y)
        noisy.append(np.zeros(1230) if fails else noise_of(run))
    assert GaussianSum.release is original
    deviation = 1.3 * math.hypot(*coefficients_of(BANDS)) / 5
    # Steps 1 and 2 count as three: from then on the noise is independent of that of step 0.
    for number in range(3, 12):
        assert_scale(white(noisy)[number], deviation * (1 + 2**-10))
    assert scale_accepted(noisy[3] + noisy[0], math.sqrt(2) * deviation * (1 + 2**-10))


def _fail(*_: Any) -> None:
    raise OSError("no memory")


@settings(max_examples=30, deadline=None)
@given(
    actions=st.lists(
        st.sampled_from(["next", "step", "next and step", "begin", "parts", "noise", "foreign"]),
        max_size=25,
    ),
    most=st.sampled_from([None, 3]),
)
def test_whatever_a_loop_does_each_release_is_of_one_batch_of_a_charged_block(
    actions: list[str], most: int | None
) -> None:
    """At any moment: batches are released once, in order, in their place, and blocks are paid."""
    run = correlated(data=table(24), batch_size=4, max_physical_batch_size=most)
    parts = BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer
    ).parts
    charges = run.loader.charges  # type: ignore[attr-defined]
    sums = run.optimizer._release_sums
    handed_out, released = set(), []
    iterator, batch = iter(run.loader), None
    for action in (one for both in actions for one in both.split(" and ")):
        before = run.optimizer.releases
        if action in ("begin", "parts"):
            iterator = iter(run.loader if action == "begin" else parts)
        elif action == "noise":
            run.optimizer.noise_multiplier = 1.3 if run.optimizer.noise_multiplier == 2 else 2
        try:
            if action == "next":
                batch = next(iterator, batch)
            elif action == "step" and batch is not None:
                run.step(F.cross_entropy, *batch)
            elif action == "foreign":
                run.step(F.cross_entropy, *(t[:3] for t in table(24).tensors))
        except RuntimeError:
            assert run.optimizer.releases == before
        if run.optimizer._number is not None:
            handed_out.add(run.optimizer._number)
        if run.optimizer.releases > before:
            released.append(run.optimizer._number)
            assert sums._run.number == released[-1]
        blocks = {number // BANDS for number in handed_out}
        assert sum(e.count for e in run.engine.accountant.events) >= BANDS * len(blocks) - BANDS
        assert {n // BANDS for n in released if n is not None} <= blocks
        noises = {e.noise_multiplier for e in run.engine.accountant.events}
        assert len(noises) <= 1
    assert None not in released
    assert released == sorted(set(released))  # type: ignore[type-var]
    paid = sum(e.count for e in run.engine.accountant.events)
    assert paid >= BANDS * len({n // BANDS for n in released if n is not None})
    assert charges.event.bands == BANDS


def test_a_checkpoint_has_no_noise_and_the_next_run_begins_another_history(tmp_path: Path) -> None:
    """What was charged is added up, and the noise is independent of that before."""
    module = nn.Linear(40, 30)
    data = TensorDataset(torch.randn(60, 40), torch.zeros(60))
    run, path = correlated(module=module, data=data, batch_size=5), tmp_path / "run"
    for number, (x, y) in enumerate(run.loader):
        run.step(nothing, x, y)
        if number == 3:
            break
    last = noise_of(run)
    run.engine.save_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
    state = torch.load(path, weights_only=True)
    sizes = [t.numel() for t in _tensors(state)]
    parameters = [p.numel() for p in module.parameters()]
    assert max(sizes) <= max(parameters)
    other = correlated(module=nn.Linear(40, 30), data=data, batch_size=5)
    other.engine.load_checkpoint(path=path, module=other.module, optimizer=other.optimizer)
    for same in (other, run):
        if same is run:
            run.engine.load_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
        same.step(nothing, *next(iter(same.loader)))
        deviation = 1.3 * math.hypot(*coefficients_of(BANDS)) / 5
        assert_scale(noise_of(same), deviation * (1 + 2**-10))
        assert scale_accepted(noise_of(same) + last, math.hypot(deviation, last.std()))
    assert [e.count for e in other.engine.accountant.events] == [6 + 3]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for own in value.values() for t in _tensors(own)]
    return [t for own in value for t in _tensors(own)] if isinstance(value, list | tuple) else []


def test_loaders_are_not_pickled_and_copies_draw_on() -> None:
    run = correlated()
    batches: Any = run.loader.batches  # type: ignore[attr-defined]
    assert copy.deepcopy(batches) is batches
    with pytest.raises(TypeError, match="draw the same batches"):
        pickle.dumps(batches)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier > 0"),
        ({"poisson_sampling": False}, "poisson_sampling=True"),
        ({"groups": np.arange(64) // 2}, "groups"),
        ({"clipping": "adaptive", "target_unclipped_quantile": 0.5}, "adaptive"),
        ({"ellipsoid": "pagan"}, "learned"),
        ({"batch_size": 30}, "fewer bands"),
        ({"correlation": "auto"}, "make_private_with_epsilon"),
        ({"correlation": 100}, "bands"),
        ({"correlation": 0}, "correlation"),
        ({"correlation": 1.5}, "correlation"),
    ],
    ids=str,
)
def test_what_is_not_known_to_be_sound_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        correlated(**options)


def test_one_band_is_the_usual_training() -> None:
    first, second = (
        private(
            module=_same(), poisson_sampling=True, noise_multiplier=1.0, random_state=3,
            correlation=correlation,
        )
        for correlation in (None, 1)
    )  # fmt: skip
    for run in (first, second):
        run.epoch()
    for a, b in zip(first.optimizer.params, second.optimizer.params, strict=True):
        assert torch.equal(a, b)
    assert first.engine.accountant.events == second.engine.accountant.events


def _same() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3)
