import math

import pytest
import torch

import ritz
from ritz.studies import graph_spectra, write
from ritz.studies.graph_spectra import (
    Config,
    figure,
    histogram_divergence,
    run,
    semicircle_density,
    semicircle_divergence,
)

SMALL = Config(
    num_nodes=400,
    p=0.03,
    num_edges=4,
    drawn=(3, 8, 12, 20),
    counts=(3, 8, 20),
    num_probes=40,
    num_bins=25,
)


@pytest.fixture(scope="module")
def result():
    return run(SMALL)


def test_the_semicircle_has_the_catalan_numbers_as_its_moments():
    density = semicircle_density(12)
    for k in range(1, 5):
        catalan = math.comb(2 * k, k) / (k + 1)
        # Of radius one half: (1 / 4)^2k of Catalan's, about the middle.
        found = density.expectation(lambda x, k=k: (x - 0.5) ** (2 * k))
        assert found == pytest.approx(catalan / 16**k, rel=1e-6)


def test_the_divergence_from_the_semicircle_decreases_with_more_moments():
    apart = [semicircle_divergence(semicircle_density(count)) for count in (5, 10, 30)]
    assert apart[0] > apart[1] > apart[2] > 0
    assert apart[0] < 5e-3
    assert apart[2] < 5e-5


def test_the_divergence_from_a_histogram_is_a_sum_over_bins():
    values = torch.tensor([0.1, 0.1, 0.1, 0.9], dtype=torch.float64)
    flat = ritz.maxent(torch.tensor([1.0, 0.0], dtype=torch.float64), interval=(0.0, 1.0))
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert histogram_divergence(values, flat, 2) == pytest.approx(expected, abs=1e-6)


def test_divergences_are_compared_with_the_figure_of_their_spectrum(result):
    where = {row.what.split(":")[0]: row.where for row in graph_spectra.evidence(result)}
    assert where["Erdős-Rényi"] == "Figure 3.1"
    assert where["semicircle"] == "Figure 3.2"


def test_divergences_fall_and_moments_stay_within_their_errors(result):
    for row in result.divergences.values():
        assert row.tolist() == sorted(row.tolist(), reverse=True)
    for name in result.names:
        assert float(result.divergences[name][-1]) < 0.25 * float(result.divergences[name][0])
        assert float(result.moment_errors[name].max()) < 4
        assert result.eigenvalues[name].shape == (400,)


def test_the_result_and_its_figure_are_written_and_read(result, tmp_path):
    files = write(graph_spectra, result, tmp_path)
    assert [file.suffix for file in files] == [".safetensors", ".png"]
    assert str(ritz.load(files[0])) == str(result)


def test_the_first_row_of_the_figure_has_no_empty_panel(result):
    drawing = figure(result)
    row = [
        ax.get_subplotspec().colspan for ax in drawing.axes if ax.get_subplotspec().rowspan[0] == 0
    ]
    assert sorted(place for span in row for place in span) == [0, 1, 2, 3]
    assert all(ax.has_data() for ax in drawing.axes)


def test_wrong_settings_name_the_field():
    with pytest.raises(ValueError, match="num_nodes must be at least 50"):
        Config(num_nodes=3)
    with pytest.raises(ValueError, match="counts must be at least 1"):
        Config(counts=(0,))
