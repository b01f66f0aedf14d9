import copy
import math
from functools import partial

import pytest
import torch
from curvature.networks import seeded, small
from processes import run_processes
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional

from ritz.curvature import Risk, distance, gradient_statistics, summary

N, INPUTS, CLASSES = 30, 4, 3


network = partial(small, inputs=INPUTS, hidden=5, seed=1)


def inputs(seed=0, n=N):
    return torch.randn(n, INPUTS, generator=seeded(seed), dtype=torch.float64)


def labels(seed=1, n=N):
    return torch.randint(CLASSES, (n,), generator=seeded(seed))


def classified(**options):
    options = {"batch_size": 13} | options
    return Risk(network(), functional.cross_entropy, (inputs(), labels()), **options)


def gradients_of_samples(risk):
    """One after another, by plain reverse differentiation."""
    model, x, y = risk.model, inputs(), labels()
    params = {name: value.detach() for name, value in model.named_parameters()}

    def loss(params, i):
        return functional.cross_entropy(functional_call(model, params, x[i : i + 1]), y[i : i + 1])

    rows = [risk.space.flatten(grad(loss)(params, i)) for i in range(N)]
    return torch.stack(rows) + risk.l2 * risk.theta


def test_a_summary_has_the_right_loss_accuracy_and_norms():
    risk = classified(l2=0.1)
    found = summary(risk)
    correct = risk.model(inputs()).argmax(1) == labels()
    assert found.loss == pytest.approx(risk.loss(), rel=1e-12)
    assert found.accuracy == pytest.approx(float(correct.double().mean()), rel=1e-12)
    assert found.gradient_norm == pytest.approx(float(risk.gradient().norm()), rel=1e-12)
    assert found.weight_norm == pytest.approx(float(risk.theta.norm()), rel=1e-12)
    assert found.weight_max == float(risk.theta.abs().max())
    assert (found.num_samples, found.num_parameters) == (N, risk.space.size)
    assert found.batch_norm is None
    assert f"accuracy {found.accuracy:.2%}" in str(found)


def test_accuracy_leaves_out_ignored_labels():
    y = labels()
    y[::3] = 7
    loss = nn.CrossEntropyLoss(ignore_index=7)
    model = network()
    found = summary(Risk(model, loss, (inputs(), y), batch_size=10))
    kept = y != 7
    correct = (model(inputs()).argmax(1) == y)[kept]
    assert found.accuracy == pytest.approx(float(correct.double().mean()), rel=1e-12)


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (functional.mse_loss, torch.zeros(N, CLASSES, dtype=torch.float64)),
        (lambda f, y: (f.exp() - y[:, None] * f).mean(), labels()[:, None]),
    ],
    ids=["regression", "counts"],
)
def test_accuracy_is_none_without_class_labels(loss, target):
    found = summary(Risk(network(), loss, (inputs(), target)))
    assert found.accuracy is None
    assert "accuracy" not in str(found)


def test_a_summary_names_the_mode_of_batch_norm():
    model = network(nn.BatchNorm1d(5))
    risk = Risk(model, functional.cross_entropy, (inputs(), labels()), batch_size=13)
    found = [summary(risk.with_batch_norm(mode)) for mode in ("eval", "train")]
    assert [one.batch_norm for one in found] == ["eval", "train"]
    assert found[0].loss != found[1].loss


@pytest.mark.parametrize("way", ["vector", "state_dict", "module"])
def test_distance_from_a_vector_a_state_dict_and_a_module(way):
    risk = classified()
    begun = copy.deepcopy(risk.model)
    with torch.no_grad():
        begun[0].weight += 0.5
        begun[2].bias.zero_()
    flat = risk.space.flatten(dict(begun.named_parameters())).detach()
    initial = {"vector": flat, "state_dict": begun.state_dict(), "module": begun}[way]
    found = distance(risk, initial)
    gap = risk.theta - flat
    assert found.l2 == pytest.approx(float(gap.norm()), rel=1e-12)
    assert found.linf == float(gap.abs().max())
    cosine = functional.cosine_similarity(risk.theta, flat, dim=0)
    assert found.cosine == pytest.approx(float(cosine), rel=1e-12)
    assert found.initial_norm == pytest.approx(float(flat.norm()), rel=1e-12)
    assert found.layers["0.weight"][:2] == pytest.approx((0.5 * 20**0.5, 0.5), rel=1e-12)
    assert found.layers["0.bias"][:2] == (0.0, 0.0)
    assert math.isnan(found.layers["2.bias"][2])
    assert "2.bias" in str(found)


def test_distance_uses_only_the_parameters_of_the_risk():
    risk = classified(params="2.")
    found = distance(risk, risk.model)
    assert (found.l2, list(found.layers)) == (0.0, ["2.weight", "2.bias"])


@pytest.mark.parametrize(
    ("initial", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"initial must be \(43,\), got \(3,\)"),
        ({"0.weight": torch.zeros(5, 4)}, ValueError, "initial must contain all parameters"),
        (7, TypeError, "initial must be a vector, a state_dict or a module, got int"),
    ],
)
def test_distance_names_what_is_wrong_with_initial(initial, error, message):
    with pytest.raises(error, match=message):
        distance(classified(), initial)


@pytest.mark.parametrize("options", [{}, {"l2": 0.3}], ids=["plain", "l2"])
@pytest.mark.parametrize("chunk_size", [None, 1, 4])
def test_gradient_statistics_equal_those_of_all_sample_gradients(chunk_size, options):
    risk = classified(**options)
    found = gradient_statistics(risk, chunk_size=chunk_size)
    each = gradients_of_samples(risk)
    torch.testing.assert_close(found.mean, each.mean(0))
    torch.testing.assert_close(found.mean, risk.gradient())
    torch.testing.assert_close(found.variance, each.var(0, correction=0))
    assert found.mean_square == pytest.approx(float(each.square().sum(1).mean()), rel=1e-12)
    assert found.gradient_square == pytest.approx(float(risk.gradient() @ risk.gradient()))
    spread = float(each.var(0, correction=0).sum())
    assert found.total_variance == pytest.approx(spread, rel=1e-12)
    assert (found.num_gradients, found.by, found.method) == (N, "sample", "side by side")
    bias = risk.space.unflatten(each.var(0, correction=0))["2.bias"].sum()
    assert found.layers["2.bias"][2] == pytest.approx(float(bias), rel=1e-12)
    assert sum(layer[0] for layer in found.layers.values()) == pytest.approx(found.mean_square)
    assert "2.bias" in str(found)


def test_variance_survives_a_mean_that_is_far_larger():
    model = nn.Linear(1, 1, bias=False).double()
    target = 1e9 + torch.arange(4, dtype=torch.float64)[:, None]
    risk = Risk(model, lambda f, y: (f * y).mean(), (torch.ones(4, 1).double(), target))
    found = gradient_statistics(risk)
    assert found.total_variance == pytest.approx(1.25, rel=1e-6)


def test_gradients_of_batches_are_weighted_by_their_samples():
    risk = Risk(
        network(nn.BatchNorm1d(5)),
        functional.cross_entropy,
        (inputs(), labels()),
        batch_norm="train",
        batch_size=13,
    )
    found = gradient_statistics(risk, by="batch")
    each = torch.stack([risk.batch(i).gradient() for i in range(3)])
    weights = torch.tensor([13, 13, 4], dtype=torch.float64)[:, None] / N
    mean = (weights * each).sum(0)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.variance, (weights * (each - mean).square()).sum(0))
    assert found.num_gradients == 3


def test_fixed_dropout_masks_go_with_their_samples():
    model = network(nn.Dropout(0.5))
    risk = Risk(
        model, functional.cross_entropy, (inputs(), labels()), batch_size=13, dropout="fixed"
    )
    found = gradient_statistics(risk)
    torch.testing.assert_close(found.mean, risk.gradient())
    assert found.method == "side by side"


class Deciding(nn.Module):
    """Branches on its data, which cannot be vectorised."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        return self.inner(x) if bool(x.sum() > 0) else self.inner(-x)


def test_gradients_of_a_model_that_cannot_be_vectorised_are_computed_one_by_one():
    risk = Risk(Deciding(), functional.cross_entropy, (inputs(), labels()), batch_size=1)
    found = gradient_statistics(risk)
    assert found.method.startswith("one by one, as they cannot be vectorised")
    torch.testing.assert_close(found.mean, risk.gradient())


def test_statistics_of_samples_raise_if_samples_depend_on_each_other_or_have_no_rows():
    risk = Risk(
        network(nn.BatchNorm1d(5)),
        functional.cross_entropy,
        (inputs(), labels()),
        batch_norm="train",
        batch_size=13,
    )
    with pytest.raises(ValueError, match=r"gradient_statistics\(by='sample'\) needs batch_norm="):
        gradient_statistics(risk)
    names = Risk(
        network(),
        functional.cross_entropy,
        [["a file with all samples"]],
        forward=lambda model, batch: (model(inputs()), labels()),
        count=lambda batch: 99,
    )
    with pytest.raises(ValueError, match="one row for each of 99 samples"):
        gradient_statistics(names)


def test_samples_that_are_counted_otherwise_have_the_weight_of_their_batch():
    data = [(inputs(), labels()), (inputs()[:3], labels()[:3])]
    risk = Risk(network(), functional.cross_entropy, data, count=lambda batch: 99)
    parts = [Risk(network(), functional.cross_entropy, [batch]) for batch in data]
    statistics = gradient_statistics(risk)
    alone = [gradient_statistics(part) for part in parts]
    assert statistics.num_gradients == sum(part.num_samples for part in parts)
    torch.testing.assert_close(statistics.mean, (alone[0].mean + alone[1].mean) / 2)
    assert statistics.mean_square == pytest.approx(sum(one.mean_square for one in alone) / 2)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"by": "layer"}, "by must be one of sample, batch; got 'layer'"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
    ],
)
def test_bad_options_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        gradient_statistics(classified(), **bad)


def test_a_sample_gradient_that_is_not_finite_raises():
    x = inputs()
    x[3] = 0
    model = nn.Linear(INPUTS, 1, bias=False).double()
    risk = Risk(model, lambda f, y: f.abs().sqrt().mean(), (x, labels()))
    with pytest.raises(ValueError, match=r"the gradient of batch 0, .* must be finite"):
        gradient_statistics(risk)


def test_statistics_of_a_loss_that_is_no_mean_over_samples_raise():
    ignored = labels()
    ignored[3] = -100  # the others count for more
    risk = Risk(network(), functional.cross_entropy, (inputs(), ignored))
    with pytest.raises(ValueError, match="must be the mean of the losses of its samples"):
        gradient_statistics(risk)


def test_gradient_statistics_report_progress():
    class Watch:
        done = 0

        def start(self, label, total):
            self.total = total

        def update(self, done, note=""):
            self.done = done

        def finish(self):
            pass

    watch = Watch()
    gradient_statistics(classified(), progress=watch)
    assert watch.done == watch.total == 3


SHARED = """
from torch import nn
from torch.nn import functional
from ritz.curvature import Risk
from ritz.curvature import gradient_statistics, summary

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
data = torch.randn(17, 4).double(), torch.randint(3, (17,))
for size in (6, 17):  # three batches, or one and a process without any
    risks = [Risk(model, functional.cross_entropy, data, batch_size=size, l2=0.1, sharing=sharing)
             for sharing in ("split", "none")]
    for by in ("sample", "batch"):
        shared, alone = (gradient_statistics(risk, by=by) for risk in risks)
        torch.testing.assert_close(shared.mean, alone.mean)
        torch.testing.assert_close(shared.variance, alone.variance)
        assert shared.num_gradients == alone.num_gradients
    assert str(summary(risks[0])) == str(summary(risks[1]))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_statistics_of_two_processes_equal_those_of_one(tmp_path):
    assert run_processes(SHARED, 2, tmp_path) == [(0, ""), (0, "")]
