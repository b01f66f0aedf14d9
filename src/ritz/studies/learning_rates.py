"""Largest learning rates over batch sizes: Spectral Machine Learning, Figures 5.7-5.10, 5.15-5.16.

For several networks and batch sizes, with and without momentum, bisection finds the largest
learning rate at which a short training does not diverge (section 5.7). From trained weights the
loss must not double; from initial weights it must fall. The largest learning rate is compared with
the edge of local stability, which follows from the predicted curvature of batches. Full trainings
compare the linear with the square-root rule, and the distance from the initial weights with the
test error.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

from ritz import measures, plots
from ritz._core.progress import Progress
from ritz._core.propagation import propagate
from ritz._core.results import stderr
from ritz.curvature import Risk, distance, summary
from ritz.plots._shared import style
from ritz.studies._evidence import Evidence, judge, near, signed, spread
from ritz.studies._protocol import (
    StatePath,
    StudyResult,
    check_minimums,
    column,
    compute_cells,
    record,
    row,
    seeded,
)
from ritz.studies._training import (
    Samples,
    exponents,
    initial_network,
    largest_rates,
    load_pooled,
    train_epochs,
    trained_network,
)

POINTS = ("trained", "initial")
OPTIMIZERS = ("SGD", "Adam")
RULES = ("linear", "square root")
LARGEST = 64  # batch size up to which exponents are fitted: beyond it the rate is flat


@record
class Config:
    """Networks, data and trials.

    Attributes:
        networks: Names of the networks; the last one compares the rules.
        dataset: Name of the images.
        num_samples: Training images, drawn at random.
        pool: Side of the squares of pixels that are averaged.
        num_epochs: Epochs of the trained weights: batches of 64, learning rate 0.05, momentum 0.9.
        batch_sizes: Batch sizes of trials and predictions.
        momenta: Momenta of SGD.
        num_steps: Steps of a trial.
        num_trials: Repetitions of a trial.
        rules_epochs: Epochs of the trainings that compare the rules.
        base: Batch size from which the rules start.
        sgd_rate: Learning rate of SGD with momentum 0.9 at that batch size.
        adam_rate: The same of Adam.
        num_seeds: Repetitions with other images, weights and batches.
        data: Folder of data sets. Defaults to the environment variable ``RITZ_DATA``.
        seed: Seed of everything random in the first repetition; others follow.
    """

    networks: tuple[str, ...] = ("logistic", "mlp", "lenet")
    dataset: str = "mnist"
    num_samples: int = 1024
    pool: int = 2
    # Twice the loss of each network is then below log 10, the loss of a network that has collapsed.
    num_epochs: int = 12
    batch_sizes: tuple[int, ...] = (4, 16, 64, 256)
    momenta: tuple[float, ...] = (0.0, 0.9)
    num_steps: int = 40
    num_trials: int = 3
    rules_epochs: int = 10
    base: int = 16
    sgd_rate: float = 0.01
    adam_rate: float = 1e-3
    num_seeds: int = 3
    data: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimums(self, base=1, batch_sizes=1, num_epochs=1, num_steps=2, num_trials=2, seed=0)
        check_minimums(self, momenta=0.0, sgd_rate=0.0, adam_rate=0.0, num_samples=8, pool=1)
        check_minimums(self, num_seeds=1)


SIZES = {
    "smoke": Config(networks=("mlp",), dataset="digits", num_samples=128, pool=1, num_epochs=2,
                    batch_sizes=(8, 64), num_steps=6, num_trials=2, rules_epochs=2,
                    num_seeds=2),
    "paper": Config(networks=("vgg16_bn", "wideresnet28x10", "vgg16"), dataset="cifar100",
                    num_samples=50_000, pool=1, num_epochs=25, num_steps=400,
                    rules_epochs=300, base=128, num_seeds=1,
                    batch_sizes=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096)),
}  # fmt: skip


@record
class Result(StudyResult[Config]):
    """Largest learning rates, edges of stability, and trainings by two rules.

    Attributes:
        edges: Edge of local stability, ``(seeds, networks, points, momenta, S)``.
        edge_errors: Half a 95 % interval of it, same shape.
        largest: Largest learning rate at which trials do not diverge, same shape.
        largest_errors: Half a 95 % interval of it, same shape.
        curvature: Largest eigenvalue of batches: the best prediction, the papers' additive and
            their multiplicative model, ``(3, seeds, n, points, momenta, S)``; the same for all
            momenta.
        test_errors: Wrong answers after training, ``(seeds, optimizers, rules, S)``: SGD and Adam.
        train_losses: Training loss, same shape.
        distances: Distance from the initial weights, same shape.
    """

    edges: Tensor
    edge_errors: Tensor
    largest: Tensor
    largest_errors: Tensor
    curvature: Tensor
    test_errors: Tensor
    train_losses: Tensor
    distances: Tensor

    def exponents(self, values: Tensor) -> Tensor:
        """Return the exponents of rates ``(seeds, n, points, momenta, S)`` over small batches."""
        sizes = [size for size in self.config.batch_sizes if size <= LARGEST]
        return exponents(sizes, values)

    def __str__(self) -> str:
        c = self.config
        # One line per network, weights and momentum, and then the trainings by both rules.
        head = row("largest learning rate / edge", c.batch_sizes, ">10,", width=34)
        lines = [f"{head}{'exponent':>18}{'predicted':>11}{'additive':>11}{'multipl.':>11}"]
        fits = [self.exponents(self.largest), self.exponents(self.edges)]
        # Where curvature sets the limit, the rate is proportional to its inverse.
        fits += [self.exponents(1 / curve) for curve in self.curvature[1:]]
        # Above 1 the network trains beyond the edge of local stability.
        ratios = (self.largest / self.edges).mean(0)
        for i, j, k in product(*map(range, self.edges.shape[1:4])):
            title = f"{c.networks[i]}, {POINTS[j]}, momentum {c.momenta[k]:g}"
            slopes = row("", (fit[:, i, j, k].nanmean() for fit in fits[1:]), ">11.2f", width=0)
            measured = f"{spread(fits[0][:, i, j, k].round(decimals=3)):>18}"
            lines.append(row(title, ratios[i, j, k], ">10.3g", width=34) + measured + slopes)
        lines += [f"Means over {c.num_seeds} seeds; exponents over batches up to {LARGEST}", "",
                  row(f"{c.networks[-1]}, {c.rules_epochs} epochs", c.batch_sizes, ">10,", width=34)
                  ]  # fmt: skip
        for title, values in (
            ("test error %", 100 * self.test_errors),
            ("training loss", self.train_losses),
            ("distance", self.distances),
        ):
            for (i, name), (j, rule) in product(enumerate(OPTIMIZERS), enumerate(RULES)):
                # NaN if one of the seeds has diverged
                shown = values[:, i, j].mean(0)
                lines.append(row(f"{title}, {name}, {rule}", shown, ">10.3g", width=34))
        return "\n".join(lines)


def run(
    config: Config,
    *,
    device: torch.device | str = "cpu",
    progress: bool | Progress = False,
    state: StatePath = None,
) -> Result:
    """Return the largest learning rates of all networks, and the trainings by two rules."""
    # One configuration per seed, and two kinds of cells: limits of a network at a point, and
    # trainings by a rule.
    runs = [replace(config, seed=config.seed + i) for i in range(config.num_seeds)]
    limited: list[tuple[Any, ...]] = list(product(runs, config.networks, POINTS))
    trained: list[tuple[Any, ...]] = list(product(runs, OPTIMIZERS, RULES, config.batch_sizes))
    load = cache(partial(load_pooled, device=device))

    def compute(cell: tuple[Any, ...]) -> Tensor:
        run, *place = cell
        train, test = load(run)
        return _limits(run, train, *place) if len(place) == 2 else _scores(run, train, test, *place)

    cells = {", ".join(map(str, (cell[0].seed, *cell[1:]))): cell for cell in (*limited, *trained)}
    parts = list(
        compute_cells(
            compute, cells, "networks and trainings", config=config, state=state, progress=progress
        ).values()
    )
    # (quantities, seeds, networks, points, momenta, S) and (scores, seeds, optimizers, rules, S)
    limits = torch.stack(parts[: len(limited)], 1)
    limits = limits.unflatten(1, (len(runs), len(config.networks), len(POINTS)))
    scores = torch.stack(parts[len(limited) :], 1)
    scores = scores.unflatten(1, (len(runs), len(OPTIMIZERS), len(RULES), -1))
    return Result(
        config=config,
        edges=limits[0],
        edge_errors=limits[1],
        largest=limits[2],
        largest_errors=limits[3],
        curvature=limits[4:],
        test_errors=scores[0],
        train_losses=scores[1],
        distances=scores[2],
    )


def _limits(config: Config, train: Samples, name: str, point: str) -> Tensor:
    """Return edges, largest rates and curvatures of one network, ``(7, momenta, S)``."""
    make = trained_network if point == "trained" else initial_network
    risk = Risk(make(name, config, train), cross_entropy, train)
    prediction = measures.batch_prediction(
        risk, batch_sizes=config.batch_sizes, generator=seeded(config.seed)
    )
    value = prediction.best.value
    # In the order of `curvature` of the result.
    models = (prediction.best, prediction.additive, prediction.multiplicative)
    parts = []
    for momentum in config.momenta:
        kind: Any = "momentum" if momentum else "sgd"
        # The edge of stability of batches of B samples: without momentum 2 / lambda_1(B).
        edge = propagate(
            partial(measures.stable_rate, optimizer=kind, momentum=momentum,
                    full=prediction.lambda_max.mean),
            value, method="edge of local stability",
        )  # fmt: skip
        largest, errors = largest_rates(
            risk,
            partial(_sgd, momentum=momentum),
            config,
            edge.mean,
            # From initial weights, training has to lower the loss.
            limit=2.0 if point == "trained" else 1.0,
        )
        rows = [edge.mean, edge.error(), largest, errors]
        parts.append(torch.stack([*rows, *(curve.value.mean for curve in models)]))
    return torch.stack(parts, 1)


def _sgd(params: Any, rate: float, momentum: float) -> SGD:
    return SGD(params, lr=rate, momentum=momentum)


def _scores(
    config: Config, train: Samples, test: Samples, optimizer: str, rule: str, batch_size: int
) -> Tensor:
    """Return test error, training loss and distance of one training, ``(3,)``."""
    model = initial_network(config.networks[-1], config, train)
    initial = copy.deepcopy(model)
    # The linear rule scales the rate by B / B_0, the other rule by the square root of it.
    factor = batch_size / config.base
    factor = factor if rule == "linear" else factor**0.5
    made: Optimizer
    if optimizer == "SGD":
        made = SGD(model.parameters(), lr=config.sgd_rate * factor, momentum=0.9)
    else:
        made = Adam(model.parameters(), lr=config.adam_rate * factor)
    train_epochs(model, made, train, batch_size, config.rules_epochs, seeded(config.seed))
    if not all(bool(p.isfinite().all()) for p in model.parameters()):
        return torch.full((3,), torch.nan, dtype=torch.float64)  # diverged
    # Without batch statistics, so that the loss does not depend on the cut into batches.
    model.eval()
    here, held = (Risk(model, cross_entropy, part) for part in (train, test))
    wrong = 1 - (summary(held).accuracy or 0.0)
    return column([wrong, here.loss(), distance(here, initial).l2])


# ------------------------------------------------------------------------------------------
# Pictures, and the published figures.


def figure(result: Result) -> style.Figure:
    """Draw largest learning rates over the edges, and what the two rules reach."""
    n = len(result.config.networks)
    drawing, axes = plots.panels(2, max(n, 3), width=3.7, height=3.0)
    for i, name in enumerate(result.config.networks):
        _draw_rates(axes[i], result, i)
        style.set_title(axes[i], name)
    # The second row has three panels, and the first one panel per network.
    for spare in axes[n : max(n, 3)]:
        spare.remove()
    below = axes[max(n, 3) :]
    _draw_rules(below[0], result, 100 * result.test_errors, "test error (%)")
    _draw_rules(below[1], result, result.distances, "distance from initial weights")
    _draw_distance(below[2], result)
    trained = f"{result.config.networks[-1]}, {result.config.rules_epochs} epochs"
    for ax, title in zip(below, ("", "", ", all batch sizes"), strict=False):
        style.set_title(ax, trained + title)
    for spare in below[3:]:
        spare.remove()
    style.share_legend(drawing)
    return drawing


def _draw_rates(ax: style.Axes, result: Result, i: int) -> None:
    look = style.STYLE
    for k, momentum in enumerate(result.config.momenta):
        edge = result.edges[:, i, 0, k].mean(0).numpy()
        style.line(ax, result.config.batch_sizes, edge, look.palette[k],
                   f"edge, momentum {momentum:g}", linestyle="--")  # fmt: skip
        for j, point in enumerate(POINTS):
            values, errors = _mean(result.largest[:, i, j, k], result.largest_errors[:, i, j, k])
            errors = errors.clip(max=0.6 * values)  # an interval to zero has no place on the scale
            style.bars(ax, result.config.batch_sizes, values, yerr=errors, color=look.palette[k],
                       fmt="os"[j] + "-", markerfacecolor="white" if j else look.palette[k],
                       linewidth=look.thin, label=f"{point}, momentum {momentum:g}")  # fmt: skip
    style.batch_size_x(ax, result.config.batch_sizes)
    style.log_scale(ax)
    ax.set_ylabel("largest learning rate")


def _mean(values: Tensor, errors: Tensor) -> tuple[Any, Any]:
    """Return mean and standard error over seeds, or of one seed half its interval."""
    mean = values.mean(0)
    return mean.numpy(), (stderr(values) if len(values) > 1 else errors[0]).numpy()


def _draw_rules(ax: style.Axes, result: Result, values: Tensor, label: str) -> None:
    for (i, name), (j, rule) in product(enumerate(OPTIMIZERS), enumerate(RULES)):
        mean = values[:, i, j].mean(0).numpy()
        style.line(ax, result.config.batch_sizes, mean, style.STYLE.palette[i],
                   f"{name}, {rule}", marker="os"[j], linestyle=("-", "--")[j])  # fmt: skip
    style.batch_size_x(ax, result.config.batch_sizes)
    style.finish(ax, ax.get_xlabel(), label)


def _draw_distance(ax: style.Axes, result: Result) -> None:
    for i, name in enumerate(OPTIMIZERS):
        ax.plot(result.distances[:, i].flatten(), 100 * result.test_errors[:, i].flatten(), "os"[i],
                color=style.STYLE.palette[i], label=name, markersize=5)  # fmt: skip
    style.finish(ax, "distance from initial weights", "test error (%)")


# ------------------------------------------------------------------------------------------
# The published claims.


def evidence(result: Result) -> list[Evidence]:
    """Return the published scaling rules beside the measured exponents."""
    c = result.config
    rates = [_exponent(result, i, k)
             for k, i in product(range(len(c.momenta)), range(len(c.networks)))]  # fmt: skip
    return [*rates, *_ratios(result), _rule(result, 0), _rule(result, 1), _far(result)]


def setting(result: Result) -> str:
    """Return data, batches and runs."""
    c = result.config
    sizes = ", ".join(str(size) for size in c.batch_sizes if size <= LARGEST)
    return (
        f"{c.num_samples:,} images of {c.dataset}, {c.num_seeds} seeds; exponents from B = {sizes}."
    )


def _exponent(result: Result, i: int, k: int) -> Evidence:
    """Return the exponent of the largest learning rate of a network, from trained weights."""
    c = result.config
    values = result.exponents(result.largest)[:, i, 0, k]
    guess = float(result.exponents(result.edges)[:, i, 0, k].mean())
    with_momentum = f"momentum {c.momenta[k]:g}" if c.momenta[k] else "no momentum"
    return Evidence(
        paper="SPECTRA",
        where="Section 5.7, Figures 5.7, 5.9, 5.10",
        what=f"{c.networks[i]}, {with_momentum}: exponent of the largest learning rate over B",
        published="1 (linear)",
        measured=f"{spread(values.round(decimals=3))}; edge predicts {guess:.2f}",
        **near(
            values[values.isfinite()],
            1.0,
            0.2,
            cause="the curvature of all data begins to set the limit",
        ),
    )


def _ratios(result: Result) -> Iterator[Evidence]:
    """Yield the largest learning rates over the edge of stability, for each momentum."""
    for k, momentum in enumerate(result.config.momenta):
        ratios = (result.largest / result.edges)[:, :, 0, k].flatten()
        low, middle, high = (float(ratios.nanquantile(q)) for q in (0.0, 0.5, 1.0))
        yield Evidence(
            paper="SPECTRA",
            where="Section 5.7",
            what="trained, "
            + (f"momentum {momentum:g}" if momentum else "no momentum")
            + ": largest learning rate over the edge with batch noise",
            published="-",
            measured=f"median {middle:.2g} ({low:.2g} to {high:.2g})",
            verdict="extends",
            why="all batch sizes",
        )


def _rule(result: Result, optimizer: int) -> Evidence:
    """Return which rule has the smaller test error at the largest batch."""
    sizes = result.config.batch_sizes
    place = max(range(len(sizes)), key=sizes.__getitem__)
    # A training that diverged has 100 % errors.
    errors = 100 * result.test_errors[:, optimizer, :, place].nan_to_num(nan=100.0)
    expected = optimizer == 0  # SGD follows the linear rule, Adam the square root
    gap = (errors[:, 0] - errors[:, 1]) * (1 if expected else -1)
    return Evidence(
        paper="SPECTRA",
        where="Section 5.7.0.2" if expected else "Figures 5.15, 5.16",
        what=f"{OPTIMIZERS[optimizer]}: test error in % at B = {sizes[place]:,}, linear and "
        "square-root rule",
        published="linear is better" if expected else "square root is better",
        measured=f"{spread(errors[:, 0])} and {spread(errors[:, 1])}",
        **signed(gap, -1),
    )


def _far(result: Result) -> Evidence:
    """Return how test error and distance from the initial weights go together, for SGD."""
    correlations = []
    for distances, errors in zip(result.distances[:, 0], result.test_errors[:, 0], strict=True):
        pairs = torch.stack([distances.flatten(), errors.flatten()])
        pairs = pairs[:, pairs.isfinite().all(0)]  # runs that diverged are NaN
        correlations.append(float(torch.corrcoef(pairs)[0, 1]))
    values = column(correlations)
    return Evidence(
        paper="SPECTRA",
        where="Section 5.7.0.2, Figure 5.8",
        what="SGD: correlation of test error with the distance from the initial weights",
        published="farther is better",
        measured=spread(values.round(decimals=3)),
        # Farther and better: distances and errors go in opposite directions.
        **judge(values, high=0.0, note="shorter runs move less far and learn less"),
    )
