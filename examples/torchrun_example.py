"""Private training in several processes, started by torchrun.

pip install "privagrad[torch]" && torchrun --nproc-per-node 2 examples/torchrun_example.py

Each process samples from its share of the rows, and releases and steps its own parameters.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from privagrad.torch import PrivacyEngine

DELTA = 1e-5


def main(epochs: int = 4) -> tuple[float, float]:
    """Accuracy on the training rows, for show, and epsilon."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4000, 20, generator=generator)
    labels = (inputs[:, :3].sum(1) > 0).long()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    module = DistributedDataParallel(plain)
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=module,
        optimizer=torch.optim.Adam(module.parameters(), lr=0.01),
        # The batch size of all processes together.
        data_loader=DataLoader(TensorDataset(inputs, labels), batch_size=200),
        target_epsilon=2.0,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=1.0,
    )
    for _ in range(epochs):
        for rows, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(rows), targets).backward()
            optimizer.step()
    # In every process: they write one file together.
    engine.save_checkpoint(path="checkpoint.pt", module=private, optimizer=optimizer)
    with torch.no_grad():
        accuracy = float((private.eval()(inputs).argmax(1) == labels).double().mean())
    return accuracy, engine.get_epsilon(DELTA)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = main()
    if dist.get_rank() == 0:
        print("accuracy {:.3f}, epsilon {:.2f}".format(*found))
    dist.destroy_process_group()
