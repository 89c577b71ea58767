"""One process of a distributed training; what it saw goes into files, one for each task."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from privagrad.torch import AdamBC, KalmanFilter, LowPassFilter, PrivacyEngine, shares
from privagrad.torch.wrapped import states_of

Seen = dict[Any, Any]

# Several rounds of exchange, also of small models.
shares._EXCHANGED = 32


def data(rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def halves() -> nn.Module:
    """Both shares are one matrix of the same size: from the same stream they had the same noise."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))


def nothing(output: Tensor, target: Tensor) -> Tensor:
    """A loss without gradients."""
    return (0.0 * output).sum(1).mean()


def loader_of(dataset: Any, size: int, processes: int) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] | None = None
    if processes > 1:
        sampler = DistributedSampler(dataset, shuffle=False)
    return DataLoader(dataset, batch_size=size // processes or 1, sampler=sampler)


def distributed(module: nn.Module, processes: int) -> nn.Module:
    return DistributedDataParallel(module) if processes > 1 else module


def train(task: str, rank: int, processes: int) -> Seen:
    """What all processes together sum, count and add noise to."""
    noisy = task in ("noise", "discrete")
    module = halves() if noisy else model()
    if rank:
        for parameter in module.parameters():
            parameter.data.zero_()  # the first process's model counts
    module = distributed(module, processes)
    rows, size, epochs = {
        "sum": (32, 32, 1),
        "noise": (40, 8, 12),
        "discrete": (40, 8, 8),
        "empty": (6, 1, 10),
        "users": (32, 12, 1),
    }[task]
    loader = loader_of(data(rows), size, processes)
    if task == "empty":
        # All processes together expect one row a step: most of the time one of them has none.
        loader = DataLoader(data(rows), batch_size=1)
    engine = PrivacyEngine()
    scales = [torch.rand(p.shape) + 0.5 + rank for p in module.parameters()]
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.0 if task != "empty" else 0.1)
    clipping: dict[str, Any] = {}
    if task == "users":
        # All of 12 users in one step, some in each process.
        clipping = {"groups": [row**2 % 17 if row < 20 else 99 + row % 3 for row in range(rows)]}
    elif not noisy:
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
        noise="discrete" if task == "discrete" else "gaussian",
        random_state=4,
    )
    if rank:  # the first process's numbers count
        optimizer.noise_multiplier, optimizer.max_grad_norm = 4.0, 30.0
        optimizer.expected_batch_size = 0.1
    gradients: list[Tensor] = []
    if rank == 0:
        optimizer.attach_step_hook(lambda own: gradients.append(whole_gradient(own)))
    sizes = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            (nothing if noisy else nn.functional.cross_entropy)(module(x), y).backward()
            optimizer.step()
            sizes.append(len(x))
            if rank:
                gradients.append(whole_gradient(optimizer))
    return {
        "gradients": torch.stack(gradients),
        "sizes": sizes,
        "epsilon": engine.get_epsilon(1e-5),
        "bound": optimizer.max_grad_norm,
        "expected": optimizer.expected_batch_size,
        "scales": [scale.full for scale in optimizer.scales.values()],
        "parameters": whole(module),
    }


def whole(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in module.parameters()])


def whole_gradient(optimizer: Any) -> Tensor:
    return torch.cat([p.grad.flatten() for p in optimizer.params])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adam-bc": lambda p: AdamBC(p, lr=0.01),
    "low-pass": lambda p: LowPassFilter(torch.optim.Adam(p, lr=0.01)),
    "kalman": lambda p: KalmanFilter(torch.optim.SGD(p, lr=0.1, momentum=0.9)),
}


class Odd(nn.Module):
    """Tied weights, a frozen parameter, one without gradients, and memory in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.conv = nn.Conv2d(2, 3, 2)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.idle, self.scale = nn.Linear(3, 1), nn.Linear(1, 2)
        self.scale.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tied(self.first(x).tanh())
        h = self.conv(torch.stack([h, x], 1)[..., None].expand(-1, -1, -1, 2)).flatten(1)
        return self.scale(h.mean(1, keepdim=True))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": model,
    "odd": Odd,
    "bfloat16": lambda: model().to(torch.bfloat16),
    "one": lambda: nn.Sequential(nn.Linear(4, 1, bias=False), nn.Sigmoid(), nn.Flatten(0)),
}


def steps_of(
    name: str, kind: str, processes: int, sharded: bool, noise: float
) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(9)
    module = distributed(MODELS[kind](), processes)
    optimizer = OPTIMIZERS[name]([p for p in module.parameters() if p.requires_grad])
    if not sharded:
        optimizer.register_step_pre_hook(lambda *_: None)  # hooks see whole parameters
    engine = PrivacyEngine()
    dataset = data(32)
    if kind == "bfloat16":
        dataset = TensorDataset(dataset.tensors[0].bfloat16(), dataset.tensors[1])
    private = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=loader_of(dataset, 8, processes),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        poisson_sampling=False,
        random_state=4,
    )
    return engine, *private


def epoch(module: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        output = module(x)
        loss = output.square().mean() if output.dim() == 1 else None
        (nn.functional.cross_entropy(output, y) if loss is None else loss).backward()
        optimizer.step()


def size_of_state(optimizer: Any) -> int:
    kept = [value for state in states_of(optimizer.original_optimizer) for value in state.values()]
    return sum(numbers_in(own) for own in kept)


def numbers_in(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() if value.dim() else 0
    values = value.values() if isinstance(value, dict) else value
    return sum(map(numbers_in, values)) if isinstance(value, (dict, list)) else 0


def steps(rank: int) -> Seen:
    """Parameters and sizes of states after steps of shares and of whole parameters."""
    found: Seen = {}
    wanted = [(name, "plain") for name in OPTIMIZERS] + [("adam", kind) for kind in MODELS]
    for name, kind in wanted:
        for sharded in (True, False):
            _, module, optimizer, loader = steps_of(name, kind, 2, sharded, noise=1.0)
            epoch(module, optimizer, loader)
            gradients = [p.grad is not None for p in optimizer.params]
            found[name, kind, sharded] = (whole(module), size_of_state(optimizer), gradients)
    return found


def checkpoints(rank: int, processes: int, folder: Path) -> Seen:
    """Four steps, a checkpoint, four more; the same from the checkpoint; and from another's."""
    found: Seen = {}
    for name in ("adam", "adagrad", "low-pass"):
        path = folder / f"{name}-{processes}.checkpoint"
        engine, module, optimizer, loader = steps_of(name, "plain", processes, True, noise=0.0)
        epoch(module, optimizer, loader)
        engine.save_checkpoint(path=path, module=module, optimizer=optimizer)
        epoch(module, optimizer, loader)
        found[name] = whole(module)
        for other in (1, 2):
            path = folder / f"{name}-{other}.checkpoint"
            if path.exists():
                engine, module, optimizer, loader = steps_of(name, "plain", processes, True, 0.0)
                engine.load_checkpoint(path=path, module=module, optimizer=optimizer)
                epoch(module, optimizer, loader)
                found[name, other] = whole(module), size_of_state(optimizer)
    return found


def resumed(rank: int, folder: Path) -> Seen:
    """How many releases are counted after each of three runs of two passes from one checkpoint."""
    path, counted = folder / "resumed.checkpoint", []
    engine, module, optimizer, _ = steps_of("sgd", "plain", 2, True, noise=1.0)
    engine.save_checkpoint(path=path, module=module, optimizer=optimizer)
    for run in range(3):
        engine, module, optimizer, loader = steps_of("sgd", "plain", 2, True, noise=1.0 + run)
        if rank:
            dist.barrier()  # late: the other one has noted its first release
        engine.load_checkpoint(path=path, module=module, optimizer=optimizer)
        next(iter(loader))
        if not rank:
            dist.barrier()
        epoch(module, optimizer, loader)
        counted.append(len(engine.accountant))
    return {"counted": counted}


def refused(rank: int) -> Seen:
    """The errors where processes differ."""

    def start(**options: Any) -> tuple[Any, Any, Any]:
        module = DistributedDataParallel(model())
        given = {"lr": 0.1} | {k: options.pop(k) for k in ("lr",) if k in options}
        made: Any = options.pop("kind", torch.optim.SGD)(module.parameters(), **given)
        size = options.pop("size", 8)
        loader = options.pop("loader", None) or DataLoader(data(64), batch_size=size)
        return PrivacyEngine().make_private(
            module=module, optimizer=made, data_loader=loader,
            **({"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options),
        )  # fmt: skip

    def rows_in_order(order: list[int], **options: Any) -> Callable[[], Any]:
        chosen = SubsetRandomSampler(order)
        return lambda: start(loader=DataLoader(data(64), batch_size=4, sampler=chosen), **options)

    def subset(order: list[int], **options: Any) -> Callable[[], Any]:
        own: DataLoader[Any] = DataLoader(
            ConcatDataset([data(4), Subset(data(64), order)]), batch_size=4
        )
        return lambda: start(loader=own, **options)

    def in_own_order(**settings: Any) -> Callable[[], Any]:
        table = data(64)
        taken: DistributedSampler[Any] = DistributedSampler(table, drop_last=True, **settings)
        own = DataLoader(table, batch_size=4, sampler=taken)
        return lambda: loop(loader=own, poisson_sampling=False)

    def later_epoch() -> None:
        table = data(64)
        sampler: DistributedSampler[Any] = DistributedSampler(table)
        own = DataLoader(table, batch_size=4, sampler=sampler)
        module, optimizer, loader = start(loader=own, poisson_sampling=False)
        sampler.set_epoch(rank)
        for x, y in loader:
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()

    def error_of(call: Callable[[], Any]) -> str:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return "none"

    class Whole(torch.optim.SGD):
        """Of a subclass it is not known whether it treats every coordinate by itself."""

    def loop(change: Callable[[Any, Any], Any] | None = None, **options: Any) -> None:
        module, optimizer, loader = start(**options)
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            if (rank or change is hook) and step == 2 and change is not None:
                change(optimizer, loader)
            optimizer.step()

    def spoil(optimizer: Any, loader: Any) -> None:
        loader.charges.spoil()  # as if the loop had used other rows

    def scale(optimizer: Any, _: Any) -> None:
        own = dict(optimizer.scales)
        optimizer.scales = {k: type(v)(2 * v.rows, v.columns) for k, v in own.items()}

    def learning_rate(optimizer: Any, _: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1.0

    def hook(optimizer: Any, _: Any) -> None:
        optimizer.register_step_pre_hook(lambda *_: None)

    generators = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)]
    return {
        "none": error_of(loop),
        "same generator": error_of(lambda: start(noise_generator=generators[rank])),
        "lr": error_of(lambda: start(lr=0.1 + rank)),
        "optimizer": error_of(lambda: start(kind=(torch.optim.SGD, torch.optim.Adam)[rank])),
        "batch": error_of(lambda: start(size=8 + rank)),
        "verify": error_of(lambda: start(verify=not rank)),
        "noise": error_of(lambda: start(noise=("gaussian", "discrete")[rank])),
        "ellipsoid": error_of(lambda: start(ellipsoid=(None, "pagan")[rank])),
        "peek": error_of(lambda: loop(lambda _, loader: next(iter(loader)))),
        "charge": error_of(lambda: loop(spoil)),
        "scale": error_of(lambda: loop(scale)),
        "learning rate": error_of(lambda: loop(learning_rate)),
        "learning rate, whole": error_of(lambda: loop(learning_rate, kind=Whole)),
        "new hook": error_of(lambda: loop(hook)),
        "frozen": error_of(lambda: start_with_frozen(rank)),
        "rows": error_of(rows_in_order([3, 0, 1, 2] if rank else [0, 3, 1, 2])),
        "users of other rows": error_of(
            rows_in_order([3, 0, 1, 2] if rank else [0, 3, 1, 2], groups=range(64))
        ),
        "subset": error_of(subset([3, 0, 1, 2] if rank else [0, 3, 1, 2])),
        "the same subset": error_of(subset([3, 0, 1, 2])),
        "contents": error_of(
            lambda: start(loader=DataLoader(TensorDataset(*data(64)[[rank, *range(1, 64)]])))
        ),
        "shuffled alike": error_of(in_own_order()),
        "shuffled": error_of(in_own_order(seed=rank)),
        "epoch": error_of(later_epoch),
    }


def start_with_frozen(rank: int) -> None:
    module = DistributedDataParallel(model())
    if rank:
        next(module.parameters()).requires_grad_(False)
    PrivacyEngine().make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(data(64), batch_size=8), noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip


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


def main() -> None:
    rank, folder, tasks = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meet'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=10),
    )
    known: dict[str, Callable[[], Seen | None]] = {
        "kill": lambda: run_until_killed(rank),
        "steps": lambda: steps(rank),
        "checkpoints": lambda: checkpoints(rank, 2, folder),
        "refused": lambda: refused(rank),
        "resumed": lambda: resumed(rank, folder),
    }
    for task in tasks:
        seen = known[task]() if task in known else train(task, rank, 2)
        torch.save(seen, folder / f"{task}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    # DistributedDataParallel keeps threads of gloo, which rarely abort Python on its way out.
    os._exit(0)
