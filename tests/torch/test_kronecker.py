"""Preconditioned layers: the same function, another ball."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from privagrad.torch import (
    BatchMemoryManager,
    LinearCrossEntropy,
    PrivacyEngine,
    dp_kfc_steps,
    fold,
    pink_noise,
    precondition,
    zipf_tokens,
)
from privagrad.torch.kronecker_layers import KroneckerLayer, KroneckerLinear
from tests.statistics import assert_scale
from tests.torch.reference import Listed, assert_same, check, looped
from tests.torch.small import Run, private, table

Batches = list[tuple[Tensor, Tensor]]


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(),
        nn.Conv2d(3, 4, (2, 1), dilation=(1, 2), padding=(1, 0), padding_mode="circular"),
        nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip


class Words(nn.Module):
    """A layer that other examples' positions pass through, and a decoder with its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(9, 4), nn.Linear(4, 5)
        self.decoder = LinearCrossEntropy(5, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.decoder(torch.tanh(self.inner(self.embedding(tokens))), tokens)
        return loss


def batches_for(module: nn.Module, count: int = 60) -> Batches:
    """Inputs with axes that are not coordinates, and targets; in two batches."""
    if isinstance(module, Words):
        tokens = zipf_tokens(count, 6, 9)
        return [(t, t) for t in tokens.split(40)]
    if isinstance(next(iter(module.children())), nn.Conv2d):
        x = pink_noise(count, (2, 6, 5)) + 0.3
        with torch.no_grad():
            module(x)
    else:
        x = torch.randn(count, 5) @ torch.randn(5, 5) + 1.0
    return list(zip(x.split(40), torch.randint(0, 3, (count,)).split(40), strict=True))


MODULES: list[Callable[[], nn.Module]] = [dense, convolutional, Words]


def prepared(make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module, Batches]:
    module = make()
    batches = batches_for(module)
    return module, precondition(module, batches, **{"sides": "both", **options}), batches


def parts(module: nn.Module) -> list[KroneckerLayer]:
    return [part for part in module.modules() if isinstance(part, KroneckerLayer)]


def outputs(module: nn.Module, batches: Batches) -> Tensor:
    with torch.no_grad():
        return torch.cat([module(x).reshape(-1) for x, _ in batches])


class TestFunction:
    @pytest.mark.parametrize("make", MODULES)
    @pytest.mark.parametrize("power", [0.5, 1.0])
    def test_is_unchanged(self, make: Callable[[], nn.Module], power: float) -> None:
        module, made, batches = prepared(make, power=power)
        expected = outputs(module, batches)
        for same in (made, fold(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            torch.testing.assert_close(outputs(same, batches), expected, rtol=1e-5, atol=1e-5)

    @settings(max_examples=25, deadline=None)
    @given(
        sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
        bias=st.booleans(),
        power=st.sampled_from([0.5, 2 / 3, 1.0]),
        sides=st.sampled_from(["inputs", "both"]),
        largest=st.sampled_from([3, 2048]),
        scale=st.sampled_from([1e-3, 1.0, 1e3]),
        seed=st.integers(0, 2**32),
    )
    def test_is_unchanged_in_any_architecture(
        self, sizes: list[int], bias: bool, scale: float, seed: int, **options: Any
    ) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(a, b, bias) for a, b in itertools.pairwise(sizes)]
        module = nn.Sequential(*layers)
        x, y = scale * torch.randn(20, sizes[0]), torch.randn(20, sizes[-1])
        made = precondition(module, [(x, y)], **options)
        expected = module(x).detach()
        for same in (made, fold(made)):
            error = float((same(x).detach() - expected).abs().max())
            assert error <= 1e-5 * float(expected.abs().max())

    @pytest.mark.parametrize("make", MODULES)
    def test_folded_is_the_plain_architecture(self, make: Callable[[], nn.Module]) -> None:
        module, made, _ = prepared(make)
        folded = fold(made)
        assert str(folded) == str(module)
        assert list(folded.state_dict()) == list(module.state_dict())
        torch.testing.assert_close(folded.state_dict(), module.state_dict(), rtol=1e-4, atol=1e-5)
        assert all(p.requires_grad for p in folded.parameters())
        assert not any(part.training for part in fold(made.eval()).modules())

    def test_weights_can_be_read(self) -> None:
        """PyTorch's transformer layers do so in eval mode."""
        module = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        x = torch.randn(20, 3, 4)
        made = precondition(module, [(x, torch.randn(20, 3, 4))])
        assert len(parts(made)) == 2
        for name in ("weight", "bias"):
            read = getattr(made.get_submodule("linear1"), name)
            torch.testing.assert_close(read, getattr(module.linear1, name))
        with torch.no_grad():
            torch.testing.assert_close(made.eval()(x), module.eval()(x), rtol=1e-5, atol=1e-5)

    def test_a_layer_that_is_used_twice_stays_one(self) -> None:
        shared = nn.Linear(5, 5)
        module = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(5, 3))
        batches = batches_for(dense())
        made = precondition(module, batches)
        assert made.get_submodule("0") is made.get_submodule("2")
        assert list(fold(made).state_dict()) == list(module.state_dict())
        torch.testing.assert_close(outputs(made, batches), outputs(module, batches))


class TestGeometry:
    @pytest.mark.parametrize("make", [dense, convolutional])
    def test_gradients_are_those_of_the_plain_weights_between_the_factors(
        self, make: Callable[[], nn.Module]
    ) -> None:
        """Lᵀ G Rᵀ, where G has the gradient of the bias as its last column."""
        module, made, batches = prepared(make)
        x, y = batches[0]
        for own in (module, made):
            F.cross_entropy(own(x), y).backward()
        plain = [m for m in module.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        for layer, part in zip(plain, parts(made), strict=True):
            gradient = layer.weight.grad
            assert gradient is not None
            assert part.left is not None
            assert part.right is not None
            gradient = gradient.flatten(1)
            if layer.bias is not None:
                assert layer.bias.grad is not None
                gradient = torch.cat([gradient, layer.bias.grad[:, None]], 1)
            found = part.core.get_parameter("weight").grad
            assert found is not None
            expected = part.left.T @ gradient @ part.right.T
            torch.testing.assert_close(found.flatten(1), expected, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("make", [dense, convolutional])
    @pytest.mark.parametrize("kind", ["ball", "general"])
    def test_the_engine_bounds_each_example_in_the_new_coordinates(
        self, make: Callable[[], nn.Module], kind: str
    ) -> None:
        _, made, batches = prepared(make)
        check(made, batches[0][0][:12], kind, 1e-4)

    def test_public_inputs_are_white(self) -> None:
        """Mean outer products of R (x, 1) are the identity times a number at power 1."""
        _, made, batches = prepared(dense, power=1.0, damping=1e-6)
        seen: list[Tensor] = []
        for part in parts(made):
            part.core.register_forward_hook(lambda _m, inputs, _y: seen.append(inputs[0].detach()))
        made(torch.cat([x for x, _ in batches]))
        for rows in seen:
            moments = rows.T @ rows / len(rows)
            scale = moments.diagonal().mean()
            torch.testing.assert_close(moments / scale, torch.eye(len(moments)), rtol=0, atol=1e-3)

    def test_public_gradients_of_outputs_are_white(self) -> None:
        module = nn.Linear(5, 3)
        batches = [(x, torch.randn(len(x), 3)) for x, _ in batches_for(dense())]
        made = precondition(module, batches, sides="both", damping=1e-6)
        seen: list[Any] = []
        core = made.get_submodule("core")

        def note(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            output.register_hook(seen.append)

        core.register_forward_hook(note)
        x, y = (torch.cat(part) for part in zip(*batches, strict=True))
        F.mse_loss(made(x), y).backward()
        moments: Tensor = seen[0].T @ seen[0]
        moments = moments / moments.diagonal().mean()
        torch.testing.assert_close(moments, torch.eye(3), rtol=0, atol=1e-3)

    @pytest.mark.parametrize("make", MODULES)
    def test_mean_squared_norms_of_each_layer_stay(self, make: Callable[[], nn.Module]) -> None:
        module, made, batches = prepared(make)

        def squares(of: nn.Module, names: Callable[[str], bool]) -> float:
            total = 0.0
            for x, y in batches:
                for i in range(len(x)):
                    of.zero_grad()
                    output = of(x[i : i + 1])
                    loss = output if output.dim() == 0 else F.cross_entropy(output, y[i : i + 1])
                    loss.backward()
                    total += sum(
                        float(p.grad.square().sum())
                        for name, p in of.named_parameters() if names(name) and p.grad is not None
                    )  # fmt: skip
            return total

        for path, part in made.named_modules():
            if isinstance(part, KroneckerLayer):
                after = squares(made, lambda name, path=path: name.startswith(path))  # type: ignore[misc]
                before = squares(module, lambda name, path=path: name.startswith(path))  # type: ignore[misc]
                assert after == pytest.approx(before, rel=1e-3)


class TestTraining:
    def test_noise_in_the_weights_has_the_shape_of_the_factors(self) -> None:
        """L⁻¹ ΔW R⁻¹ is N(0, (z B/b)²) in each coordinate: ΔW has covariance L Lᵀ ⊗ Rᵀ R."""
        module = nn.Linear(19, 20)
        x, y = torch.randn(64, 19) @ torch.randn(19, 19), torch.randint(0, 20, (64,))
        made = precondition(module, [(x, y)], sides="both")
        assert isinstance(made, KroneckerLinear)
        before = torch.cat([made.weight, made.bias[:, None]], 1).detach().double()  # type: ignore[index]
        run = private(
            made, Listed(x, y), 16, lambda p: torch.optim.SGD(p, lr=1.0),
            noise_multiplier=1.5, max_grad_norm=0.4,
        )  # fmt: skip
        samples = []
        for x, y in run.loader:
            run.step(lambda out, _: (0.0 * out).sum(1).mean(), x, y)
            after = torch.cat([made.weight, made.bias[:, None]], 1).detach().double()  # type: ignore[index]
            left, right = made.left.double(), made.right.double()  # type: ignore[union-attr]
            whitened = torch.linalg.solve(left, after - before)
            samples.append(torch.linalg.solve(right, whitened, left=False).numpy())
            before = after
        assert_scale(np.array(samples), 1.5 * 0.4 / 16)

    @pytest.mark.parametrize("make", [dense, convolutional])
    def test_a_private_model_is_saved_as_a_plain_one(self, make: Callable[[], nn.Module]) -> None:
        """With all checks, Poisson batches in parts, and a checkpoint on the way."""
        module, made, batches = prepared(make)
        x, y = (torch.cat(part) for part in zip(*batches, strict=True))
        engine = PrivacyEngine()
        run = Run(
            engine,
            *engine.make_private(
                module=made, optimizer=torch.optim.SGD(made.parameters(), lr=0.1),
                data_loader=DataLoader(Listed(x, y), batch_size=20),
                noise_multiplier=1.0, max_grad_norm=1.0,
            ),
        )  # fmt: skip
        run.epoch()
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=8, optimizer=run.optimizer
        ) as parts_of_batches:
            for inputs, targets in parts_of_batches:
                run.step(F.cross_entropy, inputs, targets)
        assert engine.report(1e-5).verified
        folded = fold(run.module)
        plain = make()
        batches_for(plain)
        plain.load_state_dict(folded.state_dict())
        with torch.no_grad():
            found, expected = plain(x), run.module.eval()(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found, module(x), atol=1e-3)

    def test_checkpoints_restore_the_factors(self, tmp_path: Any) -> None:
        _, made, batches = prepared(dense)
        other = precondition(dense(), batches, sides="both", power=0.5)
        first, second = private(made), private(other)
        first.epoch()
        path = tmp_path / "state.pt"
        first.engine.save_checkpoint(path=path, module=first.module, optimizer=first.optimizer)
        second.engine.load_checkpoint(path=path, module=second.module, optimizer=second.optimizer)
        torch.testing.assert_close(fold(other).state_dict(), fold(made).state_dict())

    def test_a_module_that_keeps_its_class_folds(self) -> None:
        _, made, batches = prepared(dense)
        engine = PrivacyEngine()
        hooks, _optimizer, _loader = engine.make_private(
            module=made, optimizer=still(made.parameters()),
            data_loader=DataLoader(table(), batch_size=16), noise_multiplier=1.0,
            max_grad_norm=1.0, wrap_model=False,
        )  # fmt: skip
        expected = outputs(made, batches)
        torch.testing.assert_close(outputs(fold(hooks), batches), expected)
        torch.testing.assert_close(outputs(fold(made), batches), expected)

    def test_inputs_alone_are_whitened_unless_told_otherwise(self) -> None:
        _, made, _ = prepared(convolutional, sides="inputs")
        assert all(part.left is None and part.right is not None for part in parts(made))

    def test_large_sides_have_no_factor(self) -> None:
        _, made, batches = prepared(dense, largest=6)
        first, last = parts(made)
        assert (first.left, last.right) == (None, None)
        assert first.right is not None
        assert last.left is not None
        check(made, batches[0][0][:12], "ball", 1e-4)

    def test_steps_of_dp_kfc_move_the_weights_by_the_whitened_gradient(self) -> None:
        """ΔW = -η U_S G U_A, bounded: and nothing else moves."""
        module, made, batches = prepared(dense, power=1.0)
        x, y = batches[0]
        expected = looped(made, F.cross_entropy, x, y, "ball", 0.3)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.5, momentum=0.9)
        dp_kfc_steps(optimizer, made)
        engine = PrivacyEngine()
        run = Run(
            engine,
            *engine.make_private(
                module=made, optimizer=optimizer,
                data_loader=DataLoader(Listed(x, y), batch_size=len(x)),
                noise_multiplier=0.0, max_grad_norm=0.3, poisson_sampling=False,
            ),
        )  # fmt: skip
        run.epoch()
        moved = []
        for name in ("0", "2"):
            before, after = module.get_submodule(name), fold(made).get_submodule(name)
            pairs = zip(before.parameters(), after.parameters(), strict=True)
            steps = [(b - a).detach().reshape(len(a), -1) for a, b in pairs]
            moved.append(torch.cat(steps, 1))
        assert_same(moved, [-0.5 * e for e in expected], 1e-3)

    def test_steps_of_dp_kfc_follow_factors_that_are_loaded(self) -> None:
        made, other = (prepared(dense)[1] for _ in range(2))
        optimizer = torch.optim.SGD(made.parameters(), lr=1.0)
        dp_kfc_steps(optimizer, made)
        for _ in range(2):
            before = fold(made).get_submodule("0").get_parameter("weight").detach().clone()
            (first, *_) = parts(made)
            gradient = torch.randn_like(first.core.get_parameter("weight"))
            first.core.get_parameter("weight").grad = gradient.clone()
            optimizer.step()
            after = fold(made).get_submodule("0").get_parameter("weight").detach()
            assert first.left is not None
            torch.testing.assert_close(before - after, gradient[:, :-1], rtol=1e-3, atol=1e-4)
            made.load_state_dict(other.state_dict())

    def test_dropout_changes_no_layer_without_factors(self) -> None:
        module = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 3))
        made = precondition(module, batches_for(dense()), largest=10)
        last = parts(made)[1]
        assert (last.left, last.right) == (None, None)
        assert torch.equal(last.weight, module.get_parameter("2.weight"))

    def test_layers_that_carry_more_stay_as_they_are(self) -> None:
        def more(change: Callable[[nn.Linear], Any]) -> nn.Module:
            module = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
            change(cast(nn.Linear, module[1]))
            return module

        changes: list[Callable[[nn.Linear], Any]] = [
            lambda layer: layer.register_buffer("mask", torch.ones(3)),
            lambda layer: layer.register_full_backward_pre_hook(lambda *_: None),
        ]
        for change in changes:
            made = precondition(more(change), batches_for(dense()))
            assert [type(part) for part in made.children()] == [KroneckerLinear, nn.Linear]

    def test_folded_modules_can_be_made_private_again(self) -> None:
        _, made, _ = prepared(dense)
        engine = PrivacyEngine()
        hooks, _, _ = engine.make_private(
            module=made, optimizer=still(made.parameters()), wrap_model=False,
            data_loader=DataLoader(table(), batch_size=16), noise_multiplier=1.0,
            max_grad_norm=1.0,
        )  # fmt: skip
        plain = fold(hooks)
        private(plain).epoch()


class TestRefusals:
    def test_layers_that_are_called_from_a_list(self) -> None:
        class Hidden(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)
                self.sequence = [self.last]

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = self.sequence[0](self.first(x))
                return y

        with pytest.raises(ValueError, match="layer last to be called as the part"):
            precondition(Hidden(), batches_for(dense()))

    def test_optimizers_that_dp_kfc_is_not_for(self) -> None:
        _, made, _ = prepared(dense)
        with pytest.raises(TypeError, match="found Adam"):
            dp_kfc_steps(torch.optim.Adam(made.parameters()), made)
        with pytest.raises(ValueError, match="lacks some"):
            dp_kfc_steps(still(dense().parameters()), made)
        optimizer = still(made.parameters())
        dp_kfc_steps(optimizer, made)
        with pytest.raises(ValueError, match="second one"):
            dp_kfc_steps(optimizer, made)

    def test_modules_that_are_private_already(self) -> None:
        _, made, batches = prepared(dense)
        run = private(dense())
        for module in (run.module, run.module.to_standard_module()):
            with pytest.raises(ValueError, match="comes before make_private"):
                precondition(module, batches)
        with pytest.raises(ValueError, match=r"fold\(\) it first"):
            precondition(made, batches)

    def test_an_optimizer_of_the_plain_module(self) -> None:
        module, made, _ = prepared(dense)
        with pytest.raises(ValueError, match="module's parameters"):
            PrivacyEngine().make_private(
                module=made, optimizer=still(module.parameters()),
                data_loader=DataLoader(table(), batch_size=16), noise_multiplier=1.0,
                max_grad_norm=1.0,
            )  # fmt: skip

    def test_modules_without_layers_for_it_are_told_why(self) -> None:
        hooked = nn.Linear(5, 5)
        hooked.register_forward_hook(lambda *_: None)
        frozen = nn.Linear(5, 5)
        frozen.weight.requires_grad_(False)
        tied = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        tied[1].weight = tied[0].weight
        grouped = nn.Conv2d(4, 4, 1, groups=2)
        for layer, reason in [
            (hooked, "hooks"), (frozen, "frozen"), (tied, "shares"), (grouped, "groups"),
            (nn.LSTM(5, 3), "none of Linear"), (nn.ReLU(), "no parameters"),
        ]:  # fmt: skip
            with pytest.raises(ValueError, match=reason):
                precondition(nn.Sequential(layer), [(torch.zeros(2, 5), torch.zeros(2))])

    def test_other_layers_stay_as_they_are(self) -> None:
        frozen = nn.Linear(5, 5).requires_grad_(False)
        module = nn.Sequential(nn.LayerNorm(5), frozen, nn.Linear(5, 3))
        made = precondition(module, batches_for(dense()))
        assert [type(part) for part in made.children()] == [
            nn.LayerNorm, nn.Linear, KroneckerLinear,
        ]  # fmt: skip

    def test_batches_that_say_nothing(self) -> None:
        module, batches = dense(), batches_for(dense())
        with pytest.raises(ValueError, match="found none in public_loader"):
            precondition(module, [])
        with pytest.raises(ValueError, match=r"inputs of layer 0 .* found nan"):
            precondition(module, [(torch.full_like(x, torch.nan), y) for x, y in batches])
        module.get_submodule("2").get_parameter("weight").data.zero_()
        with pytest.raises(ValueError, match="gradients of the outputs of layer 0"):
            precondition(module, batches, sides="both")
        with pytest.raises(ValueError, match="gradients of layer 0 other than 0"):
            precondition(module, batches)

    def test_hooks_of_parameters(self) -> None:
        module = dense()
        module.get_submodule("0").get_parameter("weight").register_hook(lambda g: 0 * g)
        with pytest.raises(ValueError, match=r"hooks, found some on 0\.weight"):
            precondition(module, batches_for(module))

    def test_too_little_damping(self) -> None:
        with pytest.raises(ValueError, match="Expected damping >= 1e-06"):
            prepared(dense, damping=1e-7)

    @pytest.mark.parametrize("option", ["power", "damping", "largest"])
    def test_options_that_cannot_be(self, option: str) -> None:
        with pytest.raises(ValueError, match=f"Expected {option} >"):
            prepared(dense, **{option: 0})

    def test_folding_what_is_plain(self) -> None:
        with pytest.raises(ValueError, match="plain already"):
            fold(dense())
        with pytest.raises(ValueError, match="without preconditioned"):
            dp_kfc_steps(still(dense().parameters()), dense())


class TestProbes:
    def test_pink_noise_has_amplitudes_that_fall_as_one_over_frequency(self) -> None:
        """The mean power at frequency f is ~ 1/f²; 4000 spectra fix each ratio to 10 %."""
        images = pink_noise(4000, (2, 16, 16), torch.Generator().manual_seed(0))
        assert images.shape == (4000, 2, 16, 16)
        means, squares = images.mean((1, 2, 3)), images.square().mean((1, 2, 3))
        torch.testing.assert_close(means, torch.zeros(4000), rtol=0, atol=1e-4)
        torch.testing.assert_close(squares, torch.ones(4000))
        power = torch.fft.fft2(images).abs().square().mean((0, 1))
        for one, other in [((0, 1), (0, 4)), ((2, 0), (6, 0)), ((1, 1), (3, 3))]:
            expected = (other[0] ** 2 + other[1] ** 2) / (one[0] ** 2 + one[1] ** 2)
            assert float(power[one] / power[other]) == pytest.approx(expected, rel=0.1)

    def test_tokens_are_as_frequent_as_zipf_says(self) -> None:
        tokens = zipf_tokens(2000, 50, 20, torch.Generator().manual_seed(0))
        assert tokens.shape == (2000, 50)
        counts = torch.bincount(tokens.flatten(), minlength=20)
        assert float(counts[0] / counts[9]) == pytest.approx(10, rel=0.1)

    def test_shapes_that_cannot_be(self) -> None:
        for shape in [(28, 28), (1, 1, 1), (0, 4, 4)]:
            with pytest.raises(ValueError, match="two pixels or more"):
                pink_noise(3, shape)
        with pytest.raises(ValueError, match="Expected vocabulary >= 1"):
            zipf_tokens(3, 4, 0)

    def test_a_generator_repeats_them(self) -> None:
        for draw in (lambda g: pink_noise(3, (1, 4, 4), g), lambda g: zipf_tokens(3, 4, 5, g)):
            first, second = (draw(torch.Generator().manual_seed(1)) for _ in range(2))
            assert torch.equal(first, second)
