r"""Quadratic forms :math:`z^\top f(A) z` by Gauss and Gauss-Radau rules, and traces from them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ritz._core.progress import Progress
from ritz._core.results import Estimate, stderr
from ritz.operators import LinearOperator
from ritz.spectra._lanczos import Recurrence, Reorthogonalization, advance, step

Function = Callable[[Tensor], Tensor]
Rule = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of the error bars and of the split between probes and steps."""

    # A doubling of the steps is expected to leave at most this fraction of the change of the
    # doubling before: a ratio near 1 says that the outer eigenvalues are not found yet. On the
    # spectra of tests/spectra/test_error_bars.py the largest error is 1.2 bars with 0.9 and 8 bars
    # with 0.5; with 0.99 the bars are ten times too wide.
    stalled: float = 0.9
    # Below this ratio convergence counts as fast, and the change of the last steps is the bar.
    # Without it the bar of 5,000 rows with condition 1,000 is five times as wide, and a sparse
    # matrix needs 60 products where 40 suffice. No error above exceeds its bar either way.
    fast: float = 0.1
    # Ritz values may lie this many eps |A| below a floor before the floor is refused. In float32
    # kernel matrices of 1,500 rows reach 0.14; the margin is for the roundoff of larger sums.
    below_floor: float = 5000.0
    # Roundoff in the products moves the spectrum by at most this many eps |A|: on the same
    # matrices the error of krylov, mostly roundoff, is then a tenth of the truncation.
    shift: float = 0.25
    # Probes whose runs grow until truncation no longer matters, and the number of probes that the
    # longest such run must leave products for; benchmarks/determinants.py, rows "sparse".
    pilot: int = 4
    fewest: int = 5
    # Bytes of Lanczos bases beyond which reading them costs more than the additional steps of
    # runs without re-orthogonalisation; benchmarks/determinants.py, a million rows.
    basis: int = 2**28
    # A regression on the trace needs this many samples, and roundoff in the trace below this
    # fraction of their standard error. It must leave at most this fraction of their deviation: a
    # smaller gain is not worth the degree of freedom.
    controlled: int = 8
    control_noise: float = 0.01
    control_gain: float = 0.9


TUNING = Tuning()

# ------------------------------------------------------------------------------------------
# Gauss rules of several start vectors.


@dataclass(frozen=True, slots=True)
class Rules:
    """Gauss rules of ``k`` start vectors.

    Attributes:
        last: Nodes and weights of the ``m``-point rules, each ``(m, k)``, float64 on the CPU.
        projected: Tridiagonal matrices, ``(k, m, m)``; leading parts belong to shorter rules.
        exact: Whether the Krylov space of a run is invariant, so that its rule is exact, ``(k,)``.
        num_products: Number of products.
    """

    last: Rule
    projected: Tensor
    exact: Tensor
    num_products: int


def ritz_rules(
    op: LinearOperator, block: Tensor, *, num_steps: int, reorthogonalize: Reorthogonalization
) -> Rules:
    r"""Return the ``num_steps``-point Gauss rules of start vectors ``(n, k)``.

    If a Krylov space is invariant, its rule is exact and padded with nodes of weight zero.
    """
    starts = [start.contiguous() for start in block.T]
    runs = [Recurrence(start, capacity=num_steps, mode=reorthogonalize) for start in starts]
    advance(op, runs, num_steps)
    padded = []
    for run in runs:
        padded.append(torch.eye(num_steps, dtype=torch.float64) * run.alphas[0])
        padded[-1][: run.size, : run.size] = run.projected()
    projected = torch.stack(padded)
    return Rules(
        last=gauss_rule(projected),
        projected=projected,
        exact=torch.tensor([run.exhausted for run in runs]),
        num_products=sum(run.size for run in runs),
    )


def gauss_rule(projected: Tensor) -> Rule:
    """Return nodes and weights ``(m, k)`` of the Gauss rules of ``k`` tridiagonal matrices."""
    # Golub and Welsch (1969): T e_k = theta_k e_k, weights tau_k = (e_k)_1^2.
    nodes, vectors = torch.linalg.eigh(projected)
    return nodes.T, vectors[:, 0].square().T


# ------------------------------------------------------------------------------------------
# Bounds of quadratic forms by Gauss and Gauss-Radau rules.


def finite_function(function: Function) -> Function:
    """Return the function with checks that it keeps the shape and is finite."""

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


class Brackets(NamedTuple):
    r"""Bounds of :math:`z^\top f(A) z` for unit vectors :math:`z`, each ``(k,)``.

    If the derivatives of :math:`f` have constant, alternating signs, as those of the logarithm and
    of negative powers have, the form lies between ``gauss`` and ``radau``.

    Attributes:
        gauss: Gauss rules.
        radau: Gauss-Radau rules with a node at the floor. Without a floor: the Gauss rules and the
            change expected of more steps, which is an estimate; NaN after a single step.
        mixed: The mix of the two that was stationary over the last steps.
        roundoff: Error by roundoff in the products.
    """

    gauss: Tensor
    radau: Tensor
    mixed: Tensor
    roundoff: Tensor

    @property
    def gap(self) -> Tensor:
        """Larger distance from ``mixed`` to either bound, of the means over the runs."""
        off = torch.stack([self.mixed - self.gauss, self.mixed - self.radau]).mean(1)
        return off.abs().max()

    @property
    def truncation(self) -> Tensor:
        """The gap, which more steps reduce, plus roundoff, which they do not."""
        return self.gap + self.roundoff.mean()


def brackets(runs: Sequence[Recurrence], floor: float | None, function: Function) -> Brackets:
    """Return the bounds that runs of at least one step give, with a floor if one is known."""
    rows = [_bracket(run, floor, function) for run in runs]
    return Brackets(*(torch.stack(column) for column in zip(*rows, strict=True)))


def _bracket(run: Recurrence, floor: float | None, function: Function) -> tuple[Tensor, ...]:
    projected, size = run.projected(), run.size
    unit = run.eps * max(run.scale, run.magnitude)
    if floor is not None:
        function = _above(floor, TUNING.below_floor * unit, function)
    gauss, roundoff = _gauss(projected, function), _roundoff(projected, unit, function)
    if run.exhausted:
        return gauss, gauss, gauss, roundoff
    less, *fewer = shorter(size)
    older = projected[:less, :less]
    before = _gauss(older, function)
    if floor is None:
        rules = (_gauss(projected[:m, :m], function) for m in fewer)
        # After a single step there is no change to judge by.
        left = remainder(gauss, before, *rules) if size > 1 else torch.full_like(gauss, torch.nan)
        return gauss, gauss - left, gauss, roundoff
    coupling = float(projected[less - 1, less]) if less < size else run.betas[-1]
    radau = _radau(projected, run.betas[-1], floor, function)
    # The lower bound rises and the upper bound falls. Extrapolated at their present speeds they
    # meet at  (rise * gauss + fall * radau) / (rise + fall).
    rise, fall = radau - _radau(older, coupling, floor, function), before - gauss
    share = rise / (rise + fall) if float(rise * fall) > 0 else torch.full_like(gauss, 0.5)
    return gauss, radau, share * gauss + (1 - share) * radau, roundoff


def shorter(size: int) -> tuple[int, int, int]:
    """Return seven eighths, a half and a quarter of a number of steps, for :func:`remainder`."""
    return max(1, size - max(1, size // 8)), max(1, size // 2), max(1, size // 4)


def remainder(last: Tensor, before: Tensor, half: Tensor, quarter: Tensor) -> Tensor:
    """Return the change expected of more steps, from forms by all steps and by :func:`shorter`.

    An error that falls as a power of the number of steps falls by the same ratio in each doubling.
    If it falls faster, the change of the last eighth of the steps exceeds the error left.
    """
    # Geometric series: late * (ratio + ratio^2 + ...) = late * ratio / (1 - ratio).
    late, early = half - last, (quarter - half).abs()
    ratio = (late.abs() / early).nan_to_num(nan=0.0, posinf=TUNING.stalled)
    ratio = ratio.clamp_max(TUNING.stalled)
    slow = torch.where(ratio > TUNING.fast, late * ratio / (1 - ratio), 0.0)
    change = before - last
    return torch.where(slow.abs() > change.abs(), slow, change)


def floor_error(floor: float, smallest: float) -> ValueError:
    """Return the error for a floor above the smallest Ritz value."""
    return ValueError(
        f"floor must be below the spectrum, got {floor:.6g} where a Ritz value is {smallest:.6g}"
    )


def _above(floor: float, roundoff: float, function: Function) -> Function:
    """Return the function with arguments that roundoff put below the floor moved to it."""

    def evaluate(values: Tensor) -> Tensor:
        smallest = float(values.min())
        if floor - roundoff <= smallest:
            return function(values.clamp_min(floor))
        function(values)  # a logarithm reports a value that is not positive more precisely
        raise floor_error(floor, smallest)

    return evaluate


def _gauss(projected: Tensor, function: Function) -> Tensor:
    # e_1' f(T) e_1 = sum_k tau_k f(theta_k)
    values, vectors = torch.linalg.eigh(projected)
    form: Tensor = (vectors[0].square() * function(values)).sum()
    return form


def _roundoff(projected: Tensor, unit: float, function: Function) -> Tensor:
    """Return the change of a form if roundoff moves the Ritz values inwards by ``shift`` units."""
    values, vectors = torch.linalg.eigh(projected)
    shift, middle = TUNING.shift * unit, 0.5 * (values[0] + values[-1])
    moved = torch.where(values <= middle, values + shift, (values - shift).maximum(middle))
    change: Tensor = vectors[0].square() @ (function(moved) - function(values)).abs()
    return change


def _radau(projected: Tensor, coupling: float, floor: float, function: Function) -> Tensor:
    """Return the Gauss-Radau rule with a node at the floor (Golub 1973)."""
    size = len(projected)
    values = torch.linalg.eigvalsh(projected)
    # A node that is an eigenvalue of T, to roundoff, has no rule; one just below it has.
    node = min(floor, float(values[0]) - 1e-14 * float(values[-1]))
    # Append a row whose diagonal entry is  node + beta^2 [(T - node I)^{-1}]_mm .
    shifted = projected - node * torch.eye(size, dtype=projected.dtype)
    last = torch.zeros(size, dtype=projected.dtype)
    last[-1] = coupling**2
    extended = torch.zeros(size + 1, size + 1, dtype=projected.dtype)
    extended[:size, :size] = projected
    extended[size, size - 1] = extended[size - 1, size] = coupling
    extended[size, size] = node + torch.linalg.solve(shifted, last)[-1]
    # Its smallest eigenvalue is the node, up to roundoff that may exceed the node itself.
    return _gauss(extended, lambda nodes: function(nodes.clamp_min(floor)))


# ------------------------------------------------------------------------------------------
# Quadratic forms of random vectors within a budget of products, and the trace they give.


@dataclass(frozen=True, slots=True)
class Budget:
    """Products and probes for the trace of a function, and where they come from.

    Attributes:
        num_products: Maximum number of products.
        num_probes: Number of probes; ``None``: chosen by the error bars.
        floor: A number below the spectrum, if one is known.
        rtol: Relative error at which to stop, if any.
        generator: Source of the probes.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """

    num_products: int
    num_probes: int | None
    floor: float | None
    rtol: float | None
    generator: torch.Generator
    progress: bool | Progress


class Known(NamedTuple):
    r"""The exact mean of :math:`z^\top A z`, the trace over the dimension, and its noise."""

    mean: float
    noise: float


@dataclass(frozen=True, slots=True)
class Forms:
    r"""Quadratic forms of unit vectors.

    Attributes:
        brackets: Bounds, each ``(d,)``.
        plain: :math:`z^\top A z`, ``(d,)``.
        num_steps: Steps of the latest runs.
        num_products: Number of products.
    """

    brackets: Brackets
    plain: Tensor
    num_steps: int
    num_products: int

    def samples(self, known: Callable[[], Known | None]) -> tuple[Tensor, str]:
        """Return the mixed rules ``(d,)``, with the trace as control variate if that helps."""
        mixed, count = self.brackets.mixed, len(self.plain)
        exact = known() if count >= TUNING.controlled else None
        # The known mean may be a small difference of large numbers: then it is mostly noise.
        if exact is None or not exact.noise < TUNING.control_noise * float(stderr(self.plain)):
            return mixed, ""
        # Regression of the forms f on y = z'Az:  f - slope (y - E y), with E y known.
        spread = self.plain - self.plain.mean()
        slope = (spread * mixed).sum() / spread.square().sum()
        left = mixed - mixed.mean() - slope * spread
        left = left * math.sqrt((count - 1) / (count - 2))  # the slope took a degree of freedom
        if float(left.std()) > TUNING.control_gain * float(mixed.std()):
            return mixed, ""
        centre = mixed.mean() - slope * (self.plain.mean() - exact.mean)
        return centre + left, ", controlled by the trace"

    def joined(self, other: "Forms") -> "Forms":
        """Return these forms and those of later runs."""
        pairs = zip(self.brackets, other.brackets, strict=True)
        return Forms(
            Brackets(*(torch.cat(pair) for pair in pairs)),
            torch.cat([self.plain, other.plain]),
            other.num_steps,
            self.num_products + other.num_products,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    r"""Samples quadratic forms and scales them to a trace, within a budget of products.

    Attributes:
        op: :math:`A`.
        draw: Returns that many random unit vectors ``(n, k)``.
        function: :math:`f`.
        budget: Source of ``floor`` and ``rtol``.
        dimension: Dimension of the space of the vectors; no run is longer.
        bar: Progress bar, which counts products.
        spent: Products before this sampler.
        inside: Part of the trace that these products gave.
        error: Error of that part.
        known: Returns the exact mean of :math:`z^\top A z`, if it is known.
        magnitude: Norm to which roundoff in the products is relative, if it exceeds that of ``op``.
    """

    op: LinearOperator
    draw: Callable[[int], Tensor]
    function: Function
    budget: Budget
    dimension: int
    bar: Progress
    spent: int = 0
    inside: float = 0.0
    error: float = 0.0
    known: Callable[[], Known | None] = lambda: None
    magnitude: float = 0.0

    def estimate(self, num_products: int, num_probes: int | None, label: str) -> Estimate:
        """Return the trace from that many probes; ``None``: as the two error bars suggest."""
        if num_probes is not None:
            num_steps = min(max(1, num_products // num_probes), self.dimension)
            width = min(self.op.block_size, num_probes)
            forms = self._grow(self._runs(width, num_steps), num_steps)
            return self.scaled(self.extend(forms, num_probes - width), label)
        forms = self.pilot(num_products // 2, num_products)
        probes_left = (num_products - forms.num_products) // forms.num_steps
        return self.scaled(self.extend(forms, probes_left), label)

    def scaled(self, forms: Forms, label: str) -> Estimate:
        """Return the trace: the dimension times the mean over unit vectors, and the part inside."""
        samples, control = forms.samples(self.known)
        return Estimate.of(
            self.inside + self.dimension * samples,
            truncation=self.dimension * forms.brackets.truncation + self.error,
            num_products=self.spent + forms.num_products,
            method=f"{label}{len(samples)} probes x {forms.num_steps} steps{control}",
        )

    def target(self, mean: float) -> float:
        """Return the error per dimension at which to stop."""
        return (self.budget.rtol or 0.0) * abs(self.inside / self.dimension + mean)

    def pilot(self, num_products: int, later: int) -> Forms:
        """Return forms of a few vectors, with runs that grow until truncation does not matter.

        That is when it is below half the target, or half the standard error that ``later`` products
        will leave.
        """
        count = max(2, min(TUNING.pilot, num_products // 2))
        most = max(1, min(num_products // max(count, TUNING.fewest), self.dimension))
        runs, size = self._runs(count, most), 3
        while True:
            size = min(most, max(size + 1, size * 5 // 4))
            forms = self._grow(runs, size)
            probes = max(count, later // forms.num_steps)
            sampling = float(forms.brackets.mixed.std()) / math.sqrt(probes)
            small = 0.5 * max(sampling, self.target(float(forms.brackets.mixed.mean())))
            if float(forms.brackets.gap) <= small or size == most:
                return forms

    def extend(self, forms: Forms, num_probes: int) -> Forms:
        """Add up to that many vectors with runs of the same length, until the target is reached."""
        while num_probes > 0:
            samples, _ = forms.samples(self.known)
            error = math.hypot(float(stderr(samples)), float(forms.brackets.truncation))
            if error <= self.target(float(samples.mean())):
                break
            width = min(self.op.block_size, num_probes)
            runs = self._runs(width, forms.num_steps)
            forms = forms.joined(self._grow(runs, forms.num_steps, forms.num_products))
            num_probes -= width
        return forms

    def _runs(self, count: int, num_steps: int) -> list[Recurrence]:
        starts = self.draw(count)
        mode: Reorthogonalization = "full"
        if starts.numel() * (num_steps + 1) * starts.element_size() > TUNING.basis:
            mode = "none"  # quadrature stays accurate but needs more steps (Greenbaum 1989)
        return [
            Recurrence(z.contiguous(), capacity=num_steps + 1, mode=mode, magnitude=self.magnitude)
            for z in starts.T
        ]

    def _grow(self, runs: list[Recurrence], num_steps: int, before: int = 0) -> Forms:
        while active := [run for run in runs if not run.exhausted and run.size < num_steps]:
            step(self.op, active)
            self.bar.update(self.spent + before + sum(run.size for run in runs))
        return Forms(
            brackets(runs, self.budget.floor, self.function),
            torch.tensor([run.alphas[0] for run in runs], dtype=torch.float64),
            max(run.size for run in runs),
            sum(run.size for run in runs),
        )
