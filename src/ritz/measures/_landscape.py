"""``landscape`` and ``landscape2d``: loss along lines and on planes; directions to use for them."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ritz._core.batch_norm import BATCH_NORM_MODES, BatchNormMode, batch_norms
from ritz._core.checks import (
    check_choice,
    check_count,
    check_finite,
    check_positive,
    check_tensor,
    check_type,
)
from ritz._core.journal import Journal
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.storage import storable
from ritz.curvature import Risk
from ritz.curvature._shared import check_risk, num_correct
from ritz.measures._groups import random_vectors
from ritz.spectra import Eigenpairs, Spectrum

# ------------------------------------------------------------------------------------------
# Directions in weight space.

Directions = Spectrum | Eigenpairs | Tensor | Mapping[str, Tensor]


def ritz_directions(spectrum: Spectrum) -> dict[str, Tensor]:
    """Return the Ritz vectors ``(P,)`` of the largest, the smallest and the value nearest to zero.

    Their names are ``largest``, ``smallest`` and ``smallest magnitude``. A vector that has two of
    these names is returned under the first one. Vectors have unit length and an arbitrary sign.

    Args:
        spectrum: A spectrum with vectors: ``ritz.lanczos(op, num_steps=..., vectors=True)``.
    """
    check_type("spectrum", spectrum, Spectrum, "a Spectrum from lanczos(op, vectors=True)")
    if spectrum.vectors is None:
        raise ValueError("spectrum must have vectors, got none: pass vectors=True to lanczos")
    if len(spectrum.vectors) != spectrum.dimension:
        raise ValueError(
            f"spectrum must have vectors of {spectrum.dimension} rows, got "
            f"{len(spectrum.vectors)}: use placement='device' or 'host'"
        )
    chosen = {
        "largest": len(spectrum.values) - 1,
        "smallest": 0,
        "smallest magnitude": int(spectrum.values.abs().argmin()),
    }
    # Go through the names in reverse order, so that a vector gets the first of its names.
    names = {index: name for name, index in reversed(chosen.items())}
    indices = {name: index for name, index in chosen.items() if names[index] == name}
    return {name: spectrum.vectors[:, index].clone() for name, index in indices.items()}


def random_direction(risk: Risk, *, generator: torch.Generator | None = None) -> Tensor:
    """Return a random direction ``(P,)`` of unit length, uniform on the sphere.

    Args:
        risk: Risk that has the weights.
        generator: Source of randomness. Defaults to a new generator with seed 0.
    """
    check_risk(risk)
    vector = random_vectors(risk, 1, resolve_generator(generator))[:, 0]
    # The direction of a Gaussian vector is uniform on the sphere.
    return vector / float(vector.double().norm())


def filter_normalized(risk: Risk, direction: Tensor) -> Tensor:
    r"""Return a direction ``(P,)`` scaled filter by filter to the norms of the weights.

    .. math:: d_{l,j} \leftarrow \frac{\|\theta_{l,j}\|}{\|d_{l,j}\|} d_{l,j}

    for each filter :math:`j` of each layer :math:`l`. A filter is a slice along the first axis of a
    parameter with two or more axes, such as a row of a linear layer. The landscape then does not
    depend on the scale of a filter if batch norm or the next layer compensates this scale. A filter
    that is zero in the direction or in the weights is zero in the result. Biases, scales and shifts
    have no filters and are zero in the result as well.

    Args:
        risk: Risk at the weights :math:`\theta`.
        direction: Any direction, ``(P,)``.

    Reference: Li, Xu, Taylor, Studer and Goldstein (2018), section 4.
    """
    check_direction("direction", direction, risk)
    weights, parts = risk.params, {}
    for name, part in risk.space.unflatten(direction).items():
        if part.ndim < 2:
            parts[name] = torch.zeros_like(part)
            continue
        # d_lj <- d_lj |theta_lj| / |d_lj|, one filter per row
        rows = part.flatten(1)
        target = weights[name].reshape(rows.shape).norm(dim=1, keepdim=True)
        norms = rows.norm(dim=1, keepdim=True)
        scaled = torch.where(norms > 0, rows * (target / norms), torch.zeros_like(rows))
        parts[name] = scaled.reshape(part.shape)
    return risk.space.flatten(parts)


def check_direction(name: str, direction: Tensor, risk: Risk) -> None:
    """Raise unless ``direction`` is a finite nonzero vector ``(P,)`` like the weights."""
    check_risk(risk)
    theta = risk.theta
    check_type(name, direction, Tensor, "a torch.Tensor")
    if direction.shape != theta.shape:
        raise ValueError(f"{name} must be ({len(theta)},), got {tuple(direction.shape)}")
    check_tensor(name, direction, dtype=theta.dtype, device=theta.device, rows=len(theta))
    check_finite(name, direction)
    if not bool(direction.any()):
        raise ValueError(f"{name} must not be zero, got a vector of zeros")


def named_directions(directions: Directions, risk: Risk) -> dict[str, Tensor]:
    """Return the directions by name, checked."""
    if isinstance(directions, Spectrum):
        # The Lanczos basis may be stored on the host.
        vectors = ritz_directions(directions)
        named = {name: vector.to(risk.theta.device) for name, vector in vectors.items()}
    elif isinstance(directions, Eigenpairs):
        named = _eigenvectors(directions, risk)
    elif isinstance(directions, Mapping):
        named = dict(directions)
    elif isinstance(directions, Tensor):
        columns = directions.unsqueeze(1) if directions.ndim == 1 else directions
        if columns.ndim != 2:
            raise ValueError(
                f"directions must be ({len(risk.theta)},) or ({len(risk.theta)}, k), "
                f"got {tuple(directions.shape)}"
            )
        named = {f"direction {k + 1}": column for k, column in enumerate(columns.unbind(1))}
    else:
        kind = type(directions).__name__
        raise TypeError(
            f"directions must be a Spectrum, Eigenpairs, a tensor or a dictionary, got {kind}"
        )
    if not named:
        raise ValueError("directions must have at least one direction, got none")
    for name, direction in named.items():
        check_direction(name, direction, risk)
    return named


def _eigenvectors(pairs: Eigenpairs, risk: Risk) -> dict[str, Tensor]:
    """Return the eigenvectors by the names of their eigenvalues, the largest first."""
    if pairs.vectors is None:
        raise ValueError("directions must have vectors, got eigenpairs with vectors=False")
    named: dict[str, Tensor] = {}
    columns = pairs.vectors.to(risk.theta.device).unbind(1)
    for value, column in reversed(list(zip(pairs.values.tolist(), columns, strict=True))):
        name = f"eigenvalue {value:.6g}"
        named[name if name not in named else f"{name} ({len(named) + 1})"] = column
    return named


# ------------------------------------------------------------------------------------------
# Loss and accuracy on lines and planes.

# Loss and accuracy on the data, then loss and accuracy on the test data. NaN stands for none.
Row = tuple[float, ...]
KEYS = ("running_mean", "running_var")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surface:
    """Fields of both kinds of landscape; see :class:`Landscape` and :class:`Landscape2d`."""

    t: Tensor
    norms: Tensor
    loss: Tensor
    accuracy: Tensor | None
    test_loss: Tensor | None
    test_accuracy: Tensor | None
    batch_norm: str | None
    risk: str


@storable
@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Landscape(Surface):
    r"""Loss and accuracy at :math:`\theta + t u_k`, for each of ``k`` directions.

    Attributes:
        names: Names of the directions.
        t: Steps along each direction, ascending, ``(n,)``.
        norms: Lengths of the directions, ``(k,)``; a step :math:`t` has length :math:`t \|u_k\|`.
        loss: Loss on the data of the risk, with its L2 term, ``(k, n)``, float64.
        accuracy: Fraction of samples whose largest output is their class, ``(k, n)``; ``None`` if
            targets are not class labels.
        test_loss: Loss on the test data, ``(k, n)``, or ``None``.
        test_accuracy: Accuracy on the test data, ``(k, n)``, or ``None``.
        batch_norm: Mode of batch norm; ``None`` for a model without batch norm.
        risk: Description of the risk.
    """

    names: tuple[str, ...]

    def __str__(self) -> str:
        width = max(map(len, self.names)) + 2
        ends = f"t = {float(self.t[0]):g}", f"t = {float(self.t[-1]):g}"
        lines = [f"Landscape of {self.risk}, {len(self.t)} points"]
        lines.append(
            f"  {'':{width}}{'loss at ' + ends[0]:>18}{ends[1]:>12}{'minimum':>12}{'at t =':>10}"
        )
        for k, name in enumerate(self.names):
            low = int(self.loss[k].argmin())
            values = [float(self.loss[k, i]) for i in (0, -1, low)]
            lines.append(
                f"  {name:{width}}{values[0]:>18.5g}{values[1]:>12.5g}{values[2]:>12.5g}"
                f"{float(self.t[low]):>10.3g}"
            )
        return "\n".join(lines)


@storable
@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Landscape2d(Surface):
    r"""Loss and accuracy at :math:`\theta + s u + t v`.

    Attributes:
        names: Names of the two directions.
        s: Steps along the first direction, ascending, ``(n,)``.
        t: Steps along the second direction, ascending, ``(n,)``.
        norms: Lengths of the directions, ``(2,)``.
        loss: Loss on the data of the risk, with its L2 term, ``(n, n)``, float64, with a row for
            each :math:`s`.
        accuracy: Accuracy ``(n, n)``, or ``None`` if targets are not class labels.
        test_loss: Loss on the test data, ``(n, n)``, or ``None``.
        test_accuracy: Accuracy on the test data, ``(n, n)``, or ``None``.
        batch_norm: Mode of batch norm; ``None`` for a model without batch norm.
        risk: Description of the risk.
    """

    names: tuple[str, str]
    s: Tensor

    def __str__(self) -> str:
        i, j = divmod(int(self.loss.argmin()), len(self.t))
        return (
            f"Landscape of {self.risk}, {len(self.s)} x {len(self.t)} points\n"
            f"  loss from {float(self.loss.min()):.5g} at ({float(self.s[i]):.3g}, "
            f"{float(self.t[j]):.3g}) to {float(self.loss.max()):.5g}"
        )


def landscape(
    risk: Risk,
    directions: Directions,
    *,
    distance: float = 1.0,
    num_points: int = 21,
    test: Risk | None = None,
    batch_norm: BatchNormMode | None = None,
    state: str | os.PathLike[str] | None = None,
    save_interval: float = 30.0,
    progress: bool | Progress = False,
) -> Landscape:
    r"""Return loss and accuracy at :math:`\theta + t u_k`, :math:`|t| \le` ``distance``.

    Cost: one forward pass over the data per point and direction, two if batch norm is recomputed.

    Args:
        risk: The loss at the centre :math:`\theta`; the model is not changed.
        directions: Eigenpairs, a spectrum with vectors (see :func:`ritz_directions`), one direction
            ``(P,)``, several as columns ``(P, k)``, or a dictionary of named directions. See also
            :func:`random_direction` and :func:`filter_normalized`.
        distance: Largest :math:`|t|`, in units of the length of each direction. For Ritz vectors
            and random directions, which have unit length, it is a distance in weight space; for
            filter-normalised ones it is relative to the norm of each filter.
        num_points: Number of evenly spaced points; an odd number includes the centre.
        test: A risk of the same parameters on other data, evaluated at the same points.
        batch_norm: Mode of batch norm for both risks. Defaults to the modes of the risks. With
            ``recomputed``, the running statistics are computed again at each point from the data of
            ``risk``, and used for both risks.
        state: File to resume from, and to save to every ``save_interval`` seconds; further files
            have names that begin with its name. They are not deleted at the end. A resumed
            computation gives the same result bit for bit (on the CPU). Raises ``ValueError`` if the
            state belongs to other weights, directions, data or settings.
        save_interval: Seconds between saves.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: section 4.2 and Table 4.3 of *Spectral Machine Learning*; Li et al. (2018).
    """
    check_risk(risk)
    num_points = check_count("num_points", num_points, low=2)
    chosen = named_directions(directions, risk)
    steps = _steps(distance, num_points)
    shape, vectors = (len(chosen), num_points), list(chosen.values())
    settings = {"names": list(chosen), "distance": float(distance), "directions": vectors}

    def point(index: int) -> Tensor:
        return risk.theta + steps[index % num_points] * vectors[index // num_points]

    return Landscape(
        names=tuple(chosen),
        t=torch.tensor(steps, dtype=torch.float64),
        norms=torch.stack([vector.double().norm().cpu() for vector in vectors]),
        **_evaluate(risk, point, shape, test, batch_norm, state, save_interval, settings, progress),
    )


def landscape2d(
    risk: Risk,
    first: Tensor,
    second: Tensor,
    *,
    distance: float | tuple[float, float] = 1.0,
    num_points: int = 21,
    names: tuple[str, str] = ("first", "second"),
    test: Risk | None = None,
    batch_norm: BatchNormMode | None = None,
    state: str | os.PathLike[str] | None = None,
    save_interval: float = 30.0,
    progress: bool | Progress = False,
) -> Landscape2d:
    r"""Return loss and accuracy at :math:`\theta + s u + t v` on a grid of :math:`s` and :math:`t`.

    Cost: one forward pass over the data for each of ``num_points**2`` points, two if batch norm is
    recomputed.

    Args:
        risk: The loss at the centre :math:`\theta`; the model is not changed.
        first: The direction :math:`u`, ``(P,)``.
        second: The direction :math:`v`, ``(P,)``, not parallel to ``first``.
        distance: Largest :math:`|s|` and :math:`|t|`, as one number or a pair, in units of the
            length of each direction.
        num_points: Number of points along each direction; an odd number includes the centre.
        names: Names of the directions.
        test: A risk of the same parameters on other data, evaluated at the same points.
        batch_norm: Mode of batch norm for both risks; see :func:`landscape`.
        state: File to resume from, and to save to; see :func:`landscape`.
        save_interval: Seconds between saves.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.
    """
    num_points = check_count("num_points", num_points, low=2)
    check_direction("first", first, risk)
    check_direction("second", second, risk)
    norms = torch.stack([first.double().norm(), second.double().norm()]).cpu()
    # Compute in float64, because 1 - |cos| of nearly parallel vectors loses half the digits.
    cosine = float(first.double() @ second.double()) / float(norms.prod())
    # 1 - |cos| = angle^2 / 2, so this refuses angles below 1.4e-3.
    if 1 - abs(cosine) < 1e-6:
        raise ValueError(f"second must not be parallel to first, got a cosine of {cosine:.9g}")
    # A single distance holds for both directions.
    reach = distance if isinstance(distance, tuple) else (distance, distance)
    for name, pair in (("distance", reach), ("names", names)):
        if len(pair) != 2:
            raise ValueError(f"{name} must have one entry per direction, got {pair}")
    s, t = (_steps(one, num_points) for one in reach)
    shape, vectors = (num_points, num_points), [first, second]
    settings = {"names": list(names), "distance": list(map(float, reach)), "directions": vectors}

    def point(index: int) -> Tensor:
        return risk.theta + s[index // num_points] * first + t[index % num_points] * second

    return Landscape2d(
        names=names,
        s=torch.tensor(s, dtype=torch.float64),
        t=torch.tensor(t, dtype=torch.float64),
        norms=norms,
        **_evaluate(risk, point, shape, test, batch_norm, state, save_interval, settings, progress),
    )


def _evaluate(
    risk: Risk,
    point: Callable[[int], Tensor],
    shape: tuple[int, int],
    test: Risk | None,
    batch_norm: BatchNormMode | None,
    state: str | os.PathLike[str] | None,
    save_interval: float,
    settings: dict[str, Any],
    progress: bool | Progress,
) -> dict[str, Any]:
    """Evaluate the risks at points in weight space; return the fields of a landscape."""
    if batch_norm is not None:
        check_choice("batch_norm", batch_norm, BATCH_NORM_MODES)
    if test is not None:
        check_type("test", test, Risk, "a ritz.Risk")
    if test is not None and test.space.shapes != risk.space.shapes:
        raise ValueError(f"test must have the same parameters as risk, got {test} and {risk}")
    mode = batch_norm or risk.batch_norm
    risk = risk.with_batch_norm(mode)
    # With "recomputed", both risks use the statistics of the training data.
    if test is not None and (batch_norm is not None or mode == "recomputed"):
        test = test.with_batch_norm("eval" if mode == "recomputed" else mode)
    settings |= {"points": list(shape), "risk": repr(risk), "weights": risk.theta}
    settings["test"] = None if test is None else repr(test)
    journal = Journal(
        state, settings, interval=save_interval, group=risk.group, together=risk.sharing != "none"
    )
    # Points of an interrupted call.
    rows: list[Row] = journal.load() or []
    if rows:
        # Compare only the losses: on a GPU, roundoff may change the accuracy.
        again, last = _row(risk, test, point(len(rows) - 1))[::2], rows[-1][::2]
        journal.check_repeats("loss at the last point", again, last, dtype=risk.theta.dtype)
    with tracking(progress, "landscape", math.prod(shape)) as bar:
        for index in range(len(rows), math.prod(shape)):
            rows.append(_row(risk, test, point(index)))
            bar.update(len(rows), f"loss {rows[-1][0]:.4g}")
            if journal.due():
                journal.save(rows, step=len(rows))
    # Transpose: one tensor per quantity, in the order of Row.
    columns = zip(*rows, strict=True)
    loss, *rest = (torch.tensor(each, dtype=torch.float64).reshape(shape) for each in columns)
    # If the first point has no accuracy, no point has one.
    return {
        "loss": loss,
        "accuracy": None if math.isnan(rows[0][1]) else rest[0],
        "test_loss": None if test is None else rest[1],
        "test_accuracy": None if math.isnan(rows[0][3]) else rest[2],
        "batch_norm": mode if batch_norms(risk.model) else None,
        "risk": repr(risk),
    }


def _row(risk: Risk, test: Risk | None, theta: Tensor) -> Row:
    risk = risk.at(theta)
    row = _values(risk, {})
    if test is None:
        return (*row, math.nan, math.nan)
    statistics = {}
    if risk.batch_norm == "recomputed":
        # The statistics of the training data at these weights.
        constants = risk.constants()
        keys = (f"{layer}.{key}".lstrip(".") for layer in batch_norms(risk.model) for key in KEYS)
        statistics = {key: constants[key] for key in keys if key in constants}
    return (*row, *_values(test.at(theta), statistics))


def _values(risk: Risk, statistics: dict[str, Tensor]) -> Row:
    """Return loss and accuracy from one forward pass, with other ``statistics`` of batch norm."""
    # Sum in float64 over batches, then over processes in one reduction.
    sums = torch.zeros(3, dtype=torch.float64, device=risk.theta.device)
    with torch.no_grad(), risk.settings():
        for _, context, weight in risk.contexts(risk.constants() | statistics):
            outputs, target = risk.evaluate(risk.params, context)
            loss = weight * float(risk.adapter.loss(outputs, target))
            sums += sums.new_tensor([loss, *num_correct(risk.loss_fn, outputs, target)])
    loss, correct, counted = risk.sum_over_processes(sums).tolist()
    # L2 term: (l2 / 2) |theta|^2
    penalty = 0.5 * risk.l2 * float(risk.theta.double().square().sum())
    return loss + penalty, correct / counted if counted else math.nan


def _steps(distance: float, num_points: int) -> list[float]:
    """Return evenly spaced steps in ``[-distance, distance]``; a middle step is exactly 0."""
    check_positive("distance", distance)
    # 2 k / (n - 1) is exactly 1 in the middle; a linspace may round there.
    return [distance * (2 * k / (num_points - 1) - 1) for k in range(num_points)]
