"""``ritz graph``: densities, similarity, clusters and models of graphs in files."""

import json as json_format
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

import ritz
from ritz._core.checks import check_choice, check_count
from ritz.cli._options import Json, Seed

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from ritz.graphs import ClusterCount, Fit, Graph, Similarity
    from ritz.spectra import Density, EntropicDensity

# ------------------------------------------------------------------------------------------
# The pictures of ``ritz graph``.

DECADES = 20.0  # ratio of counts beyond which the axis is logarithmic


def check_picture(out: Path | None) -> None:
    """Raise before long work if a picture could not be written after it."""
    if out is not None:
        from ritz.plots._shared import check_picture as check_writable

        check_writable(out)


def write_picture(out: Path | None, draw: Callable[[], "Figure"]) -> list[Path]:
    """Write a picture where one is asked for; return its name, or none."""
    if out is None:
        return []
    return [ritz.plots.save_figure(draw(), out)]


def density_figure(density: "Density", name: str) -> "Figure":
    """Draw the density of a graph's eigenvalues."""
    import torch

    figure, (ax,) = ritz.plots.panels()
    ritz.plots.density(density, ax=ax, label=name)
    # An eigenvalue many times repeated, such as 0 or 1, must not flatten the rest.
    low, high = density.support
    inset = 0.0005 * (high - low)
    points = torch.linspace(low + inset, high - inset, 2000, dtype=torch.float64)
    smooth = getattr(density, "smoothed", lambda: density)()
    heights = smooth.pdf(points)
    ax.set_ylim(0, 1.5 * float(heights.quantile(0.98)))
    return figure


def compare_figure(found: "Similarity") -> "Figure":
    """Draw distances as a heat map."""
    side = 1.6 + 0.55 * len(found.names)
    figure, (ax,) = ritz.plots.panels(width=side + 0.6, height=side)
    ritz.plots.similarity(found, ax=ax)
    return figure


def clusters_figure(density: "EntropicDensity", found: "ClusterCount") -> "Figure":
    """Draw how many eigenvalues lie below each point: a gap is a level stretch."""
    import torch

    figure, (ax,) = ritz.plots.panels()
    points = torch.logspace(-4, 0, 1000, dtype=torch.float64)
    below = found.num_nodes * density.cdf(points)
    ax.plot(points.numpy(), below.numpy(), linewidth=1.2, label="entropic spectrum")
    low, high = _limits(below, found)
    if found.count is not None:
        ax.axvspan(max(found.gap[0], 1e-4), found.gap[1], alpha=0.15, color="grey", label="gap")
        ax.axhline(found.count, color="black", linewidth=0.8, label=f"{found.count:,} clusters")
    # Decades are for counts that span some; within one they would put all of it on one line.
    scale = "log" if high > DECADES * low else "linear"
    ax.set(xscale="log", yscale=scale, xlabel=r"$\lambda$", ylabel="eigenvalues below")
    ax.set(xlim=(float(points[0]), float(points[-1])), ylim=(low, high))
    ax.legend(frameon=False, fontsize="small")
    return figure


def _limits(below: "torch.Tensor", found: "ClusterCount") -> tuple[float, float]:
    """Counts from the least that is drawn to the largest, with some room on either side."""
    counts = [float(below[0]), float(below[-1]), float(found.count or below[0])]
    least, largest = max(min(counts), 0.5), max(*counts, 1.0)
    if largest > DECADES * least:
        return least / 1.5, 1.5 * largest
    room = 0.1 * (largest - least) or 1.0
    return max(least - room, 0.0), largest + room


def model_figure(found: "Fit") -> "Figure":
    """Draw the divergence of each model over the parameter that was searched."""
    searched = [one for one in found.fits if len(one.values) > 1] or list(found.fits)
    figure, axes = ritz.plots.panels(1, len(searched), width=3.4, height=3.0)
    for ax, one in zip(axes, searched, strict=True):
        order = one.values.argsort()
        ax.plot(one.values[order].numpy(), one.divergences[order].numpy(), marker="o", markersize=3)
        ax.axhline(one.typical, color="black", linestyle=":", linewidth=0.8)
        name = next(iter(one.interval), next(iter(one.parameters), ""))
        ax.set(title=one.model.replace("_", " "), xlabel=name, yscale="log")
    axes[0].set_ylabel("divergence")
    return figure


# ------------------------------------------------------------------------------------------
# ``ritz graph``: spectra, likeness, clusters and models of graphs in files.

app = typer.Typer(
    no_args_is_help=True,
    help="Spectra, likeness, clusters and models of graphs in files: edge lists (SNAP style, "
    "gzipped or not), Matrix Market, GML, GraphML, METIS.",
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="A graph.")]
Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Graphs, two at least.")]
Out = Annotated[Path | None, typer.Option("--out", help="Picture to write, such as x.png.")]
Directed = Annotated[str, typer.Option("--directed", help="drop directions, or refuse them.")]
Largest = Annotated[bool, typer.Option("--largest", help="Take the largest component alone.")]
Moments = Annotated[
    int | None,
    typer.Option("--moments", help="Moments of the spectrum; 100 by default, 80 for clusters."),
]
Probes = Annotated[
    int | None, typer.Option("--probes", help="Random probes; 64 by default, 100 for clusters.")
]
Method = Annotated[str, typer.Option("--method", help="auto, krylov, entropic or lanczos.")]
DensityMethod = Annotated[
    Literal["maxent", "lanczos", "kpm"],
    typer.Option("--method", help="Maximum entropy, Lanczos or the kernel polynomial method."),
]
Matrix = Annotated[
    Literal["normalized", "laplacian", "adjacency"],
    typer.Option("--matrix", help="The normalised Laplacian, the Laplacian or the adjacency."),
]
Labels = Annotated[
    Path | None, typer.Option("--labels", help="File for the cluster of each vertex, a line each.")
]
Measure = Annotated[
    str, typer.Option("--measure", help="symmetric_kl, jensen_shannon, wasserstein or heat.")
]
Weights = Annotated[
    bool | None,
    typer.Option(
        "--weights/--no-weights",
        help="There must be weights, or they are passed over; by default they are read if there.",
    ),
]
Loops = Annotated[
    str, typer.Option("--self-loops", help="drop self-loops, keep them or refuse them.")
]
Multi = Annotated[
    str, typer.Option("--multi-edges", help="merge repeated edges, sum their weights or refuse.")
]
Nodes = Annotated[
    int | None, typer.Option("--nodes", help="Number of vertices, where not all have an edge.")
]


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read, in the words of :func:`ritz.graphs.read`."""

    directed: str
    weights: bool | None
    self_loops: str
    multi_edges: str
    num_nodes: int | None
    largest_component: bool

    def read(self, file: Path, *, progress: bool) -> "Graph":
        """The graph of a file; choices are checked before it is opened."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return ritz.graphs.read(file, **given, progress=progress)


@app.command(epilog="Example: ritz graph density web.txt.gz --moments 100 --out web.png")
def density(
    file: File,
    method: DensityMethod = "maxent",
    matrix: Matrix = "normalized",
    moments: Moments = None,
    probes: Probes = None,
    directed: Directed = "drop",
    weights: Weights = None,
    self_loops: Loops = "drop",
    multi_edges: Multi = "merge",
    nodes: Nodes = None,
    largest: Largest = False,
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Print the spectral density of a graph, and plot it."""
    check_picture(out)
    options, generator = _options(moments, probes), _generator(seed)
    rules = Reading(directed, weights, self_loops, multi_edges, nodes, largest)
    graph = rules.read(file, progress=not json)
    how: dict[str, Any] = {"method": method, "matrix": matrix}
    found = ritz.graphs.density(graph, **how, **options, generator=generator, progress=not json)
    facts = (
        _facts(file, graph)
        | how
        | {
            "mean": found.moment(1),
            "mean_square": found.moment(2),
        }
    )
    text = f"{graph}\n{matrix}: {found}"
    if matrix != "adjacency":  # eigenvalues from 0 on, of which the small ones speak of clusters
        facts["mass_below_0.1"] = found.mass(found.support[0] - 1.0, 0.1)
        text += f"\nmass below 0.1: {facts['mass_below_0.1']:.4g}"
    if method == "maxent":
        alphas, status = ritz.studies.describe(found.alphas), str(found.status)
        facts |= {"entropy": found.entropy, "alphas": alphas, "status": status}
    _print(facts, text, json, write_picture(out, lambda: density_figure(found, file.name)))


@app.command(epilog="Example: ritz graph compare a.txt b.txt c.mtx --out likeness.png")
def compare(
    files: Files,
    measure: Measure = "symmetric_kl",
    moments: Moments = None,
    probes: Probes = None,
    directed: Directed = "drop",
    weights: Weights = None,
    self_loops: Loops = "drop",
    multi_edges: Multi = "merge",
    nodes: Nodes = None,
    largest: Largest = False,
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Print the distances between the spectra of graphs, with their errors."""
    from ritz.graphs._shared import Measure as AnyMeasure

    check_picture(out)
    check_choice("measure", measure, get_args(AnyMeasure))
    options, generator = _options(moments, probes), _generator(seed)
    rules = Reading(directed, weights, self_loops, multi_edges, nodes, largest)
    read = [rules.read(file, progress=not json) for file in files]
    found = ritz.graphs.similarity(
        dict(zip(_names(files), read, strict=True)),
        measure=measure,  # type: ignore[arg-type]  # checked above
        **options,
        generator=generator,
        progress=not json,
    )
    facts = {
        "files": [str(file) for file in files],
        "names": list(found.names),
        "measure": found.measure,
        "matrix": found.matrix.tolist(),
        "stderr": found.stderr.tolist(),
        "products": found.num_products,
    }
    _print(facts, str(found), json, write_picture(out, lambda: compare_figure(found)))


@app.command(epilog="Example: ritz graph clusters friends.txt.gz --labels clusters.txt")
def clusters(
    file: File,
    method: Method = "auto",
    moments: Moments = None,
    probes: Probes = None,
    labels: Labels = None,
    directed: Directed = "drop",
    weights: Weights = None,
    self_loops: Loops = "drop",
    multi_edges: Multi = "merge",
    nodes: Nodes = None,
    largest: Largest = False,
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Print the number of clusters of a graph, and sort its vertices into them."""
    from ritz.graphs._shared import COUNT_METHODS

    check_picture(out)
    if labels is not None and not labels.parent.is_dir():
        raise ValueError(f"--labels must be in a folder that is there, got {labels}")
    check_choice("method", method, COUNT_METHODS)
    options, generator = _options(moments, probes, fewest=4), _generator(seed)
    rules = Reading(directed, weights, self_loops, multi_edges, nodes, largest)
    graph = rules.read(file, progress=not json)
    found = ritz.graphs.count_clusters(
        graph,
        method=method,  # type: ignore[arg-type]  # checked above
        **options,
        generator=generator,
        progress=not json,
    )
    written = [] if labels is None else _write_labels(graph, found, labels, seed, json)
    facts = _facts(file, graph) | ritz.studies.describe(found) | {"status": str(found.status)}
    if out is not None:
        settings = {"num_moments": 80, "num_probes": 100} | options
        drawn = ritz.graphs.density(graph, **settings, generator=_generator(seed))
        written += write_picture(out, lambda: clusters_figure(drawn, found))
    _print(facts, f"{graph}\n{found}", json, written)
    found.raise_if_failed()


@app.command(epilog="Example: ritz graph model friends.txt.gz --largest")
def model(
    file: File,
    directed: Directed = "drop",
    weights: Weights = None,
    self_loops: Loops = "drop",
    multi_edges: Multi = "merge",
    nodes: Nodes = None,
    largest: Largest = False,
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Print the random model whose graphs have the nearest spectrum, and its parameters."""
    check_picture(out)
    generator = _generator(seed)
    rules = Reading(directed, weights, self_loops, multi_edges, nodes, largest)
    graph = rules.read(file, progress=not json)
    found = ritz.graphs.fit(graph, generator=generator, progress=not json)
    fits = [ritz.studies.describe(one) for one in found.fits]
    facts = _facts(file, graph) | {"model": found.model, "fits": fits}
    _print(facts, f"{graph}\n{found}", json, write_picture(out, lambda: model_figure(found)))


def _write_labels(
    graph: "Graph", found: "ClusterCount", labels: Path, seed: int, quiet: bool
) -> list[Path]:
    """Write the name of each vertex, a tab and its cluster, a line each, where some were found."""
    from ritz._core.storage import write_text

    if found.count is None:
        typer.echo(f"nothing was written to {labels}: there is no count of clusters", err=True)
        return []
    groups = ritz.graphs.spectral_clusters(
        graph, found.count, generator=_generator(seed), progress=not quiet
    )
    names = range(graph.num_nodes) if graph.names is None else graph.names
    pairs = zip(_listed(names), groups.tolist(), strict=True)
    lines = (f"{_one_line(name)}\t{group}" for name, group in pairs)
    write_text(labels, "\n".join(lines) + "\n")
    return [labels]


def _listed(names: Any) -> Any:
    import torch

    return names.tolist() if isinstance(names, torch.Tensor) else names


def _one_line(name: int | str) -> str:
    """A name without what separates names: a tab or the end of a line in it is escaped."""
    text = str(name).replace("\\", r"\\")
    return text.replace("\t", r"\t").replace("\n", r"\n").replace("\r", r"\r")


def _options(moments: int | None, probes: int | None, *, fewest: int = 1) -> dict[str, Any]:
    """Numbers that were given, checked before a file is read."""
    given = {"num_moments": (moments, fewest), "num_probes": (probes, 2)}
    for name, (value, low) in given.items():
        if value is not None:
            check_count(name, value, low=low)
    return {name: value for name, (value, _) in given.items() if value is not None}


def _generator(seed: int) -> "torch.Generator":
    import torch

    check_count("seed", seed, low=-(2**63), high=2**64 - 1)
    return torch.Generator().manual_seed(seed)


def _names(files: list[Path]) -> list[str]:
    """Names of files, whole paths where these are the same, numbered where these are too."""
    short = [file.name for file in files]
    found: list[str] = []
    for file in files:
        name = file.name if short.count(file.name) == 1 else str(file)
        times = sum(str(other) == str(file) for other in files[: len(found)])
        found.append(f"{name} ({times + 1})" if times else name)
    return found


def _facts(file: Path, graph: "Graph") -> dict[str, Any]:
    return {"file": str(file), "vertices": graph.num_nodes, "edges": graph.num_edges}


def _print(facts: dict[str, Any], text: str, as_json: bool, files: list[Path]) -> None:
    names = [str(file) for file in files]
    if as_json:
        typer.echo(json_format.dumps(_plain(facts | {"files_written": names}), indent=2))
        return
    typer.echo(text)
    if names:
        typer.echo("written: " + ", ".join(names))


def _plain(value: Any) -> Any:
    """Without NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
