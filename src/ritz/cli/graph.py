"""``ritz graph``: spectra, likeness, clusters and models of graphs in files."""

import json as json_format
import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ritz import graphs
from ritz._core.storage import write_text
from ritz.cli._graph_pictures import (
    check_picture,
    clusters_figure,
    compare_figure,
    model_figure,
    spectrum_figure,
    write_picture,
)
from ritz.cli._options import Json, Seed
from ritz.graphs import ClusterCount, Graph
from ritz.studies.protocol import describe

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
Moments = Annotated[int | None, typer.Option("--moments", help="Moments of the spectrum.")]
Probes = Annotated[int | None, typer.Option("--probes", help="Random probes.")]
Method = Annotated[str, typer.Option("--method", help="auto, krylov, entropic or lanczos.")]
Labels = Annotated[
    Path | None, typer.Option("--labels", help="File for the cluster of each vertex, a line each.")
]
Measure = Annotated[str, typer.Option("--measure", help="symmetric_kl, jensen_shannon, ...")]


@app.command(epilog="Example: ritz graph spectrum web.txt.gz --moments 100 --out web.png")
def spectrum(
    file: File,
    moments: Moments = None,
    probes: Probes = None,
    directed: Directed = "drop",
    largest: Largest = False,
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Print the entropic spectrum of a graph, and draw it."""
    check_picture(out)
    graph = _read(file, directed, largest, not json)
    found = graphs.spectrum(
        graph, **_options(moments, probes), generator=_generator(seed), progress=not json
    )
    facts = _facts(file, graph) | {
        "entropy": found.entropy,
        "mean": found.moment(1),
        "mean_square": found.moment(2),
        "mass_below_0.1": found.mass(0.0, 0.1),
        "alphas": describe(found.alphas),
        "status": str(found.status),
    }
    text = f"{graph}\n{found}\nmass below 0.1: {facts['mass_below_0.1']:.4g}"
    _print(facts, text, json, write_picture(out, lambda: spectrum_figure(found, file.name)))


@app.command(epilog="Example: ritz graph compare a.txt b.txt c.mtx --out likeness.png")
def compare(
    files: Files,
    measure: Measure = "symmetric_kl",
    moments: Moments = None,
    probes: Probes = None,
    directed: Directed = "drop",
    largest: Largest = False,
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Print the distances between the spectra of graphs, with their errors."""
    check_picture(out)
    named = {_name(file, files): _read(file, directed, largest, not json) for file in files}
    found = graphs.similarity(
        named,
        measure=measure,  # type: ignore[arg-type]  # checked there, with the choices in the message
        **_options(moments, probes),
        generator=_generator(seed),
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
    largest: Largest = False,
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Print the number of clusters of a graph, and sort its vertices into them."""
    check_picture(out)
    if labels is not None and not labels.parent.is_dir():
        raise ValueError(f"--labels must be in a folder that is there, got {labels}")
    graph, options = _read(file, directed, largest, not json), _options(moments, probes)
    found = graphs.count_clusters(
        graph,
        method=method,  # type: ignore[arg-type]  # checked there, with the choices in the message
        **options,
        generator=_generator(seed),
        progress=not json,
    )
    written = [] if labels is None else _write_labels(graph, found, labels, seed, json)
    facts = _facts(file, graph) | describe(found) | {"status": str(found.status)}
    if out is not None:
        settings = {"num_moments": 80, "num_probes": 100} | options
        drawn = graphs.spectrum(graph, **settings, generator=_generator(seed))
        written += write_picture(out, lambda: clusters_figure(drawn, found))
    _print(facts, f"{graph}\n{found}", json, written)
    found.raise_if_failed()


@app.command(epilog="Example: ritz graph model friends.txt.gz --largest")
def model(
    file: File,
    directed: Directed = "drop",
    largest: Largest = False,
    out: Out = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Print the random model whose graphs have the nearest spectrum, and its parameters."""
    check_picture(out)
    graph = _read(file, directed, largest, not json)
    found = graphs.fit(graph, generator=_generator(seed), progress=not json)
    fits = [describe(one) for one in found.fits]
    facts = _facts(file, graph) | {"model": found.model, "fits": fits}
    _print(facts, f"{graph}\n{found}", json, write_picture(out, lambda: model_figure(found)))


def _read(file: Path, directed: str, largest: bool, progress: bool) -> Graph:
    return graphs.read(
        file,
        directed=directed,  # type: ignore[arg-type]  # checked there
        largest_component=largest,
        progress=progress,
    )


def _write_labels(
    graph: Graph, found: ClusterCount, labels: Path, seed: int, quiet: bool
) -> list[Path]:
    """Write the name of each vertex and its cluster, a line each; nothing where none were found."""
    if found.count is None:
        return []
    groups = graphs.spectral_clusters(
        graph, found.count, generator=_generator(seed), progress=not quiet
    )
    names = range(graph.num_nodes) if graph.names is None else graph.names
    lines = (f"{name} {group}" for name, group in zip(_listed(names), groups.tolist(), strict=True))
    write_text(labels, "\n".join(lines) + "\n")
    return [labels]


def _listed(names: Any) -> Any:
    return names.tolist() if isinstance(names, torch.Tensor) else names


def _options(moments: int | None, probes: int | None) -> dict[str, Any]:
    given = {"num_moments": moments, "num_probes": probes}
    return {name: value for name, value in given.items() if value is not None}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _name(file: Path, files: list[Path]) -> str:
    alone = [other.name for other in files].count(file.name) == 1
    return file.name if alone else str(file)


def _facts(file: Path, graph: Graph) -> dict[str, Any]:
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
