"""One process of `benchmarks.ddp_step`: `NAME RANK PROCESSES FILE STEPS`; prints JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from privagrad.experiments.language.model import LanguageModel
from privagrad.torch import PrivacyEngine
from privagrad.torch.processes import Processes
from privagrad.torch.shares import Shares
from privagrad.torch.wrapped import states_of


def main() -> None:
    name, rank, count, file, steps = (
        sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]),
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module: nn.Module = LanguageModel(8000)
    words = torch.randint(0, 8000, (250, 35))
    scales = [torch.rand_like(p) + 0.5 for p in module.parameters()]
    data = TensorDataset(words, words.roll(-1, 1))
    sampler: DistributedSampler[Any] | None = None
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=count)
        module = DistributedDataParallel(module)
        sampler = DistributedSampler(data, shuffle=False)
    plain = torch.optim.Adagrad(module.parameters(), lr=0.01)
    if name == "two, whole":
        plain.register_step_pre_hook(lambda *_: None)
    module, optimizer, _ = PrivacyEngine().make_private(
        module=module, optimizer=plain, ellipsoid=scales, noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=DataLoader(data, batch_size=250 // count, sampler=sampler),
        poisson_sampling=False,
    )  # fmt: skip
    inputs, targets = words[rank::count], words.roll(-1, 1)[rank::count]
    seconds, processor = [], []
    for step in range(steps + 2):
        if count > 1:
            dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        module(inputs, targets).backward()
        optimizer.step()
        if step >= 2:
            seconds.append(time.perf_counter() - start)
            processor.append(time.process_time() - used)
    states = [
        value for state in states_of(plain) for own in state.values() for value in own.values()
    ]
    shares = Shares(Processes(rank, count), dict(module.named_parameters()))
    owned = sum(place.stop - place.start for place in shares.own.values())
    print(
        json.dumps(
            {
                "seconds": statistics.median(seconds),
                "processor_seconds": statistics.median(processor),
                "state_mb": _mb(states),
                "gradient_mb": 4e-6 * (owned if name == "two" else shares.size),
                "buffers_mb": 0.0 if count == 1 else 8e-6 * count * shares.width,
            }
        )
    )
    if count > 1:
        dist.destroy_process_group()


def _mb(values: list[Any]) -> float:
    return 1e-6 * sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))


if __name__ == "__main__":
    main()
    # DistributedDataParallel keeps threads of gloo, which rarely abort Python on its way out.
    sys.stdout.flush()
    os._exit(0)
