import pytest
import torch

import ritz
from ritz.studies import adaptive_causes, write
from ritz.studies.adaptive_causes import METHODS, SIZES, Config, evidence, run


@pytest.fixture(scope="module")
def result():
    return run(SIZES["smoke"])


def test_runs_end_at_the_loss_that_was_asked_for(result):
    epochs, losses, tops = result.at_loss
    reached = ~losses.isnan()
    assert bool(reached.any())
    assert bool((losses[reached] <= 2.0).all())
    assert bool(((epochs[reached] >= 1) & (epochs[reached] <= 8)).all())
    assert bool((tops[reached] > 0).all())
    # Without damping to speak of, the second runs have the same learning rate.
    torch.testing.assert_close(result.at_loss[:, 0, :, 0], result.at_loss[:, 1, :, 0], rtol=0.02,
                               atol=0.02, equal_nan=True)  # fmt: skip


def test_every_method_has_an_error_for_every_seed(result):
    assert list(result.errors) == list(METHODS)
    assert all(values.shape == (2,) for values in result.errors.values())
    assert all(bool(((values >= 0) & (values <= 1)).all()) for values in result.errors.values())


def test_the_result_is_written_read_and_compared(result, tmp_path):
    loaded = ritz.load(write(adaptive_causes, result, tmp_path)[0])
    assert str(loaded) == str(result)
    rows = list(evidence(loaded))
    assert [row.where for row in rows] == ["Table 2", "Table 2", "Figure 4.2b"]
    assert all(name in rows[2].measured for name in ("Lanczos-Newton", "best SGD", "best Adam"))
    assert all(name in rows[2].why for name in METHODS if "momentum" in name)
    assert "2 seeds" in adaptive_causes.setting(loaded)


@pytest.mark.parametrize(
    ("bad", "match"),
    [({"deltas": (1.0,)}, "deltas must have at least two"), ({"num_seeds": 0}, "num_seeds")],
)
def test_wrong_settings_are_refused(bad, match):
    with pytest.raises(ValueError, match=match):
        Config(**bad)
