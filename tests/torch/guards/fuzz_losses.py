"""Losses of random models, as users write them.

A program makes the backward pass of one batch. `ORDINARY` ones are means over examples and must be
accepted; `MIXING` ones let examples see each other, at every step or at some.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from privagrad.torch import public
from tests.torch.guards.fuzz_modules import RoundTrip, logits_of

IGNORED = -100


@dataclass
class Step:
    """What a program knows: the batch, the number of the step, and what it keeps between steps."""

    inputs: Tensor
    outputs: Tensor
    labels: Tensor
    weights: Tensor
    mask: Tensor
    number: int
    model: Any
    memory: dict[str, Any]

    @property
    def rows(self) -> Tensor:
        """The loss of every row, (examples,) or (examples, tokens)."""
        flat = F.cross_entropy(
            self.outputs.reshape(-1, self.outputs.shape[-1]), self.labels.reshape(-1),
            reduction="none", ignore_index=IGNORED,
        )  # fmt: skip
        return flat.reshape(self.labels.shape)

    @property
    def examples(self) -> Tensor:
        """The loss of every example, (examples,)."""
        rows = self.rows
        return rows if rows.dim() == 1 else rows.mean(1)

    @property
    def classes(self) -> Tensor:
        """The class of every example, (examples,)."""
        return self.labels if self.labels.dim() == 1 else self.labels[:, 0]

    @property
    def flat(self) -> Tensor:
        return self.outputs.flatten(1)


Program = Callable[[Step], None]
Loss = Callable[[Step], Tensor]


def _backward(loss: Loss) -> Program:
    return lambda step: loss(step).backward()


def _cross_entropy(s: Step) -> Tensor:
    return F.cross_entropy(s.outputs.flatten(0, -2), s.labels.flatten(), ignore_index=IGNORED)


def _smoothed(s: Step) -> Tensor:
    return F.cross_entropy(s.outputs.flatten(0, -2), s.labels.clamp(min=0).flatten(),
                           label_smoothing=0.1)  # fmt: skip


def _classes_last(s: Step) -> Tensor:
    outputs = s.outputs if s.outputs.dim() == 2 else s.outputs.transpose(1, 2)
    return F.cross_entropy(outputs, s.labels, ignore_index=IGNORED)


def _log_likelihood(s: Step) -> Tensor:
    return F.nll_loss(s.outputs.log_softmax(-1).flatten(0, -2), s.labels.clamp(min=0).flatten())


def _own_normaliser(s: Step) -> Tensor:
    rows, mask = s.rows, s.mask
    if rows.dim() == 1:
        return (rows * mask.mean(1)).mean()
    return ((rows * mask).sum(1) / mask.sum(1)).mean()


def _logged(s: Step) -> Tensor:
    loss = s.examples.mean()
    s.memory.setdefault("log", []).append(loss.item())
    s.memory["right"] = float((s.outputs.argmax(-1) == s.labels).float().mean())
    return loss


def _two_terms(s: Step) -> Tensor:
    return _cross_entropy(s) + 0.1 * s.flat.square().mean()


def _logits(s: Step) -> Tensor:
    """What the model says at present, (examples, ...)."""
    with torch.no_grad():
        return logits_of(s.model(s.inputs)).flatten(1)


def _own_predictions(s: Step) -> Tensor:
    return F.cross_entropy(s.flat, (_logits(s) / 2).softmax(1))


ORDINARY: dict[str, Program] = {
    name: _backward(loss)
    for name, loss in {
        "cross-entropy": _cross_entropy,
        "label smoothing": _smoothed,
        "classes second": _classes_last,
        "negative log-likelihood": _log_likelihood,
        "mean of examples": lambda s: s.examples.mean(),
        "sum over the batch's size": lambda s: s.examples.sum() / len(s.outputs),
        "temperature": lambda s: F.cross_entropy((s.outputs / 0.37).flatten(0, -2),
                                                 s.labels.clamp(min=0).flatten()),
        "weights of examples": lambda s: (s.examples * s.weights).mean(),
        "own normaliser": _own_normaliser,
        "mean squares": lambda s: F.mse_loss(s.flat, s.weights[:, None].expand_as(s.flat)),
        "binary": lambda s: F.binary_cross_entropy_with_logits(
            s.flat[:, 0], (s.weights > 1).float()
        ),
        "chosen by number": lambda s: -s.flat.log_softmax(1)[
            torch.arange(len(s.flat)), s.classes
        ].mean(),
        "gathered": lambda s: -s.flat.log_softmax(1).gather(1, s.classes[:, None]).mean(),
        "one-hot": lambda s: F.mse_loss(
            s.flat, F.one_hot(s.classes, s.flat.shape[1]).to(s.flat.dtype)
        ),
        "soft targets": lambda s: F.cross_entropy(s.flat, (s.flat.detach() / 2).softmax(1)),
        "own predictions": _own_predictions,
        "focal": lambda s: ((1 - (-s.examples).exp()) ** 2 * s.examples).mean(),
        "weights of classes": lambda s: (
            s.examples * torch.linspace(0.5, 2, 7)[s.classes]
        ).mean(),
        "smooth": lambda s: F.smooth_l1_loss(s.flat.sum(1), s.weights),
        "hinge": lambda s: F.relu(1 - s.flat[:, 0] * s.weights).mean(),
        "logged": _logged,
        "two terms": _two_terms,
        "ramp of a penalty": lambda s: _cross_entropy(s)
        + public(0.1 * s.number) * s.flat.square().mean(),
    }.items()
}  # fmt: skip


def _contrast(s: Step) -> Tensor:
    return F.cross_entropy(s.flat @ s.flat.T, torch.arange(len(s.flat)))


def _over_the_mask(s: Step) -> Tensor:
    rows = s.rows
    mask = s.mask if rows.dim() > 1 else s.mask[:, 0] * s.mask[:, 1]
    return (rows * mask).sum() / mask.sum().clamp(min=1)


def _balanced(s: Step) -> Tensor:
    labels = s.labels.clamp(min=0).flatten()
    counts = torch.bincount(labels, minlength=s.outputs.shape[-1]).clamp(min=1)
    return F.cross_entropy(s.outputs.flatten(0, -2), labels, weight=1 / counts.float())


def _view_in_place(s: Step) -> Tensor:
    moved = s.flat * 1.0
    first = moved[:, 0]
    first.sub_(first.mean())
    return moved.square().mean()


def _hooked(s: Step) -> Tensor:
    moved = s.flat * 1.0
    if moved.requires_grad:
        moved.register_hook(lambda g: g - g.mean(0))
    return moved.square().mean()


def _hook_on_loss(s: Step) -> Tensor:
    loss, size = s.examples.mean(), s.weights.sum()
    if loss.requires_grad:
        loss.register_hook(lambda g: g / size)
    return loss


def _of_the_last_batch(s: Step) -> Tensor:
    loss = s.examples.mean() + (s.flat - s.memory.get("mean", 0.0)).square().mean()
    s.memory["mean"] = s.flat.detach().mean(0)
    return loss


def _queue(s: Step) -> Tensor:
    queue: Tensor = s.memory.setdefault("queue", torch.zeros(16, s.flat.shape[1]))
    loss = s.examples.mean() + (s.flat @ queue.T).logsumexp(1).mean()
    queue[: len(s.flat)] = s.flat.detach()
    return loss


def _running_scale(s: Step) -> Tensor:
    loss = s.examples.mean()
    s.memory["scale"] = 0.5 * s.memory.get("scale", 1.0) + 0.5 * float(loss.detach())
    return loss / s.memory["scale"]


def _by_numpy(s: Step) -> Tensor:
    weights = torch.from_numpy(s.weights.numpy() / s.weights.numpy().mean())
    return (s.examples * weights).mean()


def _by_copy(s: Step) -> Tensor:
    weights = copy.deepcopy(s.weights)
    return (s.examples * (weights / weights.mean())).mean()


def _branch(s: Step) -> Tensor:
    return s.examples.mean() * (2.0 if bool((s.weights > 1.5).any()) else 0.5)


def _ramp_in_a_tensor(s: Step) -> Tensor:
    return s.examples.mean() + torch.tensor(max(0.0, s.number - 1.0)) * _contrast(s)


def _ramp(s: Step) -> Tensor:
    return s.examples.mean() + max(0.0, s.number - 1.0) * _contrast(s)


def _kinds(s: Step) -> Tensor:
    return s.examples.mean() / (1 + len(s.labels[s.labels == 1]))


def _labels_of_others(s: Step) -> Tensor:
    moved = torch.from_numpy(s.classes.numpy()[::-1].copy())
    return F.cross_entropy(s.flat, moved)


def _smoothed_by_kinds(s: Step) -> Tensor:
    smoothing = min(0.9, 0.1 * s.classes.unique().numel())
    return F.cross_entropy(s.flat, s.classes, label_smoothing=smoothing)


def _similar(outputs: Tensor) -> Tensor:
    return (outputs @ outputs.T).square().mean()


@functools.cache
def _scripted() -> Callable[[Tensor], Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(_similar)


def _handed_over(s: Step) -> None:
    s.examples.mean().backward(1 / s.weights.sum())


def _functional_backward(s: Step) -> None:
    torch.autograd.backward(_contrast(s))


def _twice(s: Step) -> None:
    loss = s.examples.mean()
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def _cached(s: Step) -> None:
    """The gradient of a contrastive loss, computed first and sent back afterwards."""
    apart = torch.from_numpy(s.flat.detach().numpy().copy()).requires_grad_()
    F.cross_entropy(apart @ apart.T, torch.arange(len(apart))).backward()
    assert apart.grad is not None
    (s.flat * apart.grad).sum(1).mean().backward()


MIXING: dict[str, Program] = {
    name: _backward(loss)
    for name, loss in {
        "over the mask": _over_the_mask,
        "over a number": lambda s: (s.examples.sum() / s.weights.sum().item()),
        "mean over a number": lambda s: (s.examples.mean() / s.weights.sum().item()),
        "mean over a computed number": lambda s: s.examples.mean() / (1 + s.weights.sum().item()),
        "balanced classes": _balanced,
        "contrast": _contrast,
        "ramp": _ramp,
        "ramp in a tensor": _ramp_in_a_tensor,
        "normalised weights": lambda s: (s.examples * (s.weights / s.weights.sum())).sum(),
        "normalised weights by numpy": _by_numpy,
        "normalised weights by copy": _by_copy,
        "softmax of losses": lambda s: (s.examples * s.examples.detach().softmax(0)).sum(),
        "hardest": lambda s: s.examples.topk((len(s.examples) + 1) // 2)[0].mean(),
        "largest": lambda s: s.examples.max() if len(s.examples) else s.examples.sum(),
        "centred": lambda s: (s.flat - s.flat.mean(0)).square().mean(),
        "root": lambda s: s.examples.mean().sqrt(),
        "view in place": _view_in_place,
        "hook": _hooked,
        "hook on the loss": _hook_on_loss,
        "own backward": lambda s: RoundTrip.apply(s.flat).square().mean(),
        "of the last batch": _of_the_last_batch,
        "queue": _queue,
        "running scale": _running_scale,
        "branch": _branch,
        "how many of a kind": _kinds,
        "number of kinds": _smoothed_by_kinds,
        "labels of others": _labels_of_others,
        "targets over the batch": lambda s: F.cross_entropy(s.flat, _logits(s).softmax(0)),
        "of the batch, as a tensor": lambda s: s.examples.mean()
        / torch.as_tensor(np.asarray(s.weights)).mean(),
        "scripted": lambda s: _scripted()(s.flat),
        "partly scripted": lambda s: s.examples.mean() + _scripted()(s.flat),
        "attribute of the module": lambda s: s.examples.mean() + s.model.extra,
        "over a constant": lambda s: s.examples.sum() / 6,
        "penalty on parameters": lambda s: s.examples.mean()
        + sum(p.square().sum() for p in s.model.parameters()),
    }.items()
} | {
    "gradient handed over": _handed_over,
    "functional backward": _functional_backward,
    "two backward passes": _twice,
    "cached gradients": _cached,
}  # fmt: skip

OF_KNOWN_ROWS = frozenset(
    {"normalised weights by copy", "mean over a number", "mean over a computed number"}
)
"""Nobody can see how numbers were computed from rows that did not come from the data loader."""

LEAVING = frozenset(
    {
        "normalised weights by numpy", "running scale", "branch", "how many of a kind",
        "number of kinds", "labels of others", "of the batch, as a tensor", "cached gradients",
    }
)  # fmt: skip
"""Numbers of the batch that come back as constants: nobody can follow them (docs, Limits)."""

MIXING = {name: program for name, program in MIXING.items() if name not in LEAVING}

OF_SOME_SIZE = frozenset({"over a constant"})
"""Means over the size of a batch that is written as a number: bounded, but with a factor that a
batch of one example does not have."""
