"""A convolutional classifier of small images."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from opacus import PrivacyEngine
from opacus.validators import ModuleValidator
from torch.utils.data import DataLoader, TensorDataset


class SampleConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 8, 2, padding=3)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 4, 2)
        self.fc1 = nn.Linear(16 * 4 * 4, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        x = F.max_pool2d(x, 2, 1)
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2, 1)
        x = x.view(-1, 16 * 4 * 4)
        x = F.relu(self.fc1(x))
        return self.fc2(x)


def train(model, train_loader, optimizer, criterion):
    model.train()
    losses = []
    for data, target in train_loader:
        optimizer.zero_grad()
        output = model(data)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test(model, test_loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    return correct / len(test_loader.dataset)


def synthetic(n):
    labels = torch.arange(n) % 10
    images = 0.3 * torch.rand(n, 1, 28, 28)
    for image, label in zip(images, labels, strict=True):
        image[0, 2 * int(label) : 2 * int(label) + 6] += 1.0
    return TensorDataset(images, labels)


def main(epochs, n):
    delta = 1e-3
    train_loader = DataLoader(synthetic(n), batch_size=n // 8, shuffle=True)
    test_loader = DataLoader(synthetic(64), batch_size=64)

    model = SampleConvNet()
    errors = ModuleValidator.validate(model, strict=False)
    assert len(errors) > 0
    model = ModuleValidator.fix(model)
    ModuleValidator.validate(model, strict=True)

    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    privacy_engine = PrivacyEngine(accountant="prv")
    model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        epochs=epochs,
        target_epsilon=4.0,
        target_delta=delta,
        max_grad_norm=1.0,
    )
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    criterion = nn.CrossEntropyLoss()
    for _ in range(epochs):
        train(model, train_loader, optimizer, criterion)
        scheduler.step()
    accuracy = test(model, test_loader)
    assert 0 <= accuracy <= 1
    return optimizer.noise_multiplier, privacy_engine.get_epsilon(delta)
