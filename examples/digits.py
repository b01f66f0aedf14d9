"""A convolutional network on handwritten digits: train it, then look at the loss around it.

Usage: python examples/digits.py [--quick] [--out FOLDER]

The 1797 images of 8 x 8 pixels ship inside scikit-learn. Half a minute on two cores; ``--quick``
takes one batch, and a few steps of everything.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ritz
from ritz import data, training
from ritz.curvature import Risk, ggn, hessian
from ritz.measures import (
    fold_batch_norm,
    landscape,
    landscape2d,
    scaled,
    sharpness,
    temperature,
)

BATCH = 256


def network() -> nn.Module:
    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 8, 1), *block(8, 16, 2), *block(16, 16, 2), nn.Flatten(), nn.Linear(64, 10)
    )


def train(model: nn.Module, images: data.Split, test: data.Split, num_epochs: int, log: Path):
    return training.fit(
        model,
        images,
        test=test,
        num_epochs=num_epochs,
        batch_size=BATCH,
        optimizer="sgd",
        optimizer_settings={"lr": 0.05, "weight_decay": 5e-4},
        schedule="linear",
        average_from=num_epochs * 2 // 3 + 1,
        log=log,
        progress=True,
    )


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
    out.mkdir(parents=True, exist_ok=True)
    digits = data.load("digits")  # 1280 images, and 517 to test on
    images = digits.train.take(BATCH) if quick else digits.train
    model = network()
    trained = train(model, images, digits.test, 2 if quick else 30, out / "log.jsonl")
    train_data, test_data = images.tensors(), digits.test.tensors()
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

    results = {"hessian": top, "landscape": lines, "plane": plane, "sharpness": report}
    for name, result in results.items():
        ritz.save(result, out / f"{name}.safetensors")
    draw(found, lines, plane, out)
    print(trained)
    print(report)
    print(lines)
    print(f"test loss {test.loss():.4f}; {calibration}")
    print(f"largest eigenvalue, calibrated and folded: {float(largest.values[-1]):.4g}")
    print("written:", *sorted(map(str, out.iterdir())))


def draw(found, lines, plane, out: Path) -> None:
    curves = ritz.plots.training_curves({"digits": training.read_log(out / "log.jsonl")})
    ritz.plots.save_figure(curves[0].figure, out / "training.png", dpi=120)
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
