"""Models that read numbers from tensors, as in ``if mask.all()``, are linearised with guards."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ritz


class Masked(nn.Module):
    """Takes another path if a mask has zeros, as stock language models do."""

    def __init__(self, generator):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        for weight in self.parameters():
            nn.init.normal_(weight, generator=generator)
        self.calls = 0

    def forward(self, x, mask):
        self.calls += 1
        hidden = torch.tanh(self.first(x))
        if not mask.all():
            hidden = hidden * mask
        return self.second(hidden)


def batch(rng, *, masked, count=5):
    mask = torch.ones(count, 4, dtype=torch.float64)
    if masked:
        mask[:, masked:] = 0
    x = torch.randn(count, 3, generator=rng, dtype=torch.float64)
    return x, mask, torch.arange(count) % 2


def dense(model, batches):
    risk = ritz.Risk(model, cross_entropy, batches)
    eager = ritz.hessian(risk, engine="eager")
    return eager @ torch.eye(risk.space.size, dtype=torch.float64)


@pytest.mark.parametrize("order", [(0, 2, 0, 3), (2, 0)])
def test_batches_on_either_path_have_their_own_trace_and_exact_products(rng, order):
    model = Masked(rng)
    batches = [batch(rng, masked=columns) for columns in order]
    op = ritz.hessian(ritz.Risk(model, cross_entropy, batches), engine="linearized")

    product = op @ torch.eye(op.shape[0], dtype=torch.float64)

    torch.testing.assert_close(product, dense(model, batches))
    assert "linearized" in op.products.plan
    # Two paths, one shape of batch: two traces.
    assert [len(traces) for traces in op.products._traces.values()] == [2]
    calls = model.calls
    op @ torch.ones(op.shape[0], dtype=torch.float64)
    assert model.calls == calls  # the model is not evaluated again


def test_a_batch_on_an_untraceable_path_is_eager_and_exact(rng):
    class Rare(Masked):
        def forward(self, x, mask):
            if not mask.all():
                x = x[mask.bool().all(1)]  # a shape that depends on values
                return self.second(torch.tanh(self.first(x))).repeat(5, 1)[:5]
            return super().forward(x, mask)

    model = Rare(rng)
    partial = batch(rng, masked=0)
    partial[1][1] = 0
    batches = [batch(rng, masked=0), partial]
    op = ritz.hessian(ritz.Risk(model, cross_entropy, batches))

    product = op @ torch.eye(op.shape[0], dtype=torch.float64)

    torch.testing.assert_close(product, dense(model, batches))
    assert "not linearized for all batches" in op.products.plan


def test_numbers_read_from_parameters_are_guards_too(rng):
    class Gated(Masked):
        def forward(self, x, mask):
            scale = float(self.first.weight.detach().abs().max())
            return super().forward(x / max(scale, 1.0), mask)

    model, batches = Gated(rng), [batch(rng, masked=0)]
    op = ritz.hessian(ritz.Risk(model, cross_entropy, batches), engine="linearized")

    product = op @ torch.eye(op.shape[0], dtype=torch.float64)

    torch.testing.assert_close(product, dense(model, batches))
