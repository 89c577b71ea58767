"""One process of a distributed training; what it saw goes into a file."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from privagrad.torch import PrivacyEngine


def data(rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train(task: str, rank: int, processes: int) -> dict[str, object]:
    module = model()
    if rank:
        for parameter in module.parameters():
            parameter.data.zero_()  # the first process's model counts
    if processes > 1:
        module = DistributedDataParallel(module)
    rows, size, epochs = {
        "sum": (32, 32, 1),
        "noise": (40, 8, 40),
        "empty": (6, 1, 10),
        "users": (32, 12, 1),
    }[task]
    dataset = data(rows)
    sampler: DistributedSampler[Any] | None = None
    if processes > 1:
        sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=size // processes or 1, sampler=sampler)
    if task == "empty":
        # All processes together expect one row a step: most of the time one of them has none.
        loader = DataLoader(dataset, batch_size=1)
    engine = PrivacyEngine()
    scales = [torch.rand(p.shape) + 0.5 + rank for p in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0 if task != "empty" else 0.1)
    clipping: dict[str, Any] = {}
    if task == "users":
        # All of 12 users in one step, some in each process.
        clipping = {"groups": [row**2 % 17 if row < 20 else 99 + row % 3 for row in range(rows)]}
    elif task != "noise":
        clipping = {"clipping": "adaptive", "unclipped_num_std": 5.0 + rank}
        clipping["clipbound_learning_rate"] = 0.3 + rank
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=loader,
        **clipping,
        noise_multiplier=0.0 if task in ("sum", "users") else 1.5,
        max_grad_norm=0.2,
        ellipsoid=None if task in ("sum", "users") else scales,
        poisson_sampling=task != "sum",
        random_state=rank,
    )
    if rank:  # the first process's numbers count
        optimizer.noise_multiplier, optimizer.max_grad_norm = 4.0, 30.0
        optimizer.expected_batch_size = 0.1
    gradients, sizes = [], []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
            sizes.append(len(x))
            gradients.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    return {
        "gradients": torch.stack(gradients),
        "sizes": sizes,
        "epsilon": engine.get_epsilon(1e-5),
        "bound": optimizer.max_grad_norm,
        "expected": optimizer.expected_batch_size,
        "scales": [scale.full for scale in optimizer.scales.values()],
        "parameters": torch.cat([p.detach().flatten() for p in module.parameters()]),
    }


def main() -> None:
    task, rank, processes, folder = (
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        Path(sys.argv[4]),
    )
    if processes > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'meet'}",
            rank=rank,
            world_size=processes,
            timeout=timedelta(minutes=10),
        )
    if task == "kill":
        run_until_killed(rank)
        return
    torch.save(train(task, rank, processes), folder / f"{task}-{processes}-{rank}.pt")
    if processes > 1:
        dist.destroy_process_group()


def run_until_killed(rank: int) -> None:
    module = DistributedDataParallel(model())
    module, optimizer, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data(64), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for _ in range(100):
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            if rank == 1 and step == 3:
                os.kill(os.getpid(), 9)
            optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
