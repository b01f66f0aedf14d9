"""Averaged and final weights compared on digits with wrong labels: Gadam paper, section 5.

After Granziol et al., *Beyond SGD: iterate averaged adaptive gradient methods*, section 5. A small
network with batch norm learns the digits of scikit-learn, with some of the training labels wrong.
Its error is measured on held-out digits with correct labels. For each seed, all methods have the
same split, wrong labels, initial weights and batches, so differences between them are paired.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import skip_init
from torch.optim import SGD, Adam, AdamW, Optimizer

from ritz import optim, plots
from ritz._core.checks import check_count, check_range
from ritz._core.progress import Progress
from ritz.plots._shared import style
from ritz.studies._evidence import Evidence, signed, spread
from ritz.studies._protocol import (
    StatePath,
    StudyResult,
    check_minimums,
    column,
    compute_by_seed,
    record,
    seeded,
)
from ritz.studies._training import train_epochs, with_wrong_labels

CLASSES = 10
# Pairs grow with the square of their number; ten iterates make 45.
COMPARED = 10  # iterates, evenly spaced over the tail, whose diversity is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """An optimiser with its learning rate and weight decay, and whether it is averaged."""

    make: Callable[..., Optimizer]
    rate: float
    decay: float
    averaged: bool = True


# Learning rates are the published defaults. As published, weight decays are chosen for each
# optimiser without averaging: the best of four or five by held-out loss, on other seeds.
METHODS = {
    "Gadam": Method(make=optim.Gadam, rate=1e-3, decay=0.25),
    "GadamX": Method(make=optim.GadamX, rate=0.1, decay=0.005),
    "Adam + average": Method(make=Adam, rate=1e-3, decay=1e-3),
    "AdamW": Method(make=AdamW, rate=1e-3, decay=0.25, averaged=False),
    "SGD + average": Method(make=partial(SGD, momentum=0.9), rate=0.1, decay=2e-3),
}
BASELINE = "AdamW"


@record
class Config:
    """Network, data and number of the runs.

    Attributes:
        width: Units of each of two hidden layers.
        num_train: Training digits, of 1,797.
        label_noise: Fraction of the training labels that are wrong.
        batch_size: Batch size.
        num_epochs: Epochs of every run.
        start: Number of epochs before averaging starts. Weights enter it once per epoch.
        num_seeds: Runs of every method.
        seed: Run ``i`` has the seed ``seed + i``.
    """

    width: int = 128
    num_train: int = 1000
    label_noise: float = 0.2
    batch_size: int = 50
    num_epochs: int = 60
    start: int = 30
    num_seeds: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimums(self, width=1, num_epochs=3, num_seeds=2, seed=0)
        check_count("num_train", self.num_train, low=2, high=1700)
        check_range("label_noise", self.label_noise, low=0.0, high=1.0)
        check_count("batch_size", self.batch_size, low=2, high=self.num_train)
        check_count("start", self.start, high=self.num_epochs - 2)


@record
class Result(StudyResult[Config]):
    """Held-out errors of the last iterate and of the average, for every method and seed.

    Attributes:
        names: The methods in their order.
        last_errors: Share of wrong answers of the last iterate, ``(methods, num_seeds)``.
        average_errors: The same of the average.
        last_losses: Cross entropy of the last iterate, same shape.
        average_losses: The same of the average.
        diversities: Mean KL divergence between pairs of the averaged iterates, same shape.
        seconds: Mean time of one run, by method.
    """

    names: tuple[str, ...]
    last_errors: Tensor
    average_errors: Tensor
    last_losses: Tensor
    average_losses: Tensor
    diversities: Tensor
    seconds: dict[str, float]

    def __str__(self) -> str:
        c = self.config
        lines = [
            f"Held-out error in %, {c.label_noise:.0%} of {c.num_train} labels wrong, averages of "
            f"epochs {c.start} to {c.num_epochs}; mean over {c.num_seeds} seeds",
            f"{'':16}{'last':>8}{'average':>9}   {'average - last':18}{'the same, loss':18}"
            f"{'KL':>8}{'seconds':>9}",
        ]
        # Differences within one run: the scatter between seeds cancels.
        errors = 100 * (self.average_errors - self.last_errors)
        losses = self.average_losses - self.last_losses
        for i, name in enumerate(self.names):
            last, average = self.last_errors[i].mean(), self.average_errors[i].mean()
            lines.append(
                f"{name:16}{100 * last:>8.2f}{100 * average:>9.2f}   {spread(errors[i]):18}"
                f"{spread(losses[i]):18}{self.diversities[i].mean():>8.3f}"
                f"{self.seconds[name]:>9.1f}"
            )
        lines.append(f"average minus last iterate of {BASELINE} with the same seed:")
        against = 100 * (self.average_errors - self.last_errors[self.names.index(BASELINE)])
        lines += [f"{name:16}{spread(against[i])}" for i, name in enumerate(self.names)]
        return "\n".join(lines)


SIZES = {
    "smoke": Config(width=32, num_train=400, batch_size=20, num_epochs=6, start=3, num_seeds=2)
}


def run(config: Config, *, progress: bool | Progress = False, state: StatePath = None) -> Result:
    """Return the errors of all methods for all seeds."""

    def scores_and_time(name: str, seed: int) -> Tensor:
        begin = time.perf_counter()
        scores = _train(config, METHODS[name], seed)
        return torch.cat([scores, column([time.perf_counter() - begin])])

    table = compute_by_seed(scores_and_time, METHODS, config=config, state=state, progress=progress)
    table = table.permute(2, 1, 0)  # (6, methods, num_seeds)
    scores, times = table[:5], table[5].mean(1)
    return Result(
        config=config,
        names=tuple(METHODS),
        last_errors=scores[0],
        last_losses=scores[1],
        average_errors=scores[2],
        average_losses=scores[3],
        diversities=scores[4],
        seconds=dict(zip(METHODS, times.tolist(), strict=True)),
    )


def evidence(result: Result) -> Iterator[Evidence]:
    """Yield the gain of each average over the last iterate of the same run."""
    for name, last, average in zip(
        result.names, result.last_errors, result.average_errors, strict=True
    ):
        if METHODS[name].averaged:
            gain = 100 * (average - last)
            yield Evidence(
                paper="GADAM",
                where="Figure 4, Table 2",
                what=f"{name}: held-out error in %, average less last iterate",
                published="negative",
                measured=spread(gain),
                **signed(gain, -1),
            )


def setting(result: Result) -> str:
    """Return the network and data."""
    c = result.config
    return (
        f"Two hidden layers of {c.width}, {c.num_train:,} digits of scikit-learn, {c.num_epochs} "
        f"epochs, {c.num_seeds} seeds."
    )


def figure(result: Result) -> style.Figure:
    """Draw the error of every seed, from the last iterate to the average of the same run."""
    drawing, (axis,) = plots.panels(1, 1, width=6.4, height=3.2)
    colours = [style.STYLE.grey, style.STYLE.blue]
    for i in range(len(result.names)):
        for last, average in zip(result.last_errors[i], result.average_errors[i], strict=True):
            ends = [100 * float(last), 100 * float(average)]
            axis.plot([i - 0.2, i + 0.2], ends, color=style.STYLE.grey, linewidth=1, zorder=1)
            axis.scatter([i - 0.2, i + 0.2], ends, color=colours, s=18, zorder=2)
    axis.scatter([], [], color=style.STYLE.grey, s=18, label="last iterate")
    axis.scatter([], [], color=style.STYLE.blue, s=18, label="average of the same run")
    axis.set_xticks(range(len(result.names)), result.names)
    title = f"Digits, {result.config.label_noise:.0%} of the labels wrong"
    style.finish(axis, "", "held-out error (%)", title)
    return drawing


def _train(config: Config, method: Method, seed: int) -> Tensor:
    """Return error and loss of the last iterate, both of the average, and the diversity."""
    generator = seeded(seed)
    inputs, labels, held_inputs, held_labels = _digits(config, generator)
    model = _network(config, generator)
    length = config.num_train // config.batch_size
    # Average once per epoch (interval = steps per epoch), from the first step after the start.
    optimizer, average = _optimizer(method, model, start=config.start * length + 1, interval=length)
    # An averaged run keeps half of its learning rate after the start, so that its iterates differ.
    # Without an average the learning rate decays to the end.
    falling = optim.linear_decay(config.num_epochs)
    shape = optim.averaging_decay(config.start) if method.averaged else falling
    schedule = optim.Schedule(optimizer, shape)
    tail = []
    for epoch in range(1, config.num_epochs + 1):
        train_epochs(model, optimizer, (inputs, labels), config.batch_size, 1, generator)
        schedule.step()
        if epoch >= config.start:
            tail.append(_outputs(model, held_inputs))
    # The averaged weights have other activations, so batch-norm statistics are recomputed.
    with average.applied(model, data=inputs.split(config.batch_size)[:length]):
        averaged = _outputs(model, held_inputs)
    # Iterates from the end backwards, so that the last one is always compared.
    stride = max(1, len(tail) // COMPARED)
    diversity = optim.solution_diversity(tail[::-1][: stride * COMPARED : stride]).kl
    scores = (*_scores(tail[-1], held_labels), *_scores(averaged, held_labels), diversity)
    return torch.tensor(scores, dtype=torch.float64)


def _digits(config: Config, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=generator)
    inputs, labels = torch.tensor(images / 16).float()[order], torch.tensor(classes)[order]
    held_inputs, held_labels = inputs[config.num_train :], labels[config.num_train :]
    inputs, labels = inputs[: config.num_train], labels[: config.num_train]
    labels = with_wrong_labels(labels, config.label_noise, CLASSES, generator)
    return inputs, labels, held_inputs, held_labels


def _network(config: Config, generator: torch.Generator) -> nn.Sequential:
    width, layers = config.width, []
    for inputs in (64, width):
        layers += [_linear(inputs, width, generator), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers, _linear(width, CLASSES, generator))


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Module:
    # nn.Linear itself would draw its weights from the global generator.
    layer: nn.Module = skip_init(nn.Linear, inputs, outputs, bias=False)
    # Variance 2 / fan-in keeps the scale of ReLU layers; batch norm makes a bias redundant.
    nn.init.kaiming_normal_(layer.get_parameter("weight"), generator=generator)
    return layer


def _optimizer(method: Method, model: nn.Module, **when: Any) -> tuple[Optimizer, Any]:
    settings: Any = {"lr": method.rate, "weight_decay": method.decay}
    if method.make in (optim.Gadam, optim.GadamX):  # these average by themselves
        averaging: Any = method.make(model.parameters(), **settings, **when)
        return averaging, averaging.average
    optimizer = method.make(model.parameters(), **settings)
    return optimizer, optim.IterateAverage(optimizer, **when)


@torch.no_grad()
def _outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    model.eval()
    outputs: Tensor = model(inputs)
    model.train()
    return outputs


def _scores(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    wrong = float((logits.argmax(1) != labels).double().mean())
    # float64: differences of losses between iterates are small.
    return wrong, float(cross_entropy(logits.double(), labels))
