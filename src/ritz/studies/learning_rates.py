"""Largest learning rates over batch sizes, against the edge of stability: Fig. 5.7-5.10, 5.15-5.16.

After *Spectral Machine Learning*, section 5.7. For several networks and batch sizes, with and
without momentum, bisection finds the largest learning rate that a short training stands, from
trained weights (the loss does not double) and from initial ones (the loss falls). It is compared
with the edge of local stability of the predicted curvature of batches. Full trainings compare the
linear with the square-root rule, and the distance from the initial weights with the test error.
"""

import copy
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

from ritz import data, measures, models, plots
from ritz._core.progress import Progress
from ritz.curvature import Risk, distance, summary
from ritz.plots._shared import style
from ritz.studies._protocol import StudyResult, check_minimums, column, record, row, seeded, track

POINTS = ("trained", "initial")
RULES = ("linear", "square root")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much work a study does."""

    networks: tuple[str, ...]
    dataset: str
    num_samples: int
    num_epochs: int  # of the network whose curvature is measured, with a batch size of 64
    batch_sizes: tuple[int, ...]
    num_steps: int
    num_trials: int
    rules_epochs: int  # of the trainings that compare the rules


SIZES = {
    "smoke": Size(networks=("mlp",), dataset="digits", num_samples=256, num_epochs=2,
                  batch_sizes=(8, 64), num_steps=6, num_trials=2, rules_epochs=1),
    "small": Size(networks=("logistic", "mlp", "lenet"), dataset="mnist", num_samples=2048,
                  num_epochs=4, batch_sizes=(8, 32, 128, 512, 2048), num_steps=40, num_trials=3,
                  rules_epochs=10),
    "paper": Size(networks=("vgg16", "vgg16_bn", "wideresnet28x10"), dataset="cifar100",
                  num_samples=50_000, num_epochs=25,
                  batch_sizes=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096), num_steps=400,
                  num_trials=3, rules_epochs=300),
}  # fmt: skip


@record
class Config:
    """Size of the study, and where the data are.

    Attributes:
        size: ``smoke``, ``small`` (MNIST on a CPU) or ``paper`` (CIFAR-100 on a GPU).
        momenta: Momenta of SGD.
        base: Batch size and, for each optimiser, learning rate from which the rules start.
        sgd_rate: Learning rate of SGD with momentum 0.9 at that batch size.
        adam_rate: The same of Adam.
        data: Folder of data sets. Defaults to the environment variable ``RITZ_DATA``.
        seed: Seed of everything random.
    """

    size: Literal["smoke", "small", "paper"] = "small"
    momenta: tuple[float, ...] = (0.0, 0.9)
    base: int = 64
    sgd_rate: float = 0.01
    adam_rate: float = 1e-3
    data: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimums(self, base=1, momenta=0.0, sgd_rate=0.0, adam_rate=0.0, seed=0)


QUICK: dict[str, Any] = {"size": "smoke"}


@record
class Result(StudyResult[Config]):
    """Largest learning rates, edges of stability, and trainings by two rules.

    Attributes:
        networks: The networks, ``n``.
        batch_sizes: The batch sizes, ``S``.
        edges: Edge of local stability, ``(n, points, momenta, S)``.
        edge_errors: Half a 95 % interval of it, same shape.
        largest: Largest learning rate that trials stand, same shape.
        largest_errors: Half a 95 % interval of it, same shape.
        papers: Largest eigenvalue by the papers' additive and multiplicative models,
            ``(n, points, 2, S)``.
        curvature: Predicted largest eigenvalue of batches, ``(n, points, S)``.
        test_errors: Wrong answers after training, ``(optimizers, rules, S)``: SGD and Adam.
        train_losses: Training loss, same shape.
        distances: Distance from the initial weights, same shape.
    """

    networks: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    edges: Tensor
    edge_errors: Tensor
    largest: Tensor
    largest_errors: Tensor
    papers: Tensor
    curvature: Tensor
    test_errors: Tensor
    train_losses: Tensor
    distances: Tensor

    def __str__(self) -> str:
        sizes = self.batch_sizes
        lines = [row("largest rate / edge", sizes, ">12,", width=34) + "    exponent  predicted"]
        momenta = self.config.momenta
        for i, j, k in product(range(len(self.networks)), range(2), range(len(momenta))):
            ratio = self.largest[i, j, k] / self.edges[i, j, k]
            small = [index for index, size in enumerate(sizes) if size <= 128]
            slopes = (exponent(sizes, values[i, j, k], small) for values in
                      (self.largest, self.edges))  # fmt: skip
            title = f"{self.networks[i]}, {POINTS[j]}, momentum {momenta[k]:g}"
            lines.append(row(title, ratio, ">12.3g", width=34) + row("", slopes, ">11.2f", width=1))
        lines.append("exponents over batches of at most 128")
        lines.append(row("", sizes, ">12,", width=34))
        names = [f"{name}, {rule}" for name, rule in product(("SGD", "Adam"), RULES)]
        for title, values in (("test error %", 100 * self.test_errors),
                              ("training loss", self.train_losses),
                              ("distance", self.distances)):  # fmt: skip
            flat = values.reshape(4, -1)
            lines += [
                row(f"{title}, {name}", flat[i], ">12.3g", width=34)
                for i, name in enumerate(names)
            ]
        return "\n".join(lines)


def exponent(sizes: tuple[int, ...], rates: Tensor, chosen: list[int]) -> float:
    """Return the exponent of a power law through learning rates over batch sizes."""
    if len(chosen) < 2:
        return float("nan")
    x = torch.tensor([sizes[index] for index in chosen], dtype=torch.float64).log()
    y = rates[chosen].log()
    # The slope of the least-squares line
    x = x - x.mean()
    return float(x @ y / (x @ x))


def run(
    config: Config, *, device: torch.device | str = "cpu", progress: bool | Progress = False
) -> Result:
    """Return the largest learning rates of all networks, and the trainings by two rules."""
    size = SIZES[config.size]
    train, test = load(config, size, device)
    shape = (len(size.networks), len(POINTS), len(config.momenta), len(size.batch_sizes))
    edges, errors, largest, limits = (torch.zeros(shape, dtype=torch.float64) for _ in range(4))
    papers = torch.zeros(*shape[:2], 2, shape[3], dtype=torch.float64)
    curvature = torch.zeros(*shape[:2], shape[3], dtype=torch.float64)
    for i, name in track(list(enumerate(size.networks)), "networks", progress):
        initial = network(name, config, size, train).to(device)
        trained = copy.deepcopy(initial)
        fit(trained, SGD(trained.parameters(), lr=0.05), train, 64, size.num_epochs, config.seed)
        for j, model in enumerate((trained, initial)):
            risk = Risk(model, cross_entropy, train)
            prediction = measures.batch_prediction(
                risk, batch_sizes=size.batch_sizes, generator=seeded(config.seed)
            )
            value = prediction.best.value
            curvature[i, j] = value.mean
            papers[i, j] = torch.stack(
                [prediction.additive.value.mean, prediction.multiplicative.value.mean]
            )
            for k, momentum in enumerate(config.momenta):
                kind: Any = "momentum" if momentum else "sgd"
                edges[i, j, k] = measures.stable_rate(value.mean, optimizer=kind, momentum=momentum)
                errors[i, j, k] = edges[i, j, k] * value.error() / value.mean
                for s, batch_size in enumerate(size.batch_sizes):
                    limit = measures.trainable_rate(
                        risk,
                        lambda params, rate, rho=momentum: SGD(params, lr=rate, momentum=rho),
                        batch_size=batch_size,
                        start=float(edges[i, j, k, s]),
                        num_steps=size.num_steps,
                        num_trials=size.num_trials,
                        # From initial weights, training has to lower the loss.
                        limit=2.0 if POINTS[j] == "trained" else 1.0,
                        generator=seeded(config.seed),
                    )
                    largest[i, j, k, s] = limit.mean
                    limits[i, j, k, s] = limit.error()
    scores = rules(config, size, train, test, progress)
    return Result(
        config=config,
        networks=size.networks,
        batch_sizes=size.batch_sizes,
        edges=edges,
        edge_errors=errors,
        largest=largest,
        largest_errors=limits,
        papers=papers,
        curvature=curvature,
        test_errors=scores[0],
        train_losses=scores[1],
        distances=scores[2],
    )


def load(
    config: Any, size: Any, device: torch.device | str
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return training and test data as tensors."""
    images: Any = data.load(size.dataset, data_dir=config.data, device=device)
    count = min(size.num_samples, len(images.train))
    train = images.train.take(count, generator=seeded(config.seed))
    return train.tensors(), images.test.tensors()


def network(name: str, config: Any, size: Any, train: tuple[Tensor, Tensor]) -> nn.Module:
    """Return a network by name, with initial weights that depend on the seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        classes = int(train[1].max()) + 1
        options: Any = {"hidden": (64,)} if name == "mlp" else {}
        return models.create(
            name, input_shape=tuple(train[0].shape[1:]), num_classes=classes, **options
        )


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    train: tuple[Tensor, Tensor],
    batch_size: int,
    num_epochs: int,
    seed: int,
) -> None:
    """Train for some epochs of whole batches, at a constant learning rate."""
    inputs, labels = train
    generator = seeded(seed)
    model.train()
    for _ in range(num_epochs):
        order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
        for rows in order.split(batch_size)[: len(inputs) // batch_size]:
            optimizer.zero_grad()
            cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimizer.step()


def rules(
    config: Config,
    size: Size,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    progress: bool | Progress,
) -> Tensor:
    """Return test error, training loss and distance of trainings, ``(3, optimizers, rules, S)``."""
    scores = torch.full((3, 2, 2, len(size.batch_sizes)), torch.nan, dtype=torch.float64)
    runs = list(product(range(2), range(2), enumerate(size.batch_sizes)))
    for i, j, (s, batch_size) in track(runs, "rules", progress):
        model = network(size.networks[-1], config, size, train).to(train[0].device)
        initial = copy.deepcopy(model)
        factor = batch_size / config.base
        factor = factor if RULES[j] == "linear" else factor**0.5
        made: Optimizer
        if i == 0:
            made = SGD(model.parameters(), lr=config.sgd_rate * factor, momentum=0.9)
        else:
            made = Adam(model.parameters(), lr=config.adam_rate * factor)
        fit(model, made, train, batch_size, size.rules_epochs, config.seed)
        if not all(bool(p.isfinite().all()) for p in model.parameters()):
            continue  # diverged: NaN in the table
        model.eval()
        here, held = (Risk(model, cross_entropy, part) for part in (train, test))
        wrong = 1 - (summary(held).accuracy or 0.0)
        scores[:, i, j, s] = column([wrong, here.loss(), distance(here, initial).l2])
    return scores


def figure(result: Result) -> style.Figure:
    """Draw largest learning rates over the edges, and what the two rules reach."""
    n = len(result.networks)
    drawing, axes = plots.panels(2, max(n, 3), width=3.7, height=3.0)
    for i, name in enumerate(result.networks):
        _draw_rates(axes[i], result, i)
        style.set_title(axes[i], name)
    for spare in axes[n : max(n, 3)]:
        spare.remove()
    below = axes[max(n, 3) :]
    _draw_rules(below[0], result, 100 * result.test_errors, "test error (%)")
    _draw_rules(below[1], result, result.distances, "distance from initial weights")
    _draw_distance(below[2], result)
    for spare in below[3:]:
        spare.remove()
    return drawing


def _draw_rates(ax: style.Axes, result: Result, i: int) -> None:
    look = style.STYLE
    for k, momentum in enumerate(result.config.momenta):
        edge = result.edges[i, 0, k].numpy()
        style.line(ax, result.batch_sizes, edge, look.palette[k], f"edge, momentum {momentum:g}",
                   linestyle="--")  # fmt: skip
        for j, point in enumerate(POINTS):
            values, errors = result.largest[i, j, k].numpy(), result.largest_errors[i, j, k].numpy()
            errors = errors.clip(max=0.6 * values)  # an interval to zero has no place on the scale
            style.bars(ax, result.batch_sizes, values, yerr=errors, color=look.palette[k],
                       fmt="os"[j] + "-", markerfacecolor="white" if j else look.palette[k],
                       linewidth=look.thin, label=f"{point}, momentum {momentum:g}")  # fmt: skip
    style.batch_size_x(ax, result.batch_sizes)
    style.log_scale(ax)
    ax.set_ylabel("largest learning rate")
    ax.legend(frameon=False, fontsize="x-small")


def _draw_rules(ax: style.Axes, result: Result, values: Tensor, label: str) -> None:
    for (i, name), (j, rule) in product(enumerate(("SGD", "Adam")), enumerate(RULES)):
        style.line(ax, result.batch_sizes, values[i, j].numpy(), style.STYLE.palette[i],
                   f"{name}, {rule}", marker="os"[j], linestyle=("-", "--")[j])  # fmt: skip
    style.batch_size_x(ax, result.batch_sizes)
    style.finish(ax, ax.get_xlabel(), label)


def _draw_distance(ax: style.Axes, result: Result) -> None:
    for i, name in enumerate(("SGD", "Adam")):
        ax.plot(result.distances[i].flatten(), 100 * result.test_errors[i].flatten(), "os"[i],
                color=style.STYLE.palette[i], label=name, markersize=5)  # fmt: skip
    style.finish(ax, "distance from initial weights", "test error (%)")
