"""The plot of any result, and plots written to files."""

import os
from collections.abc import Callable, Mapping
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ritz._core.storage import atomic_path
from ritz.measures import Landscape, Landscape2d
from ritz.plots._landscape import landscape, landscape2d
from ritz.plots._scales import direction_title, spans_decade, result_title
from ritz.plots._spectra import density, panels, share_legend, spectra, spectrum
from ritz.spectra import Spectrum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ------------------------------------------------------------------------------------------
# Pictures as files: PNG, SVG or PDF, by how the name ends, written whole or not at all.

KINDS = (".png", ".svg", ".pdf")
DPI = 200  # of a PNG: two columns of print hold its lines


def check_picture(path: str | os.PathLike[str]) -> Path:
    """Return the path; raise, before long work, where no picture could be written there.

    Args:
        path: Of a picture to be.
    """
    target = Path(path)
    if target.suffix.lower() not in KINDS:
        raise ValueError(f"a picture must end in {', '.join(KINDS)}; got {target.name!r}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: {target.parent} is not a folder")
    return target


def save_figure(figure: "Figure", path: str | os.PathLike[str], *, dpi: int = DPI) -> Path:
    """Write a figure as its name ends, atomically, and return where.

    The same figure gives the same bytes: no file holds a time. Text in SVG and PDF stays text.

    Args:
        figure: Of matplotlib.
        path: Ends in ``.png``, ``.svg`` or ``.pdf``.
        dpi: Dots an inch of a PNG.
    """
    import matplotlib as mpl

    target = check_picture(path)
    kind = target.suffix[1:].lower()
    metadata: dict[str, Any] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
    }[kind]
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "ritz", "pdf.fonttype": 42}
    with mpl.rc_context(style), atomic_path(target) as temporary:
        figure.savefig(temporary, format=kind, dpi=dpi, metadata=metadata)
    return target


# ------------------------------------------------------------------------------------------
# The customary picture of a result, whatever it is.


@singledispatch
def plot(result: Any) -> "Figure":
    """Return a figure of a result: a spectrum, several by name, a density, a landscape.

    Open to other kinds: ``plot.register`` is that of :func:`functools.singledispatch`.

    Args:
        result: As computed, or as ``ritz.load`` returns it.
    """
    if not hasattr(result, "pdf"):
        raise TypeError(f"result must be a spectrum, a density or a landscape, got "
                        f"{type(result).__name__}, which has no picture")  # fmt: skip
    return _on_one(lambda ax: density(result, ax=ax))


@plot.register(Spectrum)
def _(result: Spectrum) -> "Figure":
    figure = _on_one(lambda ax: spectrum(result, ax=ax))
    figure.axes[0].set_title(result_title(result), loc="left", fontsize="medium")
    return figure


@plot.register(Mapping)
def _(result: Mapping[str, Spectrum]) -> "Figure":
    if len(result) == 1:
        return plot(next(iter(result.values())))
    return cast("Figure", spectra(result, log=True)[0].figure)


@plot.register(Landscape2d)
def _(result: Landscape2d) -> "Figure":
    figure, (ax,) = panels(width=5.4, height=4.2)
    landscape2d(result, ax=ax)
    first, second = map(direction_title, result.names)
    ax.set(xlabel=f"step along {first}", ylabel=f"step along {second}")
    ax.locator_params(nbins=5)
    return figure


@plot.register(Landscape)
def _(result: Landscape) -> "Figure":
    columns = min(3, len(result.names))
    figure, axes = panels(-(-len(result.names) // columns), columns, width=4.4, height=3.0)
    log = spans_decade(*(loss for loss in (result.loss, result.test_loss) if loss is not None))
    for ax, name in zip(axes, result.names, strict=False):
        if ax is not axes[0]:
            ax.sharey(axes[0])
        landscape(result, direction=name, ax=ax, log=log)
        ax.set_title(direction_title(name), loc="left", fontsize="medium")
        ax.locator_params(axis="x", nbins=5)
    for spare in axes[len(result.names) :]:
        spare.remove()
    share_legend(figure)
    return figure


def _on_one(draw: "Callable[[Any], Any]") -> "Figure":
    figure, (ax,) = panels()
    draw(ax)
    return figure
