"""The loss of a batch as the mean over its samples, checked on all batches."""

from functools import partial

import pytest
import torch
from curvature.networks import labels, mlp, noise, vectors
from torch import nn
from torch.nn import functional

from ritz.curvature import Risk, fisher, gradient_covariance, gradient_statistics, hessian
from ritz.measures import curvature_variance
from ritz.training import evaluate

NOT_A_MEAN = "must be the mean of the losses of its samples, but .* in batch 1"
BY_SAMPLE = {
    "fisher": partial(fisher, kind="empirical"),
    "covariance": gradient_covariance,
    "curvature variance": curvature_variance,
    "statistics": gradient_statistics,
}
WEIGHTS = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)


def batches(x, y, size=8):
    return list(zip(x.split(size), y.split(size), strict=True))


@pytest.mark.parametrize("call", BY_SAMPLE.values(), ids=BY_SAMPLE.keys())
@pytest.mark.parametrize("reverse", [False, True])
def test_class_weights_raise_if_the_first_batch_has_one_class(call, reverse):
    data = batches(noise(24, 3), torch.arange(24) // 10)  # 0 | 0 and 1 | 1 and 2
    risk = Risk(mlp().double(), nn.CrossEntropyLoss(weight=WEIGHTS), data[:: -1 if reverse else 1])
    with pytest.raises(ValueError, match="must be the mean of the losses of its samples"):
        call(risk)


@pytest.mark.parametrize("call", BY_SAMPLE.values(), ids=BY_SAMPLE.keys())
def test_a_mean_over_unmasked_elements_raises_if_a_later_batch_is_masked(call):
    def masked(outputs, target):
        kept = (target > -5).to(outputs)
        return (kept * (outputs - target).square()).sum() / kept.sum()

    x, y = noise(12, 3), noise(12, 3, seed=1)
    y[8, 1:] = -9.0
    risk = Risk(mlp().double(), masked, batches(x, y, 6))
    with pytest.raises(ValueError, match=f"{NOT_A_MEAN}.*use a loss without them"):
        call(risk)


def test_ignored_labels_of_later_batches_raise_if_samples_are_regrouped():
    y = labels(3, 12, 4)
    y[8, 1:] = -100
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    risk = Risk(model, nn.CrossEntropyLoss(), batches(noise(12, 4, 2), y, 6),
                forward=lambda model, batch: (model(batch[0]).transpose(1, 2), batch[1])
                )  # fmt: skip
    for call in (curvature_variance, gradient_statistics):
        with pytest.raises(ValueError, match=NOT_A_MEAN):
            call(risk)
    # A sample counts by its labels here, so the mean is that of the batch.
    values = torch.linalg.eigvalsh(gradient_covariance(risk, engine="eager").dense())
    assert float(values[0]) > -1e-13 * float(values[-1])


@pytest.mark.parametrize("call", BY_SAMPLE.values(), ids=BY_SAMPLE.keys())
def test_class_weights_raise_even_if_each_batch_has_one_class(call):
    data = batches(noise(24, 3), torch.arange(24) // 8)
    risk = Risk(mlp().double(), nn.CrossEntropyLoss(weight=WEIGHTS), data)
    with pytest.raises(ValueError, match="batches are weighted by their labels"):
        call(risk)


def ignoring_some(size, ignored):
    y = torch.arange(size) % 3
    y[: size // 2 : 2] = ignored  # unevenly over the batches
    return y


CROSS_ENTROPIES = {
    "ignored labels": functional.cross_entropy,
    "other ignored labels": nn.CrossEntropyLoss(ignore_index=1),
    "class weights": nn.CrossEntropyLoss(weight=WEIGHTS),
    "both": partial(functional.cross_entropy, weight=WEIGHTS),
}


@pytest.mark.parametrize("loss_fn", CROSS_ENTROPIES.values(), ids=CROSS_ENTROPIES.keys())
@pytest.mark.parametrize("sized", [7, 24])
def test_cross_entropy_does_not_depend_on_how_samples_are_batched(loss_fn, sized):
    model, x, y = (
        mlp().double(),
        noise(24, 3),
        ignoring_some(24, getattr(loss_fn, "ignore_index", -100)),
    )

    risk = Risk(model, loss_fn, (x, y), batch_size=sized)

    gradients = torch.autograd.grad(whole := loss_fn(model(x), y), list(model.parameters()))
    assert risk.loss() == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close(risk.gradient(), torch.cat([g.flatten() for g in gradients]))
    torch.testing.assert_close(
        hessian(risk).dense(), hessian(Risk(model, loss_fn, [(x, y)])).dense()
    )
    assert risk.loss() == pytest.approx(
        evaluate(model, batches(x, y, 5), loss_fn=loss_fn)["loss"], rel=1e-12
    )
    # A part of the batches is weighted in the same way.
    some = torch.arange(3, 20)
    assert risk.samples(some, batch_size=5).loss() == pytest.approx(
        loss_fn(model(x[some]), y[some]).item(), rel=1e-12
    )


def test_recomputed_statistics_count_samples_whose_labels_are_ignored():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double(), noise(24, 3)
    ignoring, plain = (
        Risk(model, functional.cross_entropy, (x, y), batch_size=8, batch_norm="recomputed")
        for y in (ignoring_some(24, -100), torch.arange(24) % 3)
    )
    for name in ("1.running_mean", "1.running_var"):
        assert torch.equal(ignoring.constants()[name], plain.constants()[name])


def test_tokens_of_padded_batches_of_several_lengths_have_equal_weights():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)).double()
    data = []
    for length, seed in ((6, 1), (3, 2)):
        tokens, y = labels(5, 4, length, seed=seed), labels(5, 4, length, seed=seed + 2)
        y[1, 2:] = -100
        data.append((tokens, y))

    risk = Risk(model, functional.cross_entropy, data,
                forward=lambda model, batch: (model(batch[0]).transpose(1, 2), batch[1]),
                count=lambda batch: int((batch[1] != -100).sum()))  # fmt: skip

    tokens, y = (torch.cat([part.flatten() for part in parts]) for parts in zip(*data, strict=True))
    whole = functional.cross_entropy(model(tokens), y)
    assert risk.loss() == pytest.approx(whole.item(), rel=1e-12)


def flat_entropy(outputs, target):
    return functional.cross_entropy(outputs.flatten(0, 1), target.flatten())


def contrast(outputs, target):
    outputs = functional.normalize(outputs, dim=1)
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def of_tokens():
    y = labels(3, 12, 4)
    y[1, 1:] = -100
    return nn.Sequential(nn.Linear(2, 3)).double(), noise(12, 4, 2), y


@pytest.mark.parametrize(
    ("loss_fn", "case"),
    [(flat_entropy, of_tokens), (contrast, lambda: (mlp().double(), noise(12, 3), labels(3, 12)))],
)
def test_a_loss_that_depends_on_the_batches_warns_unless_their_weights_are_given(loss_fn, case):
    model, x, y = case()
    with pytest.warns(
        UserWarning, match=r"depends on how the samples are batched: pass count="
    ) as w:
        Risk(model, loss_fn, (x, y), batch_size=6)
    assert w[0].filename == __file__  # the call of Risk

    Risk(model, loss_fn, (x, y))  # one batch
    Risk(model, loss_fn, (x, y), batch_size=6, count=lambda batch: len(batch[0]))


def test_labels_that_only_forward_knows_warn_if_some_are_ignored():
    model, x, y = of_tokens()

    def forward(model, batch):
        return model(batch[0]).transpose(1, 2), batch[1]

    with pytest.warns(UserWarning, match="depends on how the samples are batched: pass count="):
        Risk(model, functional.cross_entropy, (x, y), batch_size=6, forward=forward)
    Risk(model, functional.cross_entropy, (x, y.clamp(min=0)), batch_size=6, forward=forward)


def test_a_loss_that_reads_weights_of_the_model_raises_instead_of_ignoring_them():
    model = mlp().double()

    def penalized(outputs, target):
        norms = sum(p.square().sum() for p in model.parameters())
        return functional.cross_entropy(outputs, target) + 0.1 * norms

    with pytest.raises(ValueError, match="through its outputs alone: pass l2= for an L2 term"):
        Risk(model, penalized, vectors(6))


def test_parameters_of_a_loss_that_are_not_those_of_the_model_are_constants():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, outputs, target):
            return self.scale * functional.cross_entropy(outputs, target)

    model, data = mlp().double(), vectors(6)
    assert Risk(model, Scaled(), data).loss() == pytest.approx(
        2 * Risk(model, functional.cross_entropy, data).loss()
    )


class Coupled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x - x.mean(0))


@pytest.mark.parametrize("call", [curvature_variance, gradient_statistics])
def test_a_model_that_couples_samples_raises(call):
    risk = Risk(Coupled().double(), functional.cross_entropy, vectors(6, 5))
    with pytest.raises(ValueError, match=r"outputs of norm .* differ by .* in batch 0"):
        call(risk)


@pytest.mark.parametrize("call", [curvature_variance, gradient_statistics])
def test_a_loss_inside_the_model_is_checked_by_gradients(call):
    class Inside(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.inner, self.weight = mlp(), weight

        def forward(self, x, labels):
            outputs = self.inner(x)
            return {"loss": functional.cross_entropy(outputs, labels, weight=self.weight)}

    data = [{"x": x, "labels": y} for x, y in batches(noise(24, 3), torch.arange(24) // 10)]
    call(Risk(Inside(None).double(), None, data))
    with pytest.raises(ValueError, match=NOT_A_MEAN):
        call(Risk(Inside(WEIGHTS).double(), None, data))


def test_the_mean_over_samples_is_checked_once_and_not_for_products():
    evaluations = []

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            evaluations.append(len(x))
            return self.inner(x)

    risk = Risk(Counted().double(), functional.cross_entropy, vectors(4, 4, 4))
    evaluations.clear()
    risk.require_sample_mean(alone=False)
    assert evaluations == [4, 4, 4]
    for kind in ("fisher", "covariance"):
        evaluations.clear()
        BY_SAMPLE[kind](risk, engine="eager")
        assert len(evaluations) == (0 if kind == "fisher" else 3)  # the gradient
    other = risk.at(risk.theta)
    evaluations.clear()
    hessian(other, engine="eager", block_size=1) @ torch.ones(len(risk.theta), dtype=torch.float64)
    assert not other._sample_gaps
