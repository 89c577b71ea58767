"""An ellipsoid that is learned from the private gradients of a training, at no privacy cost."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from privagrad.geometry.scales import GradientHistory, visible_size
from privagrad.torch.scales import Scale, as_matrix


class LearnedEllipsoid:
    """Scales of all parameters from the variance of private gradients (see `GradientHistory`).

    They keep the gradients' mean squared norm, so that max_grad_norm means what it means for a
    ball.

    Parameters
    ----------
    power : float
        C = σ^power: see `SCALE_POWERS`.
    """

    def __init__(self, power: float) -> None:
        self.power = power
        self._histories: dict[str, GradientHistory[Tensor]] = {}

    def learn(
        self,
        parameters: Mapping[str, nn.Parameter],
        scales: Mapping[str, Scale],
        noise_std: float,
        examples: float,
    ) -> dict[str, Scale] | None:
        """Take in the private gradients of a step; the new scales where an estimate is due.

        Parameters
        ----------
        parameters : mapping of str to Parameter
            With the private gradient of the step as `grad`.
        scales : mapping of str to Scale
            Those of the step.
        noise_std : float
            The noise's standard deviation at a coordinate of scale 1.
        examples : float
            The variance of one example's gradient over that of `grad`.

        Returns
        -------
        dict of str to Scale, or None
        """
        due = False
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            gradient = as_matrix(parameter.grad).to(torch.float64, copy=True)
            noise = noise_std**2 / scales[name].full
            own = self._histories.setdefault(name, GradientHistory())
            due = own.add(gradient, noise.double())
        return self._scales(parameters, examples) if due else None

    def _scales(self, parameters: Mapping[str, nn.Parameter], examples: float) -> dict[str, Scale]:
        powers: dict[str, Tensor] = {}
        total = weighted_total = hidden_squares = weighted_hidden_squares = 0.0
        for name, own in self._histories.items():
            variance, hidden = own.variance(), own.hidden()
            scale = (examples * torch.maximum(variance, hidden)) ** (self.power / 2)
            total += examples * float(variance.sum())
            hidden_squares += float((examples * hidden).square().sum())
            weighted_total += examples * float((scale * variance).sum())
            weighted_hidden_squares += float((examples * scale * hidden).square().sum())
            powers[name] = scale
        before = visible_size(total, hidden_squares)
        after = visible_size(weighted_total, weighted_hidden_squares)
        return {
            name: Scale.of((scale * (before / after)).to(parameters[name].dtype))
            for name, scale in powers.items()
        }
