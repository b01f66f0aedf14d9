"""``ritz graph``: densities, similarity, clusters and models of graphs in files."""

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

import ritz
from ritz._core.checks import check_range
from ritz.cli._options import OUTPUT, SeedOptions, flatten_options, option
from ritz.cli._output import print_result

if TYPE_CHECKING:
    from ritz.graphs import ClusterCount, Graph

app = typer.Typer(
    no_args_is_help=True,
    help="Spectral density, similarity, clusters and models of graphs in files: edge lists, Matrix "
    "Market, GML, GraphML or METIS, plain or compressed (gzip, bzip2, xz).",
    epilog="Example: ritz graph clusters friends.txt.gz",
)

READING = "Input"
METHOD = (
    "How to count the eigenvalues below the gap: one by one (krylov), or by integrating a density, "
    "of maximum entropy (entropic) or from Lanczos (lanczos). auto computes all eigenvalues of a "
    "small graph; for a large one, krylov and entropic check each other."
)
WEIGHTS = "Require edge weights, or ignore them (default: read them if the file has any)."


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions(SeedOptions):
    """How files are read, and where the result goes."""

    # fmt: off
    directed: Literal["drop", "refuse"] = option(
        "drop", "Directed edges: ignore the directions (drop), or fail (refuse).", READING)
    weights: bool | None = option(None, WEIGHTS, READING, flags="--weights/--no-weights")
    self_loops: Literal["drop", "keep", "refuse"] = option(
        "drop", "Self-loops: ignore them, keep them, or fail (refuse).", READING)
    multi_edges: Literal["merge", "sum", "refuse"] = option(
        "merge", "Repeated edges: merge them, sum their weights, or fail (refuse).", READING)
    nodes: int | None = option(None, "Number of vertices, if some of them have no edge (default: "
                               "those in the file).", READING)
    largest: bool = option(False, "Use only the largest connected component.", READING)
    out: Path | None = option(None, "File of the figure: .png, .svg or .pdf (default: no figure).",
                              OUTPUT, metavar="FILE")
    # fmt: on

    def read(self, file: Path) -> "Graph":
        """Return the graph of a file; raise first if the picture could not be written."""
        # Reading and computing may take hours.
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
        """Print a result, and draw it if ``--out`` is given, with a y axis that ends at ``top``."""
        if self.out is not None:
            figure = ritz.plots.plot(drawn)
            if top is not None:
                figure.axes[0].set_ylim(0.0, top)
            files = [*files, ritz.plots.save_figure(figure, self.out)]
        print_result(facts, files, as_json=self.json, text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions(GraphOptions):
    """How many numbers the spectrum is computed from."""

    # fmt: off
    moments: int | None = option(None, "Number of moments (default: 100).")
    probes: int | None = option(None, "Number of random probes (default: 64).", low=2)
    # fmt: on

    def keywords(self, *, low: int = 1) -> Any:
        """Return the keywords of a computation from at least ``low`` moments."""
        if self.moments is not None:
            check_range("--moments", self.moments, low=low)
        numbers = {"num_moments": self.moments, "num_probes": self.probes}
        chosen = {name: number for name, number in numbers.items() if number is not None}
        return chosen | self.common()


@dataclass(frozen=True, slots=True, kw_only=True)
class DensityOptions(SampleOptions):
    """Options of ``ritz graph density``."""

    file: Path = option(MISSING, "File of a graph.", metavar="FILE", argument=True)
    method: Literal["maxent", "lanczos", "kpm"] = option(
        "maxent",
        "Method: maximum entropy, Lanczos quadrature or the kernel polynomial method (kpm).",
    )
    matrix: Literal["normalized", "laplacian", "adjacency"] = option(
        "normalized", "Matrix of the graph; normalized is the normalised Laplacian."
    )


@app.command(epilog="Example: ritz graph density web.txt.gz --moments 100 --out web.png")
@flatten_options
def density(options: DensityOptions) -> None:
    """Print the spectral density of a graph, and draw it."""
    import torch

    # Options are checked before the file is read.
    keywords = options.keywords(low=1 if options.method == "maxent" else 2)
    graph, matrix = options.read(options.file), options.matrix
    spectrum: Any = ritz.graphs.density(graph, method=options.method, matrix=matrix, **keywords)
    # mean = tr(L) / n, which is 1 for a normalised Laplacian without isolated vertices.
    numbers = {"mean": spectrum.moment(1), "mean_square": spectrum.moment(2)}
    text = f"{graph}\n{matrix}: {spectrum}"
    if matrix != "adjacency":  # a Laplacian has eigenvalues from 0 on; small ones mean clusters
        # The cdf starts at the support, so begin below it to include an eigenvalue at its end.
        numbers["mass_below_0.1"] = spectrum.mass(spectrum.support[0] - 1.0, 0.1)
        text += f"\nmass below 0.1: {numbers['mass_below_0.1']:.4g}"
    if options.method == "maxent":
        numbers |= {
            "entropy": spectrum.entropy,
            "alphas": spectrum.alphas,
            "status": spectrum.status,
        }
    facts = _facts(options.file, graph)
    facts |= {"matrix": matrix, "method": options.method, "density": numbers}
    # An eigenvalue of high multiplicity, such as 0 or 1, must not flatten the rest of the picture.
    low, high = spectrum.support
    x = torch.linspace(low, high, 2001, dtype=torch.float64)[1:-1]
    smooth = getattr(spectrum, "smoothed", lambda: spectrum)()
    options.finish(facts, text, spectrum, top=1.5 * float(smooth.pdf(x).quantile(0.98)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(SampleOptions):
    """Options of ``ritz graph compare``."""

    files: list[Path] = option(
        MISSING, "Files of two or more graphs.", metavar="FILE", argument=True
    )
    measure: Literal["symmetric_kl", "jensen_shannon", "wasserstein", "heat"] = option(
        "symmetric_kl", "Distance between two spectra. heat compares heat traces (NetLSD)."
    )


@app.command(epilog="Example: ritz graph compare a.txt b.txt c.mtx --out likeness.png")
@flatten_options
def compare(options: CompareOptions) -> None:
    """Print the distances between the spectra of graphs, with their errors."""
    if len(options.files) < 2:
        raise ValueError(f"FILE must be given at least twice, got only {options.files[0]}")
    keywords = options.keywords()
    # Two files of the same name in different folders are two graphs.
    files = {name: options.read(file) for name, file in _names(options.files).items()}
    distances = ritz.graphs.similarity(files, measure=options.measure, **keywords)
    options.finish({"files": options.files, "similarity": distances}, str(distances), distances)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions(SampleOptions):
    """Options of ``ritz graph clusters``."""

    file: Path = option(MISSING, "File of a graph.", metavar="FILE", argument=True)
    method: Literal["auto", "krylov", "entropic", "lanczos"] = option("auto", METHOD)
    moments: int | None = option(None, "Number of moments (default: 80).")
    probes: int | None = option(None, "Number of random probes (default: 100).", low=2)
    labels: Path | None = option(
        None,
        "Write a line VERTEX<TAB>CLUSTER for each vertex to this file.",
        OUTPUT,
        metavar="FILE",
    )


@app.command(epilog="Example: ritz graph clusters friends.txt.gz --labels clusters.txt")
@flatten_options
def clusters(options: ClusterOptions) -> None:
    """Print the number of clusters of a graph, and assign its vertices to them."""
    # Before the count, which may take minutes.
    labels = options.labels
    if labels is not None and not labels.parent.is_dir():
        raise ValueError(f"--labels must be in an existing folder, got {labels}")
    keywords = options.keywords(low=4)
    graph = options.read(options.file)
    count = ritz.graphs.count_clusters(graph, method=options.method, **keywords)
    written = [] if labels is None else _write_labels(graph, count, labels, options)
    # The density is for the picture.
    facts = _facts(options.file, graph) | {"clusters": replace(count, density=None)}
    options.finish(facts, f"{graph}\n{count}", count, written)
    # Exit code 1 if the count is uncertain, after everything was printed and written.
    count.raise_if_failed()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(GraphOptions):
    """Options of ``ritz graph model``."""

    file: Path = option(MISSING, "File of a graph.", metavar="FILE", argument=True)


@app.command(epilog="Example: ritz graph model friends.txt.gz --largest")
@flatten_options
def model(options: ModelOptions) -> None:
    """Print the random graph model with the nearest spectrum, and its parameters."""
    graph = options.read(options.file)
    # Moments and probes are those of the search, which has to draw many graphs.
    nearest = ritz.graphs.fit(graph, **options.common())
    facts = _facts(options.file, graph) | {"model": nearest.model, "fits": nearest.fits}
    options.finish(facts, f"{graph}\n{nearest}", nearest)


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
    graph: "Graph", count: "ClusterCount", labels: Path, options: GraphOptions
) -> list[Path]:
    """Write the name of each vertex, a tab and its cluster, if the clusters were counted."""
    from ritz._core.storage import write_text

    if count.count is None:
        typer.echo(
            f"{labels} was not written, because the number of clusters is not known", err=True
        )
        return []
    # k-means on the eigenvectors of as many small eigenvalues as there are clusters.
    groups = ritz.graphs.spectral_clusters(graph, count.count, **options.common())
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
