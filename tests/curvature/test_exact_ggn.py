"""Diagonals and traces by structure, against matrices formed without the library."""

import pytest
import torch
from curvature.networks import labels, noise
from curvature.structures import (
    CASES,
    CROSS_ENTROPY,
    Function,
    Scale,
    built,
    exact_matrix,
    ggn_diagonal,
    ggn_trace,
    ragged_batches_with_l2,
    randomised,
)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ritz import diagonal, trace
from ritz.curvature import Risk, fisher, ggn, kfac
from ritz.curvature import _module_gradients as rules
from ritz.curvature._sample_gradients import structure_plan
from ritz.operators import exact


@pytest.mark.parametrize("build", CASES.values(), ids=CASES.keys())
def test_exact_diagonal_and_trace_equal_those_of_the_matrix(build):
    risk = built(build)
    exact = exact_matrix(risk).diagonal()
    torch.testing.assert_close(ggn_diagonal(risk), exact)
    assert ggn_trace(risk) == pytest.approx(float(exact.sum()), rel=1e-10)
    found = structure_plan(risk)
    assert (found.whole, found.gap) == ((), "")
    assert not any(module._forward_hooks for module in risk.model.modules())


@pytest.mark.parametrize("build", CASES.values(), ids=CASES.keys())
def test_exact_diagonals_do_not_depend_on_the_size_of_chunks(build, monkeypatch):
    risk = built(build)
    whole, size = ggn_diagonal(risk), ggn_trace(risk)
    monkeypatch.setattr(rules, "TUNING", rules.Tuning(derivatives=1, gradients=40))
    torch.testing.assert_close(ggn_diagonal(risk), whole)
    assert ggn_trace(risk) == pytest.approx(size, rel=1e-10)


def used_twice(self, x):
    return self.b(self.a(self.a(x).tanh()).tanh())


def used_beside(self, x):
    return self.b(self.a(x).tanh() @ self.a.weight)


def used_by_the_parent(self, x):
    return self.b(functional.linear(x, self.a.weight, self.a.bias).tanh())


def positions_first(self, x):
    return self.b(self.a(x.view(len(x), 3, 1).expand(-1, -1, 3).transpose(0, 1)).tanh().sum(0))


@pytest.mark.parametrize("function", [used_twice, used_beside, used_by_the_parent, positions_first])
@pytest.mark.parametrize("samples", [3, 5])
def test_parameters_used_several_times_have_the_right_diagonal(function, samples):
    model = randomised(Function(function, a=nn.Linear(3, 3), b=nn.Linear(3, 2)))
    risk = Risk(model, CROSS_ENTROPY, (noise(samples, 3), labels(2, samples)))
    assert structure_plan(risk).whole[0] == "a.weight"
    assert structure_plan(risk).modules == {"b": ("weight", "bias")}
    exact = exact_matrix(risk).diagonal()
    torch.testing.assert_close(ggn_diagonal(risk), exact)
    found = trace(ggn(risk))
    assert float(found) == pytest.approx(float(exact.sum()), rel=1e-10)
    assert "through the whole model for a.weight, a.bias" in found.method


def test_tied_parameters_and_attention_have_the_right_diagonal():
    model = Function(lambda self, x: self.d(self.c(*3 * [self.b(self.a(x).tanh())])[0].sum(1)),
                     a=nn.Linear(2, 2), b=nn.Linear(2, 2), d=nn.Linear(2, 2),
                     c=nn.MultiheadAttention(2, 1, batch_first=True))  # fmt: skip
    model.b.weight = model.a.weight
    risk = Risk(randomised(model), CROSS_ENTROPY, (noise(5, 3, 2), labels(2, 5)))
    assert structure_plan(risk).modules == {"d": ("weight", "bias")}
    torch.testing.assert_close(ggn_diagonal(risk), exact_matrix(risk).diagonal())


def row_by_row(self, x):
    return self.b(torch.cat([self.a(row[None]) for row in x]).tanh())


def rows_of_positions(self, x):
    return self.b(self.a(x.view(-1, 1).expand(-1, 3)).view(len(x), 3, 3).tanh().sum(1))


def checkpointed(self, x):
    return self.b(checkpoint(self.a, x, use_reentrant=False).tanh())


@pytest.mark.parametrize("function", [row_by_row, rows_of_positions])
@pytest.mark.parametrize("params", ["a", None])
def test_layers_called_row_by_row_or_on_positions_have_the_right_diagonal(function, params):
    model = randomised(Function(function, a=nn.Linear(3, 3), b=nn.Linear(3, 2)))
    risk = Risk(model, CROSS_ENTROPY, (noise(5, 3), labels(2, 5)), params=params)
    assert structure_plan(risk).whole == ("a.weight", "a.bias")
    torch.testing.assert_close(ggn_diagonal(risk), exact_matrix(risk).diagonal())


def test_a_layer_with_checkpointed_activations_has_the_right_diagonal():
    found = []
    for function in (checkpointed, lambda self, x: self.b(self.a(x).tanh())):
        model = randomised(Function(function, a=nn.Linear(3, 3), b=nn.Linear(3, 2)))
        risk = Risk(model, CROSS_ENTROPY, (noise(5, 3), labels(2, 5)))
        found.append(ggn_diagonal(risk))
    torch.testing.assert_close(*found)


def test_a_recurrent_network_has_no_exact_trace():
    model = Function(lambda self, x: self.b(self.a(x)[0][:, -1]),
                     a=nn.LSTM(2, 2, batch_first=True), b=nn.Linear(2, 2))  # fmt: skip
    risk = Risk(randomised(model), CROSS_ENTROPY, (noise(5, 3, 2), labels(2, 5)))
    reason = "vmap fails for the sample gradients of a.weight_ih_l0"
    with pytest.raises(ValueError, match=reason):
        ggn_trace(risk)


def test_a_subclass_or_a_hook_that_changes_a_layer_is_detected():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Scaled(nn.Embedding):
        def forward(self, x):
            return 2 * super().forward(x)

    layers = Scaled(4, 3), nn.Flatten(), Doubled(6, 3), nn.Tanh(), nn.Linear(3, 2)
    model = randomised(nn.Sequential(*layers))
    model[4].register_forward_hook(lambda module, args, output: 3 * output)
    risk = Risk(model, CROSS_ENTROPY, (labels(4, 5, 2), labels(2, 5)))
    assert structure_plan(risk).modules == {}
    torch.testing.assert_close(ggn_diagonal(risk), exact_matrix(risk).diagonal())


def test_gradients_of_pure_roundoff_pass_the_check_of_a_rule():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x + self.shift

    model = nn.Sequential(nn.Linear(3, 4), Shift(), nn.Softmax(1), nn.Linear(4, 2))
    risk = Risk(randomised(model), CROSS_ENTROPY, (noise(5, 3), labels(2, 5)))
    assert structure_plan(risk).whole == ()
    torch.testing.assert_close(ggn_diagonal(risk), exact_matrix(risk).diagonal())


def test_a_module_whose_output_is_not_used_has_a_zero_diagonal():
    model = Function(lambda self, x: self.b(x + 0 * self.a(x).detach()),
                     a=nn.Linear(3, 3), b=nn.Linear(3, 2))  # fmt: skip
    data = noise(5, 3), labels(2, 5)
    assert ggn_trace(Risk(randomised(model), CROSS_ENTROPY, data, params="a")) == 0.0
    assert ggn_diagonal(Risk(model, CROSS_ENTROPY, data))[:12].tolist() == [0.0] * 12


def test_an_argument_with_as_many_rows_as_samples_by_chance_is_not_split():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x, table):
            return x * table.mean(0) * self.scale

    table = noise(5, 3)
    model = Function(lambda self, x: self.b(self.a(x, table)), a=Mixing(), b=nn.Linear(3, 2))
    # Five samples in the last batch, five rows in the table.
    risk = Risk(randomised(model), CROSS_ENTROPY, (noise(11, 3), labels(2, 11)), batch_size=6)
    torch.testing.assert_close(ggn_diagonal(risk), exact_matrix(risk).diagonal())


def test_a_user_defined_rule_is_used():
    class Own(Scale):
        pass

    asked = []

    @rules.sample_gradients.register
    def _(module: Own, call, deltas):
        asked.append(module)
        scale, x = 2 * call.state["scale"], call.args[0]
        return {"scale": deltas * x * scale, "shift": deltas}

    model = randomised(nn.Sequential(nn.Linear(3, 4), Own(4), nn.Linear(4, 2)))
    risk = Risk(model, CROSS_ENTROPY, (noise(5, 3), labels(2, 5)))
    torch.testing.assert_close(ggn_diagonal(risk), exact_matrix(risk).diagonal())
    assert asked


def coupled(self, x):
    return self.a(x - self.b(x).mean(0))


def by_token(self, x):
    return self.a(x).flatten(0, 1)


@pytest.fixture(scope="module")
def small():
    return randomised(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)))


def test_without_an_exact_trace_the_estimate_is_sampled_and_names_the_reason(small):
    data = noise(6, 3), labels(2, 6)
    risk = Risk(small, CROSS_ENTROPY, data, batch_norm="train", batch_size=6)
    op = ggn(risk, engine="eager")
    reason = "batch norm in train mode couples samples"
    assert trace(op, num_probes=3).method == f"XTrace; no closed form: {reason}"
    found = diagonal(op, num_probes=3)
    assert found.method == f"mean of z * (A z); no closed form: {reason}"
    assert trace(op, method="hutchinson", num_probes=3).method == "Hutchinson"
    for estimator in (trace, diagonal):
        with pytest.raises(
            ValueError, match=f"method='exact': no exact (trace|diagonal) is available.*{reason}"
        ):
            estimator(op, method="exact")


@pytest.mark.parametrize(
    ("model", "data", "loss", "reason"),
    [
        (nn.Linear(3, 2), (noise(5, 3), noise(5, 2)), nn.HuberLoss(), "not known in closed form"),
        (nn.Linear(3, 300), (noise(2, 3), noise(2, 300)), nn.MSELoss(), "300 outputs per sample"),
        (Function(coupled, a=nn.Linear(3, 2), b=nn.Linear(3, 3)), (noise(5, 3), labels(2, 5)),
         CROSS_ENTROPY, "samples of a batch depend on each other"),
        (Function(by_token, a=nn.Linear(3, 2)), (noise(5, 4, 3), labels(2, 20)), CROSS_ENTROPY,
         "not one tensor with a row for each sample"),
    ],
)  # fmt: skip
def test_the_reason_why_there_is_no_exact_trace_is_named(model, data, loss, reason):
    forward = None
    if len(data[1]) != len(data[0]):
        data = {"x": data[0], "y": data[1].view(5, 4)}

        def forward(model, batch):
            return model(batch["x"]), batch["y"].flatten()

    risk = Risk(randomised(model), loss, data, forward=forward)
    assert reason in structure_plan(risk).gap
    with pytest.raises(ValueError, match=reason):
        ggn_diagonal(risk)


def test_estimates_of_a_gauss_newton_matrix_are_exact_without_a_product():
    risk = built(ragged_batches_with_l2)
    op = ggn(risk)
    found, exact = trace(op), exact_matrix(risk)
    assert found.method == ("exact, by structure: 3 backward passes per batch")
    assert (found.num_products, op.products.plan) == (0, "not yet used")
    torch.testing.assert_close(diagonal(op).mean, exact.diagonal())
    assert float(trace(op - 0.5 * op)) == pytest.approx(0.5 * float(exact.trace()))


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_layers_with_an_older_kind_of_norm_go_through_the_whole_model(wrap):
    model = nn.Sequential(wrap(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)).double().eval()
    risk = Risk(model, CROSS_ENTROPY, (noise(5, 4), labels(2, 5)))
    dense = ggn(risk, engine="eager").dense()
    torch.testing.assert_close(ggn_diagonal(risk), dense.diagonal())
    assert ggn_trace(risk) == pytest.approx(float(dense.trace()), rel=1e-10)


def twice_for_large_inputs(self, x):
    hidden = self.a(x).tanh()
    return self.b(self.a(hidden).tanh() if x.abs().max() > 3 else hidden)


def test_control_flow_that_differs_in_a_later_batch_leaves_the_trace_to_products():
    model = randomised(Function(twice_for_large_inputs, a=nn.Linear(3, 3), b=nn.Linear(3, 2)))
    small, large = noise(5, 3).clamp(-2, 2), noise(5, 3).clamp(-2, 2)
    large[0, 0] = 9.0
    risk = Risk(model, CROSS_ENTROPY, [(small, labels(2, 5)), (large, labels(2, 5))])

    estimate = trace(ggn(risk, engine="eager"))

    assert "by structure" not in estimate.method
    assert float(estimate) == pytest.approx(float(ggn(risk, engine="eager").dense().trace()))


def tokens(batch):
    return int((batch[1] != -100).sum())


def test_counting_tokens_does_not_turn_off_the_structure():
    model = randomised(nn.Sequential(nn.Embedding(6, 4), nn.Tanh(), nn.Linear(4, 6)))
    x = labels(6, 20).view(5, 4)
    y = torch.where(x > 3, -100, x)
    risk = Risk(
        model,
        nn.CrossEntropyLoss(),
        [(x, y), (x[:2], y[:2])],
        forward=lambda model, batch: (model(batch[0]).transpose(1, 2), batch[1]),
        count=tokens,
    )
    outputs = [(model(x).transpose(1, 2), y), (model(x[:2]).transpose(1, 2), y[:2])]
    weights = [tokens(batch) / risk.num_samples for batch in outputs]

    op = ggn(risk, engine="eager")
    second_moment = fisher(risk, kind="empirical", engine="eager")

    assert risk.num_samples == tokens((x, y)) + tokens((x[:2], y[:2]))
    torch.testing.assert_close(exact(op, "diagonal").value, op.dense().diagonal())
    assert exact(op, "trace").value == pytest.approx(float(op.dense().trace()))
    assert kfac(risk).shape == op.shape
    # tr F = sum_b w_b mean_i |g_i|^2, with the mean of g_i the gradient of the batch.
    squares = 0.0
    for weight, (logits, target) in zip(weights, outputs, strict=True):
        terms = functional.cross_entropy(logits, target, reduction="none").sum(1)
        for term in terms * len(terms) / tokens((None, target)):
            gradients = torch.autograd.grad(term, list(model.parameters()), retain_graph=True)
            norm = sum(float(gradient.square().sum()) for gradient in gradients)
            squares += weight * norm / len(terms)
    assert float(second_moment.dense().trace()) == pytest.approx(squares)
