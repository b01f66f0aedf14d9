"""The edge of stability of an optimiser: just below it steps shrink, just above it they grow."""

import pytest
import torch
from torch import nn

import ritz
from ritz.optim._edge import edge

VALUES = torch.tensor([4.0, 1.5, 0.3, -0.0], dtype=torch.float64)


class Quadratic(nn.Module):
    """The loss w'Hw / 2 with a rotated matrix; the inputs do not matter."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(4, 4, dtype=torch.float64, generator=generator)
        vectors = torch.linalg.qr(start)[0]
        self.register_buffer("matrix", vectors @ torch.diag(VALUES) @ vectors.T)
        self.first = nn.Parameter(1e-4 * torch.tensor([1.0, -0.5], dtype=torch.float64))
        self.second = nn.Parameter(1e-4 * torch.tensor([0.3, 0.8], dtype=torch.float64))

    def forward(self, x):
        w = torch.cat([self.first, self.second])
        return 0.5 * (w @ self.matrix @ w) + 0.0 * x.sum(1)


def risk_of(model):
    batch = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1)
    return ritz.Risk(model, lambda outputs, target: outputs.mean(), [batch])


def loss(model):
    return model(torch.zeros(1, 1)).sum()


def ratio(optimizer, risk):
    """Return the curvature over the edge."""
    found = edge(optimizer, risk)
    ones = torch.ones(4, dtype=torch.float64)
    root, shift = (found.square * ones).sqrt(), found.shift * ones
    matrix = root[:, None] * (risk.model.matrix + torch.diag(shift)) * root
    return float(torch.linalg.eigvalsh(matrix)[-1]) / found.limit


def freeze_moments(optimizer):
    """Give Adam a second moment that stays, long after its corrections have ended."""
    steps = 1e20
    for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        square = torch.tensor([0.04, 2.5], dtype=torch.float64) * (1 + index)
        state = {"step": torch.tensor(steps), "exp_avg": torch.zeros_like(p)}
        optimizer.state[p] = state | {"exp_avg_sq": square, "max_exp_avg_sq": square.clone()}


BETAS = {"betas": (0.8, 1 - 1e-15), "eps": 1e-3}
ADAM = {"frozen": True, **BETAS}
CASES = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.6, "dampening": 0.6, "weight_decay": 0.7}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.5, "nesterov": True, "weight_decay": 0.5}),
    (torch.optim.Adam, ADAM),
    (torch.optim.Adam, {**ADAM, "weight_decay": 0.5}),
    (torch.optim.Adam, {**ADAM, "amsgrad": True}),
    (torch.optim.AdamW, {**ADAM, "weight_decay": 0.1}),
    (ritz.optim.Padam, {**ADAM, "partial": 0.125, "weight_decay": 0.0}),
    (ritz.optim.PadamW, {**ADAM, "partial": 0.25, "weight_decay": 0.1}),
    (ritz.optim.PadamW, {**ADAM, "partial": 0.25, "form": "published"}),
    (ritz.optim.PadamW, {**ADAM, "partial": 0.25, "amsgrad": True}),
    (ritz.optim.GadamX, {**ADAM, "weight_decay": 0.3}),
    (ritz.optim.DampedAdamW, {"frozen": True, "betas": BETAS["betas"], "delta": 0.3}),
]


def make(kind, settings, model, rate, factor):
    """Return an optimiser whose two groups have different rates."""
    settings = dict(settings)
    frozen = settings.pop("frozen", False)
    groups = [
        {"params": [model.first], "lr": rate},
        {"params": [model.second], "lr": factor * rate},
    ]
    optimizer = kind(groups, lr=rate, **settings)
    if frozen:
        freeze_moments(optimizer)
    return optimizer


@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_steps_shrink_below_the_edge_and_grow_above_it(kind, settings, factor):
    low, high, risk = 1e-6, 30.0, risk_of(Quadratic())
    for _ in range(50):  # the learning rate of a ratio of one
        rate = (low + high) / 2
        above = ratio(make(kind, settings, risk.model, rate, factor), risk) > 1
        low, high = (low, rate) if above else (rate, high)
    sizes = []
    for scale in (0.98, 1.02):
        model = Quadratic()
        optimizer = make(kind, settings, model, scale * rate, factor)
        for step in range(1, 101):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
            if step == 60:
                middle = float(loss(model).detach())
        sizes.append((middle, float(loss(model).detach())))
    (below_middle, below), (above_middle, above) = sizes
    assert below < 0.5 * below_middle
    assert above > 10 * above_middle


def test_the_threshold_of_sgd_is_one_of_the_largest_eigenvalue_itself():
    model = Quadratic()
    plain = torch.optim.SGD(model.parameters(), lr=0.25)
    assert edge(plain, risk_of(model)).threshold == 8.0
    heavy = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    # 2 (1 + rho) / alpha - gamma
    assert edge(heavy, risk_of(model)).threshold == pytest.approx(38 - 0.5)
    adam = make(torch.optim.Adam, ADAM, model, 0.1, 1.0)
    found = edge(adam, risk_of(model))
    assert found.threshold is None
    root = found.square.sqrt()
    product = found.operator(ritz.hessian(risk_of(model))).dense()
    torch.testing.assert_close(product, root[:, None] * model.matrix * root)


def test_the_correction_of_the_mean_raises_the_rate_of_early_steps():
    model = Quadratic()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.9, 0.99), eps=0.0)
    loss(model).backward()
    optimizer.step()
    # After one step m_hat = g and v_hat = g^2: S^2 = alpha / (2 (1 - beta_1) |g|).
    g = torch.cat([model.first.grad, model.second.grad])
    expected = 0.1 / (2 * 0.1 * g.abs())
    found = edge(optimizer, risk_of(model))
    torch.testing.assert_close(found.square, expected)
    assert found.limit == pytest.approx(19)


def mixed(model):
    groups = [{"params": [model.first], "momentum": 0.9}, {"params": [model.second]}]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    "make",
    [
        mixed,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, maximize=True),
        lambda model: torch.optim.NAdam(model.parameters()),
        lambda model: torch.optim.RMSprop(model.parameters()),
        lambda model: torch.optim.LBFGS(model.parameters()),
        lambda model: torch.optim.Adam(model.parameters()),  # before its first step
        lambda model: torch.optim.SGD([model.first], lr=0.1),
        lambda model: ritz.optim.Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)),
    ],
)
def test_optimisers_without_a_known_edge_have_none(make):
    model = Quadratic()
    assert edge(make(model), risk_of(model)) is None


def test_steps_of_length_zero_have_no_edge():
    model = Quadratic()
    assert edge(torch.optim.SGD(model.parameters(), lr=0.0), risk_of(model)) is None
    assert edge(ritz.optim.SpectralSGD(model.parameters()), risk_of(model)) is None
