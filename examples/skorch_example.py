"""Private training in scikit-learn's manner, by skorch.

pip install "privagrad[torch]" skorch && python examples/skorch_example.py

skorch knows the rows only when fit is called: the network becomes private then.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import make_classification
from sklearn.model_selection import train_test_split
from skorch import NeuralNetClassifier
from torch import nn

from privagrad.torch import PrivacyEngine

DELTA = 1e-5


class PrivateClassifier(NeuralNetClassifier):
    """A skorch classifier whose `fit` costs (epsilon, delta) of its rows' privacy."""

    def __init__(self, *args: Any, epsilon: float = 2.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.epsilon = epsilon

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        loader = super().get_iterator(dataset, training=training)
        if not training:
            return loader
        self.engine_ = PrivacyEngine()
        self.module_, self.optimizer_, loader = self.engine_.make_private_with_epsilon(
            module=self.module_,
            optimizer=self.optimizer_,
            data_loader=loader,
            target_epsilon=self.epsilon,
            target_delta=DELTA,
            epochs=self.max_epochs,
            max_grad_norm=1.0,
            ellipsoid="pagan",
        )
        return loader


def main(epochs: int = 10) -> tuple[float, float]:
    """(accuracy, epsilon)."""
    records, ill = make_classification(5000, 20, n_informative=8, class_sep=1.5, random_state=0)
    records = (records / 4).astype(np.float32)
    training, others, ill_training, ill_others = train_test_split(
        records, ill, test_size=1000, random_state=0
    )
    classifier = PrivateClassifier(
        nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2)),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=0.01,
        batch_size=200,
        max_epochs=epochs,
        epsilon=2.0,
        train_split=None,  # the scores of rows set aside would not be private
        verbose=0,
    )
    classifier.fit(training, ill_training)
    return classifier.score(others, ill_others), classifier.engine_.get_epsilon(DELTA)


if __name__ == "__main__":
    accuracy, epsilon = main()
    print(f"accuracy {accuracy:.3f} at epsilon {epsilon:.2f}, delta {DELTA:g}")
