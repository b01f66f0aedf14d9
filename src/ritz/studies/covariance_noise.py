"""Large batches with the gradient noise of small ones: covariance noise paper.

After Wen et al., *Interplay between optimization and generalization of stochastic gradient descent
with covariance noise*. Networks are trained for the same number of epochs with small batches, with
large batches and ghost batch norm, and with large batches and gradient noise. Two examples in two
dimensions are computed exactly.

The learning rate of a method is chosen from a grid: the one with the best validation accuracy for
the worst of several seeds. No other run uses these seeds. A learning rate at which one of them
diverges is therefore not chosen, however good the others are.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ritz import plots
from ritz._core.checks import check_count
from ritz._core.progress import Progress
from ritz._core.training_config import TrainingPrecision
from ritz.curvature import Risk, gradient_statistics, noise_sample
from ritz.plots._shared import style
from ritz.studies._covariance_noise_runs import NOISES, Runner
from ritz.studies._evidence import Evidence, near, points, signed, spread
from ritz.studies._protocol import (
    StatePath,
    StudyResult,
    TimeLimit,
    check_entries,
    check_minimums,
    column,
    compute_cells,
    record,
    row,
    seeded,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A row of the tables.

    Attributes:
        data: Data set.
        model: Model by name.
        published: Accuracy in percent by method, where the paper has one.
    """

    data: str
    model: str
    published: Mapping[str, float] = field(default_factory=dict)


def _task(data: str, model: str, *table1: float, table2: tuple[float, ...] = ()) -> Task:
    # The columns of Table 2 without those that it repeats.
    extra = ("batch change", "multiplicative", "kfac", "trace")
    first = dict(zip(("small", "large", "diagonal"), table1, strict=True))
    return Task(data=data, model=model, published=first | dict(zip(extra, table2, strict=False)))


# Accuracies by small batches, large batches and diagonal noise (Table 1), then Table 2.
TASKS = {
    "digits/mlp": Task(data="digits", model="mlp"),
    "mnist/mlp": _task("mnist", "mlp", 98.10, 97.95, 98.10),
    "mnist/lenet": _task("mnist", "lenet", 99.10, 98.88, 99.11),
    "fashion/lenet": _task("fashion-mnist", "lenet", 91.15, 88.89, 90.79),
    "cifar10/alexnet": _task("cifar10", "alexnet", 87.80, 86.42, 87.61),
    "cifar100/alexnet": _task("cifar100", "alexnet", 59.21, 56.79, 59.10),
    "cifar10/vgg16": _task("cifar10", "vgg16_bn", 93.25, 91.81, 93.19,
                           table2=(93.18, 90.98, 93.06, 92.91)),
    "cifar100/vgg16": _task("cifar100", "vgg16_bn", 72.83, 69.45, 72.11,
                            table2=(72.44, 68.77, 71.86, 71.35)),
    "cifar10/resnet44": _task("cifar10", "resnet44", 93.42, 91.93, 92.88,
                              table2=(93.02, 91.28, 92.81, 92.33)),
    "cifar100/resnet44x2": _task("cifar100", "resnet44x2", 75.55, 73.13, 74.26,
                                 table2=(75.16, 71.98, 73.84, 73.77)),
}  # fmt: skip
MEASURES = ("calibrated max", "generalisation", "optimisation")
REGIMES = ("small", "large", *(f"large + {noise}" for noise in NOISES))
METHODS = ("small", "large", "diagonal", "full", "batch change", "multiplicative", "kfac", "trace")


@record
class Config:
    """Which rows and methods of the tables, and how long they are trained.

    Attributes:
        tasks: Rows of the tables, such as ``mnist/mlp``.
        methods: Columns: ``small``, ``large``, and large batches with ``diagonal``, ``full``,
            ``multiplicative``, ``kfac`` or ``trace`` noise, or after small ones: ``batch change``.
        num_epochs: Epochs of every run.
        num_seeds: Runs of every method.
        large: Samples of a large batch.
        small: Samples of a small batch.
        rates: Learning rates to choose from. A single one is not tuned.
        small_rates: Learning rates to choose from with small batches. Defaults to ``rates``.
        tuning_epochs: Epochs of the runs that choose a learning rate. Defaults to ``num_epochs``.
        tuning_seeds: Runs that judge a learning rate, by the worst of them.
        noise_until: Fraction of the run after which noise, or small batches, end.
        precision: Precision of training. Measurements are in TF32 for the others than float32.
        fisher_every: Epochs between measurements of the Fisher matrix.
        variance_samples: Training samples from which the gradient variances are computed.
        max_seconds: Time after which no method begins; see ``TimeLimit``.
        device: Device of the networks.
        data: Folder of the data sets. Defaults to the environment variable ``RITZ_DATA``.
        seed: Run ``i`` has the seed ``seed + i``, and run ``i`` of the choice of a learning rate
            ``seed + 1000 + i``.
    """

    tasks: tuple[str, ...] = ("mnist/mlp",)
    methods: tuple[str, ...] = ("small", "large", "diagonal", "full")
    # The paper trains for 200 epochs.
    num_epochs: int = 12
    num_seeds: int = 3
    large: int = 4096
    small: int = 128
    # From the usual 0.1 of small batches to 1.6, the best with batches of 4096 (appendix E.1). The
    # grid of the paper is not given.
    rates: tuple[float, ...] = (0.1, 0.4, 1.6)
    small_rates: tuple[float, ...] | None = None
    tuning_epochs: int | None = None
    tuning_seeds: int = 3
    noise_until: float = 0.25
    precision: TrainingPrecision = "float32"
    fisher_every: int = 1
    variance_samples: int = 8192
    max_seconds: float | None = None
    device: str = "cpu"
    data: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_entries(self, tasks=TASKS, methods=METHODS)
        check_minimums(
            self,
            num_epochs=1,
            num_seeds=1,
            tuning_seeds=1,
            seed=0,
            rates=0.0,
            large=2,
            small_rates=0.0,
            fisher_every=1,
            variance_samples=1,
            max_seconds=0.0,
        )
        check_count("small", self.small, high=self.large - 1)
        if self.tuning_epochs is not None:
            check_count("tuning_epochs", self.tuning_epochs, high=self.num_epochs)


SIZES = {
    "smoke": Config(
        tasks=("digits/mlp",), methods=METHODS[:3], num_epochs=4, num_seeds=2, large=512, small=64,
        rates=(0.1, 0.4),
    ),
    # One row of Table 1 in seven minutes on a GPU.
    "gpu": Config(
        tasks=("cifar100/vgg16",), methods=METHODS[:3], num_epochs=80, num_seeds=1,
        rates=(0.4, 1.6), small_rates=(0.1,), tuning_epochs=8, tuning_seeds=1,
        precision="bfloat16", fisher_every=20, variance_samples=2048, device="cuda",
    ),
    "paper": Config(
        tasks=tuple(TASKS)[1:], methods=METHODS, num_epochs=200,
        rates=(0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2),
    ),
}  # fmt: skip


@record
class Cell:
    """Results of all runs of one method on one task; see :class:`Result` for the fields."""

    accuracies: Tensor
    rates: Tensor
    losses: Tensor
    steps: Tensor
    sharpness: Tensor
    generalisation: Tensor
    optimisation: Tensor
    fisher_norms: Tensor
    seconds: Tensor


@record
class Planar:
    """The examples in two dimensions, Figures 1 and 4.

    Attributes:
        names: The noises of Figure 1.
        steps: One-step updates with each noise, ``(noises, samples, 2)``.
        covariances: Exact covariance of an update with each noise, ``(noises, 2, 2)``.
        optimum: The exact solution of the regression, ``(2,)``.
        start: Weights before the step, ``(2,)``.
        hessian: Hessian of the regression, ``(2, 2)``.
        quadratic: The matrix :math:`A` of Figure 4, ``(2, 2)``.
        losses: Exact expected loss of every iterate with full and with diagonal noise, ``(2, k)``.
        paths: A trajectory of each, every tenth iterate, ``(2, k // 10, 2)``.
        norms: ``tr(C'AC)`` of each, which is the squared Frobenius norm of ``A`` or its diagonal.
    """

    names: tuple[str, ...]
    steps: Tensor
    covariances: Tensor
    optimum: Tensor
    start: Tensor
    hessian: Tensor
    quadratic: Tensor
    losses: Tensor
    paths: Tensor
    norms: Tensor


@record
class Result(StudyResult[Config]):
    """Accuracies of all methods, and what the figures show.

    Attributes:
        planar: The examples in two dimensions.
        accuracies: Test accuracy of the last weights, ``(tasks, methods, seeds)``.
        rates: Learning rates that were chosen, ``(tasks, methods)``.
        losses: Mean training loss of every epoch over the seeds, ``(tasks, methods, epochs)``.
        steps: Steps done after every epoch, ``(tasks, methods, epochs)``.
        sharpness: Largest eigenvalue of the folded and calibrated network at the end,
            ``(tasks, methods, seeds)``; NaN if there is no temperature.
        generalisation: Held-out loss minus training loss at the end, same shape.
        optimisation: Training loss at the end, same shape.
        fisher_norms: Frobenius norms of the Fisher matrix and of its diagonal along the first run
            of the method ``large``, ``(tasks, 2, measurements)``.
        layers: Names of the parameters of the first task.
        variances: Mean gradient variance of every parameter tensor of a partially trained network
            of the first task, in small and large batches, and with full and diagonal noise,
            ``(4, layers)``.
        seconds: Mean time of a run, ``(tasks, methods)``.
        missing: Names of the methods for which no time was left. Their numbers are NaN. If there
            was none for the variances, ``layers`` is empty.
    """

    planar: Planar
    accuracies: Tensor
    rates: Tensor
    losses: Tensor
    steps: Tensor
    sharpness: Tensor
    generalisation: Tensor
    optimisation: Tensor
    fisher_norms: Tensor
    layers: tuple[str, ...]
    variances: Tensor
    seconds: Tensor
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        c, methods = self.config, self.config.methods
        lines = [
            f"Test accuracy in % after {c.num_epochs} epochs, batches of {c.small} and {c.large}; "
            f"mean and standard deviation of {_seeds(c)}; in brackets as published",
            row("", methods, ">22"),
        ]
        for i, task in enumerate(c.tasks):
            cells = [self._cell(i, j, TASKS[task].published.get(m)) for j, m in enumerate(methods)]
            lines += [row(task, cells, ">22"), row("  learning rate", self.rates[i], ">22.3g")]
            measures = (self.sharpness, self.generalisation, self.optimisation)
            for title, values in zip(MEASURES, measures, strict=True):
                lines.append(row(f"  {title}", values[i].mean(1), ">22.4g"))
            lines.append(row("  seconds per run", self.seconds[i], ">22.1f"))
        if self.missing:
            lines.append(f"Not run within {c.max_seconds:g} s: {', '.join(self.missing)}")
        if self.layers:
            title = "Mean gradient variance of the first task by parameter tensor:"
            lines += [title, row("", REGIMES, ">18", width=24)]
            each = zip(self.layers, self.variances.T, strict=True)
            lines += [row(name, values, ">18.3g", width=24) for name, values in each]
        p = self.planar
        title = "Covariance of one step, relative distance from that of small batches:"
        lines += [title, row("", p.names, ">14"), row("", _gaps(p), ">14.3f")]
        lines.append(
            f"Quadratic in two dimensions: tr(C'AC) {float(p.norms[0]):.4g} full, "
            f"{float(p.norms[1]):.4g} diagonal; exact loss at the end {float(p.losses[0, -1]):.4g} "
            f"and {float(p.losses[1, -1]):.4g}"
        )
        return "\n".join(lines)

    def _cell(self, i: int, j: int, published: float | None) -> str:
        values = 100 * self.accuracies[i, j]
        deviation = f" ({float(values.std()):.2f})" if len(values) > 1 else ""
        reference = f" [{published:.2f}]" if published else ""
        return f"{float(values.mean()):.2f}{deviation}{reference}"


def run(config: Config, *, progress: bool | Progress = False, state: StatePath = None) -> Result:
    """Return the accuracies of all methods on all tasks, and the examples in two dimensions."""
    tasks, methods = config.tasks, config.methods

    limit = TimeLimit(config.max_seconds)

    @functools.lru_cache(maxsize=1)  # the images of a task are read once for all its methods
    def runner(task: str) -> Runner:
        return Runner(config, TASKS[task].data, TASKS[task].model)

    def compute(cell: tuple[str, str], state: StatePath) -> Cell:
        return Cell(**runner(cell[0]).cell(cell[1], state))

    names = {" ".join(cell).replace("/", " "): cell for cell in product(tasks, methods)}
    options: Any = {"config": config, "state": state, "limit": limit, "progress": progress}
    done = compute_cells(compute, names, "methods", **options)
    cells = {name: done.get(name) or _missing_cell(config) for name in names}

    def table(name: str) -> Tensor:
        values = [getattr(cell, name) for cell in cells.values()]
        return torch.stack(values).view(len(tasks), len(methods), *values[0].shape)

    # If there was no time for a method, there is none for the variances.
    complete, variances = len(done) == len(names), torch.zeros(len(REGIMES), 0, dtype=torch.float64)
    layers: tuple[str, ...] = ()
    if complete:
        layers, variances = runner(tasks[0]).variances(float(table("rates")[0, 0]))
    watched = methods.index("large") if "large" in methods else 0
    parts: Any = {field.name: table(field.name) for field in fields(Cell)}
    parts["fisher_norms"] = parts["fisher_norms"][:, watched]
    missing = tuple(name for name in names if name not in done)
    return Result(
        config=config, planar=planar(config.seed), layers=layers, variances=variances,
        missing=missing, **parts,
    )  # fmt: skip


def _missing_cell(config: Config) -> Cell:
    """Return a cell of NaN, for a method that was not run."""

    def blank(*shape: int) -> Tensor:
        return torch.full(shape, math.nan, dtype=torch.float64)

    by_seed = ("accuracies", "sharpness", "generalisation", "optimisation")
    return Cell(
        **{name: blank(config.num_seeds) for name in by_seed}, rates=blank(), seconds=blank(),
        losses=blank(config.num_epochs), steps=blank(config.num_epochs),
        fisher_norms=blank(2, config.num_epochs + 1),
    )  # fmt: skip


def _seeds(config: Config) -> str:
    return f"{config.num_seeds} seed{'s' * (config.num_seeds > 1)}"


def evidence(result: Result) -> list[Evidence]:
    """Return the tables and figures of the paper beside those of this result."""
    return [*_table_evidence(result), *_figure_evidence(result)]


def setting(result: Result) -> str:
    """Return tasks, epochs and batches."""
    c = result.config
    return (
        f"{', '.join(c.tasks)}, {c.num_epochs} epochs, small batches of {c.small}, large ones of "
        f"{c.large}, {_seeds(c)}."
    )


def _table_evidence(result: Result) -> Iterator[Evidence]:
    c = result.config
    scores = {(task, method): 100 * result.accuracies[i, j] for (i, task), (j, method)
              in product(enumerate(c.tasks), enumerate(c.methods))}  # fmt: skip
    for (task, method), values in scores.items():
        if not _is_run(result, task, method):
            continue
        steps = result.steps[c.tasks.index(task), c.methods.index(method)][-1]
        known = TASKS[task].published
        published = known.get(method, math.nan)
        tolerance = points(known.get("small", math.inf) - known.get("large", 0.0))
        short = (
            "" if c.num_epochs >= 200 else f"{int(steps):,} steps; the paper has up to 200 epochs"
        )
        yield Evidence(
            paper="NOISE", where="Table 2" if method in METHODS[4:] else "Table 1",
            what=f"{task}: test accuracy in %, {method}",
            published=f"{published:.2f}".replace("nan", "-"), measured=spread(values),
            **({"verdict": "extends", "why": short} if math.isnan(published)
               else near(values, published, tolerance, cause=short)),
        )  # fmt: skip
        if method in ("small", "diagonal") and _is_run(result, task, "large"):
            gap = values - scores[task, "large"]  # paired: the same seeds
            effect = published - known.get("large", math.nan)
            yield Evidence(
                paper="NOISE", where="Table 1", published=f"{effect:.2f}".replace("nan", "-"),
                what=f"{task}: test accuracy in %, {method} less large", measured=spread(gap),
                **signed(gap, 1, size=effect if math.isfinite(effect) else math.inf),
            )  # fmt: skip


def _is_run(result: Result, task: str, method: str) -> bool:
    """Return whether a method is part of the result, and there was time for it."""
    c = result.config
    place = (c.tasks.index(task), c.methods.index(method) if method in c.methods else 0)
    return method in c.methods and bool(result.steps[place].isfinite().all())


def _figure_evidence(result: Result) -> Iterator[Evidence]:
    c, p = result.config, result.planar
    gaps, (full, diagonal) = _gaps(p), p.losses[:, -1].tolist()
    faster = full > diagonal and bool(p.norms[0] > p.norms[1])
    # The variances are NaN if there was no time for them.
    large, added_full, added_diagonal = (result.variances.mean(1) / result.variances[0].mean())[1:]
    ratios = result.fisher_norms[0, 0] / result.fisher_norms[0, 1]
    # A resumed run has no norms of earlier epochs, and some epochs are not measured.
    ratios = ratios[ratios.isfinite()]
    rows = [
        ("Figure 1", "covariance of one step: distance from small batches, full noise",
         "almost recovers it", f"{gaps[2]:.3f}; isotropic {gaps[1]:.3f}, diagonal {gaps[3]:.3f}",
         gaps[2] < min(gaps[1], gaps[3])),
        ("Figure 4", "quadratic: expected loss after 500 steps, full and diagonal noise",
         "diagonal is faster", f"{full:.4g} and {diagonal:.4g}", faster),
        ("Figure 2", "gradient variance over that of small batches: full, diagonal, no noise",
         "about 1 with noise", f"{float(added_full):.2f}, {float(added_diagonal):.2f}, "
         f"{float(large):.3f}", abs(float(added_diagonal) - 1) < 0.2),
        ("Figure 5a", "Frobenius norm of the Fisher matrix over that of its diagonal",
         "much larger throughout", f"{min(ratios.tolist(), default=math.nan):.1f} to "
         f"{max(ratios.tolist(), default=math.nan):.1f}",
         len(ratios) > 0 and bool((ratios > 2).all())),
    ]  # fmt: skip
    at = {method: j for j, method in enumerate(c.methods)}
    if {"large", "diagonal", "full"} <= at.keys():
        # The training loss when the noise ends.
        end = max(0, round(c.noise_until * c.num_epochs) - 1)
        curves = result.losses[0, [at[m] for m in ("large", "diagonal", "full")]]
        losses = curves[:, end].tolist()
        rows.append(("Figure 3", "training loss when the noise ends: large, diagonal, full",
                     "the first two alike, full higher", ", ".join(f"{x:.3g}" for x in losses),
                     losses[2] > max(losses[:2])))  # fmt: skip
    # Without the runs for which there was no time, the figures of networks are not complete.
    absent = {"Figure 2", "Figure 3"} if result.missing else set()
    absent |= {"Figure 5a"} if result.missing and not len(ratios) else set()
    for where, what, published, measured, holds in rows:
        if where in absent:
            continue
        yield Evidence(paper="NOISE", where=where, what=what, published=published,
                       measured=measured, verdict="agrees" if holds else "differs")  # fmt: skip
    if all(_is_run(result, c.tasks[0], method) for method in ("large", "diagonal")):
        without, added = (result.sharpness[0, at[m]] for m in ("large", "diagonal"))
        yield Evidence(
            paper="NOISE", where="Figure 5b", published="lower",
            what="calibrated largest eigenvalue, diagonal less large",
            measured=spread(added - without), **signed(added - without, -1),
        )  # fmt: skip


def _gaps(p: Planar) -> list[float]:
    # |S - S_0| / |S_0| in the Frobenius norm, with S_0 of small batches.
    exact = p.covariances[0]
    return [float((torch.cov(steps.T) - exact).norm() / exact.norm()) for steps in p.steps]


# ------------------------------------------------------------------------------------------
# Two dimensions: Figures 1 and 4.

SAMPLES = 2000  # points of a cloud
RATE, STEPS = 0.1, 500  # of Figure 4


def planar(seed: int) -> Planar:
    """Return one-step updates of a regression, and the exact losses of noisy descent."""
    risk, hessian, optimum, start = _regression(seed)
    # The paper does not give its batch: 8 of 256 samples.
    batch, count, rate = 8, risk.num_samples, 0.1
    g = gradient_statistics(risk).mean
    jac = torch.stack([risk.samples(torch.tensor([i])).gradient() for i in range(count)])
    fisher = jac.T @ jac / count
    centred = fisher - torch.outer(g, g)
    # A batch of M out of N samples has about (1/M - 1/N) times the noise of one sample.
    factor = 1 / batch - 1 / count
    # Without replacement: (N - M) / (M (N - 1)) times the covariance of one sample.
    covariances = [
        centred * factor * count / (count - 1),
        0.01 * torch.eye(2, dtype=g.dtype),  # sigma = .1, as published
        fisher * factor,
        torch.diag(fisher.diagonal()) * factor,
    ]
    rng = seeded(seed)
    drawn = torch.stack(
        [jac[torch.randperm(count, generator=rng)[:batch]].mean(0) - g for _ in range(SAMPLES)]
    )
    options: Any = {"num_samples": SAMPLES, "generator": rng}
    noises = [
        drawn,
        noise_sample(risk, "isotropic", sigma=0.1, **options).T,
        *(noise_sample(risk, kind, **options).T * math.sqrt(factor) for kind in NOISES),
    ]
    return Planar(
        names=("small batch", "isotropic", *NOISES),
        steps=torch.stack([start - rate * (g + noise) for noise in noises]),
        covariances=torch.stack(covariances) * rate**2,
        optimum=optimum,
        start=start,
        hessian=hessian,
        **_descent(seed),
    )


def _regression(seed: int) -> tuple[Risk, Tensor, Tensor, Tensor]:
    """Return the risk of a linear model, its Hessian, its optimum and the weights it is at."""
    rng = seeded(seed)
    mix = torch.tensor([[1.0, 0.8], [0.0, 0.6]], dtype=torch.float64)
    x = torch.randn(256, 2, generator=rng, dtype=torch.float64) @ mix
    noise = 0.5 * torch.randn(256, generator=rng, dtype=torch.float64)
    y = x @ column([1.0, -1.0]) + noise
    model = nn.utils.skip_init(nn.Linear, 2, 1, bias=False).double()
    start = column([0.0, 0.5])
    with torch.no_grad():
        model.weight.copy_(start[None])
    # L(w) = |x w - y|^2 / n has the Hessian 2 x'x / n, and its optimum solves x'x w = x'y.
    gram = x.T @ x
    risk = Risk(model, mse_loss, (x, y[:, None]), batch_size=256)
    return risk, 2 * gram / len(x), torch.linalg.solve(gram, x.T @ y), start


def _descent(seed: int) -> dict[str, Tensor]:
    """Return A, exact expected losses, paths and tr(C'AC) with full and diagonal noise, by name."""
    A = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    values, vectors = torch.linalg.eigh(A)
    roots = [vectors * values.sqrt() @ vectors.T, torch.diag(A.diagonal().sqrt())]
    M, losses, paths = torch.eye(2, dtype=A.dtype) - RATE * A, [], []
    for C in roots:
        mean, spread = torch.tensor([2.0, 1.0], dtype=A.dtype), torch.zeros_like(A)
        rng, w, path, expected = seeded(seed), mean, [mean], []
        for step in range(1, STEPS + 1):
            # m <- M m and S <- M S M + alpha^2 C C', so E[L] = (m'Am + tr AS) / 2, exactly
            mean, spread = M @ mean, M @ spread @ M + RATE**2 * C @ C.T
            expected.append(float(mean @ A @ mean + (A * spread).sum()) / 2)
            w = M @ w + RATE * C @ torch.randn(2, generator=rng, dtype=A.dtype)
            # Every tenth iterate is enough for the figure.
            path += [w] * (step % 10 == 0)
        losses.append(column(expected))
        paths.append(torch.stack(path))
    norms = column(float((C.T @ A @ C).trace()) for C in roots)
    return {"quadratic": A, "losses": torch.stack(losses), "paths": torch.stack(paths),
            "norms": norms}  # fmt: skip


# ------------------------------------------------------------------------------------------
# The figure.

# The same colour in all panels. The name of a regime ends in that of its noise.
COLOURS = {
    "small": style.STYLE.grey,
    "small batch": style.STYLE.grey,
    "large": style.STYLE.blue,
    "full": style.STYLE.vermilion,
    "diagonal": style.STYLE.green,
    "isotropic": style.STYLE.blue,
}


def _colour(name: str) -> str:
    return COLOURS.get(name.removeprefix("large + "), style.STYLE.orange)


def figure(result: Result) -> style.Figure:
    """Draw Figures 1 to 5 of the paper for this result, and the table as points."""
    drawing, axes = plots.panels(2, 3, width=4.0, height=3.2)
    _draw_steps(axes[0], result.planar)
    _draw_paths(axes[1], result.planar)
    panels = (
        (_draw_variances, result.variances),
        (_draw_training, result.losses[0]),
        (_draw_norms, result.fisher_norms[0]),
        (_draw_table, result.accuracies),
    )
    for axis, (draw, values) in zip(axes[2:], panels, strict=False):
        # There may have been no time for any of the runs.
        if bool(values.isfinite().any()):
            draw(axis, result)
        else:
            axis.remove()
    return drawing


def _draw_steps(axis: Any, p: Planar) -> None:
    for name, steps in zip(p.names, p.steps, strict=False):
        axis.scatter(*steps[:300].T.numpy(), s=3, color=_colour(name), label=name, alpha=0.6)
    axis.scatter(*p.start.numpy(), marker="+", color="black", s=60, label="start")
    axis.set(xlabel="first weight", ylabel="second weight")
    style.set_title(axis, "One step of a regression (Fig. 1)")
    _legend_below_points(axis)


def _draw_paths(axis: Any, p: Planar) -> None:
    steps = range(1, p.losses.shape[1] + 1)
    for name, losses in zip(NOISES, p.losses, strict=True):
        axis.plot(steps, losses.numpy(), color=_colour(name), label=f"{name} noise, exact mean")
    title = "Quadratic in two dimensions (Fig. 4)"
    style.finish(axis, "step", "expected loss", title, yscale="log")


def _draw_variances(axis: Any, result: Result) -> None:
    for name, values in zip(REGIMES, result.variances, strict=True):
        places = range(len(values))
        axis.plot(places, values.numpy(), "o-", color=_colour(name), label=name, markersize=4)
    # Names of a few layers have room. Those of a deep network stand on end, and some are left out.
    count = len(result.layers)
    places, look = range(0, count, -(-count // 16)), dict[str, Any](fontsize="small")
    if count > 5:
        look = {"rotation": 60, "fontsize": 6, "ha": "right", "rotation_mode": "anchor"}
    axis.set_xticks(places, [result.layers[place] for place in places], **look)
    style.finish(axis, "", "mean gradient variance", "Variance by layer (Fig. 2)", yscale="log")


def _draw_training(axis: Any, result: Result) -> None:
    for j, method in enumerate(result.config.methods):
        axis.plot(result.steps[0, j], result.losses[0, j], color=_colour(method), label=method)
    title = f"{result.config.tasks[0]}: loss per update (Fig. 3)"
    style.finish(axis, "step", "training loss", title, xscale="log")
    style.log_scale(axis)


def _draw_norms(axis: Any, result: Result) -> None:
    for name, values in zip(NOISES, result.fisher_norms[0], strict=True):
        # Not all epochs are measured.
        epochs = values.isfinite().nonzero()[:, 0]
        axis.plot(
            epochs, values[epochs].numpy(), "o-", color=_colour(name), label=name, markersize=3
        )
    title = f"{result.config.tasks[0]}: Fisher matrix (Fig. 5a)"
    style.finish(axis, "epoch", "Frobenius norm", title, yscale="log")


def _draw_table(axis: Any, result: Result) -> None:
    tasks, methods = result.config.tasks, result.config.methods
    for j, method in enumerate(methods):
        colour = _colour(method)
        for i, task in enumerate(tasks):
            # Methods stand beside each other around the place of their task.
            place = i + (j - (len(methods) - 1) / 2) * 0.18
            values = 100 * (1 - result.accuracies[i, j])
            axis.scatter([place] * len(values), values.numpy(), color=colour, s=14,
                         label=method if i == 0 else None)  # fmt: skip
            if method in TASKS[task].published:
                published = 100 - TASKS[task].published[method]
                axis.scatter([place], [published], color=colour, marker="_", s=120)
    axis.set_xticks(range(len(tasks)), tasks)
    axis.set_ylabel("test error (%)")
    style.set_title(axis, "Table 1; bars as published")
    _legend_below_points(axis)


def _legend_below_points(axis: Any) -> None:
    """Draw a legend in two columns below all points, which leave no corner free."""
    low, high = axis.get_ylim()
    axis.set_ylim(low - 0.35 * (high - low), high)
    style.legend(axis, loc="lower center", ncols=2)
