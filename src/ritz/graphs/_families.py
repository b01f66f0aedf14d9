"""Families of random graphs that a graph may be compared with, each with what is searched."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    stochastic_block_model,
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
REACH = 4.0  # mean degrees are searched from one such part of the graph's own to that multiple
NUM_VALUES = 17  # over the whole range
BLOCK_VALUES = 13  # likewise, for each number of blocks that is tried first
SMALLEST_BLOCK = 8  # vertices of a block, unless there are to be two
MOST_BLOCKS = 64
ROUNDS = 200  # of exchanges between edges


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What the families take over from a graph.

    Attributes:
        degrees: Numbers of neighbours, ``(n,)``, int64.
        num_nodes: Vertices of the graphs that are drawn.
    """

    degrees: Tensor
    num_nodes: int

    @property
    def mean_degree(self) -> float:
        """Mean number of neighbours, as far as graphs of that many vertices can have it."""
        return min(float(self.degrees.double().mean()), self.num_nodes - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of random graphs with at most one parameter that is searched.

    Attributes:
        model: Its name.
        parameter: What is searched; empty where nothing is.
        low: Least value.
        high: Largest value.
        spacing: ``even``, ``square`` (of even roots), ``ratio`` or ``whole`` (ratios, rounded): of
            the values tried.
        num_values: How many of these.
        draw: A graph, from the value and a generator.
        fixed: Parameters that are not searched.
        whole: One of these that is searched by :func:`siblings`, a whole number; empty where none.
    """

    model: Model
    parameter: str
    low: float
    high: float
    spacing: Spacing
    num_values: int
    draw: Callable[[float, torch.Generator], Graph]
    fixed: dict[str, float]
    whole: str = ""

    @property
    def count(self) -> int:
        """The whole number that is searched beside the parameter; 0 where there is none."""
        return round(self.fixed[self.whole]) if self.whole else 0

    def values(self, low: float, high: float, count: int) -> list[float]:
        """Values from ``low`` to ``high``, ascending: ``count`` of them, or fewer whole ones."""
        if not self.parameter:
            return [0.0]
        if self.spacing == "even":
            return torch.linspace(low, high, count, dtype=torch.float64).tolist()
        if self.spacing == "square":
            roots = torch.linspace(low**0.5, high**0.5, count, dtype=torch.float64)
            return roots.square().clamp(low, high).tolist()
        start, end = math.log(low), math.log(high)
        spaced = torch.linspace(start, end, count, dtype=torch.float64).exp().clamp(low, high)
        if self.spacing == "whole":
            return sorted(set(spaced.round().tolist()))
        return spaced.tolist()

    def scaled(self, values: Tensor) -> Tensor:
        """The variable in which values are spaced evenly."""
        if self.spacing == "square":
            return values.sqrt()
        return values if self.spacing == "even" else values.log()

    def unscaled(self, x: float) -> float:
        """The value at which the variable is ``x``, between the least and the largest."""
        plain = x if self.spacing == "even" else math.exp(x)
        return min(max(x * x if self.spacing == "square" else plain, self.low), self.high)


def families(model: Model, outline: Outline) -> list[Family]:
    """Return the families of a model: one for each choice of what is not searched."""
    n, degree = outline.num_nodes, outline.mean_degree
    if model == "erdos_renyi":
        p = degree / (n - 1)
        return [_family(model, "p", p / REACH, min(1.0, p * REACH), "ratio", partial(_er, n))]
    if model == "watts_strogatz":
        return [_ring(min(max(2, 2 * round(degree / 2)), _most_neighbors(n)), n)]
    if model == "barabasi_albert":
        low = max(1.0, math.floor(degree / 2 / REACH))
        high = min(n - 1.0, max(math.ceil(degree / 2 * REACH), 2.0))
        return [_family(model, "num_edges", low, high, "whole", partial(_ba, n))]
    if model == "stochastic_block_model":
        counts = [k for k in (2, 8, 32) if k <= _most_blocks(n)]
        return [_blocks(k, n, degree) for k in counts]
    return [_family(model, "", 0.0, 0.0, "even", partial(_configuration, outline))]


def siblings(tried: Sequence[int], best: Family, outline: Outline) -> list[Family]:
    """Return families to try next, of whole numbers nearer to the best of those tried.

    Numbers of blocks halve the ratio to those tried on either side, twice and half the best at
    first, until these are the next ones; numbers of neighbours are the next even ones.

    Args:
        tried: Whole numbers of the families tried.
        best: The nearest of these families.
        outline: What was taken over from the graph.
    """
    n, k = outline.num_nodes, best.count
    if best.whole == "num_neighbors":
        beside = [one for one in (k - 2, k + 2) if 2 <= one <= _most_neighbors(n)]
        return [_ring(one, n) for one in beside if one not in tried]
    if best.whole != "num_blocks":
        return []
    below = max((one for one in tried if one < k), default=max(1, k // 4))
    above = min((one for one in tried if one > k), default=min(4 * k, _most_blocks(n) + 1))
    new = {min(max(round(math.sqrt(end * k)), below + 1), above - 1) for end in (below, above)}
    return [_blocks(one, n, outline.mean_degree) for one in sorted(new - {below, k, above})]


def _most_blocks(n: int) -> int:
    return max(2, min(MOST_BLOCKS, n // SMALLEST_BLOCK))


def _most_neighbors(n: int) -> int:
    return 2 * ((n - 1) // 2)


def _ring(k: int, n: int) -> Family:
    fixed = {"num_neighbors": float(k)}
    return _family("watts_strogatz", "p", 0.0, 1.0, "even", partial(_ws, n, k), fixed)


def _family(
    model: Model,
    parameter: str,
    low: float,
    high: float,
    spacing: Spacing,
    draw: Callable[[float, torch.Generator], Graph],
    fixed: dict[str, float] | None = None,
) -> Family:
    wholes = {"watts_strogatz": "num_neighbors", "stochastic_block_model": "num_blocks"}
    return Family(
        model=model,
        parameter=parameter,
        low=low,
        high=high,
        spacing=spacing,
        num_values=NUM_VALUES if model != "stochastic_block_model" else BLOCK_VALUES,
        draw=draw,
        fixed=fixed or {},
        whole=wholes.get(model, ""),
    )


def _blocks(k: int, n: int, degree: float) -> Family:
    # No more edges inside blocks than there are pairs, and no more across than at random.
    sizes = [n // k + (i < n % k) for i in range(k)]
    low, high = max(0.0, 1 - (n / k - 1) / degree), 1 - 1 / k
    draw = partial(_sbm, sizes, degree)
    fixed = {"num_blocks": float(k), "block_size": n / k, "mean_degree": degree}
    # Moments see angles, and the root of a small eigenvalue is that: evenly spaced, a narrow
    # minimum near zero would be missed.
    low = min(low, high)
    return _family("stochastic_block_model", "mixing", low, high, "square", draw, fixed)


def _er(n: int, p: float, generator: torch.Generator) -> Graph:
    return erdos_renyi(n, p=p, generator=generator)


def _ws(n: int, num_neighbors: int, p: float, generator: torch.Generator) -> Graph:
    return watts_strogatz(n, num_neighbors=num_neighbors, p=p, generator=generator)


def _ba(n: int, num_edges: float, generator: torch.Generator) -> Graph:
    return barabasi_albert(n, num_edges=round(num_edges), generator=generator)


def _sbm(sizes: list[int], degree: float, mixing: float, generator: torch.Generator) -> Graph:
    k, n = len(sizes), sum(sizes)
    inside = min(1.0, (1 - mixing) * degree / (n / k - 1))
    across = min(1.0, mixing * degree / (n - n / k))
    probabilities = torch.full((k, k), across, dtype=torch.float64).fill_diagonal_(inside)
    return stochastic_block_model(sizes, probabilities=probabilities, generator=generator)


def _configuration(outline: Outline, value: float, generator: torch.Generator) -> Graph:
    degrees, n = outline.degrees, outline.num_nodes
    if n != len(degrees):
        chosen = torch.randint(0, len(degrees), (n,), generator=generator)
        degrees = degrees[chosen].clamp_max(n - 1)
    if int(degrees.sum()) % 2:
        degrees = degrees.clone()
        degrees[degrees.argmin()] += 1  # half-edges are paired
    stubs = torch.repeat_interleave(torch.arange(n), degrees)
    ends = stubs[torch.randperm(len(stubs), generator=generator)].reshape(2, -1)
    return graph_of(_switched(ends, n, generator), n, f"configuration model, n = {n}")


def _switched(ends: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Edges of the same degrees with fewer loops and repeats: such exchange an end with others.

    Erasing them instead would thin out a dense graph. What is left after many rounds, where no
    simple graph has the degrees, is erased where the graph is made.
    """
    ends = ends.clone()
    for _ in range(ROUNDS):
        keys = ends.amin(0) * n + ends.amax(0)
        bad = ((ends[0] == ends[1]) | ~first_of_equals(keys)).nonzero()[:, 0]
        if not len(bad):
            break
        partners = torch.randint(0, ends.shape[1], (len(bad),), generator=generator)
        new = torch.stack([ends[0, bad], ends[1, partners], ends[0, partners], ends[1, bad]])
        first, second = (pair.amin(0) * n + pair.amax(0) for pair in (new[:2], new[2:]))
        fine = (new[0] != new[1]) & (new[2] != new[3]) & (first != second)
        fine &= ~torch.isin(first, keys) & ~torch.isin(second, keys)
        # Two exchanges at once must neither make the same edge nor take the same partner.
        both = torch.cat([first, second])
        alone = first_of_equals(both) & first_of_equals(both.flip(0)).flip(0)
        fine &= alone[: len(bad)] & alone[len(bad) :] & first_of_equals(partners)
        fine &= ~torch.isin(partners, bad)
        ends[1, bad[fine]], ends[1, partners[fine]] = new[1, fine], new[3, fine]
    return ends
