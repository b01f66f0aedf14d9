"""Diversity of solutions, weight norms, scale invariance and effective learning rates."""

import math
from itertools import combinations

import pytest
import torch
from torch import nn

import ritz
from ritz.optim import (
    SpectralSGD,
    effective_rates,
    scale_invariant_weights,
    solution_diversity,
    spectral_rates,
    weight_norms,
)


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


# ------------------------------------------------------------------------------------------
# Diversity of solutions.


def looped(logits):
    """The definitions, a pair and a sample at a time."""
    kl, variation, distance, count = 0.0, 0.0, 0.0, 0
    for a, b in combinations(logits.double().softmax(-1).tolist(), 2):
        for p, q in zip(a, b, strict=True):
            classes = list(zip(p, q, strict=True))
            forward = sum(x * math.log(x / y) for x, y in classes)
            backward = sum(y * math.log(y / x) for x, y in classes)
            kl += (forward + backward) / 2
            variation += (sum(abs(x - y) for x, y in classes) / 2) ** 2
            distance += sum((x - y) ** 2 for x, y in classes)
            count += 1
    return [kl / count, variation / count, distance / count]


def test_diversity_equals_its_definitions(rng):
    logits = 3 * torch.randn(4, 7, 5, generator=rng)
    found = solution_diversity(logits)
    assert [found.kl, found.total_variation, found.distance] == pytest.approx(looped(logits), 1e-12)
    for i, j in combinations(range(4), 2):
        expected = looped(logits[[i, j]])
        pairs = (found.kl_pairs, found.total_variation_pairs, found.distance_pairs)
        assert [float(pair[i, j]) for pair in pairs] == pytest.approx(expected, 1e-12)
        assert all(bool(torch.equal(pair, pair.T)) for pair in pairs)


def test_diversity_accepts_a_list_and_counts_further_dimensions_as_samples(rng):
    logits = torch.randn(3, 4, 6, 5, generator=rng)
    whole = solution_diversity(logits.flatten(1, 2))
    found = solution_diversity(list(logits))
    assert found.num_samples == 24
    assert found.kl == whole.kl


def test_diversity_of_equal_solutions_is_zero(rng):
    logits = torch.randn(1, 6, 3, generator=rng).expand(4, -1, -1)
    shift = torch.arange(4.0).view(4, 1, 1)  # the softmax does not see it
    found = solution_diversity((logits + shift).double())
    assert found.kl < 1e-14
    assert found.distance < 1e-14


def test_diversity_does_not_underflow():
    # p = (1, e^-2000): its logarithm is known although it is zero as a float.
    logits = torch.tensor([[[0.0, -2000.0]], [[-2000.0, 0.0]]])
    found = solution_diversity(logits)
    assert found.kl == pytest.approx(2000.0)
    assert found.total_variation == pytest.approx(1.0)
    assert found.distance == pytest.approx(2.0)


def test_diversity_of_classes_with_logit_minus_infinity():
    both = torch.tensor([[[0.0, 1.0, -math.inf]], [[1.0, 0.0, -math.inf]]])
    assert solution_diversity(both).kl == pytest.approx(solution_diversity(both[..., :2]).kl)
    one = torch.tensor([[[0.0, 1.0, 0.0]], [[1.0, 0.0, -math.inf]]])
    assert solution_diversity(one).kl == math.inf


def test_diversity_is_printed_and_saved(rng, tmp_path):
    found = solution_diversity(torch.randn(3, 10, 4, generator=rng))
    assert "3 solutions, 10 samples" in str(found)
    ritz.save(found, tmp_path / "diversity.safetensors")
    again = ritz.load(tmp_path / "diversity.safetensors")
    assert again.kl == found.kl
    assert torch.equal(again.kl_pairs, found.kl_pairs)


@pytest.mark.parametrize(
    ("logits", "match"),
    [
        (torch.zeros(1, 3, 2), "at least two models, got 1"),
        ([torch.zeros(3, 2), torch.zeros(4, 2)], r"one shape \(n, c\).*\(4, 2\)"),
        (torch.zeros(2, 3), "one shape"),
        (torch.zeros(2, 0, 3), "one shape"),
        (torch.full((2, 3, 2), math.nan), "must not contain NaN"),
    ],
)
def test_diversity_error_names_wrong_logits(logits, match):
    with pytest.raises(ValueError, match=match):
        solution_diversity(logits)


def test_diversity_of_integer_tensors_raises():
    with pytest.raises(TypeError, match="logits must be of a real floating-point dtype"):
        solution_diversity(torch.zeros(2, 3, 2, dtype=torch.long))


def test_diagnostics_name_an_argument_of_another_type():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="or named tensors, got str"):
        weight_norms("model")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        scale_invariant_weights("model", torch.ones(2, 2))
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, got Linear"):
        effective_rates(model, model, ["weight"])
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got SGD"):
        effective_rates(optimizer, optimizer, ["weight"])
    with pytest.raises(TypeError, match=r"spectrum must be the result of ritz\.lanczos"):
        spectral_rates(torch.ones(3))
