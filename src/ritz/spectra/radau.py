r"""Bounds of :math:`\log` quadratic forms from a Lanczos run: Gauss above, Gauss-Radau below."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ritz.spectra.conjugate import NotPositiveDefiniteError
from ritz.spectra.recurrence import Recurrence


@dataclass(frozen=True, slots=True)
class Brackets:
    r"""What runs from unit vectors :math:`z` say of :math:`z^\top \log(A) z`, each ``(k,)``.

    Attributes:
        upper: Gauss rules, which are upper bounds.
        lower: Gauss-Radau rules with a node at the floor, which are lower bounds; without a floor
            the Gauss rules less what their last steps changed, which are estimates.
        mixed: The mix of the two that was stationary over the last steps.
    """

    upper: Tensor
    lower: Tensor
    mixed: Tensor


def log_brackets(runs: Sequence[Recurrence], floor: float | None) -> Brackets:
    """Return the bounds that runs give.

    Args:
        runs: Of a positive definite operator.
        floor: A positive number below its spectrum, if one is known.
    """
    rows = [_bracket(run, floor) for run in runs]
    return Brackets(*(torch.stack(column) for column in zip(*rows, strict=True)))


def _bracket(run: Recurrence, floor: float | None) -> tuple[Tensor, Tensor, Tensor]:
    projected, last = run.projected(), float(run.betas[-1])
    upper = _gauss(projected)
    if run.exhausted:
        return upper, upper, upper
    size = len(projected)
    less = max(1, size - max(1, size // 8))
    older = projected[:less, :less]
    before = _gauss(older)
    if floor is None:
        change = before - upper
        return upper, upper - change, upper
    coupling = float(projected[less - 1, less]) if less < size else last
    lower, older_lower = _radau(projected, last, floor), _radau(older, coupling, floor)
    rise, fall = lower - older_lower, before - upper
    # One bound falls and the other rises: where they meet, weighed by how fast each moves.
    share = torch.where(rise + fall > 0, rise / (rise + fall).clamp_min(1e-300), 0.5)
    return upper, lower, share * upper + (1 - share) * lower


def _gauss(projected: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(projected)
    if not float(values[0]) > 0:
        raise NotPositiveDefiniteError(
            f"op must be positive definite, got a Ritz value of {float(values[0]):.6g}"
        )
    form: Tensor = (vectors[0].square() * values.log()).sum()
    return form


def _radau(projected: Tensor, coupling: float, floor: float) -> Tensor:
    """The rule with one more node, at the floor (Golub 1973)."""
    size = len(projected)
    shifted = projected - floor * torch.eye(size, dtype=projected.dtype)
    smallest = float(torch.linalg.eigvalsh(shifted)[0])
    if not smallest > -1e-12 * float(projected.abs().max()):
        raise ValueError(
            f"floor must be below the spectrum, got {floor:.6g} where a Ritz value is "
            f"{smallest + floor:.6g}"
        )
    last = torch.zeros(size, dtype=projected.dtype)
    last[-1] = coupling**2
    extended = torch.zeros(size + 1, size + 1, dtype=projected.dtype)
    extended[:size, :size] = projected
    extended[size, size - 1] = extended[size - 1, size] = coupling
    extended[size, size] = floor + torch.linalg.solve(shifted, last)[-1]
    values, vectors = torch.linalg.eigh(extended)
    # Its smallest node is the floor, but for roundoff that may be larger than it.
    form: Tensor = (vectors[0].square() * values.clamp_min(floor).log()).sum()
    return form
