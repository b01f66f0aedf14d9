import dataclasses
import math

import pytest
import torch

import ritz
from ritz import studies
from ritz.studies import vgg16


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vgg16")
    config = dataclasses.replace(vgg16.SIZES["smoke"], runs=str(folder / "runs"))
    return config, vgg16.run(config)


def test_every_run_has_accuracies_and_curvature_where_it_has_weights(smoke):
    _, result = smoke
    sgd, gadam = 0, 1
    assert bool(result.last.isfinite().all())
    assert math.isnan(result.average[sgd, 0])
    assert math.isfinite(result.average[gadam, 0])
    assert bool(result.curvature[:, 0].isfinite().all())
    assert bool(result.curvature[:, 1, :, gadam].isfinite().all())
    assert float(result.best()[gadam, 0]) == float(result.average[gadam, 0])
    assert bool((result.top5[0] >= result.last).all())
    assert float(result.top5[1, gadam, 0]) >= float(result.average[gadam, 0])


def test_finished_runs_are_read_and_not_trained_again(smoke, monkeypatch):
    config, result = smoke
    monkeypatch.setattr(vgg16.training, "fit", None)  # calling it would raise

    again = vgg16.run(config)
    read = vgg16.run(dataclasses.replace(config, train=False, num_seeds=2))

    assert torch.equal(again.last, result.last)
    assert torch.equal(read.last[:, :1], result.last)
    assert bool(read.last[:, 1].isnan().all())  # the second seed was never trained
    assert "read from the logs" in read.versions["machine"]


def test_evidence_has_a_row_per_method_that_was_run(smoke, tmp_path):
    _, result = smoke
    rows = vgg16.evidence(result)
    assert [row.what.split(": ")[0].rsplit(" ", 1)[-1] for row in rows[:2]] == ["sgd", "gadam"]
    assert {row.where for row in rows[2:]} == {"Section 5, Figures 8, 10"}
    files = studies.write(vgg16, result, tmp_path)
    assert str(ritz.load(files[0])) == str(result)


def test_unknown_methods_are_refused():
    with pytest.raises(ValueError, match="methods must be one of sgd, swa"):
        vgg16.Config(methods=("adagrad",))
