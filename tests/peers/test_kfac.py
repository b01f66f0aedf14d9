"""Factors of K-FAC and scales of EK-FAC against curvlinops."""

import curvlinops
import pytest
import torch
from curvlinops import FisherType, KFACType
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from ritz.curvature._kfac import KroneckerFactors, LayerOperator
from ritz.operators import BlockDiagonalOperator, DenseOperator
from ritz.optim import KFAC


class Mean(nn.Module):
    """Mean over positions, ``(batch, T, features)``."""

    def forward(self, x):
        return x.mean(1)


class Skip(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x).tanh()


def stack(*layers):
    return nn.Sequential(*layers)


IMAGE, ROW, TOKENS = (2, 6, 6), (4,), (3, 4)
LINEAR, CONV = nn.Linear, nn.Conv2d
NETWORKS = {
    "regression": (lambda: LINEAR(4, 3), ROW),
    "linear": (lambda: stack(LINEAR(4, 5), LINEAR(5, 3)), ROW),
    "mlp": (lambda: stack(LINEAR(4, 5), nn.Tanh(), LINEAR(5, 3)), ROW),
    "no bias": (lambda: stack(LINEAR(4, 5, False), nn.ReLU(), LINEAR(5, 3, False)), ROW),
    "deep": (lambda: stack(*(x for _ in range(3) for x in (LINEAR(4, 4), nn.GELU())), LINEAR(4, 3)),
             ROW),
    "residual": (lambda: stack(Skip(LINEAR(4, 4)), Skip(LINEAR(4, 4)), LINEAR(4, 3)), ROW),
    "tokens": (lambda: stack(LINEAR(4, 5), nn.Tanh(), Mean(), LINEAR(5, 3)), TOKENS),
    "conv": (lambda: stack(CONV(2, 3, 3), nn.ReLU(), nn.Flatten(), LINEAR(48, 3)), IMAGE),
    "padded": (lambda: stack(CONV(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), LINEAR(108, 3)),
               IMAGE),
    "strided": (lambda: stack(CONV(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(),
                              LINEAR(27, 3)), IMAGE),
    "dilated": (lambda: stack(CONV(2, 3, 2, dilation=2), nn.Tanh(), nn.Flatten(), LINEAR(48, 3)),
                IMAGE),
    "wide": (lambda: stack(CONV(2, 14, 1), nn.Tanh(), CONV(14, 3, 3, padding=1), nn.Tanh(),
                           nn.AvgPool2d(2), nn.Flatten(), LINEAR(27, 3)), IMAGE),
    "wide, uneven": (lambda: stack(CONV(2, 13, 1), nn.Tanh(), CONV(13, 2, (3, 2), padding=(2, 1)),
                                       nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                                       LINEAR(2, 3)), IMAGE),
    "no bias, conv": (lambda: stack(CONV(2, 3, 3, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                                    nn.Flatten(), LINEAR(3, 3)), IMAGE),
}  # fmt: skip
LOSSES = {"cross-entropy": nn.CrossEntropyLoss(), "squared error": nn.MSELoss()}
KINDS = {"ggn": FisherType.TYPE2, "empirical": FisherType.EMPIRICAL}


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(network, loss):
    make, shape = NETWORKS[network]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().double()
    target = noise(5, 3, seed=1)
    return model, noise(5, *shape), target if loss == "squared error" else target.argmax(1)


def captured(model, x, y, loss, **settings):
    function = cross_entropy if loss == "cross-entropy" else mse_loss
    optimizer = KFAC(model, lr=0.0, **settings)
    outputs = model(x)
    optimizer.observe(outputs, y, function)
    function(outputs, y).backward()
    optimizer.step()
    optimizer.curvature.remove()
    return optimizer.curvature.blocks


def theirs(operator, model, x, y, loss, fisher, sharing):
    approximation = KFACType.EXPAND if sharing == "expand" else KFACType.REDUCE
    op = operator(
        model,
        LOSSES[loss],
        list(model.parameters()),
        [(x, y)],
        fisher_type=KINDS[fisher],
        kfac_approx=approximation,
        separate_weight_and_bias=False,
    )
    return torch.as_tensor(op @ torch.eye(op.shape[0], dtype=torch.float64))


CASES = [
    (network, loss, fisher)
    for network in NETWORKS
    for loss in LOSSES
    for fisher in KINDS
    # The gradient of a mean over outputs, here of one sample; there of one output.
    if (loss, fisher) != ("squared error", "empirical")
]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("network", "loss", "fisher"), CASES)
def test_factors_are_those_of_curvlinops(network, loss, fisher, sharing):
    model, x, y = problem(network, loss)
    expected = theirs(curvlinops.KFACLinearOperator, model, x, y, loss, fisher, sharing)
    blocks = captured(model, x, y, loss, fisher=fisher, weight_sharing=sharing)
    ours = BlockDiagonalOperator(
        [
            LayerOperator(KroneckerFactors(**block.average), bias="bias" in block.params)
            for block in blocks
        ]
    )
    torch.testing.assert_close(ours.dense(), expected)


@pytest.mark.parametrize(("network", "loss", "fisher"), CASES)
def test_ekfac_is_that_of_curvlinops(network, loss, fisher):
    model, x, y = problem(network, loss)
    # Eigenbases are not unique in the null space of a factor, where gradients vanish.
    expected = theirs(curvlinops.EKFACLinearOperator, model, x, y, loss, fisher, "expand")
    blocks = captured(model, x, y, loss, fisher=fisher, kind="ekfac")
    parts = []
    for block in blocks:
        U = torch.kron(block.inverse["outputs_basis"], block.inverse["inputs_basis"])
        matrix = U @ torch.diag(block.average["scales"].flatten()) @ U.T
        if "bias" in block.params:
            o, i = block.average["scales"].shape
            order = torch.arange(o * i).view(o, i)
            order = torch.cat([order[:, :-1].flatten(), order[:, -1]])
            matrix = matrix[order][:, order]
        parts.append(DenseOperator(matrix))
    torch.testing.assert_close(BlockDiagonalOperator(parts).dense(), expected)
