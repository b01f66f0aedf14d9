"""Products are computed in parts if memory is short; their roundoff is measured."""

import pytest
import torch
from curvature.networks import case, cross_entropy, labels, noise
from torch import nn
from torch.nn import functional

from ritz.curvature import Risk, fisher, ggn, hessian
from ritz.curvature._products import Products
from ritz.curvature._shared import gradient_roundoff
from ritz.spectra import trace


def limited(monkeypatch, op, *, samples, columns=1):
    """Let a product with more samples or columns than these run out of memory."""
    whole = op.products._part

    def part(vectors, key, context):
        if len(context.batch[0]) > samples or op.products.block_size > columns:
            raise torch.OutOfMemoryError("no more")
        return whole(vectors, key, context)

    monkeypatch.setattr(op.products, "_part", part)
    return op


@pytest.mark.parametrize("engine", ["linearized", "eager"])
def test_blocks_and_batches_are_split_to_fit_memory(monkeypatch, engine):
    expected = hessian(case("mlp").risk(), engine="eager").dense()
    op = limited(monkeypatch, hessian(case("mlp").risk(), engine=engine), samples=2)
    torch.testing.assert_close(op.dense(), expected)
    assert op.products.plan.endswith("2 samples at a time to fit memory")
    assert op.products.block_size == 1


def test_blocks_are_split_before_batches(monkeypatch):
    op = limited(monkeypatch, hessian(case("mlp").risk(), engine="eager"), samples=9, columns=3)
    op @ torch.ones(op.shape[0], 6, dtype=torch.float64)
    assert op.products.block_size == 3
    assert "samples at a time" not in op.products.plan


def test_drawn_labels_are_split_with_their_batch(monkeypatch):
    expected = fisher(case("mlp").risk(), num_draws=3, engine="eager").dense()
    op = fisher(case("mlp").risk(), num_draws=3, engine="eager")
    torch.testing.assert_close(limited(monkeypatch, op, samples=2).dense(), expected)


def test_batches_with_batch_statistics_are_not_split(monkeypatch):
    vector = torch.ones(case("cnn train").risk().space.size, dtype=torch.float64)
    op = limited(monkeypatch, hessian(case("cnn train").risk(), engine="eager"), samples=2)
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        op @ vector


def test_batches_of_a_loss_that_is_no_mean_over_samples_are_not_split(monkeypatch):
    target = torch.tensor([0, 1, -100, -100, -100, -100])
    model = nn.Linear(3, 2).double()
    data = [(torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator()), target)]
    op = hessian(Risk(model, functional.cross_entropy, data), engine="eager")
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        limited(monkeypatch, op, samples=4) @ torch.ones(8, dtype=torch.float64)


def test_the_cache_has_a_budget():
    risk = case("mlp").risk()
    with pytest.raises(ValueError, match="memory must be at least 0"):
        hessian(risk, memory=-1)
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        hessian(risk, block_size=0)


def test_batches_with_class_weights_are_not_split(monkeypatch):
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64))
    op = hessian(Risk(case("mlp").model, loss, case("mlp").data), engine="eager")
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        limited(monkeypatch, op, samples=2) @ torch.ones(op.shape[0], dtype=torch.float64)


@pytest.mark.parametrize("matrix", [hessian, ggn])
def test_the_error_of_a_trace_holds_the_digits_that_a_loss_loses_in_float32(matrix):
    y = labels(3, 8)
    model = nn.Linear(3, 3)
    with torch.no_grad():
        # Every label is certain: its odds are about e^11.
        x = functional.one_hot(y, 3) + 0.02 * noise(8, 3, seed=2)
        model.weight.copy_(11 * torch.eye(3) - 5)

    def measure(precision):
        # Its formula has log sum exp, in which p - 1 cancels.
        risk = Risk(model, cross_entropy, (x, y), precision=precision)
        op = matrix(risk, engine="eager")
        return op, trace(op)

    (op, found), (exact_op, exact) = measure("float32"), measure("float64")

    gap = abs(float(found) - float(exact))
    assert 1e-4 * float(exact) < gap <= float(found.error()) < 0.5 * float(exact)
    assert exact_op.roundoff == torch.finfo(torch.float64).eps
    assert (op + op).roundoff == (2 * op).roundoff == op.roundoff > 1e-4


class SinglePrecision(nn.Linear):
    def forward(self, x):
        assert x.dtype == torch.float32
        return super().forward(x)


@pytest.mark.parametrize("model", [SinglePrecision, nn.Linear])
def test_a_trace_needs_neither_float64_nor_its_memory(monkeypatch, model):
    risk = Risk(model(3, 3), cross_entropy, (noise(8, 3).float(), labels(3, 8)))
    op, whole = hessian(risk, engine="eager"), Products._part

    def part(products, vectors, key, context):
        if vectors.dtype == torch.float64:
            raise torch.OutOfMemoryError("no more")
        return whole(products, vectors, key, context)

    monkeypatch.setattr(Products, "_part", part)

    assert float(trace(op)) > 0
    assert op.roundoff == torch.finfo(torch.float32).eps
    assert gradient_roundoff(risk)[0] == 0 or model is nn.Linear


def test_the_roundoff_is_measured_on_parts_of_a_batch_that_fit_memory(monkeypatch):
    risk = Risk(nn.Linear(3, 3), cross_entropy, (noise(8, 3).float(), labels(3, 8)))
    op, whole, sizes = hessian(risk, engine="eager"), Products._part, []

    def part(products, vectors, key, context):
        sizes.append(context.size)
        if context.size > 2:
            raise torch.OutOfMemoryError("no more")
        return whole(products, vectors, key, context)

    monkeypatch.setattr(Products, "_part", part)
    op @ risk.theta
    sizes.clear()

    assert op.products.roundoff() > 0
    assert sizes == [2] * 8  # four parts in each precision


def test_the_roundoff_of_a_known_loss_takes_no_product(monkeypatch):
    op = hessian(
        Risk(case("mlp").model, nn.CrossEntropyLoss(), case("mlp").data, precision="float32")
    )
    monkeypatch.setattr(op.products, "roundoff", None)

    assert op.roundoff == torch.finfo(torch.float32).eps


def test_products_that_are_roundoff_in_float32_say_how_to_compute_them():
    target = labels(3, 8)
    # Every label is certain: its odds are about e^16.
    model, inputs = nn.Linear(3, 3), functional.one_hot(target, 3) + 0.02 * noise(8, 3, seed=2)
    with torch.no_grad():
        model.weight.copy_(16 * torch.eye(3) - 8)
    op = hessian(Risk(model, cross_entropy, (inputs, target), precision="float32"), engine="eager")

    with pytest.raises(RuntimeError, match=r"not symmetric.*pass precision='float64', or write"):
        op @ op.risk.theta
