r"""Quadratic forms :math:`z^\top f(A) z` of random vectors, within a budget of products."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ritz._core.progress import Progress
from ritz._core.results import stderr
from ritz.operators import LinearOperator
from ritz.spectra._functions.gauss import Brackets, Function, brackets
from ritz.spectra._lanczos import Recurrence, Reorthogonalization, step

# ------------------------------------------------------------------------------------------
# What may be spent on the trace of a function.


@dataclass(frozen=True, slots=True)
class Budget:
    """Products and probes, what is known of the spectrum, and where chance comes from.

    Attributes:
        num_products: Products to spend.
        num_probes: Random vectors; ``None``: as many as pay.
        floor: A number below the spectrum, if one is known.
        rtol: Relative error at which to stop, if any.
        generator: Source of the vectors.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """

    num_products: int
    num_probes: int | None
    floor: float | None
    rtol: float | None
    generator: torch.Generator
    progress: bool | Progress


# ------------------------------------------------------------------------------------------
# Quadratic forms :math:`z^\top f(A) z` of random vectors, as many and as long as pay.

PILOT = 4  # vectors whose runs grow until more length pays no longer
FEWEST = 5  # vectors that every other number of steps must leave products for, twice
BASIS = 2**28  # bytes of bases beyond which reading them costs more than steps without them
CONTROLLED = 8  # fewest samples that a slope is fitted to


@dataclass(frozen=True, slots=True)
class Known:
    r"""What is known exactly of the matrix: :math:`\operatorname{tr} A` over the dimension.

    Attributes:
        mean: Of :math:`z^\top A z`.
        noise: Roundoff in it.
    """

    mean: float
    noise: float


@dataclass(frozen=True, slots=True)
class Forms:
    r"""Quadratic forms of vectors of norm one.

    Attributes:
        brackets: Bounds, each ``(d,)``.
        plain: :math:`z^\top A z`, ``(d,)``.
        num_steps: Of the later runs.
        num_products: Spent.
    """

    brackets: Brackets
    plain: Tensor
    num_steps: int
    num_products: int

    def samples(self, known: Callable[[], Known | None]) -> tuple[Tensor, str]:
        """The mixed rules ``(d,)``, less what known means explain of them, and whether they did."""
        found, count = self.brackets.mixed, len(self.plain)
        exact = known() if count >= CONTROLLED else None
        # What is known may be the small difference of large numbers.
        if exact is None or not exact.noise < 0.01 * float(stderr(self.plain)):
            return found, ""
        spread = self.plain - self.plain.mean()
        slope = (spread * found).sum() / spread.square().sum()
        left = found - found.mean() - slope * spread
        left = left * math.sqrt((count - 1) / (count - 2))  # the slope took a degree of freedom
        if float(left.std()) > 0.9 * float(found.std()):
            return found, ""
        return found.mean() - slope * (self.plain.mean() - exact.mean) + left, (
            ", controlled by the trace"
        )


Target = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Sampler:
    r"""How quadratic forms are sampled.

    Attributes:
        op: :math:`A`.
        drawn: Makes that many random vectors ``(n, k)`` of norm one.
        function: :math:`f`.
        floor: A number below the spectrum, if one is known.
        dimension: Of the space of the vectors: no run is longer.
        known: Finds the mean of :math:`z^\top A z`, where it is known.
        target: The error at which to stop, by the mean.
        bar: Told of products.
        spent: Products that it was told of before.
        magnitude: Norm to which roundoff in the products is relative, where that of ``op`` is less.
    """

    op: LinearOperator
    drawn: Callable[[int], Tensor]
    function: Function
    floor: float | None
    dimension: int
    known: Callable[[], Known | None]
    target: Target
    bar: Progress
    spent: int = 0
    magnitude: float = 0.0

    def fixed(self, num_probes: int, num_steps: int) -> Forms:
        """Forms of so many vectors by so many steps each."""
        num_steps = min(num_steps, self.dimension)
        width = min(self.op.block_size, num_probes)
        found = self._grown(self._runs(width, num_steps), num_steps)
        return self.more(found, num_probes - width)

    def split(self, num_products: int) -> Forms:
        """Forms for so many products, split between vectors and steps by the two errors."""
        found = self.pilot(num_products // 2, num_products)
        return self.more(found, (num_products - found.num_products) // found.num_steps)

    def pilot(self, num_products: int, later: int) -> Forms:
        """Forms of a few vectors, whose runs grow until their truncation is no longer what counts.

        That is below half of what sampling will leave with ``later`` products, or of the target.
        """
        count = max(2, min(PILOT, num_products // 2))
        most = max(1, min(num_products // max(count, FEWEST), self.dimension))
        runs, size = self._runs(count, most), 3
        while True:
            size = min(most, max(size + 1, size * 5 // 4))
            found = self._grown(runs, size)
            probes = max(count, later // found.num_steps)
            sampling = float(found.brackets.mixed.std()) / math.sqrt(probes)
            small = 0.5 * max(sampling, self.target(float(found.brackets.mixed.mean())))
            if float(found.brackets.gap) <= small or size == most:
                return found

    def more(self, found: Forms, num_probes: int) -> Forms:
        """Those and so many others, with runs as long; or fewer, where the target is reached."""
        while num_probes > 0 and not self.reached(found):
            width = min(self.op.block_size, num_probes)
            runs = self._runs(width, found.num_steps)
            found = _joined(found, self._grown(runs, found.num_steps, found.num_products))
            num_probes -= width
        return found

    def reached(self, found: Forms) -> bool:
        """Whether both errors together are within the target."""
        samples, _ = found.samples(self.known)
        error = math.hypot(float(stderr(samples)), float(found.brackets.truncation))
        return error <= self.target(float(samples.mean()))

    def _runs(self, count: int, num_steps: int) -> list[Recurrence]:
        starts = self.drawn(count)
        mode: Reorthogonalization = "full"
        if starts.numel() * (num_steps + 1) * starts.element_size() > BASIS:
            mode = "none"  # quadrature stays accurate, and takes some more steps
        return [
            Recurrence(z.contiguous(), capacity=num_steps + 1, mode=mode, magnitude=self.magnitude)
            for z in starts.T
        ]

    def _grown(self, runs: list[Recurrence], num_steps: int, before: int = 0) -> Forms:
        while True:
            active = [run for run in runs if not run.exhausted and run.size < num_steps]
            if not active:
                break
            step(self.op, active)
            self.bar.update(self.spent + before + sum(run.size for run in runs))
        return Forms(
            brackets(runs, self.floor, self.function),
            torch.tensor([run.alphas[0] for run in runs], dtype=torch.float64),
            max(run.size for run in runs),
            sum(run.size for run in runs),
        )


def _joined(first: Forms, second: Forms) -> Forms:
    columns = ("gauss", "radau", "mixed", "roundoff")
    pairs = ((getattr(first.brackets, name), getattr(second.brackets, name)) for name in columns)
    return Forms(
        Brackets(*(torch.cat(pair) for pair in pairs)),
        torch.cat([first.plain, second.plain]),
        second.num_steps,
        first.num_products + second.num_products,
    )
