"""Smaller steps where gradients are mostly noise; any torch optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from privagrad._internal import validate
from privagrad.torch.adaptive_sgd import AdaptiveSGD
from privagrad.torch.optimizer import PrivateOptimizer


def damp_steps(optimizer: Optimizer, shares: Mapping[nn.Parameter, Tensor]) -> None:
    """From now on every step moves these parameters only by a share of its length.

    Private noise moves all coordinates alike, those that hardly any example touches as far as the
    others. What is known of coordinates without looking at private data, such as how frequent
    words are, can hold them back. Shares only follow what has been released: they cost no privacy.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Before `make_private`; SGD, Adagrad, Adam and all others that have torch's step hooks.
    shares : mapping of Parameter to Tensor
        Between 0 and 1, of the parameter's shape or one that broadcasts to it, such as
        ``word_shares(counts)[:, None]`` for the rows of a decoder.
    """
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for parameter, share in shares.items():
        if id(parameter) not in stepped:
            raise ValueError(
                "Expected shares for the optimizer's parameters, found a tensor of shape "
                f"{tuple(parameter.shape)} that it does not have."
            )
        if not bool(((share >= 0) & (share <= 1)).all()):
            raise ValueError("Expected shares between 0 and 1, found others.")
        if not _broadcasts(share.shape, parameter.shape):
            raise ValueError(
                f"Expected shares that broadcast to {tuple(parameter.shape)}, found shape "
                f"{tuple(share.shape)}: rows need share[:, None]."
            )
    before: dict[nn.Parameter, Tensor] = {}

    def remember(*_: Any) -> None:
        before.update({parameter: parameter.detach().clone() for parameter in shares})

    @torch.no_grad()
    def hold_back(*_: Any) -> None:
        for parameter, share in shares.items():
            moved = parameter - before[parameter]
            parameter.copy_(before[parameter].addcmul_(moved, share.to(moved)))

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(hold_back)


@torch.no_grad()
def start_from_noise(optimizer: PrivateOptimizer, steps: int, share: float = 1 / 16) -> None:
    """Let the sums of squares of Adagrad or AdaptiveSGD start from the noise of some steps.

    Private gradients are mostly noise, so that the steps fall as 1/√k: from a sum of 0 the first
    ones would move the weights further than all others together. The noise is public.

    Parameters
    ----------
    optimizer : PrivateOptimizer
        From `make_private`, of one process, before its first step.
    steps : int
        Of the training.
    share : float
        The share of the steps whose noise the sums start from.
    """
    validate.integer("steps", steps)
    inner = optimizer.original_optimizer
    if not isinstance(inner, Adagrad | AdaptiveSGD):
        raise TypeError(
            f"Expected Adagrad or AdaptiveSGD, found {type(inner).__name__}, which has no sum of "
            "squares: leave start_from_noise out."
        )
    noise = optimizer.noise_multiplier * optimizer.max_grad_norm
    if optimizer.loss_reduction == "mean":
        noise /= optimizer.expected_batch_size
    squares = validate.positive("share", share) * steps * noise**2
    variances = {name: squares / scale.full for name, scale in optimizer.scales.items()}
    if isinstance(inner, AdaptiveSGD):
        for group in inner.param_groups:
            group["initial"] = sum(float(variance.sum()) for variance in variances.values())
        return
    for name, parameter in optimizer.tape.parameters.items():
        if parameter not in inner.state:
            raise ValueError(
                "Expected one process with start_from_noise, found parameters in several parts: "
                "give Adagrad an initial_accumulator_value."
            )
        inner.state[parameter]["sum"].copy_(variances[name].reshape(parameter.shape))


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, other) for size, other in pairs)


def word_shares(counts: Tensor, damping: float = 1.0) -> Tensor:
    """c / (c + damping · mean(c)): steps for the rows of words that occur c times in PUBLIC text.

    The gradient of a word's row grows with its frequency, the noise does not: rows of rare words
    are better left near their start.
    """
    counts = counts.double()
    return (counts / (counts + damping * counts.mean())).float()


@torch.no_grad()
def start_from_counts(decoder: nn.Module, counts: Tensor) -> None:
    """Give a layer before a softmax over words biases that are frequencies in PUBLIC text.

    Each word counts once more than it occurs, so that words the text lacks keep a chance.
    """
    bias = getattr(decoder, "bias", None)
    if not isinstance(bias, Tensor):
        raise ValueError("Expected a layer with biases, found none.")
    if bias.shape != counts.shape:
        raise ValueError(
            f"Expected one count for each of {bias.numel()} words, found {tuple(counts.shape)}."
        )
    likely = counts.double() + 1
    bias.copy_((likely / likely.sum()).log())
