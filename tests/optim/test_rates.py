import math

import pytest
import torch
from torch import nn

import ritz
from ritz.optim import SpectralSGD, effective_rates, scale_invariant_weights, weight_norms


class Net(nn.Module):
    """Normalisations of several kinds, a shortcut, dropout, and a weight that has no effect."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.inner = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.groups = nn.GroupNorm(2, 6)
        self.plain = nn.Conv2d(6, 6, 1)
        self.linear = nn.Linear(6, 8, bias=False)
        self.layer = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.unused = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, images):
        x = torch.relu(self.norm(self.conv(images)))
        x = x + self.plain(torch.relu(self.groups(self.inner(x))))
        x = self.layer(self.linear(self.dropout(x.mean((2, 3)))))
        return {"logits": self.head(torch.relu(x)), "count": len(images)}


def drawn(model, rng):
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=rng))
    return model


@pytest.fixture
def net(rng):
    return drawn(Net(), rng)


@pytest.fixture
def images(rng):
    return torch.randn(16, 2, 5, 5, generator=rng)


def test_scale_invariant_weights_are_those_before_a_normalisation(net, images):
    found = scale_invariant_weights(net, images)
    assert found == ("conv.weight", "inner.weight", "linear.weight")


def test_bias_before_layer_norm_breaks_scale_invariance(rng):
    inputs = torch.randn(20, 4, generator=rng)
    for bias, expected in ((True, ()), (False, ("0.weight",))):
        model = drawn(nn.Sequential(nn.Linear(4, 4, bias=bias), nn.LayerNorm(4)), rng)
        assert scale_invariant_weights(model, inputs) == expected


def test_scale_invariant_weights_does_not_change_the_model(net, images):
    before = {name: value.clone() for name, value in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    scale_invariant_weights(net, images)
    assert [module.training for module in net.modules()] == modes
    after = net.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_scale_invariance_is_found_in_eval_mode(net, images):
    net.norm.running_var.fill_(7.0)
    net.eval()
    assert "conv.weight" in scale_invariant_weights(net, images)


def test_shortcut_around_the_normalisation_breaks_scale_invariance(rng):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            y = self.linear(x)
            return self.norm(y) + 0.1 * y

    model = drawn(Block(), rng)
    assert scale_invariant_weights(model, torch.randn(20, 4, generator=rng)) == ()


def test_variance_below_epsilon_breaks_scale_invariance(rng):
    model = drawn(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), rng)
    inputs = torch.randn(20, 4, generator=rng)
    assert scale_invariant_weights(model, inputs) == ("0.weight",)
    assert scale_invariant_weights(model, 1e-3 * inputs) == ()


def test_effective_rate_is_the_learning_rate_of_the_direction(net):
    optimizer = torch.optim.SGD(
        [
            {"params": net.conv.parameters(), "lr": 0.2},
            {"params": net.linear.parameters(), "lr": torch.tensor(0.5)},
        ],
        lr=0.1,
    )
    found = effective_rates(net, optimizer, ["conv.weight", "linear.weight"])
    for name, layer, rate in (("conv", net.conv, 0.2), ("linear", net.linear, 0.5)):
        square = sum(value**2 for value in layer.weight.flatten().tolist())
        assert found[f"{name}.weight"] == pytest.approx(rate / square)
    with torch.no_grad():
        net.conv.weight.mul_(3)
        net.linear.weight.zero_()
    again = effective_rates(net, optimizer, ["conv.weight", "linear.weight"])
    assert again["conv.weight"] == pytest.approx(found["conv.weight"] / 9)
    assert again["linear.weight"] == math.inf


def test_effective_rate_of_spectral_sgd_has_the_measured_factor(net, images):
    optimizer = SpectralSGD(net.parameters(), lr=0.5)
    assert effective_rates(net, optimizer, ["conv.weight"]) == {"conv.weight": 0.0}
    optimizer.param_groups[0]["rate"] = 0.4  # as a measurement sets it
    square = float(net.conv.weight.detach().square().sum())
    found = effective_rates(net, optimizer, ["conv.weight"])
    assert found["conv.weight"] == pytest.approx(0.2 / square)


def test_step_rotates_a_scale_invariant_weight_by_the_effective_rate(rng):
    # Equal effective rates turn weights of unequal lengths by the same angle.
    inputs, targets = torch.randn(64, 5, generator=rng), torch.randn(64, 4, generator=rng)
    directions = []
    for scale, rate in ((1.0, 1e-3), (10.0, 1e-1)):
        linear = nn.Linear(5, 4, bias=False).double()
        with torch.no_grad():
            linear.weight.copy_(scale * torch.eye(4, 5))
        model = nn.Sequential(linear, nn.BatchNorm1d(4, eps=1e-30).double())
        optimizer = torch.optim.SGD(linear.parameters(), lr=rate)
        assert effective_rates(model, optimizer, ["0.weight"])["0.weight"] == pytest.approx(2.5e-4)
        nn.functional.mse_loss(model(inputs.double()), targets.double()).backward()
        optimizer.step()
        directions.append(linear.weight.detach() / scale)
    torch.testing.assert_close(directions[0], directions[1])


def test_weight_norms_of_each_tensor_and_of_all(net):
    found = weight_norms(net)
    flat = torch.cat([weight.detach().double().flatten() for weight in net.parameters()])
    assert found.l2 == pytest.approx(float(flat.norm()))
    assert found.linf == float(flat.abs().max())
    assert found.names == tuple(name for name, _ in net.named_parameters())
    for name, weight in net.named_parameters():
        values = weight.flatten().tolist()
        l2, linf = math.sqrt(sum(x * x for x in values)), max(map(abs, values))
        assert found.layers[name] == pytest.approx((l2, linf))


def test_norms_of_half_precision_do_not_overflow():
    found = weight_norms({"a": torch.full((10,), 6e4, dtype=torch.float16), "b": torch.zeros(0)})
    assert found.l2 == pytest.approx(6e4 * math.sqrt(10), rel=1e-3)
    assert found.layers["b"] == (0.0, 0.0)


def test_weight_norms_are_printed_and_saved(net, tmp_path):
    found = weight_norms(net)
    assert str(found).splitlines()[1].startswith("all ")
    assert "conv.weight" in str(found)
    ritz.save(found, tmp_path / "norms.safetensors")
    assert ritz.load(tmp_path / "norms.safetensors") == found


def test_diagnostics_errors_name_the_wrong_argument(net, images):
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"names must be those of parameters.*'convolution'"):
        effective_rates(net, optimizer, ["convolution"])
    with pytest.raises(ValueError, match=r"optimizer must update every weight.*'conv.weight'"):
        effective_rates(net, optimizer, ["conv.weight"])
    with pytest.raises(ValueError, match="model must have parameters"):
        weight_norms(nn.ReLU())
    with pytest.raises(ValueError, match="rtol"):
        scale_invariant_weights(net, images, rtol=-1.0)
