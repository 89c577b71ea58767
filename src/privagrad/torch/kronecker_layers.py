"""Layers that are trained in other coordinates: W = L W' R with fixed L and R."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privagrad.torch.per_example.linear_cross_entropy import LinearCrossEntropy


class _Inverses(NamedTuple):
    """The inverses `left` and `right` of factors, and which versions of them."""

    of: tuple[Tensor | None, Tensor | None]
    versions: list[int]
    left: Tensor | None
    right: Tensor | None


class KroneckerLayer(nn.Module, ABC):
    """A layer whose weight, with the bias as its last column, is L W' R; `core` has W'.

    An example's gradient of W' is Lᵀ G Rᵀ where G is that of the weight. L and R are buffers;
    either may be None, which is the identity. Without R the bias stays the core's own, and is L b'.

    Parameters
    ----------
    plain : Linear, Conv2d or LinearCrossEntropy
        The layer that this one is the same function as.
    left : Tensor (out, out), optional
        L.
    right : Tensor (in, in), optional
        R, of inputs (of convolutions: of windows of inputs) with a 1 behind them where the layer
        has a bias.
    """

    left: Tensor | None
    right: Tensor | None

    def __init__(self, plain: nn.Module, left: Tensor | None, right: Tensor | None) -> None:
        super().__init__()
        weight, bias = _parameters(plain)
        self.has_bias = bias is not None
        self._known: _Inverses | None = None
        self.shape = weight.shape
        like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        self.register_buffer("left", None if left is None else left.to(**like))
        self.register_buffer("right", None if right is None else right.to(**like))
        self.core = self._core(plain, None if right is None else len(right), like)
        self.set_weights(weight, bias)
        self.train(plain.training)

    @abstractmethod
    def _core(self, plain: Any, inputs: int | None, like: dict[str, Any]) -> nn.Module:
        """The layer that is trained, with `inputs` inputs, or as many as `plain` has."""

    @abstractmethod
    def _plain(self, like: dict[str, Any]) -> nn.Module:
        """A layer like that this one was made from."""

    @torch.no_grad()
    def set_weights(self, weight: Tensor, bias: Tensor | None) -> None:
        """Be the layer with this weight and bias, in the coordinates of L and R as they are."""
        own, own_bias = _parameters(self.core)
        matrix = weight.detach().double().flatten(1)
        if bias is not None and self.right is not None:
            matrix = torch.cat([matrix, bias.detach().double()[:, None]], 1)
        if self.right is not None:
            matrix = torch.linalg.solve(self.right.double(), matrix, left=False)
        if self.left is not None:
            matrix = torch.linalg.solve(self.left.double(), matrix)
        own.copy_(matrix.view(own.shape))
        if own_bias is not None and bias is not None:
            moved = bias.detach().double()
            if self.left is not None:
                moved = torch.linalg.solve(self.left.double(), moved)
            own_bias.copy_(moved)

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        """Make the gradients of `core` longer by this factor; the function stays the same."""
        matrix = self.right if self.left is None else self.left
        if matrix is None:
            return  # W' is W, whose gradients are what they are.
        matrix.mul_(factor)
        own, bias = _parameters(self.core)
        own.div_(factor)
        if bias is not None and self.left is not None:
            bias.div_(factor)

    def unwhitened(self, step: Tensor) -> Tensor:
        """L⁻¹ U R⁻¹ for U = `step`: that of a parameter of `core` that moves the plain one by U."""
        left, right = self._inverses()
        moved = step.double().flatten(1) if step.dim() > 1 else step.double()
        if left is not None:
            moved = left @ moved
        if right is not None and step.dim() > 1:
            moved = moved @ right
        return moved.reshape(step.shape).to(step)

    def _inverses(self) -> tuple[Tensor | None, Tensor | None]:
        """L⁻¹ and R⁻¹, kept until a checkpoint, another process or a device changes L or R."""
        factors = (self.left, self.right)
        versions = [0 if f is None else f._version for f in factors]
        known = self._known
        if (
            known is None
            or known.versions != versions
            or not all(a is b for a, b in zip(known.of, factors, strict=True))
        ):
            left, right = (None if f is None else torch.linalg.inv(f.double()) for f in factors)
            self._known = known = _Inverses(factors, versions, left, right)
        return known.left, known.right

    @property
    def _folded(self) -> tuple[Tensor, Tensor | None]:
        """L W' R as weight and bias."""
        own, own_bias = _parameters(self.core)
        # The product is rounded once.
        matrix: Tensor = own.double().flatten(1)
        bias: Tensor | None = None if own_bias is None else own_bias.double()
        if self.left is not None:
            left = self.left.double()
            matrix, bias = left @ matrix, None if bias is None else left @ bias
        if self.right is not None:
            matrix = matrix @ self.right.double()
            if self.has_bias:
                matrix, bias = matrix[:, :-1], matrix[:, -1]
        return matrix.reshape(self.shape).to(own), None if bias is None else bias.to(own)

    @property
    def weight(self) -> Tensor:
        """The plain layer's weight, for code that reads it; it is trained by `core` alone."""
        return self._folded[0]

    @property
    def bias(self) -> Tensor | None:
        """The plain layer's bias, for code that reads it."""
        return self._folded[1]

    @torch.no_grad()
    def fold(self) -> nn.Module:
        """The plain layer that is the same function."""
        own, _ = _parameters(self.core)
        plain = self._plain({"dtype": own.dtype, "device": own.device})
        weight, bias = _parameters(plain)
        folded, folded_bias = self._folded
        weight.copy_(folded)
        if bias is not None and folded_bias is not None:
            bias.copy_(folded_bias)
        for parameter in (weight, bias):
            if parameter is not None:
                parameter.requires_grad_(own.requires_grad)
        return plain.train(self.training)

    def extra_repr(self) -> str:
        sides = [name for name in ("left", "right") if getattr(self, name) is not None]
        return f"weight={tuple(self.shape)}, bias={self.has_bias}, factors={' and '.join(sides)}"


class KroneckerLinear(KroneckerLayer):
    """y = L W' R (x, 1)."""

    def _core(self, plain: Any, inputs: int | None, like: dict[str, Any]) -> nn.Module:
        bias = self.has_bias and inputs is None
        return nn.Linear(inputs or self.shape[1], self.shape[0], bias, **like)

    def _plain(self, like: dict[str, Any]) -> nn.Module:
        return nn.Linear(self.shape[1], self.shape[0], self.has_bias, **like)

    def forward(self, input: Tensor) -> Tensor:
        y = cast(Tensor, self.core(self._whitened(input)))
        return y if self.left is None else F.linear(y, self.left)

    def _whitened(self, x: Tensor) -> Tensor:
        if self.right is None:
            return x
        n = self.shape[1]
        return F.linear(x, self.right[:, :n], self.right[:, n] if self.has_bias else None)


class KroneckerCrossEntropy(KroneckerLinear):
    """The same for `LinearCrossEntropy`, whose logits never exist: without L."""

    def _core(self, plain: Any, inputs: int | None, like: dict[str, Any]) -> nn.Module:
        self.ignore_index, self.reduction = plain.ignore_index, plain.reduction
        bias = self.has_bias and inputs is None
        return self._made(inputs or self.shape[1], bias, like)

    def _plain(self, like: dict[str, Any]) -> nn.Module:
        return self._made(self.shape[1], self.has_bias, like)

    def _made(self, inputs: int, bias: bool, like: dict[str, Any]) -> nn.Module:
        classes, ignored = self.shape[0], self.ignore_index
        return LinearCrossEntropy(inputs, classes, bias, ignored, self.reduction, **like)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return cast(Tensor, self.core(self._whitened(x), targets))


class KroneckerConv2d(KroneckerLayer):
    """A fixed convolution to R (window, 1), the trained 1 x 1 convolution W', and L."""

    def _core(self, plain: nn.Conv2d, inputs: int | None, like: dict[str, Any]) -> nn.Module:
        self.geometry: dict[str, Any] = {
            "stride": plain.stride, "padding": plain.padding, "dilation": plain.dilation,
            "padding_mode": plain.padding_mode,
        }  # fmt: skip
        self._pads = list(plain._reversed_padding_repeated_twice)
        if inputs is None:
            return self._plain(like)
        return nn.Conv2d(inputs, self.shape[0], 1, bias=False, **like)

    def _plain(self, like: dict[str, Any]) -> nn.Module:
        out, channels, height, width = self.shape
        options = {**self.geometry, **like}
        return nn.Conv2d(channels, out, (height, width), bias=self.has_bias, **options)

    def forward(self, input: Tensor) -> Tensor:
        y = cast(Tensor, self.core(self._whitened(input)))
        return y if self.left is None else F.conv2d(y, self.left[:, :, None, None])

    def _whitened(self, x: Tensor) -> Tensor:
        if self.right is None:
            return x
        n = self.shape[1:].numel()
        kernels = self.right[:, :n].reshape(-1, *self.shape[1:])
        constant = self.right[:, n] if self.has_bias else None
        return F.conv2d(
            padded(x, self._pads, self.geometry["padding_mode"]), kernels, constant,
            self.geometry["stride"], 0, self.geometry["dilation"],
        )  # fmt: skip


def padded(x: Tensor, pads: list[int], mode: str) -> Tensor:
    """The input of a convolution with its padding around it."""
    return F.pad(x, pads, "constant" if mode == "zeros" else mode) if any(pads) else x


KINDS: dict[type[nn.Module], type[KroneckerLayer]] = {
    nn.Linear: KroneckerLinear,
    nn.Conv2d: KroneckerConv2d,
    LinearCrossEntropy: KroneckerCrossEntropy,
}


def _parameters(layer: nn.Module) -> tuple[nn.Parameter, nn.Parameter | None]:
    parameters = layer._parameters
    return cast(nn.Parameter, parameters["weight"]), parameters.get("bias")
