"""Diagonals and traces by structure, against matrices formed without the library."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ritz import diagonal, trace
from ritz.curvature import (
    Risk,
    block_diagonal,
    ggn,
    ggn_diagonal,
    ggn_trace,
    hessian,
    piecewise_gap,
    rules,
    structured,
)
from ritz.curvature.plans import structure_plan

CROSS_ENTROPY = functional.cross_entropy
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def noise(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def labels(high, *shape, seed=1):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def randomised(model, seed=2):
    """The model in float64, its parameters and statistics drawn anew, in eval mode."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            if value.is_floating_point():
                drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64)
                value.copy_(drawn + 0.2 if value.ndim == 1 else 2 * drawn - 1)
    return model


class Function(nn.Module):
    """Modules in a dictionary, and a function of them and the input."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


class Scale(nn.Module):
    """A leaf that nothing knows: two parameters, one of which enters by its square."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.scale.square() + self.shift


@case
def ragged_batches_with_l2():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    return model, (noise(7, 4), labels(3, 7)), CROSS_ENTROPY, {"batch_size": 3, "l2": 0.1}


@case
def one_layer_alone():
    return nn.Linear(4, 3), (noise(5, 4), labels(3, 5)), nn.CrossEntropyLoss(), {}


@case
def chances_as_targets_smoothed():
    target = noise(5, 3).softmax(1)
    loss = partial(CROSS_ENTROPY, label_smoothing=0.1)
    return nn.Linear(4, 3), (noise(5, 4), target), loss, {}


@case
def squared_error_of_several_outputs():
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    return model, (noise(5, 3), noise(5, 2)), nn.MSELoss(), {"batch_size": 4}


@case
def binary_labels_without_an_axis_of_outputs():
    model = Function(lambda self, x: self.a(x).squeeze(1), a=nn.Linear(3, 1))
    target = labels(2, 6).double()
    return model, (noise(6, 3), target), functional.binary_cross_entropy_with_logits, {}


@case
def some_parameters_frozen_and_some_left_out():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    return model, (noise(5, 3), labels(2, 5)), CROSS_ENTROPY, {"params": "[02]"}


@case
def convolutions_of_every_kind():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2, groups=2),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 2, 2, dilation=2, padding="same", padding_mode="circular"),
        nn.Flatten(),
        nn.Linear(18, 3),
    )
    return model, (noise(5, 2, 6, 6), labels(3, 5)), CROSS_ENTROPY, {"batch_size": 3}


@case
def convolutions_along_one_axis_with_group_norm():
    first = nn.Conv1d(2, 4, 3, stride=(2,), padding=(2,), padding_mode="reflect")
    model = nn.Sequential(
        first, nn.GroupNorm(2, 4), nn.PReLU(), nn.PReLU(4), nn.Flatten(), nn.Linear(16, 2)
    )
    return model, (noise(4, 2, 6), noise(4, 2)), nn.MSELoss(), {}


@case
def convolutions_along_three_axes():
    model = nn.Sequential(nn.Conv3d(1, 2, (1, 2, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2))
    return model, (noise(4, 1, 2, 3, 3), labels(2, 4)), CROSS_ENTROPY, {}


@case
def norms_on_rows_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4, bias=False), nn.ELU(),
                          nn.PReLU(4), nn.Linear(4, 2))  # fmt: skip
    return model, (noise(5, 3), labels(2, 5)), CROSS_ENTROPY, {"batch_norm": "recomputed"}


@case
def positions_fewer_than_channels():
    model = Function(lambda self, x: self.b(self.a(x).tanh()).mean(1),
                     a=nn.Linear(7, 8), b=nn.Linear(8, 2))  # fmt: skip
    return model, (noise(5, 2, 7), labels(2, 5)), CROSS_ENTROPY, {"batch_size": 2}


@case
def tokens_with_positions_of_which_one_is_ignored():
    layers = nn.Sequential(nn.Embedding(6, 4, padding_idx=0), nn.LayerNorm(4), nn.Linear(4, 5),
                           nn.GELU(), nn.Linear(5, 3))  # fmt: skip
    model = Function(lambda self, x: self.layers(x).transpose(1, 2), layers=layers)
    target = labels(3, 5, 3)
    target[0, 1] = -100
    return model, (labels(6, 5, 3), target), CROSS_ENTROPY, {"batch_size": 2}


@case
def a_leaf_of_the_users_own():
    model = nn.Sequential(nn.Linear(3, 4), Scale(4), nn.Tanh(), nn.Linear(4, 2))
    return model, (noise(5, 3), labels(2, 5)), CROSS_ENTROPY, {}


@case
def dropout_with_fixed_masks():
    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 2))
    return model, (noise(5, 3), labels(2, 5)), CROSS_ENTROPY, {"dropout": "fixed"}


def exact_matrix(risk):
    """The Gauss-Newton matrix from Jacobians of the outputs and Hessians of the loss."""
    params, total = risk.params, 0
    with risk.settings():
        for _, context, weight in risk.contexts():
            outputs, target = risk.evaluate(params, context)

            def found(theta, context=context):
                return risk.evaluate(risk.space.unflatten(theta), context)[0].flatten()

            def loss(flat, outputs=outputs, target=target):
                return risk.loss_fn(flat.view(outputs.shape), target)

            J = jacrev(found)(risk.theta)
            H = torch.autograd.functional.hessian(loss, outputs.detach().flatten())
            total = total + weight * J.T @ H @ J
    return total + risk.l2 * torch.eye(len(risk.theta), dtype=torch.float64)


def built(function):
    model, data, loss, options = function()
    return Risk(randomised(model), loss, data, **options)


@pytest.mark.parametrize("build", CASES.values(), ids=CASES.keys())
def test_diagonal_and_trace_are_those_of_the_matrix(build):
    risk = built(build)
    exact = exact_matrix(risk).diagonal()
    torch.testing.assert_close(ggn_diagonal(risk), exact)
    assert ggn_trace(risk) == pytest.approx(float(exact.sum()), rel=1e-10)
    found = structure_plan(risk)
    assert (found.whole, found.gap) == ((), "")
    assert not any(module._forward_hooks for module in risk.model.modules())


@pytest.mark.parametrize("build", CASES.values(), ids=CASES.keys())
def test_small_pieces_give_the_same(build, monkeypatch):
    risk = built(build)
    exact, size = ggn_diagonal(risk), ggn_trace(risk)
    monkeypatch.setattr(structured, "DERIVATIVES", 1)
    monkeypatch.setattr(rules, "ENTRIES", 40)
    torch.testing.assert_close(ggn_diagonal(risk), exact)
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
def test_parameters_not_used_by_one_call_of_their_module_are_right_too(function, samples):
    model = randomised(Function(function, a=nn.Linear(3, 3), b=nn.Linear(3, 2)))
    risk = Risk(model, CROSS_ENTROPY, (noise(samples, 3), labels(2, samples)))
    assert structure_plan(risk).whole[0] == "a.weight"
    assert structure_plan(risk).modules == {"b": ("weight", "bias")}
    exact = exact_matrix(risk).diagonal()
    torch.testing.assert_close(ggn_diagonal(risk), exact)
    found = trace(ggn(risk))
    assert float(found) == pytest.approx(float(exact.sum()), rel=1e-10)
    assert "through the whole model for a.weight, a.bias" in found.method


def test_tied_parameters_and_attention_are_right_too():
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
def test_other_ways_to_call_a_layer(function, params):
    model = randomised(Function(function, a=nn.Linear(3, 3), b=nn.Linear(3, 2)))
    risk = Risk(model, CROSS_ENTROPY, (noise(5, 3), labels(2, 5)), params=params)
    assert structure_plan(risk).whole == ("a.weight", "a.bias")
    torch.testing.assert_close(ggn_diagonal(risk), exact_matrix(risk).diagonal())


def test_a_layer_whose_activations_are_recomputed_is_right_too():
    found = []
    for function in (checkpointed, lambda self, x: self.b(self.a(x).tanh())):
        model = randomised(Function(function, a=nn.Linear(3, 3), b=nn.Linear(3, 2)))
        risk = Risk(model, CROSS_ENTROPY, (noise(5, 3), labels(2, 5)))
        found.append(ggn_diagonal(risk))
    torch.testing.assert_close(*found)


def test_a_recurrent_network_is_left_to_probes():
    model = Function(lambda self, x: self.b(self.a(x)[0][:, -1]),
                     a=nn.LSTM(2, 2, batch_first=True), b=nn.Linear(2, 2))  # fmt: skip
    risk = Risk(randomised(model), CROSS_ENTROPY, (noise(5, 3, 2), labels(2, 5)))
    reason = "torch cannot map the gradient in a.weight_ih_l0 over samples"
    with pytest.raises(ValueError, match=reason):
        ggn_trace(risk)


def test_a_subclass_or_a_hook_that_changes_what_a_layer_does_is_found_out():
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


def test_gradients_that_are_zero_but_for_roundoff_raise_no_suspicion():
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


def test_a_module_whose_output_is_not_used_has_no_curvature():
    model = Function(lambda self, x: self.b(x + 0 * self.a(x).detach()),
                     a=nn.Linear(3, 3), b=nn.Linear(3, 2))  # fmt: skip
    data = noise(5, 3), labels(2, 5)
    assert ggn_trace(Risk(randomised(model), CROSS_ENTROPY, data, params="a")) == 0.0
    assert ggn_diagonal(Risk(model, CROSS_ENTROPY, data))[:12].tolist() == [0.0] * 12


def test_an_argument_with_as_many_rows_as_samples_by_chance_is_not_cut():
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


def test_a_rule_of_the_users_own_is_asked():
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


def test_where_it_is_not_possible_the_estimate_is_sampled_and_says_why(small):
    data = noise(6, 3), labels(2, 6)
    risk = Risk(small, CROSS_ENTROPY, data, batch_norm="train", batch_size=6)
    op = ggn(risk, engine="eager")
    reason = "batch norm in train mode couples samples"
    assert trace(op, num_probes=3).method == f"XTrace; the structure does not know: {reason}"
    found = diagonal(op, num_probes=3)
    assert found.method == f"mean of z * (A z); the structure does not know: {reason}"
    assert trace(op, method="hutchinson", num_probes=3).method == "Hutchinson"
    for estimator in (trace, diagonal):
        with pytest.raises(ValueError, match=f"method='exact' needs a structure.*{reason}"):
            estimator(op, method="exact")
    with pytest.raises(ValueError, match=rf"ggn_trace\(\) is not possible here: {reason}"):
        ggn_trace(risk)


@pytest.mark.parametrize(
    ("model", "data", "loss", "reason"),
    [
        (nn.Linear(3, 2), (noise(5, 3), noise(5, 2)), nn.HuberLoss(), "no known root"),
        (nn.Linear(3, 300), (noise(2, 3), noise(2, 300)), nn.MSELoss(), "for 300 outputs a sample"),
        (Function(coupled, a=nn.Linear(3, 2), b=nn.Linear(3, 3)), (noise(5, 3), labels(2, 5)),
         CROSS_ENTROPY, "samples of a batch depend on each other"),
        (Function(by_token, a=nn.Linear(3, 2)), (noise(5, 4, 3), labels(2, 20)), CROSS_ENTROPY,
         "not one tensor with a row for each sample"),
    ],
)  # fmt: skip
def test_the_reason_is_named(model, data, loss, reason):
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
    assert found.method == (
        "exact, by structure: 3 columns of the root of the output Hessian, one backward pass each"
    )
    assert (found.num_products, op.products.plan) == (0, "not yet used")
    torch.testing.assert_close(diagonal(op).mean, exact.diagonal())
    assert float(trace(op - 0.5 * op)) == pytest.approx(0.5 * float(exact.trace()))


def piecewise():
    return nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.LeakyReLU(0.2), nn.MaxPool2d(2), nn.Dropout(0.4),
        nn.Flatten(), nn.Sequential(nn.Linear(8, 3), nn.ReLU(), nn.Linear(3, 2)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def piecewise_risk():
    model = randomised(piecewise())
    return Risk(model, CROSS_ENTROPY, (noise(6, 1, 5, 5), labels(2, 6)), batch_size=4, l2=0.3)


def test_a_piecewise_linear_network_has_the_diagonal_of_its_gauss_newton_matrix(piecewise_risk):
    def loss(theta):
        params = piecewise_risk.space.unflatten(theta)
        outputs = functional_call(piecewise_risk.model, params, (noise(6, 1, 5, 5),))
        return CROSS_ENTROPY(outputs, labels(2, 6)) + 0.15 * theta.square().sum()

    exact = torch.autograd.functional.hessian(loss, piecewise_risk.theta)
    op = hessian(piecewise_risk)
    torch.testing.assert_close(diagonal(op, method="exact").mean, exact.diagonal())
    found = trace(op)
    assert float(found) == pytest.approx(float(exact.trace()))
    assert found.method.startswith("exact, by structure: 2 columns")
    assert found.method.endswith("a piecewise-linear network has the diagonal of its Gauss-Newton "
                                 "matrix")  # fmt: skip
    assert abs(exact - exact_matrix(piecewise_risk)).max() > 0.1  # the matrices are not the same


def reused():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer)


def hooked():
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_forward_hook(lambda module, args, output: output.square())
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Tanh()), "1 is a Tanh, not known to be piecewise"),
        (nn.Sequential(nn.Linear(3, 3), nn.PReLU()), "1 is a PReLU"),
        (Function(lambda self, x: x, a=nn.Linear(3, 3)), "the model is a Function"),
        (reused(), "parameters are tied"),
        (hooked(), "0 has hooks"),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)), "1 has no"),
    ],
)
def test_a_hessian_says_why_its_diagonal_is_not_known(model, reason):
    risk = Risk(model.double(), CROSS_ENTROPY, (noise(6, 3), labels(3, 6)))
    assert reason in piecewise_gap(risk)
    with pytest.raises(ValueError, match=reason):
        trace(hessian(risk, engine="eager"), method="exact")


def test_a_forward_of_the_users_own_may_do_anything():
    risk = Risk(nn.Linear(3, 3).double(), CROSS_ENTROPY, (noise(6, 3), labels(3, 6)),
                forward=lambda model, batch: (model(batch[0]).square(), batch[1]))  # fmt: skip
    assert "forward=" in piecewise_gap(risk)
    torch.testing.assert_close(ggn_diagonal(risk), exact_matrix(risk).diagonal())


def test_an_unknown_loss_leaves_a_hessian_unknown():
    risk = Risk(nn.Linear(3, 3).double(), nn.HuberLoss(), (noise(6, 3), noise(6, 3)))
    assert "no known root" in trace(hessian(risk, engine="eager"), num_probes=3).method


def test_a_bar_shows_the_batches():
    told = []

    class Told:
        def start(self, label, total):
            told.append((label, total))

        def update(self, done, note=""):
            told.append(done)

        def finish(self):
            told.append("over")

    ggn_trace(built(ragged_batches_with_l2), progress=Told())
    assert told == [("trace", 3), 1, 2, 3, "over"]


@pytest.fixture(scope="module")
def layered():
    return built(ragged_batches_with_l2)


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_blocks_of_layers_are_those_of_the_matrix(layered, kind):
    whole = (hessian if kind == "hessian" else ggn)(layered, engine="eager").dense()
    for by, sizes in [(None, [25, 15]), (["0.weight", "0.bias|2"], [20, 20]), ([".*"], [40])]:
        op = block_diagonal(layered, kind=kind, by=by, engine="eager")
        assert op.sizes == sizes
        expected = torch.block_diag(
            *(whole[part][:, part] for part in torch.arange(40).split(sizes))
        )
        torch.testing.assert_close(op.dense(), expected)
    if kind == "ggn":
        assert float(trace(op)) == pytest.approx(float(whole.trace()))


@pytest.mark.parametrize(
    ("by", "error", "match"),
    [
        ("0", TypeError, "by must be a list"),
        ([], TypeError, "by must be a list"),
        (["0"], ValueError, "by must take every parameter once, got 2.weight 0 times"),
        (["0", ".*"], ValueError, "by must take every parameter once, got 0.weight 2 times"),
        (["2", "0"], ValueError, "by must give blocks in the order of the parameters"),
        (["0", "3"], ValueError, "params must choose at least one parameter"),
    ],
)
def test_blocks_must_be_a_partition_in_order(layered, by, error, match):
    with pytest.raises(error, match=match):
        block_diagonal(layered, by=by)


def test_blocks_have_a_kind(layered):
    with pytest.raises(ValueError, match="kind must be one of hessian, ggn"):
        block_diagonal(layered, kind="fisher")
