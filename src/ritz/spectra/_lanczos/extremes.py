"""The ends of a spectrum: bounds and the spectral norm."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ritz._core.checks import check_choice
from ritz._core.progress import Progress
from ritz._core.results import Estimate, Status
from ritz._core.storage import storable
from ritz.operators import as_operator
from ritz.operators._shared import gershgorin
from ritz.spectra._lanczos.run import lanczos
from ritz.spectra._lanczos.spectrum import Spectrum

BoundsMethod = Literal["auto", "gershgorin", "lanczos"]


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """An interval that holds a spectrum; ``low, high = bounds`` unpacks it.

    Attributes:
        low: Lower end.
        high: Upper end.
        rigorous: Whether every eigenvalue is certain to lie inside; from Lanczos it is so with
            probability near one over the start vector.
        num_products: Products spent.
        method: How the ends were found.
        status: Whether the ends are as close as asked for.
        ritz: Smallest and largest Ritz value, between which the spectrum reaches at least; ``None``
            where no product was spent.
    """

    low: float
    high: float
    rigorous: bool
    num_products: int
    method: str
    status: Status
    ritz: tuple[float, float] | None = None

    def __iter__(self) -> Iterator[float]:
        return iter((self.low, self.high))

    def raise_if_failed(self) -> None:
        """Raise :class:`ritz.NotConvergedError` unless the ends are as close as asked for."""
        self.status.raise_if_failed()

    def __str__(self) -> str:
        kind = "certainly" if self.rigorous else "almost certainly"
        where = f"[{self.low:.6g}, {self.high:.6g}] {kind} holds the spectrum"
        return f"{where} ({self.method}; {self.status})"


def bounds(
    op: Any,
    *,
    method: BoundsMethod = "auto",
    rtol: float = 0.01,
    num_steps: int = 200,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Bounds:
    r"""Return an interval that holds the spectrum.

    ``gershgorin`` needs an explicit matrix, no product, and is certain but wide. ``lanczos`` takes
    the extreme Ritz values and moves them out by ``rtol`` times the norm once their residuals
    are below that, so an eigenvalue the start vector hardly met is still inside. ``auto`` takes
    what the two have in common.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        method: See above.
        rtol: Margin, as a share of the norm.
        num_steps: Most products to spend; 20 to 60 are usual.
        generator: Source of the start vector.
        progress: Whether to show a bar, or what to tell.
    """
    op = as_operator(op)
    check_choice("method", method, ("auto", "gershgorin", "lanczos"))
    discs = gershgorin(op) if method != "lanczos" else None
    if method == "gershgorin":
        if discs is None:
            raise ValueError(f"method='gershgorin' needs an explicit matrix, got {op!r}")
        exact = Status(outcome="completed", message="no product")
        return Bounds(
            low=discs[0], high=discs[1], rigorous=True, num_products=0, method=method, status=exact
        )
    found = _ends(op, rtol, num_steps, generator, progress)
    values, margin = found.values, float(found.residuals.max())
    if found.status.outcome != "breakdown":
        margin = max(margin, rtol * float(values.abs().max()))
    low, high = float(values[0]) - margin, float(values[-1]) + margin
    if discs is not None:
        low, high = max(low, discs[0]), min(high, discs[1])
    return Bounds(
        low=low,
        high=high,
        rigorous=False,
        num_products=found.num_products,
        method="Lanczos" if discs is None else "Lanczos within Gershgorin",
        status=found.status,
        ritz=(float(values[0]), float(values[-1])),
    )


def spectral_norm(
    op: Any,
    *,
    rtol: float = 1e-3,
    num_steps: int = 1000,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Return the spectral norm :math:`\max_i |\lambda_i|`.

    Both ends of the spectrum by Lanczos until their residuals are below ``rtol`` times the norm;
    the error of the value is of the order of the square of that. ``truncation`` is the residual: an
    eigenvalue lies within it. Nothing is averaged, so ``stderr`` is zero.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        rtol: Residual to reach, relative to the norm.
        num_steps: Most products to spend.
        generator: Source of the start vector.
        progress: Whether to show a bar, or what to tell.
    """
    op = as_operator(op)
    found = _ends(op, rtol, num_steps, generator, progress)
    largest = int(found.values.abs().argmax())
    return Estimate(
        mean=found.values[largest].abs(),
        stderr=torch.zeros((), dtype=torch.float64),
        truncation=found.residuals[largest],
        num_products=found.num_products,
        method="Lanczos",
        status=found.status,
        seed=found.seed,
    )


def _ends(
    op: Any,
    rtol: float,
    num_steps: int,
    generator: torch.Generator | None,
    progress: bool | Progress,
) -> Spectrum:
    return lanczos(
        op,
        largest=1,
        smallest=min(1, op.shape[0] - 1),
        rtol=rtol,
        num_steps=num_steps,
        generator=generator,
        progress=progress,
    )
