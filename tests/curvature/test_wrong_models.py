"""Models and losses that cannot be differentiated, or are not a mean over samples, raise."""

import pytest
import torch
from curvature.networks import labels, mlp, noise, vectors
from torch import nn
from torch.nn import functional

from ritz.curvature import Risk, fisher, gradient_covariance, hessian

CE = functional.cross_entropy
NAN = float("nan")


@pytest.fixture
def model():
    return mlp().double()


def test_a_loss_that_cannot_be_differentiated_twice_raises(model):
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.mean()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, slope):
            raise RuntimeError("no derivative")

    risk = Risk(model, lambda outputs, target: Once.apply(outputs), vectors(4))
    with pytest.raises(RuntimeError, match="no derivative"):
        hessian(risk) @ risk.theta


def test_a_model_on_the_meta_device_raises(model):
    with pytest.raises(ValueError, match=r"must be on one device, got \['meta'\]"):
        Risk(model.to("meta"), CE, vectors(4))


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_a_parameter_that_is_not_finite_is_named(model, value):
    name, last = list(model.named_parameters())[-1]
    last.data[1] = value
    line = f"parameter '{name}' must be finite, got 1 NaN or Inf of {last.numel()} entries"
    with pytest.raises(ValueError, match=line):
        Risk(model, CE, vectors(4))


def test_a_model_that_returns_several_outputs_raises_where_one_is_needed(model):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            return self.net(x), self.net(x)

    with pytest.raises(TypeError, match="must return one tensor for this loss, got tuple"):
        Risk(Twice(), CE, vectors(4))
    risk = Risk(Twice(), lambda outputs, target: CE(outputs[0], target), vectors(4))
    with pytest.raises(ValueError, match="a row for each of 4 samples, got tuple"):
        fisher(risk, kind="empirical")
    flat = Risk(model, CE, [(noise(2, 5, 3), labels(3, 2, 5))],
                forward=lambda model, b: (model(b[0]).flatten(0, 1), b[1].flatten()))  # fmt: skip
    with pytest.raises(ValueError, match=r"each of 2 samples, got \(10, 3\)"):
        gradient_covariance(flat)


def test_class_weights_that_hardly_change_the_loss_raise(model):
    # At equal outputs every weighted mean is the same, and derivatives are not.
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1]).double())
    with pytest.raises(ValueError, match=r"derivatives of norm .* differ by"):
        fisher(Risk(model, weighted, vectors(8)), kind="empirical")


class Looked(nn.Module):
    """The mean of rows of a table."""

    def __init__(self, **options):
        super().__init__()
        self.table, self.last = nn.Embedding(5, 4, **options).double(), nn.Linear(4, 3).double()

    def forward(self, ids):
        return self.last(self.table(ids).mean(1))


def test_a_model_that_changes_its_parameters_raises():
    data = [(labels(5, 4, 2), labels(3, 4))]
    with torch.random.fork_rng(), pytest.raises(ValueError, match="does it use max_norm"):
        Risk(Looked(max_norm=0.1), CE, data)


@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_sparse_and_scaled_embeddings_have_plain_gradients(option):
    data = [(labels(5, 4, 2), labels(3, 4))]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        one, plain = Looked(**{option: True}), Looked()
    plain.load_state_dict(one.state_dict())
    found, expected = Risk(one, CE, data), Risk(plain, CE, data)
    torch.testing.assert_close(found.gradient(), expected.gradient())
    torch.testing.assert_close(hessian(found).dense(), hessian(expected).dense())


def test_a_loss_that_is_a_sum_raises():
    def summed(outputs, target):
        return torch.nn.functional.cross_entropy(outputs, target, reduction="sum")

    with pytest.raises(ValueError, match=r"mean over a batch, but it seems to be a sum"):
        Risk(mlp().double(), summed, vectors(5, 2))
