"""The search for the parameters of a random graph that is nearest to a given one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ritz._core.storage import storable
from ritz.graphs.divergences import multipliers, symmetric_kl
from ritz.graphs.entropic import INTERVAL, moments
from ritz.graphs.families import Family
from ritz.graphs.resampling import jackknife, leave_out, matched_within
from ritz.graphs.structures import Graph
from ritz.spectra import EntropicDensity, Moments, maxent

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
