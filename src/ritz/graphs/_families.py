"""Families of random graphs with at most one parameter to search, and which ones to try."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ritz.graphs._graph import Graph
from ritz.graphs._random import (
    barabasi_albert,
    erdos_renyi,
    first_of_equals,
    graph_of,
    pair_keys,
    stochastic_block_model,
    stub_pairs,
    watts_strogatz,
)

Model = Literal[
    "erdos_renyi",
    "watts_strogatz",
    "barabasi_albert",
    "stochastic_block_model",
    "configuration_model",
]
Spacing = Literal["even", "square", "ratio", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Sizes of the search of ``fit``.

    ``tests/graphs/test_fitting.py`` decides: parameters, blocks and neighbours of drawn graphs are
    found again within their intervals.
    """

    # Edge densities from a quarter to four times that of the graph are searched. The nearest
    # Erdős-Rényi and Barabási-Albert graphs have 1.3 times the degree of the karate club, and 1.75
    # times that of a small world.
    reach: float = 4.0
    # Values over the whole range, the same for each number of blocks, and between the neighbours of
    # the best.
    num_values: int = 17
    block_values: int = 13
    fine_values: int = 9
    # Values for each further number of blocks, or of neighbours, which move the minimum further.
    blocks: int = 3
    neighbors: int = 5
    # Blocks have at least eight vertices, except that two blocks are always tried.
    smallest_block: int = 8
    most_blocks: int = 64
    # The parabola at the minimum goes through five values, which averages their noise, if all are
    # within a quarter of the range. Otherwise it goes through three: it does not fit a wider range.
    nearest: int = 5
    close: float = 0.25
    # Draws at the minimum: as many times those of other values.
    final: int = 3
    # Vertices up to which all eigenvalues cost less than 64 probes. Both sides of a comparison are
    # sampled beyond: with exact moments of the graph alone, three blocks of 150 are taken for two.
    exact_nodes: int = 256
    # Vertices of drawn graphs, by default.
    fewest_nodes: int = 8
    most_nodes: int = 1000
    # Rounds of switching edges of the configuration model. Sparse graphs need 2 to 5, the karate
    # club 21, half of all pairs 37; with 90 % of all pairs, 1 % of the edges are left to erase.
    rounds: int = 200


TUNING = Tuning()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What the families take from a graph.

    Attributes:
        degrees: Numbers of neighbours, ``(n,)``, int64.
        num_nodes: Vertices of the drawn graphs.
    """

    degrees: Tensor
    num_nodes: int

    @property
    def mean_degree(self) -> float:
        """Mean number of neighbours, at most ``num_nodes - 1``."""
        return min(float(self.degrees.double().mean()), self.num_nodes - 1.0)


@dataclass(frozen=True, slots=True)
class Family:
    """A family of random graphs with at most one parameter to search.

    Attributes:
        model: Name of the model.
        parameter: The parameter to search, empty if there is none.
        low: Smallest value.
        high: Largest value.
        spacing: Spacing of the values: ``even``, ``square`` (of evenly spaced roots), ``ratio``, or
            ``whole`` (ratios, rounded).
        draw: Function from a value and a generator to a graph.
        num_values: Number of values over the whole range.
        fixed: Other parameters.
        whole: A whole number among these that :func:`siblings` searches, empty if there is none.
    """

    model: Model
    parameter: str
    low: float
    high: float
    spacing: Spacing
    draw: Callable[[float, torch.Generator], Graph]
    num_values: int = TUNING.num_values
    fixed: dict[str, float] = field(default_factory=dict)
    whole: Literal["num_blocks", "num_neighbors", ""] = ""

    @property
    def count(self) -> int:
        """The whole number that is searched beside the parameter; 0 if there is none."""
        return round(self.fixed[self.whole]) if self.whole else 0

    def values(self, low: float, high: float, count: int) -> list[float]:
        """Values from ``low`` to ``high``, ascending; there may be fewer whole ones."""
        if not self.parameter:
            return [0.0]
        if self.spacing == "even":
            return torch.linspace(low, high, count, dtype=torch.float64).tolist()
        if self.spacing == "square":
            roots = torch.linspace(low**0.5, high**0.5, count, dtype=torch.float64)
            return roots.square().clamp(low, high).tolist()
        start, end = math.log(low), math.log(high)
        spaced = torch.linspace(start, end, count, dtype=torch.float64).exp().clamp(low, high)
        return sorted(set(spaced.round().tolist())) if self.spacing == "whole" else spaced.tolist()

    def scaled(self, values: Tensor) -> Tensor:
        """The variable in which values are evenly spaced."""
        if self.spacing == "square":
            return values.sqrt()
        return values if self.spacing == "even" else values.log()

    def unscaled(self, x: float) -> float:
        """The value at which the variable is ``x``, clamped to the range."""
        plain = x if self.spacing == "even" else math.exp(x)
        return min(max(x * x if self.spacing == "square" else plain, self.low), self.high)


def families(model: Model, outline: Outline) -> list[Family]:
    """Return the families of a model to try first."""
    n, degree, reach = outline.num_nodes, outline.mean_degree, TUNING.reach
    if model == "erdos_renyi":
        low, high = degree / (n - 1) / reach, min(1.0, degree / (n - 1) * reach)
        return [
            Family(
                model, "p", low, high, "ratio", lambda p, rng: erdos_renyi(n, p=p, generator=rng)
            )
        ]
    if model == "watts_strogatz":
        return [_ring(min(max(2, 2 * round(degree / 2)), _most_neighbors(n)), n)]
    if model == "barabasi_albert":
        low = max(1.0, math.floor(degree / 2 / reach))
        high = min(n - 1.0, max(math.ceil(degree / 2 * reach), 2.0))

        def attach(num_edges: float, generator: torch.Generator) -> Graph:
            return barabasi_albert(n, num_edges=round(num_edges), generator=generator)

        return [Family(model, "num_edges", low, high, "whole", attach)]
    if model == "stochastic_block_model":
        return [_blocks(k, n, degree) for k in (2, 8, 32) if k <= _most_blocks(n)]
    return [Family(model, "", 0.0, 0.0, "even", partial(_configuration, outline))]


def siblings(tried: Sequence[int], best: Family, outline: Outline) -> list[Family]:
    """Return families to try next, whose whole numbers are nearer to the best so far.

    Numbers of blocks halve the ratio to those tried on either side, beginning with half and twice
    the best, until these are its neighbours. Numbers of neighbours are the next even ones.

    Args:
        tried: Whole numbers of the families tried.
        best: The nearest of these families.
        outline: What the families take from the graph.
    """
    n, k = outline.num_nodes, best.count
    if best.whole == "num_neighbors":
        beside = [one for one in (k - 2, k + 2) if 2 <= one <= _most_neighbors(n)]
        return [_ring(one, n) for one in beside if one not in tried]
    if best.whole != "num_blocks":
        return []
    below = max((one for one in tried if one < k), default=max(1, k // 4))
    above = min((one for one in tried if one > k), default=min(4 * k, _most_blocks(n) + 1))
    # The geometric mean halves a ratio.
    new = {min(max(round(math.sqrt(end * k)), below + 1), above - 1) for end in (below, above)}
    return [_blocks(one, n, outline.mean_degree) for one in sorted(new - {below, k, above})]


def _most_blocks(n: int) -> int:
    return max(2, min(TUNING.most_blocks, n // TUNING.smallest_block))


def _most_neighbors(n: int) -> int:
    return 2 * ((n - 1) // 2)


def _ring(k: int, n: int) -> Family:
    def draw(p: float, generator: torch.Generator) -> Graph:
        return watts_strogatz(n, num_neighbors=k, p=p, generator=generator)

    fixed = {"num_neighbors": float(k)}
    return Family("watts_strogatz", "p", 0.0, 1.0, "even", draw, fixed=fixed, whole="num_neighbors")


def _blocks(k: int, n: int, degree: float) -> Family:
    sizes = [n // k + (i < n % k) for i in range(k)]

    def draw(mixing: float, generator: torch.Generator) -> Graph:
        # A vertex has (1 - mixing) degree neighbours among the n / k - 1 others of its block.
        inside = min(1.0, (1 - mixing) * degree / (n / k - 1))
        across = min(1.0, mixing * degree / (n - n / k))
        probabilities = torch.full((k, k), across, dtype=torch.float64).fill_diagonal_(inside)
        return stochastic_block_model(sizes, probabilities=probabilities, generator=generator)

    # No more edges inside blocks than there are pairs, and no more across than at random.
    low, high = max(0.0, 1 - (n / k - 1) / degree), 1 - 1 / k
    # The eigenvalues of blocks grow with the mixing, and moments see angles, the roots of small
    # eigenvalues: evenly spaced mixings would miss a narrow minimum near zero.
    return Family(
        "stochastic_block_model",
        "mixing",
        min(low, high),
        high,
        "square",
        draw,
        num_values=TUNING.block_values,
        fixed={"num_blocks": float(k), "block_size": n / k, "mean_degree": degree},
        whole="num_blocks",
    )


def _configuration(outline: Outline, value: float, generator: torch.Generator) -> Graph:
    degrees, n = outline.degrees, outline.num_nodes
    if n != len(degrees):
        chosen = torch.randint(0, len(degrees), (n,), generator=generator)
        degrees = degrees[chosen].clamp_max(n - 1)
    if int(degrees.sum()) % 2:
        degrees = degrees.clone()
        degrees[degrees.argmin()] += 1  # half-edges are paired
    ends = _switched(stub_pairs(degrees, generator), n, generator)
    return graph_of(ends, n, f"configuration model, n = {n}")


def _switched(ends: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Edges of the same degrees with fewer loops and repeats: these exchange an end with others.

    Erasing them would thin out a dense graph. What remains after many rounds, if no simple graph
    has the degrees, is erased when the graph is made.
    """
    for _ in range(TUNING.rounds):
        keys = pair_keys(ends[0], ends[1], n)
        bad = ((ends[0] == ends[1]) | ~first_of_equals(keys)).nonzero()[:, 0]
        if not len(bad):
            break
        # (a, b), (c, d) become (a, d), (c, b), unless that is a loop or an edge that exists.
        partners = torch.randint(0, ends.shape[1], (len(bad),), generator=generator)
        new = torch.stack([ends[0, bad], ends[1, partners], ends[0, partners], ends[1, bad]])
        first, second = pair_keys(new[0], new[1], n), pair_keys(new[2], new[3], n)
        fine = (new[0] != new[1]) & (new[2] != new[3]) & (first != second)
        fine &= ~torch.isin(first, keys) & ~torch.isin(second, keys)
        # Two exchanges at once must neither make the same edge nor take the same partner.
        both = torch.cat([first, second])
        alone = first_of_equals(both) & first_of_equals(both.flip(0)).flip(0)
        fine &= alone[: len(bad)] & alone[len(bad) :] & first_of_equals(partners)
        fine &= ~torch.isin(partners, bad)
        ends[1, bad[fine]], ends[1, partners[fine]] = new[1, fine], new[3, fine]
    return ends
