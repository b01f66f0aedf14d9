"""``Evidence``: published figures beside measured ones, their verdicts, and the page of all rows.

A study compares its result with the published tables and figures in ``evidence(result)``, which
returns a list of :class:`Evidence`. If it has a function ``setting(result)``, this returns one line
on the network and the data. :func:`evidence` collects the rows of all saved results.
"""

import math
import os
import re
import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ritz._core.results import format_uncertain, stderr
from ritz._core.storage import load
from ritz.studies._protocol import find

Verdict = Literal["agrees", "differs", "undecided", "extends"]
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
# Tolerance of accuracies and errors in percent: twice the standard deviation of 0.3 between runs
# that the Gadam paper has for VGG-16 on CIFAR-100.
POINTS = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A published figure beside the measured one.

    Attributes:
        paper: Key of the paper; see ``PAPERS``.
        where: Table or figure.
        what: Name of the quantity.
        published: The published figure, or what the text claims.
        measured: The measured figure with its spread over seeds.
        verdict: ``agrees``, ``differs``, ``undecided`` if the scatter between seeds is too large to
            tell, or ``extends`` if there is no published figure; see :func:`judge`.
        why: Note below the table: the reason for a difference, or a condition that the reader must
            know.
    """

    paper: str
    where: str
    what: str
    published: str
    measured: str
    verdict: Verdict
    why: str = ""


def spread(values: Tensor) -> str:
    """Return mean and standard error of the finite values as text; a dash if there are none."""
    finite = values[values.isfinite()]
    if not len(finite):
        return "-"
    # One run has no spread, and equal runs have none.
    error = float(stderr(finite)) if len(finite) > 1 else 0.0
    return format_uncertain(float(finite.mean()), error) if error else f"{float(finite[0]):.5g}"


def judge(
    values: Tensor,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    note: str = "",
    cause: str = "",
) -> dict[str, Any]:
    """Return verdict and reason for values by seed whose mean was published to lie in a range.

    Take the interval of two standard errors on both sides of the mean. The verdict is ``agrees`` if
    the interval lies inside of the range, and ``differs`` if it lies outside. If an end of the
    range lies inside of the interval, the verdict is ``undecided``. Values that scatter widely
    therefore never agree.

    Args:
        values: One value per seed. The verdict is ``undecided`` if there are none, or if one is NaN
            because its run failed.
        low: Lower end of the range.
        high: Upper end of the range.
        note: A condition that the reader must know.
        cause: The likely cause, used if the verdict is not ``agrees``.
    """
    # A single run has no scatter, so its value is compared. The mean of no runs is NaN.
    error = float(stderr(values)) if len(values) > 1 else 0.0
    verdict = located(float(values.mean()), error, low, high)
    notes = (note, "one seed" * (len(values) == 1), cause * (verdict != "agrees"))
    return {"verdict": verdict, "why": "; ".join(filter(None, notes))}


def located(mean: float, error: float, low: float, high: float) -> Verdict:
    """Return the verdict for a mean and its standard error; see :func:`judge`."""
    least, most = mean - 2 * error, mean + 2 * error
    if low < least and most < high:
        return "agrees"
    # NaN is neither inside nor outside of a range.
    return "differs" if most < low or high < least else "undecided"


def signed(
    differences: Tensor,
    sign: int,
    *,
    size: float = math.inf,
    margin: float = math.nan,
    note: str = "",
    cause: str = "",
) -> dict[str, Any]:
    """Return verdict and reason for differences within each seed, whose sign was published.

    Args:
        differences: One difference per seed, in which the scatter between seeds cancels.
        sign: -1, 1, or 0 if the differences were published to be about zero.
        size: The published size, if it can be expected here. If the interval contains zero but is
            certainly below this size, the verdict is ``differs``, because the effect would have
            been seen.
        margin: Size from which a difference matters; only for the sign 0.
        note: A condition that the reader must know; only for the signs -1 and 1.
        cause: The likely cause, used if the verdict is not ``agrees``.
    """
    if not sign:
        return near(differences, 0.0, margin, cause=cause)
    # The range is that of positive numbers. For a negative sign, mirror the differences instead.
    known = judge(sign * differences, low=0.0, note=note, cause=cause)
    seen = known["verdict"] != "undecided" or math.isinf(size)
    return known if seen else judge(sign * differences, low=abs(size), note=note, cause=cause)


def near(values: Tensor, published: float, tolerance: float, *, cause: str = "") -> dict[str, Any]:
    """Return verdict and reason for values by seed whose mean was published as a number.

    Args:
        values: One value per seed.
        published: The published number.
        tolerance: Largest distance that counts as equal.
        cause: The likely cause, used if the verdict is not ``agrees``.
    """
    low, high = published - tolerance, published + tolerance
    return judge(values, low, high, note=f"tolerance {tolerance:g}", cause=cause)


def points(effect: float) -> float:
    """Return the tolerance of an accuracy in percent, in a table about an effect of this size."""
    # At most half of the effect: closer to the published value than to the one it is compared with.
    return min(POINTS, round(abs(effect) / 2, 3))


def all_of(*parts: dict[str, Any]) -> dict[str, Any]:
    """Return verdict and reason for a claim with several parts, as from :func:`judge`.

    The claim differs if one part does, and agrees if all parts do. Without parts it is undecided.
    """
    verdicts = [part["verdict"] for part in parts] or ["undecided"]
    verdict = next((each for each in ("differs", "undecided") if each in verdicts), "agrees")
    # A reason of several parts is listed once.
    reasons = dict.fromkeys(
        reason for part in parts for reason in part["why"].split("; ") if reason
    )
    return {"verdict": verdict, "why": "; ".join(reasons)}


# ------------------------------------------------------------------------------------------
# The page.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """The rows of one saved result that belong to one paper."""

    name: str
    result: Any
    rows: list[Evidence]

    def place(self) -> tuple[int, ...]:
        """Return the first chapter, table or figure of the rows, by which sections are sorted."""
        numbers = (re.search(r"\d+(\.\d+)*", row.where) for row in self.rows)
        return min((tuple(map(int, m[0].split("."))) for m in numbers if m), default=(0,))


def evidence(folder: str | os.PathLike[str]) -> str:
    """Return a page of Markdown: the evidence in all saved results of studies in a folder."""
    sections: dict[str, list[_Section]] = {key: [] for key in PAPERS}
    known: set[Evidence] = set()
    for path in sorted(Path(folder).glob("*.safetensors")):
        result = load(path)
        rows: dict[str, list[Evidence]] = {}
        for row in _study(result).evidence(result):
            # A row that is the same in several results is listed once, for the first result.
            if row not in known:
                rows.setdefault(row.paper, []).append(row)
        known |= {row for listed in rows.values() for row in listed}
        for paper, listed in rows.items():
            sections[paper].append(_Section(name=path.stem, result=result, rows=listed))
    lines = list(_counts(sections))
    for paper, parts in sections.items():
        lines += [f"## {PAPERS[paper]}", ""] * bool(parts)
        for part in sorted(parts, key=_Section.place):
            lines += _lines(part)
    return "\n".join(lines)


def _counts(sections: dict[str, list[_Section]]) -> Iterator[str]:
    verdicts = typing.get_args(Verdict)
    yield from ("## Count", "", f"| paper | rows | {' | '.join(verdicts)} |")
    yield "| --- |" + " ---: |" * (1 + len(verdicts))
    total = Counter[str]()
    for paper, parts in sections.items():
        counts = Counter(row.verdict for part in parts for row in part.rows)
        total.update(counts)
        if parts:
            yield _cells([PAPERS[paper], counts.total(), *(counts[v] for v in verdicts)])
    yield _cells(["all", total.total(), *(total[verdict] for verdict in verdicts)])
    yield ""


def _lines(section: _Section) -> Iterator[str]:
    study, notes = _study(section.result), list[str]()
    yield from (f"### {section.name}", "")
    # The first line of the docstring says what the study is; `setting` adds the network and data.
    about = [(study.__doc__ or "").partition("\n")[0]]
    about += [study.setting(section.result)] if hasattr(study, "setting") else []
    yield from (" ".join(about), "")
    yield "| where | quantity | published | measured | verdict |"
    yield "| --- | --- | --- | --- | --- |"
    for row in section.rows:
        verdict = f"**{row.verdict}**" if row.verdict == "differs" else row.verdict
        if row.why:
            # Rows with the same reason share a note.
            notes += [row.why] if row.why not in notes else []
            verdict += f" ({notes.index(row.why) + 1})"
        yield _cells([row.where, row.what, row.published, row.measured, verdict])
    yield ""
    yield from (f"{number}. {note[0].upper()}{note[1:]}." for number, note in enumerate(notes, 1))
    yield from [""] * bool(notes)
    yield from (f"`{_command(section.result)}`: {_origin(section.result)}", "")


def _cells(cells: Iterable[object]) -> str:
    # A bar would begin a new column.
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _study(result: Any) -> Any:
    return find(type(result).__module__.rpartition(".")[2])


def _command(result: Any) -> str:
    """Return the command that computes a result: the nearest size, and the options that differ."""
    name = type(result).__module__.rpartition(".")[2]
    sizes = {"": type(result.config)(), **getattr(_study(result), "SIZES", {})}
    options = {size: list(_changes(result.config, base)) for size, base in sizes.items()}
    # If several sizes are equally near, the default comes first.
    size = min(options, key=lambda size: len(options[size]))
    return " ".join([f"ritz study {name}", *([f"--size {size}"] if size else []), *options[size]])


def _changes(config: Any, base: Any) -> Iterator[str]:
    for field in fields(config):
        value = getattr(config, field.name)
        if value != getattr(base, field.name) and field.name not in PLACES:
            yield f"--set {field.name}={_text(value)}"


def _text(value: Any) -> str:
    return ",".join(map(_text, value)) if isinstance(value, tuple) else str(value).lower()


def _origin(result: Any) -> str:
    known = result.versions
    # Older results have fewer entries.
    parts = [known.get("date"), known.get("machine"), f"torch {known['torch']}"]
    return ", ".join(part for part in parts if part)
