"""Results of studies beside the published ones, as rows of one page.

A study compares its result with the published tables and figures in ``evidence(result)``, which
returns a list of :class:`Evidence`. :func:`evidence` collects the rows of all saved results.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ritz._core.checks import is_below
from ritz._core.results import format_uncertain, stderr
from ritz._core.storage import load
from ritz.studies._protocol import find

Verdict = Literal["agrees", "differs", "extends"]
# Titles of the papers, in the order of the page.
PAPERS = {
    "SPECTRA": "Spectral Machine Learning",
    "GAP": "Explaining the Adaptive Generalisation Gap",
    "FLAT": "Flatness is a False Friend",
    "GADAM": "Iterate Averaged Adaptive Gradient Methods",
    "NOISE": "SGD with Covariance Noise",
}
# Fields of configurations that belong to one machine.
PLACES = ("data", "runs", "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A published figure beside the measured one.

    Attributes:
        paper: Key of the paper; see ``PAPERS``.
        where: Table or figure.
        what: The quantity.
        published: The published figure, or what the text says.
        measured: The measured figure with its spread over seeds.
        verdict: ``agrees``, ``differs``, or ``extends`` if there is no published figure for it.
        why: The reason for a difference, or a condition that has to be known.
    """

    paper: str
    where: str
    what: str
    published: str
    measured: str
    verdict: Verdict
    why: str = ""


def spread(values: Tensor) -> str:
    """Return mean and standard error of the values that are not NaN as text; a dash for none."""
    found = values[values.isfinite()]
    if not len(found):
        return "-"
    # One run has no spread, and equal runs have none.
    error = float(stderr(found)) if len(found) > 1 else 0.0
    return format_uncertain(float(found.mean()), error) if error else f"{float(found[0]):.5g}"


def signed(differences: Tensor, sign: int) -> dict[str, Any]:
    """Return verdict and reason for differences within each seed, whose sign was published.

    Args:
        differences: By seed; the scatter between seeds cancels in them.
        sign: -1, 1, or 0 if they were published to be about zero.
    """
    mean, error = float(differences.mean()), float(stderr(differences))
    # A difference counts from two standard errors on; NaN does not count.
    measured = int(math.copysign(1, mean)) if is_below(2 * error, abs(mean)) else 0
    verdict: Verdict = "agrees" if measured == sign else "differs"
    why = "no difference beyond two standard errors" if measured == 0 != sign else ""
    if sign == 0 and measured:
        why = "lower" if measured < 0 else "higher"
    return {"verdict": verdict, "why": why}


def evidence(folder: str | os.PathLike[str]) -> str:
    """Return a page of Markdown: the evidence in all saved results of studies in a folder."""
    rows: dict[str, dict[Evidence, str]] = {key: {} for key in PAPERS}
    sources = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        result = load(path)
        study: Any = find(type(result).__module__.rpartition(".")[2])
        sources.append(f"| `{path.name}` | `{_command(result)}` | {_origin(result)} |")
        # A study that reproduces no published figure has no rows, but its result is listed.
        for row in getattr(study, "evidence", lambda result: [])(result):
            # A part that is the same at all settings is listed once, for the first result.
            rows[row.paper].setdefault(row, path.stem)
    return "\n".join([*_tables(rows), *_sources(sources)]) + "\n"


def _tables(rows: dict[str, dict[Evidence, str]]) -> Iterator[str]:
    for key, sources in rows.items():
        if sources:
            yield f"## {PAPERS[key]}\n"
            yield "| where | what | published | measured | verdict | result |"
            yield "| --- | --- | --- | --- | --- | --- |"
            yield from map(_line, sources, sources.values())
            yield ""


def _sources(sources: list[str]) -> Iterator[str]:
    yield "## Results\n"
    yield "| file | command | machine and date |"
    yield "| --- | --- | --- |"
    yield from sources


def _line(row: Evidence, source: str) -> str:
    verdict = f"**{row.verdict}**" + (f": {row.why}" if row.why else "")
    cells = (row.where, row.what, row.published, row.measured, verdict, source)
    # A bar would begin a new column.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _command(result: Any) -> str:
    """Return the command that makes a result: the fields that differ from their defaults."""
    name, config = type(result).__module__.rpartition(".")[2], result.config
    default = type(config)()
    words = [f"ritz study {name}"]
    for field in fields(config):
        value = getattr(config, field.name)
        if value != getattr(default, field.name) and field.name not in PLACES:
            words.append(f"--set {field.name}={_text(value)}")
    return " ".join(words)


def _text(value: Any) -> str:
    return ",".join(map(_text, value)) if isinstance(value, tuple) else str(value).lower()


def _origin(result: Any) -> str:
    known = result.versions
    # Older results have fewer facts.
    parts = [known.get("date"), known.get("machine"), f"torch {known['torch']}"]
    return ", ".join(part for part in parts if part)
