"""Operations without a second derivative in torch, and models that write to their buffers."""

import pytest
import torch
from curvature.networks import labels, noise
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

import ritz

IDS = torch.tensor([[0, 2, 5], [2, 2, 1], [4, 0, 3], [1, 5, 2], [2, 2, 2]])
FLAT, OFFSETS = torch.tensor([0, 3, 5, 2, 1, 1, 4, 2, 0, 5, 3]), torch.tensor([0, 2, 2, 6, 9])
WEIGHTS = 1 + noise(5, 3).abs()
BAGS = {
    "sum": ((IDS,), {"mode": "sum"}),
    "mean": ((IDS,), {"mode": "mean"}),
    "max": ((IDS,), {"mode": "max"}),
    "padding sum": ((IDS,), {"mode": "sum", "padding_idx": 2}),
    "padding mean": ((IDS,), {"mode": "mean", "padding_idx": 2}),
    "padding max": ((IDS,), {"mode": "max", "padding_idx": 2}),
    "offsets sum": ((FLAT, OFFSETS), {"mode": "sum"}),
    "offsets mean": ((FLAT, OFFSETS), {"mode": "mean"}),
    "offsets max": ((FLAT, OFFSETS), {"mode": "max"}),
    "last offset": (
        (FLAT, torch.tensor([0, 2, 2, 6, 9, 11])),
        {"mode": "mean", "include_last_offset": True},
    ),
    "weights": ((IDS, None, WEIGHTS), {"mode": "sum"}),
    "sparse": ((IDS,), {"mode": "sum", "sparse": True}),
}


class Bag(nn.Module):
    def __init__(self, inputs, options):
        super().__init__()
        self.inputs = inputs
        self.bag, self.head = nn.EmbeddingBag(6, 3, **options), nn.Linear(3, 3)

    def forward(self, rows):
        return self.head(torch.tanh(self.bag(*self.inputs)))[: len(rows)]


class Hard(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.first, self.second, self.act = nn.Linear(4, 3), nn.Linear(3, 3), act

    def forward(self, x):
        return self.second(self.act(self.first(x)) ** 2)


HARD = {
    "module": nn.Hardsigmoid(),
    "function": functional.hardsigmoid,
    "in place": lambda x: functional.hardsigmoid(x * 2, inplace=True),
}


def made(kind, *args):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(*args).double()


def differences(model, data):
    """Return the Hessian by central differences of gradients of torch."""
    weights, (x, y) = list(model.parameters()), data
    sizes = [weight.numel() for weight in weights]
    centre = torch.cat([weight.detach().flatten() for weight in weights])

    def gradient(theta):
        with torch.no_grad():
            for weight, part in zip(weights, theta.split(sizes), strict=True):
                weight.copy_(part.view_as(weight))
        parts = torch.autograd.grad(cross_entropy(model(x), y), weights)
        return torch.cat([part.to_dense().flatten() for part in parts])

    steps = 1e-5 * torch.eye(len(centre), dtype=torch.float64)
    rows = [(gradient(centre + step) - gradient(centre - step)) / 2e-5 for step in steps]
    gradient(centre)  # the weights as they were
    return torch.stack(rows)


@pytest.mark.parametrize("kind", BAGS)
def test_hessians_of_embedding_bags_are_exact(kind):
    model, data = made(Bag, *BAGS[kind]), (torch.zeros(5, 1), labels(3, 5))
    risk = ritz.Risk(model, cross_entropy, [data])
    engine = "linearized" if kind in ("padding max", "offsets mean") else "eager"  # tracing is slow
    op, unit = ritz.hessian(risk, engine=engine), torch.eye(risk.space.size, dtype=torch.float64)

    expected = differences(model, data)

    torch.testing.assert_close(op @ unit, expected, rtol=1e-6, atol=1e-8)
    assert risk.loss() == pytest.approx(float(cross_entropy(model(data[0]), data[1]).detach()))
    assert engine in op.products.plan


@pytest.mark.parametrize("kind", HARD)
def test_hessians_of_hardsigmoid_are_exact(kind):
    model, data = made(Hard, HARD[kind]), (noise(7, 4), labels(3, 7))
    risk = ritz.Risk(model, cross_entropy, [data])
    op, unit = ritz.hessian(risk), torch.eye(risk.space.size, dtype=torch.float64)

    torch.testing.assert_close(op @ unit, differences(model, data), rtol=1e-6, atol=1e-8)
    assert op.products.plan == "forward over reverse, linearized"


class Counting(nn.Module):
    """A network that counts its calls and averages its activations, also in eval mode."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        self.write(hidden)
        return self.second(hidden)

    def write(self, hidden): ...


class Added(Counting):
    def write(self, hidden):
        self.calls += 1


class Averaged(Counting):
    def write(self, hidden):
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)


class Largest(Counting):
    def write(self, hidden):
        self.mean.copy_(torch.maximum(self.mean, hidden.abs().amax(0)))


class Read(Counting):
    def write(self, hidden):
        self.calls.add_(1)
        self.last = int(self.calls)


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        (Added, "eager"),
        (Averaged, "linearized"),
        (Averaged, "eager"),
        (Largest, "eager"),
        (Read, "linearized"),
        (Read, "eager"),
    ],
)
def test_buffers_written_in_eval_mode_change_neither_products_nor_the_model(kind, engine):
    data = [(noise(5, 4), labels(3, 5)), (noise(2, 4, seed=1), labels(3, 2))]
    plain, counting = made(Counting), made(kind)
    expected, risk = (ritz.Risk(model, cross_entropy, data) for model in (plain, counting))
    unit = torch.eye(risk.space.size, dtype=torch.float64)

    torch.testing.assert_close(risk.gradient(), expected.gradient())
    for make in (ritz.hessian, ritz.ggn):
        torch.testing.assert_close(make(risk, engine=engine) @ unit, make(expected) @ unit)
    assert int(counting.calls) == 0
    assert float(counting.mean.abs().sum()) == 0


def test_every_call_finds_the_buffers_as_they_were():
    class Growing(Counting):
        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    risk = ritz.Risk(made(Growing), cross_entropy, [(noise(5, 4), labels(3, 5))])
    plain = ritz.Risk(made(Counting), cross_entropy, [(noise(5, 4), labels(3, 5))])
    assert [risk.loss() for _ in range(3)] == [plain.loss()] * 3


# Losses that call functions of torch, so that the library does not know them as such.
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5])
NESTED = {
    "function": lambda f, y: functional.cross_entropy(f, y),
    "module": lambda f, y: nn.CrossEntropyLoss()(f, y),
    "class weights": nn.CrossEntropyLoss(CLASS_WEIGHTS),
    "ignored": lambda f, y: functional.cross_entropy(f, y, CLASS_WEIGHTS.to(f), ignore_index=1),
    "sum": lambda f, y: functional.cross_entropy(f, y, reduction="sum") / len(y),
    "terms": lambda f, y: functional.cross_entropy(f, y, reduction="none").mean(),
    "log softmax": lambda f, y: -functional.log_softmax(f, dim=-1).gather(1, y[:, None]).mean(),
    "method": lambda f, y: -f.log_softmax(1)[torch.arange(len(y)), y].mean(),
    "torch": lambda f, y: functional.nll_loss(torch.log_softmax(f.T, 0).T, y),
    "binary": lambda f, y: functional.binary_cross_entropy_with_logits(
        f, functional.one_hot(y, 3).to(f), CLASS_WEIGHTS.to(f), pos_weight=CLASS_WEIGHTS.to(f)
    ),
    "log-probabilities": nn.NLLLoss(),
    "loss of the model": None,
}


@pytest.mark.parametrize("name", NESTED)
def test_cross_entropy_inside_a_loss_or_model_keeps_its_digits_in_float32(name):
    y = labels(3, 8)
    body = nn.Linear(3, 3)
    with torch.no_grad():
        # Every label is certain: its odds are about e^36.
        x = functional.one_hot(y, 3) + 0.02 * noise(8, 3, seed=2)
        body.weight.copy_(36 * torch.eye(3) - 18)
    model = nn.Sequential(body, nn.LogSoftmax(1)) if name == "log-probabilities" else body
    forward = (
        (lambda m, b: functional.cross_entropy(m(b[0]), b[1])) if NESTED[name] is None else None
    )

    def values(precision):
        loss_fn = NESTED[name]
        if isinstance(loss_fn, nn.CrossEntropyLoss):
            loss_fn = nn.CrossEntropyLoss(CLASS_WEIGHTS.to(getattr(torch, precision)))
        risk = ritz.Risk(model, loss_fn, (x, y), forward=forward, precision=precision)
        ops = [ritz.hessian(risk, engine="eager")]
        ops += [] if loss_fn is None else [ritz.ggn(risk, engine="eager")]
        products = [op @ (risk.theta + 0.1) for op in ops]
        return [torch.tensor([risk.loss()]), risk.gradient(), *products]

    for found, exact in zip(values("float32"), values("float64"), strict=True):
        assert (found - exact).norm() < 1e-5 * exact.norm()
    assert values("float64")[0] < 1e-6


def half_precision(f, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.binary_cross_entropy_with_logits(
            f @ torch.eye(3), functional.one_hot(y[:, 0], 3).float()
        )


ARGUMENTS = {
    "several labels of the same outputs": lambda f, y: torch.vmap(
        functional.cross_entropy, (None, 1)
    )(f, y).mean(),
    "no classes": lambda f, y: f.square().mean() + f[:, :0].log_softmax(1).sum(),
    "autocast": half_precision,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_cross_entropy_inside_a_loss_takes_the_arguments_that_torch_takes(name):
    inputs, target = noise(8, 4).float(), torch.stack([labels(3, 8), labels(3, 8).flip(0)], 1)
    model = nn.Linear(4, 3)

    found = ritz.Risk(model, ARGUMENTS[name], (inputs, target)).loss()

    expected = ARGUMENTS[name](model(inputs), target).detach()
    assert found == pytest.approx(float(expected), rel=1e-6)


def test_log_softmax_returns_float32_where_autocast_does(monkeypatch):
    # On a GPU log_softmax is one of the functions that autocast computes in float32.
    plain = functional.log_softmax
    monkeypatch.setattr(functional, "log_softmax", lambda f, dim: plain(f.float(), dim))
    inputs, target = noise(8, 4).float(), labels(3, 8)

    def loss_fn(f, y):
        return functional.nll_loss(f.bfloat16().log_softmax(1), y)

    model = nn.Linear(4, 3)
    expected = functional.nll_loss(plain(model(inputs).bfloat16().float(), 1), target).detach()
    assert ritz.Risk(model, loss_fn, (inputs, target)).loss() == pytest.approx(float(expected))
