"""A classifier of short texts by the mean of their words' embeddings."""

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

MOST_WORDS = 26


class SampleNet(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, 16)
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.fc1 = nn.Linear(16, 2)

    def forward(self, x):
        x = self.emb(x)
        x = x.transpose(1, 2)
        x = self.pool(x).squeeze(2)
        return self.fc1(x)


def binary_accuracy(preds, y):
    correct = (y.long() == torch.argmax(preds, dim=1)).float()
    return correct.sum() / len(correct)


def padded_collate(batch):
    # To one length: the mean over words would else depend on the longest text of the batch.
    sequences = pad_sequence([text for text, _ in batch], batch_first=True)
    sequences = nn.functional.pad(sequences, (0, MOST_WORDS - sequences.shape[1]))
    labels = torch.stack([label for _, label in batch])
    return sequences, labels


def train(model, train_loader, optimizer, max_physical_batch_size):
    criterion = nn.CrossEntropyLoss()
    losses, accuracies = [], []
    model.train()
    with BatchMemoryManager(
        data_loader=train_loader,
        max_physical_batch_size=max_physical_batch_size,
        optimizer=optimizer,
    ) as memory_safe_data_loader:
        for data, label in memory_safe_data_loader:
            optimizer.zero_grad()
            predictions = model(data)
            loss = criterion(predictions, label)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(label):
                accuracies.append(binary_accuracy(predictions, label).item())
    return np.mean(losses), np.mean(accuracies)


def evaluate(model, test_loader):
    model.eval()
    accuracies = []
    with torch.no_grad():
        for data, label in test_loader:
            accuracies.append(binary_accuracy(model(data), label).item())
    model.train()
    return np.mean(accuracies)


def synthetic(n):
    rows = []
    for i in range(n):
        label = torch.tensor(i % 2)
        words = torch.randint(1, 50, (20 + i % 7,)) + 50 * (label * torch.rand(1) > 0.3)
        rows.append((words, label))
    return rows


def main(epochs, n):
    train_loader = DataLoader(
        synthetic(n), batch_size=n // 10, collate_fn=padded_collate, num_workers=0
    )
    test_loader = DataLoader(synthetic(50), batch_size=25, collate_fn=padded_collate)
    model = SampleNet(vocab_size=100)
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    privacy_engine = PrivacyEngine(accountant="prv", secure_mode=False)
    model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        target_epsilon=6.0,
        target_delta=1e-3,
        epochs=epochs,
        max_grad_norm=1.0,
        poisson_sampling=True,
    )
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for _ in range(epochs):
        train(model, train_loader, optimizer, max_physical_batch_size=16)
        scheduler.step()
    accuracy = evaluate(model, test_loader)
    assert 0 <= accuracy <= 1
    return optimizer.noise_multiplier, privacy_engine.get_epsilon(delta=1e-3)
