"""Spectra, sharpness and loss landscape of a small network trained on handwritten digits."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ritz import data, measures, plots
from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress
from ritz.curvature import Risk, curvature_operator, hessian
from ritz.curvature._shared import ENGINES, EngineName
from ritz.plots._shared import style
from ritz.spectra import Spectrum, eigenpairs, lanczos
from ritz.studies._protocol import StudyResult, check_minimums, record, seeded
from ritz.studies._training import fit_whole
from ritz.training import TrainingResult

MATRICES: dict[str, tuple[Any, Any]] = {
    "Hessian, batch norm eval": ("hessian", "eval"),
    "Gauss-Newton, batch norm eval": ("ggn", "eval"),
    "Hessian, batch norm train": ("hessian", "train"),
    "Gauss-Newton, batch norm train": ("ggn", "train"),
}
FIRST = next(iter(MATRICES))  # its Ritz vectors are the directions of the landscape
PLANE = ("first Ritz vector", "second Ritz vector")


@record
class Config:
    """Training of the network, and cost of the measures.

    Attributes:
        num_samples: Training images, of 1280; 517 others are test images.
        num_epochs: Epochs; the last third is averaged.
        batch_size: Batch size, in training and in measuring.
        num_steps: Lanczos steps for the spectra.
        sharpness_steps: Lanczos steps per probe for the sharpness.
        num_probes: Probes for the sharpness.
        num_points: Points per line, and per side of the plane.
        engine: Engine of the products. Tracing is slower for few products.
        seed: Seed of the weights, the order of the samples and every probe.
    """

    num_samples: int = 1280
    num_epochs: int = 30
    batch_size: int = 256
    num_steps: int = 60
    sharpness_steps: int = 30
    num_probes: int = 3
    num_points: int = 21
    engine: EngineName = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("num_samples", self.num_samples, high=1280)
        check_minimums(self, num_epochs=2, batch_size=1, num_steps=3, sharpness_steps=1)
        check_minimums(self, num_probes=1, num_points=2)
        check_choice("engine", self.engine, ENGINES)


# One batch, and a few steps of everything.
QUICK: dict[str, Any] = {
    "num_samples": 256,
    "num_epochs": 2,
    "num_steps": 8,
    "sharpness_steps": 5,
    "num_points": 3,
    "engine": "eager",
}


@record
class Result(StudyResult[Config]):
    """A network and the loss around it.

    Attributes:
        training: Result of the training.
        spectra: Spectra of the Hessian and the Gauss-Newton matrix in both batch-norm modes.
        landscape: Loss and accuracy along three Ritz vectors.
        plane: The same on the plane of the first two.
        sharpness: Norms, trace and masses of all four matrices.
        temperature: Temperature that calibrates the network on the test data.
        folded: Largest eigenvalue of the Hessian of the calibrated network without batch norm.
    """

    training: TrainingResult
    spectra: dict[str, Spectrum]
    landscape: measures.Landscape
    plane: measures.Landscape2d
    sharpness: measures.Sharpness
    temperature: measures.Temperature
    folded: float

    def __str__(self) -> str:
        calibrated = (
            f"Calibration: {self.temperature}\n"
            f"Largest eigenvalue after calibration and batch-norm folding: {self.folded:.4g}"
        )
        parts = (self.training, self.sharpness, self.landscape, calibrated)
        return "\n\n".join(map(str, parts))


def network() -> nn.Module:
    """Return three convolutions with batch norm and a linear layer: 4258 parameters."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 8, 1), *block(8, 16, 2), *block(16, 16, 2), nn.Flatten(), nn.Linear(64, 10)
    )


def run(
    config: Config, *, device: torch.device | str = "cpu", progress: bool | Progress = False
) -> Result:
    """Return the training of the network, and the spectra, sharpness and landscape at its end."""
    digits: Any = data.load("digits")
    # The first samples, so that smaller configurations measure a subset.
    images = digits.train.take(config.num_samples)
    model, trained = _train(config, images, digits.test, device, progress)
    risk = Risk(model, cross_entropy, images.tensors(), batch_size=config.batch_size)
    test = Risk(model, cross_entropy, digits.test.tensors())
    spectra = {
        name: lanczos(
            curvature_operator(risk.with_batch_norm(mode), kind, engine=config.engine),
            num_steps=config.num_steps,
            # Only these vectors are needed; they take num_steps times the size of the weights.
            vectors=name == FIRST,
            generator=seeded(config.seed),
            progress=progress,
        )
        for name, (kind, mode) in MATRICES.items()
    }
    around: Any = {"num_points": config.num_points, "test": test, "progress": progress}
    vectors: Any = spectra[FIRST].vectors
    # Ritz values ascend: the last two columns belong to the largest two.
    plane = measures.landscape2d(risk, vectors[:, -1], vectors[:, -2], names=PLANE, **around)
    lines = measures.landscape(risk, spectra[FIRST], **around)
    report = measures.sharpness(
        risk,
        num_steps=config.sharpness_steps,
        num_probes=config.num_probes,
        engine=config.engine,
        generator=seeded(config.seed),
        progress=progress,
    )
    calibration = measures.temperature(test)
    # Batch norm and the temperature are affine, so they fold into the convolutions.
    affine = measures.fold_batch_norm(measures.scaled(model, calibration))
    op = hessian(Risk(affine, cross_entropy, images.tensors()), engine=config.engine)
    # Sharpness depends on the scale of the weights, which batch norm leaves free: after folding
    # and calibration the eigenvalue can be compared between networks.
    drawn: Any = {"vectors": False, "generator": seeded(config.seed)}
    largest = eigenpairs(op, largest=1, rtol=1e-2, **drawn).values[-1]
    return Result(
        config=config,
        training=trained,
        spectra=spectra,
        landscape=lines,
        plane=plane,
        sharpness=report,
        temperature=calibration,
        folded=float(largest),
    )


def _train(
    config: Config, images: Any, test: Any, device: torch.device | str, progress: bool | Progress
) -> tuple[nn.Module, TrainingResult]:
    # Layers draw from the global generator, which the user may have seeded.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        model = network().to(device)
    return model, fit_whole(
        model,
        images,
        test=test,
        num_epochs=config.num_epochs,
        batch_size=config.batch_size,
        optimizer="sgd",
        optimizer_settings={"lr": 0.05, "weight_decay": 5e-4},
        schedule="linear",
        # The last third of the epochs.
        average_from=config.num_epochs * 2 // 3 + 1,
        seed=config.seed,
        progress=progress,
    )


def figures(result: Result) -> dict[str, style.Figure]:
    """Draw the training curves, the spectra and the landscapes."""
    # Three lines and the plane, on one scale of the loss.
    drawing, axes = plots.panels(2, 2, width=4.8, height=3.0)
    for ax, name in zip(axes, result.landscape.names, strict=False):
        if ax is not axes[0]:
            ax.sharey(axes[0])
        plots.landscape(result.landscape, direction=name, ax=ax, log=True)
        style.set_title(ax, style.direction_title(name))
    plots.landscape2d(result.plane, ax=axes[-1])
    style.set_title(axes[-1], "Ritz vectors of the two largest values")
    style.share_legend(drawing)
    curves = plots.plot(result.training)
    return {"training": curves, "spectra": figure(result), "landscape": drawing}


def figure(result: Result) -> style.Figure:
    """Draw the spectra."""
    # Files do not keep the order.
    return plots.plot({name: result.spectra[name] for name in MATRICES})
