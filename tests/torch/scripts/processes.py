"""A model under distributed data parallelism, in a group of one process."""

import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def demo_basic(rank, world_size, epochs, n):
    data = TensorDataset(torch.randn(n, 10), torch.randn(n, 5))
    model = DPDDP(nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)))
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(
        data, num_replicas=world_size, rank=rank
    )
    loader = DataLoader(data, batch_size=n // 10, sampler=sampler)
    privacy_engine = PrivacyEngine(accountant="prv")
    model, optimizer, loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.3,
        max_grad_norm=1.0,
    )
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
    return optimizer.noise_multiplier, privacy_engine.get_epsilon(delta=1e-3)


def main(epochs, n):
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            return demo_basic(0, 1, epochs, n)
        finally:
            dist.destroy_process_group()
