"""``plot``, which draws any result by its class, and ``save_figure``."""

import os
from abc import ABC
from collections.abc import Mapping, Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any

from ritz._core.storage import atomic_path
from ritz.measures import Degeneracy
from ritz.plots import _style as style
from ritz.plots._series import check_named
from ritz.plots._style import STYLE, Axes, Figure

# ------------------------------------------------------------------------------------------
# Figures as files.

# Metadata by file type: without times and versions, the same figure gives the same bytes.
METADATA: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}


def check_picture(path: str | os.PathLike[str]) -> Path:
    """Return the path of a picture; raise if it could not be written, before long work."""
    target = Path(path)
    if target.suffix.lower() not in METADATA:
        raise ValueError(
            f"the file of a figure must end in .png, .svg or .pdf, got {target.name!r}"
        )
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: there is no folder {target.parent}")
    return target


def save_figure(figure: "Figure", path: str | os.PathLike[str], *, dpi: int = STYLE.dpi) -> Path:
    """Write a figure atomically and return its path.

    The same figure gives the same bytes, because the file contains no time stamp. Text in SVG and
    PDF files stays text.

    Args:
        figure: Matplotlib figure.
        path: Path that ends in ``.png``, ``.svg`` or ``.pdf``.
        dpi: Dots per inch of a PNG.
    """
    import matplotlib as mpl

    target = check_picture(path)
    kind = target.suffix.lower()
    # SVG element ids are random without a salt; fonttype 42 embeds fonts, so text stays text.
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "ritz", "pdf.fonttype": 42}
    try:
        with mpl.rc_context(style), atomic_path(target) as temporary:
            figure.savefig(temporary, format=kind[1:], dpi=dpi, metadata=METADATA[kind])
    except OSError as error:
        if error.filename is not None:
            raise
        # On a full disk the error does not name the file.
        raise OSError(f"cannot write {target}: {error.strerror or error}") from error
    return target


# ------------------------------------------------------------------------------------------
# Plots of results, by single dispatch. The other modules of this package register their classes:
# with `plot` for a whole figure, with `draw` for one panel, with `plot_several` for results by
# name.


@singledispatch
def plot(result: Any) -> "Figure":
    """Return a figure of any result. Titles name its matrix and batch-norm mode.

    ==========================================  ==================================================
    result                                      plot
    ==========================================  ==================================================
    spectrum                                    stems: Ritz values and their weights
    eigenpairs                                  stems, with residuals as error bars
    density of any kind                         curve with its error band; discrete ones smoothed
    estimate of a number, or of an array        samples and mean, or sorted entries with errors
    moments                                     stems with error bars, one per degree
    solution of a linear system                 residual after each step
    sharpness                                   a panel for each quantity, a row for each matrix
    degeneracy                                  fraction and value of the eigenvalues near 0
    landscape, in one or two dimensions         loss and accuracy along directions, or contours
    temperature                                 accuracy over confidence, before and after
    shrinkage                                   best weight over batch sizes
    advice                                      curvature and learning rates over batch sizes
    prediction of batches                       largest eigenvalue and overlap over batch sizes
    edge of the bulk                            stems: bulk, Tracy-Widom region and outliers
    overlap of the gradient                     bars: its part in each leading eigenvector
    norms, distances, gradients of layers       a row for each layer
    diversity of solutions                      heat maps of all pairs
    training result, records of a log           loss and accuracy per epoch
    sweep                                       each run and the means, over one option of the grid
    similarity of graphs                        heat map of the distances
    cluster count                               number of eigenvalues below each point, and the gap
    fit of random graphs                        divergence over the parameter of each model
    dictionary of results of one kind           all of them in one figure
    ==========================================  ==================================================

    The other functions of this package draw on axes that you pass, and have more options. Register
    your own classes with ``plot.register``; see :func:`functools.singledispatch`.

    Args:
        result: A result, as computed or as returned by ``ritz.load``.

    Raises:
        TypeError: The result has no plot, such as the bounds of a spectrum. Print it instead.
    """
    if not _has_panel(result):
        raise TypeError(f"result must be of a class that has a plot, got {type(result).__name__}; "
                        f"see help(ritz.plots.plot)")  # fmt: skip
    figure, (ax,) = style.panels()
    draw(result, ax)
    if not ax.get_title("left"):
        style.set_title(ax, style.result_title(result))
    return figure


@singledispatch
def draw(result: Any, ax: "Axes") -> None:
    """Draw a result in one panel."""
    raise TypeError(f"{type(result).__name__} has no panel")


@singledispatch
def plot_several(first: Any, results: Mapping[Any, Any]) -> "Figure":
    """Return a figure of results of one class by name, a panel each.

    Args:
        first: First of the results, which selects the implementation.
        results: Results by name.
    """
    if not _has_panel(first):
        raise TypeError(f"results of class {type(first).__name__} cannot be drawn in one figure: "
                        f"plot them separately")  # fmt: skip
    figure, axes = style.panel_grid(len(results), 2, width=4.5, height=3.0)
    for ax, (name, result) in zip(axes, results.items(), strict=True):
        draw(result, ax)
        style.set_title(ax, str(name))
    return figure


def with_fields(*names: str) -> type:
    """Return an abstract class of which all classes with these attributes are subclasses.

    It stands for results whose classes this package cannot import, or which are not public.
    """

    class Like(ABC):  # noqa: B024 -- nothing derives from it
        @classmethod
        def __subclasshook__(cls, other: type) -> bool:
            return all(hasattr(other, name) for name in names)

    return Like


def _has_panel(result: Any) -> bool:
    return draw.dispatch(type(result)) is not draw.dispatch(object)


@plot.register(Mapping)
def _(results: Mapping[Any, Any]) -> "Figure":
    check_named("result", results, "names to results")
    first = next(iter(results.values()))
    # Degeneracies by epoch are one curve, even of a single epoch.
    if len(results) == 1 and not isinstance(first, Mapping | Degeneracy):
        return plot(first)
    several = plot_several.dispatch(type(first))
    for name, result in results.items():
        # Densities have several classes, but one implementation draws them all.
        shared = several is not plot_several.dispatch(object)
        alike = shared and plot_several.dispatch(type(result)) is several
        if type(result) is not type(first) and not alike:
            raise TypeError(f"results in one figure must be of one class, but {name!r} is a "
                            f"{type(result).__name__} and the first a {type(first).__name__}"
                            )  # fmt: skip
    return plot_several(first, results)


@plot.register(list)
@plot.register(tuple)
def _(results: Sequence[Any]) -> "Figure":
    if results and all(isinstance(one, Mapping) and "kind" in one for one in results):
        return plot_several(results, {"": results})
    return plot({f"probe {number}": one for number, one in enumerate(results, 1)})
