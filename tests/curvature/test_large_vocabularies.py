"""Cross-entropy in chunks: exact derivatives, and the memory of large vocabularies."""

import pytest
import torch
from curvature.networks import noise
from torch import nn
from torch.autograd import gradcheck
from torch.func import grad, jvp, vjp, vmap
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

import ritz
from ritz._core import cross_entropy as chunks
from ritz._core.cross_entropy import Tuning, chunked_entropy, chunked_hessian
from ritz.curvature import _adapter
from ritz.curvature._tracing import nbytes

VOCABULARY, TOKENS = 40, 6


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "TUNING", Tuning(large=10, chunk=2 * VOCABULARY))


def case(*shape):
    outputs, rng = noise(*shape), torch.Generator().manual_seed(1)
    labels = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=rng)
    labels.view(-1)[1] = -100
    return outputs, labels, noise(*shape, seed=2)


@pytest.mark.usefixtures("small_chunks")
def test_products_of_nearly_certain_labels_keep_their_digits_in_float32():
    outputs, labels, tangent = (each[:3] for each in case(5, 40))
    labels = labels.clamp_min(0)
    outputs = outputs.scatter(1, labels[:, None], 20.0).float()
    tangent = tangent.float()

    found = chunked_hessian(outputs, labels, tangent, -100, 0.0)

    exact = chunked_hessian(outputs.double(), labels, tangent.double(), -100, 0.0)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=0)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("shape", [(5, 40), (3, 40, 7), (2, 40, 3, 3), (9, 4)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_value_and_derivatives_are_those_of_torch(shape, smoothing):
    outputs, labels, tangent = case(*shape)

    def expected(f):
        return cross_entropy(f, labels, label_smoothing=smoothing)

    def found(f):
        return chunked_entropy(f, labels, -100, smoothing)

    def products_of(function, v):
        gradient = grad(function)
        return jvp(gradient, (outputs,), (v,))[1], vjp(gradient, outputs)[1](v)[0]

    forward, reverse = products_of(found, tangent)
    hessian, _ = products_of(expected, tangent)
    pair = torch.stack([tangent, tangent.flip(0)])
    mapped = vmap(lambda v: products_of(found, v)[0])(pair)
    torch.testing.assert_close(found(outputs), expected(outputs))
    torch.testing.assert_close(grad(found)(outputs), grad(expected)(outputs))
    torch.testing.assert_close(forward, hessian)
    torch.testing.assert_close(reverse, hessian)
    torch.testing.assert_close(mapped[0], hessian)
    torch.testing.assert_close(mapped[1], products_of(expected, tangent.flip(0))[0])
    torch.testing.assert_close(chunked_hessian(outputs, labels, tangent, -100, smoothing), hessian)
    # The rule of the factor that a loss is multiplied with.
    torch.testing.assert_close(
        products_of(lambda f: found(f).square(), tangent),
        products_of(lambda f: expected(f).square(), tangent),
    )
    if outputs.numel() < 50:
        assert gradcheck(found, (outputs.clone().requires_grad_(),), check_forward_ad=True)


class LanguageModel(nn.Module):
    """A decoder without attention that returns its own loss."""

    def __init__(self, vocabulary=VOCABULARY):
        super().__init__()
        self.table, self.inner = nn.Embedding(vocabulary, 4), nn.Linear(4, 3)
        self.head, self.num_losses = nn.Linear(3, vocabulary), 0

    def forward(self, ids, labels=None):
        logits = self.head(torch.tanh(self.inner(self.table(ids))))
        if labels is None:
            return {"logits": logits}
        self.num_losses += 1
        shifted = logits[:, :-1].flatten(0, 1)
        return {"logits": logits, "loss": cross_entropy(shifted, labels[:, 1:].flatten())}


def language_risk(count=3, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LanguageModel().double()
    ids = torch.randint(0, VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, 3:] = -100
    return ritz.Risk(model, None, [{"ids": ids, "labels": labels}], **options), model


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_half_precision_outputs_have_their_loss_in_float32_as_under_autocast(
    dtype, smoothing, monkeypatch
):
    monkeypatch.setattr(chunks, "TUNING", Tuning(large=10, chunk=2**16))
    outputs, labels, tangent = case(70_000, 4)  # more labels than the largest float16
    outputs, tangent = outputs.to(dtype).requires_grad_(), tangent.to(dtype)

    value = chunked_entropy(outputs, labels, -100, smoothing)
    (gradient,) = torch.autograd.grad(value * 1024, outputs, create_graph=True)
    (product,) = torch.autograd.grad(gradient, outputs, tangent)

    wide = outputs.detach().float().requires_grad_()
    expected = cross_entropy(wide, labels, label_smoothing=smoothing)
    torch.testing.assert_close(value, expected)
    (exact,) = torch.autograd.grad(expected * 1024, wide, create_graph=True)
    torch.testing.assert_close(gradient, exact.to(dtype))
    (exact,) = torch.autograd.grad(exact, wide, tangent.float())
    assert (product - exact).norm() < 5 * torch.finfo(dtype).eps * exact.norm()
    torch.testing.assert_close(jvp(lambda f: chunked_entropy(f, labels, -100, smoothing),
                                   (outputs.detach(),), (tangent,))[1],
                               jvp(lambda f: cross_entropy(f, labels, label_smoothing=smoothing),
                                   (wide.detach(),), (tangent.float(),))[1])  # fmt: skip


@pytest.mark.parametrize("loss_fn", [cross_entropy, binary_cross_entropy_with_logits, mse_loss])
def test_training_on_large_outputs_under_autocast_has_the_loss_of_torch(loss_fn, monkeypatch):
    monkeypatch.setattr(chunks, "TUNING", Tuning(large=10))
    monkeypatch.setattr(_adapter, "ENTROPY", Tuning(alone=10))
    outputs, labels, _ = case(5, 40)
    outputs = outputs.bfloat16()
    target = labels if loss_fn is cross_entropy else outputs.float().sigmoid()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _adapter.Adapter(nn.Linear(1, 1), loss_fn, None).loss(outputs, target)
        expected = loss_fn(outputs, target)

    torch.testing.assert_close(loss, expected)


def test_matrices_of_a_language_model_do_not_depend_on_the_chunks(monkeypatch):
    whole, _ = language_risk()
    unit = torch.eye(whole.space.size, dtype=torch.float64)
    expected = [ritz.hessian(whole) @ unit, ritz.ggn(whole) @ unit, whole.gradient()]
    drawn = ritz.fisher(whole) @ unit

    monkeypatch.setattr(chunks, "TUNING", Tuning(large=10, chunk=2 * VOCABULARY))
    risk, _ = language_risk()

    for engine in ("linearized", "eager"):
        found = [ritz.hessian(risk, engine=engine) @ unit, ritz.ggn(risk, engine=engine) @ unit]
        torch.testing.assert_close([*found, risk.gradient()], expected)
    torch.testing.assert_close(ritz.fisher(risk) @ unit, drawn)
    assert risk.loss() == pytest.approx(whole.loss(), rel=1e-14)


@pytest.mark.usefixtures("small_chunks")
def test_a_trace_keeps_one_tensor_of_the_size_of_the_outputs():
    risk, _ = language_risk(count=100)
    size = 100 * TOKENS * VOCABULARY * 8
    for make in (ritz.hessian, ritz.ggn):
        op = make(risk)
        op @ risk.theta
        ((trace,),) = op.products._choice.traces.values()
        (_, context, _) = next(risk.contexts())
        kept = nbytes(trace.primal((risk.params, context)), beside=[risk.theta])
        assert size <= kept < 1.6 * size  # the gradient in the outputs, and the hidden states


def test_large_outputs_are_multiplied_one_column_at_a_time(monkeypatch):
    risk, _ = language_risk()
    assert ritz.hessian(risk).block_size == 8
    monkeypatch.setattr(chunks, "TUNING", Tuning(alone=3 * TOKENS * VOCABULARY - 1))
    assert ritz.hessian(risk).block_size == 1


def test_the_model_does_not_compute_its_own_loss_again():
    risk, model = language_risk()
    seen = model.num_losses

    ritz.hessian(risk) @ risk.theta
    risk.gradient()

    assert model.num_losses == seen
    assert risk.num_samples == 2 + 2 * (TOKENS - 1)


def test_a_model_that_needs_its_labels_gets_them():
    class Demanding(LanguageModel):
        def forward(self, ids, labels):
            return super().forward(ids, labels)

    model = Demanding().double()
    ids = torch.arange(12).view(2, 6)
    risk = ritz.Risk(model, None, [{"ids": ids, "labels": ids}])
    assert risk.loss() == pytest.approx(float(model(ids, ids)["loss"].detach()), rel=1e-12)
