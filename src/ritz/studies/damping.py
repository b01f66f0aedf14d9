r"""Least damping of optimisers over batch sizes: Spectral Machine Learning, Figures 5.11-5.14.

After section 5.8. Damped Adam divides its steps by
:math:`\sqrt{v} + \delta`. Bisection finds the least damping :math:`\delta` at which a short
training from trained weights stays stable. It is compared with three predictions: from the noise
along the leading eigenvector, from the homogeneous noise of the papers, and from the edge of
stability at the predicted curvature :math:`\lambda'_1(B)`. The last takes :math:`\delta` for the
whole divisor, which is nearly so at a large learning rate.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from ritz import measures, plots
from ritz._core.checks import check_choice
from ritz._core.progress import Progress
from ritz._core.results import stderr
from ritz.curvature import Risk
from ritz.plots._shared import style
from ritz.studies._evidence import Evidence, near, spread
from ritz.studies._protocol import (
    StatePath,
    StudyResult,
    check_minimums,
    compute_cells,
    record,
    row,
    seeded,
)
from ritz.studies._training import (
    Samples,
    exponents,
    largest_rates,
    load_pooled,
    trained_network,
)
from ritz.training._shared import create_optimizer

OPTIMIZERS = ("damped_adamw", "kfac", "ekfac")  # with a damping delta
NAMES = {"damped_adamw": "damped AdamW", "kfac": "K-FAC", "ekfac": "EK-FAC"}
MOMENTUM = 0.9  # by default, of all of them
PREDICTIONS = ("noise along phi_1", "homogeneous noise", "edge of stability")


@record
class Config:
    """Optimiser and its learning rate, networks, data and trials.

    Attributes:
        optimizer: Registered name of an optimiser with a damping: ``damped_adamw``, ``kfac``
            or ``ekfac``.
        rates: Its learning rates.
        networks: Names of the networks.
        dataset: Name of the images.
        num_samples: Training images, drawn at random.
        pool: Side of the squares of pixels that are averaged.
        num_epochs: Epochs of the trained weights: batches of 64, learning rate 0.05, momentum 0.9.
        batch_sizes: Batch sizes of trials and predictions.
        num_steps: Steps of a trial.
        num_trials: Repetitions of a trial.
        num_seeds: Repetitions with other images, weights and batches.
        data: Folder of data sets. Defaults to the environment variable ``RITZ_DATA``.
        seed: Seed of everything random in the first repetition; others follow.
    """

    optimizer: str = "damped_adamw"
    rates: tuple[float, ...] = (1.0, 0.1)
    networks: tuple[str, ...] = ("logistic", "mlp", "lenet")
    dataset: str = "mnist"
    num_samples: int = 1024
    pool: int = 2
    # Twice the loss of each network is then below log 10, the loss of a network that has collapsed.
    num_epochs: int = 12
    batch_sizes: tuple[int, ...] = (4, 16, 64, 256)
    num_steps: int = 40
    num_trials: int = 3
    num_seeds: int = 3
    data: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_minimums(
            self, rates=1e-6, batch_sizes=1, num_samples=8, pool=1, num_epochs=1, num_steps=2
        )
        check_minimums(self, num_trials=2, num_seeds=1, seed=0)


SIZES = {
    "smoke": Config(rates=(1.0,), networks=("mlp",), dataset="digits", num_samples=128, pool=1,
                    num_epochs=2, batch_sizes=(8, 64), num_steps=6, num_trials=2, num_seeds=2),
    "paper": Config(networks=("vgg16",), dataset="cifar100", num_samples=50_000, pool=1,
                    num_epochs=25, num_seeds=1,
                    batch_sizes=(32, 64, 128, 256, 512, 1024, 2048, 4096), num_steps=400),
}  # fmt: skip


@record
class Result(StudyResult[Config]):
    """Least damping of all networks, learning rates and batch sizes, measured and predicted.

    Attributes:
        least: Least damping in trials, ``(seeds, networks, rates, S)``; NaN if even the least one
            that was tried trains.
        errors: Half a 95 % interval of it, same shape.
        predicted: Three predictions, in the order of ``PREDICTIONS``, ``(seeds, networks, rates, 3,
            S)``.
    """

    least: Tensor
    errors: Tensor
    predicted: Tensor

    def exponents(self, values: Tensor) -> Tensor:
        """Return the exponents of dampings ``(..., S)`` over batches below all data."""
        c = self.config
        # The batch of all data has no noise and follows no power law.
        sizes = [size for size in c.batch_sizes if size < c.num_samples]
        return exponents(sizes, values)

    def __str__(self) -> str:
        c = self.config
        title = f"least damping, {c.optimizer}, seeds: {c.num_seeds}"
        lines = [row(title, c.batch_sizes, ">10,", width=40) + f"{'exponent':>18}"]
        slopes, guesses = self.exponents(self.least), self.exponents(self.predicted).mean(0)
        least, predicted = self.least.nanmean(0), self.predicted.mean(0)
        for i, name in enumerate(c.networks):
            for j, rate in enumerate(c.rates):
                title = f"{name}, learning rate {rate:g}"
                lines.append(row(title, least[i, j], ">10.3g", width=40)
                             + f"{spread(slopes[:, i, j].round(decimals=3)):>18}")  # fmt: skip
                for k, label in enumerate(PREDICTIONS):
                    lines.append(row(f"  {label}", predicted[i, j, k], ">10.3g", width=40)
                                 + f"{guesses[i, j, k]:>18.2f}")  # fmt: skip
        return "\n".join(lines)


def run(
    config: Config,
    *,
    device: torch.device | str = "cpu",
    progress: bool | Progress = False,
    state: StatePath = None,
) -> Result:
    """Return the least damping of all networks, measured and predicted."""
    runs = [replace(config, seed=config.seed + i) for i in range(config.num_seeds)]
    load = cache(partial(load_pooled, device=device))
    cells = compute_cells(
        lambda cell: _measure(cell[0], load(cell[0])[0], cell[1]),
        {f"{run.seed}, {name}": (run, name) for run in runs for name in config.networks},
        "networks",
        config=config,
        state=state,
        progress=progress,
    )
    # Seeds, networks, rates, then least damping, its error and three predictions, then batch sizes.
    table = torch.stack(list(cells.values())).unflatten(0, (len(runs), -1))
    return Result(
        config=config, least=table[..., 0, :], errors=table[..., 1, :], predicted=table[..., 2:, :]
    )


def _measure(config: Config, train: Samples, name: str) -> Tensor:
    """Return least damping, its error and the predictions of one network, ``(rates, 5, S)``."""
    risk = Risk(trained_network(name, config, train), cross_entropy, train)
    # For SGD the damping advised is that by the noise along phi_1.
    advice = measures.advise(
        risk, batch_sizes=config.batch_sizes, optimizer="sgd", generator=seeded(config.seed)
    )
    # While delta is large beside the divisors, a step is one of SGD with momentum and the learning
    # rate alpha/delta: the edge is that of the curvature without a preconditioner. The running mean
    # of Adam is dampened by 1 - beta_1, the momentum of K-FAC is not.
    kind: Any = "adam" if config.optimizer == "damped_adamw" else "kfac"
    edge = measures.stable_rate(
        advice.prediction.best.value.mean, optimizer=kind, momentum=MOMENTUM,
        full=advice.prediction.lambda_max.mean,
    )  # fmt: skip
    rows = []
    for rate in config.rates:
        # The inverse x of the damping is bisected like a learning rate: the step is (alpha x) g, so
        # that x = edge / alpha is a good start.
        inverse, errors = largest_rates(risk, _damped(config, rate), config, edge / rate)
        # |d(1/x)| = |dx| / x^2
        errors = errors / inverse.square()
        # Where every damping that was tried trains, the least one is not known.
        inverse = torch.where(errors.isinf(), torch.nan, inverse)
        # All predictions are proportional to the learning rate.
        guesses = [rate * advice.damping.mean, rate * advice.damping_papers.mean, rate / edge]
        rows.append(torch.stack([1 / inverse, errors, *guesses]))
    return torch.stack(rows)


def _damped(config: Config, rate: float) -> Callable[[Any, float], Optimizer]:
    """Return a function that makes the optimiser with the inverse of a damping."""

    def make(model: Any, inverse: float) -> Optimizer:
        settings: Any = {"lr": rate, "delta": 1 / inverse, "weight_decay": 0.0}
        # K-FAC needs the model, the others its parameters.
        params = list(model.parameters())
        return create_optimizer(config.optimizer, params, model=model, **settings)

    return make


def figure(result: Result) -> style.Figure:
    """Draw the least damping over batch sizes, with the three predictions."""
    c = result.config
    drawing, axes = plots.panels(len(c.rates), len(c.networks), width=4.0, height=3.0)
    for index, ax in enumerate(axes):
        # One row of panels per learning rate.
        j, i = divmod(index, len(c.networks))
        values, runs = result.least[:, i, j].nanmean(0).numpy(), result.least[:, i, j]
        errors = (stderr(runs) if len(runs) > 1 else result.errors[0, i, j]).numpy()
        # An interval that reaches zero has no place on a logarithmic scale.
        errors = errors.clip(max=0.6 * values)
        style.bars(ax, c.batch_sizes, values, yerr=errors, color="black", label="measured")
        for k, label in enumerate(PREDICTIONS):
            line = result.predicted[:, i, j, k].mean(0)
            # Without noise, at the batch of all data, two predictions are zero.
            shown = torch.where(line > 0, line, torch.nan).numpy()
            style.line(ax, c.batch_sizes, shown, style.STYLE.palette[k],
                       label.replace("phi_1", r"$\varphi_1$"))  # fmt: skip
        style.batch_size_x(ax, c.batch_sizes)
        style.log_scale(ax)
        ax.set_ylabel(r"least damping $\delta$")
        style.set_title(ax, f"{c.networks[i]}, learning rate {c.rates[j]:g}")
    style.share_legend(drawing)
    return drawing


def evidence(result: Result) -> list[Evidence]:
    """Return the published rule beside the measured exponents, and the predictions."""
    c = result.config
    rows = [_exponent(result, i, j)
            for j, i in product(range(len(c.rates)), range(len(c.networks)))]  # fmt: skip
    return [*rows, *(_ratio(result, k) for k in range(len(PREDICTIONS)))]


def setting(result: Result) -> str:
    """Return data, batches and runs."""
    c = result.config
    sizes = ", ".join(map(str, c.batch_sizes))
    return f"{c.num_samples:,} images of {c.dataset}, B = {sizes}, {c.num_seeds} seeds."


def _exponent(result: Result, i: int, j: int) -> Evidence:
    """Return the exponent of the least damping of a network over the batch size."""
    c, values = result.config, result.exponents(result.least)[:, i, j]
    mean = float(values.nanmean())
    # Why an exponent may lie above -1, and why below it.
    slow = "the curvature of all data also limits the damping"
    why = slow if mean > -1 else "at small dampings, sqrt(v) limits the steps as well"
    return Evidence(
        paper="SPECTRA",
        where="Figures 5.11, 5.12" if c.optimizer == "damped_adamw" else "Figures 5.13, 5.14",
        what=f"{c.networks[i]}, {NAMES[c.optimizer]}, learning rate {c.rates[j]:g}: exponent of "
        "the least damping over B",
        published="-1",
        measured=spread(values.round(decimals=3)),
        **near(values[values.isfinite()], -1.0, 0.3, cause=why),
    )


def _ratio(result: Result, k: int) -> Evidence:
    """Return the ratio of the measured dampings to a prediction."""
    # At the largest batches there is little noise, and the curvature of all data takes over.
    noisy = [i for i, size in enumerate(result.config.batch_sizes) if size < 200]
    ratios = (result.least[..., noisy] / result.predicted[..., k, noisy]).flatten()
    low, middle, high = (float(ratios.nanquantile(q)) for q in (0.0, 0.5, 1.0))
    return Evidence(
        paper="SPECTRA",
        where="equation 5.36",
        what=f"{NAMES[result.config.optimizer]}: least damping over the prediction by "
        f"{PREDICTIONS[k]}, B < 200",
        published="-",
        measured=f"median {middle:.2g} ({low:.2g} to {high:.2g})",
        verdict="extends",
        why="the papers' prediction" if PREDICTIONS[k].startswith("homogeneous") else "",
    )
