import pytest
import torch

import ritz
from ritz.studies import network_spectrum, write
from ritz.studies.network_spectrum import Config, run

SMALL = Config(size=200, num_steps=60, num_probes=8)


@pytest.fixture(scope="module")
def result():
    return run(SMALL)


def test_the_largest_values_are_found_within_their_residuals(result):
    spectrum, exact = result.spectrum, result.exact
    for k in range(-1, -4, -1):
        assert abs(float(spectrum.values[k] - exact[k])) <= float(spectrum.residuals[k])


def test_every_exact_answer_is_within_four_standard_errors(result):
    for item in result.quantities:
        error = abs(item.exact - float(item.estimate))
        allowed = 4 * float(item.estimate.stderr) + float(item.estimate.truncation)
        assert error <= allowed + 1e-6 * abs(item.exact), item.name


def test_the_density_has_the_moments_of_the_spectrum(result):
    mean = result.exact.mean()
    assert abs(float(result.density.moment(1)) - float(mean)) < 0.1 * float(mean)


def test_the_table_has_eigenvalues_and_quantities(result):
    text = str(result)
    for word in ("largest 1", "smallest", "residual", "trace", "Frobenius norm", "spectral norm"):
        assert word in text


def test_quantities_that_the_section_does_not_have_are_not_compared(result):
    verdicts = [row.verdict for row in network_spectrum.evidence(result)]
    assert verdicts == ["extends", "extends", "agrees", "agrees"]


def test_the_result_and_its_figure_are_written_and_read(result, tmp_path):
    stored, picture = write(network_spectrum, result, tmp_path)
    found = ritz.load(stored)
    assert found.config == SMALL
    assert torch.equal(found.spectrum.values, result.spectrum.values)
    assert picture.stat().st_size > 20_000


@pytest.mark.parametrize("bad", [{"size": 99}, {"num_steps": 5}, {"num_probes": 1}, {"width": 0.0}])
def test_a_wrong_configuration_names_the_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Config(**bad)
