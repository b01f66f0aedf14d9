import dataclasses
import re
from pathlib import Path

import pytest
import torch

import ritz
from ritz.studies import damping, learning_rates, write
from ritz.studies._training import exponent, initial_network


@pytest.fixture(scope="module")
def rates():
    return learning_rates.run(learning_rates.SIZES["smoke"])


@pytest.fixture(scope="module")
def least():
    return damping.run(damping.SIZES["smoke"])


def test_every_network_momentum_and_batch_size_has_a_largest_rate(rates):
    assert rates.largest.shape == rates.edges.shape == (2, 1, 2, 2, 2)
    assert bool((rates.largest > 0).all())
    # Heavy ball is stable up to 1 + rho times the learning rate of SGD, and with noise less.
    assert bool((rates.edges[..., 1, :] < 1.9 * rates.edges[..., 0, :]).all())
    assert rates.test_errors.shape == (2, 2, 2, 2)
    assert bool((rates.distances > 0).all())


def test_tables_and_claims_name_what_was_measured(rates, least):
    assert "mlp, trained, momentum 0.9" in str(rates)
    assert len(learning_rates.evidence(rates)) == 7
    assert "mlp, learning rate 1" in str(least)
    rule, *ratios = damping.evidence(least)
    assert rule.published == "-1"
    assert [ratio.verdict for ratio in ratios] == ["extends"] * 3
    for row in (rule, *ratios, *learning_rates.evidence(rates)):
        assert max(map(len, (row.where, row.what, row.published, row.measured))) <= 100


@pytest.mark.parametrize("name", ["learning_rates", "damping", "damping_kfac"])
def test_the_columns_of_the_stored_tables_do_not_touch(name):
    results = Path(__file__).parents[2] / "benchmarks/results/studies"
    text = str(ritz.load(results / f"{name}.safetensors"))

    assert "±" in text
    # Two numbers without a space between them are 2.690.711 or 0.177-0.881.
    assert not re.search(r"\d\.\d+\.|\d-\d", text)


def test_seeds_are_runs_with_other_images_and_weights(rates):
    one = learning_rates.run(dataclasses.replace(rates.config, seed=1, num_seeds=1))
    torch.testing.assert_close(one.largest[0], rates.largest[1])
    torch.testing.assert_close(one.test_errors[0], rates.test_errors[1])
    assert bool((rates.edges[0] != rates.edges[1]).all())


def test_the_least_damping_is_that_of_trials(least):
    assert least.least.shape == (2, 1, 1, 2)
    assert least.predicted.shape == (2, 1, 1, 3, 2)
    assert bool((least.least > 0).all())


def test_the_least_damping_of_kfac_is_measured_as_well():
    small = dataclasses.replace(damping.SIZES["smoke"], optimizer="kfac")
    result = damping.run(small)
    assert bool((result.least > 0).all())
    assert damping.evidence(result)[0].where.startswith("Figures 5.13, 5.14")


def test_results_and_figures_are_written_and_read(rates, least, tmp_path):
    for study, result in ((learning_rates, rates), (damping, least)):
        files = write(study, result, tmp_path / study.__name__)
        assert [file.suffix for file in files] == [".safetensors", ".png"]
        assert str(ritz.load(files[0])) == str(result)


def test_an_exponent_is_the_slope_of_a_power_law():
    sizes = (4, 16, 64)
    values = 3 * torch.tensor(sizes, dtype=torch.float64) ** 0.7

    assert exponent(sizes, values) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("study", "options", "match"),
    [
        (learning_rates, {"num_trials": 1}, "num_trials must be at least 2"),
        (learning_rates, {"batch_sizes": (0,)}, "batch_sizes must be at least 1"),
        (damping, {"optimizer": "sgd"}, "optimizer must be one of damped_adamw, kfac"),
        (damping, {"rates": (0.0,)}, "rates must be at least"),
    ],
)
def test_wrong_configurations_are_refused(study, options, match):
    with pytest.raises(ValueError, match=match):
        study.Config(**options)


def test_initial_weights_differ_between_seeds():
    config, samples = damping.SIZES["smoke"], (torch.randn(20, 1, 8, 8), torch.arange(20) % 10)

    first, again, other = (
        initial_network("mlp", dataclasses.replace(config, seed=seed), samples)
        for seed in (0, 0, 1)
    )

    for weights, same, different in zip(
        *(model.parameters() for model in (first, again, other)), strict=True
    ):
        assert torch.equal(weights, same)
        assert not torch.equal(weights, different)
