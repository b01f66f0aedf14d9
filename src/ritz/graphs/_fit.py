"""Random graph models fitted to a graph by its spectrum."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.storage import storable
from ritz.graphs._density import INTERVAL, jackknife, leave_out, matched_within, moments
from ritz.graphs._families import Family, Model, Outline, families, siblings
from ritz.graphs._graph import Graph, GraphError
from ritz.graphs._io import GraphLike
from ritz.graphs._matrices import with_edges
from ritz.graphs._similarity import multipliers, symmetric_kl
from ritz.spectra import EntropicDensity, Moments, maxent

# ------------------------------------------------------------------------------------------
# The search for the parameters of a random graph that is nearest to a given one.

FINE = 9  # values tried between the neighbours of the best
SIBLING = {"num_blocks": 3, "num_neighbors": 5}  # of a family that differs in this number
SIBLINGS = {"num_blocks": 45, "num_neighbors": 15}  # values of all these, at about the most
NEAREST = 5  # values that a parabola is laid through
CLOSE = 0.25  # distance of these: a share of the range, or of the value itself
FINAL = 3  # times as many draws at the best value


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """The graphs of one model that are nearest to a graph.

    Attributes:
        model: Its name.
        parameters: Of the nearest; those of the configuration model are the degrees.
        interval: Of the parameter that was searched: two standard deviations of what graphs
            drawn with these parameters are found to have, either way. Of ``num_blocks`` and
            ``num_neighbors``: the least and the largest that these graphs are found to have.
        divergence: Symmetric Kullback-Leibler divergence between the spectra.
        stderr: Its error, from the draws of the model and the probes of the graph.
        typical: Below this are 95 % of the divergences of graphs drawn from the fitted model: a
            graph far above is not of it.
        values: All values of the parameter that were tried, ``(G,)``.
        divergences: At these, ``(G,)``.
    """

    model: str
    parameters: dict[str, float]
    interval: dict[str, tuple[float, float]]
    divergence: float
    stderr: float
    typical: float
    values: Tensor
    divergences: Tensor

    def __str__(self) -> str:
        parts = []
        # What was searched comes first; files do not keep an order.
        for name in sorted(self.parameters, key=lambda one: (one not in self.interval, one)):
            value = self.parameters[name]
            low, high = self.interval.get(name, (math.nan, math.nan))
            spread = f" ({low:.4g} to {high:.4g})" if name in self.interval else ""
            parts.append(f"{name} {value:.4g}{spread}")
        found = (
            f"{self.divergence:>9.4g} ± {self.stderr:<7.1g} own graphs below {self.typical:<9.3g}"
        )
        return f"{self.model:22} {found} {', '.join(parts)}".rstrip()


@dataclass(frozen=True, slots=True)
class Target:
    """The graph that is fitted: its moments and spectrum, and how moments are measured."""

    moments: Moments
    density: EntropicDensity
    errors: Tensor
    num_probes: int

    @classmethod
    def make(
        cls, graph: Graph, num_moments: int, num_probes: int, size: int, generator: torch.Generator
    ) -> "Target":
        """Moments of the graph, matched to within what graphs of ``size`` vertices can tell."""
        found = moments(graph, num_moments=num_moments, num_probes=num_probes, generator=generator)
        # One eigenvalue of a drawn graph is this share: nothing finer can be told apart.
        errors = found.stderr.clamp_min(1 / size)
        density = maxent(found.mean, interval=INTERVAL, stderr=errors)
        return cls(found, density, matched_within(density), num_probes)

    def features(self, means: Tensor) -> Tensor:
        """Multipliers and moments of the spectra of mean moments ``(N, m + 1)``."""
        errors = self.errors.expand_as(means)
        return multipliers(means, maxent(means, interval=INTERVAL, stderr=errors))

    def measured(self, graph: Graph, generator: torch.Generator) -> Tensor:
        """Moments of a drawn graph, ``(m + 1,)``."""
        degree = len(self.errors) - 1
        options: dict[str, Any] = {"num_moments": degree, "num_probes": self.num_probes}
        return moments(graph, **options, generator=generator).mean


@dataclass(frozen=True, slots=True)
class Tried:
    """Values of a family that were tried, ascending, with features and divergences."""

    family: Family
    values: Tensor
    features: Tensor
    divergences: Tensor

    def joined(self, other: "Tried") -> "Tried":
        """Both together."""
        values = torch.cat([self.values, other.values])
        order = values.argsort()
        features = torch.cat([self.features, other.features])[order]
        divergences = torch.cat([self.divergences, other.divergences])[order]
        return Tried(self.family, values[order], features, divergences)


def least(tried: Tried) -> float:
    """The least divergence."""
    return float(tried.divergences.min())


@final
class Search:
    """A target, and the seeds of all graphs that are drawn to be compared with it."""

    def __init__(
        self, target: Target, num_draws: int, num_repeats: int, generator: torch.Generator
    ) -> None:
        self.target, self.num_draws, self.num_repeats = target, num_draws, num_repeats
        self.num_drawn = 0
        self.told: Callable[[int], None] = lambda num_drawn: None
        # One seed a draw, whatever the value: divergences then vary with the value smoothly.
        self.seeds = _seeds(FINAL * num_draws, generator)
        self.repeats = _seeds(num_repeats, generator)
        self.own = target.features(target.moments.mean[None])

    def planned(self, choices: Sequence[Family]) -> int:
        """Graphs that are drawn for a model of these families, at the most."""
        first = sum(len(one.values(one.low, one.high, one.num_values)) for one in choices)
        fine = FINE if choices[0].parameter else 0
        fine += SIBLINGS[choices[0].whole] if choices[0].whole else 0
        return (first + fine + FINAL) * self.num_draws + self.num_repeats

    def over_range(self, family: Family) -> Tried:
        """What is found over the whole range."""
        return self._tried(family, family.values(family.low, family.high, family.num_values))

    def beside(self, family: Family, best: Tried, count: int = 0) -> Tried:
        """What is found where the best of another family of the model is, and around it."""
        # The same share of the largest: for blocks, that is where the eigenvalues between them
        # are the same, whatever their number.
        stretch = family.high / best.family.high
        low, high = (min(max(stretch * end, family.low), family.high) for end in _around(best))
        return self._tried(family, family.values(low, high, count or SIBLING[family.whole]))

    def around_best(self, tried: Tried) -> Tried:
        """What is found between the neighbours of the best as well."""
        family, values = tried.family, tried.values.tolist()
        new = [value for value in family.values(*_around(tried), FINE) if value not in values]
        return tried.joined(self._tried(family, new)) if new else tried

    def finished(self, tried: Tried, others: Sequence[Tried] = ()) -> ModelFit:
        """The minimum, its divergence, and the interval of the parameter.

        Args:
            tried: The best family.
            others: Those that differ from it in a whole number.
        """
        family = tried.family
        value = _minimum(tried, tried.divergences)
        rounded = round(value) if family.spacing == "whole" else value
        draws = self._draws(family, rounded, self.seeds)
        whole = self.target.features(draws.mean(0, keepdim=True))
        repeats = self.target.features(self._draws(family, rounded, self.repeats))
        typical = symmetric_kl(repeats, whole)[:, 0].quantile(0.95)
        parameters, interval = dict(family.fixed), {}
        if family.parameter:
            again = [_minimum(tried, row) for row in symmetric_kl(repeats, tried.features)]
            parameters = {family.parameter: float(rounded)} | parameters
            interval = {family.parameter: _interval(family, value, again)}
        if family.whole:
            counts = _counts([tried, *others], repeats)
            low, high = min(*counts, family.count), max(*counts, family.count)
            interval[family.whole] = (float(low), float(high))
        return ModelFit(
            model=family.model,
            parameters=parameters,
            interval=interval,
            divergence=float(symmetric_kl(self.own, whole)),
            stderr=self._error(draws, whole),
            typical=float(typical),
            values=tried.values,
            divergences=tried.divergences,
        )

    def _tried(self, family: Family, values: list[float]) -> Tried:
        seeds = self.seeds[: self.num_draws]
        means = torch.stack([self._draws(family, value, seeds).mean(0) for value in values])
        features = self.target.features(means)
        found = symmetric_kl(self.own, features)[0]
        return Tried(family, torch.tensor(values, dtype=torch.float64), features, found)

    def _draws(self, family: Family, value: float, seeds: list[int]) -> Tensor:
        rows = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            graph = family.draw(value, generator)
            rows.append(self.target.measured(graph, generator))
            self.num_drawn += 1
            self.told(self.num_drawn)
        return torch.stack(rows)

    def _error(self, draws: Tensor, whole: Tensor) -> float:
        without = self.target.features(leave_out(draws))
        variance = jackknife(symmetric_kl(without, self.own)[:, 0]).square()
        left = leave_out(self.target.moments.samples)
        if len(left):
            parts = self.target.features(left)
            variance = variance + jackknife(symmetric_kl(parts, whole)[:, 0]).square()
        return float(variance.sqrt())


def _around(tried: Tried) -> tuple[float, float]:
    """The neighbours of the best value."""
    values, place = tried.values.tolist(), int(tried.divergences.argmin())
    return values[max(place - 1, 0)], values[min(place + 1, len(values) - 1)]


def _counts(tried: Sequence[Tried], features: Tensor) -> list[int]:
    """The whole number of the family that is nearest to each of some spectra."""
    heights = [symmetric_kl(features, one.features).amin(1) for one in tried]
    places = torch.stack(heights).argmin(0).tolist()
    return [tried[place].family.count for place in places]


def _minimum(tried: Tried, divergences: Tensor) -> float:
    """Where the parabola through the nearest values to the least has its minimum."""
    x = tried.family.scaled(tried.values)
    place = int(divergences.argmin())
    off = (x - x[place]).abs()
    near = off.argsort()[:NEAREST]
    # Five level out the noise of each; where they are far apart, a parabola does not fit them.
    if float(off[near].max()) > CLOSE:
        near = torch.arange(max(place - 1, 0), min(place + 2, len(x)))
    if len(near) < 3:
        return float(tried.values[place])
    ahead = x[near] - x[place]
    table = torch.stack([torch.ones_like(ahead), ahead, ahead.square()], dim=1)
    _, slope, curvature = torch.linalg.lstsq(table, divergences[near, None]).solution[:, 0].tolist()
    if not curvature > 0:
        return float(tried.values[place])
    vertex = min(max(-0.5 * slope / curvature, float(ahead.min())), float(ahead.max()))
    return tried.family.unscaled(float(x[place]) + vertex)


def _interval(family: Family, value: float, again: list[float]) -> tuple[float, float]:
    off = math.sqrt(sum((one - value) ** 2 for one in again) / len(again))
    low, high = max(value - 2 * off, family.low), min(value + 2 * off, family.high)
    return (math.floor(low), math.ceil(high)) if family.spacing == "whole" else (low, high)


def _seeds(count: int, generator: torch.Generator) -> list[int]:
    found: list[int] = torch.randint(0, 2**62, (count,), generator=generator).tolist()
    return found


# ------------------------------------------------------------------------------------------
# Which random graphs a graph is like, and with which parameters.

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
    density: EntropicDensity = field(repr=False)
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
    graph: GraphLike,
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
        progress: Show a progress bar, or a :class:`Progress` to report to.

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
