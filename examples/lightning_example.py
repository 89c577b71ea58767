"""Private training by Lightning's trainer.

pip install "privagrad[torch]" lightning && python examples/lightning_example.py

The network is made private before the trainer sees it. Keep to one device and to
accumulate_grad_batches=1: for large batches give make_private a max_physical_batch_size.
"""

from __future__ import annotations

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from privagrad.torch import PrivacyEngine

DELTA = 1e-5


class Patients(lightning.LightningModule):
    """Tells who is ill; the network and its optimizer are private already."""

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.network, self.optimizer = network, optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer

    def training_step(self, batch: list[Tensor]) -> Tensor:
        records, ill = batch
        return F.cross_entropy(self.network(records), ill)

    def validation_step(self, batch: list[Tensor]) -> None:
        records, ill = batch
        right = (self.network(records).argmax(1) == ill).float().mean()
        self.log("accuracy", right, batch_size=len(ill))


def main(epochs: int = 10) -> tuple[float, float]:
    """(accuracy, epsilon)."""
    records, ill = make_classification(5000, 20, n_informative=8, class_sep=1.5, random_state=0)
    data = TensorDataset(torch.tensor(records).float() / 4, torch.tensor(ill))
    training, others = random_split(data, [4000, 1000])

    network = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2))
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=network,
        optimizer=torch.optim.Adam(network.parameters(), lr=0.01),
        data_loader=DataLoader(training, batch_size=200),
        target_epsilon=2.0,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=1.0,
        ellipsoid="pagan",
    )
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Patients(private, optimizer), loader, DataLoader(others, batch_size=500))
    return float(trainer.callback_metrics["accuracy"]), engine.get_epsilon(DELTA)


if __name__ == "__main__":
    accuracy, epsilon = main()
    print(f"accuracy {accuracy:.3f} at epsilon {epsilon:.2f}, delta {DELTA:g}")
