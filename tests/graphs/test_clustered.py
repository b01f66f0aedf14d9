"""Graphs with a known number of clusters: that many small eigenvalues, and a gap."""

import numpy as np
import pytest
import torch

from ritz.graphs import cluster_graph
from ritz.graphs._random import cluster_sizes


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
    # r (n - r) edges of preferential attachment: a fortieth less.
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
def test_wrong_parameters_name_the_argument(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        cluster_graph(sizes, **({"degree": 4, "num_links": 1} | options))


def test_wrong_sizes_name_the_argument():
    with pytest.raises(ValueError, match="num_nodes must be between 50 and 100"):
        cluster_sizes(10, num_nodes=101, low=5, high=10)
    with pytest.raises(ValueError, match="high must be at least 5"):
        cluster_sizes(10, num_nodes=50, low=5, high=4)


def test_a_single_cluster_has_no_links():
    graph = cluster_graph([10], degree=4, num_links=5, generator=torch.Generator().manual_seed(1))
    assert graph.num_nodes == 10
