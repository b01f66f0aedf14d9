r"""Quadratic forms :math:`z^\top f(A) z` by Gauss and Gauss-Radau rules, and traces from them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ritz._core.blocks import power_of_two
from ritz._core.checks import is_below
from ritz._core.progress import Progress
from ritz._core.results import Estimate, stderr
from ritz._core.sampling import ROUNDOFF, doubling, doubt_equal_samples, is_settled
from ritz.operators import LaplacianOperator, LinearOperator, SparseOperator
from ritz.spectra._lanczos import Recurrence, Reorthogonalization, advance, start_runs, step
from ritz.spectra._positive_definite import not_positive

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the error bars and of the split between probes and steps."""

    # The estimated error of a rule is this multiple of its largest change by an added node or by
    # the last steps. On 23 spectra x 7 functions no error exceeds the estimate by more than a fifth
    # of the standard error of 16 probes; with the multiple 1 some errors are twice the estimate.
    margin: float = 2.0
    # The error of a rule of fewer steps counts as unknown.
    fewest_steps: int = 4
    # Between neighbouring nodes a function is compared with its interpolant of this degree, in x
    # and, if the nodes differ by more than this factor, in log x.
    degree: int = 8
    ratio: float = 10.0
    # A Ritz value may lie this many eps |A| below the floor; further below, the floor raises. The
    # largest distance of float32 kernel matrices of 1,500 rows is 0.14; the margin is for the
    # roundoff of larger sums.
    below_floor: float = 5000.0
    # Roundoff in the products moves the spectrum by at most this many eps |A|. With 0.25 the error
    # bars miss a third of the exact determinants of up to seven rows, and none of kernel matrices.
    # The roundoff of a form is `margin` times its change by this shift: for tr 1/A of a bipartite
    # graph of 65 vertices the error exceeds the change in 14 of 100 cases, and twice it in none.
    shift: float = 1.0
    # Number of probes of the pilot, whose runs grow until truncation no longer matters. The budget
    # must suffice for at least `fewest` runs of that length; benchmarks/determinants.py, "sparse".
    # A sparse product with twice as many vectors takes hardly longer.
    pilot: int = 4
    sparse_pilot: int = 8
    fewest: int = 5
    # Smallest number of probes at which the error is compared with the tolerance. With fewer,
    # samples that agree by chance stop the run too often: 95 % intervals contain the exact value in
    # 0.93 of the runs with 4, and in 0.95 with 8.
    first_look: int = 8
    # Number of bytes of Lanczos bases above which reading them costs more than the additional steps
    # of runs without re-orthogonalisation; benchmarks/determinants.py, a million rows. A product
    # with a sparse matrix costs less than reading a basis of ten vectors.
    basis: int = 2**28
    sparse_basis: int = 2**22
    # The exact trace is used as a control variate only if there are this many samples, if its
    # roundoff is below this fraction of their standard error, and if it leaves at most this
    # fraction of their standard deviation: a smaller gain is not worth the degree of freedom.
    controlled: int = 8
    control_noise: float = 0.01
    control_gain: float = 0.9


TUNING = Tuning()

ADVICE = "use more steps or products, or pass floor=, a lower bound of the eigenvalues"

# ------------------------------------------------------------------------------------------
# Gauss rules of several start vectors.


class Rules(NamedTuple):
    """Gauss rules: nodes and weights, each ``(k, m)`` in float64 on the CPU."""

    nodes: Tensor
    weights: Tensor
    num_products: int


def ritz_rules(
    op: LinearOperator, block: Tensor, *, num_steps: int, reorthogonalize: Reorthogonalization
) -> Rules:
    r"""Return the ``num_steps``-point Gauss rules of start vectors ``(n, k)``.

    If a Krylov space is invariant, its rule is exact and padded with nodes of weight zero.
    """
    runs = start_runs(block.T.unbind(), capacity=num_steps, mode=reorthogonalize)
    advance(op, runs, num_steps)
    # Golub and Welsch (1969): T e_k = theta_k e_k, weights tau_k = (e_k)_1^2.
    nodes, vectors = torch.linalg.eigh(Projections.of(runs, num_steps).matrices)
    return Rules(nodes, vectors[:, 0].square(), sum(run.size for run in runs))


@dataclass(frozen=True, slots=True)
class Projections:
    r"""Projections of an operator on ``k`` Krylov spaces: :math:`A V = V T + W B E^\top`.

    Attributes:
        matrices: :math:`T`, ``(k, m, m)``, float64 on the CPU. A run whose space is invariant is
            padded with a decoupled diagonal.
        couplings: :math:`B`, ``(k, w, w)``, with ``w = 1`` unless the start is a block. Zero if
            the space is invariant.
        unit: Roundoff in the products: machine precision times the norm.
    """

    matrices: Tensor
    couplings: Tensor
    unit: float

    @classmethod
    def of(cls, runs: Sequence[Recurrence], m: int) -> "Projections":
        """Return the projections of runs of at most ``m`` steps."""
        matrices = torch.stack([torch.eye(m, dtype=torch.float64) * run.alphas[0] for run in runs])
        for matrix, run in zip(matrices, runs, strict=True):
            matrix[: run.size, : run.size] = run.projected()
        couplings = torch.tensor([run.betas[-1] for run in runs], dtype=torch.float64)
        unit = max(run.eps * max(run.scale, run.magnitude) for run in runs)
        return cls(matrices, couplings[:, None, None], unit)

    @classmethod
    def joined(cls, parts: Sequence["Projections"]) -> "Projections":
        """Return all projections of several parts of the same size."""
        return cls(
            torch.cat([part.matrices for part in parts]),
            torch.cat([part.couplings for part in parts]),
            max(part.unit for part in parts),
        )

    def shorter(self) -> "Projections":
        """Return the projections without the last eighth of the steps."""
        m, width = self.matrices.shape[1], self.couplings.shape[2]
        less = m - max(1, m // width // 8) * width
        coupling = self.matrices[:, less : less + width, less - width : less]
        return Projections(self.matrices[:, :less, :less], coupling, self.unit)

    def extended(self, node: float) -> Tensor:
        """Return the matrices of the Gauss-Radau rules with a node at ``node`` (Golub 1973)."""
        k, m, _ = self.matrices.shape
        new, old = self.couplings.shape[1:]
        # Append a block row (B, D) with  D = node I + B [(T - node I)^{-1}]_last B' .
        shifted = self.matrices - node * torch.eye(m, dtype=torch.float64)
        last = torch.eye(m, dtype=torch.float64)[:, m - old :].expand(k, m, old)
        inverse = torch.linalg.solve(shifted, last)[:, m - old :]
        corner = self.couplings @ inverse @ self.couplings.mT
        corner = corner + node * torch.eye(new, dtype=torch.float64)
        matrices = torch.zeros(k, m + new, m + new, dtype=torch.float64)
        matrices[:, :m, :m], matrices[:, m:, m:] = self.matrices, (corner + corner.mT) / 2
        matrices[:, m:, m - old : m] = self.couplings
        matrices[:, m - old : m, m:] = self.couplings.mT
        return matrices


# ------------------------------------------------------------------------------------------
# Errors of quadratic forms by Gauss and Gauss-Radau rules.

# Functions whose derivatives have constant, alternating signs above zero: for a floor below the
# spectrum the Gauss and the Gauss-Radau rule bracket the form (Golub and Meurant 1994).
ALTERNATING = (torch.log, torch.reciprocal, torch.sqrt, torch.rsqrt)
# Functions without jumps, kinks or peaks between two eigenvalues.
SMOOTH = (*ALTERNATING, torch.exp, torch.special.entr)


def elementwise(function: Function) -> Function:
    """Return a user-defined function with a check that its values are real tensors.

    The function is called with a copy of the nodes, so it may change its argument. Boolean values,
    such as those of ``x > 0``, become zeros and ones.
    """
    if not callable(function):
        raise TypeError(f"function must be callable, got {type(function).__name__}")
    if function in SMOOTH:
        return function

    def evaluate(nodes: Tensor) -> Tensor:
        values = function(nodes.clone())
        if not isinstance(values, Tensor) or values.is_complex():
            got = values.dtype if isinstance(values, Tensor) else type(values).__name__
            raise TypeError(f"function must return a real tensor, got {got}")
        return values.detach().to(nodes)

    return evaluate


def finite_function(function: Function) -> Function:
    """Return the function with a check that its values are finite and of the same shape."""

    def evaluate(nodes: Tensor) -> Tensor:
        values = function(nodes)
        if values.shape != nodes.shape:
            raise ValueError(
                f"function must keep the shape {tuple(nodes.shape)}, got {tuple(values.shape)}"
            )
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            bad = float(nodes[~finite].min())
            if function is torch.log:
                raise not_positive("a Ritz value", bad)
            raise ValueError(
                f"function must be finite on the spectrum, got NaN or Inf at {bad:.6g}"
            )
        return values

    return evaluate


class Brackets(NamedTuple):
    """Quadratic forms of unit vectors and their errors, each ``(k,)``.

    Attributes:
        mixed: The forms: the values of the Gauss rules or, with a lower and an upper bound, a
            weighted mean of the two. The weights are those of the point at which both bounds would
            meet if they continued to change as in the last steps.
        gap: Error that more steps reduce: a bound for :data:`ALTERNATING` functions with a floor,
            otherwise an estimate. Infinite if unknown.
        roundoff: Error from roundoff in the products.
    """

    mixed: Tensor
    gap: Tensor
    roundoff: Tensor

    @property
    def truncation(self) -> Tensor:
        """Sum of both errors, for the mean over the vectors. Neither of them averages out."""
        return self.gap.mean() + self.roundoff.mean()


def brackets(
    spaces: Projections,
    function: Function,
    *,
    floor: float | None = None,
    bounds: bool = False,
    first: int = 1,
    likely: bool = False,
) -> Brackets:
    r"""Return the quadratic forms of the start vectors of Krylov spaces, with their errors.

    Without a floor the ends of the spectrum are estimated from the outermost Ritz values and their
    residuals. The error is then estimated from three changes of the rule: by a node at the lower
    end, by a node at the upper end, and by the last steps. A function that is not smooth also has
    the error of :func:`_unresolved`.

    Args:
        spaces: The Krylov spaces.
        function: :math:`f`.
        floor: A number below the spectrum, if one is known.
        bounds: Whether the function is one of :data:`ALTERNATING`.
        first: Number of leading vectors of each basis whose forms are summed.
        likely: Whether the floor is only likely, and is dropped if a Ritz value is below it.
    """
    low = -math.inf if floor is None else floor

    def evaluate(points: Tensor) -> Tensor:
        return finite_function(function)(points.clamp_min(low))

    values, vectors = torch.linalg.eigh(spaces.matrices)
    weights = vectors[:, :first].square().sum(1)
    # e_1' f(T) e_1 = sum_k tau_k f(theta_k). Nodes of weight zero are padding.
    used = weights > 0
    nodes = torch.where(used, values, values[used][0])
    if float(nodes.min()) < low - TUNING.below_floor * spaces.unit:
        if likely:
            return brackets(spaces, function, first=first)
        finite_function(function)(nodes)  # a logarithm names a value that is not positive
        raise floor_error(low, float(nodes.min()))
    gauss = (weights * evaluate(nodes)).sum(1)
    roundoff = roundoff_error(nodes, weights, spaces.unit, function, low)
    unfinished = spaces.couplings.abs().amax((1, 2)) > 0  # the other spaces are invariant
    if not bool(unfinished.any()):
        return Brackets(gauss, torch.zeros_like(gauss), roundoff)
    unknown = Brackets(gauss, torch.where(unfinished, torch.inf, 0.0), roundoff)
    width = spaces.couplings.shape[2]
    if spaces.matrices.shape[1] < TUNING.fewest_steps * width:
        return unknown
    # |A y - theta y| = |B (e)_last| for the Ritz vector y of the eigenvector e of T. Squares of
    # small or large entries leave the range.
    scale = power_of_two(spaces.couplings)
    residuals = scale * ((spaces.couplings / scale) @ vectors[:, -width:]).norm(dim=1)
    before = spaces.shorter()
    changes = [_forms(before.matrices, first, evaluate) - gauss]
    ends = _spectrum_ends(values, residuals, function, floor)
    if ends is None:
        return unknown

    def within(points: Tensor) -> Tensor:
        # The nodes lie between the ends, except for roundoff in a nearly singular system.
        return evaluate(points.clamp(*ends))

    changes.append(_forms(spaces.extended(ends[0]), first, within) - gauss)
    if bounds and floor is not None:
        # As steps are added the Gauss rules fall and the Gauss-Radau rules rise, or the reverse.
        # Extrapolated linearly they meet at  gauss + fall / (rise + fall) * (radau - gauss).
        fall, gap = changes[0], torch.where(unfinished, changes[1], 0.0)
        rise = changes[1] + gauss - _forms(before.extended(ends[0]), first, within)
        share = torch.where(rise * fall > 0, fall / (rise + fall), 0.5)
        return Brackets(gauss + share * gap, share.maximum(1 - share) * gap.abs(), roundoff)
    changes.append(_forms(spaces.extended(ends[1]), first, within) - gauss)
    gap = TUNING.margin * torch.stack(changes).abs().amax(0)
    if function not in SMOOTH:
        if width == 1:
            mass = partial(christoffel, *(spaces.matrices.diagonal(i, 1, 2) for i in (0, 1)))
        else:
            mass = partial(_loose_mass, values, weights, residuals)
        gap = gap.maximum(_unresolved(values, ends, mass, function))
    return Brackets(gauss, torch.where(unfinished, gap, 0.0), roundoff)


def _forms(matrices: Tensor, first: int, function: Function) -> Tensor:
    values, vectors = torch.linalg.eigh(matrices)
    weights = vectors[:, :first].square().sum(1)
    used = weights > 0
    forms: Tensor = (weights * function(torch.where(used, values, values[used][0]))).sum(1)
    return forms


def _unresolved(
    values: Tensor, ends: Sequence[float], mass: Callable[[Tensor], Tensor], function: Function
) -> Tensor:
    r"""Return the error from jumps, kinks and peaks of the function between the nodes, ``(k,)``.

    A rule evaluates the function at its nodes only. For a step function at :math:`x` its error is
    at most the largest mass :math:`\lambda(x)` that a spectrum with the same moments can have at
    :math:`x` (Chebyshev, Markov and Stieltjes), and for other functions at most
    :math:`\int \lambda |df|`. Polynomials are integrated exactly, so an interpolant of :math:`f`
    between neighbouring nodes is subtracted first. Little of a smooth function then remains.

    Args:
        values: Nodes in ascending order, ``(k, m)``.
        ends: Ends of the spectrum.
        mass: Maps points ``(k, p)`` to :math:`\lambda`.
        function: :math:`f`.
    """
    low, high = values[:, :1].clamp(max=ends[0]), values[:, -1:].clamp(min=ends[1])
    values = torch.cat([low, values, high], 1)
    left, right = values[:, :-1, None], values[:, 1:, None]
    # Chebyshev points of the second kind on [0, 1]: every other one is interpolated from the rest.
    angles = torch.linspace(torch.pi, 0, 2 * TUNING.degree + 1, dtype=torch.float64)
    polynomials = torch.cos(angles[:, None] * torch.arange(TUNING.degree + 1))
    weights = polynomials[1::2] @ torch.linalg.inv(polynomials[::2])
    shares = (1 + torch.cos(angles)) / 2
    linear = left + (right - left) * shares
    # Powers and logarithms are smooth in log x, over however many orders of magnitude.
    ratio = torch.where(left.sign() * right.sign() > 0, right / left, 1.0)
    wide = ratio.log().abs() > math.log(TUNING.ratio)
    grids = [linear]
    if bool(wide.any()):
        grids.append(torch.where(wide, left * ratio**shares, linear))
    errors = []
    for points in grids:
        # Poles count as zero: the values beside them are large enough.
        heights = function(points).nan_to_num(0.0, 0.0, 0.0)
        rest = (heights[..., 1::2] - heights[..., ::2] @ weights.T).abs()
        spots = points[..., 1::2]
        errors.append((mass(spots.flatten(1)).view_as(spots) * rest).sum(2))
    return torch.stack(errors).amin(0).sum(1)


def christoffel(diagonal: Tensor, off_diagonal: Tensor, points: Tensor) -> Tensor:
    r"""Return the weights :math:`1 / \sum_{j<m} p_j(x)^2` of nodes at points ``(..., p)``.

    They are the largest masses at :math:`x` of a measure with the moments of the Gauss rule of a
    tridiagonal matrix with the diagonals ``(..., m)`` and ``(..., m - 1)``.
    """
    # beta_{j+1} p_{j+1} = (x - alpha_{j+1}) p_j - beta_j p_{j-1}
    before, last = torch.zeros_like(points), torch.ones_like(points)
    total, coupling = torch.ones_like(points), torch.zeros(())
    for alpha, beta in zip(
        diagonal[..., None].unbind(-2), off_diagonal[..., None].unbind(-2), strict=False
    ):
        before, last = last, ((points - alpha) * last - coupling * before) / beta
        coupling, total = beta, total + last.square()
    return torch.nan_to_num(1 / total, nan=0.0)  # polynomials that overflow are large


def _loose_mass(values: Tensor, weights: Tensor, residuals: Tensor, points: Tensor) -> Tensor:
    """Return, for points between the nodes of a block rule, the mass that may lie there."""
    # The angle from a Ritz vector to an eigenvector is at most its residual over the gap.
    gaps = values.diff(dim=1)
    far = torch.full_like(gaps[:, :1], math.inf)
    nearest = torch.cat([far, gaps], 1).minimum(torch.cat([gaps, far], 1))
    loose = weights * (residuals / nearest).nan_to_num(1.0).clamp(max=1.0)
    none = torch.zeros_like(loose[:, :1])
    between = torch.cat([none, loose], 1).maximum(torch.cat([loose, none], 1))
    return between.repeat_interleave(points.shape[1] // between.shape[1], 1)


def _spectrum_ends(
    values: Tensor, residuals: Tensor, function: Function, floor: float | None
) -> tuple[float, float] | None:
    """Return the ends of the spectrum, or ``None`` if a pole of the function may lie within."""
    ends = []
    for end, sign in ((0, -1.0), (-1, 1.0)):
        run = int((sign * values[:, end]).argmax())
        inner = float(values[run, end])
        outer = inner + sign * float(residuals[run, end])
        node = floor if floor is not None and sign < 0 else _reachable(function, inner, outer)
        if node is None:
            return None
        # There is no rule with a node at an eigenvalue of T: move the node just beyond it.
        ends.append(sign * max(sign * node, sign * inner + 1e-14 * float(values.abs().max())))
    return ends[0], ends[1]


def _reachable(function: Function, inner: float, outer: float) -> float | None:
    """Return the end of the spectrum, or ``None`` if a pole of the function lies in between.

    For functions of positive arguments that are finite at zero, such as a square root, the end is
    at most zero.
    """
    zero, end = function(torch.tensor([0.0, outer], dtype=torch.float64)).isfinite().tolist()
    if not min(inner, outer) < 0 < max(inner, outer):
        return outer if end else None
    if not zero:
        return None
    return outer if end else 0.0


def floor_error(floor: float, smallest: float) -> ValueError:
    """Return the error for a floor above the smallest Ritz value."""
    return ValueError(
        f"floor must be below all eigenvalues, got {floor:.6g} and a Ritz value of {smallest:.6g}"
    )


def roundoff_error(
    values: Tensor, weights: Tensor, unit: float, function: Function, floor: float = -math.inf
) -> Tensor:
    r"""Return the error of :math:`\sum_k \tau_k f(\theta_k)` from roundoff.

    It is the change if roundoff moves the values, or the roundoff of the sum, if that is larger. It
    is infinite if roundoff may move a value across a pole of the function.
    """
    shift, values = TUNING.shift * unit, values.clamp_min(floor)
    at = function(values)
    change = ROUNDOFF * torch.finfo(values.dtype).eps * at.abs()
    pole = ~function(torch.zeros_like(values)).isfinite()
    for moved in ((values - shift).clamp_min(floor), values + shift):
        moves = TUNING.margin * (function(moved) - at).abs()
        lost = moves.isnan() | (pole & (values.sign() * moved.sign() <= 0))
        change = change.maximum(torch.where(lost, torch.inf, moves))
    return torch.where(weights > 0, weights * change, 0.0).sum(-1)


# ------------------------------------------------------------------------------------------
# Traces from quadratic forms of random vectors, within a budget of products.


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on the work for the trace of a function, and the source of probes.

    Attributes:
        num_products: Maximum number of products.
        num_probes: Number of probes. ``None`` lets the error bars determine it.
        max_probes: Maximum number of probes for the methods that use moments.
        floor: A number below the spectrum, if one is known.
        rtol: Relative error at which to stop, if any.
        generator: Source of the probes.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.
        source: How the floor is known, unless the caller passed it.
        likely: Whether the floor holds with high probability only.
    """

    num_products: int
    num_probes: int | None
    max_probes: int
    floor: float | None
    rtol: float | None
    generator: torch.Generator
    progress: bool | Progress
    source: str = ""
    likely: bool = False

    def above(self, floor: "Floor") -> "Budget":
        """Return what is left after the search for a floor, with the floor if there is one."""
        left = replace(self, num_products=self.num_products - floor.num_products)
        if floor.value is None:
            return left
        return replace(left, floor=floor.value, source=str(floor), likely=not floor.certain)


class Floor(NamedTuple):
    """A positive lower bound of the eigenvalues, or ``None``, and what is known about it.

    Attributes:
        value: The bound.
        note: How it is known.
        certain: Whether it holds with certainty.
        num_products: Number of products that it took.
    """

    value: float | None
    note: str = ""
    certain: bool = True
    num_products: int = 0

    def __str__(self) -> str:
        return "" if self.value is None else f", eigenvalues above {self.value:.2g} by {self.note}"


class Known(NamedTuple):
    r"""The exact mean of :math:`z^\top A z` over unit vectors, and its roundoff."""

    mean: float
    noise: float


def is_sparse(op: LinearOperator) -> bool:
    """Return whether a product costs hardly more than reading its vectors."""
    return isinstance(op, SparseOperator | LaplacianOperator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    r"""Samples quadratic forms and scales them to a trace, within a budget of products.

    Attributes:
        op: :math:`A`.
        draw: Maps a number ``k`` to random unit vectors ``(n, k)``.
        function: :math:`f`.
        budget: Source of ``floor`` and ``rtol``.
        dimension: Dimension of the space of the vectors; no run is longer.
        bar: Progress bar, which counts products.
        label: Beginning of the ``method`` of the estimate.
        spent: Number of products before this sampler.
        inside: Part of the trace that is known from these products.
        error: Error of that part.
        known: Returns the exact mean of :math:`z^\top A z`, or ``None`` if it is not known.
        magnitude: Norm to which roundoff in the products is relative, if it exceeds that of ``op``.
        mode: Kind of re-orthogonalisation. Runs whose bases exceed ``TUNING.basis`` use ``none``.
        block_size: Vectors per product.
    """

    op: LinearOperator
    draw: Callable[[int], Tensor]
    function: Function
    budget: Budget
    dimension: int
    bar: Progress
    label: str
    spent: int = 0
    inside: float = 0.0
    error: float = 0.0
    known: Callable[[], Known | None] = lambda: None
    magnitude: float = 0.0
    mode: Reorthogonalization = "full"
    block_size: int | None = None

    def estimate(self, num_products: int, num_probes: int | None) -> Estimate:
        """Return the trace from ``num_probes`` probes; ``None`` lets the error bars choose them."""
        if num_probes is not None:
            num_steps = min(max(1, num_products // num_probes), self.dimension)
            return self.extended([], num_steps, [num_probes])
        spaces, used = self.pilot(num_products // 2, num_products)
        num_steps = spaces.matrices.shape[1]
        return self.extended([spaces], num_steps, self.looks(num_products, spaces, used), used)

    def looks(self, num_products: int, spaces: Projections, used: int) -> list[int]:
        """Return the numbers of probes at which to compare the error with the tolerance."""
        most = len(spaces.matrices) + (num_products - used) // spaces.matrices.shape[1]
        return [most] if self.budget.rtol is None else doubling(TUNING.first_look, most)

    def extended(
        self, parts: Sequence[Projections], num_steps: int, looks: Sequence[int], used: int = 0
    ) -> Estimate:
        """Add vectors with runs of ``num_steps`` steps until the tolerance is reached.

        Args:
            parts: Krylov spaces of earlier vectors.
            num_steps: Steps per run.
            looks: Numbers of vectors at which to compare the error with the tolerance.
            used: Number of products that these spaces took.
        """
        spaces, size = list(parts), self.block_size or self.op.block_size
        for goal in looks:
            while (missing := goal - sum(len(part.matrices) for part in spaces)) > 0:
                runs = self._runs(min(size, missing), num_steps)
                spaces.append(self._grow(runs, num_steps, used))
                used += sum(run.size for run in runs)
            estimate = self.scaled(Projections.joined(spaces), used)
            if is_settled(estimate, self.budget.rtol):
                break
        return estimate

    def scaled(self, spaces: Projections, used: int, *, final: bool = True) -> Estimate:
        """Return the trace: the dimension times the mean over unit vectors, plus ``inside``.

        An estimate that is not ``final`` predicts the errors of more vectors. So its few samples
        are not suspected of agreeing by chance.
        """
        forms = self._brackets(spaces)
        samples, control = self._controlled(spaces, forms.mixed)
        estimate = Estimate.of(
            self.inside + self.dimension * samples,
            truncation=self.dimension * forms.truncation + self.error,
            num_products=self.spent + used,
            method=f"{self.label}{len(samples)} probes x {spaces.matrices.shape[1]} steps"
            + ", with the exact trace as control variate" * control
            + self.budget.source,
            seed=self.budget.generator.initial_seed(),
        )
        if control:  # the slope took a degree of freedom
            estimate = replace(estimate, degrees=estimate.degrees - 1)
        # If every probe is an eigenvector, the matrix is a multiple of the identity.
        beside = spaces.matrices.diagonal(1, 1, 2)
        if final and (bool(spaces.couplings.any()) or bool(beside.any())):
            estimate = doubt_equal_samples(estimate)
        return estimate.with_status(self.budget.rtol, ADVICE)

    def pilot(self, num_products: int, later: int) -> tuple[Projections, int]:
        """Return Krylov spaces of a few vectors and their number of products.

        The runs grow until the truncation error is below half of the target, or below half of the
        standard error that ``later`` products will leave.
        """
        width = TUNING.sparse_pilot if is_sparse(self.op) else TUNING.pilot
        count = max(2, min(width, num_products // 2))
        most = max(1, min(num_products // max(count, TUNING.fewest), self.dimension))
        runs, size = self._runs(count, most), TUNING.fewest_steps - 1
        while True:
            size = min(most, max(size + 1, size * 5 // 4))
            spaces = self._grow(runs, size, 0)
            forms = self._brackets(spaces)
            sampling = float(forms.mixed.std()) / math.sqrt(max(count, later // size))
            small = 0.5 * max(sampling, self.target(float(forms.mixed.mean())))
            if is_below(float(forms.gap.mean()), small) or size == most:
                return spaces, sum(run.size for run in runs)

    def target(self, mean: float) -> float:
        """Return the error per dimension at which to stop."""
        return (self.budget.rtol or 0.0) * abs(self.inside / self.dimension + mean)

    def _brackets(self, spaces: Projections) -> Brackets:
        bounds = self.function in ALTERNATING
        floor, likely = self.budget.floor, self.budget.likely
        known = brackets(spaces, self.function, floor=floor, bounds=bounds, likely=likely)
        if not self.budget.source or self.function is torch.log:
            return known
        # Powers are large at a floor that is far below the spectrum, and then the bounds are wide.
        plain = brackets(spaces, self.function)
        return plain if is_below(float(plain.gap.mean()), float(known.gap.mean())) else known

    def _controlled(self, spaces: Projections, mixed: Tensor) -> tuple[Tensor, bool]:
        """Return the forms ``(d,)``, with the trace as control variate if that helps."""
        plain, count = spaces.matrices[:, 0, 0], len(mixed)
        exact = self.known() if count >= TUNING.controlled else None
        # The exact mean may be a small difference of large numbers, and then mostly roundoff.
        if exact is None or not exact.noise < TUNING.control_noise * float(stderr(plain)):
            return mixed, False
        # Regression of the forms f on y = z'Az:  f - slope (y - E y), with E y known.
        spread = plain - plain.mean()
        slope = (spread * mixed).sum() / spread.square().sum()
        left = mixed - mixed.mean() - slope * spread
        left = left * math.sqrt((count - 1) / (count - 2))
        if float(left.std()) > TUNING.control_gain * float(mixed.std()):
            return mixed, False
        return mixed.mean() - slope * (plain.mean() - exact.mean) + left, True

    def _runs(self, count: int, num_steps: int) -> list[Recurrence]:
        starts, mode = self.draw(count), self.mode
        if num_steps == self.dimension:
            mode = "full"  # so that the remainder of the last step is roundoff
        elif starts.numel() * (num_steps + 1) * starts.element_size() > (
            TUNING.sparse_basis if is_sparse(self.op) else TUNING.basis
        ):
            mode = "none"  # quadrature stays accurate but needs more steps (Greenbaum 1989)
        return start_runs(
            starts.T.unbind(), capacity=num_steps + 1, mode=mode, magnitude=self.magnitude
        )

    def _grow(self, runs: list[Recurrence], num_steps: int, before: int) -> Projections:
        while active := [run for run in runs if not run.exhausted and run.size < num_steps]:
            step(self.op, active)
            self.bar.update(self.spent + before + sum(run.size for run in runs))
        spaces = Projections.of(runs, num_steps)
        # The whole space is invariant: what is left of the last vector is roundoff.
        return replace(spaces, couplings=spaces.couplings * (num_steps < self.dimension))
