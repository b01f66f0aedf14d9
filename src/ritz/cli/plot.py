"""``ritz plot``: pictures of result files and logs."""

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

import ritz
from ritz.cli._options import Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPILOG = """
Examples:

ritz plot runs/digits

ritz plot runs/sgd runs/gadamx --out accuracy.pdf

ritz plot runs/vgg/spectrum-hessian-eval.safetensors runs/vgg/spectrum-ggn-eval.safetensors

ritz plot runs/digits --what curvature --out sharpness.svg
"""

What = Literal["auto", "curves", "curvature", "degeneracy"]
Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...", help="Results, logs or folders of runs; several of one kind together."
    ),
]
Wanted = Annotated[
    What,
    typer.Option("--what", help="Of a log: curves; or, of one with --watch, the other two."),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Picture, by ending PNG, SVG or PDF (default: a PNG).")
]


def command(files: Files, what: Wanted = "auto", out: Out = None, json: Json = False) -> None:
    """Draw results and training logs, as PNG, SVG or PDF."""
    from ritz.plots._shared import check_picture
    from ritz.training._shared import LOG

    paths = [path / LOG if path.is_dir() else path for path in files]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {path}")
    target = check_picture(out or _default(paths[0], what))
    logs = [path for path in paths if path.suffix == ".jsonl"]
    if logs and len(logs) < len(paths):
        raise ValueError("logs and results make no one picture: plot them one after the other")
    figure = _log_figure(paths, what) if logs else _result_figure(paths)
    ritz.plots.save_figure(figure, target)
    typer.echo(json_format.dumps({"files": [str(target)]}) if json else f"written: {target}")


def _default(first: Path, what: What) -> Path:
    if first.suffix != ".jsonl":
        return first.with_suffix(".png")
    return first.with_name(f"{'curves' if what == 'auto' else what}.png")


def _log_figure(paths: list[Path], what: What) -> "Figure":
    runs = {name: _records(path) for name, path in _names(paths).items()}
    if what in ("auto", "curves"):
        return cast("Figure", ritz.plots.training_curves(runs)[0].figure)
    if len(runs) > 1:
        raise ValueError(f"--what {what} takes one log, got {len(runs)}")
    draw: Any = ritz.plots.curvature_over_time if what == "curvature" else ritz.plots.degeneracy
    return cast("Figure", draw(next(iter(runs.values()))).figure)


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        records = ritz.training.read_log(path)
    except ValueError as error:
        raise ValueError(f"{path} is not a log of ritz train: {error}") from error
    if not all(isinstance(record, dict) and "kind" in record for record in records):
        raise ValueError(f"{path} is not a log of ritz train: its lines have no kind")
    return records


def _result_figure(paths: list[Path]) -> "Figure":
    from ritz.plots._shared import titled

    results = {name: ritz.load(path) for name, path in _names(paths).items()}
    if len(results) == 1:
        return ritz.plots.plot(next(iter(results.values())))
    for name, result in results.items():
        if not isinstance(result, ritz.Spectrum):
            raise ValueError(f"several results must all be spectra to be drawn together, {name} is "
                             f"of class {type(result).__name__}")  # fmt: skip
    return ritz.plots.plot(titled(results))


def _names(paths: list[Path]) -> dict[str, Path]:
    """Short names that tell the files apart: their own, else with that of their folder."""
    from ritz.training._shared import LOG

    short = [path.parent.name if path.name == LOG else path.stem for path in paths]
    if len(set(short)) < len(short):
        short = [str(path) for path in paths]
    return dict(zip(short, paths, strict=True))
