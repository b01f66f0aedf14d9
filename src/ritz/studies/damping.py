"""Least damping of a second-order or adaptive optimiser over batch sizes: Fig. 5.11-5.14.

After *Spectral Machine Learning*, section 5.8. With a large learning rate, damped Adam divides by
:math:`\\sqrt{v} + \\delta`, and the least damping at which a short training from trained weights
stays stable is found by bisection. It is compared with three predictions: the noise along the
leading eigenvector, the papers' homogeneous noise, and the edge of stability of the predicted
curvature :math:`\\lambda'_1(B)` with the divisor :math:`\\delta`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from ritz import measures, plots
from ritz._core.checks import check_choice
from ritz._core.progress import Progress
from ritz.curvature import Risk
from ritz.plots._shared import style
from ritz.studies._protocol import StudyResult, check_minimums, record, row, seeded, track
from ritz.studies.learning_rates import exponent, fit, load, network
from ritz.training._shared import create_optimizer

# Names of the damping of optimisers.
DAMPING = {"damped_adamw": "delta", "kfac": "damping"}
PREDICTIONS = ("noise along phi_1", "homogeneous noise", "edge of stability")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much work a study does."""

    networks: tuple[str, ...]
    dataset: str
    num_samples: int
    num_epochs: int
    batch_sizes: tuple[int, ...]
    num_steps: int
    num_trials: int


SIZES = {
    "smoke": Size(networks=("mlp",), dataset="digits", num_samples=256, num_epochs=2,
                  batch_sizes=(8, 64), num_steps=6, num_trials=2),
    "small": Size(networks=("logistic", "mlp", "lenet"), dataset="mnist", num_samples=2048,
                  num_epochs=4, batch_sizes=(8, 32, 128, 512, 2048), num_steps=40, num_trials=3),
    "paper": Size(networks=("vgg16",), dataset="cifar100", num_samples=50_000, num_epochs=25,
                  batch_sizes=(32, 64, 128, 256, 512, 1024, 2048, 4096), num_steps=400,
                  num_trials=3),
}  # fmt: skip


@record
class Config:
    """Optimiser, its learning rate, and size of the study.

    Attributes:
        size: ``smoke``, ``small`` (MNIST on a CPU) or ``paper`` (CIFAR-100 on a GPU).
        optimizer: Registered name of an optimiser with a damping: ``damped_adamw`` or ``kfac``.
        rate: Its learning rate.
        data: Folder of data sets. Defaults to the environment variable ``RITZ_DATA``.
        seed: Seed of everything random.
    """

    size: Literal["smoke", "small", "paper"] = "small"
    optimizer: str = "damped_adamw"
    rate: float = 1.0
    data: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, tuple(DAMPING))
        check_minimums(self, rate=1e-6, seed=0)


QUICK: dict[str, Any] = {"size": "smoke"}


@record
class Result(StudyResult[Config]):
    """Least damping of all networks and batch sizes, measured and predicted.

    Attributes:
        networks: The networks, ``n``.
        batch_sizes: The batch sizes, ``S``.
        least: Least damping in trials, ``(n, S)``.
        errors: Half a 95 % interval of it, ``(n, S)``.
        predicted: Three predictions, ``(n, 3, S)``.
    """

    networks: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    least: Tensor
    errors: Tensor
    predicted: Tensor

    def __str__(self) -> str:
        title = f"least damping, {self.config.optimizer}, learning rate {self.config.rate:g}"
        lines = [title, row("", self.batch_sizes, ">11,", width=30) + "   exponent"]
        everywhere = list(range(len(self.batch_sizes)))
        for i, name in enumerate(self.networks):
            for label, values in (("measured", self.least[i]), *zip(PREDICTIONS, self.predicted[i])):
                slope = exponent(self.batch_sizes, values.clamp(min=1e-300), everywhere[:-1])
                lines.append(
                    row(f"{name}, {label}", values, ">11.3g", width=30) + f"{slope:>11.2f}"
                )
        lines.append("exponents without the largest batch")
        return "\n".join(lines)


def run(
    config: Config, *, device: torch.device | str = "cpu", progress: bool | Progress = False
) -> Result:
    """Return the least damping of all networks, measured and predicted."""
    size = SIZES[config.size]
    train = load(config, size, device)[0]
    shape = (len(size.networks), len(size.batch_sizes))
    least, errors = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    predicted = torch.zeros(shape[0], len(PREDICTIONS), shape[1], dtype=torch.float64)
    for i, name in track(list(enumerate(size.networks)), "networks", progress):
        model = network(name, config, size, train).to(device)
        fit(model, SGD(model.parameters(), lr=0.05), train, 64, size.num_epochs, config.seed)
        risk = Risk(model, cross_entropy, train)
        advice = measures.advise(
            risk, batch_sizes=size.batch_sizes, optimizer="adam", generator=seeded(config.seed)
        )
        # While delta is large beside sqrt(v), a step is one of SGD with dampened momentum and the
        # learning rate rate/delta.
        edge = measures.stable_rate(
            advice.prediction.best.value.mean, optimizer="adam", momentum=advice.momentum
        )
        predicted[i] = config.rate * torch.stack(
            [advice.damping.mean, advice.damping_papers.mean, 1 / edge]
        )
        for s, batch_size in enumerate(size.batch_sizes):
            # The inverse of the damping is bisected: it is the learning rate along flat directions.
            limit = measures.trainable_rate(
                risk,
                damped(config),
                batch_size=batch_size,
                start=float(edge[s]) / config.rate,
                num_steps=size.num_steps,
                num_trials=size.num_trials,
                generator=seeded(config.seed),
            )
            least[i, s] = 1 / float(limit)
            errors[i, s] = float(limit.error()) / float(limit) ** 2
    return Result(
        config=config,
        networks=size.networks,
        batch_sizes=size.batch_sizes,
        least=least,
        errors=errors,
        predicted=predicted,
    )


def damped(config: Config) -> Callable[[Any, float], Optimizer]:
    """Return a function that makes the optimiser with the inverse of a damping."""
    name = DAMPING[config.optimizer]

    def make(params: Any, inverse: float) -> Optimizer:
        settings: Any = {"lr": config.rate, name: 1 / inverse, "weight_decay": 0.0}
        return create_optimizer(config.optimizer, params, **settings)

    return make


def figure(result: Result) -> style.Figure:
    """Draw the least damping over batch sizes, with the three predictions."""
    drawing, axes = plots.panels(1, len(result.networks), width=4.0, height=3.3)
    for i, (ax, name) in enumerate(zip(axes, result.networks, strict=True)):
        values = result.least[i].numpy()
        errors = result.errors[i].numpy().clip(max=0.6 * values)
        style.bars(ax, result.batch_sizes, values, yerr=errors, color="black", label="measured")
        for index, (label, line) in enumerate(zip(PREDICTIONS, result.predicted[i], strict=True)):
            shown = torch.where(line > 0, line, math.nan).numpy()
            style.line(ax, result.batch_sizes, shown, style.STYLE.palette[index],
                       label.replace("phi_1", r"$\varphi_1$"))  # fmt: skip
        style.batch_size_x(ax, result.batch_sizes)
        style.log_scale(ax)
        ax.set_ylabel("least damping")
        style.set_title(ax, name)
    style.share_legend(drawing)
    return drawing
