"""An ellipsoid with axes of any direction in every layer: Kronecker factors from public data."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from privagrad._internal import validate
from privagrad.torch.kronecker_factors import kronecker_factors
from privagrad.torch.kronecker_layers import KINDS, KroneckerLayer
from privagrad.torch.module import PrivateForward, PrivateModule
from privagrad.torch.moments import second_moments
from privagrad.torch.unwrapped import PrivateCall, PrivateHooks

_UNSEEN = 1e-15
"""Smaller parts of the gradients' mean square are rounding."""
_LEAST_DAMPING = 1e-6
"""With less, rounding in float32 would change the function."""


def precondition(
    module: nn.Module,
    public_loader: Iterable[Any],
    criterion: Callable[[Any, Any], Tensor] | None = None,
    *,
    power: float = 1.0,
    damping: float = 0.1,
    sides: str = "inputs",
    largest: int = 2048,
    loss_reduction: str = "mean",
    batch_first: bool = True,
) -> nn.Module:
    """A copy of the module that is the same function, with layers in whitened coordinates.

    For the weight W of a layer, with the bias as its last column, let A = E[a aᵀ] be the second
    moments of its inputs (of windows of them, for convolutions) and S = E[δ δᵀ] those of the
    gradients of its outputs, on public batches. The layer becomes W = L W' R with fixed
    L ~ (S + γ)^(-power/2) and R ~ (A + γ)^(-power/2). W' is trained. An example's gradient G of W
    is Lᵀ G Rᵀ as one of W', so that a ball for W' is an ellipsoid for W, whose axes are Kronecker
    products of the eigenvectors of S and A; a step by g of W' moves W by L g R. Call `make_private`
    with the result as for any module, and `fold` after the training.

    nn.Linear, nn.Conv2d without groups, and `LinearCrossEntropy` (without L) are preconditioned.
    All else stays as it is: other layers, subclasses, layers that are frozen, share a parameter
    with another module or have hooks.

    Parameters
    ----------
    module : Module
        Not private yet. It stays as it is. Make the optimizer of the result's parameters.
    public_loader : iterable
        Batches (inputs, targets) of PUBLIC data, or of synthetic inputs such as `pink_noise` with
        random targets. They are kept in memory.
    criterion, loss_reduction, batch_first : callable, str, bool
        See `second_moments`.
    power : float
        With both sides and little damping 1 makes the gradients of W' white on the public batches,
        as far as A ⊗ S is their covariance; 1/2 and 2/3 are the powers of "pasan" and "pagan".
        Small powers are near a ball.
    damping : float
        γ, over the largest eigenvalue; at least 1e-6.
    sides : {"inputs", "both"}
        "inputs": L is the identity, so that only inputs are whitened. "both": Kronecker factors.
    largest : int
        Sides of more inputs or outputs than this have no factor, whose memory grows with the square
        and whose time with the cube of their size.

    Returns
    -------
    Module
        Every layer's gradients of W' have the mean squared norm that those of W have on the
        public batches, so that max_grad_norm means what it means without factors.

    Guarantees
    ----------
    None is needed. L and R depend on public batches and on the module alone, and the result is a
    module like any other: `make_private` bounds gradients of W' and adds noise to their sum.
    """
    validate.positive("power", power)
    if validate.positive("damping", damping) < _LEAST_DAMPING:
        raise ValueError(
            f"Expected damping >= {_LEAST_DAMPING:g}, found {damping!r}: with less, rounding "
            "changes what the module computes."
        )
    validate.choice("sides", sides, ("inputs", "both"))
    validate.integer("largest", largest)
    _refuse_prepared(module)
    batches = list(public_loader)
    if not batches:
        raise ValueError("Expected public batches, found none in public_loader.")
    made, twin = copy.deepcopy(module), copy.deepcopy(module)
    plain = {path: made.get_submodule(path) for path in _supported(made)}
    factors = kronecker_factors(
        twin, {path: twin.get_submodule(path) for path in plain}, batches, criterion,
        sides=sides, largest=largest, loss_reduction=loss_reduction, batch_first=batch_first,
    )  # fmt: skip
    layers = {
        path: KINDS[type(layer)](layer, *factors[path].roots(power, damping))
        for path, layer in plain.items()
    }
    made = _with_parts(made, {id(layer): layers[path] for path, layer in plain.items()})
    squares = partial(
        _mean_squares, batches=batches, criterion=criterion, loss_reduction=loss_reduction,
        batch_first=batch_first,
    )  # fmt: skip
    with torch.random.fork_rng():
        before = squares(module, {path: path for path in layers})
    with torch.random.fork_rng():  # the same dropout
        after = squares(made, {path: f"{path}.core".lstrip(".") for path in layers})
    for path, layer in layers.items():
        if after[path] < _UNSEEN * before[path]:
            raise ValueError(
                f"Expected layer {path} to be called as the part of the module that it is, found "
                "that it is called by another reference, such as one in a list: use a ModuleList, "
                "or freeze the layer with requires_grad_(False)."
            )
        if before[path] < _UNSEEN * max(before.values()):
            raise ValueError(
                f"Expected gradients of layer {path} other than 0 on the public batches, found "
                "none: give layers after it weights other than 0, or freeze the layer with "
                "requires_grad_(False)."
            )
        layer.rescale(math.sqrt(before[path] / after[path]))
    return made


def fold(module: nn.Module | PrivateHooks) -> nn.Module:
    """A copy of a preconditioned module with plain layers, W = L W' R: the same function.

    Its state dict is that of the module that `precondition` was given.

    Parameters
    ----------
    module : Module or PrivateHooks
        What `precondition` or `make_private` returned. A copy of a private module is not private.
    """
    if isinstance(module, PrivateModule):
        module = module.to_standard_module()
    made = copy.deepcopy(module.module if isinstance(module, PrivateHooks) else module)
    for part in made.modules():
        if isinstance(vars(part).get("forward"), PrivateForward | PrivateCall):
            del vars(part)["forward"]
    parts = {id(part): part.fold() for part in made.modules() if isinstance(part, KroneckerLayer)}
    if not parts:
        raise ValueError(
            "Expected a module from precondition(), found one without preconditioned layers: it is "
            "plain already."
        )
    return _with_parts(made, parts)


def dp_kfc_steps(optimizer: Optimizer, module: nn.Module) -> None:
    """From now on every step moves W, not W', by the private gradient of W'.

    With ``precondition(..., sides="both")`` and SGD these are the steps of DP-KFC (Molina et al.
    2026, arXiv 2605.13418): per-example gradients U_S G U_A with inverse square roots U are
    bounded in norm, and W moves by their noisy sum, so that the noise in W is isotropic. Factors
    are those of `precondition`, which keep each layer's size; they are not renewed during training.

    Parameters
    ----------
    optimizer : SGD
        With or without momentum: its steps are linear in gradients.
    module : Module
        From `precondition`.
    """
    plain = module.module if isinstance(module, PrivateHooks) else module
    layers = {
        parameter: part
        for part in plain.modules()
        if isinstance(part, KroneckerLayer)
        for parameter in part.core.parameters()
    }
    if not layers:
        raise ValueError(
            "Expected a module from precondition(), found one without preconditioned layers."
        )
    if not isinstance(getattr(optimizer, "original_optimizer", optimizer), SGD):
        raise TypeError(
            f"Expected SGD, found {type(optimizer).__name__}: steps of other optimizers are not "
            "linear in gradients, so that mapped gradients are not mapped steps."
        )
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    if not stepped >= layers.keys():
        raise ValueError(
            "Expected an optimizer of the module's parameters, found one that lacks some: make it "
            "of precondition(...).parameters()."
        )
    if any(isinstance(hook, _Unwhiten) for hook in optimizer._optimizer_step_pre_hooks.values()):
        raise ValueError("Expected one call of dp_kfc_steps for an optimizer, found a second one.")
    optimizer.register_step_pre_hook(_Unwhiten(layers))


class _Unwhiten:
    """A hook before a step: private gradients of W' become those whose step moves W by them."""

    def __init__(self, layers: Mapping[nn.Parameter, KroneckerLayer]) -> None:
        self.layers = layers

    @torch.no_grad()
    def __call__(self, *_: Any) -> None:
        for parameter, layer in self.layers.items():
            if parameter.grad is not None:
                parameter.grad = layer.unwhitened(parameter.grad)


_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks",
)  # fmt: skip


def _refuse_prepared(module: nn.Module) -> None:
    for part in module.modules():
        forward = vars(part).get("forward")
        private = isinstance(forward, PrivateForward) and forward.tape.parameters
        if private or isinstance(part, PrivateModule):
            raise ValueError(
                "Expected a module that is not private yet, found a private one: precondition() "
                "comes before make_private()."
            )
        if isinstance(part, KroneckerLayer):
            raise ValueError(
                "Expected a module without preconditioned layers, found some: fold() it first."
            )
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks:
            raise ValueError(
                f"Expected parameters without hooks, found some on {name}, which a copy would not "
                "have: register them on the result."
            )


def _supported(module: nn.Module) -> list[str]:
    """The paths of the layers that have factors."""
    owners = Counter(
        id(p) for part in module.modules() for p in part._parameters.values() if p is not None
    )
    found, left = [], []
    for path, layer in module.named_modules():
        own = [p for p in layer._parameters.values() if p is not None]
        reason = _reason(layer, own, owners) if own else None
        if reason is not None:
            left.append(f"{path or 'the module itself'}: {type(layer).__name__} {reason}")
        elif own:
            found.append(path)
    if not found:
        raise ValueError(
            "Expected layers that can be preconditioned, found none:\n  "
            + "\n  ".join(left or ["no parameters at all"])
            + "\nTrain the module without precondition()."
        )
    return found


def _reason(layer: nn.Module, own: list[nn.Parameter], owners: Mapping[int, int]) -> str | None:
    """Why a layer stays as it is."""
    if type(layer) not in KINDS or "weight" not in layer._parameters:
        return f"is none of {', '.join(kind.__name__ for kind in KINDS)}."
    if isinstance(layer, nn.Conv2d) and layer.groups != 1:
        return "has groups."
    if not all(p.requires_grad for p in own):
        return "is frozen, or a part of it."
    if any(owners[id(p)] > 1 for p in own):
        return "shares a parameter with another module."
    if layer._parameters.keys() - {"weight", "bias"} or layer._buffers or layer._modules:
        return "has more parts than a weight and a bias, which would be lost."
    if any(vars(layer)[hooks] for hooks in _HOOKS):
        return "has hooks, which would be lost."
    return None


def _mean_squares(
    module: nn.Module, prefixes: Mapping[str, str], *, batches: Iterable[Any], **options: Any
) -> dict[str, float]:
    """E‖g‖² of the parameters of each layer on public batches."""
    criterion = options.pop("criterion")
    moments = second_moments(module, batches, criterion, floor=1e-9, per="tensor", **options)
    return {
        path: sum(float(m.sum()) for name, m in moments.items() if name.rpartition(".")[0] == own)
        for path, own in prefixes.items()
    }


def _with_parts(module: nn.Module, parts: Mapping[int, nn.Module]) -> nn.Module:
    """The module with others in the place of some of its parts, wherever they are used."""
    if id(module) in parts:
        return parts[id(module)]
    for path, child in list(module.named_modules(remove_duplicate=False)):
        if id(child) in parts:
            parent, _dot, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, parts[id(child)])
    return module
