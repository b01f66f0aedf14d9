import math

import pytest
import torch

import ritz
from ritz.studies import adaptive_gap, write
from ritz.studies.adaptive_gap import METHODS, SETUPS, Config, run

SMOKE = Config(size="smoke", num_seeds=2, rates=(1e-3, 4e-3), deltas=(1e-8, 0.1))


@pytest.fixture(scope="module")
def result():
    return run(SMOKE)


def test_every_part_has_a_score_for_every_setting(result):
    size, grid = SETUPS["smoke"], SMOKE.grid("damped_adamw")
    assert result.lopt.shape == (2, 2, len(size.deltas), len(size.etas))
    assert result.descent.shape == (2, 2)
    assert result.grids["damped_adamw"].shape == (3, 2, len(grid.rates), len(grid.deltas))
    assert list(result.curves) == list(METHODS)
    for errors in (result.lopt, result.descent, result.grids["damped_adamw"][:2], result.sgd[:2]):
        assert bool(((errors >= 0) & (errors <= 1)).all())
    assert bool((result.sgd[2] > 0).all())
    for curve in result.curves.values():
        assert bool((curve[1].diff(dim=-1) > 0).all())


def test_damping_and_eta_change_the_convex_runs(result):
    errors = result.lopt[0].mean(0)
    assert errors[0, 0] < errors[-1, 0]  # less damping, a smaller training error after six steps
    assert not torch.equal(result.lopt[:, :, 0, 0], result.lopt[:, :, 0, -1])


def test_convex_runs_are_reproducible_bit_for_bit(result):
    again = run(Config(size="smoke", num_seeds=1, seed=1, parts=("lopt",)))
    assert torch.equal(again.lopt[:, 0], result.lopt[:, 1])
    assert not again.grids
    assert "Running training error" not in str(again)


def test_the_table_names_every_part(result):
    text = str(result)
    for word in ("LOPT", "gradient descent", "lambda_1 at the end", "SGD 0.01", *METHODS):
        assert word in text


def test_the_result_and_its_figure_are_written_and_read(result, tmp_path):
    files = write(adaptive_gap, result, tmp_path)
    assert [file.suffix for file in files] == [".safetensors", ".png"]
    loaded = ritz.load(files[0])
    assert torch.equal(loaded.lopt, result.lopt)
    assert loaded.config == result.config
    assert str(loaded) == str(result)


def test_a_run_that_diverges_is_nan_and_drawn_as_such(result):
    model, train = adaptive_gap._network(
        adaptive_gap._images(SMOKE, SETUPS["smoke"]), SETUPS["smoke"], 0
    )
    assert len(train) == 80
    sets = adaptive_gap._images(SMOKE, SETUPS["smoke"])
    wild = adaptive_gap._network_run(sets, SETUPS["smoke"], 0, "sgd", {"lr": 1e30})
    assert all(math.isnan(score) for score in wild)
    assert next(model.parameters()).shape == (8, 64)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"size": "large"}, "size must be one of"),
        ({"parts": ("lopt", "kfac")}, "parts must be one of"),
        ({"optimizers": ("adam",)}, "adam"),
        ({"num_seeds": 0}, "num_seeds must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(bad, match):
    with pytest.raises((ValueError, KeyError), match=match):
        Config(**bad)


def test_kfac_is_read_along_a_constant_ratio_of_damping_and_rate():
    config = adaptive_gap.Config(
        size="smoke", parts=("grid",), optimizers=("kfac",), num_seeds=1, rates=(0.01, 0.1),
        deltas=(0.1, 1.0),
    )  # fmt: skip
    result = adaptive_gap.run(config)

    assert torch.isfinite(result.grids["kfac"][:, :, 0, 1]).all()
    rows = {row.where: row for row in adaptive_gap.evidence(result)}
    norms = result.grids["kfac"][2, 0]
    expected = f"{norms[1, 1]:.3g}, {norms[0, 0]:.3g}"
    assert rows["Table 2, right"].measured == expected
    assert "learning rate of 0.1, 0.01" in rows["Figure 4"].what

    # Without the run at the smaller damping, nothing is left to compare at the larger rate.
    result.grids["kfac"][:, :, 1, 0] = math.nan
    what = {row.what: row for row in adaptive_gap.evidence(result)}
    assert any("learning rate 0.01:" in name for name in what)
    assert not any("learning rate 0.1:" in name for name in what)
    least = what["K-FAC, learning rates 0.01, 0.1: least damping that trains"]
    assert (least.measured, least.verdict) == ("0.1, 1", "agrees")
