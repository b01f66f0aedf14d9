"""Gauss and Gauss-Radau rules of Lanczos runs, and the bounds of quadratic forms they give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ritz.operators import LinearOperator
from ritz.spectra._lanczos import Recurrence, Reorthogonalization, advance

# ------------------------------------------------------------------------------------------
# Gauss rules of many start vectors at once.

Rule = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Rules:
    """Gauss rules of ``k`` start vectors.

    Attributes:
        last: Nodes and weights of the ``m``-point rules, each ``(m, k)``, float64 on the CPU.
        projected: Projected matrices, ``(k, m, m)``, of which leading parts have shorter rules.
        exact: Whether a run's space is invariant, and so its rule exact, ``(k,)``.
        num_products: Products spent.
    """

    last: Rule
    projected: Tensor
    exact: Tensor
    num_products: int


def ritz_rules(
    op: LinearOperator, block: Tensor, *, num_steps: int, reorthogonalize: Reorthogonalization
) -> Rules:
    r"""Return the Gauss rules of the columns of a block.

    Where a run ends early, because its space is invariant, its rule is exact and padded with
    nodes of weight zero.

    Args:
        op: Symmetric :math:`A`.
        block: Start vectors ``(n, k)``, none of them zero.
        num_steps: ``m``.
        reorthogonalize: How; see :func:`ritz.lanczos`.
    """
    runs = [
        Recurrence(start.contiguous(), capacity=num_steps, mode=reorthogonalize)
        for start in block.T
    ]
    advance(op, runs, num_steps)
    projected = torch.stack([_padded(run.projected(), num_steps) for run in runs])
    return Rules(
        last=gauss_rule(projected),
        projected=projected,
        exact=torch.tensor([run.exhausted for run in runs]),
        num_products=sum(run.size for run in runs),
    )


def _padded(matrix: Tensor, size: int) -> Tensor:
    padded = torch.eye(size, dtype=matrix.dtype) * matrix[0, 0]
    padded[: len(matrix), : len(matrix)] = matrix
    return padded


def gauss_rule(projected: Tensor) -> Rule:
    """Return the nodes and weights ``(m, k)`` of the Gauss rules of ``k`` projected matrices."""
    nodes, vectors = torch.linalg.eigh(projected)
    return nodes.T, vectors[:, 0].square().T


# ------------------------------------------------------------------------------------------
# Bounds of quadratic forms :math:`z^\top f(A) z` from a Lanczos run: Gauss and Gauss-Radau.

Function = Callable[[Tensor], Tensor]
STALLED = 0.9  # most of a change that is expected of a doubling of the steps, by the one before
FAST = 0.1  # least of it that is taken for slow convergence
ROUNDOFF = 5000.0  # units in which Ritz values may be below a floor of the spectrum
SHIFT = 0.25  # units by which roundoff moves all of a spectrum, at most, where it has been seen


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
            more steps are expected to change, which is an estimate, and NaN after a single step.
        mixed: The mix of the two that was stationary over the last steps.
        roundoff: What roundoff in the products may change.
    """

    gauss: Tensor
    radau: Tensor
    mixed: Tensor
    roundoff: Tensor

    @property
    def gap(self) -> Tensor:
        """The larger distance, of means over the runs, from the mix to either: more steps help."""
        off = torch.stack([self.mixed - self.gauss, self.mixed - self.radau]).mean(1)
        return off.abs().max()

    @property
    def truncation(self) -> Tensor:
        """That and roundoff, which more steps leave."""
        return self.gap + self.roundoff.mean()


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    projected, last = run.projected(), float(run.betas[-1])
    unit = run.eps * max(run.scale, run.magnitude)
    if floor is not None:
        function = _above(floor, ROUNDOFF * unit, function)
    gauss, roundoff = _gauss(projected, function), _roundoff(projected, SHIFT * unit, function)
    if run.exhausted:
        return gauss, gauss, gauss, roundoff
    size = len(projected)
    less, *fewer = shorter(size)
    older = projected[:less, :less]
    before = _gauss(older, function)
    if floor is None:
        rules = (_gauss(projected[:m, :m], function) for m in fewer)
        # One step changes nothing, and so says nothing.
        left = remainder(gauss, before, *rules) if size > 1 else torch.full_like(gauss, torch.nan)
        return gauss, gauss - left, gauss, roundoff
    coupling = float(projected[less - 1, less]) if less < size else last
    radau = _radau(projected, last, floor, function)
    # They move towards each other: where they would meet, weighed by how fast each moves.
    rise, fall = radau - _radau(older, coupling, floor, function), before - gauss
    share = rise / (rise + fall) if float(rise * fall) > 0 else torch.full_like(gauss, 0.5)
    return gauss, radau, share * gauss + (1 - share) * radau, roundoff


def shorter(size: int) -> tuple[int, int, int]:
    """Steps of the shorter runs that tell how much a run of that size leaves to be found."""
    return max(1, size - max(1, size // 8)), max(1, size // 2), max(1, size // 4)


def remainder(last: Tensor, before: Tensor, half: Tensor, quarter: Tensor) -> Tensor:
    """What more steps would change, from forms by all steps and by :func:`shorter` runs.

    An error that falls as a power of the steps falls by the same ratio with every doubling. Where
    it falls faster, what the last eighth of the steps changed is more than what is left; where it
    hardly falls, eigenvalues are still to be found that nothing is known of.
    """
    late, early = half - last, (quarter - half).abs()
    ratio = (late.abs() / early).nan_to_num(nan=0.0, posinf=STALLED).clamp_max(STALLED)
    slow = torch.where(ratio > FAST, late * ratio / (1 - ratio), 0.0)
    change = before - last
    return torch.where(slow.abs() > change.abs(), slow, change)


def _above(floor: float, roundoff: float, function: Function) -> Function:
    """The function with values below the floor moved to it, where roundoff put them there."""

    def evaluate(values: Tensor) -> Tensor:
        smallest = float(values.min())
        if floor - roundoff <= smallest:
            return function(values.clamp_min(floor))
        function(values)  # which may have more to say of them
        raise ValueError(
            f"floor must be below the spectrum, got {floor:.6g} where a Ritz value is "
            f"{smallest:.6g}"
        )

    return evaluate


def _gauss(projected: Tensor, function: Function) -> Tensor:
    values, vectors = torch.linalg.eigh(projected)
    form: Tensor = (vectors[0].square() * function(values)).sum()
    return form


def _roundoff(projected: Tensor, unit: float, function: Function) -> Tensor:
    """What a form changes with Ritz values moved by a unit of roundoff, away from the ends."""
    values, vectors = torch.linalg.eigh(projected)
    middle = 0.5 * (values[0] + values[-1])
    moved = torch.where(values <= middle, values + unit, (values - unit).maximum(middle))
    change: Tensor = vectors[0].square() @ (function(moved) - function(values)).abs()
    return change


def _radau(projected: Tensor, coupling: float, floor: float, function: Function) -> Tensor:
    """The rule with one more node, at the floor (Golub 1973)."""
    size = len(projected)
    values = torch.linalg.eigvalsh(projected)
    # A node that is an eigenvalue already, to roundoff, has no rule; one just below it has.
    node = min(floor, float(values[0]) - 1e-14 * float(values[-1]))
    shifted = projected - node * torch.eye(size, dtype=projected.dtype)
    last = torch.zeros(size, dtype=projected.dtype)
    last[-1] = coupling**2
    extended = torch.zeros(size + 1, size + 1, dtype=projected.dtype)
    extended[:size, :size] = projected
    extended[size, size - 1] = extended[size - 1, size] = coupling
    extended[size, size] = node + torch.linalg.solve(shifted, last)[-1]
    values, vectors = torch.linalg.eigh(extended)
    # Its smallest node is the floor, but for roundoff that may be larger than it.
    form: Tensor = (vectors[0].square() * function(values.clamp_min(floor))).sum()
    return form
