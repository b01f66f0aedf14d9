"""The loss of a batch as the mean over its samples, checked on all batches."""

from functools import partial

import pytest
import torch
from curvature.networks import labels, mlp, noise, vectors
from torch import nn
from torch.nn import functional

from ritz.curvature import Risk, fisher, gradient_covariance, gradient_statistics, hessian
from ritz.measures import curvature_variance

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
    with pytest.raises(ValueError, match=NOT_A_MEAN):
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


def test_class_weights_cancel_in_batches_of_one_class():
    model, data = mlp().double(), batches(noise(24, 3), torch.arange(24) // 8)
    weighted, plain = (
        Risk(model, nn.CrossEntropyLoss(weight=weight), data) for weight in (WEIGHTS, None)
    )
    for call in (BY_SAMPLE["fisher"], gradient_covariance):
        matrices = [call(risk, engine="eager").dense() for risk in (weighted, plain)]
        torch.testing.assert_close(*matrices)


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
