"""Spectra of trained networks beside diagonals: Spectral Machine Learning, Figures 4.7 and 4.8.

A network is trained by SGD with a linear schedule, as in section 4.6. The spectra of the Hessian
and of the Gauss-Newton matrix of its training loss come from 100 Lanczos steps. They are compared
with the diagonal of the Gauss-Newton matrix, which is often used in place of the spectrum: with the
Monte-Carlo estimate of the paper, from one drawn label per sample, and with the exact diagonal. The
spectrum of the Hessian is also computed from a second random vector.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ritz import data, plots
from ritz._core.checks import check_count
from ritz._core.progress import Progress
from ritz.curvature import Risk, fisher, ggn, hessian
from ritz.plots._shared import style
from ritz.spectra import Spectrum, diagonal, lanczos
from ritz.studies._evidence import Evidence, all_of, judge, near, spread
from ritz.studies._protocol import (
    StatePath,
    StudyResult,
    check_minimums,
    column,
    compute_cells,
    record,
    seeded,
)
from ritz.studies._training import fit_whole, new_network

# What is recorded of every run. A share is one of eigenvalues, or of entries of a diagonal.
MEASURES = (
    "test accuracy",
    "largest, Hessian",
    "largest, second vector",
    "smallest, Hessian",
    "smallest, second vector",
    "largest, GGN",
    "largest entry, Monte Carlo",
    "largest entry, exact",
    "share above, Hessian",
    "share above, GGN",
    "share above, Monte Carlo",
    "share above, exact",
    "negative mass",
    "negative mass without one value",
    "distance of the vectors",
)
ABOVE = 0.01  # "above" means above this fraction of the largest eigenvalue of the matrix
BINS = 60  # of the histograms of diagonals
# VGG-16 on CIFAR-100, section 4.6.
PUBLISHED = {"largest": (6.8885, 6.8891), "smallest": (-0.0455, -0.0456), "negative": (0.37, 5e-4)}


@record
class Config:
    """Network, data and measurement.

    Attributes:
        model: Name of the network.
        dataset: Name of the data set.
        num_train: Training images; ``None`` is all of them.
        num_epochs: Epochs.
        lr: Initial learning rate.
        weight_decay: Weight decay.
        measured: Training images of which the matrices are.
        num_steps: Lanczos steps.
        num_seeds: Networks.
        device: Device.
        seed: Network ``i`` has the seed ``seed + i``.
        data: Folder of the data set. Defaults to the environment variable ``RITZ_DATA``.
    """

    model: str = "lenet"
    dataset: str = "mnist"
    num_train: int | None = 10_000
    num_epochs: int = 10
    lr: float = 0.05
    weight_decay: float = 5e-4
    measured: int = 600
    num_steps: int = 100
    num_seeds: int = 3
    device: str = "cpu"
    seed: int = 0
    data: str | None = None

    def __post_init__(self) -> None:
        check_minimums(self, num_epochs=1, measured=10, num_steps=3, num_seeds=1, seed=0, lr=0.0)
        if self.num_train is not None:
            check_count("num_train", self.num_train, low=self.measured)


SIZES = {
    "smoke": Config(
        model="mlp", dataset="digits", num_train=500, num_epochs=2, measured=100, num_steps=20,
        num_seeds=2,
    ),
    "paper": Config(
        model="vgg16", dataset="cifar100", num_train=None, num_epochs=300, measured=50_000,
        device="cuda",
    ),
}  # fmt: skip


@record
class Cell:
    """One trained network; see :class:`Result`."""

    measures: Tensor
    spectra: dict[str, Spectrum]
    histograms: dict[str, Tensor]
    edges: Tensor


@record
class Result(StudyResult[Config]):
    """What is recorded of all networks, and the pictures of the first.

    Attributes:
        measures: ``(measures, num_seeds)`` in the order of ``MEASURES``.
        spectra: Spectra of the first network: ``Hessian``, ``second vector`` and ``GGN``.
        histograms: Shares of the entries of the diagonal of its Gauss-Newton matrix by bin,
            ``Monte Carlo`` and ``exact``.
        edges: Edges of the bins, from the smallest to the largest Ritz value or entry.
        size: Number of parameters.
    """

    measures: Tensor
    spectra: dict[str, Spectrum]
    histograms: dict[str, Tensor]
    edges: Tensor
    size: int

    def measure(self, name: str) -> Tensor:
        """Return a measure by seed."""
        return self.measures[MEASURES.index(name)]

    def __str__(self) -> str:
        c = self.config
        lines = [
            f"{c.model} on {c.dataset}, {self.size:,} parameters, {c.num_epochs} epochs, matrices "
            f"of {c.measured:,} images, {c.num_steps} Lanczos steps; mean over {c.num_seeds} seeds "
            "± standard error"
        ]
        lines += [f"  {name:34}{spread(self.measure(name)):>22}" for name in MEASURES]
        lines.append(f"above: {ABOVE:g} of the largest eigenvalue of the same matrix")
        return "\n".join(lines)


def run(config: Config, *, progress: bool | Progress = False, state: StatePath = None) -> Result:
    """Return spectra and diagonals of all networks."""
    seeds = {str(seed): seed for seed in range(config.seed, config.seed + config.num_seeds)}
    cells = compute_cells(
        lambda seed: _measure(config, seed), seeds, "networks", config=config, state=state,
        progress=progress,
    )  # fmt: skip
    # Pictures are those of the first network, numbers those of all.
    first, *_ = networks = list(cells.values())
    return Result(
        config=config,
        measures=torch.stack([cell.measures for cell in networks], 1),
        spectra=first.spectra,
        histograms=first.histograms,
        edges=first.edges,
        size=first.spectra["GGN"].dimension,
    )


def figure(result: Result) -> style.Figure:
    """Draw the spectra over the histogram of the diagonal, and those of two random vectors."""
    drawing, axes = plots.panels(2, 2, width=5.4, height=3.0)
    names = ("GGN", "Hessian", "Hessian", "second vector")
    titles = ("Gauss-Newton, over a diagonal", "Hessian, over the same diagonal",
              "Hessian, first random vector", "Hessian, second random vector")  # fmt: skip
    low, high = float(result.edges[0]), float(result.edges[-1])
    # So that a bar at the end of the range is not cut by the frame.
    margin = 0.03 * (high - low)
    # Below a tenth of one eigenvalue a weight is chance.
    floor = 0.1 / result.size
    for place, (ax, name, title) in enumerate(zip(axes, names, titles, strict=True)):
        plots.spectrum(result.spectra[name], ax=ax)
        if place < 2:
            ax.stairs(
                result.histograms["Monte Carlo"], result.edges, fill=True, alpha=0.6, zorder=0,
                baseline=floor, color=style.STYLE.orange, label="diagonal of the GGN, Monte Carlo",
            )  # fmt: skip
        ax.set_xlim(low - margin, high + margin)
        ax.set_ylim(floor, 2)
        style.set_title(ax, title)
    style.share_legend(drawing)
    return drawing


def evidence(result: Result) -> list[Evidence]:
    """Return what the two figures show beside what was found."""
    top, ggn_top = result.measure("largest, Hessian"), result.measure("largest, GGN")
    drawn = result.measure("largest entry, Monte Carlo")
    # The exact diagonal tells the noise of drawn labels from the error of any diagonal.
    shares = {
        kind: result.measure(f"share above, {kind}") / result.measure("share above, GGN")
        for kind in ("Monte Carlo", "exact")
    }
    mass = [result.measure(name) for name in ("negative mass", "negative mass without one value")]
    # Extreme Ritz values converge first, so two start vectors should agree about them.
    gaps = [
        (result.measure(f"{end}, second vector") / result.measure(f"{end}, Hessian") - 1).abs()
        for end in ("largest", "smallest")
    ]
    rows = [
        ("Figure 4.7", "largest eigenvalue of the Gauss-Newton matrix over that of the Hessian",
         "about 1", spread(ggn_top / top), near(ggn_top / top, 1.0, 0.1)),
        ("Figure 4.7", "largest entry of the diagonal over the largest eigenvalue (GGN)",
         "below 1", spread(drawn / ggn_top),
         judge(drawn / ggn_top, high=1.0)),
        ("Figure 4.7", f"share above {ABOVE:g} of the largest eigenvalue: diagonal over spectrum",
         "far above 1: spurious outliers",
         f"{spread(shares['Monte Carlo'])}; exact diagonal {spread(shares['exact'])}",
         judge(shares["Monte Carlo"], low=1.0)),
        ("Section 4.6.1", "negative mass of the Hessian", "0.37", spread(mass[0]),
         near(mass[0], 0.37, 0.1)),
        ("Section 4.6.1", "negative mass of the Hessian without its heaviest Ritz value",
         "0.0005", spread(mass[1]), judge(mass[1], high=0.005, note="tolerance a factor of 10")),
        ("Figure 4.8", "largest and smallest eigenvalue from two random vectors: relative change",
         "0.0001, 0.002", ", ".join(f"{float(gap.max()):.1g}" for gap in gaps),
         all_of(*(judge(gap, high=0.01) for gap in gaps))),
        ("Figure 4.8", "the same: distance of the distribution functions", "same picture",
         spread(result.measure("distance of the vectors")),
         judge(result.measure("distance of the vectors"), high=0.02)),
    ]  # fmt: skip
    return [
        Evidence(
            paper="SPECTRA", where=where, what=what, published=published,
            measured=measured, **known,
        )
        for where, what, published, measured, known in rows
    ]  # fmt: skip


def setting(result: Result) -> str:
    """Return the network and data."""
    c = result.config
    return f"{c.model} on {c.dataset}, {c.num_seeds} seeds."


# ------------------------------------------------------------------------------------------
# One network.


def _measure(config: Config, seed: int) -> Cell:
    """Train a network and return its measures and spectra."""
    images: Any = data.load(config.dataset, data_dir=config.data, device=config.device)
    train = images.train if config.num_train is None else images.train.take(config.num_train)
    model = new_network(config.model, images, seed, config.device)
    settings = {"lr": config.lr, "momentum": 0.9, "weight_decay": config.weight_decay}
    result = fit_whole(
        model, train, test=images.test, num_epochs=config.num_epochs, schedule="linear", seed=seed,
        optimizer_settings=settings, evaluate_every=config.num_epochs,
    )  # fmt: skip
    # The matrices are those of a part of the training images.
    some = train.take(config.measured).tensors()
    # In eval mode the samples of a batch do not depend on each other.
    risk = Risk(model.eval(), cross_entropy, some, batch_size=500)
    steps = config.num_steps
    spectra = {
        "Hessian": lanczos(hessian(risk), num_steps=steps, generator=seeded(seed)),
        # Only the start vector differs from the run above.
        "second vector": lanczos(hessian(risk), num_steps=steps, generator=seeded(seed + 1000)),
        "GGN": lanczos(ggn(risk), num_steps=steps, generator=seeded(seed)),
    }
    diagonals = {
        # One drawn label per sample, as in the library that the paper used.
        "Monte Carlo": diagonal(fisher(risk, kind="monte_carlo", generator=seeded(seed))).mean,
        "exact": diagonal(ggn(risk)).mean,
    }
    diagonals = {name: one.double().cpu() for name, one in diagonals.items()}
    # One set of bins for all that is drawn together.
    values = torch.cat([*(one.values.double().cpu() for one in spectra.values()),
                        *diagonals.values()])  # fmt: skip
    edges = torch.linspace(float(values.min()), float(values.max()), BINS + 1, dtype=torch.float64)
    return Cell(
        measures=_numbers(result.metrics["test_accuracy"], spectra, diagonals),
        spectra=spectra,
        histograms={name: _shares(one, edges) for name, one in diagonals.items()},
        edges=edges,
    )


def _numbers(accuracy: float, spectra: dict[str, Spectrum], diagonals: dict[str, Tensor]) -> Tensor:
    """Return the numbers of ``MEASURES``."""
    full, other, gauss_newton = (spectra[name] for name in ("Hessian", "second vector", "GGN"))
    drawn, exact = diagonals["Monte Carlo"], diagonals["exact"]
    top = float(gauss_newton.values[-1])
    # Weights are shares of eigenvalues: the negative mass is the sum of their weights.
    negative = torch.where(full.values < 0, full.weights, 0.0)
    return column(
        [
            accuracy,
            *(float(one.values[place]) for place in (-1, 0) for one in (full, other)),
            top,
            float(drawn.max()),
            float(exact.max()),
            *(float(one.weights[one.values > ABOVE * one.values[-1]].sum())
              for one in (full, gauss_newton)),
            *(float((one > ABOVE * top).double().mean()) for one in (drawn, exact)),
            float(negative.sum()),
            float(negative.sum() - negative.max()),
            _distance(full, other),
        ]
    )  # fmt: skip


def _distance(first: Spectrum, second: Spectrum) -> float:
    """Return the largest distance between two distribution functions away from zero.

    The Ritz values near zero move by little, but with nearly all of the weight. So the mass below
    and above an interval around zero, from which on values differ in a picture, is compared.
    """
    points = torch.cat([first.values, second.values])
    # Only where values can be told apart from zero in a picture.
    points = points[points.abs() > ABOVE * points.abs().max()]
    if not len(points):
        return 0.0

    def tails(one: Spectrum) -> Tensor:
        below = (one.values[None] <= points[:, None]) & (points[:, None] < 0)
        above = (one.values[None] >= points[:, None]) & (points[:, None] > 0)
        return (below | above).to(one.weights.dtype) @ one.weights

    return float((tails(first) - tails(second)).abs().max())


def _shares(values: Tensor, edges: Tensor) -> Tensor:
    places = torch.bucketize(values, edges[1:-1])
    return torch.bincount(places, minlength=BINS).double() / len(values)
