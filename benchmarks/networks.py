"""Networks for benchmarks of curvature, with random data of the right shapes."""

import torch
from torch import nn

import ritz

BATCH = 128


def mlp():
    """784-256-10 and 1024 samples."""
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.randn(1024, 784), 10


def cnn():
    """Two convolutions and 256 samples of 32 x 32."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2048, 10),
    )
    return model, torch.randn(256, 3, 32, 32), 10


def vgg16(samples=1024):
    """VGG-16 with CIFAR-100 shapes: 15,291,300 parameters."""
    return ritz.models.create("vgg16"), torch.randn(samples, 3, 32, 32), 100
