"""All estimators on a network-like matrix: Spectral Machine Learning, section 4.5.2."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ritz import plots, spectra
from ritz._core.checks import check_count
from ritz._core.progress import Progress
from ritz._core.results import Estimate, format_uncertain, plain_estimate
from ritz.operators import LinearOperator
from ritz.plots._shared import style
from ritz.studies._evidence import Evidence, located
from ritz.studies._protocol import StudyResult, check_minimums, record, seeded
from ritz.testing import network_like

LISTED = 6  # largest values that the table shows
TOLERANCE = 0.1  # of an exact number
ZERO = 0.1  # eigenvalues below it count as zero; the bulk ends at 15
COUNT = f"count |λ| < {ZERO:g}"
# What the section says of quantities. It has no trace and no Frobenius norm.
CLAIMS = {
    "spectral norm": "the largest eigenvalue is learned",
    COUNT: "the degeneracy at zero is learned",
}


@record
class Config:
    """The matrix, and the cost of the estimates.

    Attributes:
        size: Order of the matrix; half of its eigenvalues are zero.
        num_steps: Lanczos steps per probe.
        num_probes: Probes for the density, the trace and the norm.
        width: Standard deviation of the smoothing of the density.
        seed: Seed of the matrix and of every probe.
    """

    size: int = 1000
    num_steps: int = 80
    num_probes: int = 16
    width: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimums(self, size=100, num_probes=2, width=1e-3)
        check_count("num_steps", self.num_steps, low=LISTED, high=self.size)


@record
class Quantity:
    """A number that is known exactly, and its estimate."""

    name: str
    exact: float
    estimate: Estimate


@record
class Result(StudyResult[Config]):
    """Estimates from matrix-vector products alone, and the exact values.

    Attributes:
        exact: All eigenvalues, ascending, ``(n,)``.
        spectrum: Ritz values, weights and residuals from one probe.
        density: Smoothed density, with the error of its probes.
        quantities: Trace, norms and the number of eigenvalues at zero.
    """

    exact: Tensor
    spectrum: spectra.Spectrum
    density: spectra.Density
    quantities: tuple[Quantity, ...]

    def __str__(self) -> str:
        n, steps = self.config.size, len(self.spectrum.values)
        lines = [f"A network-like matrix of order {n}, from {steps} products\n"]
        lines.append(f"{'':12}{'exact':>14}{'Ritz value':>14}{'residual':>12}")
        # The ends converge first; the middle of the spectrum is not listed.
        ends = [(f"largest {k + 1}", -1 - k) for k in range(LISTED)] + [("smallest", 0)]
        for label, k in ends:
            exact, value = float(self.exact[k]), float(self.spectrum.values[k])
            residual = float(self.spectrum.residuals[k])
            lines.append(f"{label:12}{exact:>14.6f}{value:>14.6f}{residual:>12.1e}")
        lines.append(f"\n{'':18}{'exact':>12}  {'estimate':22}{'products':>8}")
        for item in self.quantities:
            estimate = format_uncertain(float(item.estimate), float(item.estimate.stderr))
            products = item.estimate.num_products
            lines.append(f"{item.name:18}{item.exact:>12.5g}  {estimate:22}{products:>8}")
        return "\n".join(lines)


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return the spectrum, density, trace and norms of the matrix, beside the exact ones."""
    # One generator for everything, so that one seed sets it all.
    generator = seeded(config.seed)
    op, exact = network_like(config.size, generator=generator, dtype=torch.float64)
    common: Any = {"num_steps": config.num_steps, "generator": generator, "progress": progress}
    # One probe: each Ritz value has as weight its share in the start vector.
    spectrum = spectra.lanczos(op, **common)
    smooth = spectra.density(op, num_probes=config.num_probes, width=config.width, **common)
    return Result(
        config=config,
        exact=exact,
        spectrum=spectrum,
        density=smooth,
        quantities=_quantities(op, exact, config, generator),
    )


def evidence(result: Result) -> Iterator[Evidence]:
    """Yield the estimates beside the exact numbers."""
    for item in result.quantities:
        estimate, error = float(item.estimate), float(item.estimate.stderr)
        verdict = located(
            estimate, error, item.exact * (1 - TOLERANCE), item.exact * (1 + TOLERANCE)
        )
        known = item.name in CLAIMS
        yield Evidence(
            paper="SPECTRA",
            where="Section 4.5.2",
            what=f"network-like matrix of order {result.config.size:,}: {item.name}",
            published=CLAIMS.get(item.name, "-"),
            measured=f"{plain_estimate(item.estimate)}; exactly {item.exact:.5g}",
            verdict=verdict if known else "extends",
            why=f"tolerance {TOLERANCE:.0%}" if known else "",
        )


def figure(result: Result) -> style.Figure:
    """Draw the stems of one probe, and the density of several over the exact histogram."""
    drawing, (top, bottom) = plots.panels(2, 1, width=8.0, height=3.0)
    plots.against_exact(result.spectrum, result.exact, ax=top)
    style.set_title(top, f"One probe, {len(result.spectrum.values)} products")
    exact = result.exact.numpy()
    bottom.hist(exact, bins=140, density=True, color=style.STYLE.grey, alpha=0.6, label="exact")
    plots.density(result.density, ax=bottom, log=True)
    title = f"{result.config.num_probes} probes, smoothed to a width of {result.config.width:g}"
    style.set_title(bottom, title)
    # Stems and density on the same eigenvalues.
    bottom.sharex(top)
    return drawing


def _quantities(
    op: LinearOperator, exact: Tensor, config: Config, generator: torch.Generator
) -> tuple[Quantity, ...]:
    drawn: dict[str, Any] = {"num_probes": config.num_probes, "generator": generator}
    # #{|lambda| < z} = tr f(A) with the indicator function f.
    at_zero = spectra.trace_function(
        op, lambda x: (x.abs() < ZERO).double(), num_steps=config.num_steps, **drawn
    )
    estimates = {
        # The diagonal of this matrix is known, so auto would sum it: sample nevertheless.
        "trace": (exact.sum(), spectra.trace(op, method="xtrace", **drawn)),
        "Frobenius norm": (exact.norm(), spectra.frobenius_norm(op, **drawn)),
        "spectral norm": (exact.abs().max(), spectra.spectral_norm(op, generator=generator)),
        COUNT: ((exact.abs() < ZERO).sum(), at_zero),
    }
    return tuple(
        Quantity(name=name, exact=float(known), estimate=estimate)
        for name, (known, estimate) in estimates.items()
    )
