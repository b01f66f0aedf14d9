"""All that ritz says of a small convolutional network that it has trained on handwritten digits."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ritz import data, training
from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress
from ritz._core.storage import storable
from ritz.curvature import Risk, curvature_operator, hessian
from ritz.curvature._shared import ENGINES, EngineName
from ritz.measures import (
    Landscape,
    Landscape2d,
    Sharpness,
    Temperature,
    fold_batch_norm,
    landscape,
    landscape2d,
    scaled,
    sharpness,
    temperature,
)
from ritz.spectra import Spectrum, eigenpairs, lanczos
from ritz.studies._protocol import versions
from ritz.training import TrainingResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MATRICES: dict[str, tuple[Any, Any]] = {
    "Hessian, batch norm eval": ("hessian", "eval"),
    "Gauss-Newton, batch norm eval": ("ggn", "eval"),
    "Hessian, batch norm train": ("hessian", "train"),
    "Gauss-Newton, batch norm train": ("ggn", "train"),
}
FIRST = next(iter(MATRICES))  # whose Ritz vectors are followed
PLANE = ("first Ritz vector", "second Ritz vector")


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How the network is trained and looked at.

    Attributes:
        num_samples: Of the 1280 images to train on; 517 others are there to test on.
        num_epochs: Of training, the last third of them averaged.
        batch_size: Samples a batch, in training and in measuring.
        num_steps: Lanczos steps, for the spectra.
        sharpness_steps: Lanczos steps a probe, for the sharpness.
        num_probes: Probes for it.
        num_points: Along each line, and each side of the plane.
        engine: Of the products; a few do not pay for a trace.
        seed: Of the weights, the order of the samples and every probe.
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
        check_count("num_epochs", self.num_epochs, low=2)
        check_count("batch_size", self.batch_size)
        check_count("num_steps", self.num_steps, low=3)
        check_count("sharpness_steps", self.sharpness_steps)
        check_count("num_probes", self.num_probes)
        check_count("num_points", self.num_points, low=2)
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


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A network and the loss around it.

    Attributes:
        config: What was asked for.
        versions: What computed it.
        training: How training went.
        spectra: Of the Hessian and the Gauss-Newton matrix in both modes of batch norm, by name.
        landscape: Loss and accuracy along three Ritz vectors.
        plane: The same on the plane of the first two.
        sharpness: Norms, trace and masses of all four matrices.
        temperature: What calibrates the network on the test data.
        folded: Largest eigenvalue of the Hessian of the calibrated network without batch norm.
    """

    config: Config
    versions: dict[str, str]
    training: TrainingResult
    spectra: dict[str, Spectrum]
    landscape: Landscape
    plane: Landscape2d
    sharpness: Sharpness
    temperature: Temperature
    folded: float

    def __str__(self) -> str:
        last = f"largest eigenvalue, calibrated and without batch norm: {self.folded:.4g}"
        parts = (self.training, self.sharpness, self.landscape, self.temperature, last)
        return "\n".join(map(str, parts))


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
    images = digits.train.take(config.num_samples)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        model = network().to(device)
    trained = _train(model, images, digits.test, config, progress)
    risk = Risk(model, cross_entropy, images.tensors(), batch_size=config.batch_size)
    test = Risk(model, cross_entropy, digits.test.tensors())
    spectra = _spectra(risk, config, progress)
    lines, plane = _landscapes(risk, test, spectra[FIRST], config, progress)
    report = sharpness(
        risk,
        num_steps=config.sharpness_steps,
        num_probes=config.num_probes,
        engine=config.engine,
        generator=_generator(config),
        progress=progress,
    )
    calibration = temperature(test)
    return Result(
        config=config,
        versions=versions(),
        training=trained,
        spectra=spectra,
        landscape=lines,
        plane=plane,
        sharpness=report,
        temperature=calibration,
        folded=_folded(model, calibration, images.tensors(), config),
    )


def figures(result: Result) -> dict[str, "Figure"]:
    """Draw the course of training, the spectra, and the landscapes."""
    from ritz import plots
    from ritz.plots._shared import direction_title, share_legend

    records = _records(result.training)
    drawn: dict[str, Any] = {
        "training": plots.training_curves({"digits": records})[0].figure,
        "spectra": figure(result),
    }
    drawing, axes = plots.panels(2, 2, width=4.8, height=3.0)
    for ax, name in zip(axes, result.landscape.names, strict=False):
        if ax is not axes[0]:
            ax.sharey(axes[0])
        plots.landscape(result.landscape, direction=name, ax=ax, log=True)
        ax.set_title(direction_title(name), loc="left", fontsize="medium")
    plots.landscape2d(result.plane, ax=axes[-1])
    axes[-1].set_title("Ritz vectors of the two largest values", loc="left", fontsize="medium")
    share_legend(drawing)
    return drawn | {"landscape": drawing}


def figure(result: Result) -> "Figure":
    """Draw the spectra."""
    from ritz import plots

    ordered = {name: result.spectra[name] for name in MATRICES}  # which a file need not be
    drawing: Any = plots.spectra(ordered, log=True)[0].figure
    return cast("Figure", drawing)


def _train(
    model: nn.Module, images: Any, test: Any, config: Config, progress: bool | Progress
) -> TrainingResult:
    return training.fit(
        model,
        images,
        test=test,
        num_epochs=config.num_epochs,
        batch_size=config.batch_size,
        optimizer="sgd",
        optimizer_settings={"lr": 0.05, "weight_decay": 5e-4},
        schedule="linear",
        average_from=config.num_epochs * 2 // 3 + 1,
        seed=config.seed,
        progress=progress,
    )


def _spectra(risk: Risk, config: Config, progress: bool | Progress) -> dict[str, Spectrum]:
    return {
        name: lanczos(
            curvature_operator(risk.with_batch_norm(mode), kind, engine=config.engine),
            num_steps=config.num_steps,
            vectors=name == FIRST,
            generator=_generator(config),
            progress=progress,
        )
        for name, (kind, mode) in MATRICES.items()
    }


def _landscapes(
    risk: Risk, test: Risk, spectrum: Spectrum, config: Config, progress: bool | Progress
) -> tuple[Landscape, Landscape2d]:
    common: Any = {"num_points": config.num_points, "test": test, "progress": progress}
    vectors: Any = spectrum.vectors
    plane = landscape2d(risk, vectors[:, -1], vectors[:, -2], names=PLANE, **common)
    return landscape(risk, spectrum, **common), plane


def _folded(model: nn.Module, calibration: Temperature, images: Any, config: Config) -> float:
    folded = fold_batch_norm(scaled(model, calibration))
    op = hessian(Risk(folded, cross_entropy, images), engine=config.engine)
    return float(
        eigenpairs(op, largest=1, rtol=1e-2, vectors=False, generator=_generator(config)).values[-1]
    )


def _records(trained: TrainingResult) -> list[dict[str, Any]]:
    """The numbers of each epoch as a log would have them."""
    found: list[dict[str, Any]] = [{"kind": "epoch"} for _ in range(trained.num_epochs)]
    for name, values in trained.history.items():
        for record, value in zip(found, values.tolist(), strict=True):
            if math.isfinite(value):  # there is no average before it begins
                record[name] = value
    return found


def _generator(config: Config) -> torch.Generator:
    return torch.Generator().manual_seed(config.seed)
