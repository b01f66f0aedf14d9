"""``ritz plot``: pictures of result files and training logs."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ritz
from ritz.cli._options import PrintOptions, examples, option
from ritz.cli._output import print_result
from ritz.cli.sweep import RESULT as SWEEP

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPILOG = examples(
    "ritz plot runs/digits",
    "ritz plot runs/sgd runs/gadamx --out accuracy.pdf",
    "ritz plot sweeps/rates",
    "ritz plot spectrum-hessian.safetensors spectrum-ggn.safetensors",
    "ritz plot runs/digits --what curvature --out sharpness.svg",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PrintOptions):
    """Options of the command."""

    # fmt: off
    files: list[Path] = option(
        MISSING, "Results, logs, or folders of runs or of a sweep. Several spectra, or several "
        "logs, are drawn in one figure.",
        metavar="FILE", argument=True)
    what: str = option(
        "auto", "What to draw of a training log: loss and accuracy (curves), everything that ritz "
        "train --watch logged (watched) or one quantity of it, the largest eigenvalue (curvature) "
        "or the fraction of eigenvalues near 0 (degeneracy). auto draws curves and watched.",
        metavar="NAME")
    out: Path | None = option(None, "Output file: .png, .svg or .pdf (default: a .png next to the "
                              "input file).", metavar="FILE")
    # fmt: on


def command(options: Options) -> None:
    """Draw results and training logs as PNG, SVG or PDF."""
    from ritz.plots._shared import check_picture
    from ritz.training._shared import LOG

    what = options.what
    paths = [_file_of(path) for path in options.files]
    logs = [path for path in paths if path.suffix == ".jsonl"]
    # A run that was watched has two pictures.
    parts = _parts(logs, what)
    # The picture of a log is named after what it shows, that of a result after its file.
    beside = parts[0]
    usual = paths[0].with_name(f"{beside if logs else paths[0].stem}.png")
    target = check_picture(options.out or usual)
    if logs and len(logs) < len(paths):
        raise ValueError("logs and results cannot be drawn in one figure: plot them separately")
    # Runs are named after their folder, results after their file, in the legend.
    short = [path.parent.name if path.name == LOG else path.stem for path in paths]
    titles = short if len(set(short)) == len(short) else map(str, paths)
    named = dict(zip(titles, paths, strict=True))
    if not logs:
        ritz.plots.save_figure(_draw_results(named), target)
        print_result(None, [target], as_json=options.json, text="")
        return
    runs = {name: _read_log(path) for name, path in named.items()}
    second = target.with_name("watched.png" if options.out is None else
                              f"{target.stem}-watched{target.suffix}")  # fmt: skip
    files = [target, second][: len(parts)]
    for part, file in zip(parts, files, strict=True):
        ritz.plots.save_figure(_draw_logs(runs, part), file)
    print_result(None, files, as_json=options.json, text=_more(runs, what))


def _file_of(path: Path) -> Path:
    """Return the file that a path stands for: a folder for its log, or for that of its sweep."""
    from ritz.training._shared import LOG

    if not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(f"no such file or folder: {path}")
        return path
    for file in (path / LOG, path / SWEEP):
        if file.is_file():
            return file
    # A sweep that was killed has runs, but no result yet.
    runs = any(path.glob(f"*/{LOG}"))
    raise FileNotFoundError(
        f"no {SWEEP} in {path}, which ritz sweep writes at its end: resume the sweep by the same "
        "command, or draw the folders of its runs"
        if runs
        else f"no log in {path}: it has no {LOG}, which ritz train writes"
    )


def _parts(logs: list[Path], what: str) -> list[str]:
    from ritz.plots._shared import watched_names

    if what != "auto":
        return [what]
    seen = any(watched_names(_read_log(path)) for path in logs)
    return ["curves", "watched"] if seen else ["curves"]


def _more(runs: dict[str, list[dict[str, Any]]], what: str) -> str:
    """Return a line that lists the values of ``--what``, if none was chosen."""
    from ritz.plots._shared import watched_names

    names = watched_names([record for records in runs.values() for record in records])
    if what != "auto" or not names:
        return ""
    single = [name for name, key in (("curvature", "lambda_max"), ("degeneracy", "ritz_values"))
              if key in names and len(runs) == 1]  # fmt: skip
    choices = dict.fromkeys(["curves", *single, *names])
    return f"--what NAME draws one of these alone: {', '.join(choices)}"


def _draw_logs(runs: dict[str, list[dict[str, Any]]], what: str) -> "Figure":
    if what == "curves":
        axes: Any = ritz.plots.training_curves(runs)[0]
    elif what == "watched" or what not in ("curvature", "degeneracy"):
        return ritz.plots.watched(runs, names=None if what == "watched" else [what])
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
