"""The plot of any result, and plots written to files."""

import os
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from functools import singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ritz._core.results import Estimate
from ritz._core.storage import atomic_path
from ritz.graphs import ClusterCount, Fit, Similarity
from ritz.measures import Degeneracy, Landscape, Landscape2d, Sharpness, Temperature
from ritz.plots._estimates import (
    draw_eigenpairs,
    draw_estimate,
    draw_estimates,
    draw_moments,
    draw_solution,
)
from ritz.plots._graphs import draw_cluster_count, draw_fit, draw_model, similarity
from ritz.plots._landscape import landscape, landscape2d
from ritz.plots._networks import (
    draw_degeneracy,
    draw_diversity,
    draw_layers,
    draw_reliability,
    draw_sharpness,
    draw_shrinkage,
    draw_temperature,
)
from ritz.plots._scales import direction_title, result_title, set_title, spans_decade
from ritz.plots._series import is_density
from ritz.plots._spectra import density, panels, share_legend, spectra, spectrum
from ritz.plots._training import degeneracy, training_curves
from ritz.spectra import Eigenpairs, Moments, Spectrum
from ritz.spectra._shared import Solution

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
# The plot of a result, whatever it is.

DRAWN = (
    "a spectrum, eigenpairs, a density, an estimate, moments, the solution of a system, the "
    "sharpness, degeneracy, landscape, temperature or shrinkage of a network, numbers by layer, "
    "the diversity of solutions, a training result or log, the similarity, fit or cluster count "
    "of graphs, or several of one kind by name"
)


@singledispatch
def plot(result: Any) -> "Figure":
    """Return a figure of a result, whatever it is; titles name its matrix and batch-norm mode.

    ==========================================  ==================================================
    result                                      plot
    ==========================================  ==================================================
    spectrum                                    Ritz values as stems of their weights
    eigenpairs                                  eigenvalues as stems, residuals as error bars
    density of any kind                         curve with its band; points are smoothed
    estimate                                    samples and mean, or sorted entries with errors
    moments                                     stems with errors, by degree
    solution of a system                        residuals by step
    sharpness                                   a panel for each quantity, a row for each matrix
    degeneracy                                  share and place of the eigenvalues near 0, by probe
    landscape, in one or two dimensions         loss and accuracy along directions, or contours
    temperature                                 accuracy over confidence, before and after
    shrinkage                                   best weight over batch sizes
    norms, distances, gradients of layers       a row for each layer
    diversity of solutions                      heat maps of all pairs
    training result, records of a log           loss and accuracy by epoch
    similarity of graphs                        heat map of the distances
    cluster count                               the count in every way it was made
    fit of random graphs                        divergence over the parameter of each model
    several of a kind, by name                  in one figure
    ==========================================  ==================================================

    The functions beside this one draw on axes that you pass, and have more options. Register other
    classes with ``plot.register``, as of :func:`functools.singledispatch`.

    Args:
        result: As computed, or as ``ritz.load`` returns it.

    Raises:
        TypeError: The result has no plot, such as the bounds of a spectrum: print it.
    """
    if is_density(result):
        return _on_one(lambda ax: density(result, ax=ax), result)
    raise TypeError(f"result must be {DRAWN}; got {type(result).__name__}, which has no plot")


def _with_fields(*names: str) -> type:
    """Return a class that all classes with these attributes count as subclasses of.

    For results of packages that this one may not import, or whose classes are not public.
    """

    class Like(ABC):  # noqa: B024 -- it is never derived from
        @classmethod
        def __subclasshook__(cls, other: type) -> bool:
            return all(hasattr(other, name) for name in names)

    return Like


# ------------------------------------------------------------------------------------------
# Results with one panel, which several of a kind by name have one each of.

OnAxes = Callable[[Any, "Axes"], Any]
ONE_PANEL: dict[type, OnAxes] = {
    Eigenpairs: draw_eigenpairs,
    Estimate: draw_estimate,
    Moments: draw_moments,
    Solution: draw_solution,
    Degeneracy: draw_degeneracy,
    ClusterCount: draw_cluster_count,
    _with_fields("beta", "batch_sizes"): draw_shrinkage,
    _with_fields("confidence", "accuracy", "edges"): draw_reliability,
    _with_fields("model", "divergences"): draw_model,
}


def _register_one_panel(kind: type, draw: OnAxes) -> None:
    @plot.register(kind)
    def _(result: Any) -> "Figure":
        return _on_one(lambda ax: draw(result, ax), result)


for _kind, _draw in ONE_PANEL.items():
    _register_one_panel(_kind, _draw)


def _on_one(draw: "Callable[[Axes], Any]", result: Any) -> "Figure":
    figure, (ax,) = panels()
    draw(ax)
    if not ax.get_title("left"):
        set_title(ax, result_title(result))
    return figure


# ------------------------------------------------------------------------------------------
# Results with a figure of their own.


@plot.register(Spectrum)
def _(result: Spectrum) -> "Figure":
    figure = _on_one(lambda ax: spectrum(result, ax=ax), result)
    share_legend(figure)  # within the panel it would lie on stems
    return figure


@plot.register(Similarity)
def _(result: Similarity) -> "Figure":
    return cast("Figure", similarity(result).figure)


@plot.register(Fit)
def _(result: Fit) -> "Figure":
    return draw_fit(result)


@plot.register(Temperature)
def _(result: Temperature) -> "Figure":
    return draw_temperature(result)


@plot.register(Sharpness)
def _(result: Sharpness) -> "Figure":
    return draw_sharpness(result.rows, title=result.model)


@plot.register(_with_fields("spectral_norm", "frobenius_norm"))
def _(result: Any) -> "Figure":
    return draw_sharpness((result,))


@plot.register(_with_fields("layers", "names", "linf"))
@plot.register(_with_fields("layers", "names", "total_variance"))
def _(result: Any) -> "Figure":
    return draw_layers(result)


@plot.register(_with_fields("kl_pairs", "distance_pairs"))
def _(result: Any) -> "Figure":
    return draw_diversity(result)


@plot.register(Landscape2d)
def _(result: Landscape2d) -> "Figure":
    figure, (ax,) = panels(width=5.4, height=4.2)
    landscape2d(result, ax=ax)
    first, second = map(direction_title, result.names)
    ax.set(xlabel=f"step along {first}", ylabel=f"step along {second}")
    ax.locator_params(nbins=5)
    set_title(ax, result_title(result))
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
        mode = result_title(result)
        set_title(ax, ", ".join(filter(None, (direction_title(name), mode))))
        ax.locator_params(axis="x", nbins=5)
    for spare in axes[len(result.names) :]:
        spare.remove()
    share_legend(figure)
    return figure


TrainingLike = _with_fields("history", "num_epochs")


@plot.register(TrainingLike)
def _(result: Any) -> "Figure":
    return _training({"": _records(result)})


# ------------------------------------------------------------------------------------------
# Several results: by name, one for each probe, or the records of a log.


@plot.register(Mapping)
def _(result: Mapping[Any, Any]) -> "Figure":
    if not result:
        raise ValueError("result must hold at least one result, got none")
    values = list(result.values())
    if all(isinstance(one, Mapping) for one in values) or _over_time(result):
        found: Any = result if not _over_time(result) else {"": result}
        return cast("Figure", degeneracy(found).figure)
    if len(values) == 1:
        return plot(values[0])
    named = {str(name): one for name, one in result.items()}
    if all(is_density(one) for one in values):
        return _densities(named)
    if all(isinstance(one, TrainingLike) for one in values):
        return _training({name: _records(one) for name, one in named.items()})
    return _one_kind(named)


@plot.register(list)
@plot.register(tuple)
def _(result: Sequence[Any]) -> "Figure":
    if result and all(isinstance(one, Mapping) and "kind" in one for one in result):
        return _training({"": result})
    return plot({f"probe {number}": one for number, one in enumerate(result, 1)})


def _over_time(results: Mapping[Any, Any]) -> bool:
    """Whether these are degeneracies by epoch."""
    numbered = all(isinstance(key, int | float) for key in results)
    return numbered and all(isinstance(one, Degeneracy) for one in results.values())


def _records(result: Any) -> list[dict[str, Any]]:
    """The epochs of a training result as those of a log."""
    names = [*result.history]
    rows = zip(*(result.history[name].tolist() for name in names), strict=True)
    return [{"kind": "epoch", **dict(zip(names, row, strict=True))} for row in rows]


def _training(runs: Mapping[str, Any]) -> "Figure":
    return cast("Figure", training_curves(runs)[0].figure)


def _densities(results: Mapping[str, Any]) -> "Figure":
    figure, (ax,) = panels()
    for name, one in results.items():
        density(one, ax=ax, label=name)
    return figure


def _one_kind(results: Mapping[str, Any]) -> "Figure":
    """Results of one class: spectra on common scales, numbers in rows, others a panel each."""
    first = next(iter(results.values()))
    for name, one in results.items():
        if type(one) is not type(first):
            raise TypeError(f"several results must be of one kind to be drawn together, got "
                            f"{type(first).__name__} and, by the name of {name!r}, "
                            f"{type(one).__name__}")  # fmt: skip
    if isinstance(first, Spectrum):
        return cast("Figure", spectra(results, log=True)[0].figure)
    if isinstance(first, Estimate) and not any(one.mean.ndim for one in results.values()):
        figure, (ax,) = panels(height=1.2 + 0.3 * len(results))
        draw_estimates(results, ax)
        return figure
    draw = next((draw for kind, draw in ONE_PANEL.items() if isinstance(first, kind)), None)
    if draw is None:
        raise TypeError(f"several results of class {type(first).__name__} have no plot: plot them "
                        f"one after the other")  # fmt: skip
    columns = min(2, len(results))
    figure, axes = panels(-(-len(results) // columns), columns, width=4.5, height=3.0)
    for ax, (name, one) in zip(axes, results.items(), strict=False):
        draw(one, ax)
        set_title(ax, name)
    for spare in axes[len(results) :]:
        spare.remove()
    return figure
