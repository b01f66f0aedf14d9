import pytest
import torch

import ritz
from ritz.studies import averaging, write
from ritz.studies.averaging import METHODS, Config, run

SMALL = Config(width=32, num_train=400, batch_size=20, num_epochs=6, start=3, num_seeds=2)


@pytest.fixture(scope="module")
def result():
    return run(SMALL)


def test_every_method_has_a_score_for_every_seed(result):
    assert result.names == tuple(METHODS)
    for scores in (result.last_errors, result.average_errors):
        assert scores.shape == (len(METHODS), 2)
        assert bool(((scores >= 0) & (scores < 0.9)).all())  # 0.9 is guessing
    for scores in (result.last_losses, result.average_losses, result.diversities):
        assert bool((torch.isfinite(scores) & (scores > 0)).all())
    assert not torch.equal(result.last_losses, result.average_losses)


def test_the_same_seed_is_reproducible_bit_for_bit(result):
    again = run(SMALL)
    assert torch.equal(again.last_losses, result.last_losses)
    assert torch.equal(again.average_losses, result.average_losses)


def test_the_global_generator_is_not_changed():
    before = torch.get_rng_state()
    run(SMALL)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_table_has_paired_differences(result):
    text = str(result)
    for word in (*METHODS, "average - last", "with the same seed", "20% of 400 labels wrong"):
        assert word in text


def test_the_result_and_its_figure_are_written_and_read(result, tmp_path):
    files = write(averaging, result, tmp_path)
    assert [file.suffix for file in files] == [".safetensors", ".png"]
    assert str(ritz.load(files[0])) == str(result)


@pytest.mark.parametrize(
    "bad",
    [
        {"width": 0},
        {"num_train": 1},
        {"label_noise": 1.5},
        {"batch_size": 1},
        {"num_epochs": 2},
        {"start": 59},
        {"num_seeds": 1},
        {"seed": -1},
    ],
)
def test_a_wrong_configuration_names_the_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Config(**bad)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_averages_have_lower_errors_than_last_iterates():
    result = run(Config())
    # Mean over the methods that are meant to be averaged; the seeds are what is sampled.
    meant = [i for i, method in enumerate(METHODS.values()) if method.averaged]
    for last, average in (
        (result.last_errors, result.average_errors),
        (result.last_losses, result.average_losses),
    ):
        gains = (last - average)[meant].mean(0)
        assert float(gains.mean()) > 4 * float(gains.std()) / len(gains) ** 0.5
