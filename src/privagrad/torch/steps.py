"""The step of an optimizer on private gradients: of whole parameters, or of a share of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from privagrad.torch.agreement import options_hash
from privagrad.torch.shares import Shares
from privagrad.torch.wrapped import NoiseAware, is_elementwise, states_of


def step_of(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], shares: Shares
) -> WholeStep:
    """How several processes take the steps of an optimizer, or a single one."""
    sharded = shares.processes.count > 1 and is_elementwise(optimizer)
    return (ShardedStep if sharded else WholeStep)(optimizer, parameters, shares)


class WholeStep:
    """Every process steps all parameters, on the same gradients.

    Parameters
    ----------
    optimizer : Optimizer
    parameters : mapping of str to Parameter
        The trainable parameters.
    shares : Shares
        Of these parameters.
    """

    needs_whole = True
    """Whether the step needs the gradients of other processes' shares too."""

    def __init__(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], shares: Shares
    ) -> None:
        self.optimizer, self.shares = optimizer, shares
        self.parameters = dict(parameters)

    @property
    def options_hash(self) -> float:
        """A number that must be the same in all processes, or the step differs."""
        return options_hash(self.optimizer)

    def set_gradients(self, totals: dict[str, Tensor], factor: float, whole: bool) -> None:
        """The gradients from their sums, flat, which are private in this process's share alone.

        With `whole` parameters get whole gradients, also where the step does not need them.
        `totals` are used up.
        """
        self.shares.gather(totals)
        for name, parameter in self.parameters.items():
            gradient = _scaled(totals.pop(name), factor).view(parameter.shape)
            parameter.grad = gradient.to(parameter.device, parameter.dtype)

    def set_noise_variances(self, variances: Mapping[str, Tensor]) -> None:
        """Tell an optimizer that uses it the variance of the noise, by name and coordinate."""
        if isinstance(self.optimizer, NoiseAware):
            self.optimizer.noise_variances = {
                parameter: variances[name] for name, parameter in self.parameters.items()
            }

    def zero_grad(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class ShardedStep(WholeStep):
    """Each process steps its own share of the parameters, with its own share of the state.

    The optimizer must treat every coordinate by itself: see `is_elementwise`. It has, in place of
    each parameter, the part of it that is in this process's share, in the same memory; of a
    parameter that is not in the share it has nothing. After the step every process gets the
    parameters of all shares from their owners, so that they are the same everywhere, to the last
    bit.
    """

    needs_whole = False

    def __init__(
        self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], shares: Shares
    ) -> None:
        super().__init__(optimizer, parameters, shares)
        self.parts = {
            name: nn.Parameter(part_of(parameters[name].detach(), place))
            for name, place in shares.own.items()
        }
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._split()

    def set_gradients(self, totals: dict[str, Tensor], factor: float, whole: bool) -> None:
        if whole:
            super().set_gradients(totals, factor, whole)
            return
        for name, parameter in self.parameters.items():
            total, parameter.grad = totals.pop(name), None
            if name in self.parts:
                # The rest of the memory is not private, and is given back.
                own, part = total[self.shares.own[name]].clone(), self.parts[name]
                part.grad = _scaled(own, factor).view(part.shape).to(part.device, part.dtype)

    def set_noise_variances(self, variances: Mapping[str, Tensor]) -> None:
        if isinstance(self.optimizer, NoiseAware):
            self.optimizer.noise_variances = {
                part: part_of(variances[name], self.shares.own[name])
                for name, part in self.parts.items()
            }

    def zero_grad(self, set_to_none: bool) -> None:
        super().zero_grad(set_to_none)
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self) -> None:
        """The optimizer's step on this process's parts; all parameters are then exchanged."""
        if not is_elementwise(self.optimizer):
            raise RuntimeError(
                "Expected the optimizer as it was when make_private was called, found a new step "
                "hook: it would see this process's share of the parameters alone. Register it "
                "before make_private, which then leaves the optimizer whole in every process; or "
                "use attach_step_hook."
            )
        # A parameter may have other memory than before, and need not be contiguous.
        flat = {name: p.detach().reshape(-1) for name, p in self.parameters.items()}
        for name, part in self.parts.items():
            place, gradient = self.shares.own[name], self.parameters[name].grad
            part.data = flat[name][place].view(part.shape)
            if gradient is not None:
                part.grad = gradient.reshape(-1)[place].view(part.shape)
        self.optimizer.step()
        self.shares.gather(flat)
        for name, parameter in self.parameters.items():
            if flat[name].data_ptr() != parameter.data_ptr():
                parameter.detach().copy_(flat[name].view(parameter.shape))
        for part in self.parts.values():
            part.grad = None

    def state_dict(self) -> dict[str, Any]:
        """That of an optimizer with whole parameters; to be called in all processes."""
        kept = [dict(state) for state in states_of(self.optimizer)]
        whole = self._whole_states()
        try:
            self._set(self._groups, whole)
            return self.optimizer.state_dict()
        finally:
            self._set(self._parts_of_groups(), kept)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take this process's share of a state of whole parameters."""
        kept = [dict(state) for state in states_of(self.optimizer)]
        self._set(self._groups, [{} for _ in kept])
        try:
            self.optimizer.load_state_dict(state)
        except BaseException:
            self._set(self._parts_of_groups(), kept)
            raise
        self._split()

    def _split(self) -> None:
        """From whole parameters and their state to this process's part of them."""
        split = []
        for state in states_of(self.optimizer):
            own = dict(state)
            for name, whole in self.parameters.items():
                values = own.pop(whole, None)
                if name in self.parts and values is not None:
                    own[self.parts[name]] = self._part_of_state(name, values)
            split.append(own)
        self._set(self._parts_of_groups(), split)

    def _part_of_state(self, name: str, values: Any) -> Any:
        """Tensors of the parameter's shape are cut as it is; others are of all coordinates."""
        place, shape = self.shares.own[name], self.parameters[name].shape
        return _mapped(lambda t: part_of(t, place).clone() if t.shape == shape else t, values)

    def _parts_of_groups(self) -> list[list[nn.Parameter]]:
        """The optimizer's groups with parts; parameters that are not trained stay as they are."""
        names = {whole: name for name, whole in self.parameters.items()}
        return [
            [
                p if p not in names else self.parts[names[p]]
                for p in group
                if p not in names or names[p] in self.parts
            ]
            for group in self._groups
        ]

    def _set(self, groups: list[list[nn.Parameter]], states: list[dict[Any, Any]]) -> None:
        for group, parameters in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = list(parameters)
        for state, values in zip(states_of(self.optimizer), states, strict=True):
            state.clear()
            state.update(values)

    def _whole_states(self) -> list[dict[Any, Any]]:
        """The states of whole parameters, of the parts that all processes have of them."""
        names = {part: name for name, part in self.parts.items()}
        own, others = [], []
        for state in states_of(self.optimizer):
            own.append(
                {names[p]: _mapped(_on_cpu, value) for p, value in state.items() if p in names}
            )
            others.append({p: value for p, value in state.items() if p not in names})
        places = {name: part.shape for name, part in self.parts.items()}
        every = self.shares.processes.gathered_objects((own, places))
        whole = []
        for place, other in enumerate(others):
            found = dict(other)
            for name, parameter in self.parameters.items():
                parts = [
                    (states[place][name], shapes[name])
                    for states, shapes in every
                    if name in states[place]
                ]
                if parts:
                    found[parameter] = _joined(
                        [value for value, _ in parts], [shape for _, shape in parts], parameter
                    )
            whole.append(found)
        return whole


def _scaled(total: Tensor, factor: float) -> Tensor:
    return total if factor == 1 else total.mul_(factor)


def part_of(tensor: Tensor, place: slice) -> Tensor:
    """The coordinates at `place` of a tensor, flat; of all of them, the tensor as it is."""
    if place.stop - place.start == tensor.numel():
        return tensor
    return tensor.reshape(-1)[place]


def _joined(values: list[Any], shapes: list[torch.Size], whole: Tensor) -> Any:
    """The value of a whole parameter from those of its parts; what has another shape is alike."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, dict):
        return {key: _joined([own[key] for own in values], shapes, whole) for key in first}
    if isinstance(first, list):
        return [_joined(list(own), shapes, whole) for own in zip(*values, strict=True)]
    if isinstance(first, Tensor) and first.shape == shapes[0]:
        return torch.cat(values).view(whole.shape)
    return first


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with all tensors in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(change, own) for key, own in value.items()}
    if isinstance(value, list):
        return [_mapped(change, own) for own in value]
    return value


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()
