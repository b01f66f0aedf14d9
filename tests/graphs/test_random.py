"""Random graphs: exact properties, and degrees compared with NetworkX."""

import math

import networkx as nx
import numpy as np
import pytest
import torch
from matrices import seeded

from ritz.graphs import (
    barabasi_albert,
    cluster_graph,
    configuration_model,
    erdos_renyi,
    stochastic_block_model,
    watts_strogatz,
)
from ritz.graphs._random import cluster_sizes

SAMPLES = 40


def statistics(degrees, triangles):
    """Second and third moment of the degrees, largest degree and number of triangles."""
    d = np.asarray(degrees, dtype=float)
    return [(d**2).mean(), (d**3).mean(), d.max(), triangles]


def of_graph(graph):
    matrix = graph.to_scipy()
    triangles = (matrix @ matrix).multiply(matrix).sum() / 6
    return statistics(graph.degrees.numpy(), triangles)


def of_networkx(graph):
    return statistics([d for _, d in graph.degree], sum(nx.triangles(graph).values()) / 3)


# Probabilities between four blocks: some equal, one 0 and one 1.
MANY = torch.tensor(
    [[0.3, 0.9, 0.05, 0.2], [0.9, 0.3, 0.0, 0.05], [0.05, 0.0, 0.3, 0.05], [0.2, 0.05, 0.05, 1.0]]
).double()
PAIRS = {
    "erdos_renyi": (
        lambda g: erdos_renyi(150, p=0.06, generator=g),
        lambda s: nx.gnp_random_graph(150, 0.06, seed=s),
    ),
    "dense erdos_renyi": (
        lambda g: erdos_renyi(60, p=0.6, generator=g),
        lambda s: nx.gnp_random_graph(60, 0.6, seed=s),
    ),
    "watts_strogatz": (
        lambda g: watts_strogatz(120, num_neighbors=8, p=0.3, generator=g),
        lambda s: nx.watts_strogatz_graph(120, 8, 0.3, seed=s),
    ),
    "watts_strogatz, all moved": (
        lambda g: watts_strogatz(40, num_neighbors=20, p=1.0, generator=g),
        lambda s: nx.watts_strogatz_graph(40, 20, 1.0, seed=s),
    ),
    "barabasi_albert": (
        lambda g: barabasi_albert(200, num_edges=4, generator=g),
        lambda s: nx.barabasi_albert_graph(200, 4, seed=s),
    ),
    "barabasi_albert, one edge": (
        lambda g: barabasi_albert(200, num_edges=1, generator=g),
        lambda s: nx.barabasi_albert_graph(200, 1, seed=s),
    ),
    "blocks": (
        lambda g: stochastic_block_model(
            [40, 60], probabilities=torch.tensor([[0.3, 0.05], [0.05, 0.2]]), generator=g
        ),
        lambda s: nx.stochastic_block_model([40, 60], [[0.3, 0.05], [0.05, 0.2]], seed=s),
    ),
    "many blocks": (
        lambda g: stochastic_block_model([20, 1, 30, 29], probabilities=MANY, generator=g),
        lambda s: nx.stochastic_block_model([20, 1, 30, 29], MANY.tolist(), seed=s),
    ),
    "configuration": (
        lambda g: configuration_model([1, 2, 3, 10] * 25, generator=g),
        lambda s: simple(nx.configuration_model([1, 2, 3, 10] * 25, seed=s)),
    ),
}


def simple(multigraph):
    graph = nx.Graph(multigraph)
    graph.remove_edges_from(nx.selfloop_edges(graph))
    return graph


@pytest.mark.parametrize("name", PAIRS)
def test_moments_are_those_of_networkx(name, rng):
    ours, theirs = PAIRS[name]
    left = np.array([of_graph(ours(rng)) for _ in range(SAMPLES)])
    right = np.array([of_networkx(theirs(seed)) for seed in range(SAMPLES)])
    error = np.sqrt((left.var(0, ddof=1) + right.var(0, ddof=1)) / SAMPLES)
    # Four standard errors; a statistic that does not vary (trees have no triangles) is equal.
    assert (np.abs(left.mean(0) - right.mean(0)) <= 4 * error).all()


def test_the_number_of_edges_is_binomial(rng):
    n, p = 150, 0.6
    counts = [erdos_renyi(n, p=p, generator=rng).num_edges for _ in range(50)]
    pairs = n * (n - 1) / 2
    error = math.sqrt(pairs * p * (1 - p) / len(counts))
    assert abs(np.mean(counts) - pairs * p) < 4 * error
    # The standard deviation of fifty counts is known to about a tenth.
    assert np.std(counts) == pytest.approx(math.sqrt(pairs * p * (1 - p)), rel=0.4)


def test_every_pair_has_the_same_probability(rng):
    total = sum(erdos_renyi(8, p=0.3, generator=rng).to_scipy().toarray() for _ in range(2000))
    pairs = total[np.triu_indices(8, 1)] / 2000
    # 28 pairs: four standard errors and a half, so that the most extreme of them passes too.
    assert (np.abs(pairs - 0.3) < 4.5 * math.sqrt(0.3 * 0.7 / 2000)).all()


def test_blocks_have_the_expected_number_of_edges():
    sure = 1 - torch.eye(3, dtype=torch.float64)
    found = stochastic_block_model([2, 3, 1], probabilities=sure).to_scipy().toarray()
    expected = nx.to_numpy_array(nx.complete_multipartite_graph(2, 3, 1))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("p", "edges"), [(0, 0), (1, 45)])
def test_edges_of_probability_one_all_exist(p, edges):
    assert erdos_renyi(10, p=p).num_edges == edges


def test_a_random_graph_of_a_million_vertices_has_the_expected_edges(rng):
    graph = erdos_renyi(1_000_000, p=2e-6, generator=rng)
    assert abs(graph.num_edges - 999_999) < 4 * 1000
    assert graph.num_nodes == 1_000_000


def test_models_have_their_exact_number_of_edges(rng):
    assert watts_strogatz(1000, num_neighbors=10, p=0.4, generator=rng).num_edges == 5000
    assert barabasi_albert(1000, num_edges=7, generator=rng).num_edges == 7 * 993
    assert barabasi_albert(8, num_edges=7, generator=rng).num_edges == 7


def test_a_ring_lattice_without_rewiring_is_regular():
    graph = watts_strogatz(20, num_neighbors=4, p=0)
    expected = nx.to_numpy_array(nx.watts_strogatz_graph(20, 4, 0))
    np.testing.assert_array_equal(graph.to_scipy().toarray(), expected)


def test_new_vertices_attach_to_distinct_others(rng):
    graph = barabasi_albert(500, num_edges=5, generator=rng)
    assert graph.intake.num_merged == graph.intake.num_self_loops == 0
    # All but those of the star have at least their own edges.
    assert int(graph.degrees[6:].min()) == 5


def test_the_configuration_model_has_the_prescribed_degrees(rng):
    wanted = torch.tensor([3, 3, 2, 2] * 500)
    graph = configuration_model(wanted, generator=rng)
    erased = graph.intake.num_merged + graph.intake.num_self_loops
    assert int((wanted - graph.degrees).sum()) == 2 * erased
    assert bool((graph.degrees <= wanted).all())
    assert erased < 20


def test_the_same_seed_gives_the_same_graph():
    def draw(seed):
        return barabasi_albert(50, num_edges=2, generator=seeded(seed))

    assert torch.equal(draw(1).col, draw(1).col)
    assert not torch.equal(draw(1).col, draw(2).col)
    state = torch.get_rng_state()
    erdos_renyi(30, p=0.5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: erdos_renyi(0, p=0.1), "n must be at least 1"),
        (lambda: erdos_renyi(5, p=1.5), "p must be between 0 and 1"),
        (lambda: watts_strogatz(10, num_neighbors=3, p=0), "num_neighbors must be even"),
        (
            lambda: watts_strogatz(10, num_neighbors=10, p=0),
            "num_neighbors must be between 2 and 9",
        ),
        (lambda: barabasi_albert(3, num_edges=3), "n must be at least 4"),
        (lambda: barabasi_albert(3, num_edges=0), "num_edges must be at least 1"),
        (lambda: configuration_model([1, 2]), "degrees must be .* an even sum"),
        (lambda: configuration_model([-1, 1]), "degrees must be whole numbers"),
        (lambda: stochastic_block_model([], probabilities=torch.zeros(0, 0)), "at least one size"),
        (
            lambda: stochastic_block_model([2], probabilities=torch.zeros(2, 2)),
            r"\(1, 1\), .* got \(2, 2\)",
        ),
        (
            lambda: stochastic_block_model([2, 2], probabilities=[[0.0, 0.5], [1.0, 0.0]]),
            "probabilities must be symmetric, got",
        ),
        (lambda: stochastic_block_model([2], probabilities=torch.tensor([[2.0]])), "0 and 1"),
    ],
)
def test_wrong_parameters_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_dense_ring_is_rewired_without_losing_edges():
    for n, k in ((20, 18), (21, 20), (60, 40)):
        generator = seeded(0)
        graph = watts_strogatz(n, num_neighbors=k, p=0.5, generator=generator)
        assert graph.num_edges == n * k // 2
        assert (graph.intake.num_merged, graph.intake.num_self_loops) == (0, 0)
        lattice = watts_strogatz(n, num_neighbors=k, p=0.0)
        # Edges of a complete graph cannot be rewired.
        assert torch.equal(graph.col, lattice.col) == (k == n - 1)


# ------------------------------------------------------------------------------------------
# Planted clusters.


def normalized_spectrum(graph):
    matrix = graph.to_scipy().toarray()
    root = 1 / np.sqrt(matrix.sum(0))
    return np.linalg.eigvalsh(np.eye(len(matrix)) - root[:, None] * matrix * root)


@pytest.mark.parametrize("kind", ["erdos_renyi", "watts_strogatz", "barabasi_albert", "mixed"])
def test_there_are_as_many_small_eigenvalues_as_clusters(rng, kind):
    graph = cluster_graph([30] * 9, kind=kind, degree=12, num_links=18, generator=rng)
    assert graph.num_nodes == 270
    values = normalized_spectrum(graph)
    assert values[8] < 0.1
    assert values[9] > 0.25


def test_clusters_without_links_are_components(rng):
    graph = cluster_graph([30, 40, 50], kind="mixed", degree=14, num_links=0, generator=rng)
    count, labels = graph.components()
    assert count == 3
    assert labels.bincount().tolist() == [30, 40, 50]


def test_links_join_different_clusters(rng):
    kwargs = {"kind": "barabasi_albert", "degree": 6}
    apart = cluster_graph([20] * 30, num_links=0, generator=rng, **kwargs)
    graph = cluster_graph([20] * 30, num_links=100, generator=rng, **kwargs)
    coo = graph.to_scipy().tocoo()
    across = int((coo.row // 20 != coo.col // 20).sum()) // 2
    assert across + graph.intake.num_merged == 100
    assert graph.num_edges == apart.num_edges + across


@pytest.mark.parametrize("kind", ["erdos_renyi", "watts_strogatz", "barabasi_albert"])
def test_clusters_have_the_requested_mean_degree(rng, kind):
    graph = cluster_graph([400] * 20, kind=kind, degree=20, num_links=0, generator=rng)
    # Preferential attachment has r (n - r) edges, 2.5 % less.
    assert float(graph.degrees.mean()) == pytest.approx(20, rel=0.03)


@pytest.mark.parametrize(
    ("count", "nodes", "low", "high"), [(305, 201_600, 500, 1000), (1355, 404_420, 200, 400)]
)
def test_random_sizes_have_the_sum_and_limits_of_the_paper(rng, count, nodes, low, high):
    sizes = cluster_sizes(count, num_nodes=nodes, low=low, high=high, generator=rng)
    assert (len(sizes), sum(sizes)) == (count, nodes)
    assert low <= min(sizes) < 1.05 * low
    assert 0.95 * high < max(sizes) <= high


@pytest.mark.parametrize("share", [0, 1])
def test_sizes_may_all_be_smallest_or_all_be_largest(share):
    assert set(cluster_sizes(7, num_nodes=7 * (5 + share), low=5, high=6)) == {5 + share}


@pytest.mark.slow
def test_a_large_mixed_network_has_all_its_clusters(rng):
    sizes = cluster_sizes(305, num_nodes=201_600, low=500, high=1000, generator=rng)
    graph = cluster_graph(sizes, kind="mixed", degree=20, num_links=2000, generator=rng)
    assert graph.num_nodes == 201_600
    assert graph.num_isolated == 0
    assert graph.largest_component().num_nodes > 200_000


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ([], {}, "at least one size"),
        ([3], {}, "sizes must be at least 4"),
        ([10], {"degree": 12}, "degree must be between 1 and 9"),
        ([10], {"degree": 6, "kind": "mixed"}, "degree must be between 1 and 5"),
        ([10], {"num_links": -1}, "num_links must be at least 0"),
        ([10], {"kind": "ring"}, "kind must be one of"),
    ],
)
def test_wrong_parameters_of_clusters_name_the_argument(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        cluster_graph(sizes, **({"degree": 4, "num_links": 1} | options))


def test_wrong_sizes_name_the_argument():
    with pytest.raises(ValueError, match="num_nodes must be between 50 and 100"):
        cluster_sizes(10, num_nodes=101, low=5, high=10)
    with pytest.raises(ValueError, match="high must be at least 5"):
        cluster_sizes(10, num_nodes=50, low=5, high=4)


def test_a_single_cluster_has_no_links():
    graph = cluster_graph([10], degree=4, num_links=5, generator=seeded(1))
    assert graph.num_nodes == 10
