"""Networks for benchmarks of curvature, with random data of the right shapes."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

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


def vgg16_model(num_classes=100):
    """VGG-16 as used on CIFAR: 15,291,300 parameters for 100 classes."""
    widths = [64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0]
    layers, channels = [], 3
    for width in widths:
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(512, 512),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(512, 512),
        nn.ReLU(inplace=True),
        nn.Linear(512, num_classes),
    )


def vgg16(samples=1024):
    """VGG-16 with CIFAR-100 shapes."""
    return vgg16_model(), torch.randn(samples, 3, 32, 32), 100


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and around a shortcut."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """``(batch, length, width)`` to the same."""
        parts = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder with tied embeddings: 124 million parameters as it is."""

    def __init__(self, vocabulary=50257, length=1024, width=768, depth=12, heads=12):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = (2 * depth) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(self, tokens):
        """Logits ``(batch, vocabulary, length)`` of the next token."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return (self.norm(x) @ self.tokens.weight.T).transpose(1, 2)
