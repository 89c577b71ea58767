"""Small colour images in large batches, each tensor bounded by itself, with a checkpoint."""

import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader, TensorDataset


def convnet(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 8, kernel_size=3, stride=1, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(kernel_size=2, stride=2),
        nn.Conv2d(8, 16, kernel_size=3, stride=1, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(start_dim=1, end_dim=-1),
        nn.Linear(16, num_classes, bias=True),
    )


def accuracy(preds, labels):
    return (preds == labels).mean()


def train(model, train_loader, optimizer):
    model.train()
    criterion = nn.CrossEntropyLoss()
    losses, top1_acc = [], []
    with BatchMemoryManager(
        data_loader=train_loader, max_physical_batch_size=16, optimizer=optimizer
    ) as memory_safe_data_loader:
        for images, target in memory_safe_data_loader:
            optimizer.zero_grad()
            output = model(images)
            loss = criterion(output, target)
            preds = np.argmax(output.detach().cpu().numpy(), axis=1)
            labels = target.detach().cpu().numpy()
            if len(labels):
                top1_acc.append(accuracy(preds, labels))
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
    return np.mean(losses), np.mean(top1_acc)


def main(epochs, n):
    labels = torch.arange(n) % 4
    images = torch.rand(n, 3, 8, 8) + labels[:, None, None, None] * torch.rand(3, 1, 1)
    train_loader = DataLoader(TensorDataset(images, labels), batch_size=n // 6, shuffle=True)
    model = convnet(num_classes=4)
    optimizer = optim.RMSprop(model.parameters(), lr=0.002)
    privacy_engine = PrivacyEngine(accountant="prv", secure_mode=False)
    n_layers = len([p for p in model.parameters() if p.requires_grad])
    max_grad_norm = [1.2 / np.sqrt(n_layers)] * n_layers
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=1.5,
        max_grad_norm=max_grad_norm,
        clipping="per_layer",
    )
    schedule = optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.1)
    for _ in range(epochs):
        train(model, train_loader, optimizer)
        schedule.step()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint.pt"
        privacy_engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
        privacy_engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
    return optimizer.noise_multiplier, privacy_engine.get_epsilon(delta=1e-3)
