"""Curvature operators against curvlinops."""

from functools import partial

import curvlinops
import pytest
import torch
from torch import nn

from ritz.curvature import Risk, fisher, ggn, hessian
from ritz.testing import check_operator


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), (3,)


def cnn():
    layers = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)]
    return nn.Sequential(*layers), (1, 5, 5)


def normalised():
    layers = [nn.Linear(3, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)]
    return nn.Sequential(*layers), (3,)


NETWORKS = {"mlp": mlp, "cnn": cnn, "layer norm": normalised}


def classes(count, seed):
    return torch.randint(0, 3, (count,), generator=torch.Generator().manual_seed(seed))


def numbers(count, seed):
    return noise(count, 3, seed=seed)


def bits(count, seed):
    return (noise(count, 3, seed=seed) > 0).double()


LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss(), classes),
    "squared error": (nn.MSELoss(), numbers),
    "binary": (nn.BCEWithLogitsLoss(), bits),
}
OPERATORS = {
    "hessian": (hessian, curvlinops.HessianLinearOperator),
    "ggn": (ggn, curvlinops.GGNLinearOperator),
    "empirical": (partial(fisher, kind="empirical"), curvlinops.EFLinearOperator),
}
CASES = [
    (network, loss, kind)
    for network in NETWORKS
    for loss in LOSSES
    for kind in OPERATORS
    # If a sample has several loss terms, curvlinops sums over terms instead of samples.
    if (kind != "empirical" or loss == "cross-entropy")
    and (network, kind) != ("layer norm", "hessian")
]


def problem(network, loss, sizes):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, shape = NETWORKS[network]()
    model = model.double().eval()
    loss_fn, target = LOSSES[loss]
    data = [(noise(n, *shape, seed=i), target(n, seed=i + 10)) for i, n in enumerate(sizes)]
    return model, loss_fn, data


def dense(model, loss_fn, data, kind):
    op = OPERATORS[kind][1](model, loss_fn, list(model.parameters()), data)
    return op @ torch.eye(op.shape[0], dtype=torch.float64)


@pytest.mark.parametrize(("network", "loss", "kind"), CASES)
def test_matrices_equal_those_of_curvlinops(network, loss, kind):
    model, loss_fn, data = problem(network, loss, (4, 4))
    found = OPERATORS[kind][0](Risk(model, loss_fn, data), engine="eager")
    check_operator(found, dense=dense(model, loss_fn, data, kind), rtol=1e-9)


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_a_smaller_last_batch_has_the_same_weight_as_in_curvlinops(kind):
    model, loss_fn, data = problem("mlp", "cross-entropy", (5, 2))
    found = OPERATORS[kind][0](Risk(model, loss_fn, data))
    check_operator(found, dense=dense(model, loss_fn, data, kind), rtol=1e-9)


@pytest.mark.parametrize("loss", LOSSES)
def test_layer_norm_products_agree_with_finite_differences(loss):
    """curvlinops uses torch's forward mode over jacrev, which is wrong for layer norm."""
    model, loss_fn, data = problem("layer norm", loss, (4, 4))
    risk = Risk(model, loss_fn, data)
    vector, step = noise(len(risk.theta)), 1e-4
    near, far = (
        risk.at(risk.theta + k * step * vector).gradient()
        - risk.at(risk.theta - k * step * vector).gradient()
        for k in (1, 2)
    )
    judge = (8 * near - far) / (12 * step)
    size = float(judge.abs().max())
    ours, theirs = hessian(risk) @ vector, dense(model, loss_fn, data, "hessian") @ vector
    assert float((ours - judge).abs().max()) < 1e-8 * size
    assert float((theirs - judge).abs().max()) > 1e-3 * size
