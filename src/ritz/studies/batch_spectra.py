"""Largest eigenvalue of mini-batches, measured and predicted: Spectral Machine Learning, 5.5-5.6.

Networks are trained by SGD. At several epochs, the study draws batches and computes the largest
eigenvalue of their Hessians and Gauss-Newton matrices. It compares them with four predictions that
need only products with the matrix of all data. After the last epoch, it also computes the spectral
densities of all data and of one batch. ``--size paper`` is VGG-16 on CIFAR-100 on a GPU.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from ritz import data, models, plots
from ritz._core.checks import check_count, check_device, check_range, is_below
from ritz._core.journal import Journal, Parts
from ritz._core.progress import Progress
from ritz._core.results import stderr
from ritz.curvature import Risk, curvature_operator
from ritz.curvature._shared import MATRICES
from ritz.measures import (
    BatchCurve,
    BatchPrediction,
    batch_prediction,
    bulk_edge,
    measured_batches,
)
from ritz.plots._shared import style
from ritz.spectra import Spectrum, lanczos
from ritz.studies._evidence import Evidence, all_of, judge, located, spread
from ritz.studies._protocol import (
    StatePath,
    StudyResult,
    check_entries,
    check_minimums,
    record,
    seeded,
    track,
)
from ritz.studies._training import exponents, train_epochs

# Networks by name, with the options of their models.
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "logistic": ("logistic", {}),
    "mlp": ("mlp", {"hidden": (64, 32)}),
    "lenet": ("lenet", {"width": 3, "hidden": (40, 20)}),
    "tanh": ("mlp", {"hidden": (64, 64, 64), "activation": "tanh"}),
    "resnet": ("resnet20", {"width": 4}),
    # Without dropout, so that training minimises the loss whose curvature is measured.
    "vgg16": ("vgg16", {"dropout": 0.0}),
}
# The first is what `advise` uses; goals are judged on it.
PREDICTIONS = ("best", "subspace", "directional", "additive", "multiplicative")
QUANTITIES = ("value", "spread", "overlap")
ROWS = 2 + len(PREDICTIONS)  # measured, its errors, and the predictions
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
        num_samples: Samples ``N`` of the curvature, which are among those of training.
        num_training: Samples of training. Defaults to ``num_samples``.
        epochs: Epochs after which the curvature is measured.
        batch_sizes: Batch sizes, ascending.
        num_batches: Batches drawn for each size. The last entry is used for all further sizes.
        matrices: ``hessian`` and ``ggn``.
        shown: Size of the batch whose spectrum is compared with that of all data.
        num_steps: Lanczos steps of these spectra. Predictions use their leading Ritz vectors.
        num_vectors: Vectors of the subspace of the predictions.
        group_size: Samples per group; see :func:`ritz.measures.batch_prediction`.
        rate: Learning rate of SGD.
        momentum: Momentum of SGD.
        train_size: Batch size of SGD.
        num_seeds: Runs of every network, with other samples, initial weights and batches.
        device: ``cpu`` or ``cuda``.
        seed: Run ``i`` has the seed ``seed + i``.
        data: Folder of the data. Defaults to the environment variable ``RITZ_DATA``.
    """

    networks: tuple[str, ...] = ("logistic", "mlp", "lenet", "tanh")
    dataset: Literal["digits", "mnist", "cifar100"] = "mnist"
    num_samples: int = 4096
    num_training: int | None = None
    epochs: tuple[int, ...] = (1, 10)
    batch_sizes: tuple[int, ...] = (8, 32, 128, 512, 2048)
    num_batches: tuple[int, ...] = (200, 60, 20, 10, 5)
    matrices: tuple[str, ...] = MATRICES
    shown: int = 128
    num_steps: int = 80
    num_vectors: int = 20
    group_size: int | None = None
    rate: float = 0.05
    momentum: float = 0.0
    train_size: int = 64
    num_seeds: int = 3
    device: str = "cpu"
    seed: int = 0
    data: str | None = None

    def __post_init__(self) -> None:
        check_minimums(
            self, num_samples=20, epochs=1, num_batches=2, num_steps=3, num_vectors=1, rate=1e-6,
            num_seeds=1, seed=0, batch_sizes=1,
        )  # fmt: skip
        check_range("momentum", self.momentum, low=0.0, high=0.999)
        check_minimums(self, num_training=self.num_samples)
        check_entries(self, networks=NETWORKS, matrices=MATRICES)
        for size in self.batch_sizes:
            check_count("batch_sizes", size, high=self.num_samples)
        check_count("train_size", self.train_size, high=self.training)
        check_count("shown", self.shown, high=self.num_samples)

    @property
    def training(self) -> int:
        """Samples of training."""
        return self.num_samples if self.num_training is None else self.num_training


SIZES = {
    "smoke": Config(
        networks=("logistic", "mlp"), dataset="digits", num_samples=200, epochs=(1, 4),
        batch_sizes=(8, 32, 100), num_batches=(4,), train_size=20, num_seeds=1,
    ),
    "paper": Config(
        networks=("vgg16",), dataset="cifar100", num_samples=8192, num_training=50_000,
        epochs=(1, 5, 25), rate=0.02, momentum=0.9, train_size=128, num_batches=(10,),
        num_seeds=1, device="cuda",
    ),
}  # fmt: skip


@record
class Prediction:
    """What is predicted from all data: the curves, and what they and the picture are made of."""

    curves: BatchPrediction
    leading: Tensor  # the first eigenvector, (P,)
    spectrum: Spectrum
    loss: float


@record
class Cell:
    """Curves and numbers ``(..., rows, S)``, and spectra by network and matrix."""

    curves: Tensor
    spectra: dict[str, dict[str, Spectrum]]


@record
class Result(StudyResult[Config]):
    r"""Measured and predicted curves. Cells are networks, epochs, seeds and matrices.

    Attributes:
        measured: Value, spread and overlap of drawn batches, ``(3, n, e, s, m, S)``.
        errors: Standard errors of these, same shape.
        predicted: Value, spread and overlap of each prediction, ``(5, 3, n, e, s, m, S)``.
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
    spectra: dict[str, dict[str, Spectrum]]

    def __str__(self) -> str:
        parts = (_heading, _table, _verdicts, _over_training, _edges)
        return "\n".join(line for part in parts for line in part(self))


def run(config: Config, *, progress: bool | Progress = False, state: StatePath = None) -> Result:
    """Return measured and predicted curves of all networks, epochs and seeds."""
    c = config
    seeds = range(c.seed, c.seed + c.num_seeds)
    cells = {f"{name} {seed}": (name, seed) for name in c.networks for seed in seeds}
    # A single network takes long enough for a bar of each of its steps.
    inner = progress if len(cells) == 1 else False
    finished = Parts(Journal(state, {"config": repr(c)}))
    parts = {
        key: finished.get(key, partial(_measure, c, *cell, inner))
        for key, cell in track(cells.items(), "networks", progress)
    }
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


def _measure(
    config: Config, name: str, seed: int, progress: bool | Progress, *, state: StatePath
) -> Cell:
    """Return curves of a network and seed ``(e, m, rows, S)``, and spectra of the last epoch."""
    training = Training(config, name, seed, state, progress)
    finished = Parts(Journal(state, {"config": repr(config)}))
    cells = [
        finished.get(f"{epoch} {matrix}", partial(_compare, training, epoch, matrix))
        for epoch, matrix in itertools.product(sorted(config.epochs), config.matrices)
    ]
    curves = torch.stack([cell.curves for cell in cells])
    spectra = {name: pair for cell in cells for name, pair in cell.spectra.items()}
    return Cell(curves=curves.unflatten(0, (len(config.epochs), -1)), spectra=spectra)


class Training:
    """A network that is trained as far as its curvature is asked for, and its saved state."""

    def __init__(
        self, config: Config, name: str, seed: int, state: StatePath, progress: bool | Progress
    ) -> None:
        self.config, self.name, self.seed, self.progress = config, name, seed, progress
        # Samples, weights and batches draw from one generator: a run depends on its seed alone.
        self._generator = seeded(seed)
        device = check_device(config.device)
        images: Any = data.load(config.dataset, data_dir=config.data)
        split = images.train.take(config.training, generator=self._generator)
        inputs, labels = split.tensors()
        self._train = inputs.to(device), labels.to(device)
        kind, options = NETWORKS[name]
        shape = {"num_classes": images.num_classes, "input_shape": tuple(inputs.shape[1:])}
        self._model = models.create(
            kind, generator=self._generator, device=device, **shape, **options
        )
        self._params = list(self._model.parameters())
        self._optimizer = SGD(self._params, lr=config.rate, momentum=config.momentum)
        path = None if state is None else Path(f"{state}.training")
        self._journal = Journal(path, {"config": repr(config)})
        self._epoch = 0
        if (saved := self._journal.load()) is not None:
            self._epoch = self._restore(saved)

    def risk(self, epoch: int) -> Risk:
        """Return the risk after an epoch; epochs must not be asked for in falling order."""
        for done in range(self._epoch, epoch):
            train_epochs(
                self._model, self._optimizer, self._train, self.config.train_size, 1,
                self._generator, label=f"epoch {done + 1}", progress=self.progress,
            )  # fmt: skip
            self._epoch = done + 1
            if self._journal.due():
                self._journal.save(self._state(), step=self._epoch)
        self._model.eval()  # measuring must not change the running statistics of batch norm
        data = tuple(tensor[: self.config.num_samples] for tensor in self._train)
        return Risk(self._model, cross_entropy, data)

    def _state(self) -> dict[str, Any]:
        buffers = [self._optimizer.state[p].get("momentum_buffer") for p in self._params]
        return {
            "epoch": self._epoch,
            "model": dict(self._model.state_dict()),
            "momentum": buffers,
            "generator": self._generator.get_state(),
        }

    def _restore(self, saved: Mapping[str, Any]) -> int:
        self._model.load_state_dict(saved["model"])
        for param, buffer in zip(self._params, saved["momentum"], strict=True):
            if buffer is not None:
                self._optimizer.state[param]["momentum_buffer"] = buffer.to(param.device)
        self._generator.set_state(saved["generator"])
        return int(saved["epoch"])


def _compare(training: Training, epoch: int, matrix: Any, *, state: StatePath) -> Cell:
    """Return measured curves, their errors, the predictions and numbers, ``(rows, S)``."""
    c, risk = training.config, training.risk(epoch)
    finished = Parts(Journal(state, {"config": repr(c)}))
    prediction = finished.get("prediction", partial(_predict, training, risk, matrix))

    def measure(size: int, count: int) -> Tensor:
        # Drawn with another seed than the groups: predictions must not see these batches.
        one = measured_batches(
            risk, batch_sizes=[size], leading=prediction.leading, matrix=matrix, num_batches=count,
            generator=seeded(1_000_003 * epoch + 10_007 * size + training.seed),
            progress=training.progress,
        )  # fmt: skip
        return torch.stack([_numbers(one, "mean"), _numbers(one, "stderr")])

    # The last number of batches is that of all further sizes.
    counts = itertools.chain(c.num_batches, itertools.repeat(c.num_batches[-1]))
    parts = [
        finished.get(f"{size}", lambda state, size=size, count=count: measure(size, count))
        for size, count in zip(c.batch_sizes, counts, strict=False)
    ]
    curves = prediction.curves
    rows = [_numbers(getattr(curves, name), "mean") for name in PREDICTIONS]
    facts = (curves.lambda_max, curves.along, curves.variance)
    numbers = [float(one) for one in facts] + [float(curves.variance.stderr)]
    numbers += [prediction.loss, prediction.spectrum.num_products + curves.cost]
    table = torch.cat([torch.cat(parts, 2), torch.stack(rows)]).flatten(0, 1)
    # A number does not depend on the batch size: repeat it, so that it stacks with the curves.
    columns = torch.tensor(numbers, dtype=torch.float64)[:, None].expand(-1, len(c.batch_sizes))
    spectra = {}
    # The picture is of one network: spectra of other seeds would not be shown.
    if training.seed == c.seed and epoch == max(c.epochs):
        pair = {"all data": prediction.spectrum, "a batch": _spectrum(training, risk, matrix)}
        spectra = {f"{training.name}, {matrix}": pair}
    return Cell(curves=torch.cat([table, columns]), spectra=spectra)


def _predict(training: Training, risk: Risk, matrix: Any, *, state: StatePath) -> Prediction:
    c = training.config
    spectrum = lanczos(
        curvature_operator(risk, matrix),
        num_steps=min(c.num_steps, risk.space.size),
        vectors=True,
        state=state,
        generator=seeded(training.seed),
        progress=training.progress,
    )
    if spectrum.vectors is None:
        raise RuntimeError("lanczos() returned no vectors")
    curves = batch_prediction(
        risk, batch_sizes=c.batch_sizes, matrix=matrix, pairs=spectrum,
        num_vectors=min(c.num_vectors, len(spectrum.values)), group_size=c.group_size,
        generator=seeded(training.seed), progress=training.progress,
    )  # fmt: skip
    return Prediction(
        curves=curves,
        leading=spectrum.vectors[:, -1].clone(),
        spectrum=replace(spectrum, vectors=None),
        loss=risk.loss(),
    )


def _spectrum(training: Training, risk: Risk, matrix: Any) -> Spectrum:
    """Return the spectrum of one batch."""
    c = training.config
    order = torch.randperm(c.num_samples, generator=seeded(c.seed))
    # The start vector is that of all data: what differs is due to the samples.
    return lanczos(
        curvature_operator(risk.samples(order[: c.shown]), matrix),
        num_steps=min(c.num_steps, risk.space.size),
        generator=seeded(training.seed),
        progress=training.progress,
    )


def _numbers(curve: BatchCurve, field: str) -> Tensor:
    return torch.stack([getattr(getattr(curve, name), field) for name in QUANTITIES])


# ------------------------------------------------------------------------------------------
# The table.


def _heading(result: Result) -> list[str]:
    c = result.config
    return [
        f"Largest eigenvalue of batches, {c.num_samples:,} samples of {c.dataset}, SGD, epochs "
        f"{', '.join(map(str, c.epochs))}, seeds: {c.num_seeds}, {' and '.join(c.matrices)}",
        f"Deviations of predictions from the measured mean (± standard error of the measurement); "
        f"a prediction costs {result.cost:.0f} products with the whole matrix",
        f"{'':10}{'batch':>7}{'measured':>10}"
        + "".join(f"{name:>16}" for name in PREDICTIONS)
        + f"{'overlap':>10}{'predicted':>11}{'spread':>16}{'predicted':>11}",
    ]


def deviations(result: Result) -> tuple[Tensor, Tensor]:
    """Return relative deviations of the mean, ``(5, n, S)``, and their standard errors ``(n, S)``.

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
    # Relative standard errors of the spreads; both matrices have the same batches.
    runs = result.errors.shape[2] * result.errors.shape[3]
    doubt = result.errors[1].square().mean(3).sum((1, 2)).sqrt() / runs / mean[1]
    for i, name in enumerate(c.networks):
        for k, size in enumerate(c.batch_sizes):
            cells = [_percent(deviation[p, i, k], error[i, k])
                     for p in range(len(PREDICTIONS))]  # fmt: skip
            lines.append(
                f"{name if k == 0 else '':10}{size:>7,}{mean[0, i, k]:>10.3g}"
                + "".join(f"{cell:>16}" for cell in cells)
                + f"{mean[2, i, k]:>10.2f}{predicted[2, i, k]:>11.2f}"
                + f"{mean[1, i, k]:>8.3g} ± {doubt[i, k]:<5.0%}{predicted[1, i, k]:>11.3g}"
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
        lines.append(f"{PREDICTIONS[0]}, {title}: {int(met.sum())} of {met.numel()}")
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
    """Draw values and overlaps over batch sizes, and spectral densities.

    Each network has a column of panels; a single network has two columns.
    """
    c = result.config
    # A column per network; a single network would make a tall strip, so it has two.
    count = (2 + len(c.matrices)) * len(c.networks)
    drawing, axes = style.panel_grid(count, max(2, len(c.networks)), width=3.4, height=2.7)
    for place, axis in enumerate(axes):
        row, column = divmod(place, len(c.networks))
        name = c.networks[column]
        if row < 2:
            _draw_curves(axis, result, column, 2 * row)
        else:
            matrix = c.matrices[row - 2]
            _draw_densities(axis, result.spectra[f"{name}, {matrix}"], c.shown)
            style.set_title(axis, style.MATRICES.get(matrix, matrix.capitalize()))
        if row == 0:
            style.set_title(axis, f"{name}, epoch {c.epochs[-1]}")
        if column:  # the panels of a row share their label
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
    axis.set_prop_cycle(color=["black", style.STYLE.palette[5]])
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
    """Return how far a prediction is off, for the network where it is worst."""
    c, name = result.config, PREDICTIONS[place]
    deviation, errors = deviations(result)
    off = deviation[place]  # (n, S)
    # A model that does not apply to a network predicts nothing for it.
    applies = off.isfinite().all(1)
    worst = off.nan_to_num().gather(0, off.nan_to_num().abs().argmax(0, keepdim=True))[0]
    published, k = name in ("additive", "multiplicative"), _nearest(c.batch_sizes)
    # The paper compares at B = 128, in standard deviations between batches.
    units = torch.stack([off, errors])[..., k] / _relative(result).mean((1, 2, 3))[:, k]
    units = units[:, applies]
    why = f"up to {_largest(units[0]):.1f} standard deviations at B = {c.batch_sizes[k]}"
    parts = [{"verdict": located(mean, error, -1.0, 1.0), "why": why}
             for mean, error in units.T.tolist()]  # fmt: skip
    known = all_of(*parts) if published else {"verdict": "extends", "why": why}
    if known["verdict"] != "differs" and published and _largest(off) > TRUSTED:
        known["why"] += f"; {_largest(off):.0%} off at another size"
    if not bool(applies.all()):
        outside = [one for one, fits in zip(c.networks, applies, strict=True) if not fits]
        known["why"] += f"; it does not apply to {', '.join(outside)}"
    return Evidence(
        paper="SPECTRA",
        where="Section 5.6, Figure 5.6" if published else "Section 5.6",
        what=f"{name} prediction of lambda_1: worst error, B = "
        + ", ".join(f"{size:,}" for size in c.batch_sizes),
        published="within one standard deviation at B = 128" if published else "-",
        measured=", ".join(f"{w:+.0%}" for w in worst) if bool(applies.any()) else "-",
        **known,
    )


def _largest(values: Tensor) -> float:
    return max(values.abs().nan_to_num().flatten().tolist(), default=math.nan)


def _nearest(sizes: tuple[int, ...]) -> int:
    return min(range(len(sizes)), key=lambda k: abs(sizes[k] - 128))


def _relative(result: Result) -> Tensor:  # the spread of lambda_1 between batches
    return result.measured[1] / result.measured[0]


def setting(result: Result) -> str:
    """Return networks, matrices and samples."""
    c = result.config
    networks, kinds = ", ".join(c.networks), " and ".join(c.matrices)
    seeds = f"{c.num_seeds} seed{'s'[: c.num_seeds > 1]}"
    return f"{networks} on {c.num_samples:,} samples of {c.dataset}, {kinds}, {seeds}."


def _correction(result: Result) -> Iterator[Evidence]:
    """Yield the exponent of the relative spread between batches, of two runs or more."""
    c = result.config
    # Batches are drawn without replacement: variances fall as 1/b = 1/B - 1/N.
    sizes = [size / (1 - size / c.num_samples) for size in c.batch_sizes if size < c.num_samples]
    if len(sizes) < 2:
        return
    relative = _relative(result)[..., : len(sizes)]
    # The batches of the two matrices are the same, so they count once.
    slopes = exponents(sizes, relative).mean(-1).flatten()
    if len(slopes) < 2:
        return  # the slope of one run has no error
    nearest = _nearest(c.batch_sizes[: len(sizes)])
    shares = relative.mean((1, 2, 3))[:, nearest]
    yield Evidence(
        paper="SPECTRA",
        where="Section 5.6",
        what=f"spread of lambda_1: exponent over B, and share at B = {c.batch_sizes[nearest]}",
        published="-1/4, about 30 % at B = 128",
        measured=f"{spread(slopes)}; {float(shares.min()):.0%} to {float(shares.max()):.0%}",
        # Nearer to the published exponent than to that of means.
        **judge(slopes, low=sum(CORRECTIONS) / 2, cause="closer to -1/2, as for sample means"),
    )


def _broadening(result: Result) -> Iterator[Evidence]:
    """Yield how much larger the extreme eigenvalues and the bulk of one batch are."""
    c = result.config
    for matrix in c.matrices:
        pairs = {name: result.spectra.get(f"{name}, {matrix}") for name in c.networks}
        ratios = [_ratios(pair) for pair in pairs.values() if pair is not None]
        if not ratios:
            continue
        columns = torch.tensor(ratios).T.tolist()
        holds = all(value > 1 for values in columns for value in values)
        yield Evidence(
            paper="SPECTRA",
            where="Figure 5.2" if matrix == "hessian" else "Figure 5.4",
            what=f"{matrix}, a batch of {c.shown} over all: lambda_1, lambda_2, width of the bulk",
            published="all above 1",
            measured=", ".join(map(_range, columns)),
            verdict="agrees" if holds else "differs",
            why="one batch of each network",
        )


def _ratios(pair: Mapping[str, Spectrum]) -> list[float]:
    """Return largest and second eigenvalue and width of the bulk, of a batch over all data."""
    pieces = zip(_extent(pair["a batch"]), _extent(pair["all data"]), strict=True)
    return [mine / other if other > 0 else math.nan for mine, other in pieces]


def _extent(spectrum: Spectrum) -> tuple[float, float, float]:
    edge = bulk_edge(spectrum)
    return float(spectrum.values[-1]), float(spectrum.values[-2]), edge.upper - edge.lower


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low + (f" to {high}" if high != low else "")
