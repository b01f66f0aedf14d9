import pytest
import torch

import ritz
from ritz import data
from ritz.studies import digits, write
from ritz.studies.digits import MATRICES, QUICK, Config, figures, network, run


@pytest.fixture(scope="module")
def result():
    return run(Config(**QUICK))


def test_all_four_spectra_are_computed_and_the_first_has_vectors(result):
    assert list(result.spectra) == [
        f"{matrix}, batch norm {mode}" for mode in ("eval", "train")
        for matrix in ("Hessian", "Gauss-Newton")
    ]  # fmt: skip
    vectors = [name for name, one in result.spectra.items() if one.vectors is not None]
    assert vectors == [digits.FIRST]
    assert result.landscape.loss.shape == (3, 3)
    assert result.plane.loss.shape == (3, 3)
    # Lines and plane meet at the centre, in numbers of the same arithmetic.
    assert float(result.plane.loss[1, 1]) == float(result.landscape.loss[0, 1])


def test_the_network_has_the_documented_number_of_parameters():
    assert sum(p.numel() for p in network().parameters()) == 4258


def test_the_study_is_reproducible_and_does_not_change_the_global_generator(result):
    before = torch.random.get_rng_state()
    again = run(Config(**QUICK))
    assert torch.equal(torch.random.get_rng_state(), before)
    for name, spectrum in again.spectra.items():
        assert torch.equal(spectrum.values, result.spectra[name].values)
    assert torch.equal(again.plane.loss, result.plane.loss)
    assert str(again.sharpness) == str(result.sharpness)


def test_the_temperature_is_fitted_to_the_test_data(result):
    assert result.temperature.num_samples == len(data.load("digits").test)
    assert result.temperature.loss == pytest.approx(float(result.training.metrics["test_loss"]))


def test_the_result_is_written_read_and_drawn(result, tmp_path):
    files = write(digits, result, tmp_path)
    found = ritz.load(files[0])
    assert str(found.sharpness) == str(result.sharpness)
    titles = [ax.get_title(loc="left") for ax in digits.figure(found).axes]
    assert titles[: len(MATRICES)] == list(MATRICES)
    drawn = figures(found)
    assert list(drawn) == ["training", "spectra", "landscape"]
    lines = {line.get_label(): line for line in drawn["training"].axes[0].lines}
    assert {"train", "test", "average test"} <= set(lines)
    assert list(lines["average test"].get_xdata()) == [2.0]  # averaged from the second of two
    assert len(drawn["landscape"].axes) >= 4


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_samples", 1281), ("num_epochs", 1), ("num_steps", 2), ("engine", "'diesel'")],
)
def test_wrong_settings_name_the_field(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .* got {value}"):
        Config(**{name: value.strip("'") if isinstance(value, str) else value})


@pytest.mark.slow
def test_the_full_study_learns_and_its_parts_agree():
    found = run(Config())
    assert found.training.metrics["test_accuracy"] > 0.95
    row = found.sharpness.rows[0]
    assert (row.matrix, row.batch_norm) == ("hessian", "eval")
    # Both have converged: 60 steps and 30 agree to single precision.
    assert row.largest == pytest.approx(float(found.spectra[digits.FIRST].values[-1]), rel=1e-5)
    assert 0 < found.folded < row.largest
