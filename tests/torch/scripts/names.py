"""A classifier of names by their characters."""

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CharNNClassifier(nn.Module):
    def __init__(self, vocab_size, embedding_size, hidden_size, output_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_size)
        self.lstm = DPLSTM(embedding_size, hidden_size, num_layers=1, batch_first=True)
        self.out_layer = nn.Linear(hidden_size, output_size)

    def forward(self, x, hidden=None):
        x = self.embedding(x)
        x, _ = self.lstm(x, hidden)
        x = x[:, -1, :]
        return self.out_layer(x)


def train(model, criterion, optimizer, train_loader):
    accs, losses = [], []
    for x, y in train_loader:
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        preds = logits.argmax(-1)
        if len(y):
            accs.append(float(preds.eq(y).float().mean()))
        losses.append(float(loss.detach()))
    return accs, losses


@torch.no_grad()
def test(model, test_loader):
    model.eval()
    right = 0
    for x, y in test_loader:
        right += int((model(x).argmax(-1) == y).sum())
    model.train()
    return right / len(test_loader.dataset)


def synthetic(n):
    labels = torch.arange(n) % 3
    return TensorDataset(torch.randint(0, 20, (n, 12)) + 20 * labels[:, None], labels)


def main(epochs, n):
    train_loader = DataLoader(synthetic(n), batch_size=n // 16, shuffle=True, drop_last=True)
    test_loader = DataLoader(synthetic(60), batch_size=60)
    model = CharNNClassifier(60, 16, 24, 3)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    privacy_engine = PrivacyEngine(accountant="prv", secure_mode=False)
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=1.0,
        max_grad_norm=1.5,
    )
    for _ in range(epochs):
        train(model, criterion, optimizer, train_loader)
        accuracy = test(model, test_loader)
        assert 0 <= accuracy <= 1
    epsilon = privacy_engine.get_epsilon(delta=1e-3)
    return optimizer.noise_multiplier, epsilon
