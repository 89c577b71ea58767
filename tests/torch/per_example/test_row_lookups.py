"""Rows of a table: norms and sums of random look-ups equal the dumbest loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from privagrad.torch.per_example import row_lookups
from privagrad.torch.per_example.row_lookups import RowLookupGradient
from privagrad.torch.scales import Scale, accurate

CASES = range(24)
ROWS, COLUMNS = 7, 5


def drawn(case: int) -> tuple[Tensor, Tensor, Tensor, int | None, Tensor]:
    """A table, look-ups, their gradients, the ignored row and a scale."""
    generator = torch.Generator().manual_seed(case)
    kind = (torch.float32, torch.float64, torch.bfloat16)[case % 3]
    examples, tokens = ((4, 6), (5, 1), (1, 9), (3, 40), (0, 3), (3, 0))[case // 3 % 6]
    index = torch.randint(0, ROWS, (examples, tokens), generator=generator)
    d = torch.randn(examples, tokens, COLUMNS, generator=generator, dtype=torch.float64).to(kind)
    if case % 4 == 1:
        d, index = d.transpose(0, 1).contiguous().transpose(0, 1), index.T.contiguous().T
    elif case % 4 == 2:
        d = torch.stack([d, d], 3)[..., 0]
    ignored = None if case % 2 else 3
    table = torch.zeros(ROWS, COLUMNS, dtype=kind)
    scale = torch.rand(ROWS, COLUMNS, generator=generator, dtype=torch.float64) + 0.1
    if case % 5 == 0:
        scale = torch.outer(scale[:, 0], scale[0])
    return table, index, d, ignored, scale.to(accurate(table).dtype)


def looped(table: Tensor, index: Tensor, d: Tensor, ignored: int | None) -> Tensor:
    """Each example's gradient of the whole table, row by row, in double precision."""
    dense = torch.zeros(len(index), *table.shape, dtype=torch.float64)
    for i in range(index.shape[0]):
        for t in range(index.shape[1]):
            if int(index[i, t]) != ignored:
                dense[i, int(index[i, t])] += d[i, t].double()
    return dense


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_norms_and_sums_equal_the_loop(
    case: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(RowLookupGradient, "_by_kernel", lambda self, other: False)
    table, index, d, ignored, scale = drawn(case)
    gradient, expected = (
        RowLookupGradient(table, index, d, ignored),
        looped(table, index, d, ignored),
    )
    weights = torch.linspace(0.2, 1.4, len(index), dtype=accurate(table).dtype)

    def close(found: Tensor, exact: Tensor) -> bool:
        return torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-5)

    squares = gradient.squared_norms(Scale.of(scale))
    assert close(squares, (scale.double() * expected.square()).sum((1, 2)))
    assert close(gradient.weighted_sum(weights), torch.tensordot(weights.double(), expected, 1))
    assert close(gradient.examples(0, len(index)), expected)
    assert close(gradient.sum_of_squares(), expected.square().sum(0))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_with_its_example(
    value: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(RowLookupGradient, "_by_kernel", lambda self, other: False)
    table, index, d, _, scale = drawn(3)
    bad = 1
    d = d.clone()
    d[bad, 0, 2] = value
    gradient = RowLookupGradient(table, index, d)
    finite = gradient.squared_norms(Scale.of(scale)).isfinite()
    assert finite.tolist() == [i != bad for i in range(len(index))]
    gradient.keep_only(finite)
    weights = torch.ones(len(index), dtype=scale.dtype)
    expected = looped(table, index, d, None)[finite].sum(0)
    assert torch.allclose(gradient.weighted_sum(weights).double(), expected, atol=1e-5)
    assert gradient.squared_norms(Scale.of(scale))[bad] == 0


def test_a_gradient_at_the_ignored_row_that_is_not_finite_counts_nowhere() -> None:
    table, index, d, ignored, scale = drawn(0)
    assert ignored is not None
    d = d.clone()
    d[index == ignored] = torch.nan
    gradient = RowLookupGradient(table, index, d, ignored)
    assert bool(gradient.squared_norms(Scale.of(scale)).isfinite().all())
    assert bool(gradient.weighted_sum(torch.ones(len(index))).isfinite().all())


def test_the_kernels_are_used_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name in ("_squared_norms", "_add_rows"):
        monkeypatch.setattr(row_lookups, name, lambda *_, name=name: used.append(name))
    table, index, d, ignored, scale = drawn(0)
    gradient = RowLookupGradient(table, index, d, ignored)
    gradient.squared_norms(Scale.of(scale))
    gradient.weighted_sum(torch.ones(len(index)))
    assert used == ["_squared_norms", "_add_rows"]
