import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import ritz
from ritz.studies import adaptive_gap, write
from ritz.studies._training import LargestEigenvalue, largest_eigenvalue
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


GRID = Config(
    size="smoke", parts=("grid",), num_seeds=1, rates=(1e-3, 4e-3), deltas=(1e-8, 1e-3, 0.1),
    sgd_rates=(0.01,), num_epochs=1,
)  # fmt: skip


def test_an_interrupted_grid_repeats_no_finished_run(tmp_path, monkeypatch):
    original, calls = adaptive_gap.fit_whole, []

    def fit(*args, **options):
        calls.append(options["optimizer"])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args, **options)

    whole = run(GRID)
    monkeypatch.setattr(adaptive_gap, "fit_whole", fit)
    with pytest.raises(KeyboardInterrupt):
        run(GRID, state=tmp_path / "state")
    # The limit of the time is not part of the state.
    again = run(replace(GRID, max_seconds=1000.0), state=tmp_path / "state")

    assert len(calls) == 7 + 1
    assert torch.equal(again.grids["damped_adamw"], whole.grids["damped_adamw"])
    assert torch.equal(again.sgd, whole.sgd)


def test_a_grid_without_time_has_its_ends_first_and_can_be_printed_and_drawn(tmp_path, monkeypatch):
    times = iter([True] * 5)
    monkeypatch.setattr(adaptive_gap.TimeLimit, "begin", lambda limit: next(times, False))
    result = run(replace(GRID, max_seconds=1.0), state=tmp_path / "state")

    scores = result.grids["damped_adamw"][2, 0]
    # Runs at the smallest and the largest damping, then SGD.
    assert scores[:, [0, 2]].isfinite().all()
    assert result.sgd.isfinite().all()
    assert scores[:, 1].isnan().all()
    assert result.missing == tuple(
        f"damped_adamw rate {rate:g} delta 0.001 seed 0" for rate in GRID.rates
    )
    assert "Not run within 1 s: damped_adamw rate 0.001 delta 0.001" in str(result)
    rows = adaptive_gap.evidence(result)
    assert len(rows) == 4
    assert all(", -, " in row.measured and "was not run" in row.why for row in rows)
    write(adaptive_gap, result, tmp_path)
    # With more time, the same folder computes the others only.
    assert (tmp_path / "state").exists()
    monkeypatch.undo()
    assert not run(GRID, state=tmp_path / "state").missing


def test_a_grid_without_any_run_can_be_printed_and_drawn(tmp_path):
    result = run(replace(GRID, optimizers=("damped_adamw", "kfac"), max_seconds=0.0))

    assert len(result.missing) == 2 * 6 + 1
    assert str(result)
    assert all(row.verdict == "undecided" for row in adaptive_gap.evidence(result))
    write(adaptive_gap, result, tmp_path)


def test_runs_that_have_not_learned_are_not_compared():
    result = _vgg_result()

    rows = [row for row in adaptive_gap.evidence(result) if row.where == "Table 2"]
    # At the first learning rate all dampings, at the second two of them, at the third one.
    assert [row.verdict for row in rows] == ["agrees", "differs"]
    assert "damping 1e-08 did not learn" in rows[1].why
    assert "6 epochs; the paper has 300" in rows[1].why
    assert "not VGG-16" not in rows[1].why
    assert adaptive_gap.setting(result) == "vgg16 on all images of cifar100, 6 epochs, 1 seed."


def _vgg_result():
    config = Config(size="gpu", parts=("grid",), num_seeds=1, rates=(1e-4, 1e-3, 4e-3))
    scores = torch.zeros(3, 1, 3, 3, dtype=torch.float64)
    scores[2, 0] = torch.tensor([[9.0, 8.0, 7.0], [0.1, 1.0, 2.0], [0.1, 0.1, 3.0]])
    scores[:2, 0] = torch.tensor([[0.5, 0.6, 0.7], [0.99, 0.6, 0.7], [0.99, 0.99, 0.7]])
    empty = torch.zeros(0)
    return adaptive_gap.Result(
        config=config, lopt=empty, descent=empty, grids={"damped_adamw": scores},
        sgd=torch.full((3, 1, 3), 0.5, dtype=torch.float64), curves={}, seconds={},
    )  # fmt: skip


def test_eigenvalues_with_shared_products_are_those_of_single_networks():
    sets = adaptive_gap._images(SMOKE, SETUPS["smoke"])
    options = {"batch_size": 20, "precision": "tf32", "rtol": 1e-3, "max_steps": 100}
    network = partial(adaptive_gap._network, sets, SETUPS["smoke"])
    measure = LargestEigenvalue(network(0)[0], **options)
    for seed in (1, 2):
        model, train = network(seed)
        samples = train.take(40, generator=torch.Generator().manual_seed(seed)).tensors()
        expected = largest_eigenvalue(model, samples, seed)
        assert measure(model, samples, seed) == pytest.approx(expected, rel=1e-3)


def test_the_grid_of_a_gpu_covers_the_diagonal_first():
    config = replace(adaptive_gap.SIZES["gpu"], optimizers=("kfac",), sgd_rates=(0.03,))
    setup = config.setup
    assert (setup.precision, setup.warmup, config.device) == ("bfloat16", 1, "cuda")
    assert replace(config, precision="tf32", num_epochs=2).setup.precision == "tf32"
    names = list(adaptive_gap._runs(config))
    assert names[:3] == [
        f"kfac rate {rate:g} delta {20 * rate:g} seed 0" for rate in (1e-3, 1e-2, 0.1)
    ]
    assert names[3] == "sgd rate 0.03 seed 0"
    assert len(names) == 10


def test_the_constant_ratio_is_compared_only_where_kfac_has_learned():
    config = Config(size="gpu", parts=("grid",), num_seeds=1, optimizers=("kfac",))
    scores = torch.full((3, 1, 3, 3), 0.5, dtype=torch.float64)
    scores[2, 0] = torch.tensor([[0.1, 1.0, 1.0], [1.0, 9.0, 1.0], [1.0, 1.0, 6.0]])
    scores[0, 0, 0, 0] = 0.99
    empty = torch.zeros(0)
    result = adaptive_gap.Result(
        config=config, lopt=empty, descent=empty, grids={"kfac": scores},
        sgd=torch.full((3, 1, 3), 0.5, dtype=torch.float64), curves={}, seconds={},
    )  # fmt: skip

    row = next(row for row in adaptive_gap.evidence(result) if row.where == "Table 2, right")

    assert (row.measured, row.verdict) == ("6, 9", "agrees")
    assert "damping 0.02 did not learn" in row.why
    scores[0] = 0.99
    assert not [row for row in adaptive_gap.evidence(result) if "right" in row.where]
