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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any, Literal, get_args

import numpy as np
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
from ritz.studies._adaptive_gap_figure import draw
from ritz.studies._adaptive_gap_sizes import (
    GRIDS,
    NAMES,
    SETUPS,
    SGD_RATES,
    Grid,
    Setup,
    SizeName,
)
from ritz.studies._evidence import Evidence, all_of, located, signed
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


# Fig. 4.2b: delta = 10 alpha and 20 Lanczos steps; Adam and SGD with several rates.
NEWTON = "lanczos_newton"
_HESSIAN: dict[str, Any] = {"num_steps": 20, "start": "random"}
_GGN = _HESSIAN | {"matrix": "ggn"}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD 0.01": ("sgd", {"lr": 0.01, "momentum": 0.9}),
    "SGD 0.03": ("sgd", {"lr": 0.03, "momentum": 0.9}),
    "Adam 0.003": ("adam", {"lr": 3e-3}),
    "|H|, rate 1": (NEWTON, _HESSIAN | {"lr": 1.0, "delta": 10.0}),
    "GGN, rate 0.1": (NEWTON, _GGN | {"lr": 0.1, "delta": 1.0}),
    "GGN from g, rate 0.3": (NEWTON, _GGN | {"lr": 0.3, "delta": 0.3, "start": "gradient"}),
    "GGN, rate 0.1, every 10": (NEWTON, _GGN | {"lr": 0.1, "delta": 1.0, "interval": 10}),
}


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
    # Equal time is that of the epochs of the first second-order method that ended.
    newton = [c for name, c in _in_order(result.curves) if METHODS[name][0] == NEWTON]
    ended = [float(c[1, :, -1].mean()) for c in newton if not bool(c.isnan().any())]
    epochs, budget = newton[0].shape[-1], ended[0] if ended else 0.0
    lines = [
        f"Running training error in % after {epochs} epochs and after {budget:.3g} s of processor "
        "time; seconds per epoch",
    ]
    for name, curve in _in_order(result.curves):
        last = 100 * float(curve[0, :, epochs - 1].mean())
        pairs = zip(*curve, strict=True)
        there = 100 * float(np.mean([_at(times, errors, budget) for errors, times in pairs]))
        each = _seconds(curve)
        lines.append(f"{name:26}{last:>8.2f}{there:>8.2f}{each:>10.3g}")
    return lines


def _in_order(curves: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    # Files sort their names.
    return [(name, curves[name]) for name in METHODS if name in curves]


def _seconds(curve: Tensor) -> float:
    """Return the processor time per completed epoch."""
    # Times add up over the epochs, and those after a divergence are NaN.
    done = (~curve[1].isnan()).sum(-1).clamp(min=1)
    return float((curve[1].nan_to_num().amax(-1) / done).mean())


def _at(times: Tensor, errors: Tensor, budget: float) -> float:
    """Return the error of the last epoch within a budget of time; 1 before the first."""
    done = int((times <= budget).sum())
    return float(errors[done - 1]) if done else 1.0


# ------------------------------------------------------------------------------------------
# Beside the published figures.


def evidence(result: Result) -> list[Evidence]:
    """Return the claims of the papers beside the measured numbers."""
    return [*_lopt_evidence(result), *_grid_evidence(result), *_curve_evidence(result)]


def setting(result: Result) -> str:
    """Return networks and data of the parts that were run."""
    setup, count = result.config.setup, result.config.num_seeds
    seeds = f"{count} seed{'s' * (count > 1)}"
    network = f"{setup.network[0]}, {setup.images[1] or 'all'} images, {seeds}."
    if _is_published(setup):
        network = (
            f"{setup.network[0]} on all images of {setup.images[0]}, {setup.num_epochs} epochs, "
            f"{seeds}."
        )
    return network if result.grids or result.curves else f"1,000 digits, {seeds}."


def _row(where: str, what: str, published: str, measured: str, *, paper: str = "GAP",
         note: str = "", **known: Any) -> Evidence:  # fmt: skip
    known["why"] = "; ".join(filter(None, [note, known["why"]]))
    return Evidence(
        paper=paper, where=where, what=what, published=published, measured=measured, **known
    )


def _listed(values: Any, blank: str = "diverged") -> str:
    numbers = [float(value) for value in values]
    return ", ".join(blank if math.isnan(one) else f"{one:.3g}" for one in numbers)


def _is_published(setup: Setup) -> bool:
    """Return whether network and data are those of the paper."""
    return (setup.network[0], setup.images) == ("vgg16", ("cifar100", 0))


def _least(values: Tensor) -> float:
    """Return the least of the finite values, or NaN."""
    return min(values[values.isfinite()].tolist(), default=math.nan)


def _lopt_evidence(result: Result) -> list[Evidence]:
    if not len(result.lopt):
        return []
    setup, (train, test) = result.config.setup, 100 * result.lopt  # by seed
    note = f"{setup.num_steps} steps, basis every {setup.interval}; the paper states neither"
    mean = test.mean(0)[:, 0]
    best, deltas = int(mean.argmin()), _listed(setup.deltas)
    # What eta = 10 adds to the errors of eta = 1 at the dampings at which both fit the data.
    fitted = (train[..., -1] - train[..., 0]).mean(0).abs() < 1
    harm = (test[..., -1] - test[..., 0])[:, fitted]
    return [
        _row("Figure 2", f"LOPT: test error in % by damping {deltas}",
             "rises as the damping falls", _listed(mean),
             note=f"up to a peak at {setup.deltas[int(mean.argmax())]:g}; {note}",
             **signed(test[:, 0, 0] - test[:, best, 0], 1)),
        _row("Figure 2", f"LOPT: training error in % by damping {deltas}", "does not suffer",
             _listed(train.mean(0)[:, 0]), note=note,
             **signed(train[:, 0, 0] - train[:, -1, 0], -1)),
        _row("Figure 3", "test error in % that eta = 10 adds, where training adds less than 1 %",
             "positive", _listed(harm.mean(0)) or "none", note=note, **signed(harm.mean(1), 1)),
    ]  # fmt: skip


def _grid_evidence(result: Result) -> Iterator[Evidence]:
    setup = result.config.setup
    short = "" if setup.num_epochs >= 300 else f"{setup.num_epochs} epochs; the paper has 300"
    where = short if _is_published(setup) else "not VGG-16 on CIFAR-100"
    for name, scores in result.grids.items():
        grid = result.config.grid(name)
        cause = (
            "the cause was tested for damped Adam only"
            if name == "kfac"
            else "more damping trains more slowly; see adaptive_causes for equal loss"
        )
        cause = "; ".join(filter(None, [where, cause]))
        dampings = _listed(grid.deltas)
        for i, rate in enumerate(grid.rates):
            norms, errors = scores[2, :, i], 100 * scores[1, :, i]  # by seed and damping
            # From the smallest to the largest damping at which all runs have learned.
            ended = norms.isfinite().all(0)
            learned = (scores[0, :, i] <= 1 - setup.least_accuracy).all(0)
            kept = norms[:, ended & learned]
            if kept.shape[1] < 2:
                continue
            note, blank = _gaps(result, name, [d for d, stuck in zip(
                grid.deltas, ended & ~learned, strict=True) if stuck])  # fmt: skip
            change = kept[:, -1] - kept[:, 0]
            run = f"{NAMES[name]}, learning rate {rate:g}"
            yield _row("Table 2", f"{run}: lambda_1 by damping {dampings}",
                       "falls as the damping rises", _listed(norms.mean(0), blank), note=note,
                       **signed(change, -1, cause=cause))  # fmt: skip
            if name == "kfac":
                continue
            # The gain of the best of the larger dampings.
            means = errors.mean(0).nan_to_num(math.inf)
            gain = errors[:, 0] - errors[:, 1 + int(means[1:].argmin())]
            sgd = 100 * _least(result.sgd[1].mean(0))
            note = "; ".join(filter(None, [note, f"SGD {sgd:.3g}" * math.isfinite(sgd)]))
            yield _row("Figure 5", f"{run}: test error % by damping {dampings}",
                       "a larger damping than 1e-8 is better", _listed(errors.mean(0), blank),
                       note=note, **signed(gain, 1))  # fmt: skip
        if name == "kfac":
            if not _missing(result, name):
                yield _least_damping(grid, scores[2])
            yield from _ratio_evidence(result, grid, scores)


def _missing(result: Result, name: str) -> bool:
    """Return whether runs of an optimiser are missing."""
    return any(key.startswith(f"{name} ") for key in result.missing)


def _gaps(result: Result, name: str, stuck: list[float]) -> tuple[str, str]:
    """Return a note on the runs that are not compared, and what stands for one without numbers."""
    unfinished = _missing(result, name)
    notes = [
        f"damping {_listed(stuck)} did not learn and is left out" if stuck else "",
        "- diverged or was not run" if unfinished else "",
    ]
    return "; ".join(filter(None, notes)), "-" if unfinished else "diverged"


def _least_damping(grid: Grid, norms: Tensor) -> Evidence:
    """Return the smallest damping at which no run of K-FAC diverged, by learning rate."""
    trained = norms.isfinite().all(0).tolist()  # (rates, deltas)
    least = [next((delta for delta, ok in zip(grid.deltas, each, strict=True) if ok), math.inf)
             for each in trained]  # fmt: skip
    grows = least == sorted(least) and least[0] < least[-1]
    what = f"K-FAC, learning rates {_listed(grid.rates)}: least damping that trains"
    return _row("Figure 4", what, "small learning rates train with less damping", _listed(least),
                verdict="agrees" if grows else "differs", why="")  # fmt: skip


def _ratio_evidence(result: Result, grid: Grid, scores: Tensor) -> list[Evidence]:
    """Return sharpness and errors of K-FAC along a constant ratio of damping and rate."""
    # A step along an eigenvector is alpha g / (lambda + delta): where lambda is small, it is
    # alpha / delta, which is the same in all these cells.
    ratio = grid.deltas[0] / grid.rates[0]
    stuck = (scores[0] > 1 - result.config.setup.least_accuracy).any(0)
    # From the largest rate to the smallest.
    cells = [
        (i, j)
        for (i, rate), (j, delta) in product(enumerate(grid.rates), enumerate(grid.deltas))
        if math.isclose(delta, ratio * rate)
    ][::-1]
    left_out = [grid.deltas[j] for i, j in cells if stuck[i, j]]
    cells = [cell for cell in cells if not stuck[cell]]
    if not cells:
        return []
    norms, errors = (
        torch.stack([one[:, i, j] for i, j in cells]) for one in (scores[2], scores[1])
    )
    title = f"K-FAC, damping {ratio:g} times the learning rate"
    rates = _listed(grid.rates[i] for i, _ in cells)
    note, blank = _gaps(result, "kfac", left_out)
    note = "; ".join(filter(None, ["there at learning rates 0.1, 0.001, 0.0001", note]))
    return [
        _row("Table 2, right", f"{title} of {rates}: lambda_1",
             "rises as it falls: 6.7, 20.8, 48.2", _listed(norms.mean(1), blank), note=note,
             **signed(norms[-1] - norms[0], 1)),
        _row("Figure 4", f"{title} of {rates}: test error in %",
             "rises as it falls: 35.0, 35.2, 37.8", _listed(100 * errors.mean(1), blank), note=note,
             **signed(errors[-1] - errors[0], 1)),
    ]  # fmt: skip


def _curve_evidence(result: Result) -> list[Evidence]:
    if not result.curves:
        return []
    curves = dict(_in_order(result.curves))
    newton = [name for name in curves if METHODS[name][0] == NEWTON]
    epochs = curves[newton[0]].shape[-1]
    errors = {name: 100 * curve[0, :, epochs - 1] for name, curve in curves.items()}
    means = {name: float(values.mean()) for name, values in errors.items()}
    kinds = {"Lanczos-Newton": newton} | {
        kind: [name for name in curves if name.startswith(kind)] for kind in ("SGD", "Adam")
    }
    # A method that diverged is not the best.
    best = {kind: min(names, key=lambda name: (math.isnan(means[name]), means[name]))
            for kind, names in kinds.items()}  # fmt: skip
    ahead = [errors[best["Lanczos-Newton"]] - errors[best[kind]] for kind in ("SGD", "Adam")]
    text = "; ".join(f"{name}: {_listed([mean])}" for name, mean in means.items())
    ratio = _seconds(curves[newton[0]]) / _seconds(curves[kinds["SGD"][0]])
    cause = "a small network, and SGD and Adam have momentum; see adaptive_causes"
    return [
        _row("Figure 4.2b", f"training error in % after {epochs} epochs, batches of "
             f"{result.config.setup.batch_size}", "Lanczos-Newton below Adam and SGD",
             "; ".join(f"best {kind}: {means[name]:.3g}" for kind, name in best.items()),
             paper="SPECTRA", note=f"all: {text}",
             **all_of(*(signed(lead, -1, cause=cause) for lead in ahead))),
        _row("Section 4.3.1", "cost of a step of Lanczos-Newton in SGD steps", "about 40",
             f"{ratio:.3g}", paper="SPECTRA",
             note="20 Lanczos iterations on the Hessian, processor time of one thread; tolerance a "
             "factor of 2", verdict=located(ratio, 0.0, 20.0, 80.0), why=""),
    ]  # fmt: skip


def figure(result: Result) -> style.Figure:
    """Draw errors against damping, both heat maps, the grid, and the curves by epoch and time."""
    return draw(result, result.config.setup, _in_order(result.curves))
