"""Exact diagonals and traces of Fisher matrices are those of the dense matrix."""

import pytest
import torch
from curvature.networks import labels, noise
from curvature.structures import CASES, randomised
from torch import nn

from ritz import diagonal, trace
from ritz.curvature import Risk, fisher, gradient_covariance
from ritz.operators import exact


def risk_of(name):
    model, data, loss, options = CASES[name]()
    return Risk(randomised(model), loss, data, **options)


KINDS = [{"kind": "empirical"}, {"kind": "monte_carlo", "num_draws": 2}]
NAMES = [
    "ragged_batches_with_l2",
    "squared_error_of_several_outputs",
    *(name for name in CASES if "conv" in name or "binary" in name or "token" in name),
]


@pytest.mark.parametrize("options", KINDS, ids=lambda options: options["kind"])
@pytest.mark.parametrize("name", NAMES)
def test_diagonal_and_trace_are_those_of_the_dense_matrix(name, options):
    op = fisher(risk_of(name), engine="eager", **options)
    matrix = op.dense()

    torch.testing.assert_close(exact(op, "diagonal").value, matrix.diagonal())
    assert exact(op, "trace").value == pytest.approx(float(matrix.trace()))


@pytest.mark.parametrize("options", KINDS, ids=lambda options: options["kind"])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()])
def test_every_position_and_output_has_its_own_label(loss, options):
    # Outputs (n, 3, 4): four labels of three classes, or twelve binary ones, per sample.
    model = randomised(nn.Sequential(nn.Conv1d(2, 3, 3, padding=1)))
    entropy = isinstance(loss, nn.CrossEntropyLoss)
    target = labels(3, 5, 4) if entropy else labels(2, 5, 3, 4).double()
    op = fisher(Risk(model, loss, (noise(5, 2, 4), target)), engine="eager", **options)
    matrix = op.dense()

    torch.testing.assert_close(exact(op, "diagonal").value, matrix.diagonal())


def test_diagonal_and_trace_are_exact_by_default():
    risk = risk_of("ragged_batches_with_l2")
    estimate = diagonal(fisher(risk, kind="empirical"))
    assert not estimate.stderr.any()
    covariance = gradient_covariance(risk, engine="eager")
    assert float(trace(covariance).mean) == pytest.approx(float(covariance.dense().trace()))


def test_batch_statistics_have_no_exact_diagonal():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    risk = Risk(model, nn.CrossEntropyLoss(), (noise(8, 3), labels(2, 8)), batch_size=8,
                batch_norm="train")  # fmt: skip
    value, note = exact(fisher(risk, kind="monte_carlo"), "diagonal")
    assert value is None
    assert "train mode couples samples" in note
