"""Kronecker factors against the ball: private training of small networks on MNIST.

Every contestant has the same grid of steps on rows held out of the training rows, then all of these
and fresh seeds at its best step.
1000 of the training rows are set aside as public for all, whether they use them or not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from privagrad.experiments.images.data import Digits, read_digits
from privagrad.torch import PrivacyEngine, dp_kfc_steps, fold, pink_noise, precondition

PUBLIC, BATCH_SIZE, DELTA = 1000, 2000, 1e-5


class Contestant(NamedTuple):
    """`probes`: where the factors come from; none: a ball."""

    probes: str = ""
    damping: float = 0.1
    sides: str = "inputs"
    dp_kfc: bool = False


CONTESTANTS = {
    "ball": Contestant(),
    "public": Contestant("public"),
    "pink": Contestant("pink"),
    "public, both sides": Contestant("public", sides="both"),
    "public, DP-KFC": Contestant("public", 0.01, "both", dp_kfc=True),
    "pink, DP-KFC": Contestant("pink", 0.01, "both", dp_kfc=True),
}
NETWORKS = {
    "mlp": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(784, 32), nn.Tanh(), nn.Linear(32, 10)
    ),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, 3), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    ),
}  # fmt: skip


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images with mean 0 and variance 1, as is known of MNIST's, and labels."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = (images.float()[:, None] / 255 - 0.1307) / 0.3081
        self.labels = labels
        self.rows = list(zip(self.images, self.labels, strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.rows[row]


class Task(NamedTuple):
    network: str
    epsilon: float
    epochs: int
    radius: float
    public: Images
    private: Images
    test: Images

    def of(self, digits: Digits) -> Task:
        """The same task with these images."""
        order = torch.randperm(len(digits.labels), generator=torch.Generator().manual_seed(0))
        x, y = torch.tensor(digits.images)[order], torch.tensor(digits.labels)[order]
        return self._replace(
            public=Images(x[:PUBLIC], y[:PUBLIC]), private=Images(x[PUBLIC:], y[PUBLIC:]),
            test=Images(torch.tensor(digits.test_images), torch.tensor(digits.test_labels)),
        )  # fmt: skip

    def train(self, contestant: Contestant, step: float, seed: int) -> tuple[float, float]:
        """Test accuracy and seconds of a training."""
        torch.manual_seed(seed)
        start = time.perf_counter()
        module: nn.Module = NETWORKS[self.network]()
        if contestant.probes:
            x: Any = self.public.images
            y: Any = self.public.labels
            if contestant.probes == "pink":
                x, y = pink_noise(PUBLIC, x.shape[1:]), torch.randint(0, 10, (PUBLIC,))
            batches = zip(x.split(250), y.split(250), strict=True)
            module = precondition(
                module, batches, damping=contestant.damping, sides=contestant.sides
            )
        optimizer = torch.optim.SGD(module.parameters(), lr=step)
        if contestant.dp_kfc:
            dp_kfc_steps(optimizer, module)
        private, private_optimizer, loader = PrivacyEngine().make_private_with_epsilon(
            module=module, optimizer=optimizer,
            data_loader=DataLoader(self.private, batch_size=BATCH_SIZE),
            target_epsilon=self.epsilon, target_delta=DELTA, epochs=self.epochs,
            max_grad_norm=self.radius,
        )  # fmt: skip
        for _ in range(self.epochs):
            for inputs, targets in loader:
                private_optimizer.zero_grad()
                loss: Any = nn.functional.cross_entropy(private(inputs), targets)
                loss.backward()
                private_optimizer.step()
        seconds = time.perf_counter() - start
        plain = fold(private) if contestant.probes else module
        with torch.no_grad():
            right = plain.eval()(self.test.images).argmax(1) == self.test.labels
        return 100 * float(right.float().mean()), seconds


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks kronecker")
    parser.add_argument("--data-dir", type=Path, required=True, help="MNIST, as mnist.npz")
    parser.add_argument("--network", choices=NETWORKS, default="mlp")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--radius", type=float, default=1.0, help="max_grad_norm")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS])
    options = parser.parse_args(arguments)
    digits, none = read_digits(options.data_dir), Images(torch.zeros(0), torch.zeros(0))
    base = Task(
        options.network, options.epsilon, options.epochs, options.radius, none, none, none
    )  # fmt: skip
    tuning, task = base.of(digits.held_out()), base.of(digits)
    table = {}
    for name in options.contestants:
        tried = {step: tuning.train(CONTESTANTS[name], step, 0)[0] for step in options.steps}
        best = max(tried, key=lambda step: tried[step])
        runs = [task.train(CONTESTANTS[name], best, 1 + seed) for seed in range(options.seeds)]
        accuracies, seconds = zip(*runs, strict=True)
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        table[name] = {
            "step": best, "mean": statistics.mean(accuracies), "deviation": spread,
            "accuracies": accuracies, "seconds": statistics.median(seconds), "tried": tried,
        }  # fmt: skip
        print(f"{name:19} step {best:5g}   {statistics.mean(accuracies):6.2f} ± {spread:.2f} %")
    return {"network": options.network, "epsilon": options.epsilon, "table": table}
