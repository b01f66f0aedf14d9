"""Damping, sharpness and generalisation of adaptive methods: adaptive gap paper, sections 4 and 5.

After Granziol et al. (2020), *Explaining the Adaptive Generalisation Gap*, Fig. 2, 3, 5 and Table
2, and *Spectral Machine Learning*, Fig. 4.2b. Three parts:

* ``lopt``: logistic regression on 1,000 digits by damped Newton steps in the Krylov space. A factor
  ``eta`` makes the steps along sharp directions smaller. The table shows training and test error
  for each damping and factor.
* ``grid``: a network trained by an optimiser with damping, for several learning rates and dampings,
  and by SGD. The table shows the errors and the largest eigenvalue at the end.
* ``newton``: Lanczos-Newton steps compared with Adam and SGD, after the same number of epochs and
  after the same time.

For each seed, all methods have the same samples and initial weights.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ritz import data
from ritz._core.checks import check_choice
from ritz._core.progress import Progress
from ritz._core.training_config import TrainingPrecision
from ritz.curvature import Risk
from ritz.optim import LanczosNewton
from ritz.plots._shared import style
from ritz.studies._adaptive_gap_evidence import (
    common_epochs,
    common_time,
    curve_evidence,
    epoch_seconds,
    errors_at,
    grid_evidence,
    in_order,
    is_published,
    lopt_evidence,
)
from ritz.studies._adaptive_gap_figure import draw
from ritz.studies._adaptive_gap_sizes import (
    GRIDS,
    METHODS,
    NEWTON,
    SETUPS,
    SGD_RATES,
    Grid,
    Setup,
    SizeName,
)
from ritz.studies._evidence import Evidence
from ritz.studies._protocol import (
    StatePath,
    StudyResult,
    TimeLimit,
    check_minimums,
    column,
    compute_cells,
    record,
    seeded,
    track,
)
from ritz.studies._training import (
    LargestEigenvalue,
    fit_whole,
    largest_eigenvalue,
    new_network,
)

Part = Literal["lopt", "grid", "newton"]
PARTS = get_args(Part)


@record
class Config:
    """Size of the study and number of the runs.

    Attributes:
        size: ``smoke``, ``small``, ``gpu`` or ``paper``; see ``SETUPS``.
        parts: Parts to run.
        optimizers: Optimisers of the grid; see ``GRIDS``.
        rates: Learning rates of the grid. Defaults to those of the size.
        deltas: Dampings of the grid. Defaults to those of the size.
        sgd_rates: Learning rates of SGD beside the grid.
        num_epochs: Epochs of the grid. Defaults to those of the size.
        precision: Precision of training in the grid. Defaults to that of the size.
        max_seconds: Time after which no run of the grid begins; see ``TimeLimit``.
        num_seeds: Runs of every setting.
        seed: Run ``i`` has the seed ``seed + i``.
        device: Device of the networks.
        data_dir: Folder of the data sets. Defaults to ``RITZ_DATA``.
    """

    size: SizeName = "small"
    parts: tuple[Part, ...] = PARTS
    optimizers: tuple[str, ...] = ("damped_adamw",)
    rates: tuple[float, ...] | None = None
    deltas: tuple[float, ...] | None = None
    sgd_rates: tuple[float, ...] = SGD_RATES
    num_epochs: int | None = None
    precision: TrainingPrecision | None = None
    max_seconds: float | None = None
    num_seeds: int = 3
    seed: int = 0
    device: str = "cpu"
    data_dir: str | None = None

    def __post_init__(self) -> None:
        check_choice("size", self.size, tuple(SETUPS))
        check_minimums(self, num_seeds=1, seed=0, sgd_rates=0.0, num_epochs=1, max_seconds=0.0)
        for part in self.parts:
            check_choice("parts", part, PARTS)
        for name in self.optimizers:
            check_choice("optimizers", name, GRIDS)

    def grid(self, name: str) -> Grid:
        """Return the rates and dampings of an optimiser."""
        known = self.setup.grids[name]
        return replace(known, rates=self.rates or known.rates, deltas=self.deltas or known.deltas)

    @property
    def setup(self) -> Setup:
        """The setup of the size, with the epochs and the precision of this configuration."""
        known = SETUPS[self.size]
        return replace(
            known,
            num_epochs=self.num_epochs or known.num_epochs,
            precision=self.precision or known.precision,
        )


SIZES = {name: Config(size=name) for name in SETUPS} | {
    "gpu": Config(size="gpu", sgd_rates=(0.01, 0.03), num_seeds=1, device="cuda"),
}


@record
class Result(StudyResult[Config]):
    """Errors (shares of wrong answers) of all parts; parts that were not run are empty.

    Attributes:
        lopt: Training and test errors, ``(2, num_seeds, deltas, etas)``; NaN where a run diverged.
        descent: Training and test errors of gradient descent with the same rate,
            ``(2, num_seeds)``.
        grids: By optimiser training error, test error and largest eigenvalue,
            ``(3, num_seeds, rates, deltas)``.
        sgd: The same three of SGD, ``(3, num_seeds, rates)``.
        curves: By method running training error after each epoch, and processor time, ``(2,
            num_seeds, epochs)``.
        seconds: Processor time of each part.
        missing: Names of the runs of the grid for which no time was left. Their numbers are NaN,
            as those of runs that diverged.
    """

    lopt: Tensor
    descent: Tensor
    grids: dict[str, Tensor]
    sgd: Tensor
    curves: dict[str, Tensor]
    seconds: dict[str, float]
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*_lopt_lines(self), *_grid_lines(self), *_curve_lines(self)])


def run(config: Config, *, progress: bool | Progress = False, state: StatePath = None) -> Result:
    """Return the results of all parts. The runs of the grid can resume."""
    setup, began, limit = config.setup, time.process_time(), TimeLimit(config.max_seconds)
    # Parts that are not run have empty results.
    empty, seconds = torch.zeros(0), dict[str, float]()
    results: dict[str, Any] = {"lopt": (empty, empty), "grid": ({}, empty, ()), "newton": {}}
    grid = partial(_grid, state=state, limit=limit)
    for part, call in (("lopt", _lopt), ("grid", grid), ("newton", _newton)):
        if part in config.parts:
            results[part] = call(config, setup, progress)
            seconds[part] = time.process_time() - began
            began = time.process_time()
    (lopt, descent), (grids, sgd, missing) = results["lopt"], results["grid"]
    return Result(
        config=config, lopt=lopt, descent=descent, grids=grids, sgd=sgd, curves=results["newton"],
        seconds=seconds, missing=missing,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------
# LOPT on a convex problem.

RATE = 0.01  # Fig. 2 and 3


def _lopt(config: Config, setup: Setup, progress: bool | Progress) -> tuple[Tensor, Tensor]:
    sets: Any = data.load(setup.data, data_dir=config.data_dir)
    count = config.num_seeds
    errors = torch.zeros(2, count, len(setup.deltas), len(setup.etas), dtype=torch.float64)
    descent = torch.zeros(2, count, dtype=torch.float64)
    pairs = [None, *product(enumerate(setup.deltas), enumerate(setup.etas))]
    runs = list(product(range(count), pairs))
    for seed, pair in track(runs, "convex runs", progress):
        if pair is None:
            descent[:, seed] = _convex_run(sets, setup, config.seed + seed, None)
            continue
        (i, delta), (j, eta) = pair
        settings = {"delta": delta, "eta": eta}
        errors[:, seed, i, j] = _convex_run(sets, setup, config.seed + seed, settings)
    return errors, descent


def _convex_run(sets: Any, setup: Setup, seed: int, settings: dict[str, Any] | None) -> Tensor:
    """Return training and test error of a run with the full batch.

    Without settings the run is gradient descent.
    """
    train = sets.train.take(setup.num_train, generator=seeded(seed))
    (inputs, labels), held = train.tensors(), sets.test.tensors()
    model = new_network("logistic", sets, seed)
    params = list(model.parameters())
    if settings is None:
        optimizer: Any = torch.optim.SGD(params, RATE)
    else:
        optimizer = LanczosNewton(
            params, RATE, num_steps=setup.num_vectors, interval=setup.interval, **settings
        )
    risk = Risk(model, cross_entropy, [(inputs, labels)])
    for step in range(setup.num_steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        # The run diverged, and later steps would only multiply NaN.
        if not math.isfinite(float(loss.detach())):
            return column([math.nan] * 2)
        if settings is not None and optimizer.curvature_due(step):
            optimizer.update_curvature(risk)
        optimizer.step()
    return column([_error(model, inputs, labels), _error(model, *held)])


@torch.no_grad()
def _error(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    return float((model(inputs).argmax(1) != labels).double().mean())


# ------------------------------------------------------------------------------------------
# Networks: a grid of learning rates and dampings, and second-order steps beside first-order ones.


def _grid(
    config: Config,
    setup: Setup,
    progress: bool | Progress,
    *,
    state: StatePath,
    limit: TimeLimit,
) -> tuple[dict[str, Tensor], Tensor, tuple[str, ...]]:
    """Return the tables of the optimisers and of SGD, and the names of the missing runs."""
    sets, runs, measure = _images(config, setup), _runs(config), largest_eigenvalue
    if setup.eigenvalue:
        measure = LargestEigenvalue(_network(sets, setup, config.seed)[0], **setup.eigenvalue)

    def compute(cell: tuple[str, int, Any, dict[str, Any]]) -> Tensor:
        name, seed, _, settings = cell
        return _network_run(sets, setup, config.seed + seed, name, settings, measure)

    options: Any = {"config": config, "state": state, "limit": limit, "progress": progress}
    done = compute_cells(compute, runs, "runs", **options)
    grids = {name: config.grid(name) for name in config.optimizers}
    shapes = {name: (len(grid.rates), len(grid.deltas)) for name, grid in grids.items()}
    tables = {
        name: torch.full((3, config.num_seeds, *shape), math.nan, dtype=torch.float64)
        for name, shape in (shapes | {"sgd": (len(config.sgd_rates),)}).items()
    }
    for key, scores in done.items():
        name, seed, place, _ = runs[key]
        tables[name][:, seed].movedim(0, -1)[place] = scores
    return tables, tables.pop("sgd"), tuple(key for key in runs if key not in done)


def _runs(config: Config) -> dict[str, tuple[str, int, tuple[int, ...], dict[str, Any]]]:
    """Return optimiser, seed, place in the table and settings of every run, by its name.

    The runs that an unfinished grid needs most are the first ones of their seed.
    """
    runs: list[tuple[int, str, str, tuple[int, ...], dict[str, Any]]] = [
        (1, f"sgd rate {rate:g}", "sgd", (i,), {"lr": rate, "momentum": 0.9})
        for i, rate in enumerate(config.sgd_rates)
    ]
    for name in config.optimizers:
        grid = config.grid(name)
        places = product(enumerate(grid.rates), enumerate(grid.deltas))
        for (i, rate), (j, delta) in places:
            # K-FAC: the diagonal first, then more damping, then less, at which runs may diverge.
            # Others: the smallest and the largest damping.
            order = (
                2 * abs(j - i) + (j < i) if name == "kfac" else 2 * (0 < j < len(grid.deltas) - 1)
            )
            settings = {"lr": rate, "delta": delta, **grid.settings}
            runs.append((order, f"{name} rate {rate:g} delta {delta:g}", name, (i, j), settings))
    runs.sort(key=itemgetter(0))
    return {
        f"{title} seed {seed}": (name, seed, place, settings)
        for seed, (_, title, name, place, settings) in product(range(config.num_seeds), runs)
    }


def _network_run(
    sets: Any, setup: Setup, seed: int, name: str, settings: Mapping[str, Any],
    measure: Callable[[nn.Module, Any, int], float] = largest_eigenvalue,
) -> Tensor:  # fmt: skip
    """Return training error, test error and largest eigenvalue after a run."""
    model, train = _network(sets, setup, seed)
    # In steps, because a warm-up of one epoch in units of epochs has no effect.
    steps = math.ceil(len(train) / setup.batch_size)
    rise: Any = {"warmup": setup.warmup * steps, "schedule_unit": "step"} if setup.warmup else {}
    diverged = column([math.nan] * 3)
    try:
        result = fit_whole(
            model, (train, sets.test), optimizer=name, optimizer_settings=dict(settings),
            schedule="linear", num_epochs=setup.num_epochs, evaluate_every=setup.num_epochs,
            batch_size=setup.batch_size, augment=setup.augmentation or False, seed=seed,
            precision=setup.precision, **rise,
        )  # fmt: skip
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # Factors of K-FAC beyond the range of float32, before the loss is read at the end of the
        # epoch.
        return diverged
    if not result.status.ok:
        return diverged
    some = train.take(min(setup.curvature_samples, len(train)), generator=seeded(seed))
    errors = [1 - result.metrics[f"{part}_accuracy"] for part in ("train", "test")]
    try:
        return column([*errors, measure(model, some.tensors(), seed)])
    except ValueError:  # a last step of infinite length, after a loss that was still finite
        return diverged


def _images(config: Config, setup: Setup) -> Any:
    return data.load(setup.images[0], data_dir=config.data_dir, device=config.device)


def _network(sets: Any, setup: Setup, seed: int) -> tuple[nn.Module, Any]:
    """Return a new network and its training data, both by the seed."""
    (name, options), count = setup.network, setup.images[1]
    train = sets.train.take(count, generator=seeded(seed)) if count else sets.train
    return new_network(name, sets, seed, train.device, **options), train


def _newton(config: Config, setup: Setup, progress: bool | Progress) -> dict[str, Tensor]:
    sets = _images(config, setup)
    curves: dict[str, list[Tensor]] = {name: [] for name in METHODS}
    runs = list(product(range(config.num_seeds), METHODS))
    for seed, name in track(runs, "second-order runs", progress):
        curves[name].append(_curve(sets, setup, config.seed + seed, *METHODS[name]))
    return {name: torch.stack(parts, 1) for name, parts in curves.items()}


class Clock:
    """Processor time at the end of every epoch."""

    unit = "epoch"

    def __init__(self) -> None:
        self.began, self.times = time.process_time(), list[float]()

    def __call__(self, count: int, model: nn.Module, optimizer: Any) -> None:
        """Note the time."""
        # Kernels on a GPU run after the call has returned.
        if next(model.parameters()).is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.process_time() - self.began)


def _curve(sets: Any, setup: Setup, seed: int, name: str, settings: dict[str, Any]) -> Tensor:
    """Return training errors and times after each epoch, ``(2, epochs)``; NaN once it diverged."""
    model, train = _network(sets, setup, seed)
    # First-order methods get more epochs, so that the curves reach the same time.
    epochs, clock = setup.newton_epochs * (1 if name == NEWTON else setup.longer), Clock()
    result = fit_whole(
        model, train, optimizer=name, optimizer_settings=settings, num_epochs=epochs,
        batch_size=setup.batch_size, augment=setup.augmentation or False, seed=seed,
        monitors=[clock],
    )  # fmt: skip
    curve = torch.full((2, epochs), math.nan, dtype=torch.float64)
    if not (done := result.num_epochs):
        return curve
    curve[0, :done] = 1 - result.history["train_accuracy"]
    curve[1, :done] = column(clock.times)
    return curve


# ------------------------------------------------------------------------------------------
# Tables: means over seeds, which are NaN if one of the runs diverged.


def _lopt_lines(result: Result) -> list[str]:
    if not len(result.lopt):
        return []
    setup, errors, descent = result.config.setup, 100 * result.lopt, 100 * result.descent
    lines = [
        f"LOPT: errors in % (training, test) on {setup.num_train} of {setup.data}, "
        f"learning rate {RATE}, "
        f"{setup.num_steps} steps, k = {setup.num_vectors}; mean over {errors.shape[1]} seeds",
        f"{'delta':>10}" + "".join(f"{f'eta = {eta:g}':>18}" for eta in setup.etas),
    ]
    for i, delta in enumerate(setup.deltas):
        cells = zip(*(part.mean(0)[i].tolist() for part in errors), strict=True)
        lines.append(f"{delta:>10g}" + "".join(f"{a:>9.2f}{b:>9.2f}" for a, b in cells))
    lines.append(f"gradient descent  {descent[0].mean():.2f}  {descent[1].mean():.2f}")
    return lines


def _grid_lines(result: Result) -> list[str]:
    lines = []
    for name, scores in result.grids.items():
        grid = result.config.grid(name)
        lines.append(f"{name}: lambda_1 at the end (test error in %) by damping and learning rate")
        lines.append(f"{'delta':>10}" + "".join(f"{f'rate {rate:g}':>18}" for rate in grid.rates))
        for j, delta in enumerate(grid.deltas):
            cells = zip(scores[2].mean(0)[:, j], 100 * scores[1].mean(0)[:, j], strict=True)
            text = [f"{value:.4g} ({error:.2f})" for value, error in cells]
            lines.append(f"{delta:>10g}" + "".join(f"{cell:>18}" for cell in text))
    if len(result.sgd):
        rows = zip(
            result.config.sgd_rates, result.sgd[2].mean(0), 100 * result.sgd[1].mean(0), strict=True
        )
        lines += [f"SGD {rate:g}: {value:.4g} ({error:.2f})" for rate, value, error in rows]
    if result.missing:
        lines.append(f"Not run within {result.config.max_seconds:g} s: {', '.join(result.missing)}")
    return lines


def _curve_lines(result: Result) -> list[str]:
    if not result.curves:
        return []
    epochs, budget = common_epochs(result.curves), common_time(result.curves)
    lines = [
        f"Running training error in % after {epochs} epochs and after {budget:.3g} s of processor "
        "time; seconds per epoch",
    ]
    for name, curve in in_order(result.curves):
        last = 100 * float(curve[0, :, epochs - 1].mean())
        there = 100 * float(errors_at(curve, budget).mean())
        each = epoch_seconds(curve)
        lines.append(f"{name:26}{last:>8.2f}{there:>8.2f}{each:>10.3g}")
    return lines


# ------------------------------------------------------------------------------------------
# Beside the published figures.


def evidence(result: Result) -> list[Evidence]:
    """Return the claims of the papers beside the measured numbers."""
    return [*lopt_evidence(result), *grid_evidence(result), *curve_evidence(result)]


def setting(result: Result) -> str:
    """Return networks and data of the parts that were run."""
    setup, count = result.config.setup, result.config.num_seeds
    seeds = f"{count} seed{'s' * (count > 1)}"
    network = f"{setup.network[0]}, {setup.images[1] or 'all'} images, {seeds}."
    if is_published(setup):
        network = (
            f"{setup.network[0]} on all images of {setup.images[0]}, {setup.num_epochs} epochs, "
            f"{seeds}."
        )
    return network if result.grids or result.curves else f"1,000 digits, {seeds}."


def figure(result: Result) -> style.Figure:
    """Draw errors against damping, both heat maps, the grid, and the curves by epoch and time."""
    return draw(result, result.config.setup, in_order(result.curves))
