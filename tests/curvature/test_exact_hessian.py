"""Piecewise-linear networks, whose Hessian has the diagonal of the Gauss-Newton matrix."""

import pytest
import torch
from curvature.networks import labels, noise
from curvature.structures import CROSS_ENTROPY, Function, exact_matrix, ggn_diagonal, randomised
from torch import nn
from torch.func import functional_call

from ritz import diagonal, trace
from ritz.curvature import Risk, hessian
from ritz.curvature._exact import piecewise_gap


def piecewise():
    return nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.LeakyReLU(0.2), nn.MaxPool2d(2), nn.Dropout(0.4),
        nn.Flatten(), nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 2)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def piecewise_risk():
    model = randomised(piecewise())
    return Risk(model, CROSS_ENTROPY, (noise(6, 1, 5, 5), labels(2, 6)), batch_size=4, l2=0.3)


def test_the_hessian_of_a_piecewise_linear_network_has_the_diagonal_of_its_gauss_newton_matrix(
    piecewise_risk,
):
    def loss(theta):
        params = piecewise_risk.space.unflatten(theta)
        outputs = functional_call(piecewise_risk.model, params, (noise(6, 1, 5, 5),))
        return CROSS_ENTROPY(outputs, labels(2, 6)) + 0.15 * theta.square().sum()

    exact = torch.autograd.functional.hessian(loss, piecewise_risk.theta)
    op = hessian(piecewise_risk)
    torch.testing.assert_close(diagonal(op, method="exact").mean, exact.diagonal())
    found = trace(op)
    assert float(found) == pytest.approx(float(exact.trace()))
    assert found.method.startswith("exact, by structure: 2 backward passes")
    assert found.method.endswith("Hessian and Gauss-Newton matrix have equal diagonals")
    assert abs(exact - exact_matrix(piecewise_risk)).max() > 0.1  # the matrices are not the same


def reused():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


def hooked():
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_forward_hook(lambda module, args, output: output.square())
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            nn.Sequential(nn.Linear(3, 3), nn.Tanh()),
            "layer '1', Tanh, is not known to be piecewise linear",
        ),
        (nn.Sequential(nn.Linear(3, 3), nn.PReLU()), "layer '1', PReLU, is not known"),
        (Function(lambda self, x: x, a=nn.Linear(3, 3)), "the model, Function, is not known"),
        (reused(), "parameters are tied"),
        (hooked(), "layer '0' has hooks"),
        (
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)),
            "layer '1' has no",
        ),
    ],
)
def test_the_reason_why_the_diagonal_of_a_hessian_is_not_known_is_named(model, reason):
    risk = Risk(model.double(), CROSS_ENTROPY, (noise(6, 3), labels(3, 6)))
    assert reason in piecewise_gap(risk)
    with pytest.raises(ValueError, match=reason):
        trace(hessian(risk, engine="eager"), method="exact")


def test_the_diagonal_of_a_hessian_is_not_known_with_a_user_defined_forward():
    risk = Risk(nn.Linear(3, 3).double(), CROSS_ENTROPY, (noise(6, 3), labels(3, 6)),
                forward=lambda model, batch: (model(batch[0]).square(), batch[1]))  # fmt: skip
    assert "forward= is user-defined" in piecewise_gap(risk)
    torch.testing.assert_close(ggn_diagonal(risk), exact_matrix(risk).diagonal())


def test_the_diagonal_of_a_hessian_is_not_known_for_an_unknown_loss():
    risk = Risk(nn.Linear(3, 3).double(), nn.HuberLoss(), (noise(6, 3), noise(6, 3)))
    assert "not known in closed form" in trace(hessian(risk, engine="eager"), num_probes=3).method
