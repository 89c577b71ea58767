"""A Poisson batch may be empty: every layer then leaves noise alone, and the step is made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from privagrad.torch import PrivacyEngine
from tests.torch.small import gradient_of, table


class Own(nn.Module):
    """A module that no layer of ours knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


WORDS, TOKENS, IMAGES = torch.zeros(0, 5).long(), torch.zeros(0, 5, 4), torch.zeros(0, 4, 6, 6)
CASES = {
    "linear": (nn.Linear(4, 3), TOKENS),
    "embedding": (nn.Embedding(9, 4), WORDS),
    "bag": (nn.EmbeddingBag(9, 4), WORDS),
    "lstm": (nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True), TOKENS),
    "gru": (nn.GRU(4, 3, batch_first=True), TOKENS),
    "rnn": (nn.RNN(4, 3, batch_first=True), TOKENS),
    "conv": (nn.Conv2d(4, 3, 3), IMAGES),
    "layer-norm": (nn.LayerNorm(4), TOKENS),
    "group-norm": (nn.GroupNorm(2, 4), IMAGES),
    "encoder": (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), TOKENS),
    "anything": (Own(), TOKENS),
}


@pytest.mark.parametrize("name", CASES)
def test_the_step_is_noise(name: str) -> None:
    module, inputs = CASES[name]
    engine = PrivacyEngine()
    private, optimizer, _ = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        data_loader=DataLoader(table(6), batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    output = private(inputs)
    output = output[0] if isinstance(output, tuple) else output
    output.sum().backward()
    optimizer.step()
    for parameter in module.parameters():
        assert bool(gradient_of(parameter).isfinite().all())
        assert bool((gradient_of(parameter) != 0).all())
    assert len(engine.accountant) == 1
