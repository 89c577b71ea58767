"""Attention and transformers: outputs are PyTorch's own, bounded sums those of the loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privagrad.torch.module import PrivateModule
from privagrad.torch.per_example.tape import Tape
from tests.torch.reference import SCALES, check

CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)


class Called(nn.Module):
    """A module whose forward pass is a function of it and one input."""

    def __init__(self, inner: nn.Module, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.inner, x)


def swapped(m: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return m(x, x, x)[0].transpose(0, 1)


def cross(m: Any, x: Tensor) -> Any:
    memory = x[:, 1:4].flip(2)
    return m(x, memory, memory, need_weights=False)[0]


def three(m: Any, x: Tensor) -> Any:
    return m(x, 2 * x[:, :3], x[:, :3] - 1)[0]


def other_sizes(m: Any, x: Tensor) -> Any:
    return m(x, x[:, :3, :6], x[:, :3, :4])[0]


def padded(m: Any, x: Tensor) -> Any:
    # The last tokens of some examples are padding.
    padding = torch.arange(5) >= 3 + 2 * (x[:, :1, 0] > 0)
    return m(x, x, x, key_padding_mask=padding, attn_mask=CAUSAL < 0, is_causal=True)


def per_head(m: Any, x: Tensor) -> Any:
    mask = torch.zeros(len(x) * 2, 5, 5, dtype=torch.bool)
    mask[1::2, :, 3] = True
    return m(x, x, x, attn_mask=mask, average_attn_weights=False)


def causal(m: Any, x: Tensor) -> Any:
    return m(x, x, x, attn_mask=CAUSAL, need_weights=False, is_causal=True)[0]


def build() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(6, 5, 8)

    def heads(call: Callable[[Any, Tensor], Any], **options: Any) -> tuple[nn.Module, Tensor]:
        module = nn.MultiheadAttention(8, 2, **{"batch_first": True, **options})
        for parameter in module.parameters():
            nn.init.normal_(parameter, 0.0, 0.4)
        return Called(module, call), x

    return {
        "self": heads(lambda m, x: m(x, x, x, need_weights=False)[0]),
        "self-weights": heads(lambda m, x: m(x, x, x)),
        "self-no-bias": heads(lambda m, x: m(x, x, x)[0], bias=False),
        "tokens-first": heads(swapped, batch_first=False),
        "cross": heads(cross),
        "cross-no-bias": heads(cross, bias=False),
        "three": heads(three),
        "other-sizes": heads(other_sizes, kdim=6, vdim=4),
        "other-sizes-no-bias": heads(other_sizes, kdim=6, vdim=4, bias=False),
        "bias-kv": heads(three, add_bias_kv=True),
        "bias-kv-zero": heads(padded, add_bias_kv=True, add_zero_attn=True),
        "zero": heads(cross, add_zero_attn=True),
        "padded": heads(padded),
        "per-head": heads(per_head),
        "causal": heads(causal),
    }


def build_transformers() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(6, 5, 8)
    sizes: dict[str, Any] = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.0}
    first: dict[str, Any] = {**sizes, "batch_first": True}
    layers: dict[str, Any] = {"num_encoder_layers": 1, "num_decoder_layers": 1}

    def decoded(m: Any, x: Tensor) -> Tensor:
        return m(x, x[:, :3], tgt_mask=CAUSAL, tgt_is_causal=True)

    def with_padding(m: Any, x: Tensor) -> Tensor:
        return m(x, src_key_padding_mask=torch.arange(5) >= 3 + 2 * (x[:, :1, 0] > 0))

    def tokens_first(m: Any, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return m(x, x[:4]).transpose(0, 1)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor")
        plain = nn.Transformer(**sizes, **layers)
    return {
        "encoder-layer": (nn.TransformerEncoderLayer(**first), x),
        "encoder-layer-norm-first": (
            nn.TransformerEncoderLayer(**first, norm_first=True, activation="gelu", bias=False),
            x,
        ),
        "encoder": (
            Called(nn.TransformerEncoder(nn.TransformerEncoderLayer(**first), 2), with_padding),
            x,
        ),
        "decoder-layer": (Called(nn.TransformerDecoderLayer(**first), decoded), x),
        "decoder": (
            Called(nn.TransformerDecoder(nn.TransformerDecoderLayer(**first), 2), decoded),
            x,
        ),
        "transformer": (
            Called(nn.Transformer(**first, **layers), lambda m, x: m(x, x[:, :4])),
            x,
        ),
        "transformer-tokens-first": (Called(plain, tokens_first), x),
    }


HEADS = build()
CASES = HEADS | build_transformers()


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("name", CASES)
def test_bounded_sum_equals_the_loop(name: str, kind: str) -> None:
    check(*CASES[name], kind)


@pytest.mark.parametrize("name", CASES)
def test_output_is_that_of_pytorch(name: str) -> None:
    module, x = CASES[name]
    twin = copy.deepcopy(module)
    private = PrivateModule(twin, Tape(dict(twin.named_parameters()))).train()
    found, expected = private(x), module(x)
    for a, b in zip(
        *((y if isinstance(y, tuple) else (y,)) for y in (found, expected)), strict=True
    ):
        torch.testing.assert_close(a.as_subclass(Tensor), b)


def test_dropout_drops_the_same_weights() -> None:
    module = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    x = torch.randn(6, 5, 8)
    twin = Called(copy.deepcopy(module), lambda m, x: m(x, x, x))
    private = PrivateModule(twin, Tape(dict(twin.named_parameters()))).train()
    private(x)
    torch.manual_seed(3)
    found = private(x)
    torch.manual_seed(3)
    expected = module(x, x, x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.as_subclass(Tensor), b)


def test_inputs_without_examples_are_refused() -> None:
    module = Called(nn.MultiheadAttention(8, 2), lambda m, x: m(x, x, x)[0])
    with pytest.raises(ValueError, match="dimension of examples"):
        check(module, torch.randn(6, 8), "ball")
