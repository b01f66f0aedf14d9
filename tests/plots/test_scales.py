"""Scales and their ticks: labels are distinct and plain."""

import re

import numpy as np
import pytest
import torch
from matplotlib import pyplot

from ritz import plots
from ritz.measures import Landscape, Landscape2d
from ritz.plots._style import drawable, isolated, log_scale, spans_decade, ticks

T = torch.linspace(-1, 1, 9, dtype=torch.float64)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[1.0, 10.0]], True),
        ([[1.0], [np.nan, 12.0]], True),
        ([[1.0, 9.9]], False),
        ([[1.0, np.inf]], False),
        ([[1.0, 1e300]], False),
        ([[0.0, 10.0]], False),
        ([[-1.0, 10.0]], False),
        ([[np.nan]], False),
    ],
)
def test_spans_decade_looks_at_finite_positive_values(values, expected):
    assert spans_decade(*map(np.array, values)) is expected


def test_infinite_and_huge_values_are_gaps_that_isolate_points():
    found = drawable([1.0, np.inf, -2.0, 1e300, 3.0, 4.0, np.nan])
    np.testing.assert_array_equal(found, [1, np.nan, -2, np.nan, 3, 4, np.nan])
    assert isolated(found).tolist() == [True, False, True, False, False, False, False]
    assert isolated(drawable([5.0])).tolist() == [True]


def labels(axis):
    """Labels of the visible ticks."""
    axis.axes.figure.draw_without_rendering()
    low, high = sorted(axis.get_view_interval())
    seen = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [tick.label1.get_text() or tick.label2.get_text() for tick in seen]


def plane(loss):
    return Landscape2d(
        names=("first", "second"), s=T, t=T, norms=torch.ones(2), loss=loss, accuracy=None,
        test_loss=None, test_accuracy=None, batch_norm="eval", risk="Risk(...)",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("centre", "height"), [(2.4, 0.03), (2e-5, 1e-6), (0.05, 3.0), (1e-3, 500.0), (-0.1, 5.0)]
)
def test_tick_labels_of_colour_bars_differ(centre, height):
    ax = plots.landscape2d(plane(centre + height * (T[:, None] ** 2 + 0.5 * T**2)))
    found = labels(ax.child_axes[0].yaxis)
    assert len(found) >= 3
    assert len(set(found)) == len(found)
    pyplot.close(ax.figure)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (4.0, 4.1, ["4.00", "4.02", "4.04", "4.06", "4.08", "4.10"]),
        (0.25, 4.0, ["0.3", "0.5", "1", "2", "3"]),
        (0.1, 6.0, ["0.1", "0.2", "0.5", "1", "2", "5"]),
    ],
)
def test_tick_labels_of_a_logarithmic_scale_are_plain_numbers(low, high, expected):
    figure, (ax,) = plots.panels()
    ax.plot([0, 1], [low, high])
    log_scale(ax)
    assert ax.get_yscale() == "log"
    assert labels(ax.yaxis) == expected
    assert not any(tick.label1.get_text() for tick in ax.yaxis.get_minor_ticks())
    pyplot.close(figure)


def test_tick_labels_of_many_decades_are_powers_of_ten():
    locator, formatter = ticks(1e-3, 1e5)
    found = [formatter(x) for x in locator.tick_values(1e-3, 1e5)]
    assert all(re.fullmatch(r"\$\\mathdefault\{10\^\{-?\d+\}\}\$", label) for label in found)


@pytest.mark.parametrize(("height", "scale"), [(0.05, "linear"), (50.0, "log")])
def test_panels_of_a_landscape_share_one_scale(height, scale):
    """The flat direction, which is drawn last, does not set the scale of the other."""
    found = Landscape(
        names=("steep", "flat"), t=T, norms=torch.ones(2),
        loss=torch.stack([4.0 + height * T**2, 4.0 + 0.0 * T]), accuracy=None, test_loss=None,
        test_accuracy=None, batch_norm="eval", risk="Risk(...)",
    )  # fmt: skip
    axes = plots.plot(found).axes
    assert [ax.get_yscale() for ax in axes] == [scale] * 2
    shown = labels(axes[0].yaxis)
    assert shown == labels(axes[1].yaxis)
    assert 2 <= len(shown) <= 8
    assert all(re.fullmatch(r"\d+(\.\d+)?", label) for label in shown)
    pyplot.close("all")
