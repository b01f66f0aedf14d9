"""K-FAC on unusual layers and samples, and its errors."""

import warnings

import pytest
import torch
from optim.kfac_cases import (
    ALL_STEPS,
    built,
    convolutional,
    curvature,
    flat,
    labels,
    noise,
    small_network,
    take_step,
)
from torch import nn
from torch.nn.functional import cross_entropy

from ritz.optim import KFAC, KFACPreconditioner

# ------------------------------------------------------------------------------------------
# Hard cases.


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.bent = nn.Linear(3, 3)
        self.used = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, ids):
        x = self.used(self.embed(ids)) * self.scale
        return self.head((x @ self.bent.weight + self.bent.bias).tanh().mean(1))


def test_unknown_and_tied_layers_have_the_plain_gradient_and_are_named_once():
    model = built(Odd)
    with pytest.warns(UserWarning, match="embed: it shares a parameter") as said:
        optimizer = KFAC(model, lr=1.0, momentum=0)
    assert len(said) == 1
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids, y = labels(5, 6, 3), labels(5, 6)
    cross_entropy(model(ids), y).backward()
    with pytest.warns(UserWarning, match="bent: its parameters are used without"):
        optimizer.step()
    assert set(optimizer.plain) == {"the model", "embed", "head", "bent"}
    for name, p in model.named_parameters():
        if p.grad is None:
            assert torch.equal(p, before[name])
        elif name.partition(".")[0] != "used":
            torch.testing.assert_close(before[name] - p.detach(), p.grad)
    cross_entropy(model(ids), y).backward()
    optimizer.step()  # no second warning


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
@pytest.mark.parametrize("damping", ["exact", "factored"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dead_units_single_samples_and_constant_inputs_give_finite_steps(kind, damping, dtype):
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)
    with torch.no_grad():
        model[0].bias.fill_(-100.0)  # all units are dead
    optimizer = KFAC(model, lr=0.1, delta=1e-8, kind=kind, damping=damping, **ALL_STEPS)
    for x in (torch.zeros(1, 3), torch.ones(4, 3), noise(1, 3)):
        take_step(model, optimizer, x.to(dtype), labels(3, len(x)))
    assert torch.isfinite(flat(model.parameters())).all()


def test_a_failed_decomposition_is_repeated_in_double_precision(monkeypatch):
    plain = torch.linalg.eigh

    def failing(matrix):
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("failed to converge")
        return plain(matrix)

    found = []
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(torch.linalg, "eigh", failing)
        model = built(small_network).float()
        optimizer = KFAC(model, lr=0.1, kind="ekfac")
        take_step(model, optimizer, noise(5, 3).float(), labels(3, 5))
        found.append(flat(model.parameters()))
    torch.testing.assert_close(*found)


def test_factors_below_the_normal_numbers_have_eigenvectors():
    model = built(small_network).float()
    optimizer = KFAC(model, lr=0.1, damping="exact")
    (1e-19 * cross_entropy(model(noise(5, 3).float()), labels(3, 5))).backward()
    optimizer.step()
    values = curvature(optimizer)["2"].inverse["outputs_values"]
    assert 0 < float(values.max()) < 1e-36
    assert torch.isfinite(flat(model.parameters())).all()


def test_frozen_parameters_are_left_out():
    model = built(small_network)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    optimizer = KFAC(model, lr=1.0, momentum=0, damping="exact", delta=0.1)
    x, y = noise(1, 3), labels(3, 1)
    cross_entropy(model(x), y).backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    for index, key in ((0, "bias"), (2, "weight")):
        p = getattr(model[index], key)
        g = p.grad.flatten()
        # One sample: g g' exactly.
        expected = torch.linalg.solve(torch.outer(g, g) + 0.1 * torch.eye(len(g)), g)
        step = before[f"{index}.{key}"] - p.detach()
        torch.testing.assert_close(step.flatten(), expected)


def test_a_layer_called_twice_sums_both_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(self.layer(x).tanh())

    model = built(Twice)
    x = noise(5, 3)
    optimizer = KFAC(model)
    middle = model.layer(x).tanh().detach()
    optimizer.curvature._arm()
    take_step(model, optimizer, x, labels(3, 5))
    rows = torch.cat([torch.cat([part, torch.ones(5, 1)], 1) for part in (x, middle)])
    inputs = curvature(optimizer)["layer"].average["inputs"]
    torch.testing.assert_close(inputs, rows.T @ rows / 10)


def test_a_layer_without_gradient_does_not_move():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x, late=False):
            return self.b(x) if late else self.a(x)

    model = built(Branches)
    optimizer = KFAC(model, lr=0.1, **ALL_STEPS)
    before = model.b.weight.detach().clone()
    for late in (False, True):
        optimizer.zero_grad()
        cross_entropy(model(noise(5, 3), late), labels(2, 5)).backward()
        optimizer.step()
        assert torch.equal(before, model.b.weight) is not late
    assert curvature(optimizer)["b"].inverse


@pytest.mark.parametrize(
    ("shape", "make"),
    [
        ((3,), lambda: nn.Linear(3, 2)),
        ((2, 5), lambda: nn.Sequential(nn.Conv1d(2, 2, 5), nn.Flatten(0))),
    ],
)
def test_one_sample_without_an_axis_of_samples(shape, make):
    found = []
    for extra in (False, True):
        model = built(make)
        optimizer = KFAC(model, lr=0.1, damping="exact")
        x = noise(*shape)
        outputs = model(x[None] if extra else x)
        cross_entropy(outputs.reshape(1, 2), labels(2, 1)).backward()
        optimizer.step()
        found.append(flat(model.parameters()))
    if len(shape) == 1:  # elsewhere the first axis of the model is not that of samples
        torch.testing.assert_close(*found)
    assert torch.isfinite(found[0]).all()


def test_drawn_labels_give_the_gauss_newton_factor_on_average():
    x, y = noise(8, 3), labels(3, 8)
    model = built(small_network)
    exact = KFAC(model, lr=0.0, fisher="ggn")
    take_step(model, exact, x, y)
    expected = curvature(exact)["0"].average["outputs"].clone()
    exact.curvature.remove()
    optimizer = KFAC(model, lr=0.0, fisher="monte_carlo", factor_decay=1.0, **ALL_STEPS)
    samples, before = [], 0.0
    for step in range(200):
        take_step(model, optimizer, x, y)
        mean = curvature(optimizer)["0"].average["outputs"] * (step + 1)
        samples.append(mean - before)  # factor_decay=1 is a plain mean over all steps
        before = mean.clone()
    drawn = torch.stack(samples)
    assert ((drawn.mean(0) - expected).abs() <= 4 * drawn.std(0) / 200**0.5 + 1e-12).all()


# ------------------------------------------------------------------------------------------
# Errors.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delta": 0.0}, "delta must be finite and above 0, got 0.0"),
        ({"delta": float("nan")}, "delta must be finite and above 0, got nan"),
        ({"lr": -1.0}, "lr must be finite and at least 0, got -1.0"),
        ({"kind": "shampoo"}, "kind must be one of kfac, ekfac; got 'shampoo'"),
        ({"fisher": "true"}, "fisher must be one of ggn, monte_carlo, empirical"),
        ({"damping": "none"}, "damping must be one of exact, factored"),
        ({"factor_every": 0}, "factor_every must be at least 1, got 0"),
        ({"factor_decay": 2.0}, "factor_decay must be between 0.0 and 1.0, got 2.0"),
        ({"weight_sharing": "sum"}, "weight_sharing must be one of expand, reduce"),
        ({"precision": "bf16"}, "precision must be one of float32, tf32"),
        ({"kl_clip": -1.0}, "kl_clip must be finite and at least 0, got -1.0"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov=True needs momentum above 0"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        KFAC(small_network(), **settings)


def test_misuse_is_explained():
    model = built(small_network)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got generator"):
        KFAC(model.parameters())
    with pytest.raises(TypeError, match="KFAC got unknown arguments eps"):
        KFAC(model, eps=1e-8)
    with pytest.raises(ValueError, match="weight has no shape yet"):
        KFAC(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="optimizer must not have a damping already"):
        KFACPreconditioner(torch.optim.SGD(KFAC(model).param_groups), model)
    optimizer = KFAC(model, fisher="ggn")
    cross_entropy(model(noise(5, 3)), labels(3, 5)).backward()
    with pytest.raises(RuntimeError, match=r"fisher='ggn' needs optimizer.observe"):
        optimizer.step()
    outputs = model(noise(5, 3))
    with pytest.raises(ValueError, match=r"without class weights for fisher=.ggn."):
        optimizer.observe(outputs, labels(3, 5), nn.HuberLoss())
    model.eval()
    optimizer = KFAC(model)
    cross_entropy(model(noise(5, 3)), labels(3, 5)).backward()
    with pytest.raises(RuntimeError, match=r"call model.train\(\)"):
        optimizer.step()


def test_groups_are_complete_before_the_preconditioner():
    model = built(small_network)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    KFACPreconditioner(optimizer, model)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    cross_entropy(model(noise(5, 3)), labels(3, 5)).backward()
    with pytest.raises(ValueError, match="must be added before KFACPreconditioner is made"):
        optimizer.step()


def test_an_input_that_is_overwritten_is_named():
    model = built(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
    optimizer = KFAC(model, fisher="ggn")
    x = noise(5, 3)
    outputs = model(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="input of layer '0', which was modified in place"):
        optimizer.observe(outputs, labels(3, 5), cross_entropy)


def test_no_warning_for_known_layers():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFAC(convolutional())
