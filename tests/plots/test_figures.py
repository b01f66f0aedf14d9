import sys
from dataclasses import replace

import pytest
import torch
from matplotlib import pyplot

import ritz
from ritz import plots
from ritz.measures import Landscape, Landscape2d
from ritz.plots._style import share_legend
from ritz.rmt import MarchenkoPastur
from ritz.testing import wishart

KINDS = ["Ritz value < 0", "sign not known, unconverged", "Ritz value > 0",
         "Ritz value > 0, unconverged"]  # fmt: skip


@pytest.fixture
def matrix():
    return torch.diag(torch.cat([torch.tensor([-4.0, 12.0]), torch.linspace(0, 3, 98)]).double())


@pytest.fixture
def ax():
    figure, (ax,) = plots.panels()
    yield ax
    pyplot.close(figure)


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def save(ax, tmp_path):
    ax.figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000


def test_colours_show_signs_and_filled_markers_convergence(matrix, ax, tmp_path):
    assert plots.spectrum(ritz.lanczos(matrix, num_steps=20), ax=ax) is ax
    assert ax.get_yscale() == "log"
    assert ax.get_xlabel() == r"Ritz value $\theta$"
    assert ax.get_ylabel() == r"weight $\tau$"
    assert legend(ax) == KINDS
    colours = [line.get_color() for line in ax.get_lines()]
    assert len(set(colours)) == 3
    faces = [line.get_markerfacecolor() for line in ax.get_lines()]
    assert faces == [colours[0], "white", colours[2], "white"]
    save(ax, tmp_path)


def test_a_value_within_its_residual_of_zero_is_drawn_as_zero(matrix, ax):
    """The Ritz value with most weight of a Hessian is such a value."""
    found = ritz.lanczos(matrix, num_steps=20)
    values = found.values.clone()
    place = int(values.abs().argmin())
    values[place] = -1e-9
    plots.spectrum(replace(found, values=values, residuals=0 * values + 1e-6), ax=ax)
    assert legend(ax) == ["Ritz value < 0", "sign not known", "Ritz value > 0"]
    negative, zero, positive = ax.get_lines()
    assert zero.get_xdata().tolist() == [-1e-9]
    assert (negative.get_xdata() < 0).all()
    assert (positive.get_xdata() > 0).all()


@pytest.mark.parametrize(("cumulative", "ylabel"), [(False, "density"), (True, "mass below")])
@pytest.mark.parametrize("log", [False, True])
def test_a_density_has_an_error_band(matrix, ax, tmp_path, cumulative, ylabel, log):
    smooth = ritz.density(matrix, num_probes=4, num_steps=20, width=0.2)
    assert plots.density(smooth, ax=ax, cumulative=cumulative, log=log) is ax
    assert ax.get_ylabel() == ylabel
    assert legend(ax) == ["mean, 95 % interval"]
    assert len(ax.collections) == 1
    save(ax, tmp_path)


def test_a_second_density_on_a_logarithmic_axis_is_not_cut_off(matrix, ax, tmp_path):
    wide, narrow = (ritz.density(matrix, num_probes=4, num_steps=20, width=w) for w in (0.5, 0.02))
    plots.density(wide, ax=ax, log=True)
    plots.density(narrow, ax=ax, log=True)
    bottom, top = ax.get_ylim()
    assert bottom > 0
    assert top > max(line.get_ydata().max() for line in ax.lines)
    save(ax, tmp_path)


def test_a_spectrum_is_drawn_over_exact_eigenvalues(matrix, ax, tmp_path):
    spectrum = ritz.lanczos(matrix, num_steps=20)
    exact = matrix.diagonal()
    assert plots.against_exact(spectrum, exact, diagonal=exact, ax=ax) is ax
    assert {"exact", "diagonal"} <= set(legend(ax))
    save(ax, tmp_path)


def test_a_law_is_drawn_with_its_atom(ax, tmp_path):
    plots.density(MarchenkoPastur(ratio=2.0), ax=ax)

    assert legend(ax) == ["density", "mass 0.5 at 0"]
    assert ax.get_lines()[1].get_xdata()[0] == 0
    save(ax, tmp_path)


def test_a_law_is_drawn_as_its_share_of_each_bin(ax, tmp_path):
    op = wishart(60, 30)
    exact = torch.linalg.eigvalsh(op.matrix)

    plots.against_exact(
        ritz.lanczos(op, num_steps=10), exact, law=MarchenkoPastur(ratio=2.0), ax=ax
    )

    stairs = next(patch for patch in ax.patches if patch.get_label() == "law")
    shares = stairs.get_data().values
    # Half of the mass lies in the first bin, and the bins end at the largest eigenvalue.
    assert shares[0] == pytest.approx(0.5)
    assert 0.9 < shares.sum() <= 1
    save(ax, tmp_path)


def test_panels_share_one_legend(matrix):
    figure, axes = plots.panels(1, 2)
    for ax in axes:
        plots.spectrum(ritz.lanczos(matrix, num_steps=20), ax=ax)
    share_legend(figure)
    assert [ax.get_legend() for ax in axes] == [None, None]
    assert [len(legend.get_texts()) for legend in figure.legends] == [4]
    pyplot.close(figure)


def assert_within_its_figure(legend, *panels):
    """The legend is inside the figure and covers no panel."""
    figure = legend.figure
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.bbox.y1
    assert all(ax.get_window_extent().y1 <= box.y0 for ax in panels)


def test_a_shared_legend_has_as_many_columns_as_fit(matrix):
    axes = plots.spectra({"one": ritz.lanczos(matrix, num_steps=20)})
    (shared,) = axes[0].figure.legends
    assert [text.get_text() for text in shared.get_texts()] == KINDS
    assert_within_its_figure(shared, *axes)
    pyplot.close(axes[0].figure)


def test_panels_keep_their_height_under_a_legend_of_many_rows():
    heights = []
    for count in (1, 30):
        figure, (ax,) = plots.panels()
        for k in range(count):
            ax.plot([0, 1], [0, k], label=f"a label of some length {k}")
        share_legend(figure)
        assert_within_its_figure(*figure.legends, ax)
        heights.append(ax.get_window_extent().height)
        pyplot.close(figure)
    assert heights[1] == pytest.approx(heights[0], rel=0.1)  # rows are not quite alike


def test_no_shared_legend_without_labels():
    figure, _ = plots.panels()
    share_legend(figure)
    assert not figure.legends
    pyplot.close(figure)


def test_a_shared_legend_lists_negative_before_positive_values(matrix):
    found = {"first": ritz.lanczos(matrix.abs(), num_steps=20),
             "second": ritz.lanczos(matrix, num_steps=20)}  # fmt: skip
    figure = plots.spectra(found)[0].figure
    assert [text.get_text() for text in figure.legends[0].get_texts()] == KINDS
    pyplot.close(figure)


def test_a_shared_legend_begins_with_ritz_values(matrix):
    figure, axes = plots.panels(1, 2)
    for ax, one in zip(axes, (matrix.abs(), matrix), strict=True):
        plots.against_exact(
            ritz.lanczos(one, num_steps=20), one.diagonal(), diagonal=one.diagonal(), ax=ax
        )
    share_legend(figure)
    found = [text.get_text() for text in figure.legends[0].get_texts()]
    assert found == [*KINDS, "diagonal", "exact"]
    pyplot.close(figure)


def test_a_long_tick_label_is_not_cut_at_the_edge():
    figure, (ax,) = plots.panels()
    ax.set_xticks([0, 1], ["first", "a label that is long enough to stand out"])
    ax.set_xlim(-0.1, 1.1)
    figure.draw_without_rendering()
    label = ax.get_xticklabels()[1].get_window_extent()
    assert label.x1 <= figure.bbox.x1 - 0.08 * figure.dpi  # inches
    pyplot.close(figure)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_several_spectra_have_common_scales(matrix, count, log, tmp_path):
    found = {f"matrix {k}": ritz.lanczos(10.0**-k * matrix, num_steps=20) for k in range(count)}
    axes = plots.spectra(found, log=log)
    assert [ax.get_title("left") for ax in axes] == list(found)
    assert len({ax.get_xlim() for ax in axes}) == len({ax.get_ylim() for ax in axes}) == 1
    assert axes[0].get_xscale() == ("symlog" if log else "linear")
    assert axes[0].get_xlim()[0] < -4
    assert axes[0].get_xlim()[1] > 12
    assert axes[0].figure.axes == axes
    assert len(axes[0].figure.legends) == 1
    assert [bool(ax.get_xlabel()) for ax in axes] == [True] if count == 1 else [False, True, True]
    save(axes[0], tmp_path)
    pyplot.close(axes[0].figure)


def test_a_short_negative_side_of_a_log_scale_has_a_tick(matrix):
    (ax,) = plots.spectra({"one": ritz.lanczos(matrix.clamp(min=-0.05), num_steps=20)}, log=True)
    low, high = ax.get_xlim()
    assert [x for x in ax.get_xticks() if low <= x <= high] == [-0.1, 0, 0.1, 1, 10]
    (ax,) = plots.spectra({"one": ritz.lanczos(matrix.abs(), num_steps=20)}, log=True)
    assert min(ax.get_xticks()) == 0
    pyplot.close("all")


def test_spectra_are_drawn_on_given_axes(matrix):
    figure, axes = plots.panels(1, 2)
    one = ritz.lanczos(matrix, num_steps=5)
    assert plots.spectra({"a": one, "b": one}, axes=axes) == axes
    assert not figure.legends
    with pytest.raises(ValueError, match="axes must be 1, one for each spectrum, got 2"):
        plots.spectra({"a": one}, axes=axes)
    with pytest.raises(ValueError, match="spectra must contain at least one"):
        plots.spectra({})
    pyplot.close(figure)


def valley(**changes):
    t = torch.linspace(-1, 1, 9, dtype=torch.float64)
    loss = torch.stack([0.1 + t**2, 0.1 + 0.01 * t**2])
    fields = {
        "names": ("largest", "smallest"),
        "t": t,
        "norms": torch.ones(2),
        "loss": loss,
        "accuracy": 1 - loss / 2,
        "test_loss": loss + 0.1,
        "test_accuracy": 0.9 - loss / 2,
        "batch_norm": "eval",
        "risk": "Risk(...)",
    }
    return Landscape(**(fields | changes))


def test_a_landscape_has_separate_scales_for_loss_and_accuracy(ax, tmp_path):
    assert plots.landscape(valley(), direction="smallest", ax=ax) is ax
    left, right = ax.figure.axes
    assert (left.get_ylabel(), right.get_ylabel()) == ("loss", "accuracy (%)")
    assert right.get_ylim()[1] > 100
    assert [line.get_linestyle() for line in left.get_lines()] == ["-", "--"]
    assert legend(ax) == ["loss, train", "loss, test", "accuracy, train", "accuracy, test"]
    assert {line.get_color() for line in left.get_lines()}.isdisjoint(
        line.get_color() for line in right.get_lines()
    )
    save(ax, tmp_path)


def test_a_landscape_without_accuracy_is_one_line(ax):
    bare = valley(accuracy=None, test_loss=None, test_accuracy=None)
    plots.landscape(bare, ax=ax, log=True)
    assert len(ax.figure.axes) == len(ax.get_lines()) == 1
    assert ax.get_legend() is None
    assert ax.get_yscale() == "log"


def test_landscapes_share_one_legend():
    figure, axes = plots.panels(1, 2)
    for ax, name in zip(axes, ("largest", "smallest"), strict=True):
        plots.landscape(valley(), direction=name, ax=ax)
    share_legend(figure)
    (shared,) = figure.legends
    # Loss before accuracy and train before test, as they are drawn.
    assert [text.get_text() for text in shared.get_texts()] == [
        "loss, train", "loss, test", "accuracy, train", "accuracy, test"]  # fmt: skip
    assert all(ax.get_legend() is None for ax in figure.axes)
    pyplot.close(figure)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e300])
def test_infinite_losses_are_gaps_and_keep_the_range_of_steps(ax, bad):
    loss = valley().loss.clone()
    loss[:, :2] = bad
    plots.landscape(valley(loss=loss), ax=ax, log=True)
    ax.figure.draw_without_rendering()
    low, high = ax.get_xlim()
    assert low < -1 < 1 < high
    assert ax.get_ylim()[1] < 10


def test_every_computed_point_of_a_landscape_has_a_marker(ax):
    plots.landscape(valley(), ax=ax)
    for one in ax.figure.axes:
        low, high = one.get_xlim()
        assert low < -1 < 1 < high
        for line in one.get_lines():
            assert line.get_marker() == "o"
            assert len(line.get_xdata()) == 9


def test_labels_of_neighbouring_panels_do_not_touch():
    figure, axes = plots.panels(1, 2, width=4.4, height=3.0)
    for ax in axes:
        plots.landscape(valley(), ax=ax)
    figure.draw_without_rendering()
    right = figure.axes[2].yaxis.label.get_window_extent()
    left = axes[1].yaxis.label.get_window_extent()
    assert figure.axes[2].get_ylabel() == "accuracy (%)"
    assert left.x0 - right.x1 >= 0.15 * figure.dpi  # inches
    pyplot.close(figure)


@pytest.mark.parametrize("shift", [0.1, -0.1])
@pytest.mark.parametrize("test", [False, True])
def test_a_plane_is_drawn_as_contours(ax, tmp_path, shift, test):
    t = torch.linspace(-1, 1, 7, dtype=torch.float64)
    loss = shift + t[:, None] ** 2 + 5 * t**2
    found = Landscape2d(
        names=("first", "second"),
        s=t,
        t=t,
        norms=torch.ones(2),
        loss=loss,
        accuracy=None,
        test_loss=2 * loss,
        test_accuracy=None,
        batch_norm="eval",
        risk="Risk(...)",
    )
    assert plots.landscape2d(found, ax=ax, test=test) is ax
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("first", "second")
    (strip,) = ax.child_axes
    assert strip.get_ylabel() == ("test loss" if test else "loss")
    save(ax, tmp_path)


def test_without_axes_a_new_figure_is_made(matrix):
    spectrum = ritz.lanczos(matrix, num_steps=5)
    first, second = plots.spectrum(spectrum), plots.spectrum(spectrum)
    assert first.figure is not second.figure
    pyplot.close("all")


def test_a_figure_belongs_to_pyplot_if_pyplot_is_imported():
    figure, axes = plots.panels(2, 3)
    assert len(axes) == 6
    assert figure.number in pyplot.get_fignums()
    pyplot.close(figure)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "ritz\[plots\]"'):
        plots.panels()


def test_lines_use_the_palette_of_okabe_and_ito():
    _, axes = plots.panels(1, 2)
    for ax in axes:
        found = [ax.plot([0, 1], [0, k])[0].get_color() for k in range(3)]
        assert found == ["#0072B2", "#D55E00", "#009E73"]
