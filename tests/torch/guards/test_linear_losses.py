"""Losses of a linear layer's outputs: bounded where terms cancel, hooks look or tensors change.

The heads are large enough for the chunked way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from privagrad.torch import LinearCrossEntropy, PrivacyEngine
from privagrad.torch.guards.refusals import UnverifiedError

CLASSES, ROWS, WIDTH, ODD = 4096, 300, 8, 3
Backward = Callable[[Any, Any], object]
"""Of the private module and a batch: computes a loss and calls backward()."""


def bounded_sum(
    make: Callable[[], nn.Module], batch: list[Tensor], backward: Backward, radius: float
) -> Tensor:
    torch.manual_seed(0)
    module = make()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(*batch), batch_size=len(batch[0])),
        noise_multiplier=0.0, max_grad_norm=radius, poisson_sampling=False,
    )  # fmt: skip
    for rows in loader:
        optimizer.zero_grad()
        backward(model, rows)
        optimizer.step()
    found = [p.grad.double().flatten() for p in module.parameters() if p.grad is not None]
    return torch.cat(found) * len(batch[0])


def moved(
    make: Callable[[], nn.Module], batch: list[Tensor], backward: Backward, radius: float
) -> float:
    """How far the odd row moves the sum, over the radius."""
    others = [torch.cat([t[:ODD], t[ODD + 1 :]]) for t in batch]
    apart = bounded_sum(make, batch, backward, radius) - bounded_sum(make, others, backward, radius)
    return float(apart.norm()) / radius


class Head(nn.Module):
    def __init__(self, hidden: bool = True) -> None:
        super().__init__()
        self.hidden = nn.Linear(WIDTH, WIDTH) if hidden else nn.Identity()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.kept: list[Tensor] = []

    def forward(self, *rows: Tensor) -> Any:
        logits = [self.head(self.hidden(x)) for x in rows]
        return logits[0] if len(rows) == 1 else tuple(logits)


def rows(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (ROWS,), generator=generator)


@pytest.mark.parametrize("size", [1e8, 1e10, 1e14])
def test_repeated_tokens_that_cancel_add_no_more_than_their_norm(size: float) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(10, 4), nn.Linear(4, 3)

        def forward(self, tokens: Tensor, weights: Tensor) -> Any:
            return self.out((self.table(tokens) * weights[..., None]).sum(1))

    torch.manual_seed(1)
    tokens, weights, y = torch.randint(0, 10, (7, 2)), torch.rand(7, 2), torch.randint(0, 3, (7,))
    tokens[ODD], weights[ODD] = 5, torch.tensor([size, -size])

    def backward(model: Any, batch: Any) -> None:
        F.cross_entropy(model(*batch[:2]), batch[2]).backward()

    assert moved(Tokens, [tokens, weights, y], backward, 0.1) <= 1 + 1e-3


@pytest.mark.parametrize("fused", [False, True])
def test_two_calls_that_cancel_add_no_more_than_their_norm(fused: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind: Any = LinearCrossEntropy if fused else nn.Linear
            self.head = kind(WIDTH, CLASSES, bias=False)
            nn.init.zeros_(self.head.weight)

        def forward(self, a: Tensor, b: Tensor, y: Tensor) -> Any:
            return (self.head(a, y), self.head(b, y)) if fused else (self.head(a), self.head(b))

    (a, y), (b, _) = rows(1), rows(2)
    a[ODD] *= 1e10
    b[ODD] = -a[ODD]

    def backward(model: Any, batch: Any) -> None:
        p, q = model(*batch)
        loss = p + q if fused else F.cross_entropy(p, batch[2]) + F.cross_entropy(q, batch[2])
        loss.backward()

    assert moved(Twice, [a, b, y], backward, 1e-3) <= 1 + 1e-3


def test_class_weights_that_change_after_the_loss_do_not_count() -> None:
    x, y = rows()
    y[:150], y[ODD] = 7, 9

    def backward(model: Any, batch: Any) -> None:
        weight = torch.ones(CLASSES)
        F.cross_entropy(model(batch[0]), batch[1], weight=weight).backward()
        weight.copy_(1.0 + 100 * (torch.bincount(batch[1], minlength=CLASSES)[9] > 0))

    assert moved(Head, [x, y], backward, 1.0) <= 1 + 1e-3


def test_layers_and_inputs_that_change_after_the_loss_do_not_count() -> None:
    x, y = rows()

    def backward(model: Any, batch: Any) -> None:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        model.head.weight.data.mul_(3.0)
        batch[0].data.mul_(5.0)

    def plain(model: Any, batch: Any) -> None:
        F.cross_entropy(model(batch[0]), batch[1]).backward()

    changed, same = (
        bounded_sum(lambda: Head(False), [x.clone(), y], loop, 1.0) for loop in (backward, plain)
    )
    assert torch.equal(changed, same)


@pytest.mark.parametrize("how", ["in place", "data", "numpy", "swapped rows"])
def test_logits_that_change_after_the_loss_do_not_count(how: str) -> None:
    x, y = rows()

    def plain(model: Any, batch: Any) -> Tensor:
        logits: Tensor = model(batch[0])
        F.cross_entropy(logits, batch[1]).backward()
        return logits

    def backward(model: Any, batch: Any) -> None:
        logits = plain(model, batch)
        if how == "in place":
            with torch.no_grad():
                logits[ODD] += 1.0
        elif how == "data":
            logits.data[ODD:].mul_(1.001)
        elif how == "numpy":
            logits.detach().numpy()[-1, 5] += 0.01
        else:
            logits.data.copy_(logits.data.flip(0))

    changed, same = (
        bounded_sum(lambda: Head(False), [x, y], loop, 1.0) for loop in (backward, plain)
    )
    assert float((changed - same).abs().max()) <= 1e-5 * float(same.abs().max())


def test_rows_that_the_loss_leaves_out_may_hold_anything() -> None:
    x, y = rows()
    x = torch.stack([x, torch.full_like(x, torch.inf)], 1)

    def backward(model: Any, batch: Any) -> None:
        F.cross_entropy(model(batch[0])[:, 0], batch[1]).backward()

    found = bounded_sum(lambda: Head(False), [x, y], backward, 1.0)
    x[:, 1] = 0.0
    assert torch.allclose(found, bounded_sum(lambda: Head(False), [x, y], backward, 1.0))


def test_a_hook_on_the_graph_of_the_loss_is_refused() -> None:
    x, y = rows()

    def backward(model: Any, batch: Any) -> None:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        waiting, found = [loss.grad_fn], 0
        while waiting:
            node: Any = waiting.pop()
            if node is None:
                continue
            if node.name() == "RowLossesBackward":
                found += 1
                node.register_hook(lambda gi, _: tuple(None if g is None else -g for g in gi))
            waiting += [following for following, _ in node.next_functions]
        assert found
        loss.backward()

    with pytest.raises(UnverifiedError, match="as it is"):
        bounded_sum(Head, [x, y], backward, 1.0)


def test_a_function_of_the_users_own_is_not_passed_by() -> None:
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Tensor) -> Tensor:
            ctx.leaf = ctx.call = 1
            return z.view_as(z)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return -g

    x, y = rows()

    def backward(model: Any, batch: Any) -> None:
        F.cross_entropy(Reversed.apply(model(batch[0])), batch[1]).backward()

    with pytest.raises(UnverifiedError):
        bounded_sum(Head, [x, y], backward, 1.0)


def test_outputs_that_fold_the_classes_away_go_the_ordinary_way() -> None:
    class Folded(Head):
        def forward(self, *rows: Tensor) -> Any:
            return super().forward(*rows).flatten(1)

    x, y = rows()
    pairs = [x.view(ROWS // 2, 2, WIDTH), y.view(ROWS // 2, 2)]

    def backward(model: Any, batch: Any) -> None:
        F.cross_entropy(model(batch[0]).view(-1, CLASSES), batch[1].reshape(-1)).backward()

    def plain(model: Any, batch: Any) -> None:
        F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].reshape(-1)).backward()

    folded, same = bounded_sum(Folded, pairs, backward, 1.0), bounded_sum(Head, pairs, plain, 1.0)
    assert torch.allclose(folded, same, rtol=1e-4, atol=1e-6)


def test_logits_that_a_module_keeps_can_be_watched_later() -> None:
    class Keeping(Head):
        def forward(self, *rows: Tensor) -> Any:
            logits = super().forward(*rows)
            self.kept[:] = [logits]
            return logits

    x, y = rows()
    seen = []

    def backward(model: Any, batch: Any) -> None:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        kept: Any = model.kept[0]
        kept.retain_grad()
        model.kept.clear()
        loss.backward()
        seen.append(kept.grad)

    bounded_sum(Keeping, [x, y], backward, 1.0)
    assert seen[0] is not None
    assert seen[0].shape == (ROWS, CLASSES)


def test_a_second_name_of_a_part_is_no_change() -> None:
    class Named(Head):
        def forward(self, *rows: Tensor) -> Any:
            self.active = self.head
            return super().forward(*rows)

    def backward(model: Any, batch: Any) -> None:
        F.cross_entropy(model(batch[0]), batch[1]).backward()

    assert bounded_sum(Named, list(rows()), backward, 1.0).isfinite().all()
