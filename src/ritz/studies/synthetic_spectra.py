"""Random matrices from one probe and 30 steps: Spectral Machine Learning, figures 4.3 to 4.6."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress, tracking
from ritz.operators import DenseOperator, LinearOperator
from ritz.spectra import Spectrum, diagonal, lanczos
from ritz.studies._protocol import check_minimums, record, seeded, versions
from ritz.testing import network_like, wigner, wishart

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
class Result:
    """The cases, with the configuration and the versions of the libraries."""

    config: Config
    versions: dict[str, str]
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
    cases: list[Case] = []
    with tracking(progress, "matrices", 4) as bar:
        for name, op, exact, steps in _matrices(config):
            cases += [_case(name, op, exact, num_steps, config.seed) for num_steps in steps]
            bar.update(len({case.name for case in cases}), name)
    return Result(config=config, versions=versions(), cases=tuple(cases))


def figure(result: Result) -> "Figure":
    """Draw the exact histogram, the Lanczos stems and the diagonal of every case."""
    from ritz.plots import against_exact, panels
    from ritz.plots._shared import share_legend

    # Two columns, rounded up.
    rows = -(-len(result.cases) // 2)
    drawing, axes = panels(rows, 2, height=2.9)
    for ax, case in zip(axes, result.cases, strict=False):
        against_exact(case.spectrum, case.exact, diagonal=case.diagonal, ax=ax)
        ax.set_title(f"{case.name}, {len(case.spectrum.values)} steps", loc="left")
    for ax in axes[len(result.cases) :]:
        ax.remove()
    share_legend(drawing)
    return drawing


# A generator, so that only one matrix of order 10,000 is in memory.
def _matrices(config: Config) -> Iterator[tuple[str, LinearOperator, Tensor, tuple[int, ...]]]:
    n, dtype = config.size, getattr(torch, config.precision)
    generator = seeded(config.seed)
    ensembles: dict[str, Callable[[], DenseOperator]] = {
        # Semicircle, and Marchenko-Pastur laws of aspect ratio q = n / samples; with q = 2, half of
        # the mass is at 0.
        "Wigner": lambda: wigner(n, dtype=dtype, generator=generator),
        "Marchenko-Pastur, q = 1/2": lambda: wishart(n, 2 * n, dtype=dtype, generator=generator),
        "Marchenko-Pastur, q = 2": lambda: wishart(n, n // 2, dtype=dtype, generator=generator),
    }
    for name, draw in ensembles.items():
        op = draw()
        yield name, op, torch.linalg.eigvalsh(op.matrix), (config.num_steps,)
    network, exact = network_like(config.network_size, dtype=dtype, generator=generator)
    yield "network-like", network, exact, config.network_steps


# The start vector is the same for every number of steps, so that panels differ by nothing else.
def _case(name: str, op: LinearOperator, exact: Tensor, num_steps: int, seed: int) -> Case:
    spectrum = lanczos(op, num_steps=num_steps, generator=seeded(seed + 1))
    # The diagonal as an approximation of the spectrum, as used by diagonal Hessians.
    return Case(name=name, spectrum=spectrum, exact=exact, diagonal=diagonal(op).mean.clone())
