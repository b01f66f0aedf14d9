from dataclasses import replace

import numpy as np
import pytest
import torch

import ritz
from ritz import plots
from ritz._core.results import Estimate, Status
from ritz.measures import rank_degeneracy
from ritz.plots._series import curvature_points, points, training_series
from ritz.plots._shared import check_picture, watched_names
from ritz.plots._style import result_title

AVERAGED = {"average_test_loss": 0.4, "average_test_accuracy": 0.9}


def epoch(number, **more):
    return {"kind": "epoch", "epoch": number, "step": 10 * number, "learning_rate": 0.1,
            "train_loss": 1 / number, "train_accuracy": 0.8, "test_loss": 0.5,
            "test_accuracy": 0.75, **more}  # fmt: skip


def curvature(number, **more):
    return {"kind": "curvature", "epoch": number, "step": 10 * number, "matrix": "hessian",
            "lambda_max": 5.0 + number, "lambda_max_residual": 0.1, "threshold": 20.0,
            "ritz_values": [-0.1, 0.01, 3.0], "ritz_weights": [0.2, 0.7, 0.1], **more}  # fmt: skip


@pytest.fixture
def log():
    return [epoch(1), curvature(1), epoch(2), curvature(2), epoch(3, **AVERAGED), curvature(3)]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def band(ax):
    """Lower and upper edge of the only band."""
    (found,) = ax.collections
    corners = found.get_paths()[0].vertices
    return [[edge(corners[corners[:, 0] == x, 1]) for x in np.unique(corners[:, 0])]
            for edge in (min, max)]  # fmt: skip


def estimate(mean, stderr):
    return Estimate(
        mean=torch.tensor(mean), stderr=torch.tensor(stderr), truncation=torch.tensor(0.0),
        num_products=1, method="drawn", status=Status(outcome="completed", message=""),
    )  # fmt: skip


def test_series_of_a_log_are_in_per_cent_and_have_gaps(log):
    found = training_series(log)
    np.testing.assert_array_equal(found.epoch, [1, 2, 3])
    assert list(found.quantities["loss"]) == ["train", "test", "average test"]
    np.testing.assert_allclose(found.quantities["loss"]["train"], [1, 1 / 2, 1 / 3])
    np.testing.assert_array_equal(found.quantities["loss"]["average test"], [np.nan, np.nan, 0.4])
    np.testing.assert_allclose(found.quantities["accuracy"]["test"], [75.0] * 3)
    assert found.average_from == 3


def test_null_in_a_log_becomes_a_gap():
    found = training_series([epoch(1, test_loss=None), epoch(2)])
    np.testing.assert_array_equal(found.quantities["loss"]["test"], [np.nan, 0.5])
    assert found.average_from is None


def test_a_log_without_an_epoch_is_rejected(log):
    with pytest.raises(ValueError, match="at least one finished epoch, got none"):
        training_series([record for record in log if record["kind"] == "curvature"])


def test_points_of_a_monitor_are_by_epoch_or_by_step(log):
    found = curvature_points(log, "lambda_max")
    np.testing.assert_array_equal(found.x, [1, 2, 3])
    np.testing.assert_array_equal(found.y, [6, 7, 8])
    np.testing.assert_array_equal(found.stderr, [0.1] * 3)
    within = [curvature(1, step=3), curvature(1, step=6)]
    np.testing.assert_array_equal(curvature_points(within, "lambda_max").x, [3, 6])
    with pytest.raises(ValueError, match="must contain 'trace', got none"):
        curvature_points(log, "trace")


def test_mass_near_zero_is_of_two_ritz_values_for_a_hessian_and_one_for_ggn(log):
    np.testing.assert_allclose(curvature_points(log, "degeneracy").y, [0.9] * 3)
    ggn = [curvature(1, matrix="ggn")]
    np.testing.assert_allclose(curvature_points(ggn, "degeneracy").y, [0.7])


def test_points_are_sorted_and_have_errors():
    found = points([8, 2], [estimate(3.0, 0.5), 4.0])
    np.testing.assert_array_equal(found.x, [2, 8])
    np.testing.assert_array_equal(found.y, [4, 3])
    np.testing.assert_array_equal(found.stderr, [0, 0.5])
    with pytest.raises(ValueError, match="values must be 2, one for each x, got 1"):
        points([1, 2], [3.0])


def test_curves_of_one_run_show_where_averaging_begins(log):
    loss, accuracy = plots.training_curves({"run": log})
    parts = ["train", "test", "average test"]
    # The line where averaging begins is named in the legend: a text could cover a curve.
    assert legend(loss) == legend(accuracy) == [*parts, "averaging begins"]
    assert not loss.texts
    assert not accuracy.texts
    assert (loss.get_ylabel(), accuracy.get_ylabel()) == ("loss", "accuracy (%)")
    lines = loss.get_lines()
    assert len({line.get_color() for line in lines[:3]}) == 3
    assert lines[3].get_xdata()[0] == 3
    frame = loss.get_legend().get_frame()
    assert (frame.get_alpha(), frame.get_facecolor()[:3]) == (1.0, (1.0, 1.0, 1.0))  # over the mark
    width, height = loss.figure.get_size_inches()
    assert (width, height) == pytest.approx((8.8, 3.1))


@pytest.mark.parametrize(("first", "scale"), [(1.0, "linear"), (40.0, "log")])
def test_losses_that_span_a_decade_have_a_logarithmic_scale(first, scale):
    loss, accuracy = plots.training_curves({"run": [epoch(1, train_loss=first), epoch(2)]})
    assert (loss.get_yscale(), accuracy.get_yscale()) == (scale, "linear")


@pytest.mark.parametrize(("first", "scale"), [(40.0, "linear"), (900.0, "log")])
def test_texts_show_perplexity_instead_of_accuracy(first, scale):
    log = [epoch(k, train_perplexity=first / k, test_perplexity=None) for k in (1, 2, 3)]
    log[-1]["test_perplexity"] = 25.0
    found = training_series(log)
    perplexities = found.quantities["perplexity"]
    np.testing.assert_allclose(perplexities["train"], [first, first / 2, first / 3])
    loss, perplexity = plots.training_curves({"run": log})
    assert (loss.get_ylabel(), perplexity.get_ylabel()) == ("loss", "perplexity")
    assert perplexity.get_yscale() == scale
    np.testing.assert_allclose(perplexity.get_lines()[0].get_ydata(), perplexities["train"])
    np.testing.assert_array_equal(perplexity.get_lines()[1].get_ydata(), [25.0])


def test_all_that_training_logged_has_a_panel():
    near = {"train_top5_accuracy": 0.95, "test_top5_accuracy": 0.9}
    settings = [{"learning_rate": 0.1 / n, "damping": 0.01 * n} for n in (1, 2, 3)]
    records = [epoch(n, **near) | each for n, each in enumerate(settings, start=1)]
    axes = plots.training_curves({"run": records})
    labels = ["loss", "accuracy (%)", "top5 accuracy (%)", "learning rate", "damping"]
    assert [ax.get_ylabel() for ax in axes] == labels
    np.testing.assert_allclose(axes[2].lines[1].get_ydata(), [90.0] * 3)
    np.testing.assert_allclose(axes[3].lines[0].get_ydata(), [0.1, 0.05, 0.1 / 3])
    np.testing.assert_allclose(axes[4].lines[0].get_ydata(), [0.01, 0.02, 0.03])
    assert axes[3].get_legend() is None
    # On axes of the caller, loss and accuracy alone.
    given = plots.panels(1, 2)[1]
    assert plots.training_curves({"run": records}, axes=given) == list(given)


def test_several_runs_share_the_panel_of_the_learning_rate():
    runs = {name: [epoch(n) | {"learning_rate": rate / n} for n in (1, 2)]
            for name, rate in (("a", 0.1), ("b", 0.3))}  # fmt: skip
    runs["constant"] = [epoch(1), epoch(2)]
    axes = plots.training_curves(runs)
    assert [ax.get_ylabel() for ax in axes] == ["loss", "accuracy (%)", "learning rate"]
    assert len(axes[2].lines) == 2


def test_several_runs_have_one_colour_each(log):
    loss, accuracy = plots.training_curves({"sgd": log[:4], "gadam": log})
    names = ["sgd, train", "sgd, test", "gadam, train", "gadam, test", "gadam, average test"]
    (shared,) = loss.figure.legends
    assert [text.get_text() for text in shared.get_texts()] == names
    assert loss.get_legend() is accuracy.get_legend() is None
    assert len({line.get_color() for line in loss.get_lines()}) == 2
    given = plots.panels(1, 2)[1]
    plots.training_curves({"sgd": log[:4], "gadam": log}, axes=given)
    assert [legend(ax) for ax in given] == [names, names]
    assert not given[0].get_legend().get_frame_on()  # the curves are seen behind it
    assert not given[0].figure.legends


@pytest.mark.parametrize("count", [4, 9])
def test_many_runs_look_different_and_their_legend_covers_no_panel(log, count):
    axes = plots.training_curves({f"run with a long name {k}": log for k in range(count)})
    figure = axes[0].figure
    figure.draw_without_rendering()
    (shared,) = figure.legends
    box = shared.get_window_extent()
    assert len(shared.get_texts()) == 3 * count
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert max(ax.get_window_extent().y1 for ax in axes) <= box.y0 < box.y1 <= figure.bbox.y1
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker())
             for line in axes[1].get_lines() if line.get_label().endswith("test")
             and "average" not in line.get_label()]  # fmt: skip
    assert len(set(looks)) == count


def test_series_beyond_the_seventh_have_another_marker():
    ax = plots.batch_scaling([1, 2], {f"quantity {k}": [1.0, 2.0] for k in range(9)})
    looks = {(line.get_color(), line.get_marker()) for line in ax.get_lines()}
    assert len({colour for colour, _ in looks}) == 7
    assert len({look for look in looks if look[1] != "|"}) >= 9


def test_runs_without_names_are_rejected(log):
    with pytest.raises(
        TypeError, match=r"must be a mapping of names to the records of logs, got list"
    ):
        plots.training_curves([log])


def test_a_log_without_accuracy_has_one_panel():
    bare = {"kind": "epoch", "epoch": 1, "train_loss": -2.0}
    (loss,) = plots.training_curves({"run": [bare]})
    assert loss.get_yscale() == "linear"
    with pytest.raises(ValueError, match="axes must be 1 for these runs, got 2"):
        plots.training_curves({"run": [bare]}, axes=[loss, loss])
    with pytest.raises(ValueError, match="runs must contain at least one entry, got none"):
        plots.training_curves({})


def ticks_seen(ax):
    low, high = ax.get_xlim()
    return [x for x in ax.get_xticks() if low <= x <= high]


def test_a_single_epoch_is_visible_and_has_one_tick(log):
    loss, _ = plots.training_curves({"run": log[:1]})
    assert ticks_seen(loss) == [1]
    assert {line.get_marker() for line in loss.get_lines()} == {"o"}
    ax = plots.curvature_over_time(log[:2])
    assert ticks_seen(ax) == [1]
    _, bar = ax.collections  # beside a band that has no width
    np.testing.assert_allclose(bar.get_segments(), [[[1, 5.9], [1, 6.1]]])
    bound = ax.get_lines()[-1]
    assert (bound.get_label(), bound.get_marker()) == ("edge of stability", "_")
    assert bound.get_markevery().tolist() == [0]


def test_an_unknown_residual_is_a_gap_in_the_band():
    """A band of zero width would say that the value is exact."""
    errors = [0.1, 0.1, None, 0.1, None]
    records = [curvature(k, lambda_max_residual=one) for k, one in enumerate(errors, start=1)]
    assert np.isnan(curvature_points(records, "lambda_max").stderr).tolist() == [
        False, False, True, False, True]  # fmt: skip
    ax = plots.curvature_over_time(records)
    filled, bar = ax.collections
    (path,) = [path for path in filled.get_paths() if np.ptp(path.vertices[:, 0])]
    assert set(path.vertices[:, 0]) == {1, 2}
    np.testing.assert_allclose(bar.get_segments(), [[[4, 8.9], [4, 9.1]]])
    assert [len(line.get_xdata()) for line in ax.get_lines() if line.get_marker() == "o"] == [5]


@pytest.mark.parametrize("bad", [np.inf, np.nan, 1e300, None])
def test_infinite_losses_keep_the_range_of_epochs(bad):
    records = [
        epoch(k, train_loss=bad if k in (1, 5) else 1 / k, test_loss=bad) for k in range(1, 6)
    ]
    loss, _ = plots.training_curves({"run": records})
    loss.figure.draw_without_rendering()
    low, high = loss.get_xlim()
    assert low < 1 < 5 < high
    assert loss.get_ylim()[1] < 1
    assert legend(loss) == ["train"]  # a line without points is not in the legend


def test_a_run_of_nan_is_an_empty_plot_without_legend():
    bare = {"kind": "epoch", "epoch": 1, "train_loss": np.nan}
    (loss,) = plots.training_curves({"run": [bare]})
    assert loss.get_legend() is None
    assert ticks_seen(loss) == [1]
    ax = plots.curvature_over_time([curvature(1, lambda_max=np.nan)])
    assert legend(ax) == ["edge of stability"]


def test_largest_eigenvalue_is_drawn_beside_two_over_the_learning_rate(log):
    ax = plots.curvature_over_time(log)
    label = r"largest eigenvalue $\lambda_1$"
    assert legend(ax) == [f"{label} ± residual", "edge of stability"]
    assert (ax.get_xlabel(), ax.get_yscale()) == ("epoch", "linear")
    assert ax.get_title("left") == "Hessian"
    np.testing.assert_allclose(band(ax), [[5.9, 6.9, 7.9], [6.1, 7.1, 8.1]])
    steep = [*log, curvature(4, lambda_max=600.0)]
    assert plots.curvature_over_time(steep).get_yscale() == "log"
    hidden = ("threshold", "lambda_max_residual")
    without = [{k: v for k, v in record.items() if k not in hidden} for record in log]
    bare = plots.curvature_over_time(without)
    assert legend(bare) == [label]
    assert not bare.collections


def test_degeneracy_over_time_from_results_and_from_a_log(log):
    spectrum = ritz.lanczos(torch.diag(torch.linspace(0, 1, 20)), num_steps=5)
    found = rank_degeneracy(spectrum, matrix="ggn")
    ax = plots.degeneracy({"Gauss-Newton": {5.0: found, 1.0: found}})
    assert legend(ax) == ["Gauss-Newton"]
    np.testing.assert_array_equal(ax.get_lines()[0].get_xdata(), [1, 5])
    np.testing.assert_allclose(ax.get_lines()[0].get_ydata(), [float(found.mass)] * 2)
    assert not ax.collections
    logged = plots.degeneracy(log)
    assert logged.get_legend() is None
    assert logged.get_title("left") == "Hessian"
    with pytest.raises(ValueError, match="at least one entry, got none"):
        plots.degeneracy({"Gauss-Newton": {}})


def test_a_degeneracy_with_errors_has_a_band(log):
    spectrum = ritz.lanczos(torch.diag(torch.linspace(0, 1, 20)), num_steps=5)
    found = replace(rank_degeneracy(spectrum, matrix="ggn"), mass=estimate(0.7, 0.05))
    ax = plots.degeneracy({"Gauss-Newton": {1.0: found, 2.0: found}})
    assert legend(ax) == ["Gauss-Newton ± 2 stderr"]
    np.testing.assert_allclose(band(ax), [[0.6, 0.6], [0.8, 0.8]])
    logged = plots.degeneracy([{**record, "degeneracy_stderr": 0.02} for record in log])
    assert legend(logged) == ["± 2 stderr"]


@pytest.mark.parametrize("draw", [plots.curvature_over_time, plots.degeneracy])
def test_ticks_of_epochs_are_whole_numbers(log, draw):
    assert ticks_seen(draw(log)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("matrices", "title"),
    [(["ggn", "ggn"], "Gauss-Newton"), (["ggn", "hessian"], ""), (["hessian"], "Hessian")],
)
def test_the_title_is_the_matrix_of_the_monitor(matrices, title):
    records = [epoch(1), *(curvature(1, matrix=name) for name in matrices)]
    assert result_title(curvature_points(records, "lambda_max")) == title


def test_predictions_over_batch_sizes_have_the_colour_of_their_measurement():
    measured = {"Hessian": [estimate(8.0, 0.5), estimate(4.0, 0.2)]}
    ax = plots.batch_scaling([16, 64], measured, predicted={"Hessian": [8.0, 4.1]})
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["16", "64"]
    assert legend(ax) == ["Hessian", "Hessian, predicted"]
    assert len({line.get_color() for line in ax.get_lines()}) == 1
    assert ax.get_xlabel() == "batch size $B$ (samples)"
    one = plots.batch_scaling([16], {"a": [8.0], "b": [2.0]}, predicted={"b": [3.0], "c": [1.0]})
    assert legend(one) == ["a", "b", "b, predicted", "c, predicted"]
    assert one.get_lines()[-1].get_marker() == "_"  # a line through one point would be invisible
    with pytest.raises(ValueError, match="measured must contain at least one entry, got none"):
        plots.batch_scaling([1], {})


@pytest.mark.parametrize(
    ("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_the_same_figure_gives_the_same_bytes(log, tmp_path, kind, start):
    paths = [tmp_path / f"{name}.{kind}" for name in "ab"]
    for path in paths:
        figure = plots.training_curves({"run": log})[0].figure
        assert plots.save_figure(figure, path) == path
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes().startswith(start)


def test_check_picture_rejects_unknown_types_and_missing_folders(tmp_path):
    with pytest.raises(ValueError, match=r"must end in .png, .svg or .pdf, got 'x.gif'"):
        check_picture(tmp_path / "x.gif")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        check_picture(tmp_path / "no" / "x.png")


def watched_log():
    """A log with numbers, layers, a spectrum, histograms and a density."""
    lists = {"gradient_histogram": [0, 5, 3, 0], "gradient_reach": 2.0, "weight_reach": 1.0,
             "gradient_weight_histogram": [[0, 1], [2, 3]], "density_x": [0.0, 1.0, 2.0],
             "density": [0.1, 0.9, 0.0]}  # fmt: skip
    layers = {"weight_norm": 3.0, "weight_norm.0.weight": 2.0, "weight_norm.0.bias": 1.0}
    return [
        x
        for n in (1, 2, 3)
        for x in (epoch(n), curvature(n, trace=n * 1.0, trace_stderr=0.1, **layers, **lists))
    ]


def test_every_quantity_of_a_log_has_a_panel():
    log = watched_log()
    names = watched_names(log)
    assert names == ("lambda_max", "ritz_values", "trace", "weight_norm", "gradient_histogram",
                     "gradient_weight_histogram", "density")  # fmt: skip
    axes = dict(zip(names, plots.watched({"run": log}).axes, strict=False))
    largest = axes["lambda_max"].get_lines()
    np.testing.assert_array_equal(largest[0].get_ydata(), [6.0, 7.0, 8.0])
    assert largest[1].get_label() == "edge of stability"
    np.testing.assert_array_equal(largest[1].get_ydata(), [20.0] * 3)
    labels = [line.get_label() for line in axes["weight_norm"].get_lines()]
    assert labels == ["all layers", "0.weight", "0.bias"]
    assert len(axes["weight_norm"].get_lines()) == 3
    np.testing.assert_allclose(band(axes["trace"])[0], [0.8, 1.8, 2.8])
    assert len(axes["ritz_values"].collections[0].get_offsets()) == 9
    (image,) = axes["gradient_weight_histogram"].get_images()
    np.testing.assert_allclose(image.get_array(), np.log10([[1, 2], [3, 4]]))


def test_a_layer_has_the_same_colour_and_name_in_all_panels():
    # The variance has no number of all layers; the square has the layers in another order.
    layers = {"gradient_variance.0": 2.0, "gradient_variance.2": 3.0, "weight_norm": 3.0,
              "weight_norm.0": 2.0, "gradient_square.2": 1.0, "gradient_square.0": 4.0}  # fmt: skip
    log = [curvature(n, **layers) for n in (1, 2, 3)]
    names = ["gradient_variance", "gradient_square", "weight_norm"]

    figure = plots.watched({"run": log}, names=names)

    looks = [
        {line.get_label(): (line.get_color(), line.get_marker()) for line in ax.get_lines()}
        for ax in figure.axes[:3]
    ]
    assert looks[0] == looks[1]
    assert looks[2]["0"] == looks[0]["0"]
    assert len(set((looks[0] | looks[2]).values())) == 3
    (shared,) = figure.legends
    texts = [text.get_text() for text in shared.get_texts()]
    assert sorted(texts) == ["0", "2", "all layers"]
    assert all(ax.get_legend() is None for ax in figure.axes[:3])
    # One panel has its legend inside.
    (alone,) = plots.watched({"run": log}, names=names[:1]).axes
    assert legend(alone) == ["0", "2"]


def test_edges_of_several_runs_have_the_name_and_colour_of_their_run():
    figure = plots.watched({"a": watched_log(), "b": watched_log()}, names=["lambda_max"])
    (ax,) = figure.axes
    assert legend(ax) == ["a", "a, edge of stability", "b", "b, edge of stability"]
    first, first_edge, second, second_edge = ax.get_lines()
    assert first.get_color() == first_edge.get_color()
    assert second.get_color() == second_edge.get_color()
    assert first.get_color() != second.get_color()


def test_several_runs_share_the_panel_of_a_number():
    figure = plots.watched({"a": watched_log(), "b": watched_log()}, names=["trace"])
    (ax,) = figure.axes
    assert legend(ax) == ["a", "b"]
    with pytest.raises(
        ValueError, match="gsnr was not logged by a monitor, which logged lambda_max"
    ):
        plots.watched({"a": watched_log()}, names=["gsnr"])
    with pytest.raises(ValueError, match="runs must have been watched, got none"):
        plots.watched({"a": [epoch(1)]})
