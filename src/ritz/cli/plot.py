"""``ritz plot``: pictures of result files and training logs."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ritz
from ritz.cli._options import PrintOptions, examples, option, print_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPILOG = examples(
    "ritz plot runs/digits",
    "ritz plot runs/sgd runs/gadamx --out accuracy.pdf",
    "ritz plot spectrum-hessian.safetensors spectrum-ggn.safetensors",
    "ritz plot runs/digits --what curvature --out sharpness.svg",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PrintOptions):
    """Options of the command."""

    # fmt: off
    files: list[Path] = option(
        MISSING, "Results, logs or run folders. Several spectra, or several logs, are drawn in one "
        "figure.",
        metavar="FILE", argument=True)
    what: Literal["auto", "curves", "curvature", "degeneracy"] = option(
        "auto", "What to draw of a training log: loss and accuracy (curves), the largest "
        "eigenvalue (curvature) or the fraction of eigenvalues near 0 (degeneracy). The last two "
        "need a run with ritz train --watch. auto means curves.")
    out: Path | None = option(None, "Output file: .png, .svg or .pdf (default: a .png next to the "
                              "input file).", metavar="FILE")
    # fmt: on


def command(options: Options) -> None:
    """Draw results and training logs as PNG, SVG or PDF."""
    from ritz.plots._shared import check_picture
    from ritz.training._shared import LOG

    what = options.what
    paths = [path / LOG if path.is_dir() else path for path in options.files]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {path}")
    # A folder stands for its log.
    logs = [path for path in paths if path.suffix == ".jsonl"]
    beside = "curves" if what == "auto" else what
    # A picture of a log is named after what is drawn, one of a result after its file.
    usual = paths[0].with_name(f"{beside if logs else paths[0].stem}.png")
    target = check_picture(options.out or usual)
    if logs and len(logs) < len(paths):
        raise ValueError("logs and results cannot be drawn in one figure: plot them separately")
    # Runs are named after their folder, results after their file, in the legend.
    short = [path.parent.name if path.name == LOG else path.stem for path in paths]
    titles = short if len(set(short)) == len(short) else map(str, paths)
    named = dict(zip(titles, paths, strict=True))
    ritz.plots.save_figure(_draw_logs(named, what) if logs else _draw_results(named), target)
    print_result(None, [target], as_json=options.json, text="")


def _draw_logs(paths: dict[str, Path], what: str) -> "Figure":
    runs = {name: _read_log(path) for name, path in paths.items()}
    if what in ("auto", "curves"):
        axes: Any = ritz.plots.training_curves(runs)[0]
    elif len(runs) > 1:
        raise ValueError(f"--what {what} takes one log, got {len(runs)}")
    else:
        draw: Any = ritz.plots.curvature_over_time if what == "curvature" else ritz.plots.degeneracy
        axes = draw(*runs.values())
    return axes.figure  # type: ignore[no-any-return]


def _read_log(path: Path) -> list[dict[str, Any]]:
    try:
        records = ritz.training.read_log(path)
    except ValueError as error:
        raise ValueError(f"{path} is not a log of ritz train: {error}") from error
    # Any JSON lines can be read, but only those of ritz train have a kind.
    if not all(isinstance(record, dict) and "kind" in record for record in records):
        raise ValueError(f"{path} is not a log of ritz train: its lines have no 'kind'")
    return records


def _draw_results(paths: dict[str, Path]) -> "Figure":
    from ritz.plots._shared import style

    results = {name: ritz.load(path) for name, path in paths.items()}
    if len(results) == 1:
        return ritz.plots.plot(*results.values())
    for name, result in results.items():
        if not isinstance(result, ritz.Spectrum):
            raise ValueError(f"several results must all be spectra to be drawn in one figure, but "
                             f"{name} is a {type(result).__name__}")  # fmt: skip
    # Spectra say what they are: Hessian or Gauss-Newton, and the mode of batch norm.
    return ritz.plots.plot(style.titled(results))
