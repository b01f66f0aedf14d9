"""Records of training as the arrays a picture needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ritz._core.results import Estimate
from ritz.measures.degeneracy import Degeneracy
from ritz.plots.series import Array

Record = Mapping[str, Any]
Number = Estimate | float | int
HELD = ("validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSeries:
    """Loss, accuracy and perplexity by epoch; all arrays ``(n,)``, NaN where nothing was measured.

    Attributes:
        epoch: Ascending, from one.
        loss: By data: ``train``, ``validation``, ``test``, ``average validation``,
            ``average test``; of these what there is.
        accuracy: Likewise, in per cent; empty where there is none.
        perplexity: Likewise, of a text.
        average_from: First epoch whose average was evaluated, or ``None``.
    """

    epoch: Array
    loss: dict[str, Array]
    accuracy: dict[str, Array]
    perplexity: dict[str, Array]
    average_from: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Values at ``x`` with their standard errors, all ``(n,)`` and ascending in ``x``.

    An error is NaN where it is not known, which is no error of zero.
    """

    x: Array
    y: Array
    stderr: Array


def training_series(records: Iterable[Record]) -> TrainingSeries:
    """Return loss, accuracy and perplexity of a log by epoch.

    Args:
        records: Of a log of training; those of other kinds than ``epoch`` are passed over.
    """
    epochs = [record for record in records if record.get("kind") == "epoch"]
    if not epochs:
        raise ValueError("records must hold at least one epoch, got none: is it a log of training, "
                         "and has an epoch ended?")  # fmt: skip
    averaged = [f"average_{held}" for held in HELD]
    names = ("train", *HELD, *averaged)
    loss, accuracy, perplexity = (
        {
            name.replace("_", " "): _column(epochs, f"{name}_{what}")
            for name in names
            if any(f"{name}_{what}" in record for record in epochs)
        }
        for what in ("loss", "accuracy", "perplexity")
    )
    started = [record["epoch"] for record in epochs
               if any(f"{name}_loss" in record for name in averaged)]  # fmt: skip
    return TrainingSeries(
        epoch=_column(epochs, "epoch"),
        loss=loss,
        accuracy={name: 100 * values for name, values in accuracy.items()},
        perplexity=perplexity,
        average_from=float(started[0]) if started else None,
    )


def curvature_points(records: Iterable[Record], name: str) -> Points:
    """Return a quantity that a monitor logged, by epoch or, where it counts these, by step.

    Args:
        records: Of a log; those of other kinds than ``curvature`` are passed over.
        name: ``lambda_max``, ``threshold``, ``trace``, ``variance``, ``degeneracy`` (of the
            spectrum: see :func:`ritz.measures.rank_degeneracy`) ...
    """
    found = [record for record in records if record.get("kind") == "curvature"]
    if name == "degeneracy":
        found = [{**record, name: _mass(record)} for record in found if "ritz_values" in record]
    found = [record for record in found if record.get(name) is not None]
    if not found:
        raise ValueError(f"records must hold {name!r} of a monitor of curvature, got none")
    # A monitor within an epoch would have several points at the same one.
    epochs = [record.get("epoch") for record in found]
    unit = "epoch" if None not in epochs and len(set(epochs)) == len(epochs) else "step"
    errors = {"lambda_max": "lambda_max_residual"}
    return Points(
        x=_column(found, unit),
        y=_column(found, name),
        stderr=_column(found, errors.get(name, f"{name}_stderr")),
    )


def degeneracy_points(found: Mapping[float, Degeneracy]) -> Points:
    """Return the mass at the origin over time.

    Args:
        found: By epoch.
    """
    if not found:
        raise ValueError("found must hold the degeneracy of at least one epoch, got none")
    times = sorted(found)
    return points(times, [found[time].mass for time in times])


def points(x: Sequence[float], values: Sequence[Number]) -> Points:
    """Return values at ``x`` with their standard errors, zero for plain numbers.

    Args:
        x: In any order.
        values: Estimates or numbers, one for each.
    """
    if len(x) != len(values) or not len(x):
        raise ValueError(f"values must be one for each of {len(x)} places, got {len(values)}")
    order = sorted(range(len(x)), key=lambda i: x[i])
    errors = [float(v.stderr) if isinstance(v, Estimate) else 0.0 for v in values]
    return Points(
        x=np.array([x[i] for i in order], dtype=np.float64),
        y=np.array([float(values[i]) for i in order], dtype=np.float64),
        stderr=np.array([errors[i] for i in order], dtype=np.float64),
    )


def _mass(record: Record) -> float:
    """The mass at the origin: of two Ritz values for a Hessian, of one for a Gauss-Newton."""
    values, weights = np.array(record["ritz_values"]), np.array(record["ritz_weights"])
    nearest = np.abs(values).argsort()[: 1 if record.get("matrix") == "ggn" else 2]
    return float(weights[nearest].sum())


def _column(records: Iterable[Record], name: str) -> Array:
    values = [record.get(name) for record in records]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
