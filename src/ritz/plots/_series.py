"""Results and training logs as the arrays that a plot needs. Nothing new is computed here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ritz._core.checks import check_count, check_range, check_type
from ritz._core.results import Estimate
from ritz.measures import Landscape, Landscape2d
from ritz.spectra import Density, Spectrum

Array = NDArray[np.float64]
Record = Mapping[str, Any]
Number = Estimate | float | int


def as_array(values: Any) -> Array:
    """Return numbers or a tensor on any device as a float64 array."""
    return np.asarray(torch.as_tensor(values).detach().cpu(), dtype=np.float64)


def not_drawn(name: str, wanted: str, value: Any) -> TypeError:
    """Return the TypeError for an argument of the wrong class, which suggests ``plots.plot``."""
    advice = "; plots.plot draws it" if type(value).__module__.startswith("ritz.") else ""
    return TypeError(f"{name} must be {wanted}, got {type(value).__name__}{advice}")


def check_drawn(name: str, value: Any, kind: type) -> None:
    """Raise unless an argument has the class that a function draws."""
    if not isinstance(value, kind):
        raise not_drawn(name, f"a {kind.__name__}", value)


def check_named(name: str, value: Any, wanted: str) -> None:
    """Raise unless an argument is a mapping with at least one entry."""
    check_type(name, value, Mapping, f"a mapping of {wanted}")
    if not value:
        raise ValueError(f"{name} must contain at least one entry, got none")


# ------------------------------------------------------------------------------------------
# Spectra and densities.


@dataclass(frozen=True, slots=True, kw_only=True)
class Stems:
    """Stems of a spectrum; all arrays are ``(m,)`` and ``values`` ascend.

    Attributes:
        values: Ritz values, the places of the stems.
        weights: Weights, the heights of the stems.
        converged: Whether the residual is small enough for an eigenvalue.
        signs: -1 or 1 if the Ritz value is farther from zero than its residual, otherwise 0: the
            eigenvalue can then have either sign.
    """

    values: Array
    weights: Array
    converged: NDArray[np.bool_]
    signs: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A curve ``y(x)`` and its error band; all arrays are ``(num_points,)``, NaN without a band."""

    x: Array
    y: Array
    low: Array
    high: Array


def spectrum_stems(spectrum: Spectrum, *, rtol: float = 1e-3) -> Stems:
    """Return the stems of a spectrum.

    Args:
        spectrum: Result of :func:`ritz.lanczos`.
        rtol: Largest residual of a converged value, relative to the largest absolute value.
    """
    check_range("rtol", rtol, low=0)
    values, residuals = as_array(spectrum.values), as_array(spectrum.residuals)
    # An eigenvalue lies within the residual of each Ritz value.
    return Stems(
        values=values,
        weights=as_array(spectrum.weights),
        converged=residuals <= rtol * np.abs(values).max(),
        signs=np.where(np.abs(values) > residuals, np.sign(values), 0).astype(np.int64),
    )


def density_curve(
    density: Density, *, cumulative: bool = False, level: float = 0.95, num_points: int = 2000
) -> Curve:
    """Return the curve of a density over its support, with its error band if it has one.

    Args:
        density: Any density. A discrete one has a cumulative curve only.
        cumulative: Return the distribution function instead of the density.
        level: Probability with which the band contains the density at a point.
        num_points: Number of points, evenly spaced. A narrow ``width`` of the density adds more.
    """
    num_points = check_count("num_points", num_points, low=2)
    low, high = density.support
    # Four points per width resolve a Gaussian bump; 100,000 points are enough for any screen.
    if width := getattr(density, "width", None):
        num_points = min(max(num_points, int(4 * (high - low) / width)), 100_000)
    x = torch.linspace(low, high, num_points, dtype=torch.float64)
    kind = "cdf" if cumulative else "pdf"
    y, interval = getattr(density, kind)(x), getattr(density, f"{kind}_interval", None)
    below, above = (torch.nan * y,) * 2 if interval is None else interval(x, level=level)
    return Curve(x=as_array(x), y=as_array(y), low=as_array(below), high=as_array(above))


# ------------------------------------------------------------------------------------------
# Landscapes.


def landscape_lines(landscape: Landscape, direction: str | int = 0) -> dict[str, dict[str, Array]]:
    """Return ``loss`` and ``accuracy`` (in per cent) along one direction, by data set.

    Args:
        landscape: Landscape along one or several directions.
        direction: Name or number of the direction.

    Returns:
        Arrays ``(n,)`` of the data sets that the landscape has: ``train``, ``test``.
    """
    names = landscape.names
    if direction not in (*names, *range(len(names))):
        raise ValueError(f"direction must be one of {', '.join(names)}, or a number below "
                         f"{len(names)}; got {direction!r}")  # fmt: skip
    k = names.index(direction) if isinstance(direction, str) else direction
    loss = {"train": landscape.loss, "test": landscape.test_loss}
    accuracy = {"train": landscape.accuracy, "test": landscape.test_accuracy}
    return {
        "loss": {part: as_array(y[k]) for part, y in loss.items() if y is not None},
        "accuracy": {part: 100 * as_array(y[k]) for part, y in accuracy.items() if y is not None},
    }


def landscape_surface(
    landscape: Landscape2d, *, test: bool = False, num_levels: int = 12
) -> tuple[Array, Array]:
    """Return the loss on a plane and the levels of its contours.

    Args:
        landscape: Landscape on a grid.
        test: Return the loss on the test data.
        num_levels: Number of levels from the smallest to the largest finite loss.

    Returns:
        The loss ``z[j, i]`` at ``s[i]``, ``t[j]`` with NaN where it is not finite, and the levels:
        in equal ratios if all losses are positive, otherwise in equal steps.
    """
    num_levels = check_count("num_levels", num_levels, low=2)
    loss = landscape.test_loss if test else landscape.loss
    if loss is None:
        raise ValueError("landscape must have a test loss, got none: give test= to landscape2d")
    z = as_array(loss).T
    finite = z[np.isfinite(z)]
    if not finite.size or finite.min() == finite.max():
        raise ValueError("landscape must have two different finite values to draw contours")
    spaced = np.geomspace if finite.min() > 0 else np.linspace
    levels: Array = spaced(finite.min(), finite.max(), num_levels)
    return np.where(np.isfinite(z), z, np.nan), levels


# ------------------------------------------------------------------------------------------
# Training logs and measurements with errors.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSeries:
    """Training by epoch; all arrays are ``(n,)``, with NaN where nothing was measured.

    Attributes:
        epoch: Epochs, ascending from 1.
        quantities: ``loss``, ``accuracy`` and ``top5 accuracy`` (in per cent) and ``perplexity``,
            each by data set: ``train``, ``validation``, ``test``, ``average validation`` and
            ``average test``, as far as they were logged.
        settings: What training set in each epoch: ``learning rate`` if it changed, ``damping``.
        average_from: First epoch whose averaged weights were evaluated, or ``None``.
    """

    epoch: Array
    quantities: dict[str, dict[str, Array]]
    settings: dict[str, Array]
    average_from: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Values with standard errors; all arrays are ``(n,)`` and ``x`` ascends.

    Attributes:
        x: Places.
        y: Values.
        stderr: Standard errors. NaN means unknown, which is not zero.
        unit: What ``x`` counts: ``epoch`` or ``step``.
        matrix: Matrix that a monitor measured; empty if unknown or if there are several.
    """

    x: Array
    y: Array
    stderr: Array
    unit: str = "epoch"
    matrix: str = ""


def training_series(records: Iterable[Record]) -> TrainingSeries:
    """Return loss, accuracy, perplexity, learning rate and damping of a training log, by epoch."""
    epochs = [record for record in records if record.get("kind") == "epoch"]
    if not epochs:
        raise ValueError("records must contain at least one finished epoch, got none")
    averages = ("average_validation", "average_test")
    near = dict.fromkeys(name.removeprefix("train_") for record in epochs for name in record
                         if name.startswith("train_top"))  # fmt: skip
    quantities: dict[str, dict[str, Array]] = {}
    for quantity in ("loss", "accuracy", "perplexity", *near):
        columns = quantities.setdefault(quantity.replace("_", " "), {})
        for name in ("train", "validation", "test", *averages):
            if any(f"{name}_{quantity}" in record for record in epochs):
                scale = 100.0 if quantity.endswith("accuracy") else 1.0
                columns[name.replace("_", " ")] = scale * _column(epochs, f"{name}_{quantity}")
    names = ("learning_rate", "damping")
    logged = {name.replace("_", " "): _column(epochs, name) for name in names}
    # A constant is one number, which the result of the run prints.
    settings = {word: y for word, y in logged.items() if len(np.unique(y[np.isfinite(y)])) > 1}
    averaged = (r["epoch"] for r in epochs if any(f"{name}_loss" in r for name in averages))
    return TrainingSeries(
        epoch=_column(epochs, "epoch"),
        quantities=quantities,
        settings=settings,
        average_from=next(averaged, None),
    )


def curvature_points(records: Iterable[Record], name: str) -> Points:
    """Return a quantity that a monitor logged, by epoch, or by step within epochs.

    Args:
        records: Records of a log. Only those of kind ``curvature`` are used.
        name: A number that a monitor logged. ``degeneracy`` may also be the mass near zero of a
            logged spectrum (see :func:`ritz.measures.rank_degeneracy`).
    """
    logged = [record for record in records if record.get("kind") == "curvature"]
    if name == "degeneracy":
        # The quantity itself, or that of a logged spectrum.
        spectra = (record for record in logged if name in record or "ritz_values" in record)
        logged = [record if name in record else {**record, name: _mass(record)}
                  for record in spectra]  # fmt: skip
    logged = [record for record in logged if record.get(name) is not None]
    if not logged:
        raise ValueError(f"records must contain {name!r}, got none: train with a CurvatureMonitor "
                         "(ritz train --watch)")  # fmt: skip
    # A monitor that measures within epochs would have several points at one epoch.
    epochs = [record.get("epoch") for record in logged]
    unit = "epoch" if None not in epochs and len(set(epochs)) == len(epochs) else "step"
    # An eigenvalue lies within the residual of the estimate.
    error = f"{name}_residual" if name.startswith("lambda") else f"{name}_stderr"
    matrices = {str(record.get("matrix", "")) for record in logged}
    return Points(
        x=_column(logged, unit),
        y=_column(logged, name),
        stderr=_column(logged, error),
        unit=unit,
        matrix=matrices.pop() if len(matrices) == 1 else "",
    )


def points(x: Sequence[float], values: Sequence[Number]) -> Points:
    """Return estimates or numbers sorted by ``x``, with standard errors (zero for numbers)."""
    if len(x) != len(values) or not len(x):
        raise ValueError(f"values must be {len(x)}, one for each x, got {len(values)}")
    order = np.argsort(x, kind="stable")
    errors = [float(value.stderr) if isinstance(value, Estimate) else 0.0 for value in values]
    columns = np.array([x, [*map(float, values)], errors], dtype=np.float64)[:, order]
    return Points(x=columns[0], y=columns[1], stderr=columns[2])


def _mass(record: Record) -> float:
    # The mass near zero is the weight of one Ritz value for a Gauss-Newton matrix. The bulk of a
    # Hessian extends to both sides of zero and is represented by the two nearest values.
    values, weights = np.array(record["ritz_values"]), np.array(record["ritz_weights"])
    nearest = np.abs(values).argsort()[: 1 if record.get("matrix") == "ggn" else 2]
    return float(weights[nearest].sum())


def _column(records: Iterable[Record], name: str) -> Array:
    values = [record.get(name) for record in records]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
