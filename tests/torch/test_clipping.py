"""Ways of bounding an example's gradient: what each adds, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from privagrad.privacy.accounting import PrivacyPlan
from privagrad.privacy.events import GaussianEvent
from privagrad.privacy.mechanism import GaussianSum
from privagrad.torch import ExponentialNoise, PrivacyEngine, StepGradClip
from privagrad.torch.clipping import AdaptiveClipping
from tests.statistics import assert_scale, scale_accepted
from tests.torch.reference import (
    SCALES,
    assert_same,
    engine_sum,
    middle_radius,
    one_by_one,
    scales_of,
    squared,
)
from tests.torch.small import Run, private, table

Weigh = Callable[[list[float]], list[float]]
"""From the norms of one example's tensors to the factors of these."""


class Words(nn.Module):
    """Word vectors whose gradients are rows, a recurrent layer, a layer of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.memory = nn.GRU(4, 3, batch_first=True)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, words: Tensor) -> Tensor:
        states, _ = self.memory(self.words(words))
        found: Tensor = states[:, -1] * self.gain
        return found


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), 3 * torch.randn(9, 5)


def cnn() -> tuple[nn.Module, Tensor]:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(3, 3), nn.Flatten(), nn.Linear(12, 2))
    return module, torch.randn(7, 2, 4, 4)


def words() -> tuple[nn.Module, Tensor]:
    return Words(), torch.randint(0, 7, (6, 5))


MODELS = {"mlp": mlp, "cnn": cnn, "words": words}


def trainable(module: nn.Module) -> int:
    return sum(p.requires_grad for p in module.parameters())


def whole_norm(weigh: Callable[[float], float]) -> Weigh:
    return lambda norms: [weigh(math.hypot(*norms))] * len(norms)


def bounds(module: nn.Module, radius: float) -> list[float]:
    """One bound for each tensor, all different."""
    return [radius * (0.2 + 0.3 * place) for place in range(trainable(module))]


def of_each(own: list[float]) -> Weigh:
    return lambda norms: [min(1.0, b / max(n, 1e-30)) for b, n in zip(own, norms, strict=True)]


def cases(module: nn.Module, radius: float) -> dict[str, tuple[dict[str, Any], Weigh]]:
    """The options of make_private for every way of clipping, and what it multiplies with."""
    own = bounds(module, radius)
    flat = whole_norm(lambda norm: min(1.0, radius / max(norm, 1e-30)))
    return {
        "flat": ({"max_grad_norm": radius}, flat),
        "adaptive": ({"max_grad_norm": radius, "clipping": "adaptive"}, flat),
        "automatic": (
            {"max_grad_norm": radius, "clipping": "automatic", "gamma": 0.05},
            whole_norm(lambda norm: radius / (norm + 0.05)),
        ),
        "per_layer": ({"max_grad_norm": own, "clipping": "per_layer"}, of_each(own)),
    }


CLIPPINGS = ("flat", "adaptive", "automatic", "per_layer")


def looped(module: nn.Module, x: Tensor, y: Tensor, kind: str, weigh: Weigh) -> list[Tensor]:
    """The mean of the bounded gradients, one backward pass per example."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    scales = scales_of(module, kind) or [torch.ones_like(p) for p in parameters]
    totals = [torch.zeros_like(p) for p in parameters]
    for _, gradients in one_by_one(module, squared, x, y, kind):
        norms = [
            float((c * g * g).sum().sqrt()) for c, g in zip(scales, gradients, strict=True)
        ]  # fmt: skip
        for total, g, weight in zip(totals, gradients, weigh(norms), strict=True):
            total += weight * g
    return [total / len(y) for total in totals]


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("model", MODELS)
def test_contributions_are_those_of_the_loop(model: str, clipping: str, kind: str) -> None:
    torch.manual_seed(0)
    module, x = MODELS[model]()
    y = torch.linspace(-1, 1, len(x))
    radius = middle_radius(module, squared, x, y, kind)
    options, weigh = cases(module, radius)[clipping]
    expected = looped(module, x, y, kind, weigh)
    found = engine_sum(module, squared, x, y, kind, options.pop("max_grad_norm"), **options)
    assert_same(found, expected, 2e-5)


def whitened(
    module: nn.Module, x: Tensor, y: Tensor, kind: str, options: dict[str, Any], monkeypatch: Any
) -> tuple[np.ndarray, float]:
    """What the mechanism adds noise to, in its whitened coordinates, and its sensitivity."""
    found: list[tuple[np.ndarray, float]] = []
    original = GaussianSum.release

    def release(self: GaussianSum, total: Any, *rest: Any) -> Any:
        units = [span.units(slice(0, span.size), self).copy() for span in total.spans]
        found.append((np.concatenate(units) * self.grid, self.sensitivity))
        return original(self, total, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(GaussianSum, "release", release)
        run = private(
            module, TensorDataset(x, y), len(x),
            lambda p: torch.optim.SGD(p, lr=0.0), noise_multiplier=0.3, loss_reduction="sum",
            ellipsoid=scales_of(module, kind), **options,
        )  # fmt: skip
        for inputs, targets in run.loader:
            run.step(lambda out, y: squared(out, y) * len(y), inputs, targets)
    return found[0]


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("size", [0.0, 1e-12, 1.0, 1e6])
def test_one_example_moves_what_is_released_by_at_most_the_sensitivity(
    clipping: str, kind: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that a step releases together, the count of adaptive clipping included."""
    torch.manual_seed(0)
    module, x = mlp()
    x[-1], y = size * torch.randn(5), torch.linspace(-1, 1, len(x))
    options, _ = cases(module, 0.7)[clipping]
    if clipping == "adaptive":
        options["unclipped_num_std"] = 0.2
    both, sensitivity = whitened(module, x, y, kind, options, monkeypatch)
    without, _ = whitened(module, x[:-1], y[:-1], kind, options, monkeypatch)
    moved = float(np.linalg.norm(both - without))
    assert moved <= sensitivity
    if clipping in ("flat", "adaptive") and size == 1e6:
        # No noise is wasted: the sensitivity is reached.
        assert moved > 0.99


def test_rounding_in_float32_counts_as_sensitivity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms may be off by 2⁻¹⁰, and the other examples may move by 16 roundings each."""
    torch.manual_seed(0)
    module, x = mlp()
    y = torch.linspace(-1, 1, len(x))
    _, sensitivity = whitened(module, x, y, "ball", {"max_grad_norm": 0.7}, monkeypatch)
    assert sensitivity >= 1 + 2**-10 + len(x) * 2**-20


def test_all_tensors_at_their_bounds_reach_the_sensitivity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    module, x = mlp()
    y = torch.linspace(-1, 1, len(x))
    options, _ = cases(module, 1e-3)["per_layer"]
    both, sensitivity = whitened(module, x, y, "ball", options, monkeypatch)
    without, _ = whitened(module, x[:-1], y[:-1], "ball", options, monkeypatch)
    assert 0.99 < float(np.linalg.norm(both - without)) <= sensitivity


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_examples_that_are_not_finite_count_as_zero(clipping: str, bad: float) -> None:
    torch.manual_seed(0)
    module, x = mlp()
    y = torch.linspace(-1, 1, len(x))
    poisoned, others = x.clone(), [0, 1, 3, 4, 5, 6, 7]
    poisoned[[2, 8]] = bad
    options, weigh = cases(module, 1.0)[clipping]
    expected = looped(module, x[others], y[others], "ball", weigh)
    data = TensorDataset(poisoned, y)
    run = private(module, data, 9, lambda p: torch.optim.SGD(p, lr=0.0), verify=False, **options)
    run.epoch(lambda out, t: squared(out, t))
    assert_same(run.gradients, [e * 7 / 9 for e in expected], 2e-5)
    assert run.optimizer.non_finite == 2


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def without_gradients(output: Tensor, target: Tensor) -> Tensor:
    return (0.0 * output).sum(1).mean()


@pytest.mark.parametrize("kind", ["ball", "general"])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_noise_has_the_shape_of_the_ellipsoid(clipping: str, kind: str) -> None:
    """N(0, (z B / b)² / C), with B² = Σ B_p² and with adaptive clipping the larger z."""
    torch.manual_seed(0)
    module = nn.Linear(40, 30)
    every: dict[str, tuple[dict[str, Any], float]] = {
        "flat": ({"max_grad_norm": 0.5}, 0.5),
        "adaptive": (
            {"max_grad_norm": 0.5, "clipping": "adaptive", "unclipped_num_std": 0.6},
            0.5 / math.sqrt(1 - (1 / 1.2) ** 2),
        ),
        "automatic": ({"max_grad_norm": 0.5, "clipping": "automatic"}, 0.5),
        "per_layer": ({"max_grad_norm": [0.3, 0.4], "clipping": "per_layer"}, 0.5),
    }
    options, scale = every[clipping]
    scales = scales_of(module, kind)
    run = private(
        module, table(16, 40, 30), 16, still, noise_multiplier=1.0, ellipsoid=scales, **options
    )
    run.epoch(without_gradients)
    for place, gradient in enumerate(run.gradients):
        root = scales[place].sqrt() if scales else torch.ones_like(gradient)
        if gradient.numel() > 100:
            assert_scale((gradient * root).numpy(), scale / 16)


def test_gradients_whose_squares_underflow_are_not_made_longer_than_the_bound() -> None:
    """1e19 times 1e-24: the square of the second factor is 0 in float32."""
    data = TensorDataset(torch.full((1, 1), 1e19), torch.zeros(1))
    module = nn.Linear(1, 1, bias=False)
    run = private(module, data, 1, still, clipping="automatic", gamma=1e-6, verify=False)
    run.epoch(lambda out, y: 1e-24 * out.sum(1).mean())
    assert float(run.gradients[0].abs()) <= 1.0


class TestPerLayer:
    def test_bounds_may_be_given_by_name(self) -> None:
        torch.manual_seed(0)
        module, x = mlp()
        y, own = torch.linspace(-1, 1, len(x)), bounds(module, 0.3)
        names = [name for name, _ in module.named_parameters()]
        by_name = dict(reversed(list(zip(names, own, strict=True))))
        listed = engine_sum(module, squared, x, y, "ball", own, clipping="per_layer")  # type: ignore[arg-type]
        named = engine_sum(module, squared, x, y, "ball", by_name, clipping="per_layer")  # type: ignore[arg-type]
        assert_same(named, listed)

    def test_a_schedule_moves_all_bounds_alike(self) -> None:
        run = private(data=table(1), batch_size=1, max_grad_norm=[3.0, 4.0], clipping="per_layer")
        assert run.optimizer.max_grad_norm == pytest.approx(5.0)
        schedule = StepGradClip(run.optimizer, step_size=1, gamma=0.5)
        schedule.step()
        assert run.optimizer.max_grad_norm == pytest.approx(2.5)
        run.epoch(lambda out, y: 1e6 * out.square().sum(1).mean())
        assert [float(g.norm()) for g in run.gradients] == pytest.approx([1.5, 2.0])

    def test_a_list_in_another_order_is_refused(self) -> None:
        with pytest.raises(ValueError, match="as a dict of bounds by name"):
            private(
                optimizer=lambda p: torch.optim.SGD(list(reversed(p)), lr=0.1),
                clipping="per_layer", max_grad_norm=[1.0, 2.0],
            )  # fmt: skip

    @pytest.mark.parametrize(
        ("clipping", "norms", "message"),
        [("per_layer", 1.0, r"B / sqrt\(2\)"), ("flat", [1.0, 1.0], "one max_grad_norm")],
    )
    def test_numbers_and_lists_are_not_mistaken(
        self, clipping: str, norms: Any, message: str
    ) -> None:
        with pytest.raises(TypeError, match=message):
            private(clipping=clipping, max_grad_norm=norms)


def adaptive(**options: Any) -> Run:
    defaults: dict[str, Any] = {"clipping": "adaptive", "batch_size": 64, "optimizer": still}
    return private(**(defaults | options))


class TestAdaptive:
    def test_both_releases_together_cost_what_is_charged(self) -> None:
        """The noise of the sum and of the count, as measured, against the charge of a step.

        False alarms: 4e-7.
        """
        std, noise, steps = 0.9, 1.2, 200
        run = adaptive(
            module=nn.Linear(6, 5, bias=False), data=table(64, 6), unclipped_num_std=std,
            noise_multiplier=noise, clipbound_learning_rate=1.0, poisson_sampling=False,
        )  # fmt: skip
        of_count, of_sum = [], []
        for _ in range(steps):
            before = run.optimizer.max_grad_norm = 1.0
            run.epoch(without_gradients)
            released = 0.5 - math.log(run.optimizer.max_grad_norm / before)
            # All gradients are 0, and so within the bound.
            of_count.append((released - 1.0) * 64)
            of_sum.append(64 * run.gradients[0].numpy())
        charged = {event.noise_multiplier for event in run.engine.accountant.events}
        assert charged == {noise}
        # One example moves the count by a half, the sum by 1: two Gaussian releases of the batch.
        of_both = 1 / np.square(2 * std) + 1 / np.square(of_sum).mean()
        assert of_both == pytest.approx(1 / noise**2, rel=0.1)
        assert_scale(np.array(of_count), std)
        expected = (noise**-2 - (2 * std) ** -2) ** -0.5
        assert_scale(np.array(of_sum), expected)
        assert not scale_accepted(np.array(of_sum), noise), "the count would come for nothing"

    def test_two_releases_of_one_batch_compose_to_the_one_that_is_charged(self) -> None:
        std, noise = 0.9, 1.2
        share = AdaptiveClipping(64, unclipped_num_std=std).count_share(noise)
        of_sum = noise / math.sqrt(1 - share**2)
        two = PrivacyPlan((GaussianEvent(of_sum, 7), GaussianEvent(2 * std, 7, purpose="count")))
        one = PrivacyPlan((GaussianEvent(noise, 7),))
        assert two.epsilon(1e-5) == pytest.approx(one.epsilon(1e-5), rel=1e-9)

    def test_every_batch_is_charged_once(self) -> None:
        run = adaptive(noise_multiplier=1.0, batch_size=32, poisson_sampling=True)
        run.epoch()
        expected = (GaussianEvent(1.0, 2, "poisson", 64, 32, "gradients"),)
        assert run.engine.report(1e-5).events == expected
        assert run.engine.get_epsilon(1e-5) == PrivacyPlan(expected).epsilon(1e-5)

    @pytest.mark.parametrize("quantile", [0.25, 0.75])
    def test_the_bound_comes_to_the_quantile(self, quantile: float) -> None:
        torch.manual_seed(0)
        module, data = nn.Linear(5, 3), table()
        (x, y) = data.tensors
        norms = [norm for norm, _ in one_by_one(module, F.cross_entropy, x, y, "ball")]
        run = adaptive(
            module=module, data=data, noise_multiplier=0.01, unclipped_num_std=0.1,
            max_grad_norm=20.0, target_unclipped_quantile=quantile,
        )  # fmt: skip
        for _ in range(60):
            run.epoch()
        low, high = np.quantile(norms, [quantile - 0.1, quantile + 0.1])
        assert low < run.optimizer.max_grad_norm < high

    @pytest.mark.parametrize("parts", [None, 10])
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_a_step_of_the_bound(self, parts: int | None, reduction: str) -> None:
        """B exp(-η (q̂ - q)) without noise, over all parts of a batch."""
        torch.manual_seed(0)
        module, data = nn.Linear(5, 3), table()
        (x, y) = data.tensors
        norms = [norm for norm, _ in one_by_one(module, F.cross_entropy, x, y, "ball")]
        radius = float(np.median(norms)) * 1.01
        within = np.mean(np.array(norms) <= radius)
        run = adaptive(
            module=module, data=data, noise_multiplier=0.0, max_grad_norm=radius,
            clipbound_learning_rate=0.3, target_unclipped_quantile=0.7, loss_reduction=reduction,
            max_physical_batch_size=parts,
        )  # fmt: skip
        run.epoch(lambda out, y: F.cross_entropy(out, y, reduction=reduction))
        expected = radius * math.exp(-0.3 * (within - 0.7))
        assert run.optimizer.max_grad_norm == pytest.approx(expected)

    def test_the_divisor_is_the_expected_batch_size(self) -> None:
        """Also for a batch without rows, whose realised share would be 0/0."""
        run = adaptive(
            data=table(8), batch_size=1, noise_multiplier=0.0, poisson_sampling=True,
            random_state=1, clipbound_learning_rate=1.0, max_grad_norm=1e3,
        )  # fmt: skip
        sizes = set()
        for x, y in run.loader:
            before = run.optimizer.max_grad_norm
            run.step(F.cross_entropy, x, y)
            released = 0.5 - math.log(run.optimizer.max_grad_norm / before)
            assert released == pytest.approx(0.5 + 0.5 * len(x))
            sizes.add(len(x))
        assert 0 in sizes
        assert len(sizes) > 1

    def test_the_bound_stays_between_two_numbers(self) -> None:
        for quantile, expected in ((0.0, 0.5), (1.0, 2.0)):
            run = adaptive(
                noise_multiplier=0.0, min_clipbound=0.5, max_clipbound=2.0,
                clipbound_learning_rate=50.0, target_unclipped_quantile=quantile,
            )  # fmt: skip
            for _ in range(3):
                run.epoch()
            assert run.optimizer.max_grad_norm == expected

    def test_noise_that_the_count_alone_exceeds_is_refused_and_costs_nothing(self) -> None:
        run = adaptive(noise_multiplier=1.0, unclipped_num_std=0.6, poisson_sampling=True)
        schedule = ExponentialNoise(run.optimizer, gamma=1.5)
        with pytest.raises(ValueError, match=r"unclipped_num_std = 1\.2"):
            schedule.step()
        assert len(run.engine.accountant) == 0
        assert run.optimizer.noise_multiplier == 1.0

    def test_the_bound_goes_on_from_a_checkpoint(self, tmp_path: Any) -> None:
        run = adaptive(noise_multiplier=1.0, batch_size=16)
        run.epoch()
        path = tmp_path / "run.pt"
        run.engine.save_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
        again = adaptive(noise_multiplier=1.0, batch_size=16)
        again.engine.load_checkpoint(path=path, module=again.module, optimizer=again.optimizer)
        assert again.optimizer.max_grad_norm == run.optimizer.max_grad_norm != 1.0

    def test_options_of_opacus_are_the_options(self) -> None:
        run = adaptive(
            noise_multiplier=1.0, target_unclipped_quantile=0.5, clipbound_learning_rate=0.2,
            max_clipbound=10.0, min_clipbound=0.1, unclipped_num_std=2.0,
        )  # fmt: skip
        run.epoch()
        with pytest.raises(TypeError, match="target_quantile"):
            adaptive(target_quantile=0.5)
        with pytest.raises(TypeError, match="gamma"):
            adaptive(gamma=0.5)

    def test_a_target_is_met(self) -> None:
        engine, module = PrivacyEngine(), nn.Linear(5, 3)
        _, optimizer, loader = engine.make_private_with_epsilon(
            module=module, optimizer=still(module.parameters()),
            data_loader=torch.utils.data.DataLoader(table(), 16), target_epsilon=8.0,
            target_delta=1e-3, epochs=2, max_grad_norm=1.0, clipping="adaptive",
            unclipped_num_std=3.0,
        )  # fmt: skip
        for _ in range(2):
            for _batch in loader:
                pass
        assert 7 < engine.get_epsilon(1e-3) <= 8
        assert optimizer.clipping.counts


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_an_ellipsoid_is_learned_with_every_clipping(clipping: str) -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    options, _ = cases(module, 1.0)[clipping]
    run = private(module, batch_size=16, noise_multiplier=1.0, ellipsoid="pagan", **options)
    before = run.optimizer.scales["weight"].full.clone()
    for _ in range(5):
        run.epoch()
    assert not torch.equal(run.optimizer.scales["weight"].full, before)
