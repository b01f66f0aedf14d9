"""GadamX with iterate averaging against AdamW, on digits with wrong labels.

Usage: python examples/optimizer.py [--quick] [--out FOLDER]

One training label in five is wrong, so a network that fits the training data memorises errors.
GadamX averages its weights over the second half of the run. The training loop is plain PyTorch:
only the optimiser and the block that applies the average are particular to ritz. Both optimisers
shrink the weights by about the same factor per step. This is one seed, and the settings are not
tuned; ``ritz study averaging`` compares more optimisers on five seeds. Takes about 20 seconds
on one core.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import ritz


def noisy_digits() -> tuple[DataLoader, tuple[Tensor, Tensor]]:
    data = ritz.data.load("digits")
    inputs, labels = data.train.tensors()
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(len(labels), generator=generator) < 0.2
    labels[wrong] = torch.randint(10, (int(wrong.sum()),), generator=generator)
    dataset = TensorDataset(inputs, labels)
    return DataLoader(dataset, 64, shuffle=True, generator=generator), data.test.tensors()


def accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).double().mean())


def train(optimizer_name: str, num_epochs: int) -> tuple[nn.Module, dict[str, list[float]]]:
    loader, test = noisy_digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    if optimizer_name == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.08)
    else:
        # Average once per epoch, from the middle of the run. Both numbers count optimiser steps.
        start = num_epochs // 2 * len(loader) + 1
        optimizer = ritz.optim.GadamX(
            model.parameters(), lr=0.05, weight_decay=5e-3, start=start, interval=len(loader)
        )
    average = getattr(optimizer, "average", None)
    history: dict[str, list[float]] = {"last iterate": [], "average": []}
    for _ in range(num_epochs):
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        history["last iterate"].append(accuracy(model, test))
        if average is not None and average.count:
            # Inside the block the model has the averaged weights; afterwards its own again.
            with average.applied(model):
                history["average"].append(accuracy(model, test))
    if average is not None:
        average.copy_to(model)
    return model, history


def main(num_epochs: int, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    figure, (ax,) = ritz.plots.panels()
    for name in ("AdamW", "GadamX"):
        model, history = train(name, num_epochs)
        ritz.training.save_weights(model, out / f"{name.lower()}.safetensors")
        for kind, values in history.items():
            if values:
                print(f"{name}, {kind}: test accuracy {values[-1]:.1%} after {num_epochs} epochs")
                epochs = range(num_epochs - len(values) + 1, num_epochs + 1)
                ax.plot(epochs, values, label=f"{name}, {kind}")
    ax.set(xlabel="epoch", ylabel="test accuracy")
    ax.legend(frameon=False)
    figure.savefig(out / "accuracy.png", dpi=150)
    print("written:", *sorted(map(str, out.iterdir())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four epochs")
    parser.add_argument("--out", type=Path, default=Path("out/optimizer"))
    arguments = parser.parse_args()
    main(4 if arguments.quick else 60, arguments.out)
