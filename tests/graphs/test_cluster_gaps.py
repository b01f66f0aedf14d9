"""Gaps that are not the widest, and graphs without a gap."""

import math

import networkx
import pytest
import torch
from matrices import seeded

from ritz import graphs
from ritz.graphs._clusters import Sampled
from ritz.graphs._gaps import TUNING, Gap, stands_out, widest_crowded

PLANTED = {  # sizes, probability of an edge within and between
    "8 of 60": ([60] * 8, 0.3, 0.03),
    "2 of 300": ([300] * 2, 0.05, 0.012),
    "3 of 300": ([300] * 3, 0.06, 0.01),
    "2 of 500": ([500] * 2, 0.03, 0.005),
    "5 of 100": ([100] * 5, 0.2, 0.03),
    "900 and 100": ([900, 100], 0.05, 0.004),
}
WHOLE = "no gap between clusters: the graph is connected"


def one_fast(seeds):
    """Parameters for all seeds; those after the first are slow tests."""
    first, *others = seeds
    return [first, *(pytest.param(seed, marks=pytest.mark.slow) for seed in others)]


def block_model(name, seed):
    sizes, within, between = PLANTED[name]
    rows = [[within if i == j else between for j in range(len(sizes))] for i in range(len(sizes))]
    return graphs.as_graph(networkx.stochastic_block_model(sizes, rows, seed=seed))


def disjoint(parts):
    return graphs.as_graph(networkx.disjoint_union_all(parts))


@pytest.fixture(params=["all eigenvalues", "sampling"])
def way(request, monkeypatch):
    """Count as in a small graph and as in a large one."""
    if request.param == "sampling":
        monkeypatch.setattr("ritz.graphs._clusters.SMALL", 0)


@pytest.mark.parametrize("seed", one_fast(range(3)))
@pytest.mark.parametrize("name", PLANTED)
def test_clusters_with_moderate_links_are_found(way, name, seed):
    count, graph = len(PLANTED[name][0]), block_model(name, seed)
    found = graphs.count_clusters(graph, generator=seeded(seed))
    assert (found.count, found.certified) == (count, True)
    values = graphs.eigenvalues(graph)
    # Ritz values of the filtered block are within 1e-3 of the eigenvalues.
    assert found.gap[0] == pytest.approx(float(values[count - 1]), abs=1e-3)
    assert found.gap[0] < found.threshold < found.gap[1] < float(values[count]) + 1e-3


@pytest.mark.parametrize("method", ["krylov", "entropic", "lanczos"])
@pytest.mark.parametrize("name", ["8 of 60", "2 of 300"])
def test_every_method_considers_gaps_beyond_the_first_one_above_zero(name, method):
    count = len(PLANTED[name][0])
    found = graphs.count_clusters(block_model(name, 0), method=method)
    assert found.count is not None
    if method == "krylov":
        assert found.count == count
    else:
        assert abs(found.estimate - count) < 4 * found.stderr


def test_a_gap_with_few_eigenvalues_above_it_is_judged_by_their_spacings():
    # Above the gap, 14 eigenvalues lie within its width.
    found = graphs.count_clusters(block_model("900 and 100", 0), method="krylov")
    assert found.count == 2


NO_CLUSTERS = {
    "sparse": lambda: graphs.erdos_renyi(500, p=0.016, generator=seeded(0)).largest_component(),
    "random": lambda: graphs.erdos_renyi(500, p=0.05, generator=seeded(0)),
    "dense": lambda: graphs.erdos_renyi(500, p=0.2, generator=seeded(0)),
    "large": lambda: graphs.erdos_renyi(2000, p=0.006, generator=seeded(1)).largest_component(),
    "complete": lambda: graphs.as_graph(networkx.complete_graph(100)),
    "attached": lambda: graphs.as_graph(networkx.barabasi_albert_graph(1000, 5, seed=0)),
    "rewired": lambda: graphs.as_graph(networkx.watts_strogatz_graph(1000, 10, 0.3, seed=0)),
    "regular": lambda: graphs.as_graph(networkx.random_regular_graph(4, 1000, seed=0)),
    "path": lambda: graphs.as_graph(networkx.path_graph(1000)),
    "cycle": lambda: graphs.as_graph(networkx.cycle_graph(1000)),
    "grid": lambda: graphs.as_graph(networkx.grid_2d_graph(20, 20)),
    "cube": lambda: graphs.as_graph(networkx.grid_graph([8, 8, 8])),
    "hypercube": lambda: graphs.as_graph(networkx.hypercube_graph(8)),
}


def graphs_and_methods():
    """Every graph with every method; methods that are not the default are partly slow tests."""
    daily = ("random", "attached", "rewired", "grid", "path")
    for name in NO_CLUSTERS:
        yield name, "auto"
        marks = () if name in daily else pytest.mark.slow
        yield from (pytest.param(name, method, marks=marks) for method in ("krylov", "entropic"))


@pytest.mark.parametrize(("name", "method"), list(graphs_and_methods()))
def test_graphs_without_clusters_have_no_count(way, name, method):
    found = graphs.count_clusters(NO_CLUSTERS[name](), method=method, generator=seeded(3))
    assert found.count is None
    assert found.reason.startswith((WHOLE, "no gap: "))
    assert f"No count: {found.reason}" in str(found)
    assert found.status.ok


@pytest.mark.parametrize("method", ["auto", "krylov", "entropic"])
def test_a_short_cycle_whose_eigenvalues_are_resolved_has_no_gap(way, method):
    found = graphs.count_clusters(networkx.cycle_graph(50), method=method)
    assert found.count is None
    assert "gaps have about the same width" in found.reason


def test_the_reason_for_a_grid_names_its_second_eigenvalue():
    # Above the second eigenvalue, 0.007, there is no gap up to the bulk.
    found = graphs.count_clusters(graphs.as_graph(networkx.grid_2d_graph(20, 20)))
    second = float(graphs.eigenvalues(networkx.grid_2d_graph(20, 20))[1])
    assert f"above 0 (the first is {second:.3g})" in found.reason
    assert "nothing but" not in found.reason


@pytest.mark.parametrize("seed", one_fast(range(4)))
@pytest.mark.parametrize("method", ["auto", "krylov", "entropic", "lanczos"])
def test_one_edge_and_isolated_vertices_are_counted_as_components(method, seed):
    graph = networkx.empty_graph(1000)
    graph.add_edge(3, 7)
    found = graphs.count_clusters(graph, method=method, generator=seeded(seed))
    assert (found.count, found.num_components) == (999, 999)
    assert found.certified == (method == "auto")


@pytest.mark.parametrize("method", ["auto", "krylov", "entropic", "lanczos"])
def test_without_a_gap_the_count_is_the_number_of_components_with_a_reason(method):
    found = graphs.count_clusters(disjoint([networkx.cycle_graph(100)] * 5), method=method)
    assert (found.count, found.stderr, found.certified) == (5, 0.0, False)
    assert math.isnan(found.threshold)
    assert found.reason.startswith(("no gap: the density left of", "no gap: 25 gaps have"))
    assert found.reason.endswith("the count is the number of connected components")
    assert found.status.message == "no clusters inside the components were found"
    assert found.reason in str(found)


def test_components_without_further_gap_are_the_clusters(way):
    # A path of four vertices has the eigenvalues 0, 1/2, 3/2 and 2.
    assert graphs.count_clusters(disjoint([networkx.path_graph(4)] * 12)).count == 12


def values(*parts):
    return torch.cat([torch.as_tensor(part, dtype=torch.float64) for part in parts])


def test_a_gap_is_accepted_only_if_the_spacings_above_it_are_small():
    gap = Gap(low=0.3, high=0.6, threshold=0.4)
    close = torch.linspace(0.6, 0.7, TUNING.fewest_above + 1, dtype=torch.float64)
    assert stands_out(gap, close)
    assert not stands_out(gap, close[:-1])  # too few to tell
    assert not stands_out(
        gap, torch.linspace(0.6, 1.4, TUNING.fewest_above + 1, dtype=torch.float64)
    )
    # All are within the width of the gap, but there is another gap, two thirds as wide.
    ladder = values([0.6], torch.linspace(0.82, 0.84, TUNING.fewest_above))
    assert not stands_out(gap, ladder)


def test_the_gap_above_zero_is_skipped():
    above = torch.linspace(0.7, 0.8, TUNING.fewest_above + 1, dtype=torch.float64)
    stretch = Gap(low=0.81, high=0.9, threshold=0.85)
    gap = widest_crowded(values([0.4, 0.45], above), stretch)
    assert (gap.low, gap.high) == (0.45, 0.7)
    assert 0.45 < gap.threshold < 0.7
    few = widest_crowded(values([0.4, 0.45, 0.7]), stretch)
    assert (few.low, few.high) == (0.0, 0.4)


class Flat:
    """A density of fifty eigenvalues per unit, without error."""

    def cdf(self, points):
        return points / 2

    def cdf_samples(self, points):
        return (points / 2).expand(2, -1)


def next_gap(*stretches):
    gaps = [Gap(low=low, high=high, threshold=low) for low, high in [(0.01, 0.2), *stretches]]
    made = Sampled(
        density=Flat(),
        stretches=gaps,
        num_nodes=100,
        num_moments=80,
        num_products=0,
        spread=Flat(),
    )
    found = made.next_gap(gaps[0])
    return None if found is None else (found.low, found.high)


def test_the_next_gap_is_the_widest_unless_another_above_has_a_similar_width():
    assert next_gap() is None
    assert next_gap((0.3, 0.301)) is None  # narrower than moments resolve
    assert next_gap((0.3, 0.5), (0.6, 0.62)) == (0.3, 0.5)
    assert next_gap((0.3, 0.5), (0.6, 0.8)) is None  # gaps of equal width
    assert next_gap((0.3, 0.5), (0.6, 1.0)) == (0.6, 1.0)
    # Only 0.1 eigenvalues lie between the two, so they are one gap.
    assert next_gap((0.3, 0.4), (0.402, 0.5)) == (0.3, 0.5)
    assert next_gap((0.202, 0.5)) is None  # a part of the first gap
