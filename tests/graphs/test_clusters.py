import math

import networkx
import pytest
import torch
from matrices import seeded

import ritz
from ritz import graphs
from ritz.graphs._clusters import Sampled, reconciled, sample_density
from ritz.graphs._count_below import Below, NullSpace, count_below, polynomial
from ritz.graphs._gaps import Gap, find_gap, low_stretches, widest_between
from ritz.spectra import maxent


def planted(count, *, size=30, seed=0, **options):
    generator = seeded(seed)
    settings = {"degree": 12, "num_links": 2 * count} | options
    return graphs.cluster_graph([size] * count, generator=generator, **settings)


class Quiet:
    def start(self, label, total): ...

    def update(self, done, note=""): ...

    def finish(self): ...


@pytest.fixture
def sampling(monkeypatch):
    """Count as in a large graph, for which not all eigenvalues are computed."""
    monkeypatch.setattr("ritz.graphs._clusters.SMALL", 0)


@pytest.mark.parametrize("count", [2, 9, 30])
def test_planted_clusters_of_a_small_graph_are_counted_from_all_eigenvalues(count):
    result = graphs.count_clusters(planted(count))

    assert (result.count, result.stderr, result.certified) == (count, 0.0, True)
    assert result.num_products == 30 * count
    assert (result.found, result.estimate, result.estimate_stderr) == (None, count, 0.0)
    values = graphs.eigenvalues(planted(count))
    assert result.gap == pytest.approx(values[count - 1 : count + 1].tolist())


@pytest.mark.parametrize("count", [2, 9, 30, 90])
@pytest.mark.parametrize("seed", [0, 1])
def test_planted_clusters_are_counted_and_certified_by_two_methods(sampling, count, seed):
    result = graphs.count_clusters(planted(count, seed=seed), generator=seeded(seed))

    assert (result.count, result.found, result.stderr) == (count, count, 0.0)
    assert result.certified
    assert result.gap[0] < result.threshold < result.gap[1]
    assert result.missed < 0.01
    assert abs(result.estimate - count) < 4 * result.estimate_stderr
    result.raise_if_failed()


@pytest.mark.parametrize("sizes", [(200, 400), (200, 1000)])
@pytest.mark.parametrize("method", ["auto", "krylov", "entropic"])
def test_a_random_bipartite_graph_has_no_clusters(sizes, method):
    # The eigenvalues below 1, one per vertex of the smaller side, form a band with a gap above it.
    graph = networkx.bipartite.random_graph(*sizes, 0.05, seed=0)

    result = graphs.count_clusters(graph, method=method, num_probes=20)

    assert result.count is None
    assert result.reason.startswith(("no clusters: the ", "the two counts disagree"))
    assert "clusters\n" not in str(result)


def test_counting_the_clusters_of_the_karate_club_takes_one_product_per_vertex():
    graph = graphs.as_graph(networkx.karate_club_graph())

    assert graphs.count_clusters(graph).num_products == 34


@pytest.mark.parametrize("kind", ["watts_strogatz", "barabasi_albert", "mixed"])
def test_clusters_of_other_random_models_are_counted(kind):
    graph = planted(20, size=40, kind=kind, degree=10)
    assert graphs.count_clusters(graph).count == 20


@pytest.mark.parametrize("method", ["entropic", "lanczos"])
def test_sampled_counts_are_within_four_standard_errors(method):
    found = graphs.count_clusters(planted(60), method=method)
    assert abs(found.estimate - 60) < 4 * found.stderr
    assert found.count == round(found.estimate)
    # Independent probes have the error sqrt(2 N_c / d), less the part of the diagonal.
    assert 0.3 * math.sqrt(120 / 100) < found.stderr < 1.5 * math.sqrt(120 / 100)
    assert found.mass == pytest.approx(found.estimate / 1800)
    assert (found.found, found.certified) == (None, False)


def test_block_krylov_needs_less_than_a_quarter_of_the_products_of_sampling():
    krylov = graphs.count_clusters(planted(9), method="krylov")
    entropic = graphs.count_clusters(planted(9), method="entropic")
    assert krylov.count == 9
    assert krylov.num_products < 0.25 * entropic.num_products


@pytest.mark.parametrize("method", ["entropic", "lanczos"])
def test_the_error_of_a_repeated_eigenvalue_is_that_of_independent_probes(method):
    # 120 separate edges: half of all eigenvalues are 0, half 2, and every diagonal entry of the
    # projection is 1/2. Random signs then leave sqrt(2 (120 - 240 / 4) / 100).
    pairs = networkx.from_edgelist([(2 * i, 2 * i + 1) for i in range(120)])
    found = graphs.count_clusters(pairs, method=method)
    assert found.stderr == pytest.approx(math.sqrt(1.2), rel=0.3)  # of a hundred samples
    assert abs(found.estimate - 120) < 4 * found.stderr


@pytest.mark.parametrize("method", ["auto", "krylov", "entropic"])
def test_components_and_isolated_vertices_are_counted_as_clusters(method):
    parts = [networkx.complete_graph(12) for _ in range(7)]
    graph = networkx.disjoint_union_all(parts)
    graph.add_nodes_from(range(1000, 1005))
    found = graphs.count_clusters(graph, method=method)
    assert found.num_components == 12
    assert found.count == 12
    assert found.estimate == pytest.approx(12, abs=4 * found.estimate_stderr)


def test_weights_of_edges_can_separate_clusters():
    # One complete graph, whose edges are a thousand times as heavy within three parts.
    weights = torch.full((60, 60), 0.001, dtype=torch.float64).fill_diagonal_(0)
    for part in range(3):
        rows = slice(20 * part, 20 * part + 20)
        weights[rows, rows] = 1 - torch.eye(20, dtype=torch.float64)
    heavy = graphs.as_graph(weights)
    assert graphs.count_clusters(heavy).count == 3
    assert graphs.count_clusters(graphs.as_graph((weights > 0).double())).count is None
    assert graphs.spectral_clusters(heavy, 3).tolist() == [0] * 20 + [1] * 20 + [2] * 20


def test_without_enough_vectors_there_is_no_count(sampling):
    graph = planted(30)
    alone = graphs.count_clusters(graph, method="krylov", max_vectors=10)
    assert alone.count is None
    assert alone.found == 11  # ten, and the one of the component
    assert alone.missed > 5
    assert not alone.status.ok
    assert alone.reason.startswith("at least 11 clusters, but block Krylov had too few vectors")
    with pytest.raises(ritz.NotConvergedError, match="too few vectors"):
        alone.raise_if_failed()
    both = graphs.count_clusters(graph, max_vectors=10)
    assert both.reason.startswith("not certified: block Krylov would need")
    assert not both.status.ok
    assert both.count is None
    assert both.estimate == pytest.approx(30, abs=4 * both.estimate_stderr)


def test_blocks_grow_until_they_contain_all_eigenvectors(monkeypatch, sampling):
    monkeypatch.setattr("ritz.graphs._clusters._width", lambda *_: 4)
    found = graphs.count_clusters(planted(30))
    assert (found.count, found.certified) == (30, True)


@pytest.fixture(scope="module")
def sampled():
    return sample_density(
        planted(30),
        lanczos=False,
        num_moments=80,
        num_probes=50,
        bulk=0.5,
        generator=seeded(1),
        progress=False,
    )


FACTS = {"num_nodes": 900, "num_components": 1, "num_products": 0, "method": "auto", "seed": 0}
GAP = Gap(low=0.03, high=0.5, threshold=0.2)


def below(count, missed=0.0, full=False, mean=0.01):
    return Below(count=count, mean=mean, gap=GAP, missed=missed, full=full, num_products=0)


def test_there_is_no_count_unless_two_methods_agree(sampled):
    agreed = reconciled(below(30), sampled, FACTS, trusted=True)
    assert (agreed.count, agreed.certified, agreed.status.ok) == (30, True, True)
    fewer = reconciled(below(15), sampled, FACTS, trusted=True)
    assert (fewer.count, fewer.found, fewer.certified) == (None, 15, False)
    assert fewer.status.message.startswith("the two counts disagree: Krylov 15, ")
    assert not fewer.status.ok
    for doubtful in (below(29, missed=1.1), below(29, full=True)):
        missed = reconciled(doubtful, sampled, FACTS, trusted=True)
        assert (missed.count, missed.found) == (None, 29)
        assert "too few vectors" in missed.status.message
    large = reconciled(below(30, mean=0.6), sampled, FACTS, trusted=True)
    assert large.count is None
    assert large.reason.startswith("no clusters: the mean of the 30 eigenvalues left of the gap")


def test_a_count_is_equal_after_saving_and_loading(tmp_path, sampled):
    before = reconciled(below(30), sampled, FACTS, trusted=True)
    ritz.save(before, tmp_path / "count.safetensors")
    assert ritz.load(tmp_path / "count.safetensors") == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_filtered_block_counts_the_exact_eigenvalues(rng, dtype):
    graph = planted(12)
    exact = graphs.eigenvalues(graph)
    op = graphs.laplacian(graph, dtype=dtype)
    null = NullSpace.of(graph, dtype)
    counted = count_below(op, null, GAP, width=20, generator=rng, bar=Quiet())
    assert counted.count == int((exact < 0.2).sum()) == 12
    # Ritz values of the filtered block are within 1e-4 of the eigenvalues.
    assert counted.gap.low == pytest.approx(float(exact[11]), abs=1e-4)
    assert counted.missed < 0.01


def test_probes_detect_eigenvalues_that_a_narrow_block_missed(rng):
    graph = planted(12)
    null = NullSpace.of(graph, torch.float64)
    counted = count_below(graphs.laplacian(graph), null, GAP, width=8, generator=rng, bar=Quiet())
    assert (counted.count, counted.full) == (9, True)
    # Three are missing: sixteen probes estimate 3 ± 3 sqrt(2 / 48), or more if amplified.
    assert counted.missed > 3 - 4 * 3 * math.sqrt(2 / 48)


def test_the_null_space_is_that_of_the_laplacian(rng):
    graph = graphs.erdos_renyi(200, p=0.01, generator=rng)
    null = NullSpace.of(graph, torch.float64)
    assert null.dimension == int((graphs.eigenvalues(graph) < 1e-9).sum()) > 20
    block = torch.randn(200, 3, generator=rng, dtype=torch.float64)
    inside = block - null.project_off(block.clone())
    product = graphs.laplacian(graph).matmat(inside)
    torch.testing.assert_close(product, torch.zeros_like(product))
    outside = null.project_off(block.clone())
    torch.testing.assert_close(null.project_off(outside.clone()), outside)


def test_the_polynomial_is_one_at_the_lower_end_and_small_above():
    values = torch.tensor([0.03, 0.5, 1.0, 2.0], dtype=torch.float64)
    op = ritz.as_operator(torch.diag(values))
    out = polynomial(op, torch.ones(4, 1, dtype=torch.float64), GAP, 10)[:, 0].abs()
    assert float(out[0]) == pytest.approx(1.0)
    assert float(out[1:].max()) == pytest.approx(1 / math.cosh(10 * math.acosh(1 + 0.94 / 1.5)))


def test_the_gap_is_the_widest_interval_and_not_the_first_minimum():
    # Atoms at 0 and 0.1 make a band; the bulk is from 0.8 on.
    values = torch.cat([torch.zeros(10), torch.full((10,), 0.1), torch.linspace(0.8, 1.2, 180)])
    angles = (values.double() - 1).acos()
    moments = torch.stack([(j * angles).cos().mean() for j in range(81)])
    density = maxent(moments, interval=(0.0, 2.0), grid_size=12800)
    gap = find_gap(low_stretches(density, num_moments=80, bulk=0.5), num_moments=80)
    assert 0.1 < gap.low < 0.2
    assert 0.7 < gap.high < 0.8
    assert 200 * density.mass(0, gap.threshold) == pytest.approx(20, abs=0.5)


def test_the_width_of_a_gap_is_measured_in_angles():
    values = torch.tensor([0.0, 0.001, 0.1, 0.15, 0.2], dtype=torch.float64)
    gap = widest_between(values, Gap(low=0.0005, high=0.25, threshold=0.1))
    assert (gap.low, gap.high) == (0.001, 0.1)
    none = widest_between(values[:0], Gap(low=0.01, high=0.2, threshold=0.1))
    assert (none.low, none.high) == (0.0, 0.2)


def test_a_density_without_a_bulk_has_no_gap(sampled):
    assert isinstance(sampled, Sampled)
    assert "no bulk" in low_stretches(sampled.density, num_moments=80, bulk=0.0)
    uniform = maxent(torch.tensor([1.0, 0.0, -1 / 3], dtype=torch.float64), interval=(0.0, 2.0))
    assert "nowhere falls below" in low_stretches(uniform, num_moments=80, bulk=0.5)


def test_the_same_seed_gives_the_same_numbers():
    graph = planted(9)
    first, second = (graphs.count_clusters(graph, generator=seeded(5)) for _ in range(2))
    assert first == second
    assert first.seed == 5


@pytest.mark.parametrize("bad", [{"num_moments": 3}, {"num_probes": 1}, {"max_vectors": 0}])
def test_settings_out_of_range_name_the_argument(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        graphs.count_clusters(planted(2), **bad)


def test_graphs_without_edges_and_unknown_methods_are_refused():
    with pytest.raises(ValueError, match="method must be one of auto, krylov"):
        graphs.count_clusters(planted(2), method="magic")
    lonely = graphs.erdos_renyi(1, p=0.0)
    for function in (graphs.count_clusters, lambda g: graphs.spectral_clusters(g, 1)):
        with pytest.raises(graphs.GraphError, match="must have at least one edge, got one vertex"):
            function(lonely)
