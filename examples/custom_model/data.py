"""data.py: samples to train on and samples to test on, each as inputs and labels."""

import torch


def spirals(arms=3, noise=0.1):
    seeded = torch.Generator().manual_seed(0)
    radius, arm = torch.rand(1500, generator=seeded), torch.randint(arms, (1500,), generator=seeded)
    angle = 4 * radius + 6.28 * arm / arms + noise * torch.randn(1500, generator=seeded)
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return (x[:1000], arm[:1000]), (x[1000:], arm[1000:])
