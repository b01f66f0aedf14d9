"""Results of curvature and measures print as a summary, and are saved with all their fields."""

import dataclasses

import pytest
import torch
from curvature.networks import seeded
from torch import nn
from torch.nn.functional import cross_entropy

import ritz
from ritz import curvature, measures
from ritz.curvature import Risk, hessian

X = torch.randn(48, 4, generator=seeded(0), dtype=torch.float64)
Y = (X[:, :3] + torch.randn(48, 3, generator=seeded(1), dtype=torch.float64)).argmax(1)


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
        model = model.double()
        model(X)  # running statistics
        return model.eval()


def risk_of(model):
    return Risk(model, cross_entropy, (X, Y), batch_size=16)


@pytest.fixture(scope="module")
def risk():
    return risk_of(network())


@pytest.fixture(scope="module")
def run(risk):
    return ritz.lanczos(hessian(risk), num_steps=12, vectors=True)


RESULTS = {
    "summary": lambda risk, run: curvature.summary(risk),
    "distance": lambda risk, run: curvature.distance(risk, 0 * risk.theta),
    "gradient_statistics": lambda risk, run: curvature.gradient_statistics(risk),
    "factors of kfac": lambda risk, run: curvature.kfac(risk).ops[0].factors,
    "advise": lambda risk, run: measures.advise(risk),
    "batch_prediction": lambda risk, run: measures.batch_prediction(risk, batch_sizes=[1, 8]),
    "batch curve": lambda risk, run: measures.batch_prediction(risk, batch_sizes=[8]).best,
    "bulk_edge": lambda risk, run: measures.bulk_edge(run),
    "curvature_variance": lambda risk, run: measures.curvature_variance(risk),
    "shrinkage": lambda risk, run: measures.shrinkage(risk, batch_sizes=[4, 16]),
    "critical_sharpness": lambda risk, run: measures.critical_sharpness(risk),
    "sharpness": lambda risk, run: measures.sharpness(risk, num_steps=6, num_probes=2),
    "row of sharpness": lambda risk, run: measures.sharpness(risk, num_steps=6).rows[0],
    "gradient_noise": lambda risk, run: measures.gradient_noise(risk),
    "gradient_overlap": lambda risk, run: measures.gradient_overlap(risk, run),
    "landscape": lambda risk, run: measures.landscape(risk, run, num_points=3, test=risk),
    "landscape2d": lambda risk, run: measures.landscape2d(
        risk, run.vectors[:, 0].clone(), run.vectors[:, 1].clone(), num_points=3
    ),
    "rank_bound": lambda risk, run: measures.rank_bound(risk),
    "rank_degeneracy": lambda risk, run: measures.rank_degeneracy(run, matrix="hessian"),
    "temperature": lambda risk, run: measures.temperature(risk),
    "reliability": lambda risk, run: measures.temperature(risk).before,
    "calibrated_sharpness": lambda risk, run: measures.calibrated_sharpness(
        network(), risk_of, risk_of
    ),
    "excess_risk": lambda risk, run: measures.excess_risk(risk, risk),
}


def same(one, other):
    """Return whether two results are equal in every field, bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or one != one  # NaN


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_prints_as_a_summary_and_is_the_same_when_loaded(name, risk, run, tmp_path):
    result = RESULTS[name](risk, run)
    ritz.save(result, tmp_path / "result.safetensors")

    text, loaded = str(result), ritz.load(tmp_path / "result.safetensors")

    assert "tensor(" not in text
    assert type(result).__name__ + "(" not in text
    assert all(len(line) <= 130 for line in text.splitlines())
    assert repr(result) == text  # which a REPL shows
    assert same(result, loaded)
    assert str(loaded) == text


def test_operators_and_products_print_as_one_line(risk):
    op = hessian(risk)
    op @ risk.theta

    assert "\n" not in repr(op)
    assert repr(op.products).startswith("Products(forward over reverse, linearized")
