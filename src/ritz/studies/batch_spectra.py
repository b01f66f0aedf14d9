"""Largest eigenvalue of mini-batches, measured and predicted: Spectral Machine Learning, 5.5-5.6.

Networks are trained by SGD. At several epochs the study draws batches and computes the largest
eigenvalue of their Hessians and Gauss-Newton matrices. It compares them with four predictions,
which need products with the matrix of the full data only. Beside them stand the spectral densities
of all data and of one batch, after the last epoch. ``--size paper`` is VGG-16 on CIFAR-100 on a
GPU.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ritz import data, models, plots
from ritz._core.checks import check_choice, check_count, check_device, is_below
from ritz._core.progress import Progress
from ritz._core.results import stderr
from ritz.curvature import Risk, curvature_operator
from ritz.curvature._shared import MATRICES
from ritz.measures import BatchCurve, batch_prediction, bulk_edge, measured_batches
from ritz.plots._shared import style
from ritz.spectra import Spectrum, eigenpairs, lanczos
from ritz.studies._evidence import Evidence, spread
from ritz.studies._protocol import (
    StatePath,
    StudyResult,
    check_minimums,
    compute_cells,
    record,
    seeded,
)
from ritz.studies._training import exponents, train_epochs

# Networks by name, with the options of their models.
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "logistic": ("logistic", {}),
    "mlp": ("mlp", {"hidden": (64, 32)}),
    "lenet": ("lenet", {"width": 3, "hidden": (40, 20)}),
    "tanh": ("mlp", {"hidden": (64, 64, 64), "activation": "tanh"}),
    "resnet": ("resnet20", {"width": 4}),
    "vgg16": ("vgg16", {}),
}
PREDICTIONS = ("subspace", "directional", "additive", "multiplicative")
QUANTITIES = ("value", "spread", "overlap")
ROWS = 2 + len(PREDICTIONS)  # measured, its errors, and the predictions
NUM_VECTORS = 20
# Goals: largest deviations of the mean. Each holds from its batch size on.
VALUE_GOALS = {32: 0.10, 8: 0.20}
OVERLAP_GOAL = (128, 0.1)
SPREAD_GOAL = 0.25
TRUSTED = 0.1  # largest deviation of a prediction that is called trustworthy
# Exponents of the corrections for finite batches: as published, and of a mean over B samples.
CORRECTIONS = (-0.25, -0.5)


@record
class Config:
    """Networks, data, and what is measured.

    Attributes:
        networks: Names of networks: ``logistic``, ``mlp``, ``lenet``, ``tanh``, ``resnet``,
            ``vgg16``.
        dataset: ``digits``, ``mnist`` or ``cifar100``.
        num_samples: Samples ``N``, of training and of the curvature.
        epochs: Epochs after which the curvature is measured.
        batch_sizes: Batch sizes, ascending.
        num_batches: Batches drawn for each size. The last entry is used for all further sizes.
        matrices: ``hessian`` and ``ggn``.
        shown: Size of the batch whose spectrum is compared with that of all data.
        num_steps: Lanczos steps of these spectra.
        rate: Learning rate of SGD.
        train_size: Batch size of SGD.
        num_seeds: Runs of every network, with other samples, initial weights and batches.
        device: ``cpu`` or ``cuda``.
        seed: Run ``i`` has the seed ``seed + i``.
        data: Folder of the data. Defaults to the environment variable ``RITZ_DATA``.
    """

    networks: tuple[str, ...] = ("logistic", "mlp", "lenet", "tanh")
    dataset: Literal["digits", "mnist", "cifar100"] = "mnist"
    num_samples: int = 4096
    epochs: tuple[int, ...] = (1, 10)
    batch_sizes: tuple[int, ...] = (8, 32, 128, 512, 2048)
    num_batches: tuple[int, ...] = (20, 20, 10, 10, 5)
    matrices: tuple[str, ...] = MATRICES
    shown: int = 128
    num_steps: int = 60
    rate: float = 0.05
    train_size: int = 64
    num_seeds: int = 3
    device: str = "cpu"
    seed: int = 0
    data: str | None = None

    def __post_init__(self) -> None:
        check_minimums(
            self, num_samples=20, epochs=1, num_batches=2, num_steps=3, rate=1e-6, num_seeds=1,
            seed=0,
        )  # fmt: skip
        for name in self.networks:
            check_choice("networks", name, NETWORKS)
        for name in self.matrices:
            check_choice("matrices", name, MATRICES)
        for size in (*self.batch_sizes, self.train_size):
            check_count("batch_sizes", size, high=self.num_samples)
        check_count("shown", self.shown, high=self.num_samples)
        for name in ("networks", "epochs", "batch_sizes", "num_batches", "matrices"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")


SIZES = {
    "smoke": Config(
        networks=("logistic", "mlp"), dataset="digits", num_samples=200, epochs=(1, 4),
        batch_sizes=(8, 32, 100), num_batches=(4,), train_size=20, num_seeds=1,
    ),
    "paper": Config(
        networks=("vgg16",), dataset="cifar100", num_samples=8192, epochs=(1, 5, 25), rate=0.02,
        train_size=128, num_batches=(10,), num_seeds=1, device="cuda",
    ),
}  # fmt: skip


@record
class Cell:
    """Curves and numbers of a network and seed, ``(e, m, rows, S)``, and its spectra."""

    curves: Tensor
    spectra: dict[str, dict[str, Spectrum]]


@record
class Result(StudyResult[Config]):
    r"""Measured and predicted curves. Cells are networks, epochs, seeds and matrices.

    Attributes:
        measured: Value, spread and overlap of drawn batches, ``(3, n, e, s, m, S)``.
        errors: Standard errors of these, same shape.
        predicted: Value, spread and overlap of each prediction, ``(4, 3, n, e, s, m, S)``.
        lambda_max: Largest eigenvalue of all data, ``(n, e, s, m)``.
        along: :math:`V(\varphi_1)`, same shape.
        variance: :math:`P \sigma^2`, same shape.
        variance_errors: Its standard errors, same shape.
        losses: Training loss, ``(n, e, s)``.
        cost: Products with the whole matrix per prediction, mean.
        spectra: Of the first seed after the last epoch, by network and matrix (``mlp, ggn``): the
            spectrum of ``all data`` and that of ``a batch``, from the same start vector.
    """

    measured: Tensor
    errors: Tensor
    predicted: Tensor
    lambda_max: Tensor
    along: Tensor
    variance: Tensor
    variance_errors: Tensor
    losses: Tensor
    cost: float
    spectra: dict[str, dict[str, Spectrum]] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = (_heading, _table, _verdicts, _over_training, _edges)
        return "\n".join(line for part in parts for line in part(self))


def run(config: Config, *, progress: bool | Progress = False, state: StatePath = None) -> Result:
    """Return measured and predicted curves of all networks, epochs and seeds."""
    c = config
    seeds = range(c.seed, c.seed + c.num_seeds)
    cells = {f"{name} {seed}": (name, seed) for name in c.networks for seed in seeds}
    parts = compute_cells(
        lambda cell: _measure(c, *cell), cells, "networks", config=c, state=state, progress=progress
    )
    # (n s, e, m, rows, S) to rows, networks, epochs, seeds, matrices.
    table = torch.stack([cell.curves for cell in parts.values()])
    table = table.unflatten(0, (len(c.networks), c.num_seeds))
    table = table.permute(4, 0, 2, 1, 3, 5)
    curves, facts = table[: 3 * ROWS].unflatten(0, (ROWS, 3)), table[3 * ROWS :, ..., 0]
    return Result(
        config=c,
        measured=curves[0].contiguous(),
        errors=curves[1].contiguous(),
        predicted=curves[2:].contiguous(),
        lambda_max=facts[0].contiguous(),
        along=facts[1].contiguous(),
        variance=facts[2].contiguous(),
        variance_errors=facts[3].contiguous(),
        losses=facts[4, ..., 0].contiguous(),
        cost=float(facts[5].mean()),
        spectra={name: pair for cell in parts.values() for name, pair in cell.spectra.items()},
    )


# ------------------------------------------------------------------------------------------
# Training, and the curves of one network at one epoch.


def _measure(config: Config, name: str, seed: int) -> Cell:
    """Return curves and numbers of a network and seed, and the spectra after the last epoch."""
    curves, spectra = [], {}
    for epoch, risk in _trained(config, name, seed):
        tables = [_compare(config, risk, matrix, (seed, epoch)) for matrix in config.matrices]
        curves.append(torch.stack(tables))
        # The picture is of one network: spectra of other seeds would not be shown.
        if seed == config.seed and epoch == max(config.epochs):
            spectra = {f"{name}, {one}": _spectra(config, risk, one) for one in config.matrices}
    return Cell(curves=torch.stack(curves), spectra=spectra)


def _spectra(config: Config, risk: Risk, matrix: Any) -> dict[str, Spectrum]:
    """Return the spectra of all data and of one batch."""
    order = torch.randperm(config.num_samples, generator=seeded(config.seed))
    risks = {"all data": risk, "a batch": risk.samples(order[: config.shown])}
    # The same start vector: what differs is due to the samples.
    return {
        name: lanczos(
            curvature_operator(one, matrix),
            num_steps=min(config.num_steps, risk.space.size),
            generator=seeded(config.seed),
        )
        for name, one in risks.items()
    }


def _trained(config: Config, name: str, seed: int) -> Iterator[tuple[int, Risk]]:
    """Yield epoch and risk of a network after each epoch of the list."""
    generator = seeded(seed)
    # Samples, weights and batches draw from one generator: a run depends on its seed alone.
    device = check_device(config.device)
    images: Any = data.load(config.dataset, data_dir=config.data)
    inputs, labels = images.train.take(config.num_samples, generator=generator).tensors()
    inputs, labels = inputs.to(device), labels.to(device)
    kind, options = NETWORKS[name]
    shape = {"num_classes": images.num_classes, "input_shape": tuple(inputs.shape[1:])}
    model = models.create(kind, generator=generator, device=device, **shape, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.rate)
    for epoch in range(1, max(config.epochs) + 1):
        train_epochs(model, optimizer, (inputs, labels), config.train_size, 1, generator)
        if epoch in config.epochs:
            model.eval()  # measuring must not change the running statistics of batch norm
            yield epoch, Risk(model, cross_entropy, (inputs, labels))


def _compare(config: Config, risk: Risk, matrix: Any, place: tuple[int, int]) -> Tensor:
    """Return measured curves, their errors, the predictions, and rows of numbers, ``(rows, S)``."""
    sizes, (seed, epoch) = config.batch_sizes, place
    pairs = eigenpairs(
        curvature_operator(risk, matrix),
        largest=min(NUM_VECTORS, risk.space.size),
        rtol=1e-3,
        certify="none",
        generator=seeded(seed),
    )
    predicted = batch_prediction(
        risk, batch_sizes=sizes, matrix=matrix, pairs=pairs, generator=seeded(seed)
    )
    if pairs.vectors is None:
        raise RuntimeError("eigenpairs() returned no vectors")
    # Drawn with another seed than the groups: predictions must not see these batches.
    drawn, leading = seeded(1_000_003 * epoch + seed), pairs.vectors[:, -1]
    parts = []
    for index, size in enumerate(sizes):
        count = config.num_batches[min(index, len(config.num_batches) - 1)]
        one = measured_batches(
            risk, batch_sizes=[size], leading=leading, matrix=matrix, num_batches=count,
            generator=drawn,
        )  # fmt: skip
        parts.append(torch.stack([_numbers(one, "mean"), _numbers(one, "stderr")]))
    rows = [_numbers(getattr(predicted, name), "mean") for name in PREDICTIONS]
    facts = (predicted.lambda_max, predicted.along, predicted.variance)
    numbers = [float(one) for one in facts] + [float(predicted.variance.stderr)]
    numbers += [risk.loss(), pairs.num_products + predicted.cost]
    curves = torch.cat([torch.cat(parts, 2), torch.stack(rows)]).flatten(0, 1)
    # A number does not depend on the batch size: repeat it, so that it stacks with the curves.
    columns = torch.tensor(numbers, dtype=torch.float64)[:, None].expand(-1, len(sizes))
    return torch.cat([curves, columns])


def _numbers(curve: BatchCurve, field: str) -> Tensor:
    return torch.stack([getattr(getattr(curve, name), field) for name in QUANTITIES])


# ------------------------------------------------------------------------------------------
# The table.


def _heading(result: Result) -> list[str]:
    c = result.config
    return [
        f"Largest eigenvalue of batches, {c.num_samples:,} samples of {c.dataset}, SGD, epochs "
        f"{', '.join(map(str, c.epochs))}, {c.num_seeds} seeds, {' and '.join(c.matrices)}",
        f"Deviations of predictions from the measured mean (± standard error of the measurement); "
        f"a prediction costs {result.cost:.0f} products with the whole matrix",
        f"{'':10}{'batch':>7}{'measured':>10}"
        + "".join(f"{name[:11]:>14}" for name in PREDICTIONS)
        + f"{'overlap':>10}{'predicted':>11}{'spread':>9}{'predicted':>11}",
    ]


def deviations(result: Result) -> tuple[Tensor, Tensor]:
    """Return relative deviations of the mean, ``(4, n, S)``, and their standard errors ``(n, S)``.

    Values are divided by the largest eigenvalue of all data, and then averaged over epochs, seeds
    and matrices.
    """
    scale = result.lambda_max[..., None]
    measured = (result.measured[0] / scale).mean((1, 2, 3))
    predicted = (result.predicted[:, 0] / scale).mean((2, 3, 4))
    # The batches of the two matrices are the same, so their errors do not average out.
    # Over the other k values: sqrt(sum of the variances) / k.
    error = (result.errors[0] / scale).square().mean(3).sum((1, 2)).sqrt()
    count = result.errors.shape[2] * result.errors.shape[3]
    return predicted / measured - 1, error / count / measured


def _table(result: Result) -> list[str]:
    c, lines = result.config, []
    deviation, error = deviations(result)
    mean = result.measured.mean((2, 3, 4))  # (3, n, S)
    predicted = result.predicted[0].mean((2, 3, 4))
    for i, name in enumerate(c.networks):
        for k, size in enumerate(c.batch_sizes):
            cells = [_percent(deviation[p, i, k], error[i, k])
                     for p in range(len(PREDICTIONS))]  # fmt: skip
            lines.append(
                f"{name if k == 0 else '':10}{size:>7,}{mean[0, i, k]:>10.3g}"
                + "".join(f"{cell:>14}" for cell in cells)
                + f"{mean[2, i, k]:>10.2f}{predicted[2, i, k]:>11.2f}"
                + f"{mean[1, i, k]:>9.3g}{predicted[1, i, k]:>11.3g}"
            )
    return lines


def _percent(deviation: Tensor, error: Tensor) -> str:
    # A model that does not apply predicts nothing.
    return "-" if bool(deviation.isnan()) else f"{deviation:>+8.1%} ± {error:<3.0%}"


def _verdicts(result: Result) -> list[str]:
    """Return for each goal how many networks and batch sizes meet it, and what to trust."""
    sizes = torch.tensor(result.config.batch_sizes)
    deviation = deviations(result)[0].abs()
    means, predicted = result.measured.mean((2, 3, 4)), result.predicted[0].mean((2, 3, 4))
    lines = []
    for name, shown in zip(PREDICTIONS, deviation, strict=True):
        worst = ", ".join("-" if math.isnan(d) else f"{d:.0%}" for d in shown.amax(0).tolist())
        lines.append(f"largest deviation of {name}: {worst}")
    goals = torch.tensor(
        [next((g for low, g in VALUE_GOALS.items() if size >= low), math.inf) for size in sizes]
    )
    checks = {
        "mean within 10 % (20 % below 32)": deviation[0] <= goals,
        f"overlap within {OVERLAP_GOAL[1]:g} from {OVERLAP_GOAL[0]} on": (
            (means[2] - predicted[2]).abs()[:, sizes >= OVERLAP_GOAL[0]] <= OVERLAP_GOAL[1]
        ),
        f"spread within {SPREAD_GOAL:.0%}": (
            (predicted[1] / means[1] - 1).abs()[means[1] > 0] <= SPREAD_GOAL
        ),
    }
    for title, met in checks.items():
        lines.append(f"subspace, {title}: {int(met.sum())} of {met.numel()}")
    lines.append(f"trust, as all networks are within {TRUSTED:.0%}:")
    for name, shown in zip(PREDICTIONS, deviation, strict=True):
        # A model that does not apply to one of the networks is not within anything.
        within = [f"{size:,}" for size, d in zip(result.config.batch_sizes, shown.T, strict=True)
                  if is_below(d, TRUSTED)]  # fmt: skip
        lines.append(f"  {name:14} for batches of {', '.join(within) or 'no size'}")
    return lines


def _over_training(result: Result) -> list[str]:
    """Return the variance over training, on average over seeds."""
    c = result.config
    lines = [f"{'variance over training':28}" + "".join(f"{f'epoch {e}':>12}" for e in c.epochs)]
    for m, matrix in enumerate(c.matrices):
        for i, name in enumerate(c.networks):
            for title, part in (("P sigma^2", result.variance), ("V(phi_1)", result.along)):
                numbers = part[i, :, :, m].mean(1)
                label = f"{name}, {matrix}, {title}"
                lines.append(f"{label:28}" + "".join(f"{float(v):>12.4g}" for v in numbers))
    return lines


def _edges(result: Result) -> Iterator[str]:
    """Yield the ends of bulk and spectrum, of all data and of one batch."""
    if result.spectra:
        yield (f"{f'spectra, a batch of {result.config.shown:,}':28}{'':>10}{'smallest':>12}"
               f"{'bulk from':>12}{'to':>12}{'second':>12}{'largest':>12}")  # fmt: skip
    # A file of results does not keep the order of names.
    for name, which in itertools.product(sorted(result.spectra), ("all data", "a batch")):
        spectrum = result.spectra[name][which]
        edge, values = bulk_edge(spectrum), spectrum.values
        numbers = (values[0], edge.lower, edge.upper, values[-2], values[-1])
        title = name if which == "all data" else ""
        yield f"{title:28}{which:>10}" + "".join(f"{float(v):>12.4g}" for v in numbers)


# ------------------------------------------------------------------------------------------
# The picture.


def figure(result: Result) -> style.Figure:
    """Draw values and overlaps over batch sizes, and spectral densities, a column per network."""
    c = result.config
    # Results of earlier versions have no spectra.
    matrices = [matrix for matrix in c.matrices if f"{c.networks[0]}, {matrix}" in result.spectra]
    drawing, axes = plots.panels(2 + len(matrices), len(c.networks), width=3.4, height=2.7)
    for place, axis in enumerate(axes):
        row, column = divmod(place, len(c.networks))
        name = c.networks[column]
        if row < 2:
            _draw_curves(axis, result, column, 2 * row)
        else:
            matrix = matrices[row - 2]
            _draw_densities(axis, result.spectra[f"{name}, {matrix}"], c.shown)
            style.set_title(axis, matrix)
        if row == 0:
            style.set_title(axis, f"{name}, epoch {c.epochs[-1]}")
        if column:
            axis.set_ylabel("")
    style.share_legend(drawing)
    return drawing


def _draw_curves(axis: Any, result: Result, i: int, quantity: int) -> None:
    """Draw a measured quantity of a network and its predictions over batch sizes."""
    c = result.config
    for p, prediction in enumerate(PREDICTIONS):
        # The last epoch of the first matrix, on average over seeds.
        values = result.predicted[p, quantity, i, -1, :, 0].mean(0)
        style.line(axis, c.batch_sizes, values, style.STYLE.palette[p], prediction, marker="")
    seen = result.measured[quantity, i, -1, :, 0]
    error = stderr(seen) if len(seen) > 1 else result.errors[quantity, i, -1, 0, 0]
    style.bars(axis, c.batch_sizes, seen.mean(0).numpy(), yerr=error.numpy(), fmt="o",
               color="black", label="measured")  # fmt: skip
    style.batch_size_x(axis, c.batch_sizes)
    if quantity == 0:
        style.log_scale(axis)
    label = "overlap" if quantity else r"$\lambda_1$ of a batch"
    style.finish(axis, axis.get_xlabel(), label)


def _draw_densities(axis: Any, pair: Mapping[str, Spectrum], size: int) -> None:
    """Draw the spectral densities of all data and of a batch in one panel."""
    # Colours of their own: the one legend of the figure also names the predictions.
    axis.set_prop_cycle(color=["black", style.STYLE.palette[4]])
    for name, label in (("all data", "all data"), ("a batch", f"a batch of {size:,}")):
        plots.density(pair[name], ax=axis, log=True)
        # Without the width of the smoothing, which is another one in each panel.
        axis.lines[-1].set_label(label)
    # In a large matrix one eigenvalue has little mass: the largest must be seen.
    seen = [
        float(np.interp(float(pair[name].values[-1]), *line.get_data()))
        for name, line in zip(("all data", "a batch"), axis.lines, strict=True)
    ]
    axis.set_ylim(bottom=min(axis.get_ylim()[0], 0.2 * min(seen)))


# ------------------------------------------------------------------------------------------
# The published claims.


def evidence(result: Result) -> list[Evidence]:
    """Return what the papers' models predict, and what was measured."""
    rows = [_claim(result, place) for place in range(len(PREDICTIONS))]
    return [*rows, *_correction(result), *_broadening(result)]


def _claim(result: Result, place: int) -> Evidence:
    c, name = result.config, PREDICTIONS[place]
    deviation, error = deviations(result)
    cells = []
    for i, network in enumerate(c.networks):
        numbers = (
            f"{size:,}: {_percent(d, e).strip()}"
            for size, d, e in zip(c.batch_sizes, deviation[place, i], error[i], strict=True)
        )
        cells.append(f"{network} {', '.join(numbers)}")
    published = name in ("additive", "multiplicative")
    # The paper compares at B = 128, in standard deviations between batches.
    nearest = min(range(len(c.batch_sizes)), key=lambda k: abs(c.batch_sizes[k] - 128))
    gap = (result.predicted[place, 0] - result.measured[0]).mean((1, 2, 3))[:, nearest]
    distances = (gap / result.measured[1].mean((1, 2, 3))[:, nearest]).abs()
    # Not every matrix is positive, as the multiplicative model asks.
    applies = distances.isfinite()
    units = float(distances[applies].max()) if applies.any() else math.nan
    holds = is_below(units, 1.0)
    outside = [one for one, fits in zip(c.networks, applies.tolist(), strict=True) if not fits]
    return Evidence(
        paper="SPECTRA",
        where="Section 5.6, Figure 5.6" if published else "Section 5.6",
        what=f"largest eigenvalue of batches: deviation of the {name} prediction by batch size "
        f"({' and '.join(c.matrices)}, {c.num_samples:,} samples of {c.dataset})",
        published="within one standard deviation at B = 128" if published else "-",
        measured="; ".join(cells),
        verdict=("agrees" if holds else "differs") if published else "extends",
        why=f"up to {units:.1f} standard deviations at B = {c.batch_sizes[nearest]}"
        + (", but far off for small batches" if published and holds else "")
        + (f"; it does not apply to {', '.join(outside)}" if outside else ""),
    )


def _correction(result: Result) -> Iterator[Evidence]:
    """Yield the exponent of the relative spread between batches, of two runs or more."""
    c = result.config
    # Batches are drawn without replacement: variances fall as 1/b = 1/B - 1/N.
    sizes = [size / (1 - size / c.num_samples) for size in c.batch_sizes if size < c.num_samples]
    if len(sizes) < 2:
        return
    relative = (result.measured[1] / result.measured[0])[..., : len(sizes)]
    # The batches of the two matrices are the same, so they count once.
    slopes = exponents(sizes, relative).mean(-1).flatten()
    if len(slopes) < 2:
        return  # the slope of one run has no error
    nearest = min(range(len(sizes)), key=lambda k: abs(c.batch_sizes[k] - 128))
    shares = relative.mean((1, 2, 3))[:, nearest]
    published, mean = ((slopes.mean() - one).abs() for one in CORRECTIONS)
    holds = is_below(published, float(mean))
    reason = (
        "nearer to -1/2, as of means over B samples; the cited rate bounds the distribution "
        "of all eigenvalues"
    )
    yield Evidence(
        paper="SPECTRA",
        where="Section 5.6",
        what="spread of the largest eigenvalue between batches over its mean: exponent over the "
        f"batch size, and value at B = {c.batch_sizes[nearest]} "
        f"({' and '.join(c.matrices)}, {', '.join(c.networks)})",
        published="-1/4, about 30 % at B = 128",
        measured=f"{spread(slopes)}; {float(shares.min()):.0%} to {float(shares.max()):.0%}",
        verdict="agrees" if holds else "differs",
        why="" if holds else reason,
    )


def _broadening(result: Result) -> Iterator[Evidence]:
    """Yield how much larger the extreme eigenvalues and the bulk of one batch are."""
    c = result.config
    for matrix in c.matrices:
        pairs = {name: result.spectra.get(f"{name}, {matrix}") for name in c.networks}
        ratios = [_ratios(pair) for pair in pairs.values() if pair is not None]
        if not ratios:
            continue
        largest, second, width = torch.tensor(ratios).T.tolist()
        listed = ("largest " + _times(largest), "second " + _times(second), "bulk " + _times(width))
        holds = all(value > 1 for value in (*largest, *second, *width))
        yield Evidence(
            paper="SPECTRA",
            where="Figure 5.2" if matrix == "hessian" else "Figure 5.4",
            what=f"{matrix} of a batch of {c.shown} over that of {c.num_samples:,} samples: two "
            f"largest eigenvalues, and width of the bulk ({', '.join(pairs)})",
            published="larger outliers and a wider bulk; curves without numbers",
            measured="; ".join(listed),
            verdict="agrees" if holds else "differs",
            why="" if holds else "not all of them; one batch of each network",
        )


def _ratios(pair: Mapping[str, Spectrum]) -> list[float]:
    """Return largest and second eigenvalue and width of the bulk, of a batch over all data."""
    pieces = zip(_extent(pair["a batch"]), _extent(pair["all data"]), strict=True)
    return [mine / other if other > 0 else math.nan for mine, other in pieces]


def _extent(spectrum: Spectrum) -> tuple[float, float, float]:
    edge = bulk_edge(spectrum)
    return float(spectrum.values[-1]), float(spectrum.values[-2]), edge.upper - edge.lower


def _times(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
