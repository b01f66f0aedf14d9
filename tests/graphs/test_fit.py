"""Random models fitted to graphs drawn from them: parameters, intervals and ranking."""

import math

import networkx as nx
import pytest
import torch
from matrices import seeded

import ritz
from ritz import graphs
from ritz.graphs import GraphError
from ritz.graphs._fit_models import Outline, families, siblings

FAST = {"num_draws": 2, "num_repeats": 8}
DRAWN = {
    "erdos_renyi": (lambda g: graphs.erdos_renyi(100, p=0.6, generator=g), "p", 0.6),
    "watts_strogatz": (
        lambda g: graphs.watts_strogatz(100, num_neighbors=10, p=0.4, generator=g),
        "p",
        0.4,
    ),
    "barabasi_albert": (
        lambda g: graphs.barabasi_albert(100, num_edges=40, generator=g),
        "num_edges",
        40.0,
    ),
}


@pytest.mark.parametrize("model", DRAWN)
def test_the_parameter_of_a_drawn_graph_is_found_within_its_interval(model):
    draw, name, truth = DRAWN[model]
    found = graphs.fit(draw(seeded(0)), models=[model], **FAST, generator=seeded(1)).fits[0]
    low, high = found.interval[name]
    off = found.parameters[name] - truth
    # Four standard deviations: the interval has two on each side.
    assert abs(off) <= max(high - low, 1.0 if name == "num_edges" else 0.0)
    assert low <= found.parameters[name] <= high
    assert (high - low) < 0.5 * truth
    # The graph is about as near to the model as other graphs drawn from it.
    assert found.divergence <= 2 * found.typical


@pytest.mark.parametrize("model", DRAWN)
def test_the_model_of_a_drawn_graph_is_recognised(model):
    graph = DRAWN[model][0](seeded(5))
    found = graphs.fit(graph, models=tuple(DRAWN), **FAST, generator=seeded(6))
    assert found.model == model
    assert found.parameters == found.fits[0].parameters
    assert [one.model for one in found.fits[:1]] == [model]
    # A ring with most of its edges rewired is nearly a random graph.
    alike = "watts_strogatz" if model == "erdos_renyi" else ""
    others = [one.divergence for one in found.fits[1:] if one.model != alike]
    assert min(others) > 5 * found.fits[0].divergence


def test_block_models_are_recognised_and_their_blocks_counted():
    inside = torch.full((4, 4), 0.01, dtype=torch.float64).fill_diagonal_(0.4)
    graph = graphs.stochastic_block_model([40] * 4, probabilities=inside, generator=seeded(2))
    models = ("erdos_renyi", "configuration_model", "stochastic_block_model")
    found = graphs.fit(graph, models=models, **FAST, generator=seeded(3))
    assert found.model == "stochastic_block_model"
    assert found.parameters["num_blocks"] == 4
    # A vertex has 0.4 * 39 neighbours in its block and 0.01 * 120 in others: a share of 0.0714.
    low, high = found.fits[0].interval["mixing"]
    assert abs(found.parameters["mixing"] - 1.2 / 16.8) <= high - low


def test_a_number_of_blocks_that_is_not_a_power_of_two_is_within_its_interval():
    inside = torch.full((3, 3), 0.01, dtype=torch.float64).fill_diagonal_(0.1)
    graph = graphs.stochastic_block_model([150] * 3, probabilities=inside, generator=seeded(0))
    found = graphs.fit(graph, models=["stochastic_block_model"], **FAST, generator=seeded(10))
    low, high = found.fits[0].interval["num_blocks"]
    assert found.parameters["num_blocks"] == 3
    assert 2 <= low <= 3 <= high <= 5
    # A vertex has 0.1 * 149 neighbours in its block and 0.01 * 300 in others: a share of 0.168.
    low, high = found.fits[0].interval["mixing"]
    assert abs(found.parameters["mixing"] - 3 / 17.9) <= high - low < 0.08
    assert "num_blocks 3 (" in str(found)


def test_the_number_of_neighbours_of_a_ring_is_fitted_with_an_interval():
    graph = graphs.watts_strogatz(120, num_neighbors=6, p=0.2, generator=seeded(0))
    found = graphs.fit(graph, models=["watts_strogatz"], **FAST, generator=seeded(1)).fits[0]
    assert found.parameters["num_neighbors"] == 6
    assert found.interval["num_neighbors"] == (6.0, 6.0)


@pytest.mark.parametrize("n", [8, 10, 15])
def test_few_vertices_are_enough_for_every_model(n):
    found = graphs.fit(nx.path_graph(n), num_moments=6, **FAST, generator=seeded(0))
    assert len(found.fits) == 5
    blocks = next(one for one in found.fits if one.model == "stochastic_block_model")
    assert blocks.parameters["num_blocks"] == 2
    assert blocks.parameters["block_size"] == n / 2


def test_a_complete_graph_has_the_neighbours_of_its_mean_degree():
    found = graphs.fit(
        nx.complete_graph(20), models=["watts_strogatz"], **FAST, generator=seeded(0)
    ).fits[0]
    # The largest even number below 20
    assert found.parameters["num_neighbors"] == 18
    assert found.typical >= 0
    assert str(found).index("±") == 33


def test_the_search_can_reach_every_number_of_blocks():
    outline = Outline(degrees=torch.full((1000,), 10), num_nodes=1000)
    for wanted in range(2, 65):
        tried = families("stochastic_block_model", outline)
        best = min(tried, key=lambda one: abs(math.log(one.count / wanted)))
        known = {best.count}
        # The nearest number by ratio stands for the smallest divergence.
        while new := siblings(tuple(known), best, outline):
            known |= {one.count for one in new}
            best = min([best, *new], key=lambda one: abs(math.log(one.count / wanted)))
        assert best.count == wanted
        assert len(known) <= 15


def test_of_models_that_fit_the_simplest_comes_first():
    # A configuration model with these degrees fits as well.
    graph = graphs.erdos_renyi(120, p=0.1, generator=seeded(4))
    models = ("configuration_model", "erdos_renyi")
    found = graphs.fit(graph, models=models, **FAST, generator=seeded(8))
    assert found.model == "erdos_renyi"
    assert found.fits[1].divergence <= found.fits[1].typical


def test_the_configuration_model_preserves_the_degrees_of_a_dense_graph():
    graph = graphs.erdos_renyi(60, p=0.5, generator=seeded(0))
    degrees = graph.crow.diff().long()
    (family,) = families("configuration_model", Outline(degrees=degrees, num_nodes=60))
    drawn = family.draw(0.0, seeded(1))
    # Repeated edges are rewired; if they were dropped, a quarter of the edges would be lost.
    assert torch.equal(drawn.crow.diff().long(), degrees)
    assert not torch.equal(drawn.col, graph.col)


def test_smaller_drawn_graphs_have_the_same_mean_degree():
    graph = graphs.erdos_renyi(900, p=0.01, generator=seeded(0))
    found = graphs.fit(
        graph, models=["erdos_renyi"], num_nodes=200, num_moments=10, **FAST, generator=seeded(1)
    ).fits[0]
    low, high = found.interval["p"]
    assert abs(found.parameters["p"] - 0.01) <= high - low
    assert bool(((found.values > 0.002) & (found.values < 0.05)).all())


def test_every_model_can_be_fitted_to_a_small_real_graph():
    found = graphs.fit(nx.karate_club_graph(), num_moments=8, **FAST, generator=seeded(0))
    assert len(found.fits) == 5
    assert "Nearest model" in str(found)
    assert "num_blocks" in str(found)
    assert all(one.divergence > 0 for one in found.fits)


def test_a_fit_is_reproducible_and_equal_after_saving_and_loading(tmp_path):
    graph = graphs.barabasi_albert(60, num_edges=3, generator=seeded(0))
    one, again = (
        graphs.fit(graph, models=["barabasi_albert"], **FAST, generator=seeded(1)) for _ in range(2)
    )
    assert str(one) == str(again)
    ritz.save(one, tmp_path / "fit.safetensors")
    assert str(ritz.load(tmp_path / "fit.safetensors")) == str(one)


def test_the_progress_bar_ends_at_the_number_of_drawn_graphs():
    class Log:
        def start(self, label, total):
            self.label, self.total, self.done = label, total, []

        def update(self, done, note=""):
            self.done.append(done)

        def finish(self): ...

    log = Log()
    graph = graphs.erdos_renyi(40, p=0.3, generator=seeded(0))
    graphs.fit(graph, models=["erdos_renyi", "configuration_model"], **FAST, progress=log)
    # (17 + 9 + 3) * 2 + 8 of the first, (1 + 3) * 2 + 8 of the second.
    assert (log.label, log.total, log.done[-1]) == ("graphs drawn", 82, 82)
    assert log.done == sorted(log.done)
    assert len(set(log.done)) > 70


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"models": ["small_world"]}, "models must be one of erdos_renyi"),
        ({"models": []}, "models must have at least one"),
        ({"num_draws": 1}, "num_draws must be at least 2"),
        ({"num_repeats": 1}, "num_repeats must be at least 2"),
        ({"num_nodes": 4}, "num_nodes must be at least 8"),
    ],
)
def test_wrong_arguments_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        graphs.fit(nx.karate_club_graph(), **options)


def test_graphs_without_edges_or_too_small_are_refused():
    with pytest.raises(GraphError, match="must have at least one edge"):
        graphs.fit(graphs.erdos_renyi(10, p=0.0))
    with pytest.raises(GraphError, match=r"at least 8 vertices to be compared with .*, got 3"):
        graphs.fit(nx.path_graph(3))
