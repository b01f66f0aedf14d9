"""Every result has a plot, and other objects are rejected."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ritz
from ritz import curvature, graphs, measures, optim, plots, training
from ritz._core.results import Estimate, Status

DONE = Status(outcome="completed", message="made for a test")


def symmetric(n=40):
    noise = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (noise + noise.T) / math.sqrt(2 * n)


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    return ritz.Risk(model, cross_entropy, (torch.randn(12, 4), torch.arange(12) % 3), batch_size=6)


def number(mean=2.0, samples=(1.0, 2.0, 3.0)):
    found = torch.tensor(samples, dtype=torch.float64)
    return Estimate(mean=torch.tensor(mean), stderr=found.std() / math.sqrt(len(found)),
                    truncation=torch.tensor(0.0), degrees=len(found) - 1,
                    samples=found, num_products=3, method="made", status=DONE)  # fmt: skip


def trained():
    model = nn.Linear(4, 3)
    data = (torch.randn(12, 4), torch.arange(12) % 3)
    return training.fit(model, data, num_epochs=3, batch_size=6, test=data)


def small_sweep(grid, seeds=2):
    def model():
        return nn.Linear(3, 2)

    x = torch.arange(24.0).view(8, 3) / 24
    return training.sweep(model, (x, (x[:, 0] > 0.5).long()), grid, seeds=seeds, num_epochs=1)


def ring():
    return graphs.watts_strogatz(60, num_neighbors=4, p=0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """Stands for the fit of one model, whose class is not public."""

    model: str
    values: torch.Tensor
    divergences: torch.Tensor
    parameters: dict
    interval: dict
    typical: float = 0.02


def made_fit():
    def model(name, values, divergences, **parameters):
        return ModelFit(model=name, values=torch.tensor(values), parameters=parameters,
                        divergences=torch.tensor(divergences),
                        interval=dict.fromkeys(parameters, (0.0, 1.0)))  # fmt: skip

    fits = (model("erdos_renyi", [0.1, 0.2, 0.3], [1.0, 0.01, 0.5], p=0.2),
            model("configuration_model", [0.0], [0.1]))  # fmt: skip
    moments = ritz.moments(symmetric(), num_moments=4)
    return graphs.Fit(fits=fits, num_nodes=60, density=ritz.maxent(moments), seed=0)


def made_count(**more):
    return graphs.ClusterCount(count=5, stderr=0.0, threshold=0.2, gap=(0.1, 0.4), estimate=5.2,
                               estimate_stderr=0.3, found=5, missed=0.0, num_nodes=300,
                               num_components=1, method="krylov", num_products=9, status=DONE,
                               seed=0, **more)  # fmt: skip


def hessian_spectra():
    return ritz.spectra.lanczos_block(ritz.hessian(network()), num_steps=6, num_probes=3)


def degeneracy():
    return measures.rank_degeneracy(hessian_spectra(), matrix="hessian")


# How to make each result, and what its figure shows: number of axes, label of the first horizontal
# axis, and its title.
SHARE = "fraction of eigenvalues near 0"
RESULTS = {
    "spectrum": (lambda: ritz.lanczos(ritz.hessian(network()), num_steps=6),
                 (1, r"Ritz value $\theta$", "Hessian, batch norm eval")),
    "spectra": (lambda: dict(zip("abc", hessian_spectra(), strict=True)), (3, "", "a")),
    "spectra of probes": (hessian_spectra, (3, "", "probe 1")),
    "eigenpairs": (lambda: ritz.eigenpairs(ritz.ggn(network()), largest=2),
                   (1, "rank, from the largest", "Gauss-Newton, batch norm eval")),
    "discrete density": (lambda: ritz.density(symmetric()), (1, r"eigenvalue $\lambda$", "")),
    "smoothed density": (lambda: ritz.density(symmetric(), width=0.1),
                         (1, r"eigenvalue $\lambda$", "")),
    "polynomial density": (lambda: ritz.density(symmetric(), method="kpm", num_steps=10),
                           (1, r"eigenvalue $\lambda$", "")),
    "entropic density": (lambda: ritz.maxent(ritz.moments(symmetric(), num_moments=6)),
                         (1, r"eigenvalue $\lambda$", "")),
    "density of a graph": (lambda: graphs.density(ring()),
                           (1, r"eigenvalue $\lambda$", "Normalised Laplacian")),
    "densities": (lambda: {"a": ritz.density(symmetric()), "b": graphs.density(ring())},
                  (1, r"eigenvalue $\lambda$", "")),
    "number": (lambda: ritz.trace(symmetric(), method="hutchinson", num_probes=5),
               (1, "sample", None)),
    "array": (lambda: ritz.diagonal(symmetric(50) @ symmetric(50)),
              (1, "rank, from the largest", "50 entries, exact, by structure")),
    "numbers": (lambda: {"trace": number(), "norm": number(3.0)}, (1, "mean ± 2 stderr", "")),
    "moments": (lambda: ritz.moments(symmetric(), num_moments=5), (1, "degree", None)),
    "solution": (lambda: ritz.solve(torch.diag(torch.arange(1.0, 9)), torch.ones(8)),
                 (1, "step", None)),
    "solutions of many systems": (
        lambda: ritz.solve(torch.diag(torch.arange(1.0, 9)), torch.randn(8, 9)), (1, "step", None)),
    "sharpness": (lambda: ritz.sharpness(network(), num_steps=5, num_probes=2),
                  (5, "", "spectral norm")),
    "degeneracy": (degeneracy, (1, r"mean eigenvalue near 0, $\lambda$", "Hessian")),
    "degeneracies by epoch": (lambda: {1: degeneracy(), 2: degeneracy()}, (1, "epoch", "")),
    "degeneracies by name and epoch": (lambda: {"Hessian": {1: degeneracy()}}, (1, "epoch", "")),
    "landscape": (lambda: ritz.landscape(network(), {"largest": torch.ones(53)}, num_points=5),
                  (2, "step $t$ along the direction",
                   "Ritz vector of the largest value\nbatch norm eval")),
    "landscape in two dimensions": (
        lambda: measures.landscape2d(network(), torch.ones(53), torch.arange(53.0), num_points=5),
        (1, "step along first", "batch norm eval")),
    "temperature": (lambda: measures.temperature(network()), (2, "confidence", None)),
    "reliability": (lambda: measures.temperature(network()).before, (1, "confidence", None)),
    "shrinkage": (lambda: measures.shrinkage(network(), batch_sizes=(2, 4), num_probes=4),
                  (1, "batch size $B$ (samples)", "Hessian")),
    "prediction of batches": (
        lambda: measures.batch_prediction(network(), batch_sizes=(2, 4), num_vectors=3),
        (2, "batch size $B$ (samples)", "Hessian")),
    "edge of the bulk": (
        lambda: measures.bulk_edge(ritz.lanczos(symmetric(), num_steps=12), variance=1.0,
                                   batch_size=1), (1, r"Ritz value $\theta$", "")),
    "overlap of the gradient": (
        lambda: measures.gradient_overlap(
            network(), ritz.eigenpairs(ritz.hessian(network()), largest=3)),
        (1, "rank of the eigenvalue", None)),
    "advice": (lambda: measures.advise(network(), batch_sizes=(4, 12)),
               (2, "batch size $B$ (samples)", "Hessian of mini-batches")),
    "advice for Adam": (
        lambda: measures.advise(network(), batch_sizes=(4, 12), optimizer="adam", known=(4, 0.1)),
        (3, "batch size $B$ (samples)", None)),
    "sweep": (lambda: small_sweep({"lr": [0.01, 0.1], "optimizer": ["sgd", "adam"]}),
              (2, "learning rate", "2 runs (dots) and their mean")),
    "sweep of words": (lambda: small_sweep({"optimizer": ["sgd", "adam"]}), (2, "optimizer", None)),
    "sweep of one seed": (lambda: small_sweep({"lr": [0.01, 0.1]}, 1), (2, "learning rate", "")),
    "sweep of one run": (lambda: small_sweep({}, 1), (2, "1 run", "")),
    "sweep of seeds": (lambda: small_sweep({}), (2, "2 runs", None)),
    "norms of layers": (lambda: optim.weight_norms(nn.Linear(3, 2)), (1, "norm", "")),
    "distances of layers": (lambda: curvature.distance(network(), torch.zeros(53)),
                            (1, "distance", "")),
    "gradients of layers": (lambda: curvature.gradient_statistics(network()),
                            (1, "squared gradient", "")),
    "diversity": (lambda: optim.solution_diversity([torch.randn(9, 3) for _ in range(3)]),
                  (6, "solution", None)),
    "training": (trained, (2, "epoch", "")),
    "trainings": (lambda: {"a": trained(), "b": trained()}, (2, "epoch", "")),
    "log": (lambda: [{"kind": "epoch", "epoch": n, "train_loss": 1 / n} for n in (1, 2, 3)],
            (1, "epoch", "")),
    "similarity": (lambda: graphs.similarity({"a": ring(), "b": ring()}, num_moments=8),
                   (2, "", "")),
    "cluster count": (made_count, (1, r"eigenvalue $\lambda$", "gap 0.1 to 0.4")),
    "fit": (made_fit, (2, "edge probability $p$", "Erdős-Rényi")),
    "model of a fit": (lambda: made_fit().fits[0], (1, "edge probability $p$", "Erdős-Rényi")),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_has_a_plot(name, tmp_path):
    make, (count, label, title) = RESULTS[name]
    figure = plots.plot(make())
    path = plots.save_figure(figure, tmp_path / "plot.png")
    assert path.stat().st_size > 5000
    assert len(figure.axes) == count
    first = figure.axes[0]
    assert first.get_xlabel() == label
    if title is not None:
        assert first.get_title("left") == title
    drawn = [*first.lines, *first.collections, *first.images, *first.containers]
    assert drawn


def test_a_full_disk_is_an_error_that_names_the_figure(tmp_path, monkeypatch):
    figure = plots.plot(ritz.lanczos(symmetric(), num_steps=3))

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure, "savefig", full)
    with pytest.raises(OSError, match=r"cannot write .*plot\.png: No space left on device$"):
        plots.save_figure(figure, tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())


def test_titles_of_a_landscape_stay_within_the_figure():
    names = ("largest", "smallest", "smallest magnitude")
    directions = {name: torch.ones(53) for name in names}
    figure = plots.plot(ritz.landscape(network(), directions, num_points=3))
    figure.draw_without_rendering()

    for ax in figure.axes:
        assert ax._left_title.get_window_extent().x1 <= figure.bbox.x1


@pytest.mark.parametrize(
    ("result", "name"),
    [(3, "int"), (torch.eye(2), "Tensor"), (ritz.bounds(torch.eye(2)), "Bounds"),
     (DONE, "Status"), (measures.rank_bound(network()), "RankBound"),
     (curvature.summary(network()), "Summary"), ({"a": 3, "b": 4}, "int")],
)  # fmt: skip
def test_a_result_without_a_plot_is_rejected(result, name):
    with pytest.raises(TypeError, match=rf"(got|class) {name}"):
        plots.plot(result)


def test_results_of_different_kinds_are_not_drawn_together():
    spectrum = ritz.lanczos(symmetric(), num_steps=5)
    with pytest.raises(TypeError, match="but 'b' is a Estimate and the first a Spectrum"):
        plots.plot({"a": spectrum, "b": number()})
    with pytest.raises(
        TypeError, match="results of class Temperature cannot be drawn in one figure"
    ):
        plots.plot(dict.fromkeys("ab", measures.temperature(network())))
    with pytest.raises(ValueError, match="result must contain at least one entry, got none"):
        plots.plot({})
    assert len(plots.plot({"only": spectrum}).axes) == 1


def test_a_user_defined_class_can_be_registered():
    class Own:
        pass

    figure, _ = plots.panels()
    plots.plot.register(Own, lambda result: figure)
    assert plots.plot(Own()) is figure


def test_an_exact_number_has_no_plot():
    with pytest.raises(ValueError, match="an Estimate without samples has no plot, print it"):
        plots.plot(ritz.trace(symmetric(), method="exact"))


def test_a_long_diagonal_is_thinned_and_keeps_both_ends():
    mean = torch.linspace(-1, 1, 50_000, dtype=torch.float64)
    found = Estimate(
        mean=mean,
        stderr=0.1 + 0 * mean,
        truncation=0 * mean,
        num_products=9,
        method="a " * 99,
        status=DONE,
    )
    (ax,) = plots.plot(found).axes
    x, y = ax.lines[0].get_data()
    assert len(x) <= 2000
    assert (x[0], x[-1]) == (1, 50_000)
    assert (y[0], y[-1]) == (1, -1)
    assert len(ax.collections) == 1  # the band
    assert max(map(len, ax.get_title("left").splitlines())) <= 70


def test_samples_of_a_frobenius_norm_are_drawn_as_roots():
    (ax,) = plots.plot(ritz.frobenius_norm(symmetric(), num_probes=20)).axes
    mean, samples = ax.lines
    low, high = samples.get_ydata().min(), samples.get_ydata().max()
    assert low < mean.get_ydata()[0] < high


def test_eigenpairs_are_ranked_from_both_ends_with_residuals_as_bars():
    found = ritz.eigenpairs(symmetric(), largest=2, smallest=2)
    (ax,) = plots.plot(found).axes
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "$n-1$", "$n$"]
    assert ax.get_xticks().tolist() == [1, 2, 4, 5]  # a gap between both ends
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["eigenvalue < 0", "eigenvalue ≥ 0"]
    bars = [line for box in ax.containers for line in box.lines[0].get_ydata()]
    assert sorted(bars) == found.values.tolist()
    every = ritz.eigenpairs(symmetric(4), largest=2, smallest=2)
    (ax,) = plots.plot(every).axes
    assert ax.get_xticks().tolist() == [1, 2, 3, 4]


def test_a_single_sample_has_no_error_band(tmp_path):
    (ax,) = plots.plot(ritz.trace(symmetric(), method="hutchinson", num_probes=2)).axes
    assert legend(ax) == ["mean ± 2 stderr", "sample"]
    one = Estimate(mean=torch.tensor(2.0), stderr=torch.tensor(math.nan),
                   truncation=torch.tensor(0.0), num_products=1,
                   samples=torch.tensor([2.0]), method="made", status=DONE)  # fmt: skip
    figure = plots.plot(one)
    plots.save_figure(figure, tmp_path / "one.png")
    assert legend(figure.axes[0]) == ["mean", "sample"]


def test_moments_are_drawn_from_degree_one():
    found = ritz.moments(symmetric(), num_moments=5)
    (ax,) = plots.plot(found).axes
    (points,) = ax.containers
    assert points.lines[0].get_xdata().tolist() == [1, 2, 3, 4, 5]
    assert points.lines[0].get_ydata().tolist() == found.mean[1:].tolist()


def test_a_training_result_is_drawn_like_its_log():
    result = trained()
    (loss, accuracy) = plots.plot(result).axes
    assert loss.lines[0].get_ydata().tolist() == result.history["train_loss"].tolist()
    assert len(accuracy.lines) == 2


def test_a_failed_cluster_count_shows_the_reason():
    none = graphs.ClusterCount(count=None, reason="no gap", num_nodes=9, num_components=1,
                               method="krylov", num_products=1, status=DONE, seed=0)  # fmt: skip
    (ax,) = plots.plot(none).axes
    assert ax.get_title("left") == "no gap"
    assert not ax.lines


def test_a_cluster_count_is_drawn_as_the_number_of_eigenvalues_below_each_point():
    blocks = graphs.cluster_graph([30] * 9, degree=12, num_links=18)
    (ax,) = plots.plot(graphs.count_clusters(blocks)).axes
    curve, count = ax.lines
    x, below = curve.get_data()
    values = graphs.eigenvalues(blocks).numpy()
    # The nine small eigenvalues lie left of the gap, which is shaded.
    assert below[abs(x - 0.2).argmin()] == pytest.approx(9)
    assert below[-1] == pytest.approx((values <= 1).sum())
    assert set(count.get_ydata()) == {9}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "eigenvalues below", "9 clusters", "gap"]  # fmt: skip


# ------------------------------------------------------------------------------------------
# Functions that draw on given axes.


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_a_discrete_density_is_smoothed_and_the_legend_states_the_width():
    found = ritz.density(symmetric())
    width = f"smoothed by {found.smoothed().width:.2g}"
    ax = plots.density(found)
    assert legend(ax) == [f"mean, 95 % interval, {width}"]
    smooth = plots.density(found.smoothed())
    assert ax.lines[0].get_ydata().tolist() == smooth.lines[0].get_ydata().tolist()
    assert legend(plots.density(found, label="mine")) == [f"mine, {width}"]
    assert legend(plots.density(found, cumulative=True)) == ["mean, 95 % interval"]


def test_a_spectrum_is_drawn_as_the_density_of_one_probe():
    found = ritz.lanczos(symmetric(), num_steps=20)
    ax = plots.density(found)
    assert legend(ax)[0].startswith("one probe, smoothed by ")
    assert not ax.collections  # one probe has no band
    x, y = (torch.as_tensor(part) for part in ax.lines[0].get_data())
    assert float(torch.trapezoid(y, x)) == pytest.approx(1.0, abs=1e-3)
    assert legend(plots.density(found, cumulative=True)) == ["one probe"]


def test_an_entropic_density_has_no_band():
    ax = plots.density(ritz.maxent(ritz.moments(symmetric(), num_moments=6)))
    assert legend(ax) == ["maximum entropy, 6 moments"]
    assert not ax.collections


def test_densities_on_the_same_axes_have_different_colours():
    ax = plots.density(ritz.density(symmetric()), label="a")
    plots.density(graphs.density(ring()), label="b", ax=ax)
    assert len({line.get_color() for line in ax.lines}) == 2


def test_over_histogram_smooths_discrete_densities_and_spectra():
    matrix = symmetric()
    exact = torch.linalg.eigvalsh(matrix)
    for found in (ritz.density(matrix), ritz.lanczos(matrix, num_steps=20)):
        assert "density, smoothed by" in legend(plots.over_histogram(found, exact))[1]


@pytest.mark.parametrize(
    ("draw", "make", "message"),
    [
        (plots.spectrum, lambda: ritz.eigenpairs(symmetric(), largest=1),
         "spectrum must be a Spectrum, got Eigenpairs; plots.plot draws it"),
        (plots.spectrum, lambda: ritz.density(symmetric()),
         "spectrum must be a Spectrum, got DiscreteDensity; plots.plot draws it"),
        (plots.spectrum, lambda: [1.0], "spectrum must be a Spectrum, got list$"),
        (plots.density, lambda: ritz.eigenpairs(symmetric(), largest=1),
         "density must be a density or a Spectrum, got Eigenpairs; plots.plot draws it"),
        (plots.density, lambda: torch.ones(3),
         "density must be a density or a Spectrum, got Tensor$"),
        (plots.landscape, lambda: ritz.lanczos(symmetric(), num_steps=3),
         "landscape must be a Landscape, got Spectrum; plots.plot draws it"),
        (plots.landscape2d, number, "must be a Landscape2d, got Estimate; plots.plot draws it"),
        (plots.similarity, number, "must be a Similarity, got Estimate; plots.plot draws it"),
        (plots.spectra, lambda: ritz.lanczos(symmetric(), num_steps=3),
         "spectra must be a mapping of titles to spectra, got Spectrum"),
        (plots.spectra, lambda: {"a": number()}, r"spectra\['a'\] must be a Spectrum"),
        (lambda found: plots.against_exact(found, torch.ones(3)), number,
         "spectrum must be a Spectrum, got Estimate"),
        (lambda found: plots.over_histogram(found, torch.ones(3)), number,
         "density must be a density or a Spectrum, got Estimate"),
    ],
)  # fmt: skip
def test_a_result_of_the_wrong_class_is_rejected(draw, make, message):
    with pytest.raises(TypeError, match=message):
        draw(make())
