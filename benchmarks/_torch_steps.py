"""Training steps of PyTorch modules, plain and private, each in a process of its own.

`python -m benchmarks._torch_steps TASK CONTESTANT STEPS` prints seconds and peak memory as JSON.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

CONTESTANTS = ("plain", "privagrad", "opacus-hooks", "opacus-ghost")
FUSED = ("plain-fused", "privagrad-fused")


def compare(task: str, contestants: tuple[str, ...], turns: int, steps: int) -> dict[str, Any]:
    """Median step time and peak memory of each contestant, and their ratios to plain."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for _ in range(turns):
        for name in contestants:
            command = [sys.executable, "-m", "benchmarks._torch_steps", task, name, str(steps)]
            shown = subprocess.run(command, capture_output=True, text=True)
            if shown.returncode:
                results[name].append({"error": 1.0})
                print(f"{task}, {name}: {shown.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            else:
                results[name].append(json.loads(shown.stdout.strip().splitlines()[-1]))
    table: dict[str, Any] = {}
    for name, found in results.items():
        if any("error" in result for result in found):
            table[name] = {"error": True}
            continue
        pairs = list(zip(found, results["plain"], strict=True))
        table[name] = {
            "ms": 1e3 * statistics.median(r["seconds"] for r in found),
            "peak_mb": max(r["peak_mb"] for r in found),
            "time_ratio": statistics.median(a["seconds"] / b["seconds"] for a, b in pairs),
            "peak_ratio": statistics.median(a["peak_mb"] / b["peak_mb"] for a, b in pairs),
            "growth_ratio": statistics.median(
                max(a["growth_mb"], 1.0) / max(b["growth_mb"], 1.0) for a, b in pairs
            ),
        }
    return table


def show(title: str, table: dict[str, Any]) -> None:
    print(
        f"\n{title}\n{'':18}{'ms/step':>10}{'x plain':>9}{'peak MB':>9}{'x plain':>9}{'growth':>8}"
    )
    for name, row in table.items():
        if "error" in row:
            print(f"{name:18}{'does not run':>19}")
        else:
            print(
                f"{name:18}{row['ms']:10.1f}{row['time_ratio']:9.2f}{row['peak_mb']:9.0f}"
                f"{row['peak_ratio']:9.2f}{row['growth_ratio']:8.2f}"
            )


def build(task: str, contestant: str) -> tuple[Any, Any, Any, Callable[[Any, Any], Any]]:
    """Module, inputs, targets and the criterion of a task."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    opacus = contestant.startswith("opacus")
    if opacus:
        from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention

        lstm, gru, attention = DPLSTM, DPGRU, DPMultiheadAttention
    else:
        lstm, gru, attention = nn.LSTM, nn.GRU, nn.MultiheadAttention

    class First(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> Any:
            return self.layer(x)[0]

    class Attend(First):
        def forward(self, x: Any) -> Any:
            return self.layer(x, x, x, need_weights=False)[0]

    class LanguageModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8000, 120)
            self.lstm = lstm(120, 120, 2, batch_first=True)
            if contestant in FUSED:
                from privagrad.torch import LinearCrossEntropy

                self.decoder: nn.Module = LinearCrossEntropy(120, 8000)
            else:
                self.decoder = nn.Linear(120, 8000)

        def forward(self, x: Any, y: Any = None) -> Any:
            h = self.lstm(self.embedding(x))[0]
            return self.decoder(h, y) if contestant in FUSED else self.decoder(h)

    class Encoder(nn.Module):
        """Six layers of width 256; Opacus needs its own attention inside."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
                for _ in range(6)
            )
            if opacus:
                for layer in self.layers:
                    layer.self_attn = DPMultiheadAttention(256, 8, batch_first=True)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    words = torch.randint(0, 8000, (250, 35))
    if task == "language-model":
        return LanguageModel(), words, words.roll(-1, 1), nn.CrossEntropyLoss()
    tokens, sentences = torch.randn(64, 64, 256), torch.randn(250, 35, 120)
    modules: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
        "linear": lambda: (nn.Linear(256, 256), tokens),
        "linear-rows": lambda: (nn.Linear(1024, 1024), torch.randn(512, 1024)),
        "conv": lambda: (nn.Conv2d(32, 64, 3, padding=1), torch.randn(64, 32, 32, 32)),
        "embedding": lambda: (nn.Embedding(8000, 120), words),
        "lstm": lambda: (First(lstm(120, 120, batch_first=True)), sentences),
        "gru": lambda: (First(gru(120, 120, batch_first=True)), sentences),
        "mha": lambda: (Attend(attention(256, 8, batch_first=True)), tokens),
        "transformer": lambda: (Encoder(), tokens),
    }
    module, x = modules[task]()
    # What comes before a layer needs a gradient too, as it does in a model.
    if x.is_floating_point() and task != "transformer":
        x.requires_grad_()
    return module, x, torch.randn(len(x)), nn.MSELoss()


def steps_of(task: str, contestant: str) -> Callable[[], None]:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    module, x, y, criterion = build(task, contestant)
    parameters = list(module.parameters())
    optimizer: Any = torch.optim.Adagrad(parameters, lr=0.01)
    loader = DataLoader(TensorDataset(x.detach(), y), batch_size=len(x))
    common = {
        "module": module, "optimizer": optimizer, "data_loader": loader, "noise_multiplier": 1.0,
        "max_grad_norm": 1.0, "poisson_sampling": False,
    }  # fmt: skip
    ghost = contestant == "opacus-ghost"
    if contestant.startswith("privagrad"):
        from privagrad.torch import PrivacyEngine

        scales = [torch.rand_like(p) + 0.5 for p in parameters]
        module, optimizer, _ = PrivacyEngine().make_private(**common, ellipsoid=scales)
    elif contestant.startswith("opacus"):
        from opacus import PrivacyEngine as Opacus

        made = Opacus().make_private(
            **common, criterion=criterion, grad_sample_mode="ghost" if ghost else "hooks"
        )
        module, optimizer = made[:2]
        criterion = made[2] if ghost else criterion

    def step() -> None:
        optimizer.zero_grad()
        if contestant in FUSED:
            loss = module(x, y)
        elif task == "language-model":
            options = {"shape": y.shape} if ghost else {}
            loss = criterion(module(x).flatten(0, 1), y.flatten(), **options)
        else:
            # One value an example, which is what ghost clipping wants.
            loss = criterion(module(x).flatten(1).square().mean(1), y)
        loss.backward()
        optimizer.step()
        x.grad = None

    return step


def _measure(task: str, contestant: str, steps: int) -> dict[str, float]:
    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    step = steps_of(task, contestant)
    before = peak()
    step()
    step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": statistics.median(seconds),
        "peak_mb": peak(),
        "growth_mb": peak() - before,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(_measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
