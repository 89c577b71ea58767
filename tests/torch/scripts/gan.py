"""A generator of small images; its discriminator sees each real image beside a generated one."""

import torch
import torch.nn as nn
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

NOISE = 6


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1, bias=False),
            nn.GroupNorm(4, 8),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 1, 4, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, *images):
        found = [self.main(own).flatten() for own in images]
        return found[0] if len(found) == 1 else tuple(found)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 8, 4, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


def main(epochs, n):
    images = torch.rand(n, 1, 8, 8) * 2 - 1
    loader = DataLoader(TensorDataset(images), batch_size=n // 8)
    net_d, net_g = Discriminator(), Generator()
    criterion = nn.BCELoss()
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    privacy_engine = PrivacyEngine(secure_mode=False)
    net_d, optimizer_d, loader = privacy_engine.make_private(
        module=net_d,
        optimizer=optimizer_d,
        data_loader=loader,
        noise_multiplier=1.2,
        max_grad_norm=1.0,
    )
    for _ in range(epochs):
        for (real,) in loader:
            count = real.size(0)
            optimizer_d.zero_grad(set_to_none=True)
            fake = net_g(torch.randn(count, NOISE, 1, 1))
            of_real, of_fake = net_d(real, fake.detach())
            error = criterion(of_real, torch.ones(count)) + criterion(of_fake, torch.zeros(count))
            error.backward()
            optimizer_d.step()
            optimizer_d.zero_grad(set_to_none=True)

            optimizer_g.zero_grad()
            criterion(net_d(fake), torch.ones(count)).backward()
            optimizer_g.step()
    return optimizer_d.noise_multiplier, privacy_engine.get_epsilon(delta=1e-3)
