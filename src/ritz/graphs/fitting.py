"""Which random graphs a graph is like, and with which parameters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.storage import storable
from ritz.graphs.families import Family, Model, Outline, families, siblings
from ritz.graphs.matrices import with_edges
from ritz.graphs.searching import FINE, ModelFit, Search, Target, least
from ritz.graphs.structures import Graph, GraphError
from ritz.spectra import EntropicDensity

MODELS: tuple[Model, ...] = (
    "erdos_renyi",
    "watts_strogatz",
    "barabasi_albert",
    "stochastic_block_model",
    "configuration_model",
)
NUM_PARAMETERS: dict[str, float] = {
    "erdos_renyi": 1,
    "barabasi_albert": 1,
    "watts_strogatz": 2,
    "stochastic_block_model": 3,
    "configuration_model": math.inf,
}
FEWEST_NODES, MOST_NODES = 8, 1000  # of the graphs that are drawn, unless told


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Models of a graph, the nearest first.

    Attributes:
        fits: One a model, by their divergences; but if the graph is as near to some as graphs
            drawn from them are, the one with the fewest parameters of these comes first.
        num_nodes: Vertices of the graphs that were drawn.
        density: The spectrum of the graph, as the models were compared with it.
        seed: Seed of the generator.
    """

    fits: tuple[ModelFit, ...]
    num_nodes: int
    density: EntropicDensity
    seed: int

    @property
    def model(self) -> str:
        """Name of the nearest model."""
        return self.fits[0].model

    @property
    def parameters(self) -> dict[str, float]:
        """Parameters of the nearest model."""
        return self.fits[0].parameters

    def __str__(self) -> str:
        lines = [
            f"Nearest model: {self.model}; divergence from graphs of {self.num_nodes} vertices"
        ]
        return "\n".join([*lines, *(f"  {one}" for one in self.fits)])


def fit(
    graph: Any,
    *,
    models: Sequence[Model] = MODELS,
    num_moments: int = 20,
    num_probes: int = 64,
    num_nodes: int | None = None,
    num_draws: int = 4,
    num_repeats: int = 24,
    generator: torch.Generator | None = None,
    progress: bool | Progress = False,
) -> Fit:
    r"""Return which random graphs have the spectrum nearest to that of a graph.

    .. math:: \hat\theta = \arg\min_\theta D\big(p_G, p_\theta\big), \qquad p_\theta:\
        \mu_i(\theta) = \mathbb{E}_{G' \sim \theta}\, \mu_i(G')

    with the symmetric Kullback-Leibler divergence between entropic spectra. The moments of a model
    are means over draws, the same random numbers at every value of its parameter. Values over the
    whole range are tried first, then those around the best, and a parabola through the nearest has
    the minimum. Searched are ``p`` of Erdős-Rényi; ``p`` and ``num_neighbors`` of Watts-Strogatz,
    even numbers from the mean degree on either way as long as they are nearer; ``num_edges`` of
    Barabási-Albert; ``num_blocks`` and ``mixing`` (share of edges between blocks) of equal blocks
    with the mean degree of the graph. Numbers of blocks are 2, 8 and 32 first, then half and twice
    the best, and so on, halving the ratio until these are the next whole numbers; at most 64, and
    blocks of eight vertices at least. The configuration model has the degrees of the
    graph, and nothing to search. The models have no weights.

    Cost: for a parameter, 29 values of ``num_draws`` graphs and ``num_repeats`` more for the
    interval, each with its moments; 10 values more for the neighbours; the blocks take about three
    times as much. About ten seconds for a graph of 1,000 vertices and 5,000 edges. Memory: one
    drawn graph.

    Args:
        graph: Whatever :func:`ritz.graphs.as_graph` takes, with an edge at least.
        models: Those to compare.
        num_moments: Moments; more see finer structure, and more of what is chance in one graph.
        num_probes: Probes of graphs beyond 256 vertices; smaller ones are exact.
        num_nodes: Vertices of drawn graphs; as many as the graph has by default, 1,000 at the
            most. Then degrees and sizes of blocks carry over: ``p`` of Erdős-Rényi and
            ``num_blocks`` are given for as many vertices as the graph has, intervals are as wide as
            for graphs of ``num_nodes``.
        num_draws: Graphs drawn at each value.
        num_repeats: Graphs drawn to find how well the parameter is known.
        generator: Source of all randomness.
        progress: Whether to show a bar, or what to tell.

    Reference: Sections 3.6.1 and 3.6.2 of *Spectral Machine Learning*.
    """
    graph = with_edges(graph)
    check_count("num_draws", num_draws, low=2)
    check_count("num_repeats", num_repeats, low=2)
    if not models:
        raise ValueError("models must name one at least, got none")
    for model in models:
        check_choice("models", model, MODELS)
    if graph.num_nodes < FEWEST_NODES and num_nodes is None:
        raise GraphError(
            f"graph must have at least {FEWEST_NODES} vertices to be compared with random ones, "
            f"got {graph.num_nodes}"
        )
    size = min(graph.num_nodes, MOST_NODES) if num_nodes is None else num_nodes
    check_count("num_nodes", size, low=FEWEST_NODES)
    generator = resolve_generator(generator)
    outline = Outline(degrees=_neighbours(graph), num_nodes=size)
    target = Target.make(graph, num_moments, num_probes, size, generator)
    search = Search(target, num_draws, num_repeats, generator)
    choices = {model: families(model, outline) for model in models}
    planned = [search.planned(some) for some in choices.values()]
    found: list[ModelFit] = []
    with tracking(progress, "graphs drawn", sum(planned)) as bar:
        search.told = bar.update
        for some in choices.values():
            fitted = _nearest(search, some, outline)
            found.append(_for_size(fitted, size, graph.num_nodes))
            search.num_drawn = sum(planned[: len(found)])
            bar.update(search.num_drawn, fitted.model)
    return Fit(
        fits=_ordered(found),
        num_nodes=size,
        density=target.density,
        seed=generator.initial_seed(),
    )


def _nearest(search: Search, choices: Sequence[Family], outline: Outline) -> ModelFit:
    """The nearest graphs of a model: its parameter, and where it has one its whole number."""
    coarse = min((search.over_range(one) for one in choices), key=least)
    best = search.around_best(coarse)
    if not best.family.whole:
        return search.finished(best)
    # What blocks are like pins their mixing down; how often edges are moved depends on how many
    # there are, and needs a wider look.
    window = best if best.family.whole == "num_blocks" else coarse
    tried = {best.family.count: best}
    while True:
        best = min(tried.values(), key=least)
        new = siblings(tuple(tried), best.family, outline)
        if not new:
            break
        tried |= {one.count: search.beside(one, window) for one in new}
    others = [one for one in tried.values() if one is not best]
    if best.family.count != coarse.family.count:
        best = best.joined(search.beside(best.family, coarse, FINE))
    return search.finished(best, others)


def _ordered(found: Sequence[ModelFit]) -> tuple[ModelFit, ...]:
    """Nearest first, but of those that the graph may be drawn from, the simplest before all."""
    ranked = sorted(found, key=lambda one: one.divergence)
    possible = [one for one in ranked if one.divergence <= one.typical]
    first = min(possible or ranked[:1], key=lambda one: NUM_PARAMETERS[one.model])
    return (first, *(one for one in ranked if one is not first))


def _for_size(found: ModelFit, size: int, num_nodes: int) -> ModelFit:
    """The same with parameters for that many vertices: mean degrees and blocks carry over."""
    if size == num_nodes:
        return found
    factor = {"p": (size - 1) / (num_nodes - 1)} if found.model == "erdos_renyi" else {}
    factor |= {"num_blocks": num_nodes / size}
    return replace(
        found,
        parameters={k: v * factor.get(k, 1.0) for k, v in found.parameters.items()},
        interval={
            k: (low * factor.get(k, 1.0), high * factor.get(k, 1.0))
            for k, (low, high) in found.interval.items()
        },
        values=found.values * factor.get("p", 1.0),
    )


def _neighbours(graph: Graph) -> Tensor:
    counts = graph.crow.diff().long()
    if graph.num_loops:
        counts = counts - torch.from_numpy(graph.to_scipy().diagonal() != 0).long()
    return counts
