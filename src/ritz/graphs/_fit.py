"""``fit``: random graph models fitted to the spectrum of a graph."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from ritz._core.checks import check_choice, check_count
from ritz._core.progress import Progress, tracking
from ritz._core.random import resolve_generator
from ritz._core.storage import storable
from ritz.graphs._density import INTERVAL, matched_within, moments
from ritz.graphs._fit_models import TUNING, Family, Model, Outline, families, siblings
from ritz.graphs._graph import Graph, GraphError
from ritz.graphs._io import GraphLike
from ritz.graphs._jackknife import jackknife, leave_out
from ritz.graphs._matrices import with_edges
from ritz.graphs._similarity import multipliers, symmetric_kl
from ritz.spectra import EntropicDensity, Moments, maxent

# Number of parameters of each model. If several models fit, the simplest is preferred.
_NUM_PARAMETERS: dict[Model, float] = {
    "erdos_renyi": 1,
    "watts_strogatz": 2,
    "barabasi_albert": 1,
    "stochastic_block_model": 3,
    "configuration_model": math.inf,
}
MODELS: tuple[Model, ...] = tuple(_NUM_PARAMETERS)


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFit:
    """One model fitted to a graph.

    Attributes:
        model: Name of the model.
        parameters: Fitted parameters; the configuration model has none.
        interval: Intervals of the parameters that were searched, from a parametric bootstrap:
            graphs are drawn from the fitted model and fitted again. An interval is two standard
            deviations wide on either side. For ``num_blocks`` and ``num_neighbors`` it extends from
            the smallest to the largest value.
        divergence: Symmetric Kullback-Leibler divergence between the spectra.
        stderr: Standard error of the divergence, from the draws of the model and the probes of the
            graph.
        typical: 95 % quantile of the divergence of graphs drawn from the fitted model. If
            ``divergence`` is much larger, the graph does not come from this model.
        values: All values of the parameter that were tried, ``(G,)``.
        divergences: Divergence at each of these values, ``(G,)``.
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
        # Searched parameters come first; files do not preserve an order.
        for name in sorted(self.parameters, key=lambda one: (one not in self.interval, one)):
            low, high = self.interval.get(name, (math.nan, math.nan))
            spread = f" ({low:.4g} to {high:.4g})" if name in self.interval else ""
            parts.append(f"{name} {self.parameters[name]:.4g}{spread}")
        distance = f"{self.divergence:>9.4g} ± {self.stderr:<7.1g}(typical < {self.typical:.3g})"
        return f"{self.model:22} {distance} {', '.join(parts)}".rstrip()


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Random graph models fitted to a graph, the nearest first.

    Attributes:
        fits: One fit per model, sorted by divergence. If several models fit equally well
            (``divergence`` is at most ``typical``), the one with the fewest parameters comes first.
        num_nodes: Number of vertices of the drawn graphs.
        density: The entropic spectrum of the graph with which the models were compared.
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
            f"Nearest model: {self.model}; drawn graphs had {self.num_nodes} vertices",
            f"  {'model':22} divergence ± error (of 95 % of its graphs) parameters (intervals)",
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
    r"""Fit random graph models to a graph by the distance between their spectra.

    .. math:: \hat\theta = \arg\min_\theta D\big(p_G, p_\theta\big), \qquad p_\theta:\
        \mu_i(\theta) = \mathbb{E}_{G' \sim \theta}\, \mu_i(G')

    :math:`D` is the symmetric Kullback-Leibler divergence between entropic spectra. The moments of
    a model are means over draws, with the same random numbers at every value of its parameter. The
    search tries values over the whole range, then values around the best, and takes the minimum of
    a parabola.

    ==========================  ==================================================================
    model                       searched
    ==========================  ==================================================================
    ``erdos_renyi``             ``p``
    ``watts_strogatz``          ``p``, and even ``num_neighbors`` around the mean degree
    ``barabasi_albert``         ``num_edges``
    ``stochastic_block_model``  ``num_blocks``, at most 64 equal blocks of at least eight vertices,
                                and ``mixing``, the fraction of edges between blocks; the mean
                                degree is that of the graph
    ``configuration_model``     nothing: it has the degrees of the graph
    ==========================  ==================================================================

    Edge weights of the graph change its spectrum, but the models are unweighted.

    Cost: about ``29 * num_draws + num_repeats`` random graphs per model, three times as many for
    ``stochastic_block_model``. About ten seconds for a graph of 1,000 vertices and 5,000 edges.
    Memory: one drawn graph.

    Args:
        graph: Anything :func:`ritz.graphs.as_graph` accepts, with at least one edge.
        models: Models to compare.
        num_moments: Number of moments. More moments resolve finer structure, but also fit the
            randomness of this single graph.
        num_probes: Number of probes for graphs of more than 256 vertices. The moments of smaller
            graphs are exact.
        num_nodes: Number of vertices of drawn graphs. Defaults to that of the graph, at most 1,000.
            Drawn graphs of a different size have the same mean degree and block size. The fitted
            ``p`` of Erdős-Rényi and ``num_blocks`` are converted to the size of your graph.
        num_draws: Number of graphs drawn at each value.
        num_repeats: Number of graphs drawn for the interval of the parameter.
        generator: Source of randomness. Defaults to a new generator with seed 0.
        progress: ``True`` shows a progress bar; a :class:`Progress` object receives the progress.

    Reference: Sections 3.6.1 and 3.6.2 of *Spectral Machine Learning*.
    """
    graph = with_edges(graph)
    num_draws = check_count("num_draws", num_draws, low=2)
    num_repeats = check_count("num_repeats", num_repeats, low=2)
    if isinstance(models, str):
        raise TypeError(f"models must be a sequence of names, got {models!r}: pass [{models!r}]")
    if not models:
        raise ValueError("models must have at least one model, got none")
    for model in models:
        check_choice("models", model, MODELS)
    if graph.num_nodes < TUNING.fewest_nodes and num_nodes is None:
        raise GraphError(
            f"graph must have at least {TUNING.fewest_nodes} vertices to be compared with random "
            f"ones, got {graph.num_nodes}"
        )
    size = min(graph.num_nodes, TUNING.most_nodes) if num_nodes is None else num_nodes
    check_count("num_nodes", size, low=TUNING.fewest_nodes)
    generator = resolve_generator(generator)
    outline = Outline(degrees=_numbers_of_neighbors(graph), num_nodes=size)
    sampled = moments(
        graph,
        num_moments=num_moments,
        num_probes=num_probes,
        exact=graph.num_nodes <= TUNING.exact_nodes,
        generator=generator,
    )
    search = _Search(sampled, size, num_probes, num_draws, num_repeats, generator)
    choices = [families(model, outline) for model in models]
    totals = [search.max_drawn(some) for some in choices]
    fits: list[ModelFit] = []
    with tracking(progress, "graphs drawn", sum(totals)) as bar:
        search.report = bar.update
        for some in choices:
            fits.append(_for_size(search.nearest(some, outline), size, graph.num_nodes))
            search.num_drawn = sum(totals[: len(fits)])
            bar.update(search.num_drawn, fits[-1].model)
    return Fit(
        fits=_ranked(fits),
        num_nodes=size,
        density=search.density,
        seed=generator.initial_seed(),
    )


def _numbers_of_neighbors(graph: Graph) -> Tensor:
    """Return the number of neighbours of each vertex, ``(n,)``; a self-loop is no neighbour."""
    counts = graph.crow.diff().long()
    if graph.num_loops:
        counts = counts - torch.from_numpy(graph.to_scipy().diagonal() != 0).long()
    return counts


def _ranked(fits: Sequence[ModelFit]) -> tuple[ModelFit, ...]:
    """Sort by divergence, but put the simplest of the models that fit first."""
    ranked = sorted(fits, key=lambda one: one.divergence)
    possible = [one for one in ranked if one.divergence <= one.typical]
    first = min(possible or ranked[:1], key=lambda one: _NUM_PARAMETERS[one.model])  # type: ignore[index]
    return (first, *(one for one in ranked if one is not first))


# ------------------------------------------------------------------------------------------
# The search for the parameters of the random graphs that are nearest to a graph.


@dataclass(frozen=True, slots=True)
class _Tried:
    """Values of a family that were tried, ascending, with features and divergences."""

    family: Family
    values: Tensor
    features: Tensor
    divergences: Tensor

    @property
    def least(self) -> float:
        """The smallest divergence."""
        return float(self.divergences.min())

    def around_best(self) -> tuple[float, float]:
        """Return the neighbours of the best value."""
        values, place = self.values.tolist(), int(self.divergences.argmin())
        return values[max(place - 1, 0)], values[min(place + 1, len(values) - 1)]

    def joined(self, other: "_Tried") -> "_Tried":
        """Return the values of both, in ascending order."""
        order = torch.cat([self.values, other.values]).argsort()
        values, features, divergences = (
            torch.cat([getattr(self, name), getattr(other, name)])[order]
            for name in ("values", "features", "divergences")
        )
        return _Tried(self.family, values, features, divergences)

    def minimum(self, divergences: Tensor) -> float:
        """Return the minimum of the parabola through the values nearest to the best."""
        x = self.family.scaled(self.values)
        place = int(divergences.argmin())
        distances = (x - x[place]).abs()
        near = distances.argsort()[: TUNING.nearest]
        if float(distances[near].max()) > TUNING.close:
            near = torch.arange(max(place - 1, 0), min(place + 2, len(x)))
        if len(near) < 3:
            return float(self.values[place])
        # D = c + s t + q t^2 by least squares, t = x - x_best; the minimum is at t = -s / (2 q).
        ahead = x[near] - x[place]
        table = torch.stack([torch.ones_like(ahead), ahead, ahead.square()], dim=1)
        solution = torch.linalg.lstsq(table, divergences[near, None]).solution
        _, slope, curvature = solution[:, 0].tolist()
        if not curvature > 0:
            return float(self.values[place])
        vertex = min(max(-0.5 * slope / curvature, float(ahead.min())), float(ahead.max()))
        return self.family.unscaled(float(x[place]) + vertex)


@final
class _Search:
    """The spectrum of a graph, and the seeds of all graphs that are drawn to compare with it.

    Args:
        sampled: Moments of the graph.
        size: Vertices of drawn graphs.
        num_probes: Probes of drawn graphs.
        num_draws: Graphs drawn at each value.
        num_repeats: Graphs drawn at the minimum for the interval.
        generator: Source of the seeds.
    """

    def __init__(
        self,
        sampled: Moments,
        size: int,
        num_probes: int,
        num_draws: int,
        num_repeats: int,
        generator: torch.Generator,
    ) -> None:
        self.sampled, self.num_probes, self.num_draws = sampled, num_probes, num_draws
        self.size = size
        # One eigenvalue of a drawn graph has the mass 1 / size. Finer differences have no meaning.
        errors = sampled.stderr.clamp_min(1 / size)
        self.density: EntropicDensity = maxent(sampled.mean, interval=INTERVAL, stderr=errors)
        self.errors = matched_within(self.density)
        self.features = self.features_of(sampled.mean[None])
        self.num_drawn = 0
        self.report: Callable[[int], None] = lambda num_drawn: None
        # Use the same seeds at every value, so that divergences vary smoothly with the value.
        self.seeds: list[int]
        self.repeats: list[int]
        self.seeds, self.repeats = (
            torch.randint(0, 2**62, (count,), generator=generator).tolist()
            for count in (TUNING.final * num_draws, num_repeats)
        )

    def features_of(self, means: Tensor) -> Tensor:
        """Return multipliers and moments of the entropic spectra of mean moments ``(N, m + 1)``."""
        errors = self.errors.expand_as(means)
        return multipliers(means, maxent(means, interval=INTERVAL, stderr=errors))

    def max_drawn(self, choices: Sequence[Family]) -> int:
        """Return the maximum number of graphs that are drawn for a model with these families."""
        values = sum(len(one.values(one.low, one.high, one.num_values)) for one in choices)
        values += TUNING.fine_values if choices[0].parameter else 0
        # There are at most fifteen further numbers of blocks, or about three of neighbours.
        values += {"num_blocks": 45, "num_neighbors": 15, "": 0}[choices[0].whole]
        return (values + TUNING.final) * self.num_draws + len(self.repeats)

    def nearest(self, choices: Sequence[Family], outline: Outline) -> ModelFit:
        """Return the best parameters of a model, including its integer if it has one."""
        whole_range = [one.values(one.low, one.high, one.num_values) for one in choices]
        coarse = min(map(self.try_values, choices, whole_range), key=lambda one: one.least)
        values = coarse.values.tolist()
        between = coarse.family.values(*coarse.around_best(), TUNING.fine_values)
        new = [value for value in between if value not in values]
        best = coarse.joined(self.try_values(coarse.family, new)) if new else coarse
        if not best.family.whole:
            return self.finish(best)
        # The mixing of blocks hardly depends on their number. The fraction of rewired edges depends
        # on the number of neighbours, so it needs a wider window.
        blocks = best.family.whole == "num_blocks"
        window, count = (best, TUNING.blocks) if blocks else (coarse, TUNING.neighbors)
        tried = {best.family.count: best}
        while True:
            best = min(tried.values(), key=lambda one: one.least)
            further = siblings(tuple(tried), best.family, outline)
            if not further:
                break
            tried |= {one.count: self.beside(one, window, count) for one in further}
        others = [one for one in tried.values() if one is not best]
        if best.family.count != coarse.family.count:
            best = best.joined(self.beside(best.family, coarse, TUNING.fine_values))
        return self.finish(best, others)

    def beside(self, family: Family, best: _Tried, count: int) -> _Tried:
        """Try values of a family around the best value of another family of the model."""
        # Use the same fraction of the largest value. For blocks, the eigenvalues that belong to the
        # blocks are then the same for every number of blocks.
        stretch = family.high / best.family.high
        low, high = (min(max(stretch * end, family.low), family.high) for end in best.around_best())
        return self.try_values(family, family.values(low, high, count))

    def try_values(self, family: Family, values: list[float]) -> _Tried:
        """Draw graphs at some values and compare their spectra with the target."""
        seeds = self.seeds[: self.num_draws]
        means = torch.stack([self.draw(family, value, seeds).mean(0) for value in values])
        features = self.features_of(means)
        divergences = symmetric_kl(self.features, features)[0]
        return _Tried(family, torch.tensor(values, dtype=torch.float64), features, divergences)

    def draw(self, family: Family, value: float, seeds: list[int]) -> Tensor:
        """Return the moments of one graph per seed, ``(len(seeds), m + 1)``."""
        rows = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            sampled = moments(
                family.draw(value, generator),
                num_moments=len(self.errors) - 1,
                num_probes=self.num_probes,
                exact=self.size <= TUNING.exact_nodes,
                generator=generator,
            )
            rows.append(sampled.mean)
            self.num_drawn += 1
            self.report(self.num_drawn)
        return torch.stack(rows)

    def finish(self, tried: _Tried, others: Sequence[_Tried] = ()) -> ModelFit:
        """Return the minimum, its divergence, and the interval of the parameter.

        Args:
            tried: The best family.
            others: Families that differ from it in their integer.
        """
        family = tried.family
        value = tried.minimum(tried.divergences)
        rounded = round(value) if family.spacing == "whole" else value
        draws = self.draw(family, rounded, self.seeds)
        whole = self.features_of(draws.mean(0, keepdim=True))
        repeats = self.features_of(self.draw(family, rounded, self.repeats))
        typical = symmetric_kl(repeats, whole)[:, 0].quantile(0.95)
        parameters, interval = dict(family.fixed), {}
        if family.parameter:
            again = [tried.minimum(row) for row in symmetric_kl(repeats, tried.features)]
            parameters = {family.parameter: float(rounded)} | parameters
            interval = {family.parameter: _interval(family, value, again)}
        if family.whole:
            # Find the nearest family of each repeat.
            every = [tried, *others]
            heights = [symmetric_kl(repeats, one.features).amin(1) for one in every]
            places = torch.stack(heights).argmin(0).tolist()
            counts = [family.count, *(every[place].family.count for place in places)]
            interval[family.whole] = (float(min(counts)), float(max(counts)))
        return ModelFit(
            model=family.model,
            parameters=parameters,
            interval=interval,
            divergence=float(symmetric_kl(self.features, whole)),
            stderr=self.error(draws, whole),
            typical=float(typical),
            values=tried.values,
            divergences=tried.divergences,
        )

    def error(self, draws: Tensor, whole: Tensor) -> float:
        """Return the standard error of the divergence, from independent draws and probes."""
        without = self.features_of(leave_out(draws))
        variance = jackknife(symmetric_kl(without, self.features)[:, 0]).square()
        left = leave_out(self.sampled.samples)
        if len(left):
            parts = self.features_of(left)
            variance = variance + jackknife(symmetric_kl(parts, whole)[:, 0]).square()
        return float(variance.sqrt())


def _interval(family: Family, value: float, again: list[float]) -> tuple[float, float]:
    deviation = math.sqrt(sum((one - value) ** 2 for one in again) / len(again))
    low, high = max(value - 2 * deviation, family.low), min(value + 2 * deviation, family.high)
    return (math.floor(low), math.ceil(high)) if family.spacing == "whole" else (low, high)


def _for_size(fit: ModelFit, size: int, num_nodes: int) -> ModelFit:
    """Return parameters for ``num_nodes`` vertices with the same mean degree and block size."""
    if size == num_nodes:
        return fit
    # The mean degree is p (n - 1), and the size of a block is n / num_blocks.
    factor = {"num_blocks": num_nodes / size}
    if fit.model == "erdos_renyi":
        factor["p"] = (size - 1) / (num_nodes - 1)
    return replace(
        fit,
        parameters={k: v * factor.get(k, 1.0) for k, v in fit.parameters.items()},
        interval={
            k: (low * factor.get(k, 1.0), high * factor.get(k, 1.0))
            for k, (low, high) in fit.interval.items()
        },
        values=fit.values * factor.get("p", 1.0),
    )
