"""A risk moved to new weights and batches, and operators that keep their traces."""

from functools import partial

import pytest
import torch
from curvature.networks import mlp, vectors
from torch import nn
from torch.nn.functional import cross_entropy

from ritz.curvature import Risk, fisher, ggn, hessian
from ritz.curvature._tracing import Linearization
from ritz.operators import exact

OPERATORS = {
    "hessian": hessian,
    "ggn": ggn,
    "monte carlo": fisher,
    "empirical": partial(fisher, kind="empirical"),
}


@pytest.fixture
def traces(monkeypatch):
    """Count the traces that are made."""
    made, whole = [], Linearization.__init__

    def init(self, *args, **options):
        made.append(args)
        whole(self, *args, **options)

    monkeypatch.setattr(Linearization, "__init__", init)
    return made


def shifted(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=0.1)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_moved_matrix_is_that_of_a_new_risk_without_another_trace(name, traces):
    model, batches = mlp().double(), vectors(5, 5, 5)
    risk = Risk(model, cross_entropy, batches[:1])
    op = OPERATORS[name](risk)
    before = op.dense()
    for batch in batches[1:]:
        shifted(model)
        risk = risk.moved([batch])
        op = op.at(risk)

        expected = OPERATORS[name](Risk(model, cross_entropy, [batch])).dense()

        torch.testing.assert_close(op.dense(), expected)
        assert not torch.allclose(op.dense(), before)
    # One for the operator, and one for each of the two that it is compared with.
    assert len(traces) == 3


def test_fifty_refreshes_make_one_trace(traces):
    model, (batch,) = mlp().double(), vectors(6)
    risk = Risk(model, cross_entropy, [batch])
    op = ggn(risk)
    for _ in range(50):
        shifted(model)
        op = op.at(risk := risk.moved())
        op @ risk.theta
    assert len(traces) == 1


@pytest.mark.parametrize("name", ["monte carlo", "empirical"])
def test_a_moved_fisher_matrix_has_its_exact_diagonal(name):
    model, batches = mlp().double(), vectors(5, 6)
    op = OPERATORS[name](Risk(model, cross_entropy, batches[:1]))

    moved = op.at(op.risk.moved(batches[1:]))

    assert moved.kind == op.kind
    torch.testing.assert_close(exact(moved, "diagonal").value, moved.dense().diagonal())


def test_an_operator_keeps_its_own_point_and_batch():
    model, batches = mlp().double(), vectors(5, 4)
    risk = Risk(model, cross_entropy, batches[:1])
    op = hessian(risk)
    before = op.dense()
    shifted(model)
    other = op.at(risk.moved(batches[1:]))
    other.dense()
    assert torch.equal(op.dense(), before)
    assert other.risk.num_samples == 4


def test_a_batch_of_another_size_is_traced_once(traces):
    model, batches = mlp().double(), vectors(5, 3, 5, 3)
    risk = Risk(model, cross_entropy, batches[:1])
    op = hessian(risk)
    for batch in batches:
        op = op.at(risk := risk.moved([batch]))
        op @ risk.theta
    assert len(traces) == 2


@pytest.mark.parametrize("mode", ["eval", "train", "recomputed"])
def test_networks_with_batch_norm_and_buffers_move(mode):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    batches, options = vectors(6, 5), {"batch_norm": mode}
    risk = Risk(model, cross_entropy, batches, **options)
    op = hessian(risk)
    op @ risk.theta
    shifted(model)
    model[1].running_mean.add_(0.3)

    moved = op.at(risk.moved())

    expected = hessian(Risk(model, cross_entropy, batches, **options))
    torch.testing.assert_close(moved @ risk.theta, expected @ risk.theta)


def test_labels_are_drawn_anew_from_the_generator():
    model, batches = mlp().double(), vectors(30)
    risk = Risk(model, cross_entropy, batches)
    op = fisher(risk)
    same = op.at(risk, generator=torch.Generator().manual_seed(0))
    other = op.at(risk, generator=torch.Generator().manual_seed(1))
    assert torch.equal(op.dense(), same.dense())
    assert not torch.equal(op.dense(), other.dense())


def test_a_moved_risk_has_its_parameters_and_its_loss():
    model, batches = mlp().double(), vectors(5, 4)
    names = [name for name, _ in model.named_parameters()][:2]
    risk = Risk(model, cross_entropy, batches, params=names, l2=0.1)
    shifted(model)
    moved, new = risk.moved(), Risk(model, cross_entropy, batches, params=names, l2=0.1)
    assert moved.loss() == new.loss() != risk.loss()
    assert torch.equal(moved.gradient(), new.gradient())
    assert list(moved.space.shapes) == names


def test_an_operator_refuses_a_risk_at_which_its_trace_does_not_hold():
    model, (batch,) = mlp().double(), vectors(5)
    op = hessian(Risk(model, cross_entropy, [batch]))
    others = {
        "model": Risk(mlp().double(), cross_entropy, [batch]),
        "loss_fn": Risk(model, nn.CrossEntropyLoss(), [batch]),
        "l2": Risk(model, cross_entropy, [batch], l2=0.1),
        "parameters": Risk(model, cross_entropy, [batch], params=".*weight"),
        "batch_norm": Risk(model, cross_entropy, [batch], batch_norm="train"),
    }
    for name, risk in others.items():
        with pytest.raises(ValueError, match=f"but it has another {name}"):
            op.at(risk)


def test_moving_names_weights_and_labels_that_are_wrong():
    model, (batch,) = mlp().double(), vectors(5)
    risk = Risk(model, cross_entropy, [batch])
    with pytest.raises(ValueError, match="batch 0"):
        risk.moved([(batch[0], batch[1] + 100)])
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match=r"parameter .* finite"):
        risk.moved()


@pytest.mark.parametrize("name", OPERATORS)
def test_all_operators_of_a_risk_and_its_parts_make_one_trace(name, traces):
    risk = Risk(mlp().double(), cross_entropy, vectors(5, 5))
    first, again = OPERATORS[name](risk), OPERATORS[name](risk, memory=0)
    vector = torch.ones_like(risk.theta)

    assert torch.equal(first @ vector, again @ vector)
    assert again.products.plan == first.products.plan
    parts = [OPERATORS[name](risk.batch(index)) @ vector for index in range(2)]
    OPERATORS[name](risk.at(2 * risk.theta)) @ vector

    if name != "monte carlo":  # its labels are drawn anew
        torch.testing.assert_close((parts[0] + parts[1]) / 2, first @ vector)
    assert len(traces) == 1


def test_matrices_engines_and_modes_do_not_share_traces(traces):
    risk = Risk(mlp().double(), cross_entropy, vectors(5))
    hessian(risk) @ risk.theta
    ggn(risk) @ risk.theta
    hessian(risk, engine="linearized") @ risk.theta
    hessian(risk.on("0")) @ risk.on("0").theta
    hessian(risk.moved()) @ risk.theta
    assert len(traces) == 5
