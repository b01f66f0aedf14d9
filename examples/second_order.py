"""Second-order optimisers against the best of 18 SGD settings, on digits.

Usage: python examples/second_order.py [--quick] [--out FOLDER]

The training loop is plain PyTorch. An optimiser that needs curvature takes two more lines, which
say when and on which batch it is measured. Every method has the same network, batches and initial
weights; SGD is run with six learning rates and three momenta, and the pair with the lowest final
training loss, averaged over the seeds, is compared. Times are processor times. The second-order
settings were chosen on another seed, from a handful. Takes about three minutes on one core.
"""

import argparse
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ritz
from ritz.optim import CurvatureOptimizer, HessianFree, LanczosNewton, SpectralSGD

RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
MOMENTA = (0.0, 0.5, 0.9)
Make = Callable[[Any], torch.optim.Optimizer]
# The optimiser, and its batch size: the matrix of a small batch is too noisy to be inverted.
SECOND_ORDER: dict[str, tuple[Make, int]] = {
    "LanczosNewton": (
        lambda p: LanczosNewton(p, 0.5, delta=0.1, matrix="ggn", start="gradient"), 128
    ),
    "LanczosNewton, every 5": (
        lambda p: LanczosNewton(p, 0.3, delta=0.3, matrix="ggn", interval=5), 64
    ),
    "HessianFree": (lambda p: HessianFree(p, delta=1.0), 640),
    # A third of the rate: batches are sharper than the one that is measured, and sharpness grows.
    "SpectralSGD": (
        lambda p: SpectralSGD(p, 0.3, interval=20, nesterov=True, matrix="ggn"), 128
    ),
}  # fmt: skip


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def train(
    make: Make, batch_size: int, num_epochs: int, seed: int
) -> tuple[nn.Module, list[float], list[float]]:
    """Return the trained network, the training loss after each epoch, and the processor times."""
    data = ritz.data.load("digits")
    model, generator = network(seed), torch.Generator().manual_seed(seed)
    optimizer = make(model.parameters())
    losses, times, spent, step = [], [], 0.0, 0
    for _ in range(num_epochs):
        begin = time.process_time()
        for inputs, labels in data.train.batches(batch_size, generator=generator):
            if isinstance(optimizer, CurvatureOptimizer) and optimizer.curvature_due(step):
                optimizer.update_curvature(ritz.Risk(model, cross_entropy, [(inputs, labels)]))
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            step += 1
        spent += time.process_time() - begin
        losses.append(score(model, data.train.tensors())[0])
        times.append(spent)
    return model, losses, times


@torch.no_grad()
def score(model: nn.Module, samples: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return mean loss and share of wrong answers."""
    outputs, labels = model(samples[0]), samples[1]
    wrong = (outputs.argmax(1) != labels).double().mean()
    return float(cross_entropy(outputs, labels)), float(wrong)


def best_sgd(num_epochs: int, seeds: range) -> tuple[str, Make]:
    """Return the name and the maker of the SGD setting with the lowest mean training loss."""
    found: dict[tuple[float, float], float] = {}
    for rate, momentum in product(RATES, MOMENTA):
        last = [train(sgd(rate, momentum), 64, num_epochs, seed)[1][-1] for seed in seeds]
        mean = sum(last) / len(last)
        found[rate, momentum] = mean if mean == mean else float("inf")  # diverged: NaN
    rate, momentum = min(found, key=lambda pair: found[pair])
    return f"SGD, lr {rate:g}, momentum {momentum:g}", sgd(rate, momentum)


def sgd(rate: float, momentum: float) -> Make:
    return lambda p: torch.optim.SGD(p, rate, momentum=momentum)


def main(num_epochs: int, num_seeds: int, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    seeds = range(num_seeds)
    test = ritz.data.load("digits").test.tensors()
    name, make = best_sgd(num_epochs, seeds)
    figure, axes = ritz.plots.panels(1, 2, width=5.0)
    print(f"{num_epochs} epochs; means over seeds: {num_seeds}; first row: the best of "
          f"{len(RATES)} x {len(MOMENTA)} settings of SGD")  # fmt: skip
    print(f"{'':28}{'training loss':>14}{'test error':>12}{'seconds':>9}")
    reference: list[float] = []
    for label, (maker, size) in ({name: (make, 64)} | SECOND_ORDER).items():
        runs = [train(maker, size, num_epochs, seed) for seed in seeds]
        losses, times = (torch.tensor([run[i] for run in runs]).mean(0) for i in (1, 2))
        wrong = sum(score(model, test)[1] for model, _, _ in runs) / num_seeds
        print(f"{label:28}{losses[-1]:14.5f}{wrong:12.2%}{times[-1]:9.2f}", end="")
        if reference:
            print(verdict(losses.tolist(), times.tolist(), reference), end="")
        else:
            reference = [float(losses[-1]), float(times[-1])]
        print()
        axes[0].plot(range(1, num_epochs + 1), losses, label=label)
        axes[1].plot(times, losses)
        file = out / (label.split(",")[0].lower() + f"_{size}.safetensors")
        ritz.training.save_weights(runs[0][0], file)
    axes[0].set(xlabel="epoch", ylabel="training loss", yscale="log")
    axes[1].set(xlabel="processor time (s)", xscale="log", yscale="log")
    axes[0].legend(frameon=False, fontsize="small")
    figure.savefig(out / "losses.png", dpi=150)
    print("written:", *sorted(map(str, out.iterdir())))


def verdict(losses: list[float], times: list[float], reference: list[float]) -> str:
    """Return whether a method is better than SGD at the same epoch and at the same time."""
    loss, spent = reference
    within = [value for value, used in zip(losses, times, strict=True) if used <= spent]
    epoch = "better" if losses[-1] < loss else "not better"
    clock = "better" if within and within[-1] < loss else "not better"
    return f"   {epoch} per epoch, {clock} per second"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two epochs and one seed")
    parser.add_argument("--out", type=Path, default=Path("out/second_order"))
    arguments = parser.parse_args()
    main(*((2, 1) if arguments.quick else (15, 3)), arguments.out)
