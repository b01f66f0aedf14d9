"""Families of random graphs that a graph may be compared with, each with what is searched."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ritz.graphs.models import (
    barabasi_albert,
    erdos_renyi,
    graph_of,
    stochastic_block_model,
    watts_strogatz,
)
from ritz.graphs.structures import Graph

Model = Literal[
    "erdos_renyi",
    "watts_strogatz",
    "barabasi_albert",
    "stochastic_block_model",
    "configuration_model",
]
REACH = 4.0  # mean degrees are searched from one such part of the graph's own to that multiple
NUM_VALUES = 17  # over the whole range; half as many for each number of blocks
SMALLEST_BLOCK = 8  # vertices of a block
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
        spacing: ``even``, ``ratio`` or ``whole`` (ratios, rounded): of the first values tried.
        num_values: How many of these.
        draw: A graph, from the value and a generator.
        fixed: Parameters that are not searched.
    """

    model: Model
    parameter: str
    low: float
    high: float
    spacing: Literal["even", "ratio", "whole"]
    num_values: int
    draw: Callable[[float, torch.Generator], Graph]
    fixed: dict[str, float]

    def values(self, low: float, high: float, count: int) -> list[float]:
        """Values from ``low`` to ``high``, ascending: ``count`` of them, or fewer whole ones."""
        if not self.parameter:
            return [0.0]
        if self.spacing == "even":
            return torch.linspace(low, high, count, dtype=torch.float64).tolist()
        start, end = math.log(low), math.log(high)
        spaced = torch.linspace(start, end, count, dtype=torch.float64).exp().clamp(low, high)
        if self.spacing == "whole":
            return sorted(set(spaced.round().tolist()))
        return spaced.tolist()

    def scaled(self, values: Tensor) -> Tensor:
        """The variable in which values are spaced evenly."""
        return values if self.spacing == "even" else values.log()

    def unscaled(self, x: float) -> float:
        """The value at which the variable is ``x``, between the least and the largest."""
        return min(max(x if self.spacing == "even" else math.exp(x), self.low), self.high)


def families(model: Model, outline: Outline) -> list[Family]:
    """Return the families of a model: one for each choice of what is not searched."""
    n, degree = outline.num_nodes, outline.mean_degree
    if model == "erdos_renyi":
        p = degree / (n - 1)
        return [_family(model, "p", p / REACH, min(1.0, p * REACH), "ratio", partial(_er, n))]
    if model == "watts_strogatz":
        k = min(max(2, 2 * round(degree / 2)), 2 * (n // 4))
        fixed = {"num_neighbors": float(k)}
        return [_family(model, "p", 0.0, 1.0, "even", partial(_ws, n, k), fixed)]
    if model == "barabasi_albert":
        low = max(1.0, math.floor(degree / 2 / REACH))
        high = min(n - 1.0, max(math.ceil(degree / 2 * REACH), 2.0))
        return [_family(model, "num_edges", low, high, "whole", partial(_ba, n))]
    if model == "stochastic_block_model":
        counts = [2**i for i in range(1, 7) if 2**i <= min(MOST_BLOCKS, n // SMALLEST_BLOCK)]
        return [_blocks(k, n, degree) for k in counts]
    return [_family(model, "", 0.0, 0.0, "even", partial(_configuration, outline))]


def _family(
    model: Model,
    parameter: str,
    low: float,
    high: float,
    spacing: Literal["even", "ratio", "whole"],
    draw: Callable[[float, torch.Generator], Graph],
    fixed: dict[str, float] | None = None,
) -> Family:
    return Family(
        model=model,
        parameter=parameter,
        low=low,
        high=high,
        spacing=spacing,
        num_values=NUM_VALUES if model != "stochastic_block_model" else NUM_VALUES // 2 + 1,
        draw=draw,
        fixed=fixed or {},
    )


def _blocks(k: int, n: int, degree: float) -> Family:
    # No more edges inside blocks than there are pairs, and no more across than at random.
    sizes = [n // k + (i < n % k) for i in range(k)]
    low, high = max(0.0, 1 - (n / k - 1) / degree), 1 - 1 / k
    draw = partial(_sbm, sizes, degree)
    fixed = {"num_blocks": float(k), "block_size": n / k, "mean_degree": degree}
    return _family("stochastic_block_model", "mixing", min(low, high), high, "even", draw, fixed)


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
        bad = ((ends[0] == ends[1]) | ~_first_of_equals(keys)).nonzero()[:, 0]
        if not len(bad):
            break
        partners = torch.randint(0, ends.shape[1], (len(bad),), generator=generator)
        new = torch.stack([ends[0, bad], ends[1, partners], ends[0, partners], ends[1, bad]])
        first, second = (pair.amin(0) * n + pair.amax(0) for pair in (new[:2], new[2:]))
        fine = (new[0] != new[1]) & (new[2] != new[3]) & (first != second)
        fine &= ~torch.isin(first, keys) & ~torch.isin(second, keys)
        # Two exchanges at once must neither make the same edge nor take the same partner.
        both = torch.cat([first, second])
        alone = _first_of_equals(both) & _first_of_equals(both.flip(0)).flip(0)
        fine &= alone[: len(bad)] & alone[len(bad) :] & _first_of_equals(partners)
        fine &= ~torch.isin(partners, bad)
        ends[1, bad[fine]], ends[1, partners[fine]] = new[1, fine], new[3, fine]
    return ends


def _first_of_equals(keys: Tensor) -> Tensor:
    ordered, order = keys.sort(stable=True)
    first = torch.ones(len(keys), dtype=torch.bool)
    first[order[1:]] = ordered[1:] != ordered[:-1]
    return first
