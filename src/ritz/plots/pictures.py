"""The customary picture of a result, whatever it is."""

from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import TYPE_CHECKING, Any, cast

from ritz.measures.landscapes import Landscape, Landscape2d
from ritz.plots.figures import density, panels, share_legend, spectra, spectrum
from ritz.plots.landscapes import landscape, landscape2d
from ritz.plots.scales import spans_decade
from ritz.plots.titles import direction_title, spectrum_title
from ritz.spectra import Spectrum

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@singledispatch
def picture(result: Any) -> "Figure":
    """Return a figure of a result: a spectrum, several by name, a density, a landscape.

    Open to other kinds: ``picture.register`` is that of :func:`functools.singledispatch`.

    Args:
        result: As computed, or as ``ritz.load`` returns it.
    """
    if not hasattr(result, "pdf"):
        raise TypeError(f"result must be a spectrum, a density or a landscape, got "
                        f"{type(result).__name__}, which has no picture")  # fmt: skip
    return _on_one(lambda ax: density(result, ax=ax))


@picture.register(Spectrum)
def _(result: Spectrum) -> "Figure":
    figure = _on_one(lambda ax: spectrum(result, ax=ax))
    figure.axes[0].set_title(spectrum_title(result), loc="left", fontsize="medium")
    return figure


@picture.register(Mapping)
def _(result: Mapping[str, Spectrum]) -> "Figure":
    if len(result) == 1:
        return picture(next(iter(result.values())))
    return cast("Figure", spectra(result, log=True)[0].figure)


@picture.register(Landscape2d)
def _(result: Landscape2d) -> "Figure":
    figure, (ax,) = panels(width=5.4, height=4.2)
    landscape2d(result, ax=ax)
    first, second = map(direction_title, result.names)
    ax.set(xlabel=f"step along {first}", ylabel=f"step along {second}")
    ax.locator_params(nbins=5)
    return figure


@picture.register(Landscape)
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
