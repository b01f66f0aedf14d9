import networkx
import pytest
import scipy.sparse
import torch
from matrices import seeded

import ritz
from ritz import graphs


def planted(count, seed=0):
    generator = seeded(seed)
    return graphs.cluster_graph([30] * count, degree=12, num_links=2 * count, generator=generator)


@pytest.mark.parametrize("count", [2, 9, 30])
def test_every_vertex_is_assigned_to_its_planted_cluster(count):
    labels = graphs.spectral_clusters(planted(count), count)
    assert torch.equal(labels, torch.arange(count).repeat_interleave(30))


def test_components_are_clusters_without_computing_eigenvectors():
    graph = networkx.disjoint_union(networkx.path_graph(4), networkx.complete_graph(3))
    assert graphs.spectral_clusters(graph, 2).tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_equal_components_and_isolated_vertices_are_separated():
    # Three equal components of two clusters each: the eigenvalue between them is threefold.
    pair = graphs.cluster_graph([20, 20], degree=10, num_links=3).to_scipy()
    whole = scipy.sparse.block_diag([pair, pair, pair, scipy.sparse.csr_array((2, 2))])
    labels = graphs.spectral_clusters(whole.tocsr(), 8)
    expected = torch.cat([torch.arange(6).repeat_interleave(20), torch.tensor([6, 7])])
    assert torch.equal(labels, expected)


def test_the_clusters_do_not_depend_on_the_start_vectors():
    graph = planted(9)
    seeds = (seeded(seed) for seed in (1, 2))
    first, second = (graphs.spectral_clusters(graph, 9, generator=seed) for seed in seeds)
    assert torch.equal(first, second)


def test_impossible_numbers_of_clusters_are_refused():
    graph = networkx.disjoint_union(networkx.path_graph(4), networkx.complete_graph(3))
    with pytest.raises(ValueError, match=r"num_clusters must be at least .* components, 2, got 1"):
        graphs.spectral_clusters(graph, 1)
    with pytest.raises(ValueError, match="num_clusters must be between 1 and 7, got 8"):
        graphs.spectral_clusters(graph, 8)


def test_too_few_steps_are_reported():
    with pytest.raises(ritz.NotConvergedError, match="pairs reached rtol"):
        graphs.spectral_clusters(planted(9), 9, max_steps=9)
