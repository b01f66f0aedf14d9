"""How alike real graphs are, by their spectra: Spectral Machine Learning, Figure 3.4.

The published classes are biological, citation (collaborations) and road networks. Of these, the
last two are here: every divergence within one is below every one between them. Social networks take
the place of the first, and are no class by their spectra: friendships within circles (Facebook)
look like collaborations, trust and votes between strangers do not, by whatever number of moments,
in the largest component alone, and without trees hanging from it. The result names every such pair.
Then every graph is cut into two random halves, which are to find each other among all others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ritz import graphs
from ritz._core.checks import check_count, check_range
from ritz._core.progress import Progress, tracking
from ritz._core.storage import storable
from ritz.spectra import Moments
from ritz.studies._protocol import data_file, versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = ("citation", "road")  # of the kinds, those that were published
MEASURES = ("symmetric_kl", "jensen_shannon", "wasserstein", "heat")


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What is compared, and where it lies.

    Attributes:
        citation: Files of collaboration networks in the folder.
        road: Files of road networks.
        social: Files of social networks.
        num_moments: Moments of each.
        num_probes: Probes of each.
        other_moments: Numbers of moments that the kinds are compared by as well.
        data: The folder; ``RITZ_DATA`` of the environment by default.
        seed: Of probes and halves.
    """

    citation: tuple[str, ...] = (
        "graphs/ca-AstroPh.txt.gz",
        "graphs/ca-CondMat.txt.gz",
        "graphs/ca-GrQc.txt.gz",
        "graphs/ca-HepPh.txt.gz",
        "graphs/ca-HepTh.txt.gz",
    )
    road: tuple[str, ...] = ("graphs/road-luxembourg-osm.mtx.gz", "graphs/road-minnesota.mtx")
    social: tuple[str, ...] = (
        "graphs/facebook_combined.txt.gz",
        "graphs/soc-Epinions1.txt.gz",
        "graphs/wiki-Vote.txt.gz",
    )
    num_moments: int = 100
    num_probes: int = 64
    other_moments: tuple[int, ...] = (20, 50, 200)
    data: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for count in (self.num_moments, *self.other_moments):
            check_count("num_moments", count)
        check_count("num_probes", self.num_probes, low=2)
        check_range("seed", self.seed, low=0)
        if len(self.citation) + len(self.road) + len(self.social) < 2:
            raise ValueError("citation, road and social must name two graphs at least")

    @property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """The files by kind."""
        return {"citation": self.citation, "road": self.road, "social": self.social}


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Divergences between graphs and between their halves.

    Attributes:
        config: What was asked for.
        versions: What computed it.
        sizes: Vertices and edges of each graph.
        kinds: What kind each is of.
        likeness: Of the graphs, by measure.
        treated: Symmetric divergences ``(N, N)`` of the graphs treated otherwise: by other numbers
            of moments, the largest component alone, that without trees hanging from it.
        halves: Of both halves of every graph, ``2 N`` of them, halves of one beside each other.
        apart: Divergence of the two halves of each graph, ``(N,)``.
        others: Least divergence of either half from another graph or its halves, ``(N,)``.
    """

    config: Config
    versions: dict[str, str]
    sizes: tuple[tuple[int, int], ...]
    kinds: tuple[str, ...]
    likeness: dict[str, graphs.Similarity]
    treated: dict[str, Tensor]
    halves: graphs.Similarity
    apart: Tensor
    others: Tensor

    def __str__(self) -> str:
        found = self.likeness["symmetric_kl"]
        lines = [str(found), "Within a kind and between it and the others:"]
        for measure in MEASURES:
            matrix = self.likeness[measure].matrix
            for kind in dict.fromkeys(self.kinds):
                lines.append(f"  {measure:15}{kind:10}{_told(matrix, self.kinds, kind)}")
        lines += [*self._published_lines(), *self._treated_lines()]
        lines.append("Nearer to a graph of another kind than to one of its own:")
        lines += [f"  {one}" for one in misplaced(found.matrix, found.names, self.kinds)] or [
            "  none"
        ]
        lines.append("Two halves of a graph, and the nearest half or whole of another:")
        for name, own, other in zip(
            found.names, self.apart.tolist(), self.others.tolist(), strict=True
        ):
            lines.append(f"  {name:22}{own:>9.2g}{other:>9.2g}{'' if own < other else '  NOT'}")
        return "\n".join(lines)

    def _published_lines(self) -> list[str]:
        mine = [place for place, kind in enumerate(self.kinds) if kind in PUBLISHED]
        kinds = tuple(self.kinds[place] for place in mine)
        matrix = self.likeness["symmetric_kl"].matrix[mine][:, mine]
        lines = ["The published kinds alone:"]
        return lines + [f"  {kind:10}{_told(matrix, kinds, kind)}" for kind in dict.fromkeys(kinds)]

    def _treated_lines(self) -> list[str]:
        lines = [
            "Share of pairs within a kind that are nearer than those between, treated otherwise:"
        ]
        for name, matrix in sorted(self.treated.items()):
            shares = [
                f"{kind} {separation(matrix, self.kinds, kind)['ordered']:.0%}"
                for kind in dict.fromkeys(self.kinds)
                if 2 <= self.kinds.count(kind) < len(self.kinds)
            ]
            lines.append(f"  {name:40}{', '.join(shares)}")
        return lines


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return how alike the graphs are, and their halves."""
    paths = {
        kind: [
            data_file(name, config.data, fields="citation=, road= and social=") for name in names
        ]
        for kind, names in config.kinds.items()
    }
    generator, aside = (torch.Generator().manual_seed(config.seed + i) for i in range(2))
    wholes: dict[str, Moments] = {}
    halves: dict[str, Moments] = {}
    treated: dict[str, list[Moments]] = {}
    sizes, kinds = [], []
    count = sum(len(found) for found in paths.values())
    with tracking(progress, "graphs", count) as bar:
        for kind, found in paths.items():
            for path in found:
                graph, name = graphs.read(path), path.name.partition(".")[0]
                sizes.append((graph.num_nodes, graph.num_edges))
                kinds.append(kind)
                wholes[name] = _moments(graph, config, generator)
                for title, other in _treatments(graph, config, aside):
                    treated.setdefault(title, []).append(other)
                for place, half in enumerate(_halves(graph, generator)):
                    halves[f"{name} {'ab'[place]}"] = _moments(half, config, generator)
                bar.update(len(kinds))
    both = graphs.similarity(halves | wholes)
    apart, others = _halves_apart(both.matrix, len(kinds))
    return Result(
        config=config,
        versions=versions(),
        sizes=tuple(sizes),
        kinds=tuple(kinds),
        likeness={one: graphs.similarity(wholes, measure=one) for one in MEASURES},  # type: ignore[arg-type]
        treated={name: graphs.similarity(some).matrix for name, some in treated.items()},
        halves=graphs.similarity(halves),
        apart=apart,
        others=others,
    )


def figure(result: Result) -> "Figure":
    """Draw the heat map of the graphs, and halves against others."""
    from ritz import plots

    found = result.likeness["symmetric_kl"]
    side = 2.0 + 0.45 * len(found.names)
    drawing, axes = plots.panels(1, 2, width=side, height=side - 1)
    groups = tuple(len(names) for names in result.config.kinds.values())
    plots.similarity(found, ax=axes[0], groups=groups)
    axes[0].set_title("symmetric KL divergence", loc="left", fontsize="small")
    places = range(len(found.names))
    axes[1].plot(result.apart.numpy(), places, "o", color="#0072B2", label="its own other half")
    axes[1].plot(result.others.numpy(), places, "x", color="#D55E00", label="nearest other graph")
    axes[1].set_yticks(places, found.names, fontsize="small")
    axes[1].invert_yaxis()
    axes[1].set(xscale="log", xlabel="divergence of a random half")
    axes[1].legend(fontsize="small", frameon=False)
    return drawing


def separation(matrix: Tensor, kinds: tuple[str, ...], kind: str) -> dict[str, float]:
    """Return distances within a kind and between it and others: means, extremes, and order.

    Args:
        matrix: Distances ``(N, N)``.
        kinds: Of every graph.
        kind: Which.

    Returns:
        ``within``, ``largest_within``, ``between``, ``least_between``, and ``ordered``: of all
        pairs of a distance within and one between, the share in which the first is less.
    """
    mine = torch.tensor([one == kind for one in kinds])
    upper = torch.ones_like(matrix).triu(1).bool()
    within = matrix[mine[:, None] & mine[None] & upper]
    between = matrix[(mine[:, None] ^ mine[None]) & upper]
    if not len(within) or not len(between):
        raise ValueError(f"kind must be of two graphs at least, and others be there, got {kind!r}")
    return {
        "within": float(within.mean()),
        "largest_within": float(within.max()),
        "between": float(between.mean()),
        "least_between": float(between.min()),
        "ordered": float((within[:, None] < between).double().mean()),
    }


def misplaced(matrix: Tensor, names: tuple[str, ...], kinds: tuple[str, ...]) -> list[str]:
    """Return a line for each graph that is nearer to one of another kind than to one of its own.

    Args:
        matrix: Distances ``(N, N)``.
        names: Of the graphs.
        kinds: Of these.
    """
    lines = []
    for place, kind in enumerate(kinds):
        own = [i for i, other in enumerate(kinds) if other == kind and i != place]
        others = [i for i, other in enumerate(kinds) if other != kind]
        for i in own:
            nearer = [names[j] for j in others if matrix[place, j] < matrix[place, i]]
            if nearer:
                far = f"{names[i]} ({float(matrix[place, i]):.3g})"
                lines.append(f"{names[place]}: {', '.join(nearer)} before {far}")
    return lines


def _treatments(
    graph: graphs.Graph, config: Config, generator: torch.Generator
) -> Iterator[tuple[str, Moments]]:
    """Moments of a graph in other numbers, and of what is left of it."""
    for count in config.other_moments:
        other = replace(config, num_moments=count)
        yield f"{count} moments", _moments(graph, other, generator)
    largest = graph.largest_component()
    yield "largest component", _moments(largest, config, generator)
    yield "largest component without trees", _moments(_without_trees(largest), config, generator)


def _without_trees(graph: graphs.Graph) -> graphs.Graph:
    """The 2-core; a tree itself is left as it is."""
    core = graph
    while True:
        inner = (core.crow.diff() > 1).nonzero()[:, 0]
        if not len(inner):
            return graph
        if len(inner) == core.num_nodes:
            return core
        core = core.subgraph(inner)


def _told(matrix: Tensor, kinds: tuple[str, ...], kind: str) -> str:
    if kinds.count(kind) < 2 or kinds.count(kind) == len(kinds):
        return "one graph, or no other kind"
    found = separation(matrix, kinds, kind)
    return (
        f"mean {found['within']:.3g}, largest {found['largest_within']:.3g}; between mean "
        f"{found['between']:.3g}, least {found['least_between']:.3g}; "
        f"ordered {found['ordered']:.0%}"
    )


def _halves_apart(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of ``2 count`` halves and ``count`` wholes: halves of one, and the nearest other."""
    owner = torch.cat([torch.arange(count).repeat_interleave(2), torch.arange(count)])
    apart = matrix[torch.arange(0, 2 * count, 2), torch.arange(1, 2 * count, 2)]
    foreign = matrix[: 2 * count].masked_fill(owner[: 2 * count, None] == owner, torch.inf)
    return apart, foreign.amin(1).reshape(count, 2).amin(1)


def _halves(graph: graphs.Graph, generator: torch.Generator) -> tuple[graphs.Graph, graphs.Graph]:
    order = torch.randperm(graph.num_nodes, generator=generator)
    middle = graph.num_nodes // 2
    return graph.subgraph(order[:middle]), graph.subgraph(order[middle:])


def _moments(graph: graphs.Graph, config: Config, generator: torch.Generator) -> Moments:
    options: Mapping[str, Any] = {
        "num_moments": config.num_moments,
        "num_probes": config.num_probes,
        "generator": generator,
    }
    return graphs.moments(graph, exact=False, **options)
