"""Ellipsoids from public data and from private gradients; the paper's step size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from privagrad.methods._widths import FLOOR, ellipsoid_of, widths_of
from privagrad.torch import AdaptiveSGD, second_moments
from privagrad.torch.ellipsoids import FollowingEllipsoid
from privagrad.torch.scales import Scale
from tests.statistics import assert_scale, scale_accepted
from tests.torch.small import Run, private, table

POWER = {"pagan": -4 / 3, "pasan": -1.0}


def moments(module: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """E[g²], one backward pass per example."""
    names = [name for name, _ in module.named_parameters()]
    total = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for x, y in zip(inputs, targets, strict=True):
        loss = F.cross_entropy(module(x[None]), y[None])
        for name, g in zip(names, torch.autograd.grad(loss, [*module.parameters()]), strict=True):
            total[name] += g.square() / len(inputs)
    return total


class FirstOf(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.inner(x)[0]
        return outputs


def spread(moment: Tensor, per: str) -> Tensor:
    if per == "row":
        rest = tuple(range(1, moment.dim()))
        return moment.mean(rest, keepdim=True).expand_as(moment) if rest else moment
    return moment.mean().expand_as(moment) if per == "tensor" else moment


def lopsided() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    inputs, targets = table(40).tensors
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return module, inputs * torch.tensor([0.01, 0.1, 1.0, 3.0, 10.0]), targets


@pytest.mark.parametrize("per", ["coordinate", "row", "tensor"])
@pytest.mark.parametrize("name", POWER)
def test_public_moments_shape_the_ellipsoid(name: str, per: str) -> None:
    """C is σ to the paper's power; the mean squared norm is what it is in a ball."""
    module, inputs, targets = lopsided()
    found = moments(module, inputs, targets)
    floored = {k: spread(m, per) + 0.2 * m.mean() for k, m in found.items()}
    scales = {k: m ** (POWER[name] / 2) for k, m in floored.items()}
    factor = sum(float(m.sum()) for m in floored.values()) / sum(
        float((scales[k] * floored[k]).sum()) for k in floored
    )
    run = private(
        module, ellipsoid=name, per=per, floor=0.2,
        public_loader=DataLoader(TensorDataset(inputs, targets), 16),
    )  # fmt: skip
    for k, scale in run.optimizer.scales.items():
        expected = factor * scales[k].reshape(scale.full.shape)
        assert torch.allclose(scale.full, expected, rtol=1e-4)


def test_moments_are_those_of_examples_for_any_batches() -> None:
    module, inputs, targets = lopsided()
    expected = moments(module, inputs, targets)
    for batch_size in (1, 7, 40):
        loader = DataLoader(TensorDataset(inputs, targets), batch_size)
        found = second_moments(module, loader, floor=1e-9)
        summed = second_moments(
            module, loader, nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum", floor=1e-9
        )
        for k, moment in expected.items():
            assert torch.allclose(found[k].float(), moment, rtol=1e-4, atol=1e-10)
            assert torch.allclose(summed[k].float(), moment, rtol=1e-4, atol=1e-10)


def test_moments_of_rows_are_those_of_their_coordinates() -> None:
    """Also where no gradient is formed: one example uses a matrix several times."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Embedding(9, 5), FirstOf(nn.LSTM(5, 4, batch_first=True)), nn.Linear(4, 3)
    )
    words, targets = torch.randint(0, 9, (12, 7)), torch.randint(0, 3, (12, 7))
    loader = DataLoader(TensorDataset(words, targets), 4)
    each = second_moments(module, loader, floor=1e-9)
    rows = second_moments(module, loader, floor=1e-9, per="row")
    for name, moment in each.items():
        expected = spread(moment, "row") if moment.dim() > 1 else moment
        assert torch.allclose(rows[name], expected, rtol=1e-4)


def test_public_moments_cost_and_change_nothing() -> None:
    module, inputs, targets = lopsided()
    before = [p.clone() for p in module.parameters()]
    loader = DataLoader(TensorDataset(inputs, targets), 16)
    run = private(module, ellipsoid="pagan", public_loader=loader, noise_multiplier=1.0)
    assert len(run.engine.accountant) == 0
    for p, old in zip(module.parameters(), before, strict=True):
        assert torch.equal(p, old)
        assert p.grad is None


@pytest.mark.parametrize("name", POWER)
def test_private_gradients_shape_the_ellipsoid(name: str) -> None:
    """After 17 steps roughly, then ever better. Gradients are y x, whatever the weights."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.1, 0.3, 1.0, 3.0, 10.0])
    inputs = torch.randn(512, 5, generator=generator) * sizes
    signs = torch.randint(0, 2, (512,), generator=generator) * 2.0 - 1
    run = private(
        nn.Linear(5, 1, bias=False), TensorDataset(inputs, signs), 32,
        ellipsoid=name, noise_multiplier=1e-4, max_grad_norm=100.0, poisson_sampling=True,
        random_state=1,
    )  # fmt: skip
    expected = sizes ** POWER[name] / sizes[0] ** POWER[name]
    step = 0
    for _ in range(18):
        for x, y in run.loader:
            run.step(lambda out, y: (out[:, 0] * y).mean(), x, y)
            step += 1
            scale = run.optimizer.scales["weight"].full[0]
            if step < 17:
                assert torch.equal(scale, torch.ones(5))
            if step == 17:
                assert torch.all((scale / scale[0] / expected).log().abs() < 1.0)
    assert torch.all((scale / scale[0] / expected).log().abs() < 0.3)
    norm = float((scale * sizes.square()).sum())
    assert norm == pytest.approx(float(sizes.square().sum()), rel=0.5)


def test_noise_has_the_shape_of_the_ellipsoid_that_was_learned_last() -> None:
    """Gradients are bounded in it, and so their noise must be of it."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 30, generator=generator) * torch.logspace(-1, 1, 30)
    run = private(
        nn.Linear(30, 40, bias=False), TensorDataset(inputs, torch.zeros(64)), 32,
        lambda p: torch.optim.SGD(p, lr=0.0), ellipsoid="pagan", noise_multiplier=1e-3,
    )  # fmt: skip
    learned = []
    for step in range(40):
        scale = run.optimizer.scales["weight"].full
        if step not in (0, 30, 39):
            run.epoch(lambda out, y: out.sum(1).mean())
        else:
            run.epoch(lambda out, y: (0.0 * out).sum(1).mean())
            assert torch.equal(run.optimizer.scales["weight"].full, scale)
            assert_scale((run.gradients[0] * scale.sqrt()).numpy(), 1e-3 / 32)
            learned.append(float(scale.max() / scale.min()))
    assert learned[0] == 1
    assert min(learned[1:]) > 10


def test_noise_is_not_taken_for_gradients() -> None:
    """Where noise hides everything the ellipsoid stays close to the ball."""
    run = private(
        nn.Linear(30, 3), table(64, 30), 16,
        ellipsoid="pagan", noise_multiplier=50.0, poisson_sampling=True, random_state=1,
    )  # fmt: skip
    for _ in range(20):
        run.epoch()
    for scale in run.optimizer.scales.values():
        assert float(scale.full.max() / scale.full.min()) < 20
    assert 0.02 < float(scale.full.mean()) < 50


class TestFollowingEllipsoid:
    """`ellipsoid="scale-then-privatize"`: the widths are √v of the released gradients."""

    def run_of(self, targets: Tensor | None = None, **options: Any) -> Run:
        targets = torch.zeros(64) if targets is None else targets
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(64, 30, generator=generator) * torch.logspace(-1, 1, 30)
        return private(
            nn.Linear(30, 40, bias=False), TensorDataset(inputs, targets), 32,
            lambda p: torch.optim.SGD(p, lr=0.0), ellipsoid="scale-then-privatize",
            **{"noise_multiplier": 0.1, "random_state": 1, **options},
        )  # fmt: skip

    def test_shape_is_that_of_the_convex_method_on_released_gradients_alone(self) -> None:
        """Equal to `methods.scale_then_privatize`, from what was released and nothing else."""
        run = self.run_of(max_grad_norm=2.0)
        squares, steps = np.zeros(1200), 0
        for _ in range(5):
            for x, y in run.loader:
                run.step(lambda out, y: out.sum(1).mean(), x, y)
                released = run.gradients[0].double().numpy().ravel()
                squares, steps = 0.99 * squares + 0.01 * released**2, steps + 1
                start = 0.99**steps * (0.1 * 2.0 / 32) ** 2
                expected = ellipsoid_of(widths_of(squares + start, FLOOR), 2.0).scale
                found = run.optimizer.scales["weight"].full.numpy().ravel()
                assert np.allclose(found, expected, rtol=1e-4)
        assert expected.max() / expected.min() > 3

    def test_noise_has_the_shape_of_the_ellipsoid_of_its_step(self) -> None:
        """Refuses noise that is a third too small, and noise in the shape of the next step."""
        run = self.run_of()
        for _ in range(30):
            run.epoch(lambda out, y: out.sum(1).mean())
        for x, y in run.loader:
            scale = run.optimizer.scales["weight"].full
            run.step(lambda out, y: (0.0 * out).sum(1).mean(), x, y)
            whitened = (run.gradients[0] * scale.sqrt()).numpy()
            assert_scale(whitened, 0.1 / 32)
            assert not scale_accepted(whitened * 2 / 3, 0.1 / 32)
            assert float(scale.max() / scale.min()) > 10

    def test_gradients_are_bounded_in_the_ellipsoid_of_their_step(self) -> None:
        """One example's part of the sum has norm 1 in C / max_grad_norm², whatever C became."""
        # All but one row of each batch have a loss of 0.
        weights = torch.zeros(64)
        weights[[3, 40]] = 1.0
        run = self.run_of(weights, noise_multiplier=1e-6, max_grad_norm=0.1)
        for _ in range(10):
            for x, y in run.loader:
                scale = run.optimizer.scales["weight"].full
                run.step(lambda out, y: (out.sum(1) * y).mean(), x, y)
                norm = float((scale * run.gradients[0].square()).sum().sqrt())
                assert norm * 32 == pytest.approx(0.1, rel=1e-3)
        assert float(scale.max() / scale.min()) > 3

    def test_noise_has_the_total_variance_of_a_ball(self) -> None:
        run = self.run_of()
        for _ in range(10):
            run.epoch(lambda out, y: out.sum(1).mean())
        scale = run.optimizer.scales["weight"].full
        assert float((1 / scale).mean()) == pytest.approx(1.0, rel=1e-4)

    def test_goes_on_from_a_checkpoint_as_if_there_were_none(self, tmp_path: Path) -> None:
        """And not from what the optimizer did before it was loaded."""
        shapes = []
        for rests in (False, True):
            run = self.run_of()
            run.epoch(lambda out, y: out.sum(1).mean())
            if rests:
                path = tmp_path / "checkpoint.pt"
                run.engine.save_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
                run = self.run_of()
                run.epoch(lambda out, y: 100 * out.square().mean())
                run.engine.load_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
            rule = run.optimizer.learned_ellipsoid
            assert rule is not None
            torch.manual_seed(3)
            parameters = run.optimizer.tape.parameters
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter) * torch.randn(parameter.shape)
            learned = rule.learn(parameters, run.optimizer.scales, 0.1, 1.0)
            assert learned is not None
            shapes.append(learned["weight"].full)
        assert torch.allclose(shapes[0], shapes[1])

    def test_is_positive_in_half_precision(self) -> None:
        """One coordinate with nearly all of the energy of many."""
        parameter = nn.Parameter(torch.ones(1, 40_000, dtype=torch.float16))
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad[0, 0] = 100.0
        rule = FollowingEllipsoid(square_memory=0.5, floor=1e-6)
        learned = rule.learn({"w": parameter}, {"w": Scale.ball(parameter)}, 1e-8, 1.0)
        assert learned is not None
        scale = learned["w"].full
        assert bool(((scale > 0) & scale.isfinite()).all())

    def test_goes_on_in_the_shape_that_it_is_given(self) -> None:
        """Without the squares behind it, as at the first step."""
        parameter = nn.Parameter(torch.ones(1, 4))
        parameter.grad = torch.zeros(1, 4)
        before = Scale.of(torch.tensor([[0.5, 1.0, 2.0, 4.0]]))
        learned = FollowingEllipsoid().learn({"w": parameter}, {"w": before}, 1.0, 1.0)
        assert learned is not None
        ratio = learned["w"].full / before.full
        assert torch.allclose(ratio, ratio.mean().expand(1, 4), rtol=0.05)

    def test_costs_what_a_ball_costs(self) -> None:
        ball = private(noise_multiplier=1.0, poisson_sampling=True)
        follows = private(
            noise_multiplier=1.0, poisson_sampling=True, ellipsoid="scale-then-privatize"
        )
        for run in (ball, follows):
            run.epoch()
        assert follows.engine.get_epsilon(1e-5) == ball.engine.get_epsilon(1e-5)

    def test_public_data_is_refused(self) -> None:
        with pytest.raises(ValueError, match="Leave public_loader out"):
            private(ellipsoid="scale-then-privatize", public_loader=[])


class TestAdaptiveSGD:
    def test_steps_are_those_of_the_formula(self) -> None:
        """x ← x - lr g / sqrt(initial + Σ_k ‖g_k‖²), each group by itself."""
        torch.manual_seed(0)
        groups = [[torch.randn(3, 2), torch.randn(4)], [torch.randn(5)]]
        expected = [[t.clone() for t in group] for group in groups]
        parameters = [[nn.Parameter(t.clone()) for t in group] for group in groups]
        optimizer = AdaptiveSGD(
            [{"params": parameters[0]}, {"params": parameters[1], "lr": 0.3, "initial": 2.0}],
            lr=2.0,
        )
        squares = [0.0, 2.0]
        for _ in range(5):
            for index, group in enumerate(parameters):
                gradients = [torch.randn_like(p) for p in group]
                squares[index] += sum(float(g.square().sum()) for g in gradients)
                size = (2.0, 0.3)[index] / math.sqrt(squares[index])
                for p, g, e in zip(group, gradients, expected[index], strict=True):
                    p.grad = g
                    e -= size * g
            optimizer.step()
            for group, other in zip(parameters, expected, strict=True):
                for p, e in zip(group, other, strict=True):
                    assert torch.allclose(p, e, atol=1e-6)

    def test_trains_privately_and_goes_on_from_its_state(self) -> None:
        run = private(optimizer=AdaptiveSGD, noise_multiplier=1.0)
        run.epoch()
        squares = run.optimizer.param_groups[0]["squares"]
        assert squares > 0
        other = private(optimizer=AdaptiveSGD)
        other.optimizer.load_state_dict(run.optimizer.state_dict())
        assert other.optimizer.param_groups[0]["squares"] == squares

    def test_without_gradients_nothing_moves(self) -> None:
        p = nn.Parameter(torch.ones(2))
        optimizer = AdaptiveSGD([p])
        optimizer.step()
        p.grad = torch.zeros(2)
        optimizer.step()
        assert torch.equal(p, torch.ones(2))

    @pytest.mark.parametrize("options", [{"lr": 0.0}, {"lr": -1.0}, {"initial": -1.0}])
    def test_bad_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(options))):
            AdaptiveSGD([nn.Parameter(torch.ones(2))], **options)
