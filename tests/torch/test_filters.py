"""Adam without the noise's bias, and filters of the private gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privagrad.torch import AdamBC, KalmanFilter, LowPassFilter, StepNoise
from privagrad.torch.wrapped import NoiseAware
from tests.torch.reference import scales_of
from tests.torch.small import gradient_of, private

Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p: AdamBC(p, lr=0.01),
    "low-pass": lambda p: LowPassFilter(sgd(p)),
    "kalman": lambda p: KalmanFilter(torch.optim.Adam(p, lr=0.01)),
}


def steps(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradients: Any) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


class TestNoise:
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("kind", ["ball", "general", "rank-one"])
    def test_variances_are_those_of_the_gradients(self, kind: str, reduction: str) -> None:
        """(z B / b)² / C in each coordinate, also with adaptive clipping's larger noise."""
        ways: list[tuple[dict[str, Any], float]] = [
            ({}, 1.5),
            ({"clipping": "adaptive", "unclipped_num_std": 1.5}, (1.5**-2 - 3.0**-2) ** -0.5),
        ]
        for options, noise in ways:
            scales = scales_of(nn.Linear(5, 3), kind)
            run = private(
                optimizer=lambda p: AdamBC(p), noise_multiplier=1.5, max_grad_norm=0.7,
                ellipsoid=scales, loss_reduction=reduction, **options,
            )  # fmt: skip
            x, y = next(iter(run.loader))
            run.step(lambda out, t: F.cross_entropy(out, t, reduction=reduction), x, y)
            optimizer = run.optimizer.original_optimizer
            assert isinstance(optimizer, NoiseAware)
            assert optimizer.noise_variances is not None
            expected = (noise * 0.7 / (16 if reduction == "mean" else 1)) ** 2
            for place, p in enumerate(run.optimizer.params):
                size = torch.ones_like(p) if scales is None else scales[place]
                torch.testing.assert_close(optimizer.noise_variances[p], expected / size.detach())

    @pytest.mark.parametrize("make", [AdamBC, lambda p: KalmanFilter(sgd(p))])
    def test_without_a_private_optimizer_is_refused(self, make: Make) -> None:
        weight = nn.Parameter(torch.zeros(3))
        with pytest.raises(RuntimeError, match="make it private first"):
            steps(make([weight]), weight, [torch.ones(3)])


class TestAdamBC:
    def test_without_noise_is_adam(self) -> None:
        torch.manual_seed(0)
        ours, theirs = (nn.Parameter(torch.ones(4)) for _ in range(2))
        corrected, adam = AdamBC([ours], lr=0.1), torch.optim.Adam([theirs], lr=0.1)
        corrected.noise_variances = {ours: torch.zeros(4)}
        gradients = torch.randn(10, 4)
        steps(corrected, ours, gradients)
        steps(adam, theirs, gradients)
        torch.testing.assert_close(ours, theirs)

    def test_follows_the_formula_where_the_noise_changes(self) -> None:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.zeros(4))
        optimizer = AdamBC([weight], lr=0.1, betas=(0.8, 0.9), floor=0.25)
        m = v = f = x = torch.zeros(4, dtype=torch.float64)
        for t in range(1, 8):
            noise = torch.linspace(0.1, 1.0, 4) / t
            gradient = torch.randn(4)
            optimizer.noise_variances = {weight: noise}
            steps(optimizer, weight, [gradient])
            m = 0.8 * m + 0.2 * gradient
            v = 0.9 * v + 0.1 * gradient**2
            f = 0.9 * f + 0.1 * noise
            least = 0.25 * f / (1 - 0.9**t)
            size = torch.maximum((v - f) / (1 - 0.9**t), least).sqrt()
            x = x - 0.1 * m / (1 - 0.8**t) / size
            torch.testing.assert_close(weight.detach().double(), x, rtol=1e-5, atol=1e-6)

    def test_sees_the_size_of_gradients_through_the_noise(self) -> None:
        """Gradients of sizes 1 and 3, noise of size 3: Adam's steps hardly differ in scale."""
        torch.manual_seed(0)
        sizes, deviation = torch.tensor([1.0, 3.0]), 3.0
        weight = nn.Parameter(torch.zeros(2))
        optimizer = AdamBC([weight], lr=0.0001, betas=(0.9, 0.9999), floor=0.01)
        optimizer.noise_variances = {weight: torch.full((2,), deviation**2)}
        gradients = sizes + deviation * torch.randn(20_000, 2)
        steps(optimizer, weight, gradients[:10_000])
        before = weight.detach().clone()
        steps(optimizer, weight, gradients[10_000:])
        moved = (before - weight.detach()) / 1.0
        # Each goes its own mean over its own size: the same distance.
        assert float(moved[1] / moved[0]) == pytest.approx(1.0, abs=0.2)


class TestLowPass:
    def test_a_constant_gradient_stays_what_it_is(self) -> None:
        weight = nn.Parameter(torch.zeros(3))
        optimizer = LowPassFilter(torch.optim.SGD([weight], lr=1.0), (0.5, 0.2), (0.1, 0.3, 0.2))
        steps(optimizer, weight, [torch.tensor([1.0, -2.0, 0.5])] * 5)
        torch.testing.assert_close(weight.detach(), torch.tensor([-5.0, 10.0, -2.5]))

    def test_is_the_difference_equation(self) -> None:
        torch.manual_seed(0)
        a, b = (0.6, 0.1), (0.2, 0.1)
        weight = nn.Parameter(torch.zeros(3))
        optimizer = LowPassFilter(torch.optim.SGD([weight], lr=1.0), a, b)
        g = torch.randn(6, 3)
        m, c = [torch.zeros(3)] * 8, [0.0] * 8
        for t in range(6):
            before = weight.detach().clone()
            steps(optimizer, weight, [g[t]])
            earlier = g[t - 1] if t else torch.zeros(3)
            m[t] = a[0] * m[t - 1] + a[1] * m[t - 2] + b[0] * g[t] + b[1] * earlier
            c[t] = a[0] * c[t - 1] + a[1] * c[t - 2] + b[0] + (b[1] if t else 0.0)
            torch.testing.assert_close(before - weight.detach(), m[t] / c[t])

    @pytest.mark.parametrize(
        ("feedback", "feedforward"),
        [((1.0,), (0.1,)), ((-1.2,), (1.0,)), ((0.5,), ()), ((0.5,), (-1.0,)), ((), (0.1, -0.2))],
    )
    def test_filters_that_are_unstable_are_refused(self, feedback: Any, feedforward: Any) -> None:
        with pytest.raises(ValueError, match="stable filter"):
            LowPassFilter(sgd([nn.Parameter(torch.zeros(3))]), feedback, feedforward)


class TestKalman:
    def test_is_the_filter_of_each_coordinate(self) -> None:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.zeros(2))
        optimizer = KalmanFilter(torch.optim.SGD([weight], lr=1.0), drift=0.3)
        mean, variance = torch.zeros(2), torch.full((2,), torch.inf)
        for t in range(6):
            noise, gradient = torch.tensor([1.0, 4.0]) / (1 + t), torch.randn(2)
            optimizer.noise_variances = {weight: noise}
            before = weight.detach().clone()
            steps(optimizer, weight, [gradient])
            variance = variance + 0.3 * noise
            gain = torch.where(variance.isinf(), 1.0, variance / (variance + noise))
            mean = mean + gain * (gradient - mean)
            variance = torch.where(variance.isinf(), noise, (1 - gain) * variance)
            torch.testing.assert_close(before - weight.detach(), mean)

    def test_less_noise_counts_for_more(self) -> None:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = KalmanFilter(torch.optim.SGD([weight], lr=1.0), drift=1e-6)
        for noise, gradient in ((1.0, 0.0), (1e-4, 1.0)):
            optimizer.noise_variances = {weight: torch.tensor([noise])}
            steps(optimizer, weight, [torch.tensor([gradient])])
        assert gradient_of(weight).item() > 0.99


@pytest.mark.parametrize("ellipsoid", [None, "pagan"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_cost_nothing_and_go_on_from_checkpoints(
    name: str, ellipsoid: str | None, tmp_path: Any
) -> None:
    def run_of(seed: int, make: Make) -> Any:
        torch.manual_seed(1)
        return private(
            nn.Linear(5, 3), optimizer=make, noise_multiplier=2.0, poisson_sampling=True,
            random_state=seed, ellipsoid=ellipsoid,
        )  # fmt: skip

    run, plain = run_of(0, OPTIMIZERS[name]), run_of(0, sgd)
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 0.5)
    noise = StepNoise(run.optimizer, step_size=1, gamma=0.9)
    for _ in range(2):
        run.epoch()
        plain.epoch()
        schedule.step()
    assert len(run.engine.accountant) == len(plain.engine.accountant)
    path = tmp_path / "run.pt"
    run.engine.save_checkpoint(
        path=path, module=run.module, optimizer=run.optimizer, noise_scheduler=noise
    )
    again = run_of(3, OPTIMIZERS[name])
    resumed = StepNoise(again.optimizer, step_size=1, gamma=0.9)
    again.engine.load_checkpoint(
        path=path, module=again.module, optimizer=again.optimizer, noise_scheduler=resumed
    )
    gradients = [torch.randn(p.shape) for p in run.optimizer.params]
    ends: list[list[Tensor]] = []
    for training in (run, again):
        inner = training.optimizer.original_optimizer
        if isinstance(inner, NoiseAware):
            inner.noise_variances = {p: torch.ones_like(p) for p in training.optimizer.params}
        for p, g in zip(training.optimizer.params, gradients, strict=True):
            p.grad = g.clone()
        inner.step()
        ends.append([p.detach() for p in training.optimizer.params])
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_what_cannot_be_filtered_is_refused() -> None:
    with pytest.raises(TypeError, match="Use one of the two"):
        LowPassFilter(AdamBC([nn.Parameter(torch.zeros(2))]))
    with pytest.raises(TypeError, match="filter first"):
        LowPassFilter(private().optimizer)
