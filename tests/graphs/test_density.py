"""Entropic spectra of graphs against exact eigenvalues."""

import math

import networkx as nx
import pytest
import torch
from matrices import seeded
from networkx.linalg.spectrum import normalized_laplacian_spectrum

from ritz import graphs
from ritz.graphs import GraphError


@pytest.fixture(autouse=True)
def sampling(monkeypatch):
    """Sample moments from 257 vertices on, as large graphs do."""
    monkeypatch.setattr("ritz.graphs._density.SMALL", 256)


@pytest.fixture(scope="module")
def ring():
    return graphs.watts_strogatz(400, num_neighbors=6, p=0.2, generator=seeded(3))


@pytest.fixture(scope="module")
def ring_values(ring):
    return torch.from_numpy(
        normalized_laplacian_spectrum(nx.from_scipy_sparse_array(ring.to_scipy())).real
    )


def exact_moments(values, count):
    angles = torch.arccos((values - 1).clamp(-1, 1))
    return torch.stack([torch.cos(k * angles).mean() for k in range(count + 1)])


def test_eigenvalues_are_those_of_networkx(ring, ring_values):
    torch.testing.assert_close(
        graphs.eigenvalues(ring), ring_values.sort().values, atol=1e-10, rtol=0
    )


def test_eigenvalues_of_a_weighted_graph_are_those_of_networkx():
    graph = nx.les_miserables_graph()
    found = graphs.eigenvalues(graph)
    expected = torch.from_numpy(normalized_laplacian_spectrum(graph).real).sort().values
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    plain = graphs.eigenvalues(graph, matrix="laplacian")
    torch.testing.assert_close(
        plain, torch.from_numpy(nx.laplacian_spectrum(graph).real).sort().values, atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sampled_moments_lie_within_four_standard_errors(ring, ring_values, dtype):
    found = graphs.moments(ring, num_moments=40, num_probes=64, dtype=dtype, generator=seeded(0))
    off = (found.mean - exact_moments(ring_values, 40)).abs()
    assert bool((off <= 4 * found.stderr + 1e-6).all())
    assert float(found.stderr[1:].min()) > 0


def test_moments_of_a_weighted_graph_lie_within_four_standard_errors():
    graph = nx.les_miserables_graph()
    values = torch.from_numpy(normalized_laplacian_spectrum(graph).real)
    found = graphs.moments(graph, num_moments=30, num_probes=200, exact=False, generator=seeded(1))
    assert bool(((found.mean - exact_moments(values, 30)).abs() <= 4 * found.stderr + 1e-12).all())


def test_small_graphs_have_exact_moments_without_an_error():
    graph = nx.karate_club_graph()
    found = graphs.moments(graph, num_moments=12)
    values = torch.from_numpy(normalized_laplacian_spectrum(graph).real)
    torch.testing.assert_close(found.mean, exact_moments(values, 12), atol=1e-10, rtol=0)
    assert float(found.stderr.max()) == 0
    assert "exact" in str(found)


def test_the_density_matches_moments_within_their_errors_only(ring, ring_values):
    found = graphs.density(ring, num_moments=30, num_probes=64, generator=seeded(0))
    errors = graphs.moments(ring, num_moments=30, num_probes=64, generator=seeded(0)).stderr[1:]
    off = (found.fitted - exact_moments(ring_values, 30)[1:]).abs()
    assert bool((off <= 4 * errors).all())
    assert found.interval == (0.0, 2.0)
    assert found.status.ok


def test_the_distribution_function_is_close_to_the_exact_one(ring, ring_values):
    found = graphs.density(ring, num_moments=60, num_probes=64, generator=seeded(0))
    x = torch.linspace(0.05, 1.95, 39, dtype=torch.float64)
    exact = (ring_values[:, None] <= x).double().mean(0)
    # Sixty moments resolve a twentieth of the interval, 2 pi / 60 in the angle. The exact
    # distribution function rises by at most 0.03 in that.
    assert float((found.cdf(x) - exact).abs().max()) < 0.03


@pytest.mark.parametrize("degree", [2, 3, 4, 5, 7, 8])
def test_the_entropic_density_does_not_bias_moments(degree):
    graph = graphs.barabasi_albert(200, num_edges=4, generator=seeded(4))
    values = graphs.eigenvalues(graph)
    exact = float((values**degree).mean())
    found = graphs.density(graph, num_moments=10)
    smooth = graphs.density(graph, num_moments=40, num_probes=64, width=0.15, method="lanczos")
    # The moments are exact, so only the tolerance of the solver remains.
    assert found.moment(degree) == pytest.approx(exact, rel=1e-6)
    assert abs(smooth.moment(degree) - exact) > 0.005


def test_the_standard_error_of_the_entropy_agrees_with_repeated_runs(ring):
    options = {"num_moments": 20, "num_probes": 20}
    found = graphs.entropy(ring, **options, generator=seeded(0))
    spectrum = graphs.density(ring, **options, generator=seeded(0))
    assert float(found) == pytest.approx(spectrum.entropy)
    runs = torch.tensor(
        [float(graphs.entropy(ring, **options, generator=seeded(s))) for s in range(12)]
    )
    # The scatter of twelve runs is known to 20 %, the error of ten groups to 25 %.
    assert runs.std() / 2.5 < float(found.stderr) < 2.5 * runs.std()
    assert float(found) < math.log(2)


def test_entropy_of_a_small_graph_has_no_error():
    found = graphs.entropy(nx.karate_club_graph(), num_moments=8)
    assert float(found.stderr) == 0
    assert found.samples is None


def test_each_isolated_vertex_adds_an_eigenvalue_zero():
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graph = graphs.as_graph(edge_index, num_nodes=10)
    values = graphs.eigenvalues(graph)
    expected = torch.tensor([0.0] * 8 + [1.5, 1.5], dtype=torch.float64)
    torch.testing.assert_close(values, expected, atol=1e-12, rtol=0)
    found = graphs.density(graph, num_moments=10)
    assert found.moment(1) == pytest.approx(0.3, abs=0.02)
    assert "relaxed" in found.status.message


def test_a_graph_without_edges_has_eigenvalues_but_no_density():
    graph = graphs.erdos_renyi(7, p=0.0)
    assert float(graphs.eigenvalues(graph).abs().max()) == 0
    found = graphs.moments(graph, num_moments=3)
    torch.testing.assert_close(
        found.mean, torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    )
    for function in (graphs.density, graphs.entropy):
        with pytest.raises(GraphError, match="graph must have at least one edge, got 7 vertices"):
            function(graph)


def test_a_single_vertex_has_no_density():
    with pytest.raises(GraphError, match="one vertex and no edge"):
        graphs.density(graphs.erdos_renyi(1, p=0.5))


def test_a_single_edge_has_the_eigenvalues_zero_and_two():
    graph = graphs.erdos_renyi(2, p=1.0)
    assert graphs.eigenvalues(graph).tolist() == pytest.approx([0.0, 2.0], abs=1e-12)
    assert graphs.density(graph, num_moments=4).moment(1) == pytest.approx(1.0, abs=1e-6)
    # A vector of signs is one eigenvector or the other: rules of a single node.
    found = graphs.density(graph, num_probes=8, method="lanczos")
    assert {round(float(x), 9) for x in found.nodes[found.weights > 0]} == {0.0, 2.0}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_moments": 0}, "num_moments must be at least 1, got 0"),
        ({"num_probes": 1}, "num_probes must be at least 2, got 1"),
        ({"generator": 3}, "generator must be a torch.Generator"),
        ({"dtype": torch.int64, "exact": False}, "dtype must be torch.float32 or torch.float64"),
    ],
)
def test_wrong_arguments_are_named(ring, options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        graphs.density(ring, **options)


def test_too_many_vertices_for_all_eigenvalues_are_refused():
    edge_index = torch.tensor([[0], [1]])
    with pytest.raises(GraphError, match="at most 20,000 vertices"):
        graphs.eigenvalues(graphs.as_graph(edge_index, num_nodes=20_001))


def test_a_dtype_or_device_that_cannot_be_used_is_named(monkeypatch):
    graph = graphs.erdos_renyi(300, p=0.05)
    for function in (graphs.density, graphs.laplacian):
        with pytest.raises(
            ValueError, match=r"dtype must be torch.float32 or .*, got torch.float16"
        ):
            function(graph, dtype=torch.float16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device must be one of this machine, got 'cuda'"):
        graphs.density(graph, device="cuda")


@pytest.mark.parametrize("method", ["maxent", "lanczos", "kpm"])
@pytest.mark.parametrize("matrix", ["normalized", "laplacian", "adjacency"])
def test_every_method_gives_the_moments_of_every_matrix(ring, method, matrix):
    options = {"num_moments": 40, "num_probes": 64, "generator": seeded(0)}
    found = graphs.density(ring, method=method, matrix=matrix, **options)
    exact = graphs.eigenvalues(ring, matrix=matrix)
    spread = float(exact.std())
    assert found.moment(1) == pytest.approx(float(exact.mean()), abs=0.05 * spread)
    assert found.moment(2) == pytest.approx(float(exact.square().mean()), rel=0.05)
    middle = float(exact.median())
    assert found.mass(found.support[0] - 1, middle) == pytest.approx(0.5, abs=0.05)


def test_moments_of_another_matrix_are_those_of_its_eigenvalues(ring):
    exact = graphs.moments(ring, matrix="adjacency", num_moments=12, exact=True)
    sampled = graphs.moments(ring, matrix="adjacency", num_moments=12, exact=False)
    assert exact.interval == sampled.interval
    assert bool(((sampled.mean - exact.mean).abs() <= 4 * sampled.stderr + 1e-12).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "fft"}, "method must be one of maxent, lanczos, kpm"),
        ({"matrix": "hessian"}, "matrix must be one of"),
        ({"method": "kpm", "width": 0.1}, "width is only used with method='lanczos'"),
        ({"method": "lanczos", "exact": True}, "exact is only used with method='maxent'"),
        ({"method": "lanczos", "num_moments": 1}, "num_moments must be at least 2"),
    ],
)
def test_options_of_another_method_are_refused(ring, options, message):
    with pytest.raises(ValueError, match=message):
        graphs.density(ring, **options)
