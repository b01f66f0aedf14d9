"""Similarity of real graphs by their spectra: Spectral Machine Learning, Figure 3.4.

The published classes are biological networks, citation networks (collaborations) and road networks.
The study has the last two, and social networks instead of the first. Every divergence within
citation and within road networks is below every divergence between them. The spectra of social
networks do not form a class: that of Facebook resembles the collaborations, and those of Epinions
and Wikipedia votes do not. This holds for every number of moments, for the largest component alone,
and without the trees attached to it. The result names every such pair. Finally, every graph is cut
into two random halves, and the study tests whether the nearest graph to a half is its other half.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ritz import graphs, plots
from ritz._core.progress import Progress
from ritz.plots._shared import style
from ritz.spectra import Moments
from ritz.studies._evidence import Evidence
from ritz.studies._protocol import StudyResult, check_minimums, data_file, record, seeded, track

PUBLISHED = ("citation", "road")  # kinds that were published
# All measures of ritz.graphs.similarity; the published one is the first.
MEASURES = ("symmetric_kl", "jensen_shannon", "wasserstein", "heat")


@record
class Config:
    """Graphs that are compared, and where the files are.

    Attributes:
        citation: Files of collaboration networks, below the folder.
        road: Files of road networks.
        social: Files of social networks.
        num_moments: Moments per graph.
        num_probes: Probes per graph.
        other_moments: Further numbers of moments for the comparison of kinds.
        data: The folder; defaults to the environment variable ``RITZ_DATA``.
        seed: Seed of probes and halves.
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
        check_minimums(self, num_moments=1, other_moments=1, num_probes=2, seed=0)
        if sum(map(len, self.kinds.values())) < 2:
            raise ValueError("citation, road and social must together name at least two graphs")

    @property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """The files by kind."""
        return {"citation": self.citation, "road": self.road, "social": self.social}


@record
class Result(StudyResult[Config]):
    """Divergences between graphs and between their halves.

    Attributes:
        sizes: Vertices and edges of each graph.
        kinds: Kind of each graph.
        likeness: Similarity of the graphs, by measure.
        treated: Symmetric divergences ``(N, N)`` after other preprocessing: with other numbers of
            moments, of the largest component alone, and of that without attached trees.
        halves: Similarity of all ``2 N`` halves; the two halves of a graph are adjacent.
        apart: Divergence of the two halves of each graph, ``(N,)``.
        others: Least divergence of either half from another graph or its halves, ``(N,)``.
    """

    sizes: tuple[tuple[int, int], ...]
    kinds: tuple[str, ...]
    likeness: dict[str, graphs.Similarity]
    treated: dict[str, Tensor]
    halves: graphs.Similarity
    apart: Tensor
    others: Tensor

    def __str__(self) -> str:
        nearest = self.likeness["symmetric_kl"]
        lines = [
            str(nearest),
            "Distances within each kind of graph, and between it and other kinds:",
        ]
        for measure in MEASURES:
            lines += _kind_lines(self.likeness[measure].matrix, self.kinds, f"{measure:15}")
        published = [place for place, kind in enumerate(self.kinds) if kind in PUBLISHED]
        matrix = nearest.matrix[published][:, published]
        lines += [
            "The published kinds alone:",
            *_kind_lines(matrix, [self.kinds[place] for place in published], ""),
        ]
        lines.append(
            "How often a distance within a kind is below one to another kind, by preprocessing:"
        )
        for name, matrix in sorted(self.treated.items()):
            kinds = [kind for kind in dict.fromkeys(self.kinds) if _separable(self.kinds, kind)]
            shares = {kind: separation(matrix, self.kinds, kind)["ordered"] for kind in kinds}
            text = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
            lines.append(f"  {name:40}{text}")
        # The exceptions by name, not only their share.
        pairs = misplaced(nearest.matrix, nearest.names, self.kinds) or ["none"]
        lines.append(
            "Graphs that are nearer to a graph of another kind than to one of the same kind:"
        )
        lines += [f"  {pair}" for pair in pairs]
        lines.append("Distance between the two halves of a graph, and to the nearest other graph:")
        for name, half, other in zip(nearest.names, self.apart, self.others, strict=True):
            note = "" if half < other else "  (the halves are not nearest)"
            lines.append(f"  {name:22}{half:>9.2g}{other:>9.2g}{note}")
        return "\n".join(lines)


def run(config: Config, *, progress: bool | Progress = False) -> Result:
    """Return the similarity of the graphs and of their halves."""
    fields = "citation=, road= and social="
    paths = [(kind, data_file(name, config.data, fields=fields))
             for kind, names in config.kinds.items() for name in names]  # fmt: skip
    # Treatments draw from a generator of their own: the main table does not depend on them.
    generator, aside = seeded(config.seed), seeded(config.seed + 1)
    wholes: dict[str, Moments] = {}
    halves: dict[str, Moments] = {}
    treated: dict[str, list[Moments]] = {}
    sizes = []
    for _, path in track(paths, "graphs", progress):
        graph, name = graphs.read(path), path.name.partition(".")[0]
        sizes.append((graph.num_nodes, graph.num_edges))
        wholes[name] = _moments(graph, config, generator)
        for title, other in _treatments(graph, config, aside):
            treated.setdefault(title, []).append(other)
        order = torch.randperm(graph.num_nodes, generator=generator)
        for letter, part in zip("ab", order.tensor_split([graph.num_nodes // 2]), strict=True):
            # Edges between the halves are lost: a half has about half of every degree.
            halves[f"{name} {letter}"] = _moments(graph.subgraph(part), config, generator)
    # Halves first, two of each graph in a row, then the whole graphs.
    apart, others = _halves_apart(graphs.similarity(halves | wholes).matrix, len(sizes))
    return Result(
        config=config,
        sizes=tuple(sizes),
        kinds=tuple(kind for kind, _ in paths),
        likeness={one: graphs.similarity(wholes, measure=one) for one in MEASURES},  # type: ignore[arg-type]
        treated={name: graphs.similarity(some).matrix for name, some in treated.items()},
        halves=graphs.similarity(halves),
        apart=apart,
        others=others,
    )


def evidence(result: Result) -> Iterator[Evidence]:
    """Yield how well each kind of graph is separated from the others."""
    matrix = result.likeness["symmetric_kl"].matrix
    places = [place for place, kind in enumerate(result.kinds) if kind in PUBLISHED]
    alone, kinds = matrix[places][:, places], [result.kinds[place] for place in places]
    for kind in dict.fromkeys(result.kinds):
        # The published kinds are compared with each other alone, as published.
        known = kind in PUBLISHED
        distances, compared = (alone, kinds) if known else (matrix, list(result.kinds))
        apart = separation(distances, compared, kind)
        yield Evidence(
            paper="SPECTRA",
            where="Figure 3.4",
            what=f"{kind} graphs: symmetric KL within the kind, and to others",
            published="kinds are separated" if known else "-",
            measured=f"at most {apart['largest_within']:.2g}; at least "
            f"{apart['least_between']:.2g}; ordered in {apart['ordered']:.0%} of pairs",
            verdict=("agrees" if apart["ordered"] == 1 else "differs") if known else "extends",
            why="" if known else "social networks do not form a class",
        )


def figure(result: Result) -> style.Figure:
    """Draw the heat map of the graphs, and halves against others."""
    likeness = result.likeness["symmetric_kl"]
    names, places = likeness.names, range(len(likeness.names))
    # Room for a name beside every row and below every column.
    side = 2.0 + 0.45 * len(names)
    drawing, axes = plots.panels(1, 2, width=side, height=side - 1)
    groups = tuple(len(names) for names in result.config.kinds.values())
    plots.similarity(likeness, ax=axes[0], groups=groups)
    style.set_title(axes[0], "Between graphs")
    axes[1].plot(result.apart.numpy(), places, "o", color=style.STYLE.blue, label="its other half")
    axes[1].plot(
        result.others.numpy(), places, "x", color=style.STYLE.vermilion, label="nearest other graph"
    )
    axes[1].set_yticks(places, names, fontsize="small")
    axes[1].invert_yaxis()
    style.finish(axes[1], "symmetric KL divergence", "", "From a random half of a graph",
                 xscale="log")  # fmt: skip
    # Among the points, the markers of a legend would look like further graphs.
    style.share_legend(drawing)
    return drawing


def separation(matrix: Tensor, kinds: Sequence[str], kind: str) -> dict[str, float]:
    """Return distances within a kind and between it and others: means, extremes, and order.

    Args:
        matrix: Distances ``(N, N)``.
        kinds: Kind of every graph.
        kind: The kind to separate.

    Returns:
        ``within``, ``largest_within``, ``between``, ``least_between``, and ``ordered``: the share
        of pairs of a distance within and a distance between in which the first is less.
    """
    mine = torch.tensor([one == kind for one in kinds])
    # Each pair once.
    upper = torch.ones_like(matrix).triu(1).bool()
    within = matrix[mine[:, None] & mine[None] & upper]
    # Exclusive or: one of the pair is of the kind.
    between = matrix[(mine[:, None] ^ mine[None]) & upper]
    if not _separable(kinds, kind):
        raise ValueError(f"kind must have two graphs, and there must be another kind, got {kind!r}")
    return {
        "within": float(within.mean()),
        "largest_within": float(within.max()),
        "between": float(between.mean()),
        "least_between": float(between.min()),
        # P(d_within < d_between): the area under the ROC curve of the distances.
        "ordered": float((within[:, None] < between).double().mean()),
    }


def misplaced(matrix: Tensor, names: tuple[str, ...], kinds: tuple[str, ...]) -> list[str]:
    """Return a line for each graph that is nearer to one of another kind than to one of its own.

    Args:
        matrix: Distances ``(N, N)``.
        names: Names of the graphs.
        kinds: Kind of every graph.
    """
    lines = []
    for place, kind in enumerate(kinds):
        others = [j for j, other in enumerate(kinds) if other != kind]
        # Pairs of the same kind, and the graphs of other kinds that are nearer.
        for i in (i for i, other in enumerate(kinds) if other == kind and i != place):
            if nearer := [names[j] for j in others if matrix[place, j] < matrix[place, i]]:
                far = f"{names[i]} ({float(matrix[place, i]):.3g})"
                lines.append(f"{names[place]}: {', '.join(nearer)} before {far}")
    return lines


def _treatments(
    graph: graphs.Graph, config: Config, generator: torch.Generator
) -> Iterator[tuple[str, Moments]]:
    """Yield the moments of a graph in other numbers, and of parts of the graph."""
    for count in config.other_moments:
        other = replace(config, num_moments=count)
        yield f"{count} moments", _moments(graph, other, generator)
    largest = graph.largest_component()
    yield "largest component", _moments(largest, config, generator)
    yield "largest component without trees", _moments(_without_trees(largest), config, generator)


def _without_trees(graph: graphs.Graph) -> graphs.Graph:
    """Return the 2-core, which has no vertices of degree 1; a tree itself stays as it is."""
    core = graph
    while True:
        # Removing leaves makes new ones, so repeat until none is left.
        inner = (core.crow.diff() > 1).nonzero()[:, 0]
        if not len(inner):
            return graph
        if len(inner) == core.num_nodes:
            return core
        core = core.subgraph(inner)


def _separable(kinds: Sequence[str], kind: str) -> bool:
    """Return whether a kind has two graphs and there is another kind."""
    return 2 <= kinds.count(kind) < len(kinds)


def _kind_lines(matrix: Tensor, kinds: Sequence[str], title: str) -> list[str]:
    lines = []
    for kind in dict.fromkeys(kinds):
        text = "one graph, or no other kind"
        if _separable(kinds, kind):
            text = (
                "mean {within:.3g}, largest {largest_within:.3g}; between mean {between:.3g}, "
                "least {least_between:.3g}; ordered {ordered:.0%}"
            ).format(**separation(matrix, kinds, kind))
        lines.append(f"  {title}{kind:10}{text}")
    return lines


def _halves_apart(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return divergences of both halves of a graph, and of its halves from the nearest other.

    The matrix has ``2 count`` halves, two of each graph in a row, and then ``count`` wholes.
    """
    # The graph that each row belongs to.
    owner = torch.cat([torch.arange(count).repeat_interleave(2), torch.arange(count)])
    apart = matrix[torch.arange(0, 2 * count, 2), torch.arange(1, 2 * count, 2)]
    # A half is not compared with itself, its other half or its whole.
    foreign = matrix[: 2 * count].masked_fill(owner[: 2 * count, None] == owner, torch.inf)
    return apart, foreign.amin(1).reshape(count, 2).amin(1)


def _moments(graph: graphs.Graph, config: Config, generator: torch.Generator) -> Moments:
    return graphs.moments(
        graph,
        # Small graphs would have exact moments without errors, and could not be compared with
        # large ones at the same tolerance.
        exact=False,
        num_moments=config.num_moments,
        num_probes=config.num_probes,
        generator=generator,
    )
