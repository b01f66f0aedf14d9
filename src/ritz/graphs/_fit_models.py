"""The random graph models that ``fit`` tries, as families with at most one parameter to search."""

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

    With these values, the parameters of the drawn graphs of ``tests/graphs/test_fit.py`` lie
    within the fitted intervals.
    """

    # Search edge densities from a quarter to four times that of the graph. The nearest Erdős-Rényi
    # and Barabási-Albert graphs have 1.3 times the degree of the karate club, and 1.75 times that
    # of a small world.
    reach: float = 4.0
    # Number of values over the whole range; over the whole range for each number of blocks; and
    # between the neighbours of the best value.
    num_values: int = 17
    block_values: int = 13
    fine_values: int = 9
    # Number of values for each further number of blocks, and for each further number of neighbours,
    # which shifts the minimum more.
    blocks: int = 3
    neighbors: int = 5
    # Smallest block. Two blocks are tried even if they are smaller.
    smallest_block: int = 8
    most_blocks: int = 64
    # The parabola at the minimum is fitted to five values, which averages their noise, if they all
    # lie within a quarter of the range; otherwise to three.
    nearest: int = 5
    close: float = 0.25
    # At the minimum, this many times more graphs are drawn.
    final: int = 3
    # Up to this number of vertices moments are exact, which costs less than 64 probes. For larger
    # graphs both sides of a comparison are sampled. With exact moments of the graph alone, three
    # blocks of 150 would be fitted as two.
    exact_nodes: int = 256
    # Limits of the default number of vertices of drawn graphs.
    fewest_nodes: int = 8
    most_nodes: int = 1000
    # Maximum number of rounds in which the configuration model switches edges. Sparse graphs need 2
    # to 5, the karate club 21, and a graph with half of all pairs 37. With 90 % of all pairs, 1 %
    # of the edges are erased.
    rounds: int = 200


TUNING = Tuning()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The properties of a graph that the families use.

    Attributes:
        degrees: Numbers of neighbours, ``(n,)``, int64.
        num_nodes: Number of vertices of the drawn graphs.
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
        parameter: Name of the parameter to search; empty if there is none.
        low: Smallest value.
        high: Largest value.
        spacing: Spacing of the values: ``even``, ``square`` (of evenly spaced roots), ``ratio``, or
            ``whole`` (ratios, rounded).
        draw: Function from a value and a generator to a graph.
        num_values: Number of values over the whole range.
        fixed: Other parameters.
        whole: Name of the integer in ``fixed`` that :func:`siblings` searches; empty if none.
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
        """The integer that is searched beside the parameter; 0 if there is none."""
        return round(self.fixed[self.whole]) if self.whole else 0

    def values(self, low: float, high: float, count: int) -> list[float]:
        """Return ``count`` values from ``low`` to ``high``, ascending; integers may be fewer."""
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
        """Return the transformed values, which are evenly spaced."""
        if self.spacing == "square":
            return values.sqrt()
        return values if self.spacing == "even" else values.log()

    def unscaled(self, x: float) -> float:
        """Return the value whose transform is ``x``, clamped to the range."""
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
    """Return the families to try next, whose integers are closer to the best so far.

    For blocks, the new integers are the geometric means of the best one and the nearest tried ones
    on either side, beginning with half and twice the best. For neighbours, they are the next even
    numbers.

    Args:
        tried: Integers of the families that were tried.
        best: The best of these families.
        outline: Properties of the graph.
    """
    n, k = outline.num_nodes, best.count
    if best.whole == "num_neighbors":
        beside = [one for one in (k - 2, k + 2) if 2 <= one <= _most_neighbors(n)]
        return [_ring(one, n) for one in beside if one not in tried]
    if best.whole != "num_blocks":
        return []
    below = max((one for one in tried if one < k), default=max(1, k // 4))
    above = min((one for one in tried if one > k), default=min(4 * k, _most_blocks(n) + 1))
    # A geometric mean halves the logarithm of the ratio.
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

    # There must be enough edges across that the rest fits inside of the blocks. There are at most
    # as many as without blocks.
    low, high = max(0.0, 1 - (n / k - 1) / degree), 1 - 1 / k
    # The eigenvalues of blocks are proportional to the mixing, but moments resolve angles, which
    # are the roots of small eigenvalues. Evenly spaced mixings could miss a narrow minimum near 0.
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
        degrees[degrees.argmin()] += 1  # half-edges are paired, so their number must be even
    ends = _switched(stub_pairs(degrees, generator), n, generator)
    return graph_of(ends, n, f"configuration model, n = {n}")


def _switched(ends: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Return edges with the same degrees, but without loops and repeats: their ends are switched.

    Erasing loops and repeats would remove many edges of a dense graph. If no simple graph has these
    degrees, some remain after the last round, and are erased when the graph is assembled.
    """
    for _ in range(TUNING.rounds):
        keys = pair_keys(ends[0], ends[1], n)
        bad = ((ends[0] == ends[1]) | ~first_of_equals(keys)).nonzero()[:, 0]
        if not len(bad):
            break
        # (a, b), (c, d) become (a, d), (c, b), unless that gives a loop or an existing edge.
        partners = torch.randint(0, ends.shape[1], (len(bad),), generator=generator)
        new = torch.stack([ends[0, bad], ends[1, partners], ends[0, partners], ends[1, bad]])
        first, second = pair_keys(new[0], new[1], n), pair_keys(new[2], new[3], n)
        fine = (new[0] != new[1]) & (new[2] != new[3]) & (first != second)
        fine &= ~torch.isin(first, keys) & ~torch.isin(second, keys)
        # Two switches in one round must not create the same edge or use the same partner.
        both = torch.cat([first, second])
        alone = first_of_equals(both) & first_of_equals(both.flip(0)).flip(0)
        fine &= alone[: len(bad)] & alone[len(bad) :] & first_of_equals(partners)
        fine &= ~torch.isin(partners, bad)
        ends[1, bad[fine]], ends[1, partners[fine]] = new[1, fine], new[3, fine]
    return ends
