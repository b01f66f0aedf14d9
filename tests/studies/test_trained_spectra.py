import dataclasses

import pytest
import torch

import ritz
from ritz import studies
from ritz.spectra import lanczos
from ritz.studies import trained_spectra as study


@pytest.fixture(scope="module")
def result():
    config = dataclasses.replace(
        study.SIZES["smoke"], num_train=200, num_epochs=1, measured=60, num_steps=12
    )
    return study.run(config)


def test_every_network_has_every_measure(result):
    assert result.measures.shape == (len(study.MEASURES), 2)
    assert bool(result.measures.isfinite().all())
    assert set(result.spectra) == {"Hessian", "second vector", "GGN"}
    top = result.measure("largest, Hessian")[0]
    assert float(top) == pytest.approx(float(result.spectra["Hessian"].values[-1]))
    # An entry of the diagonal of a positive matrix is at most its largest eigenvalue.
    assert bool((result.measure("largest entry, exact") <= result.measure("largest, GGN")).all())
    for shares in result.histograms.values():
        assert float(shares.sum()) == pytest.approx(1)
    # The bin of the largest entry is the last that is not empty.
    last = int(result.histograms["exact"].nonzero()[-1])
    largest = float(result.measure("largest entry, exact")[0])
    assert result.edges[last] < largest <= result.edges[last + 1]


def test_the_distance_of_two_spectra_leaves_out_the_mass_near_zero():
    values = torch.cat([torch.zeros(90), torch.linspace(1, 2, 10)]).double()
    first, second = (
        lanczos(torch.diag(values), num_steps=11, start=start)
        for start in (torch.ones(100).double(), torch.arange(1, 101).double())
    )
    # Weights of the start vectors on the last ten coordinates.
    weights = torch.arange(1, 101).double().square()
    expected = abs(0.1 - float(weights[90:].sum() / weights.sum()))
    assert study._distance(first, first) == 0
    assert study._distance(first, second) == pytest.approx(expected, rel=1e-6)


def test_the_result_is_written_and_its_evidence_has_both_figures(result, tmp_path):
    files = studies.write(study, result, tmp_path)
    assert [file.suffix for file in files] == [".safetensors", ".png"]
    assert str(ritz.load(files[0])) == str(result)
    where = [row.where for row in study.evidence(result)]
    assert sum("Figure 4.7" in each for each in where) == 3
    assert sum("Figure 4.8" in each for each in where) == 2


@pytest.mark.parametrize("bad", [{"num_epochs": 0}, {"num_train": 10}, {"num_steps": 2}])
def test_options_out_of_range_name_the_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        dataclasses.replace(study.Config(), **bad)
