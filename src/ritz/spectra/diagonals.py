"""Diagonals by random probes."""

from typing import Any, Literal

import torch
from torch import Tensor

from ritz._core.checks import check_choice
from ritz._core.progress import Progress, tracking
from ritz._core.random import Probe, probes, resolve_generator
from ritz._core.results import Estimate, Status
from ritz.operators.interop import as_operator
from ritz.operators.structure import exact_diagonal, structure_gap, structure_note
from ritz.spectra.sampling import Sampling, accuracy, check_samples

DiagonalMethod = Literal["auto", "exact", "probes"]


def diagonal(
    op: Any,
    *,
    method: DiagonalMethod = "auto",
    num_probes: int = 32,
    rtol: float | None = None,
    max_probes: int = 1000,
    block_size: int | None = None,
    probe: Probe = "rademacher",
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Estimate:
    r"""Return the diagonal ``(n,)``, from :math:`A_{ii} = \mathbb{E}[z_i (A z)_i]`.

    ``exact`` asks the structure of the operator (no product), ``probes`` samples: one product a
    probe, variance :math:`\sum_{j \ne i} A_{ij}^2` for Rademacher probes. ``auto`` is ``exact``
    where the structure knows. Memory: 4 blocks and 3 vectors, half of it in float64; samples are
    not kept.

    Args:
        op: Symmetric :math:`A`, ``(n, n)``.
        method: See above.
        num_probes: Probes; with ``rtol``, the least number.
        rtol: Go on until the norm of the standard errors is below this share of the norm.
        max_probes: Most probes for that; the status says if they were not enough.
        block_size: Probes multiplied at once; what suits the operator by default.
        probe: ``rademacher`` or ``gaussian``.
        generator: Source of the probes.
        progress: Whether to show a bar, or what to tell.

    Reference: Bekas, Kokiopoulou and Saad (2007).
    """
    op = as_operator(op)
    check_choice("method", method, ("auto", "exact", "probes"))
    known = exact_diagonal(op) if method != "probes" else None
    if known is not None:
        status = Status(outcome="completed", message="no sampling")
        return Estimate(
            mean=known,
            stderr=torch.zeros_like(known),
            num_products=0,
            method=f"exact, by {structure_note(op)}",
            status=status,
        )
    gap = structure_gap(op) if method != "probes" else ""
    if method == "exact":
        raise ValueError(f"method='exact' needs a structure that knows its diagonal, got {op!r}"
                         + (f": {gap}" if gap else ""))  # fmt: skip
    generator = resolve_generator(generator)
    plan = Sampling(num_probes, rtol, max_probes, block_size, probe)
    running = _Running(torch.zeros(op.shape[0], dtype=torch.float64, device=op.device))
    limit = num_probes if rtol is None else max_probes
    with tracking(progress, "diagonal", limit) as bar:
        while running.count < num_probes or (running.count < limit and not running.status(rtol).ok):
            goal = num_probes if running.count < num_probes else limit
            shape = (op.shape[0], min(plan.width(op), goal - running.count))
            block = probes(
                shape, kind=plan.probe, generator=generator, dtype=op.dtype, device=op.device
            )
            samples = block * op.matmat(block)
            check_samples(samples.T, running.count)
            running.add(samples.double())
            bar.update(running.count)
    return Estimate(
        mean=running.mean.to(op.dtype),
        stderr=running.stderr().to(op.dtype),
        num_products=running.count,
        method="mean of z * (A z)" + (f"; the structure does not know: {gap}" if gap else ""),
        status=running.status(rtol),
        seed=generator.initial_seed(),
    )


class _Running:
    """Mean and squared deviations of columns, merged block by block (Chan, Golub, LeVeque).

    In float64: the square of a float32 number may be out of its range.
    """

    def __init__(self, zeros: Tensor) -> None:
        self.mean, self.deviations, self.count = zeros, zeros.clone(), 0

    def add(self, samples: Tensor) -> None:
        new = samples.shape[1]
        mean = samples.mean(1)
        total = self.count + new
        gap = mean - self.mean
        self.deviations += (samples - mean[:, None]).square_().sum(1)
        self.deviations += gap.square() * (self.count * new / total)
        self.mean = self.mean + gap * (new / total)
        self.count = total

    def stderr(self) -> Tensor:
        return (self.deviations / (self.count - 1) / self.count).sqrt()

    def status(self, rtol: float | None) -> Status:
        if rtol is None:
            return Status(outcome="completed", message=f"{self.count} probes")
        return accuracy(float(self.mean.norm()), float(self.stderr().norm()), rtol)
