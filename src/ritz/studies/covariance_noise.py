"""Large batches with covariance noise: NOISE paper, Figures 1 to 5, Tables 1 and 2.

After Wen et al., *Interplay between optimization and generalization of stochastic gradient descent
with covariance noise*. Small batches, large batches with ghost batch norm, and large batches with
gradient noise are trained for equally many epochs. The learning rate of every method is chosen from
a grid by validation images, on a seed of its own. Two examples in two dimensions are exact.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from ritz import data, models, plots
from ritz._core.checks import check_choice, check_count
from ritz._core.modes import batch_norms
from ritz._core.progress import Progress
from ritz.curvature import Risk, gradient_statistics, noise_sample
from ritz.measures import calibrated_sharpness, excess_risk
from ritz.plots._shared import style
from ritz.studies._protocol import StudyResult, check_minimums, column, record, row, seeded, track
from ritz.training import CurvatureMonitor, fit


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
NOISES: tuple[Literal["full", "diagonal"], ...] = ("full", "diagonal")  # of Figure 2
METHODS = ("small", "large", "diagonal", "full", "batch change", "multiplicative", "kfac", "trace")
Size = Literal["smoke", "small", "paper"]
Images = Any  # what data.load returns for images


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What a size of the study stands for; each can be set alone."""

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    num_epochs: int
    num_seeds: int
    large: int
    small: int
    rates: tuple[float, ...]


# The grid spans the rates of appendix E.1, 1.6 and 3.2 with batches of 4096, and the usual 0.1 with
# small ones. The paper trains for 200 epochs and does not give its grid.
GRID = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
SCALES: dict[str, Scale] = {
    "smoke": Scale(tasks=("digits/mlp",), methods=("small", "large", "diagonal"), num_epochs=4,
                   num_seeds=2, large=512, small=64, rates=(0.1, 0.4)),
    "small": Scale(tasks=("mnist/mlp", "fashion/lenet"), methods=METHODS[:4], num_epochs=12,
                   num_seeds=3, large=4096, small=128, rates=(0.05, 0.1, 0.2, 0.4)),
    "paper": Scale(tasks=tuple(TASKS)[1:], methods=METHODS, num_epochs=200, num_seeds=3,
                   large=4096, small=128, rates=GRID),
}  # fmt: skip


@record
class Config:
    """Which rows and methods, at which size.

    Attributes:
        size: ``smoke``, ``small`` (minutes on a CPU) or ``paper``; the fields below are taken from
            it unless they are given.
        tasks: Rows of the tables, such as ``mnist/mlp``.
        methods: Columns: ``small``, ``large``, and large batches with ``diagonal``, ``full``,
            ``multiplicative``, ``kfac`` or ``trace`` noise, or after small ones: ``batch change``.
        num_epochs: Epochs of every run.
        num_seeds: Runs of every method.
        large: Samples of a large batch.
        small: Samples of a small batch.
        rates: Learning rates to choose from. A single one is not tuned.
        noise_until: Fraction of the run after which noise, or small batches, end.
        device: Device of the networks.
        data: Folder of the data sets. Defaults to the environment variable ``RITZ_DATA``.
        seed: Run ``i`` has the seed ``seed + i``. Rates are chosen with the seed ``seed + 1000``.
    """

    size: Size = "smoke"
    tasks: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    num_epochs: int | None = None
    num_seeds: int | None = None
    large: int | None = None
    small: int | None = None
    rates: tuple[float, ...] | None = None
    noise_until: float = 0.25
    device: str = "cpu"
    data: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("size", self.size, SCALES)
        for name in ("tasks", "methods", "num_epochs", "num_seeds", "large", "small", "rates"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(SCALES[self.size], name))
        for task in self.tasks or ():
            check_choice("tasks", task, TASKS)
        for method in self.methods or ():
            check_choice("methods", method, METHODS)
        check_minimums(self, num_epochs=1, num_seeds=1, seed=0, rates=0.0)
        check_count("large", self.large or 0)
        check_count("small", self.small or 0, high=(self.large or 0) - 1)


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

    def __str__(self) -> str:
        c, methods = self.config, self.config.methods or ()
        lines = [
            f"Test accuracy in % after {c.num_epochs} epochs, batches of {c.small} and {c.large}; "
            f"mean and standard deviation of {c.num_seeds} seeds; in brackets as published",
            row("", methods, ">22"),
        ]
        for i, task in enumerate(c.tasks or ()):
            cells = [self._cell(i, j, TASKS[task].published.get(m)) for j, m in enumerate(methods)]
            lines.append(row(task, cells, ">22"))
            lines.append(row("  learning rate", self.rates[i], ">22.3g"))
            lines.append(row("  calibrated max", self.sharpness[i].mean(1), ">22.4g"))
            lines.append(row("  generalisation", self.generalisation[i].mean(1), ">22.4g"))
            lines.append(row("  optimisation", self.optimisation[i].mean(1), ">22.4g"))
            lines.append(row("  seconds per run", self.seconds[i], ">22.1f"))
        lines.append("Mean gradient variance of the first task by parameter tensor:")
        lines.append(row("", self.layers, ">14"))
        regimes = ("small", "large", "large + full", "large + diagonal")
        lines += [row(n, v, ">14.3g") for n, v in zip(regimes, self.variances, strict=True)]
        p = self.planar
        found = [torch.cov(steps.T) for steps in p.steps]
        gaps = [float((c - p.covariances[0]).norm() / p.covariances[0].norm()) for c in found]
        lines.append("Covariance of one step, relative distance from that of small batches:")
        lines.append(row("", p.names, ">14"))
        lines.append(row("", gaps, ">14.3f"))
        lines.append(
            f"Quadratic in two dimensions: tr(C'AC) {float(p.norms[0]):.4g} full, "
            f"{float(p.norms[1]):.4g} diagonal; exact loss at the end {float(p.losses[0, -1]):.4g} "
            f"and {float(p.losses[1, -1]):.4g}"
        )
        return "\n".join(lines)

    def _cell(self, i: int, j: int, published: float | None) -> str:
        values = 100 * self.accuracies[i, j]
        spread = f" ({float(values.std()):.2f})" if len(values) > 1 else ""
        return f"{float(values.mean()):.2f}{spread}" + (f" [{published:.2f}]" if published else "")


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return the accuracies of all methods on all tasks, and the examples in two dimensions."""
    tasks, methods = config.tasks or (), config.methods or ()
    seeds, epochs = config.num_seeds or 1, config.num_epochs or 1
    shape = len(tasks), len(methods)
    sizes = dict.fromkeys(("accuracies", "sharpness", "generalisation"), (seeds,))
    sizes |= {"optimisation": (seeds,), "losses": (epochs,), "steps": (epochs,)}
    sizes |= {"rates": (), "seconds": ()}
    results: dict[str, Any] = {
        k: torch.zeros(*shape, *v, dtype=torch.float64) for k, v in sizes.items()
    }
    norms = torch.full((len(tasks), 2, epochs + 1), math.nan, dtype=torch.float64)
    grid = list(product(enumerate(tasks), enumerate(methods)))
    for (i, task), (j, method) in track(grid, "methods", progress):
        runner = Runner(config, TASKS[task])
        rate = results["rates"][i, j] = runner.choose(method)
        begin = time.perf_counter()
        for k in range(seeds):
            watched = norms[i] if method == "large" and k == 0 else None
            scores = runner.train(method, float(rate), config.seed + k, watched)
            for name in ("accuracies", "sharpness", "generalisation", "optimisation"):
                results[name][i, j, k] = scores[name]
            results["losses"][i, j] += scores["losses"] / seeds
            results["steps"][i, j] = scores["steps"]
        results["seconds"][i, j] = (time.perf_counter() - begin) / seeds
    layers, variances = Runner(config, TASKS[tasks[0]]).variances(float(results["rates"][0, 0]))
    return Result(
        config=config,
        planar=planar(config.seed),
        fisher_norms=norms,
        layers=layers,
        variances=variances,
        **results,
    )


# ------------------------------------------------------------------------------------------
# Training of one row of the tables.


class Runner:
    """Trains the network of a task with every method."""

    def __init__(self, config: Config, task: Task) -> None:
        self.config, self.task = config, task
        self.large, self.small = config.large or 2, config.small or 1
        self.epochs = config.num_epochs or 1
        # Rates are chosen by images of the training set, and the test set is left alone.
        self.sets = _images(task.data, config)
        held = len(self.sets.train) // 12
        self.tuning = _images(task.data, config, validation=held)

    def choose(self, method: str) -> float:
        """Return the learning rate with the best validation accuracy."""
        rates = self.config.rates or (0.1,)
        if len(rates) == 1:
            return rates[0]
        seed = self.config.seed + 1000
        scores = [self._fit(method, rate, seed, self.tuning)[1] for rate in rates]
        values = [s.metrics.get("validation_accuracy", 0.0) if s.status.ok else 0.0 for s in scores]
        return rates[max(range(len(rates)), key=values.__getitem__)]

    def train(self, method: str, rate: float, seed: int, norms: Tensor | None) -> dict[str, Any]:
        """Return what is recorded of a run; ``norms`` takes those of the Fisher matrices."""
        monitor = None if norms is None else self._monitor()
        model, result = self._fit(method, rate, seed, self.sets, monitor, norms)
        steps = column(range(1, self.epochs + 1)) * result.num_steps / max(1, result.num_epochs)
        losses = torch.full((self.epochs,), math.nan, dtype=torch.float64)
        found = result.history["train_loss"]
        losses[: len(found)] = found
        terms = self._terms(model)
        return {
            "accuracies": result.metrics.get("test_accuracy", math.nan),
            "losses": losses,
            "steps": self._steps(method) if result.status.ok else steps,
            "sharpness": self._sharpness(model),
            "generalisation": terms[0],
            "optimisation": terms[1],
        }

    def variances(self, rate: float) -> tuple[tuple[str, ...], Tensor]:
        """Return names and mean gradient variances by layer, Figure 2."""
        model, _ = self._fit("small", rate, self.config.seed, self.sets, epochs=1)
        risk = self._risk(model, self.sets.train, min(8192, len(self.sets.train)))
        statistics = gradient_statistics(risk)
        names, kinds = statistics.names, NOISES
        counts = column(risk.space.shapes[name].numel() for name in names)
        variance = column(statistics.layers[name][2] for name in names)
        # Samples with replacement: V / M for a batch of M.
        rows = [variance / self.small, variance / self.large]
        for kind in kinds:
            block = noise_sample(risk, kind, num_samples=64)
            squares = risk.space.unflatten(block.double().square().mean(1))
            added = column(float(squares[name].sum()) for name in names)
            rows.append(rows[1] + added * (1 / self.small - 1 / self.large))
        return names, torch.stack(rows) / counts

    def _fit(
        self,
        method: str,
        rate: float,
        seed: int,
        sets: Images,
        monitor: Any = None,
        norms: Tensor | None = None,
        epochs: int | None = None,
    ) -> tuple[nn.Module, Any]:
        shape: Any = {"num_classes": sets.num_classes, "input_shape": sets.shape}
        model = models.create(self.task.model, generator=seeded(seed), **shape)
        count = epochs or self.epochs
        options = self._options(method, model)
        # Appendix E.1: division by 10 after 1/2 and 3/4, and a warm-up over 5 % for large batches.
        warmup = 0 if method == "small" else math.ceil(0.05 * count)
        if norms is not None:
            norms[:, 0] = column(monitor.norms(0, model))
        result = fit(
            model.to(self.config.device),
            sets,
            optimizer_settings={"lr": rate, "momentum": 0.9, "weight_decay": 5e-4},
            num_epochs=count,
            schedule="step",
            warmup=warmup,
            seed=seed,
            evaluate_every=count,
            monitors=[] if monitor is None else [monitor],
            **options,
        )
        if norms is not None:
            for epoch, pair in monitor.found.items():
                norms[:, epoch] = column(pair)
        return model, result

    def _options(self, method: str, model: nn.Module) -> dict[str, Any]:
        """Return the options of training that make a method."""
        if method == "small":
            return {"batch_size": self.small}
        options: dict[str, Any] = {"batch_size": self.large}
        if batch_norms(model):
            options["ghost_batch"] = self.small
        if method == "batch change":
            switch = max(1, round(self.config.noise_until * self.epochs))
            return options | {"batch_schedule": f"0:{self.small},{switch}:{self.large}"}
        if method == "large":
            return options
        noise = {"noise": method, "noise_until": self.config.noise_until}
        return options | noise | ({} if method == "multiplicative" else {"noise_batch": self.small})

    def _steps(self, method: str) -> Tensor:
        switch = max(1, round(self.config.noise_until * self.epochs))
        sizes = [self.large] * self.epochs if method != "small" else [self.small] * self.epochs
        if method == "batch change":
            sizes[:switch] = [self.small] * min(switch, self.epochs)
        return column(math.ceil(len(self.sets.train) / size) for size in sizes).cumsum(0)

    def _risk(self, model: nn.Module, split: Any, count: int) -> Risk:
        part = split.take(count, generator=seeded(0))
        return Risk(model.eval(), cross_entropy, part.tensors(), batch_size=512)

    def _terms(self, model: nn.Module) -> tuple[float, float]:
        parts = (self.sets.train, self.sets.test)
        count = min(10_000, *map(len, parts))
        try:
            terms = excess_risk(*(self._risk(model, part, count) for part in parts))
        except ValueError:  # the run diverged
            return math.nan, math.nan
        return terms.generalisation, terms.optimisation

    def _sharpness(self, model: nn.Module) -> float:
        count = min(1024, len(self.sets.test), len(self.sets.train))
        try:
            return float(
                calibrated_sharpness(
                    model,
                    lambda m: self._risk(m, self.sets.train, count),
                    lambda m: self._risk(m, self.sets.test, len(self.sets.test)),
                )
            )
        except ValueError:  # diverged, or every held-out image is right
            return math.nan

    def _monitor(self) -> Any:
        split = self.sets.train.take(min(1024, len(self.sets.train)), generator=seeded(0))
        return FisherNorms(split.tensors())


def _images(name: str, config: Config, **options: Any) -> Images:
    images: Any = data.load(name, data_dir=config.data, device=config.device, **options)
    return images


class FisherNorms:
    """Monitor that collects the Frobenius norms of the Fisher matrix and of its diagonal."""

    unit = "epoch"

    def __init__(self, source: Any) -> None:
        self.found: dict[int, tuple[float, float]] = {}
        self._monitor = CurvatureMonitor(source, quantities=["fisher"], batch_size=512)

    def __call__(self, count: int, model: nn.Module, optimizer: Any) -> None:
        self.found[count] = self.norms(count, model)

    def norms(self, count: int, model: nn.Module) -> tuple[float, float]:
        """Return the two norms."""
        numbers = self._monitor.measure(model)
        return numbers["fisher_norm"], numbers["fisher_diagonal_norm"]


# ------------------------------------------------------------------------------------------
# Two dimensions: Figures 1 and 4.

SAMPLES = 2000  # points of a cloud
RATE, STEPS = 0.1, 500  # of Figure 4


def planar(seed: int) -> Planar:
    """Return one-step updates of a regression, and the exact losses of noisy descent."""
    risk, optimum, start = _regression(seed)
    names = ("small batch", "isotropic", "full", "diagonal")
    # The paper does not give its batch: 8 of 256 samples.
    batch, count, rate = 8, risk.num_samples, 0.1
    g = gradient_statistics(risk).mean
    jac = torch.stack([risk.samples(torch.tensor([i])).gradient() for i in range(count)])
    fisher = jac.T @ jac / count
    centred = fisher - torch.outer(g, g)
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
        noise_sample(risk, "full", **options).T * math.sqrt(factor),
        noise_sample(risk, "diagonal", **options).T * math.sqrt(factor),
    ]
    quadratic, losses, paths, norms = _descent(seed)
    return Planar(
        names=names,
        steps=torch.stack([start - rate * (g + noise) for noise in noises]),
        covariances=torch.stack(covariances) * rate**2,
        optimum=optimum,
        start=start,
        hessian=2 * _design(seed)[0].T @ _design(seed)[0] / count,
        quadratic=quadratic,
        losses=losses,
        paths=paths,
        norms=norms,
    )


def _design(seed: int) -> tuple[Tensor, Tensor]:
    rng = seeded(seed)
    mix = torch.tensor([[1.0, 0.8], [0.0, 0.6]], dtype=torch.float64)
    x = torch.randn(256, 2, generator=rng, dtype=torch.float64) @ mix
    noise = 0.5 * torch.randn(256, generator=rng, dtype=torch.float64)
    return x, x @ torch.tensor([1.0, -1.0], dtype=torch.float64) + noise


def _regression(seed: int) -> tuple[Risk, Tensor, Tensor]:
    """Return the risk of a linear model away from its optimum, the optimum and the weights."""
    x, y = _design(seed)
    model = nn.utils.skip_init(nn.Linear, 2, 1, bias=False).double()
    start = torch.tensor([0.0, 0.5], dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(start[None])
    optimum = torch.linalg.solve(x.T @ x, x.T @ y)
    return Risk(model, mse_loss, (x, y[:, None]), batch_size=256), optimum, start


def _descent(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return A, exact expected losses, paths and tr(C'AC) with full and diagonal noise."""
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
            path += [w] * (step % 10 == 0)
        losses.append(column(expected))
        paths.append(torch.stack(path))
    norms = column(float((C.T @ A @ C).trace()) for C in roots)
    return A, torch.stack(losses), torch.stack(paths), norms


# ------------------------------------------------------------------------------------------
# The figure.


def figure(result: Result) -> style.Figure:
    """Draw Figures 1 to 5 of the paper for this result, and the table as points."""
    drawing, axes = plots.panels(2, 3, width=11.5, height=6.4)
    _draw_steps(axes[0], result.planar)
    _draw_paths(axes[1], result.planar)
    _draw_variances(axes[2], result)
    _draw_training(axes[3], result)
    _draw_norms(axes[4], result)
    _draw_table(axes[5], result)
    return drawing


def _colours() -> list[str]:
    s = style.STYLE
    return [s.grey, s.blue, s.vermilion, s.green]


def _draw_steps(axis: Any, p: Planar) -> None:
    for name, steps, colour in zip(p.names, p.steps, _colours(), strict=False):
        axis.scatter(*steps[:300].T.numpy(), s=3, color=colour, label=name, alpha=0.6)
    axis.scatter(*p.start.numpy(), marker="+", color="black", s=60)
    style.finish(axis, "first weight", "second weight", "One step of a regression (Fig. 1)")


def _draw_paths(axis: Any, p: Planar) -> None:
    steps = range(1, p.losses.shape[1] + 1)
    for name, losses, colour in zip(("full", "diagonal"), p.losses, _colours()[2:], strict=False):
        axis.plot(steps, losses.numpy(), color=colour, label=f"{name} noise, exact mean")
    axis.set_yscale("log")
    style.finish(axis, "step", "expected loss", "Quadratic in two dimensions (Fig. 4)")


def _draw_variances(axis: Any, result: Result) -> None:
    names = ("small", "large", "large + full", "large + diagonal")
    for name, values, colour in zip(names, result.variances, _colours(), strict=True):
        axis.plot(range(len(values)), values.numpy(), "o-", color=colour, label=name, markersize=4)
    axis.set_xticks(range(len(result.layers)), result.layers, rotation=60, fontsize=6)
    axis.set_yscale("log")
    style.finish(axis, "", "mean gradient variance", "Variance by layer (Fig. 2)")


def _draw_training(axis: Any, result: Result) -> None:
    task = (result.config.tasks or ("",))[0]
    for j, method in enumerate(result.config.methods or ()):
        colour = _colours()[j % 4]
        axis.plot(result.steps[0, j].numpy(), result.losses[0, j].numpy(), color=colour,
                  label=method)  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    style.finish(axis, "step", "training loss", f"{task}: loss per update (Fig. 3)")


def _draw_norms(axis: Any, result: Result) -> None:
    task = (result.config.tasks or ("",))[0]
    for values, name, colour in zip(
        result.fisher_norms[0], ("full", "diagonal"), _colours()[2:], strict=False
    ):
        axis.plot(range(len(values)), values.numpy(), "o-", color=colour, label=name, markersize=3)
    axis.set_yscale("log")
    style.finish(axis, "epoch", "Frobenius norm", f"{task}: Fisher matrix (Fig. 5a)")


def _draw_table(axis: Any, result: Result) -> None:
    tasks, methods = result.config.tasks or (), result.config.methods or ()
    for j, method in enumerate(methods):
        colour = _colours()[j % 4]
        for i, task in enumerate(tasks):
            place = i + (j - (len(methods) - 1) / 2) * 0.18
            values = 100 * (1 - result.accuracies[i, j])
            axis.scatter([place] * len(values), values.numpy(), color=colour, s=14,
                         label=method if i == 0 else None)  # fmt: skip
            if method in TASKS[task].published:
                published = 100 - TASKS[task].published[method]
                axis.scatter([place], [published], color=colour, marker="_", s=120)
    axis.set_xticks(range(len(tasks)), tasks)
    style.finish(axis, "", "test error (%)", "Table 1; bars as published")
