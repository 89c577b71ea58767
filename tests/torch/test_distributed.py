"""Two processes on gloo: the same sums, the same noise, the same account as one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from privagrad.privacy.noise import random_source
from privagrad.torch import PrivacyEngine
from privagrad.torch.agreement import refuse_shared_streams
from privagrad.torch.processes import Processes
from privagrad.torch.release import ReleaseTerms, SumRelease
from privagrad.torch.scales import Scale
from privagrad.torch.shares import Shares
from tests.statistics import assert_scale, rate_accepted
from tests.torch import distributed_worker as worker
from tests.torch.small import private

ROOT = Path(__file__).parents[2]
HANGS = 1800
"""Seconds after which a process is taken to hang: far beyond what a busy machine needs."""
TASKS = ("sum", "users", "noise", "discrete", "empty", "steps", "checkpoints", "refused", "resumed")


def start(folder: Path, *tasks: str) -> list[subprocess.Popen[str]]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", worker.__name__, str(rank), str(folder), *tasks],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


class Results:
    """What two processes saw of each task, and one process, which is this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.alone_at_checkpoints = worker.checkpoints(0, 1, folder)
        for process in start(folder, *TASKS):
            _, errors = process.communicate(timeout=HANGS)
            assert process.returncode == 0, errors

    def of(self, task: str) -> list[Any]:
        return [torch.load(self.folder / f"{task}-{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("distributed"))


def test_the_sum_is_that_of_one_process(results: Results) -> None:
    alone, (first, second) = worker.train("sum", 0, 1), results.of("sum")
    assert torch.equal(first["gradients"], second["gradients"])
    assert torch.allclose(first["gradients"], alone["gradients"], rtol=1e-5, atol=1e-8)
    assert first["expected"] == alone["expected"] == 32
    # The examples within the bound are counted over all processes.
    assert first["bound"] == second["bound"] == alone["bound"] != 0.2


def test_users_stay_whole(results: Results) -> None:
    alone, (first, second) = worker.train("users", 0, 1), results.of("users")
    assert torch.equal(first["gradients"], second["gradients"])
    assert torch.allclose(first["gradients"], alone["gradients"], rtol=1e-5, atol=1e-8)
    assert first["sizes"][0] + second["sizes"][0] == alone["sizes"][0] == 32
    assert first["expected"] == 12


def whitened_noise(seen: Any) -> Tensor:
    """The noise of each step and coordinate, in units of its standard deviation."""
    scale = torch.cat([s.flatten() for s in seen["scales"]])
    noise: Tensor = seen["gradients"].double() * scale.sqrt() * 8 / (1.5 * 0.2)
    return noise


@pytest.mark.parametrize("kind", ["noise", "discrete"])
def test_every_coordinate_has_its_noise_once(results: Results, kind: str) -> None:
    """Each process adds that of its own half of the coordinates."""
    first, second = results.of(kind)
    assert torch.equal(first["gradients"], second["gradients"])
    noise = whitened_noise(first)
    for share in noise.split(32, 1):
        assert_scale(share.numpy(), 1.0)


@pytest.mark.parametrize("kind", ["noise", "discrete"])
def test_no_two_coordinates_or_steps_share_noise(results: Results, kind: str) -> None:
    """The processes have the same seed."""
    noise = whitened_noise(results.of(kind)[0]).numpy()
    assert noise.shape == ({"noise": 60, "discrete": 40}[kind], 64)
    assert np.unique(noise).size > noise.size - 5
    for samples in (noise.T, noise):
        correlations = np.corrcoef(samples)[np.triu_indices(len(samples), 1)]
        # That of 40 independent pairs is larger with probability below 1e-20.
        assert abs(correlations).max() < 0.95


def test_noise_ellipsoid_and_epsilon_are_those_of_one_process(results: Results) -> None:
    alone, (first, second) = worker.train("noise", 0, 1), results.of("noise")
    assert all(torch.equal(a, b) for a, b in zip(first["scales"], second["scales"], strict=True))
    assert first["epsilon"] == second["epsilon"] == alone["epsilon"]
    assert_scale(whitened_noise(alone).numpy(), 1.0)
    # Each has drawn from its own half of the 40 rows, at the rate 8/40, and not the same places.
    for sizes in (first["sizes"], second["sizes"]):
        assert rate_accepted(sum(sizes), 20 * len(sizes), 8 / 40)
    assert first["sizes"] != second["sizes"]


def test_processes_without_rows_keep_step(results: Results) -> None:
    first, second = results.of("empty")
    assert 0 in first["sizes"]
    assert 0 in second["sizes"]
    assert len(first["sizes"]) == len(second["sizes"]) == 60
    assert torch.equal(first["parameters"], second["parameters"])
    assert first["bound"] == second["bound"] != 0.2


def test_steps_of_shares_are_those_of_whole_parameters(results: Results) -> None:
    """To the last bit, with less than 7 numbers more than half of the optimizer's state."""
    first, second = results.of("steps")
    compared = [(name, kind) for name, kind, sharded in first if sharded]
    assert len(compared) == len(worker.OPTIMIZERS) + len(worker.MODELS) - 1
    for name, kind in compared:
        own, state, gradients = first[name, kind, True]
        others, their_state, _ = second[name, kind, True]
        whole, whole_state, whole_gradients = first[name, kind, False]
        assert torch.equal(own, others), (name, kind)
        assert torch.equal(own, whole), (name, kind)
        assert max(state, their_state) <= whole_state / 2 + 6
        assert state + their_state == whole_state
        assert not any(gradients), "there are no whole gradients"
        assert all(whole_gradients) or kind == "odd"


def test_a_checkpoint_continues_with_any_number_of_processes(results: Results) -> None:
    alone, (first, second) = results.alone_at_checkpoints, results.of("checkpoints")
    for name in ("adam", "adagrad", "low-pass"):
        assert torch.allclose(alone[name], first[name], rtol=1e-4, atol=1e-6)
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name, 2][0], first[name])
        assert torch.allclose(first[name, 1][0], first[name], rtol=1e-4, atol=1e-6)
        assert first[name, 2][1] == first[name, 1][1] > 0, "the state is a share"
    engine, module, optimizer, loader = worker.steps_of("adam", "plain", 1, True, 0.0)
    path = results.folder / "adam-2.checkpoint"
    engine.load_checkpoint(path=path, module=module, optimizer=optimizer)
    worker.epoch(module, optimizer, loader)
    assert torch.allclose(worker.whole(module), first["adam"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("none", "none"),
        ("same generator", "none"),
        ("lr", "Expected the optimizer to be the same in all processes"),
        ("optimizer", "Expected the optimizer to be the same in all processes"),
        ("batch", "Expected the sampling to be the same in all processes"),
        ("verify", "verify= to be the same in all processes, found ('flat', 'mean', 'gaussian', T"),
        ("noise", "noise= and verify= to be the same in all processes, found ('flat', 'mean', 'g"),
        ("ellipsoid", "Expected the shape of the ellipsoid to be the same in all processes"),
        ("peek", "the same number of batches drawn at a step, found 3 in process 0 and 4 in"),
        (
            "charge",
            "the same charge (1: for the batch that its data loader drew, 0: for all rows) at",
        ),
        ("new hook", "found a new step hook: it would see this process's share"),
        ("scale", "the same ellipsoid (a hash of it) at a step"),
        ("learning rate", "the same optimizer's options (a hash of them) at a step"),
        ("learning rate, whole", "the same optimizer's options (a hash of them) at a step"),
        ("frozen", "Expected the trainable parameters to be the same in all processes"),
        ("rows", "Expected the rows of the data loader and their order (a hash) to be the same"),
        ("users of other rows", "Expected the rows of the data loader and their order (a hash)"),
        ("subset", "Expected the rows of the data loader and their order (a hash) to be the same"),
        ("the same subset", "none"),
        ("contents", "Expected the rows of the data loader and their order (a hash) to be the"),
        ("shuffled alike", "none"),
        ("shuffled", "Expected the rows of the data loader and their order (a hash) to be the"),
        ("epoch", "the same order of the data loader's rows (a hash of it) at a step"),
    ],
)
def test_processes_that_differ_are_refused_in_all(
    results: Results, difference: str, message: str
) -> None:
    for seen in results.of("refused"):
        assert message in seen[difference]


def test_a_release_that_all_processes_note_counts_once(results: Results) -> None:
    """Beside the checkpoint that they continue from, however far one is ahead."""
    first, second = results.of("resumed")
    assert first["counted"] == second["counted"] == [2, 4, 6]


def test_a_killed_process_ends_the_run(tmp_path: Path) -> None:
    """The one that is left ends with an error; it does not go on alone."""
    first, second = start(tmp_path, "kill")
    _, errors = first.communicate(timeout=HANGS)
    second.communicate(timeout=HANGS)
    assert second.returncode == -9
    assert first.returncode > 0
    assert "Error" in errors


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_every_coordinate_is_in_one_share(count: int) -> None:
    tensors = {
        "a": torch.zeros(5, 3),
        "b": torch.zeros(()),
        "c": torch.zeros(7),
        "d": torch.zeros(0),
    }
    owned = {name: torch.zeros(tensor.numel()) for name, tensor in tensors.items()}
    for rank in range(count):
        own = Shares(Processes(rank, count), tensors).own
        for name, place in own.items():
            owned[name][place] += 1
        assert sum(place.stop - place.start for place in own.values()) <= -(-23 // count)
    assert all(bool((times == 1).all()) for times in owned.values())


class Alike(Processes):
    """One of several processes that all have the same sums."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def exchange(self, rows: Tensor) -> Tensor:
        return rows[self.rank].expand_as(rows)


@pytest.mark.parametrize("count", [2, 3])
def test_each_process_adds_the_noise_of_its_share(count: int) -> None:
    """To the sum of all processes, at each coordinate in one of them."""
    tensors = {"a": torch.zeros(60, 50), "b": torch.zeros(701)}
    scales = {name: Scale.of(4 * torch.ones_like(tensor)) for name, tensor in tensors.items()}
    noise: list[Tensor] = []
    for rank in range(count):
        shares = Shares(Alike(rank, count), tensors)
        totals = {name: torch.full_like(t, 0.25).flatten() for name, t in tensors.items()}
        terms = ReleaseTerms(1.5, 0.2, 8.0)
        factor = SumRelease(random_source(), shares, 8.0)(totals, scales, terms).factor
        for name, place in shares.own.items():
            noise.append(factor * totals[name][place] - count * 0.25)
    assert sum(map(len, noise)) == 3701
    assert_scale(torch.cat(noise).numpy(), 1.5 * 0.2 / 2)


class Twins(Processes):
    """Two processes that have the same of everything."""

    def gathered_objects(self, own: Any) -> list[Any]:
        return [own, own]


def test_processes_with_the_same_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="Expected random numbers of its own in every process"):
        refuse_shared_streams(Twins(0, 2), random_source(3))


def test_a_seed_gives_each_process_streams_of_its_own() -> None:
    words = [
        tuple(stream.words(2).tolist())
        for process in (None, 0, 1, 2)
        for stream in random_source(3, process=process).streams
    ]
    assert len(set(words)) == 16


class TestModulesSpreadByOthers:
    """Refused before anything is released or charged."""

    @pytest.fixture(autouse=True)
    def group(self) -> Iterator[None]:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    def refused(self, module: nn.Module, optimizer: Any = None) -> str:
        engine = PrivacyEngine()
        with pytest.raises(ValueError, match="Expected") as error:
            engine.make_private(
                module=module,
                optimizer=optimizer or torch.optim.SGD(module.parameters(), lr=0.1),
                data_loader=DataLoader(worker.data(8), batch_size=4),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )
        assert len(engine.accountant) == 0
        return str(error.value)

    def test_fully_shard(self) -> None:
        module = worker.model()
        fully_shard(module[0], mesh=init_device_mesh("cpu", (1,)))  # type: ignore[index]
        assert "FSDPLinear at 0: fully_shard" in self.refused(module)
        module = worker.model()
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        assert "Wrap the plain module in DistributedDataParallel" in self.refused(module)

    @pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
    def test_fsdp1(self) -> None:
        module = FullyShardedDataParallel(worker.model(), device_id=torch.device("cpu"))
        assert "found a FullyShardedDataParallel at the module itself" in self.refused(module)

    def test_tensor_parallel_modules(self) -> None:
        mesh = init_device_mesh("cpu", (1,))
        module = parallelize_module(worker.model(), mesh, {"0": ColwiseParallel()})
        assert "found a DTensor at 0.weight" in self.refused(module)

    def test_deepspeed_and_data_parallel(self) -> None:
        kind = type("DeepSpeedEngine", (nn.Sequential,), {"__module__": "deepspeed.runtime.engine"})
        assert "found a DeepSpeedEngine" in self.refused(kind(nn.Linear(4, 2)))
        assert "found a DataParallel" in self.refused(nn.DataParallel(nn.Linear(4, 2)))

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_optimizers_that_exchange_parameters(self) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        module = worker.model()
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
        assert "Give make_private the optimizer inside of it" in self.refused(module, optimizer)

    def test_plain_modules_are_private(self) -> None:
        private(noise_multiplier=1.0).epoch()
