"""Directions in weight space along which a landscape is worth looking at."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_finite, check_tensor
from ritz._core.random import probes, resolve_generator
from ritz.curvature.risk import Risk
from ritz.spectra.spectrum import Spectrum

Directions = Spectrum | Tensor | Mapping[str, Tensor]


def ritz_directions(spectrum: Spectrum) -> dict[str, Tensor]:
    """Return the Ritz vectors ``(P,)`` of the largest, smallest and smallest-magnitude values.

    By name: ``largest``, ``smallest`` and ``smallest magnitude``; one that is another already,
    as the last is where no value is negative, is left out. Each is of unit length and its sign is
    arbitrary.

    Args:
        spectrum: With vectors: ``ritz.lanczos(op, num_steps=..., vectors=True)``.
    """
    if spectrum.vectors is None:
        raise ValueError("spectrum must have vectors, got none: pass vectors=True to lanczos")
    if len(spectrum.vectors) != spectrum.dimension:
        raise ValueError(
            f"spectrum must have whole vectors ({spectrum.dimension} rows), got "
            f"{len(spectrum.vectors)} rows of a spread basis: use basis='device' or 'host'"
        )
    chosen = {
        "largest": len(spectrum.values) - 1,
        "smallest": 0,
        "smallest magnitude": int(spectrum.values.abs().argmin()),
    }
    first: dict[int, str] = {}
    for name, index in chosen.items():
        first.setdefault(index, name)
    return {name: spectrum.vectors[:, index].clone() for index, name in first.items()}


def random_direction(risk: Risk, *, generator: torch.Generator | None = None) -> Tensor:
    """Return a direction ``(P,)`` of unit length, uniform over the sphere.

    Args:
        risk: Says how many parameters there are.
        generator: Source of the randomness; seed 0 by default.
    """
    theta = risk.theta
    drawn = probes(
        (len(theta), 1),
        kind="gaussian",
        generator=resolve_generator(generator),
        dtype=theta.dtype,
        device=theta.device,
    )[:, 0]
    unit: Tensor = drawn / drawn.norm()
    return unit


def filter_normalized(
    risk: Risk, direction: Tensor, *, vectors: Literal["zero", "scaled"] = "zero"
) -> Tensor:
    r"""Return a direction ``(P,)`` whose filters are as long as those of the weights.

    .. math:: d_{l,j} \leftarrow \frac{\|\theta_{l,j}\|}{\|d_{l,j}\|} d_{l,j}

    for each filter :math:`j` of each layer :math:`l`: a slice of the first axis of a parameter of
    two axes or more, so a row of a linear layer. Rescaling a filter, which batch norm or the next
    layer undoes, then leaves the picture as it is. A filter that is zero in the direction or in
    the weights is zero.

    Args:
        risk: At the weights :math:`\theta`.
        direction: Any, ``(P,)``.
        vectors: What becomes of biases, scales and shifts, which have no filters: ``zero`` leaves
            them out of the direction, ``scaled`` takes each of them as one filter.

    Reference: Li, Xu, Taylor, Studer and Goldstein (2018), section 4.
    """
    check_choice("vectors", vectors, ("zero", "scaled"))
    check_direction("direction", direction, risk)
    weights, found = risk.params, {}
    for name, part in risk.space.unflatten(direction).items():
        if part.ndim < 2 and vectors == "zero":
            found[name] = torch.zeros_like(part)
            continue
        rows = part.reshape(len(part) if part.ndim >= 2 else 1, -1)
        lengths = weights[name].reshape(rows.shape).norm(dim=1, keepdim=True)
        own = rows.norm(dim=1, keepdim=True)
        scaled = torch.where(own > 0, rows * (lengths / own), torch.zeros_like(rows))
        found[name] = scaled.reshape(part.shape)
    return risk.space.flatten(found)


def check_direction(name: str, direction: Tensor, risk: Risk) -> None:
    """Raise unless ``direction`` is one vector ``(P,)`` of the risk's kind, finite, not zero."""
    theta = risk.theta
    check_tensor(name, direction, dtype=theta.dtype, device=theta.device, rows=len(theta))
    if direction.ndim != 1:
        raise ValueError(f"{name} must be ({len(theta)},), got {tuple(direction.shape)}")
    check_finite(name, direction)
    if not bool(direction.any()):
        raise ValueError(f"{name} must not be zero")


def named_directions(directions: Directions, risk: Risk) -> dict[str, Tensor]:
    """The directions by name, whatever they came as, and checked."""
    if isinstance(directions, Spectrum):
        # A basis may have been kept on the host.
        vectors = ritz_directions(directions)
        found = {name: vector.to(risk.theta.device) for name, vector in vectors.items()}
    elif isinstance(directions, Mapping):
        found = dict(directions)
    elif isinstance(directions, Tensor):
        columns = directions.unsqueeze(1) if directions.ndim == 1 else directions
        if columns.ndim != 2:
            raise ValueError(f"directions must be ({len(risk.theta)},) or ({len(risk.theta)}, k), "
                             f"got {tuple(directions.shape)}")  # fmt: skip
        found = {f"direction {k + 1}": column for k, column in enumerate(columns.unbind(1))}
    else:
        raise TypeError(f"directions must be a Spectrum, a tensor or a dictionary of tensors, got "
                        f"{type(directions).__name__}")  # fmt: skip
    if not found:
        raise ValueError("directions must hold at least one direction, got none")
    for name, direction in found.items():
        check_direction(name, direction, risk)
    return found
