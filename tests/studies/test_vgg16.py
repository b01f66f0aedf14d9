import dataclasses
import json
import math
from pathlib import Path

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
    config, result = smoke
    sgd, gadam = 0, 1
    assert bool(result.last.isfinite().all())
    assert math.isnan(result.average[sgd, 0])
    assert math.isfinite(result.average[gadam, 0])
    assert tuple(config.points) == ("epoch 1", "last", "average")
    assert bool(result.curvature[:, :2].isfinite().all())
    assert bool(result.curvature[:, 2, :, gadam].isfinite().all())
    assert bool(result.curvature[:, 2, :, sgd].isnan().all())
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


def test_a_measurement_that_was_interrupted_is_completed_without_training(smoke, monkeypatch):
    config, result = smoke
    path = Path(config.runs) / "gadam-0" / "curvature.json"
    points = json.loads(path.read_text())
    path.write_text(json.dumps({"epoch 1": points["epoch 1"]}))
    monkeypatch.setattr(vgg16.training, "fit", None)

    again = vgg16.run(config)

    torch.testing.assert_close(again.curvature, result.curvature, equal_nan=True)


def test_evidence_compares_what_was_run(smoke, tmp_path):
    _, result = smoke
    rows = list(vgg16.evidence(result))
    # Other networks than the published one are compared in their sharpness alone.
    assert {(row.paper, row.where) for row in rows} == {
        ("FLAT", "Section 5, Figure 8"), ("FLAT", "Section 5, Figure 10"), ("GADAM", "Table 9"),
        ("FLAT", "Figures 11, 12"),
    }  # fmt: skip
    files = studies.write(vgg16, result, tmp_path)
    assert str(ritz.load(files[0])) == str(result)


def test_accuracies_of_the_published_network_are_compared_with_the_table():
    config = dataclasses.replace(vgg16.SIZES["paper"], methods=("sgd", "gadamx"), num_seeds=2)
    shape = (2, 2)
    last = torch.tensor([[0.741, 0.742], [0.65, 0.65]], dtype=torch.float64)
    average = torch.tensor([[math.nan] * 2, [0.70, math.nan]], dtype=torch.float64)
    missing = torch.full((4, len(config.points), 2, *shape), math.nan)
    result = vgg16.Result(
        config=config, last=last, average=average, training=last, norms=missing[0, :, 0],
        top5=missing[0, :2, 0], curvature=missing,
    )  # fmt: skip

    sgd, gadamx = vgg16.evidence(result)

    assert (sgd.published, sgd.verdict) == ("74.15", "agrees")
    assert (gadamx.published, gadamx.verdict) == ("76.85", "differs")
    assert "one seed" in gadamx.why
    assert "1 seed" in gadamx.what


def test_unknown_methods_are_refused():
    with pytest.raises(ValueError, match="methods must be one of sgd, swa"):
        vgg16.Config(methods=("adagrad",))
