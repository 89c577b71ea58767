"""The diagonal of C for each parameter of a module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from privagrad._internal.jit import kernel

_RANK_ONE = 1e-6
_SUMMED = 4096


def as_matrix(tensor: Tensor) -> Tensor:
    """A parameter as a matrix: its first dimension by all others."""
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 0 else tensor.reshape(1, 1)


def matrix_shape(tensor: Tensor) -> tuple[int, int]:
    """That of `as_matrix`."""
    return (tensor.shape[0], tensor.shape[1:].numel()) if tensor.dim() > 0 else (1, 1)


def accurate(tensor: Tensor) -> Tensor:
    """`tensor` in float32 at least, in which norms and sums are taken."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


@dataclass(frozen=True)
class Scale:
    """diag(C) of one parameter as a matrix: rows ⊗ columns, or every entry where that is not so."""

    rows: Tensor
    columns: Tensor
    entries: Tensor | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Scale:
        """The scale with these values, kept as rows ⊗ columns where they are of rank one."""
        matrix = as_matrix(accurate(tensor.detach()))
        rows, columns = matrix[:, 0].clone(), matrix[0] / matrix[0, 0]
        error = (torch.outer(rows, columns) / matrix - 1).abs().max()
        entries = None if float(error) < _RANK_ONE else matrix.contiguous()
        return cls(rows, columns, entries)

    @classmethod
    def ball(cls, parameter: Tensor) -> Scale:
        matrix = as_matrix(accurate(parameter.detach()))
        return cls(torch.ones_like(matrix[:, 0]), torch.ones_like(matrix[0]))

    @property
    def full(self) -> Tensor:
        return torch.outer(self.rows, self.columns) if self.entries is None else self.entries

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Factors of the rows (m or 1,), weights (m or 1, n); 1 stands for all rows."""
        if self.entries is None:
            return self.rows, self.columns[None]
        return torch.ones_like(self.rows[:1]), self.entries

    @cached_property
    def _flat(self) -> Tensor:
        return self.full.reshape(-1)

    def root(self, place: slice) -> Any:
        """C^{1/2} at some coordinates, flat, as an array."""
        return self.full.reshape(-1)[place].sqrt().cpu().numpy()

    def double(self) -> Scale:
        entries = None if self.entries is None else self.entries.double()
        return Scale(self.rows.double(), self.columns.double(), entries)

    def part(self, rows: slice) -> Scale:
        if rows == slice(None):
            return self
        entries = None if self.entries is None else self.entries[rows]
        return Scale(self.rows[rows], self.columns, entries)

    def squared_norms(self, g: Tensor) -> Tensor:
        """Σ_jk C_jk g_ijk² for each i of `g` (c, m, n)."""
        flat, scale = g.reshape(len(g), -1), self._flat.to(g.dtype)
        if g.device.type != "cpu":
            return torch.mv(flat.square(), scale)
        norms = torch.empty(len(g), dtype=g.dtype)
        _squared_norms(flat.numpy(), scale.numpy(), norms.numpy())
        return norms


@kernel(reorder=True)
def _squared_norms(g: Any, scale: Any, norms: Any) -> None:
    """Each number is read once; blocks keep the rounding of long sums small."""
    for i in range(g.shape[0]):
        total = 0.0
        for start in range(0, scale.size, _SUMMED):
            row, weights = g[i, start : start + _SUMMED], scale[start : start + _SUMMED]
            part = weights[0] - weights[0]  # 0 of the right kind
            for j in range(row.size):
                part += row[j] * row[j] * weights[j]
            total += part
        norms[i] = total


def given_scales(
    given: Sequence[Tensor] | Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Scale]:
    """Positive tensors, by name or in the order of `parameters`, checked against them."""
    if isinstance(given, Mapping):
        by_name = {name.removeprefix("_module."): tensor for name, tensor in given.items()}
        missing = sorted(parameters.keys() - by_name.keys())
        unknown = sorted(by_name.keys() - parameters.keys())
        if missing or unknown:
            raise ValueError(
                "Expected ellipsoid to have one tensor for every trainable parameter; "
                f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}."
            )
    else:
        tensors = list(given)
        if len(tensors) != len(parameters):
            raise ValueError(
                f"Expected ellipsoid to have {len(parameters)} tensors, one for every trainable "
                f"parameter in the order of module.parameters(), found {len(tensors)}."
            )
        by_name = dict(zip(parameters, tensors, strict=True))
    scales = {}
    for name, parameter in parameters.items():
        tensor = torch.as_tensor(by_name[name], device=parameter.device)
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"Expected ellipsoid[{name!r}] of shape {tuple(parameter.shape)}, "
                f"found {tuple(tensor.shape)}."
            )
        tensor = accurate(tensor.to(torch.promote_types(tensor.dtype, torch.float16)))
        if not bool(((tensor > 0) & tensor.isfinite()).all()):
            raise ValueError(
                f"Expected every entry of ellipsoid[{name!r}] to be positive and finite: give "
                "coordinates you know nothing about a positive floor."
            )
        scales[name] = Scale.of(tensor.to(accurate(parameter.detach()).dtype))
    return scales
