"""Spectra of random matrices from 30 Lanczos steps: Spectral Machine Learning, Figures 4.3-4.6."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from ritz import plots
from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress
from ritz.operators import DenseOperator, LinearOperator
from ritz.plots._shared import style
from ritz.rmt import MarchenkoPastur, Semicircle
from ritz.spectra import Density, Spectrum, diagonal, lanczos
from ritz.studies._evidence import Evidence
from ritz.studies._protocol import StudyResult, check_minimums, record, seeded, track
from ritz.testing import network_like, wigner, wishart

NETWORK = "network-like"
# Limits of the spectra for large matrices: Theorems 9 and 10. With q = 2, half of the mass is at 0.
LAWS: dict[str, Density] = {
    "Wigner": Semicircle(),
    "Marchenko-Pastur, q = 1/2": MarchenkoPastur(ratio=0.5),
    "Marchenko-Pastur, q = 2": MarchenkoPastur(ratio=2.0),
}


@record
class Config:
    """The random matrices, and the Lanczos runs on them.

    Attributes:
        size: Order of the Wigner and Marchenko-Pastur matrices.
        network_size: Order of the network-like matrix.
        num_steps: Lanczos steps on the random matrices.
        network_steps: Lanczos steps on the network-like matrix, one panel for each number.
        precision: Precision of the matrices and of their exact eigenvalues.
        seed: Seed of the matrices and of the start vector.
    """

    size: int = 10_000
    network_size: int = 1000
    num_steps: int = 30
    network_steps: tuple[int, ...] = (5, 15, 30)
    precision: Literal["float32", "float64"] = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimums(self, size=4, network_size=100)
        check_count("num_steps", self.num_steps, high=self.size)
        for steps in self.network_steps:
            check_count("network_steps", steps, high=self.network_size)
        check_choice("precision", self.precision, ("float32", "float64"))


@record
class Case:
    """One matrix of order ``n`` and its spectrum in three ways.

    Attributes:
        name: Name of the matrix.
        spectrum: Result of Lanczos.
        exact: All eigenvalues, ascending, ``(n,)``.
        diagonal: The diagonal of the matrix, ``(n,)``.
    """

    name: str
    spectrum: Spectrum
    exact: Tensor
    diagonal: Tensor


@record
class Result(StudyResult[Config]):
    """The cases of all matrices."""

    cases: tuple[Case, ...]

    def __str__(self) -> str:
        lines = [f"{'matrix':34}{'steps':>6}{'exact':>18}{'Ritz values':>18}{'diagonal':>18}"]
        for case in self.cases:
            ranges = (case.exact, case.spectrum.values, case.diagonal)
            text = "".join(f"{f'{float(x.min()):.3f} {float(x.max()):.3f}':>18}" for x in ranges)
            lines.append(f"{case.name:34}{len(case.spectrum.values):>6}{text}")
        return "\n".join(lines)


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return the exact spectrum, the Ritz values and the diagonal of every matrix.

    The exact eigenvalues of three matrices of order 10,000 take minutes on two cores; the Lanczos
    runs take seconds.
    """
    n, generator = config.size, seeded(config.seed)
    # Float32 by default: a matrix of order 10,000 then takes 400 MB.
    common: Any = {"dtype": getattr(torch, config.precision), "generator": generator}
    # Functions, so that only one matrix of order 10,000 is in memory.
    ensembles: dict[str, Callable[[], tuple[LinearOperator, Tensor]]] = {
        "Wigner": lambda: _with_eigenvalues(wigner(n, **common)),
        "Marchenko-Pastur, q = 1/2": lambda: _with_eigenvalues(wishart(n, 2 * n, **common)),
        "Marchenko-Pastur, q = 2": lambda: _with_eigenvalues(wishart(n, n // 2, **common)),
        NETWORK: lambda: network_like(config.network_size, **common),
    }
    cases = []
    for name, draw in track(ensembles.items(), "matrices", progress):
        op, exact = draw()
        # The diagonal as an approximation of the spectrum, as used by diagonal Hessians.
        entries = diagonal(op).mean.clone()
        for steps in config.network_steps if name == NETWORK else (config.num_steps,):
            # The same start vector for every number of steps: panels differ by nothing else.
            spectrum = lanczos(op, num_steps=steps, generator=seeded(config.seed + 1))
            cases.append(Case(name=name, spectrum=spectrum, exact=exact, diagonal=entries))
    return Result(config=config, cases=tuple(cases))


def evidence(result: Result) -> Iterator[Evidence]:
    """Yield the ends of the exact spectra beside those of the Ritz values and of the diagonal."""
    figures = {"Wigner": "Figure 4.3", NETWORK: "Figure 4.6"}
    for case in result.cases:
        widths = [values.max() - values.min() for values in (case.spectrum.values, case.diagonal)]
        ritz, diagonal = (float(width / (case.exact.max() - case.exact.min())) for width in widths)
        steps, near = len(case.spectrum.values), ritz > 0.95
        yield Evidence(
            paper="SPECTRA",
            where=figures.get(case.name, "Figures 4.4, 4.5"),
            what=f"{case.name}, order {len(case.exact):,}, {steps} steps: share of the range",
            published="nearly all; of the diagonal little",
            measured=f"{ritz:.1%}; diagonal {diagonal:.1%}",
            verdict="agrees" if near and diagonal < 0.5 else "differs",
            why="" if near else "the text says that few steps learn both ends of Figure 4.6",
        )


def figure(result: Result) -> style.Figure:
    """Draw the exact histogram, its law, the Lanczos stems and the diagonal of every case."""
    # Two columns, rounded up.
    rows = -(-len(result.cases) // 2)
    drawing, axes = plots.panels(rows, 2, height=2.9)
    for ax, case in zip(axes, result.cases, strict=False):
        # The network-like matrix has no law.
        law = LAWS.get(case.name)
        plots.against_exact(case.spectrum, case.exact, diagonal=case.diagonal, law=law, ax=ax)
        style.set_title(ax, f"{case.name}, {len(case.spectrum.values)} steps")
    for ax in axes[len(result.cases) :]:
        ax.remove()
    style.share_legend(drawing)
    return drawing


def _with_eigenvalues(op: DenseOperator) -> tuple[LinearOperator, Tensor]:
    return op, torch.linalg.eigvalsh(op.matrix)
