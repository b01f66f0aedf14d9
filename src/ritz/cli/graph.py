"""``ritz graph``: densities, similarity, clusters and models of graphs in files."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import ritz
from ritz.cli._options import OUTPUT, Json, Seed, choice, flatten_options, option, print_result

if TYPE_CHECKING:
    from ritz.graphs import ClusterCount, Graph

app = typer.Typer(
    no_args_is_help=True,
    help="Measure graphs in files: edge lists, Matrix Market, GML, GraphML or METIS; plain or "
    "gzip.",
    epilog="Example: ritz graph clusters friends.txt.gz",
)

READING = "Reading of files"
WEIGHTS = "Require weights, or ignore them (default: read them if there are any)."
File = Annotated[Path, typer.Argument(metavar="FILE", help="File of a graph.")]
Files = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Files of two or more graphs.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """How files are read, and where the result goes."""

    directed: Annotated[
        Literal["drop", "refuse"],
        choice("--directed", "drop directions of edges, or refuse them.", READING),
    ] = "drop"
    weights: Annotated[bool | None, option("--weights/--no-weights", WEIGHTS, READING)] = None
    self_loops: Annotated[
        Literal["drop", "keep", "refuse"],
        choice("--self-loops", "drop, keep or refuse self-loops.", READING),
    ] = "drop"
    multi_edges: Annotated[
        Literal["merge", "sum", "refuse"],
        choice("--multi-edges", "merge repeated edges, sum their weights, or refuse.", READING),
    ] = "merge"
    nodes: Annotated[
        int | None,
        option("--nodes", "Number of vertices (default: those that have an edge).", READING),
    ] = None
    largest: Annotated[bool, option("--largest", "Take the largest component only.", READING)] = (
        False
    )
    out: Annotated[
        Path | None,
        option("--out", "Picture to write: .png, .svg or .pdf (default: none).", OUTPUT, "FILE"),
    ] = None
    seed: Seed = 0
    json: Json = False

    def read(self, file: Path) -> "Graph":
        """Return the graph of a file; a picture that could not be written fails first."""
        # Before the file is read and hours of work are done.
        if self.out is not None:
            from ritz.plots._shared import check_picture

            check_picture(self.out)
        return ritz.graphs.read(
            file,
            directed=self.directed,
            weights=self.weights,
            self_loops=self.self_loops,
            multi_edges=self.multi_edges,
            num_nodes=self.nodes,
            largest_component=self.largest,
            progress=not self.json,
        )

    def common(self) -> Any:
        """Return the keywords that all computations take."""
        import torch

        return {"generator": torch.Generator().manual_seed(self.seed), "progress": not self.json}

    def finish(
        self,
        facts: dict[str, Any],
        text: str,
        drawn: Any,
        files: Iterable[Path] = (),
        top: float | None = None,
    ) -> None:
        """Draw a result if a picture is wanted, at most up to a height, and print it."""
        if self.out is not None:
            figure = ritz.plots.plot(drawn)
            if top is not None:
                figure.axes[0].set_ylim(0.0, top)
            files = [*files, ritz.plots.save_figure(figure, self.out)]
        print_result(facts, files, as_json=self.json, text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """How many numbers the spectrum is computed from."""

    moments: Annotated[
        int | None, option("--moments", "Number of moments (default: 100, for clusters 80).", low=1)
    ] = None
    probes: Annotated[
        int | None,
        option("--probes", "Number of random probes (default: 64, for clusters 100).", low=2),
    ] = None

    def keywords(self) -> Any:
        """Return the options that were given as keywords of the library."""
        numbers = {"num_moments": self.moments, "num_probes": self.probes}
        return {name: number for name, number in numbers.items() if number is not None}


@app.command(epilog="Example: ritz graph density web.txt.gz --moments 100 --out web.png")
@flatten_options
def density(
    file: File,
    *,
    method: Annotated[
        Literal["maxent", "lanczos", "kpm"],
        choice("--method", "maxent (maximum entropy), lanczos or kpm (kernel polynomials)."),
    ] = "maxent",
    matrix: Annotated[
        Literal["normalized", "laplacian", "adjacency"],
        choice("--matrix", "normalized (Laplacian), laplacian or adjacency."),
    ] = "normalized",
    graphs: GraphOptions,
    samples: SampleOptions,
) -> None:
    """Print the spectral density of a graph, and draw it."""
    import torch

    graph = graphs.read(file)
    found: Any = ritz.graphs.density(
        graph,
        method=method,
        matrix=matrix,
        **samples.keywords(),
        **graphs.common(),
    )
    # mean = tr(L) / n, which is 1 for a normalized Laplacian without isolated vertices.
    numbers = {"mean": found.moment(1), "mean_square": found.moment(2)}
    text = f"{graph}\n{matrix}: {found}"
    if matrix != "adjacency":  # a Laplacian has eigenvalues from 0 on; small ones mean clusters
        # The cdf starts at the support, so begin below it to include an eigenvalue at its end.
        numbers["mass_below_0.1"] = found.mass(found.support[0] - 1.0, 0.1)
        text += f"\nmass below 0.1: {numbers['mass_below_0.1']:.4g}"
    if method == "maxent":
        numbers |= {"entropy": found.entropy, "alphas": found.alphas, "status": found.status}
    facts = _facts(file, graph) | {"matrix": matrix, "method": method, "density": numbers}
    # An eigenvalue of high multiplicity, such as 0 or 1, must not flatten the rest of the picture.
    low, high = found.support
    x = torch.linspace(low, high, 2001, dtype=torch.float64)[1:-1]
    smooth = getattr(found, "smoothed", lambda: found)()
    graphs.finish(facts, text, found, top=1.5 * float(smooth.pdf(x).quantile(0.98)))


@app.command(epilog="Example: ritz graph compare a.txt b.txt c.mtx --out likeness.png")
@flatten_options
def compare(
    files: Files,
    *,
    measure: Annotated[
        Literal["symmetric_kl", "jensen_shannon", "wasserstein", "heat"],
        choice("--measure", "symmetric_kl, jensen_shannon, wasserstein or heat."),
    ] = "symmetric_kl",
    graphs: GraphOptions,
    samples: SampleOptions,
) -> None:
    """Print the distances between the spectra of graphs, with their errors."""
    found = ritz.graphs.similarity(
        {name: graphs.read(file) for name, file in _names(files).items()},
        measure=measure,
        **samples.keywords(),
        **graphs.common(),
    )
    graphs.finish({"files": files, "similarity": found}, str(found), found)


@app.command(epilog="Example: ritz graph clusters friends.txt.gz --labels clusters.txt")
@flatten_options
def clusters(
    file: File,
    *,
    method: Annotated[
        Literal["auto", "krylov", "entropic", "lanczos"],
        choice("--method", "auto, krylov, entropic or lanczos."),
    ] = "auto",
    labels: Annotated[
        Path | None,
        option("--labels", "File for the cluster of each vertex, one per line.", OUTPUT, "FILE"),
    ] = None,
    graphs: GraphOptions,
    samples: SampleOptions,
) -> None:
    """Print the number of clusters of a graph, and assign its vertices to them."""
    # Before the count, which may take minutes.
    if labels is not None and not labels.parent.is_dir():
        raise ValueError(f"--labels must be in an existing folder, got {labels}")
    graph = graphs.read(file)
    found = ritz.graphs.count_clusters(
        graph,
        method=method,
        **samples.keywords(),
        **graphs.common(),
    )
    written = [] if labels is None else _write_labels(graph, found, labels, graphs)
    facts = _facts(file, graph) | {"clusters": found}
    graphs.finish(facts, f"{graph}\n{found}", found, written)
    # Exit code 1 if the count is uncertain, after everything was printed and written.
    found.raise_if_failed()


@app.command(epilog="Example: ritz graph model friends.txt.gz --largest")
@flatten_options
def model(file: File, graphs: GraphOptions) -> None:
    """Print the random graph model with the nearest spectrum, and its parameters."""
    graph = graphs.read(file)
    found = ritz.graphs.fit(graph, **graphs.common())
    facts = _facts(file, graph) | {"model": found.model, "fits": found.fits}
    graphs.finish(facts, f"{graph}\n{found}", found)


def _facts(file: Path, graph: "Graph") -> dict[str, Any]:
    return {"file": file, "vertices": graph.num_nodes, "edges": graph.num_edges}


def _names(files: list[Path]) -> dict[str, Path]:
    """Return names that tell files apart: short ones, whole paths, or numbered paths."""
    short = [file.name for file in files]
    names: dict[str, Path] = {}
    for place, file in enumerate(files):
        name = file.name if short.count(file.name) == 1 else str(file)
        repeats = files[:place].count(file)
        names[f"{name} ({repeats + 1})" if repeats else name] = file
    return names


def _write_labels(
    graph: "Graph", found: "ClusterCount", labels: Path, options: GraphOptions
) -> list[Path]:
    """Write the name of each vertex, a tab and its cluster, if the clusters were counted."""
    from ritz._core.storage import write_text

    if found.count is None:
        typer.echo(f"nothing was written to {labels}: there is no count of clusters", err=True)
        return []
    # k-means on the eigenvectors of as many small eigenvalues as there are clusters.
    groups = ritz.graphs.spectral_clusters(graph, found.count, **options.common())
    names: Any = range(graph.num_nodes) if graph.names is None else graph.names
    names = getattr(names, "tolist", lambda: names)()
    # Tabs and line ends separate names, so those within a name are escaped.
    escapes = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r"})
    lines = [
        f"{str(name).translate(escapes)}\t{group}"
        for name, group in zip(names, groups.tolist(), strict=True)
    ]
    write_text(labels, "\n".join(lines) + "\n")
    return [labels]
