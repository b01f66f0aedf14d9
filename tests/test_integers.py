"""Counts and tolerances may be numbers of NumPy, of any width."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ritz
from ritz import curvature, graphs, measures, models, operators, optim, rmt, spectra, training
from ritz._core.storage import to_json

MATRIX = torch.diag(torch.linspace(1, 4, 60, dtype=torch.float64))
INPUTS = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
LABELS = INPUTS.sum(1).gt(0).long()


def risk():
    torch.manual_seed(0)
    return ritz.Risk(nn.Linear(5, 2), cross_entropy, (INPUTS, LABELS), batch_size=20)


def fitted(kind):
    torch.manual_seed(0)
    result = training.fit(
        nn.Linear(5, 2), (INPUTS, LABELS), num_epochs=kind(3), batch_size=kind(20),
        warmup=kind(1), seed=kind(2), optimizer_settings={"lr": 0.1},
    )  # fmt: skip
    return result.history


def plain(result):
    """Return a result as text, with all its numbers."""
    if isinstance(result, nn.Module):
        return [tuple(parameter.shape) for parameter in result.parameters()]
    return to_json(result) if not isinstance(result, optim.IterateAverage) else result.interval


CALLS = {
    "lanczos": lambda kind: ritz.lanczos(MATRIX, num_steps=kind(50)),
    "lanczos_block": lambda kind: spectra.lanczos_block(
        MATRIX, num_steps=kind(20), num_probes=kind(3)
    ),
    "eigenpairs": lambda kind: ritz.eigenpairs(
        MATRIX, largest=kind(2), smallest=kind(1), max_vectors=kind(20), max_steps=kind(100)
    ),
    "density": lambda kind: ritz.density(MATRIX, num_probes=kind(3), num_steps=kind(20)),
    "trace": lambda kind: ritz.trace(MATRIX, num_probes=kind(40)),
    "diagonal": lambda kind: ritz.diagonal(
        operators.FunctionOperator(MATRIX.matmul, n=kind(60), dtype=MATRIX.dtype),
        num_probes=kind(40),
    ),
    "logdet": lambda kind: ritz.logdet(MATRIX, method="krylov", num_products=kind(50)),
    "trace_function": lambda kind: ritz.trace_function(
        MATRIX, torch.log, num_steps=kind(10), num_probes=kind(20)
    ),
    "moments": lambda kind: ritz.moments(MATRIX, num_moments=kind(10), num_probes=kind(20)),
    "solve": lambda kind: ritz.solve(MATRIX, MATRIX[:, 0], max_steps=kind(100)),
    "hessian": lambda kind: ritz.hessian(risk(), num_products=kind(3)).matmat(torch.ones(12, 1)),
    "fisher": lambda kind: curvature.fisher(risk(), num_draws=kind(3)).matmat(torch.ones(12, 1)),
    "sharpness": lambda kind: ritz.sharpness(
        risk(), num_steps=kind(10), num_probes=kind(3), max_products=kind(200)
    ),
    "landscape": lambda kind: measures.landscape(risk(), {"u": torch.ones(12)}, num_points=kind(5)),
    "graph": lambda kind: graphs.moments(
        graphs.watts_strogatz(kind(40), num_neighbors=kind(4), p=0.1),
        num_moments=kind(10),
        num_probes=kind(20),
    ),
    "bounds": lambda kind: rmt.multiplicative_spikes(5.0, ratio=0.5, size=kind(200)),
    "model": lambda kind: models.create("mlp", input_shape=(1, 4, 4), hidden=(kind(7),)),
    "fit": fitted,
    "average": lambda kind: optim.IterateAverage(
        torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), start=kind(2), interval=kind(3)
    ),
}


@pytest.mark.parametrize("kind", [np.int64, np.uint8])
@pytest.mark.parametrize("name", CALLS)
def test_counts_of_numpy_give_the_same_result_as_those_of_python(name, kind):
    call = CALLS[name]

    assert plain(call(kind)) == plain(call(int))


def test_results_with_counts_of_numpy_are_saved_and_resumed(tmp_path):
    options = {"state": tmp_path / "state", "save_interval": 0.0}
    ritz.lanczos(MATRIX, num_steps=np.int64(5), **options)

    resumed = ritz.lanczos(MATRIX, num_steps=5, **options)
    ritz.save(resumed, tmp_path / "result")

    assert ritz.load(tmp_path / "result").settings == resumed.settings


def test_a_tolerance_may_be_of_single_precision():
    assert ritz.trace(MATRIX, method="hutchinson", rtol=np.float32(0.5)).num_products > 0


@pytest.mark.parametrize("bad", [np.bool_(True), torch.tensor(True), np.float64(3.0), np.ones(2)])
def test_what_is_no_integer_is_refused(bad):
    with pytest.raises(TypeError, match="num_steps must be an integer"):
        ritz.lanczos(MATRIX, num_steps=bad)


def test_an_operator_is_scaled_by_a_number_of_numpy():
    op = ritz.as_operator(MATRIX)

    torch.testing.assert_close((op * np.float32(2)).dense(), 2 * MATRIX)
    torch.testing.assert_close((op * np.int64(2)).dense(), 2 * MATRIX)
