"""Private gradients of the engine for rows that an audit chooses."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from privagrad._internal.validate import Vector
from privagrad.geometry.ellipsoid import Ellipsoid
from privagrad.privacy.noise import Noise, RandomState
from privagrad.privacy.sampling import Batches
from privagrad.torch.engine import PrivacyEngine


def released_gradients(
    rows: Vector, ellipsoid: Ellipsoid, noise_multiplier: float, batches: Batches, noise: Noise,
    random_state: RandomState,
) -> list[Vector]:  # fmt: skip
    """The private gradients of ⟨x, z⟩ over the rows z, by `PrivacyEngine`, one for each step.

    The learning rate is 0, so that every step releases the same gradients.
    """
    model = nn.Linear(rows.shape[1], 1, bias=False).double()
    data = TensorDataset(torch.from_numpy(rows))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private, steps, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=batches.batch_size),
        noise_multiplier=noise_multiplier,
        max_grad_norm=ellipsoid.radius,
        ellipsoid=[torch.tensor(ellipsoid.scale)[None]],
        noise=noise,
        random_state=random_state,
    )
    found: list[Vector] = []
    while len(found) < batches.steps:
        for (batch,) in loader:
            steps.zero_grad()
            private(batch).mean().backward()
            steps.step()
            gradient = model.weight.grad
            if gradient is None:
                raise RuntimeError("Expected a private gradient after the step, found none.")
            found.append(np.array(gradient.detach().numpy()[0]))
            if len(found) == batches.steps:
                break
    return found
