"""A convolutional network on handwritten digits: train it, then look at the loss around it.

Usage: python examples/digits.py [--quick] [--out FOLDER]

The 1797 images of 8 x 8 pixels ship inside scikit-learn. Half a minute on two cores; ``--quick``
takes one batch, and a few steps of everything.
"""

import argparse
from pathlib import Path

import torch
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ritz
from ritz.curvature import Risk, ggn, hessian
from ritz.measures import (
    fold_batch_norm,
    landscape,
    landscape2d,
    scaled,
    sharpness,
    temperature,
)

TRAIN = 1280  # images; the other 517 are held out
BATCH = 256
Data = tuple[Tensor, Tensor]


def digits(num_train: int) -> tuple[Data, Data]:
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    first, rest = order[:num_train], order[TRAIN:]
    return (images[first], labels[first]), (images[rest], labels[rest])


def network() -> nn.Module:
    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 8, 1), *block(8, 16, 2), *block(16, 16, 2), nn.Flatten(), nn.Linear(64, 10)
    )


def train(model: nn.Module, data: Data, num_epochs: int) -> None:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs)
    for _ in track(range(num_epochs), "training"):
        for chosen in torch.randperm(len(data[1]), generator=generator).split(BATCH):
            loss = cross_entropy(model(data[0][chosen]), data[1][chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()


def spectra(risk: Risk, num_steps: int, engine: str) -> dict[str, ritz.Spectrum]:
    found = {}
    for mode in ("eval", "train"):
        for name, matrix in (("Hessian", hessian), ("Gauss-Newton", ggn)):
            op = matrix(risk.with_batch_norm(mode), engine=engine)
            found[f"{name}, batch norm {mode}"] = ritz.lanczos(
                op, num_steps=num_steps, vectors=(name, mode) == ("Hessian", "eval"), progress=True
            )
    return found


def main(quick: bool, out: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # all is small: threads would wait for each other more than they work
    train_data, test_data = digits(BATCH if quick else TRAIN)
    model = network()
    train(model, train_data, num_epochs=2 if quick else 30)
    risk = Risk(model, cross_entropy, train_data, batch_size=BATCH)
    test = Risk(model, cross_entropy, test_data)

    engine = "eager" if quick else "auto"  # so few products do not pay for a trace
    found = spectra(risk, 8 if quick else 60, engine)
    top = found["Hessian, batch norm eval"]
    points = {"num_points": 3 if quick else 21, "test": test, "progress": True}
    lines = landscape(risk, top, distance=1.0, **points)
    names = ("first Ritz vector", "second Ritz vector")
    plane = landscape2d(
        risk, top.vectors[:, -1], top.vectors[:, -2], names=names, distance=1.0, **points
    )
    report = sharpness(
        risk, num_steps=5 if quick else 30, num_probes=2, engine=engine, progress=True
    )
    calibration = temperature(test)
    folded = Risk(fold_batch_norm(scaled(model, calibration)), cross_entropy, train_data)
    largest = ritz.lanczos(hessian(folded, engine=engine), largest=1, rtol=1e-2)

    out.mkdir(parents=True, exist_ok=True)
    results = {"hessian": top, "landscape": lines, "plane": plane, "sharpness": report}
    for name, result in results.items():
        ritz.save(result, out / f"{name}.safetensors")
    draw(found, lines, plane, out)
    print(report)
    print(lines)
    print(f"test loss {test.loss():.4f}; {calibration}")
    print(f"largest eigenvalue, calibrated and folded: {float(largest.values[-1]):.4g}")
    print("written:", *sorted(map(str, out.iterdir())))


def draw(found, lines, plane, out: Path) -> None:
    axes = ritz.plots.spectra(found, log=True)
    axes[0].figure.savefig(out / "spectra.png", dpi=120)
    figure, axes = ritz.plots.panels(2, 2, width=4.8, height=3.0)
    for ax, name in zip(axes, lines.names, strict=False):
        if ax is not axes[0]:
            ax.sharey(axes[0])
        ritz.plots.landscape(lines, direction=name, ax=ax, log=True)
        ax.set_title(f"Ritz vector of the {name} value", loc="left", fontsize="medium")
    ritz.plots.landscape2d(plane, ax=axes[-1])
    axes[-1].set_title("Ritz vectors of the two largest values", loc="left", fontsize="medium")
    ritz.plots.share_legend(figure)
    figure.savefig(out / "landscape.png", dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/digits"))
    arguments = parser.parse_args()
    main(arguments.quick, arguments.out)
