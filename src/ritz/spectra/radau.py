r"""Bounds of quadratic forms :math:`z^\top f(A) z` from a Lanczos run: Gauss and Gauss-Radau."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ritz.spectra.recurrence import Recurrence

Function = Callable[[Tensor], Tensor]


def checked(function: Function) -> Function:
    """The function, but an error where it does not keep the shape or is not finite."""

    def evaluate(nodes: Tensor) -> Tensor:
        values = function(nodes)
        if values.shape != nodes.shape:
            raise ValueError(
                f"function must keep the shape {tuple(nodes.shape)}, got {tuple(values.shape)}"
            )
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            bad = float(nodes[~finite][0])
            raise ValueError(f"function must be finite on the spectrum, but is not at {bad:.6g}")
        return values

    return evaluate


@dataclass(frozen=True, slots=True)
class Brackets:
    r"""What runs from unit vectors :math:`z` say of :math:`z^\top f(A) z`, each ``(k,)``.

    Where the derivatives of :math:`f` have fixed and alternating signs, as those of the logarithm
    and of negative powers have, the truth lies between the first two.

    Attributes:
        gauss: Gauss rules.
        radau: Gauss-Radau rules with a node at the floor; without a floor the Gauss rules and what
            their last steps changed, which is an estimate, and NaN after a single step.
        mixed: The mix of the two that was stationary over the last steps.
    """

    gauss: Tensor
    radau: Tensor
    mixed: Tensor

    @property
    def truncation(self) -> Tensor:
        """The larger distance, of means over the runs, from the mix to either."""
        off = torch.stack([self.mixed - self.gauss, self.mixed - self.radau]).mean(1)
        return off.abs().max()


def brackets(runs: Sequence[Recurrence], floor: float | None, function: Function) -> Brackets:
    """Return the bounds that runs give.

    Args:
        runs: Of at least one step each.
        floor: A number below the spectrum, if one is known.
        function: Elementwise, on the spectrum and at the floor; raises where it has no value.
    """
    rows = [_bracket(run, floor, function) for run in runs]
    return Brackets(*(torch.stack(column) for column in zip(*rows, strict=True)))


def _bracket(
    run: Recurrence, floor: float | None, function: Function
) -> tuple[Tensor, Tensor, Tensor]:
    projected, last = run.projected(), float(run.betas[-1])
    gauss = _gauss(projected, function)
    if run.exhausted:
        return gauss, gauss, gauss
    size = len(projected)
    less = max(1, size - max(1, size // 8))
    older = projected[:less, :less]
    before = _gauss(older, function)
    if floor is None:
        # One step changes nothing, and so says nothing.
        return gauss, 2 * gauss - before if size > 1 else torch.full_like(gauss, torch.nan), gauss
    coupling = float(projected[less - 1, less]) if less < size else last
    radau = _radau(projected, last, floor, function)
    # They move towards each other: where they would meet, weighed by how fast each moves.
    rise, fall = radau - _radau(older, coupling, floor, function), before - gauss
    share = rise / (rise + fall) if float(rise * fall) > 0 else torch.full_like(gauss, 0.5)
    return gauss, radau, share * gauss + (1 - share) * radau


def _gauss(projected: Tensor, function: Function) -> Tensor:
    values, vectors = torch.linalg.eigh(projected)
    form: Tensor = (vectors[0].square() * function(values)).sum()
    return form


def _radau(projected: Tensor, coupling: float, floor: float, function: Function) -> Tensor:
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
    form: Tensor = (vectors[0].square() * function(values.clamp_min(floor))).sum()
    return form
