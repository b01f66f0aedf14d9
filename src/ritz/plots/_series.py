"""Results and training records as the arrays a plot needs; nothing new is computed here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ritz._core.checks import check_count, check_range
from ritz._core.results import Estimate
from ritz.graphs import Similarity
from ritz.measures import Degeneracy, Landscape, Landscape2d
from ritz.spectra import Density, DiscreteDensity, Spectrum

# ------------------------------------------------------------------------------------------
# What a function draws, and which function draws what it does not.

DRAWN_BY: dict[type, str] = {
    Spectrum: "plots.spectrum",
    Landscape: "plots.landscape",
    Landscape2d: "plots.landscape2d",
    Similarity: "plots.similarity",
}


def check_drawn(name: str, value: Any, kind: type) -> None:
    """Raise unless a value is of the class that a function draws; name the function that is.

    Args:
        name: Of the argument.
        value: Of any class.
        kind: The class.
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise not_drawn(name, f"{article} {kind.__name__}", value)


def not_drawn(name: str, wanted: str, value: Any) -> TypeError:
    """Return the error for a value that a function does not draw.

    Args:
        name: Of the argument.
        wanted: What it must be.
        value: What it is.
    """
    function = DRAWN_BY.get(type(value), "plots.density" if is_density(value) else "")
    if not function and type(value).__module__.startswith("ritz."):
        function = "plots.plot"
    advice = f"; {function} draws that" if function else ""
    return TypeError(f"{name} must be {wanted}, got {type(value).__name__}{advice}")


def is_density(value: Any) -> bool:
    """Return whether a value has the curve and the support of a density, whatever its class."""
    return hasattr(value, "pdf") and hasattr(value, "support")


# ------------------------------------------------------------------------------------------
# Results as the arrays a picture needs; nothing new is computed here.

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stems:
    """Stems of a spectrum, all arrays ``(m,)`` and ascending in ``values``.

    Attributes:
        values: Where they stand.
        weights: How high they are; the weights of a spectrum sum to 1.
        converged: Which of them are eigenvalues, by their residuals.
        signs: -1 below minus the residual, 1 above it, and 0 between, where an eigenvalue of
            either sign may be meant.
    """

    values: Array
    weights: Array
    converged: NDArray[np.bool_]
    signs: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A curve ``y(x)`` between ``low`` and ``high``, all arrays ``(num_points,)``."""

    x: Array
    y: Array
    low: Array
    high: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Loss and accuracy along one direction, all arrays ``(n,)``; ``None`` where there is none.

    Accuracies are in per cent.
    """

    t: Array
    loss: Array
    accuracy: Array | None
    test_loss: Array | None
    test_accuracy: Array | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """A function on a grid: ``z[j, i]`` at ``x[i]``, ``y[j]``, and levels between its extremes.

    Attributes:
        x: ``(n,)``.
        y: ``(m,)``.
        z: ``(m, n)``; NaN where it is not finite.
        levels: Ascending, the first at the least value and the last at the largest, in equal
            ratios where all values are positive and in equal steps otherwise.
        logarithmic: Which of the two.
    """

    x: Array
    y: Array
    z: Array
    levels: Array
    logarithmic: bool


def spectrum_stems(spectrum: Spectrum, *, rtol: float = 1e-3) -> Stems:
    """Return the stems of a spectrum.

    Args:
        spectrum: As of :func:`ritz.lanczos`.
        rtol: A value has converged when its residual is at most this share of the largest
            absolute value.
    """
    check_range("rtol", rtol, low=0)
    values, residuals = spectrum.values, spectrum.residuals
    converged = residuals <= rtol * values.abs().max()
    return Stems(
        values=as_array(values),
        weights=as_array(spectrum.weights),
        converged=converged.cpu().numpy(),
        signs=((values > residuals).long() - (values < -residuals).long()).cpu().numpy(),
    )


def one_probe_density(spectrum: Spectrum) -> DiscreteDensity:
    """Return the values and weights of a spectrum as the discrete density of one probe.

    Args:
        spectrum: As of :func:`ritz.lanczos`.
    """
    return DiscreteDensity(
        nodes=spectrum.values[None].cpu(),
        weights=spectrum.weights[None].cpu(),
        roundoff=spectrum.roundoff,
        dimension=spectrum.dimension,
        num_products=spectrum.num_products,
        seed=spectrum.seed or 0,
    )


def density_curve(
    density: Density, *, cumulative: bool = False, sigmas: float = 2.0, num_points: int = 2000
) -> Curve:
    """Return the curve of a density over its support, with its error band if it has one.

    Args:
        density: A discrete one has a cumulative curve only.
        cumulative: The distribution function in place of the density.
        sigmas: Half width of the band in standard errors.
        num_points: Evenly spaced; more where the density states a width that needs them.
    """
    check_count("num_points", num_points, low=2)
    low, high = density.support
    width = getattr(density, "width", None)
    if width:
        num_points = min(max(num_points, int(4 * (high - low) / width)), 100_000)
    x = torch.linspace(low, high, num_points, dtype=torch.float64)
    kind = "cdf" if cumulative else "pdf"
    y = getattr(density, kind)(x)
    band = getattr(density, f"{kind}_band", None)
    below, above = (y, y) if band is None else band(x, sigmas=sigmas)
    return Curve(x=as_array(x), y=as_array(y), low=as_array(below), high=as_array(above))


def landscape_slice(landscape: Landscape, direction: str | int = 0) -> Slice:
    """Return loss and accuracy along one direction.

    Args:
        landscape: Along several.
        direction: Its name or number.
    """
    names = landscape.names
    known = direction in names if isinstance(direction, str) else 0 <= direction < len(names)
    if not known:
        raise ValueError(f"direction must be one of {', '.join(names)}, or a number below "
                         f"{len(names)}; got {direction!r}")  # fmt: skip
    k = names.index(direction) if isinstance(direction, str) else direction
    accuracy, loss, test = landscape.accuracy, landscape.test_loss, landscape.test_accuracy
    return Slice(
        t=as_array(landscape.t),
        loss=as_array(landscape.loss[k]),
        accuracy=None if accuracy is None else 100 * as_array(accuracy[k]),
        test_loss=None if loss is None else as_array(loss[k]),
        test_accuracy=None if test is None else 100 * as_array(test[k]),
    )


def landscape_surface(
    landscape: Landscape2d, *, test: bool = False, num_levels: int = 12
) -> Surface:
    """Return the loss on a plane with the levels of its contours.

    Args:
        landscape: On a grid.
        test: The loss on the test data in place of the other.
        num_levels: Levels between the least and the largest finite value.
    """
    check_count("num_levels", num_levels, low=2)
    loss = landscape.test_loss if test else landscape.loss
    if loss is None:
        raise ValueError("landscape must have a loss on test data, got none: pass test= to it")
    z = as_array(loss).T
    finite = z[np.isfinite(z)]
    if not finite.size or finite.min() == finite.max():
        raise ValueError("landscape must have two finite values that differ, got none")
    low, high = float(finite.min()), float(finite.max())
    logarithmic = low > 0
    spaced = np.geomspace if logarithmic else np.linspace
    return Surface(
        x=as_array(landscape.s),
        y=as_array(landscape.t),
        z=np.where(np.isfinite(z), z, np.nan),
        levels=spaced(low, high, num_levels),
        logarithmic=logarithmic,
    )


def as_array(values: Any) -> Array:
    """Return numbers or a tensor, on whatever device, as a float64 array."""
    return np.asarray(torch.as_tensor(values).detach().cpu(), dtype=np.float64)


# ------------------------------------------------------------------------------------------
# Records of training as the arrays a picture needs.

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
