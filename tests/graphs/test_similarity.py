"""Distances between spectra against quadrature, and their errors against repeated runs."""

import math

import networkx as nx
import pytest
import torch
from matrices import seeded

import ritz
from ritz import graphs
from ritz.graphs import GraphError
from ritz.graphs._jackknife import bias, leave_out


@pytest.fixture(autouse=True)
def sampling(monkeypatch):
    """Sample moments from 257 vertices on, as large graphs do."""
    monkeypatch.setattr("ritz.graphs._density.SMALL", 256)


MEASURES = ("symmetric_kl", "jensen_shannon", "wasserstein", "heat")


@pytest.fixture(scope="module")
def several():
    return {
        "ring": graphs.watts_strogatz(600, num_neighbors=8, p=0.05, generator=seeded(0)),
        "ring again": graphs.watts_strogatz(500, num_neighbors=8, p=0.05, generator=seeded(1)),
        "random": graphs.erdos_renyi(600, p=8 / 600, generator=seeded(2)),
        "attached": graphs.barabasi_albert(600, num_edges=2, generator=seeded(3)),
    }


@pytest.fixture(scope="module")
def moments(several):
    return {
        name: graphs.moments(graph, num_moments=30, num_probes=32, exact=False, generator=seeded(i))
        for i, (name, graph) in enumerate(several.items())
    }


def by_quadrature(p, q, measure):
    # The points are dense near both ends, where densities may be steep.
    x = 1 - torch.cos(torch.linspace(0, math.pi, 3_001, dtype=torch.float64)[1:-1])
    a, b = p.pdf(x), q.pdf(x)
    if measure == "symmetric_kl":
        return float(torch.trapezoid(0.5 * (a - b) * (a.log() - b.log()), x))
    if measure == "jensen_shannon":
        middle = (0.5 * (a + b)).log()
        return float(torch.trapezoid(0.5 * (a * (a.log() - middle) + b * (b.log() - middle)), x))
    return float(torch.trapezoid((p.cdf(x) - q.cdf(x)).abs(), x))


@pytest.mark.parametrize("measure", ["symmetric_kl", "jensen_shannon", "wasserstein"])
def test_distances_agree_with_quadrature_of_the_densities(moments, measure):
    found = graphs.similarity(moments, measure=measure)
    for i, j in ((0, 1), (0, 2), (2, 3)):
        expected = by_quadrature(found.densities[i], found.densities[j], measure)
        # The error of the trapezoidal rule with 3,000 points
        assert float(found.matrix[i, j]) == pytest.approx(expected, rel=1e-3)


def test_symmetric_kl_agrees_with_the_method_of_the_density(moments):
    found = graphs.similarity(moments)
    one, other = found.densities[0], found.densities[2]
    assert float(found.matrix[0, 2]) == pytest.approx(one.symmetric_kl(other), rel=1e-6)


@pytest.mark.parametrize("measure", MEASURES)
def test_distances_are_symmetric_and_graphs_of_one_model_are_nearest(moments, measure):
    found = graphs.similarity(moments, measure=measure)
    assert str(found).count("between") == 1
    assert torch.equal(found.matrix, found.matrix.T)
    assert torch.equal(found.stderr, found.stderr.T)
    assert float(found.matrix.diagonal().abs().max()) == 0
    off = ~torch.eye(4, dtype=torch.bool)
    assert float(found.matrix[off].min()) > 0
    assert float(found.stderr[off].min()) > 0
    assert float(found.matrix[0, 1]) < float(found.matrix[0, 2:].min())
    if measure != "heat":  # at short times, which show mostly the noise of the probes
        rings = float(found.matrix[0, 1] + 4 * found.stderr[0, 1])
        assert rings < float(found.matrix[0, 2:].min())


@pytest.mark.parametrize("measure", MEASURES)
def test_standard_errors_agree_with_the_scatter_of_repeated_runs(several, measure):
    pair = [several["ring"], several["random"]]
    options = {"measure": measure, "num_moments": 10, "num_probes": 20}
    runs = [graphs.similarity(pair, **options, generator=seeded(100 + s)) for s in range(12)]
    scatter = torch.stack([run.matrix[0, 1] for run in runs]).std()
    stated = torch.stack([run.stderr[0, 1] for run in runs]).mean()
    # The scatter of twelve runs is known to 20 %: a factor of two is four standard errors.
    assert float(scatter) / 2 < float(stated) < 2 * float(scatter)


@pytest.mark.parametrize("measure", MEASURES)
def test_a_graph_has_distance_zero_to_itself_within_the_error(several, measure):
    pair = [several["attached"], several["attached"]]
    for seed in range(4):
        found = graphs.similarity(
            pair, measure=measure, num_moments=40, num_probes=32, generator=seeded(seed)
        )
        # The probes differ: their noise adds to the distance, and the error contains it.
        assert 0 < float(found.matrix[0, 1]) <= 4 * float(found.stderr[0, 1])
        if measure == "symmetric_kl":
            assert float(found.matrix[0, 1]) > 0.5 * float(found.stderr[0, 1])


@pytest.mark.parametrize("measure", ["symmetric_kl", "jensen_shannon"])
def test_the_truncation_covers_the_tolerance_that_few_probes_need(several, measure, monkeypatch):
    pair = [several["random"], several["attached"]]
    options = {"measure": measure, "num_moments": 40}
    found = graphs.similarity(pair, num_probes=8, **options)
    monkeypatch.setattr("ritz.graphs._density.SMALL", 2000)

    exact = graphs.similarity(pair, **options)

    gap = abs(float(found.matrix[0, 1] - exact.matrix[0, 1]))
    error, truncation = float(found.stderr[0, 1]), float(found.truncation[0, 1])
    assert gap < 2.3 * error + truncation
    assert torch.equal(found.truncation, found.truncation.T)
    assert not found.truncation.diagonal().any()
    assert not exact.truncation.any()
    if measure == "symmetric_kl":
        assert gap > 4 * error
        assert f"truncation {truncation:.2g}" in str(found)


def test_a_divergence_of_sampled_moments_has_no_limit(moments):
    found = graphs.similarity(moments)
    off = ~torch.eye(4, dtype=torch.bool)

    assert bool(found.truncation[off].isinf().all())
    assert bool(graphs.similarity(moments, measure="wasserstein").truncation.isfinite().all())


def test_the_jackknife_gives_the_exact_bias_of_a_square():
    samples = torch.randn(50, 1, generator=seeded(0), dtype=torch.float64)
    left = leave_out(samples)
    mean = samples.mean(0)
    # The bias of a squared mean is the variance of the means of the groups over their number.
    groups = samples.reshape(10, 5).mean(1)
    expected = groups.var() / 10
    assert float(bias(left.square(), mean.square())) == pytest.approx(float(expected))


def test_no_negative_zero_is_printed():
    same = nx.karate_club_graph()
    found = graphs.similarity([same, same, nx.path_graph(34)], num_moments=12)
    assert "-0" not in str(found)
    assert float(found.matrix.min()) == 0


def test_jensen_shannon_is_at_most_log_two():
    apart = [graphs.erdos_renyi(100, p=1.0), graphs.watts_strogatz(100, num_neighbors=2, p=0.0)]
    found = graphs.similarity(apart, measure="jensen_shannon", num_moments=20)
    assert 0.3 < float(found.matrix[0, 1]) <= math.log(2)


def test_small_graphs_have_no_sampling_error_and_results_have_their_names():
    found = graphs.similarity(
        {"karate": nx.karate_club_graph(), "misérables": nx.les_miserables_graph()}, num_moments=12
    )
    assert float(found.stderr.max()) == 0
    assert found.names == ("karate", "misérables")
    assert "karate" in str(found)


def test_weights_of_edges_change_the_distance():
    graph = nx.les_miserables_graph()
    plain = nx.Graph(graph.edges())
    found = graphs.similarity([graph, plain, graph], num_moments=12)
    assert float(found.matrix[0, 1]) > 1e-3
    assert float(found.matrix[0, 2]) < 1e-20  # eigenvalues of equal matrices agree to roundoff


def test_all_densities_have_the_same_tolerance(moments):
    found = graphs.similarity(moments)
    for one in found.densities[1:]:
        torch.testing.assert_close(one.ridge, found.densities[0].ridge)


def test_single_precision_is_near_double(several):
    pair = [several["ring"], several["random"]]
    one, two = (
        graphs.similarity(pair, num_moments=20, dtype=dtype, generator=seeded(7)).matrix[0, 1]
        for dtype in (torch.float32, torch.float64)
    )
    assert float(one) == pytest.approx(float(two), rel=1e-3)


def test_heat_trace_agrees_with_the_eigenvalues(several):
    graph = several["attached"]
    times = torch.tensor([0.0, 0.1, 1.0, 5.0, 20.0], dtype=torch.float64)
    values = graphs.eigenvalues(graph)
    exact = torch.exp(-times[:, None] * values).mean(1)
    found = graphs.heat_trace(graph, times=times, num_moments=60, generator=seeded(0))
    bars = 4 * found.stderr + found.truncation
    assert bool(((found.mean - exact).abs() <= bars).all())
    assert float(found.truncation.max()) < 1e-9
    assert float(found.mean[0]) == pytest.approx(1.0)


def test_heat_trace_of_a_small_graph_is_exact_up_to_its_truncation():
    graph = nx.karate_club_graph()
    values = graphs.eigenvalues(graph)
    times = torch.logspace(-2, 2.5, 250, dtype=torch.float64)
    exact = torch.exp(-times[:, None] * values).mean(1)
    found = graphs.heat_trace(graph, times=times, num_moments=10)
    off = (found.mean - exact).abs()
    assert bool((off <= found.truncation).all())  # at short times all of it is roundoff
    assert float(found.truncation[-1]) > 0.1
    assert found.samples is None


def test_a_similarity_is_equal_after_saving_and_loading(moments, tmp_path):
    found = graphs.similarity(moments)
    ritz.save(found, tmp_path / "likeness.safetensors")
    again = ritz.load(tmp_path / "likeness.safetensors")
    assert torch.equal(again.matrix, found.matrix)
    assert str(again) == str(found)


def test_an_invalid_graph_is_named_in_the_error(several, moments):
    with pytest.raises(ValueError, match="graphs must contain at least two graphs, got 1"):
        graphs.similarity([several["ring"]])
    with pytest.raises(
        TypeError, match="graphs must be a list or a dictionary of graphs by name, got Graph"
    ):
        graphs.similarity(several["ring"])
    with pytest.raises(GraphError, match="must have at least one edge"):
        graphs.similarity([several["ring"], graphs.erdos_renyi(5, p=0.0)])
    with pytest.raises(ValueError, match="measure must be one of symmetric_kl"):
        graphs.similarity(moments, measure="euclid")
    with pytest.raises(ValueError, match="the same number of moments, got 30 and 100"):
        graphs.similarity([moments["ring"], several["random"]])


def test_moments_that_are_not_of_a_normalised_laplacian_are_refused(moments):
    other = ritz.moments(torch.eye(4), num_moments=30, interval=(0.0, 3.0))
    with pytest.raises(ValueError, match="graphs must be moments of a normalised Laplacian"):
        graphs.similarity([moments["ring"], other])
    with pytest.raises(ValueError, match="graph must be moments of a normalised Laplacian"):
        graphs.heat_trace(other)


@pytest.mark.parametrize("times", [[-1.0], [[1.0]], [], [math.nan]])
def test_wrong_times_are_refused(moments, times):
    with pytest.raises(ValueError, match="times must be finite numbers"):
        graphs.heat_trace(moments["ring"], times=torch.tensor(times))
