"""What the study ``adaptive_gap`` shows beside the published figures."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ritz.studies._adaptive_gap_sizes import METHODS, NAMES, NEWTON, Grid, Setup
from ritz.studies._evidence import Evidence, all_of, located, signed, spread
from ritz.studies._protocol import column

# ------------------------------------------------------------------------------------------
# The runs of the part "newton": error in training and time after each epoch, (2, seeds, epochs).


def in_order(curves: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    # Files sort their names.
    return [(name, curves[name]) for name in METHODS if name in curves]


def epoch_seconds(curve: Tensor) -> float:
    """Return the processor time per completed epoch."""
    # Times add up over the epochs, and those after a divergence are NaN.
    done = (~curve[1].isnan()).sum(-1).clamp(min=1)
    return float((curve[1].nan_to_num().amax(-1) / done).mean())


def common_epochs(curves: dict[str, Tensor]) -> int:
    """Return the epochs of the second-order methods, the fewest."""
    return min(curve.shape[-1] for curve in curves.values())


def common_time(curves: dict[str, Tensor]) -> float:
    """Return the time of all epochs of the first second-order method that ended, or zero."""
    newton = [curve for name, curve in in_order(curves) if METHODS[name][0] == NEWTON]
    ended = [float(curve[1, :, -1].mean()) for curve in newton if not bool(curve.isnan().any())]
    return ended[0] if ended else 0.0


def errors_at(curve: Tensor, budget: float) -> Tensor:
    """Return the errors of the last epoch within a time by seed; 1 before the first epoch."""
    done = (curve[1] <= budget).sum(-1).tolist()
    pairs = zip(curve[0], done, strict=True)
    return column(float(errors[count - 1]) if count else 1.0 for errors, count in pairs)


# ------------------------------------------------------------------------------------------
# Rows.


def _row(where: str, what: str, published: str, measured: str, *, paper: str = "GAP",
         note: str = "", **known: Any) -> Evidence:  # fmt: skip
    known["why"] = "; ".join(filter(None, [note, known["why"]]))
    return Evidence(
        paper=paper, where=where, what=what, published=published, measured=measured, **known
    )


def _listed(values: Any, blank: str = "diverged") -> str:
    numbers = [float(value) for value in values]
    return ", ".join(blank if math.isnan(one) else f"{one:.3g}" for one in numbers)


def _spreads(table: Tensor, blank: str = "diverged") -> str:
    """Return mean and standard error of every column of numbers by seed, ``(seeds, k)``."""
    if len(table) == 1:
        return _listed(table[0], blank)
    # If one seed diverged, there is no mean.
    return ", ".join(
        spread(values) if bool(values.isfinite().all()) else blank for values in table.T
    )


def is_published(setup: Setup) -> bool:
    """Return whether network and data are those of the paper."""
    return (setup.network[0], setup.images) == ("vgg16", ("cifar100", 0))


def _least(values: Tensor) -> float:
    """Return the least of the finite values, or NaN."""
    return min(values[values.isfinite()].tolist(), default=math.nan)


def lopt_evidence(result: Any) -> list[Evidence]:
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
             "rises as the damping falls", _spreads(test[:, :, 0]),
             note=f"up to a peak at {setup.deltas[int(mean.argmax())]:g}; {note}",
             **signed(test[:, 0, 0] - test[:, best, 0], 1)),
        _row("Figure 2", f"LOPT: training error in % by damping {deltas}", "does not suffer",
             _spreads(train[:, :, 0]), note=note,
             **signed(train[:, 0, 0] - train[:, -1, 0], -1)),
        _row("Figure 3", "test error in % that eta = 10 adds, where training adds less than 1 %",
             "positive", _spreads(harm) or "none", note=note, **signed(harm.mean(1), 1)),
    ]  # fmt: skip


def grid_evidence(result: Any) -> Iterator[Evidence]:
    setup = result.config.setup
    short = "" if setup.num_epochs >= 300 else f"{setup.num_epochs} epochs; the paper has 300"
    where = short if is_published(setup) else "not VGG-16 on CIFAR-100"
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
            left_out = [delta for delta, stuck in
                        zip(grid.deltas, ended & ~learned, strict=True) if stuck]  # fmt: skip
            note, blank = _gaps(result, name, left_out, norms)
            change = kept[:, -1] - kept[:, 0]
            run = f"{NAMES[name]}, learning rate {rate:g}"
            yield _row("Table 2", f"{run}: lambda_1 by damping {dampings}",
                       "falls as the damping rises", _spreads(norms, blank), note=note,
                       **signed(change, -1, cause=cause))  # fmt: skip
            if name == "kfac":
                continue
            # The gain of the best of the larger dampings.
            means = errors.mean(0).nan_to_num(math.inf)
            gain = errors[:, 0] - errors[:, 1 + int(means[1:].argmin())]
            sgd = 100 * _least(result.sgd[1].mean(0))
            note = "; ".join(filter(None, [note, f"SGD {sgd:.3g}" * math.isfinite(sgd)]))
            yield _row("Figure 5", f"{run}: test error % by damping {dampings}",
                       "a larger damping than 1e-8 is better", _spreads(errors, blank),
                       note=note, **signed(gain, 1))  # fmt: skip
        if name == "kfac":
            if not _missing(result, name):
                yield _least_damping(grid, scores[2])
            yield from _ratio_evidence(result, grid, scores)


def _missing(result: Any, name: str) -> bool:
    """Return whether runs of an optimiser are missing."""
    return any(key.startswith(f"{name} ") for key in result.missing)


def _gaps(result: Any, name: str, stuck: list[float], values: Tensor) -> tuple[str, str]:
    """Return a note on the runs that are not compared, and what stands for one without numbers."""
    unfinished = _missing(result, name) and bool(values.isnan().any())
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


def _ratio_evidence(result: Any, grid: Grid, scores: Tensor) -> list[Evidence]:
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
    note, blank = _gaps(result, "kfac", left_out, norms)
    note = "; ".join(filter(None, ["there at learning rates 0.1, 0.001, 0.0001", note]))
    return [
        _row("Table 2, right", f"{title} of {rates}: lambda_1",
             "rises as it falls: 6.7, 20.8, 48.2", _spreads(norms.T, blank), note=note,
             **signed(norms[-1] - norms[0], 1)),
        _row("Figure 4", f"{title} of {rates}: test error in %",
             "rises as it falls: 35.0, 35.2, 37.8", _spreads(100 * errors.T, blank), note=note,
             **signed(errors[-1] - errors[0], 1)),
    ]  # fmt: skip


def curve_evidence(result: Any) -> list[Evidence]:
    if not result.curves:
        return []
    curves = dict(in_order(result.curves))
    epochs, budget = common_epochs(curves), common_time(curves)
    after = {name: 100 * curve[0, :, epochs - 1] for name, curve in curves.items()}
    within = {name: 100 * errors_at(curve, budget) for name, curve in curves.items()}
    newton = next(curve for name, curve in curves.items() if METHODS[name][0] == NEWTON)
    sgd = next(curve for name, curve in curves.items() if METHODS[name][0] == "sgd")
    ratio = epoch_seconds(newton) / epoch_seconds(sgd)
    return [
        _race("Figure 4.2b", f"training error in % after {epochs} epochs, batches of "
              f"{result.config.setup.batch_size}", after),
        _race("Figure 4.2b", f"training error in % after {budget:.3g} s, the time of these epochs "
              "of Lanczos-Newton", within),
        _row("Section 4.3.1", "cost of a step of Lanczos-Newton in SGD steps", "about 40",
             f"{ratio:.3g}", paper="SPECTRA",
             note="20 Lanczos iterations on the Hessian, processor time of one thread; tolerance a "
             "factor of 2", verdict=located(ratio, 0.0, 20.0, 80.0), why=""),
    ]  # fmt: skip


def _race(where: str, what: str, errors: dict[str, Tensor]) -> Evidence:
    """Return the best errors of Lanczos-Newton, SGD and Adam, from errors by method and seed."""
    kinds = {
        "Lanczos-Newton": [name for name in errors if METHODS[name][0] == NEWTON],
        "SGD": [name for name in errors if METHODS[name][0] == "sgd"],
        "Adam": [name for name in errors if METHODS[name][0] == "adam"],
    }
    means = {name: float(values.mean()) for name, values in errors.items()}
    # A method that diverged is not the best.
    best = {kind: errors[min(names, key=lambda name: (math.isnan(means[name]), means[name]))]
            for kind, names in kinds.items()}  # fmt: skip
    cause = "a small network, and SGD and Adam have momentum; see adaptive_causes"
    ahead = (signed(best["Lanczos-Newton"] - best[kind], -1, cause=cause)
             for kind in ("SGD", "Adam"))  # fmt: skip
    text = "; ".join(f"{name}: {_listed([mean])}" for name, mean in means.items())
    return _row(
        where, what, "Lanczos-Newton below Adam and SGD",
        "; ".join(f"best {kind}: {spread(values)}" for kind, values in best.items()),
        paper="SPECTRA", note=f"all: {text}", **all_of(*ahead),
    )  # fmt: skip
