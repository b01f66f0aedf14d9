import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from ritz.curvature import Risk
from ritz.measures import fold_batch_norm


def ready(model):
    """A model in float64 with statistics, scales and shifts that are no identity."""
    generator = torch.Generator().manual_seed(3)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            drawn = torch.rand(tensor.shape, generator=generator)
            tensor.data.copy_(drawn + 0.5 if tensor.ndim == 1 else drawn - 0.5)
    return model.double()


def draw(*shape):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def size(model):
    return sum(tensor.numel() for tensor in model.parameters())


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)
        self.second, self.norm2 = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)

    def forward(self, x):
        y = torch.relu(self.norm1(self.first(x)))
        return torch.relu(x + self.norm2(self.second(y)))


class Branching(nn.Module):
    """One that torch.fx cannot follow: what it does depends on the input."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        self.block = Residual()

    def forward(self, x):
        return self.net(x) if x.sum() > 0 else self.net(-x)


class Unclear(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Backwards(nn.Sequential):
    """Neighbours here do not follow each other."""

    def forward(self, x):
        y = self[0](self[1](x))
        return y if y.sum() > 0 else -y


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.linear(self.norm(self.linear(x))))


class Forked(Twice):
    """The layer's output goes elsewhere too."""

    def forward(self, x):
        y = self.linear(x)
        return self.norm(y) + y


class Peeking(Twice):
    """The layer's weights are used elsewhere too."""

    def forward(self, x):
        return self.norm(self.linear(x)) @ self.linear.weight


class PreActivation(Twice):
    def forward(self, x):
        return self.linear(torch.relu(self.norm(x)))


class TwoInputs(Twice):
    """The batch norm follows two layers."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(3, 3)

    def forward(self, x):
        return self.norm(self.linear(x)) + self.norm(self.other(x))


FOLDED = {
    "linear": (nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), (4, 3)),
    "no bias": (nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5)), (4, 3)),
    "conv1d": (nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU()), (2, 2, 8)),
    "conv2d": (nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4)), (2, 2, 5, 5)),
    "conv3d": (nn.Sequential(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2)), (2, 1, 3, 3, 3)),
    "grouped": (nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), (2, 4, 5, 5)),
    "transposed 1d": (nn.Sequential(nn.ConvTranspose1d(3, 2, 3), nn.BatchNorm1d(2)), (2, 3, 4)),
    "transposed 2d": (
        nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2), nn.BatchNorm2d(6)),
        (2, 4, 3, 3),
    ),
    "transposed 3d": (
        nn.Sequential(nn.ConvTranspose3d(1, 2, 2, bias=False), nn.BatchNorm3d(2)),
        (2, 1, 2, 2, 2),
    ),
    "not affine": (nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, affine=False)), (4, 3)),
    "residual": (nn.Sequential(Residual(), Residual()), (2, 2, 4, 4)),
    "called twice": (Twice(), (4, 3)),
    "input decides": (nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), Unclear()), (4, 3)),
    "nested": (nn.Sequential(nn.Sequential(nn.Linear(3, 4)), nn.BatchNorm1d(4)), (4, 3)),
    "identity": (nn.Sequential(nn.Linear(3, 5), nn.Identity(), nn.BatchNorm1d(5)), (4, 3)),
    "dropout": (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout2d(), nn.Identity(), nn.BatchNorm2d(4)),
        (2, 2, 5, 5),
    ),
    "dropout, input decides": (
        nn.Sequential(nn.Linear(3, 5), nn.Dropout(), nn.BatchNorm1d(5), Unclear()),
        (4, 3),
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_folded_model_has_the_same_outputs_and_fewer_parameters(name):
    model, shape = FOLDED[name]
    model = ready(copy.deepcopy(model)).eval()
    folded = fold_batch_norm(model)
    x = draw(*shape)
    torch.testing.assert_close(folded(x), model(x), rtol=1e-12, atol=1e-12)
    assert not any("BatchNorm" in type(module).__name__ for module in folded.modules())
    affine = "not affine" not in name
    assert size(folded) < size(model) if affine else size(folded) == size(model)


def test_a_linear_layer_on_sequences_raises_instead_of_giving_wrong_outputs():
    model = ready(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).eval()
    folded = fold_batch_norm(model)

    with pytest.raises(ValueError, match=r"inputs of shape \(n, features\), got \(2, 4, 4\)"):
        folded(draw(2, 4, 4))


def test_a_branch_after_dropout_is_not_folded():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.drop, self.norm = nn.Linear(3, 3), nn.Dropout(), nn.BatchNorm1d(3)

        def forward(self, x):
            y = self.drop(self.linear(x))
            return self.norm(y) + y

    with pytest.raises(
        ValueError, match="not the output of a convolution or linear layer used once"
    ):
        fold_batch_norm(ready(Branch()))


def test_submodules_are_traced_if_the_whole_model_cannot_be():
    model = ready(Branching()).eval()
    folded = fold_batch_norm(model)
    for x in (draw(4, 3), -draw(4, 3)):
        torch.testing.assert_close(folded(x), model(x))
    image = draw(1, 2, 4, 4)
    torch.testing.assert_close(folded.block(image), model.block(image))


def test_folding_does_not_change_the_model_itself():
    model = ready(FOLDED["conv2d"][0])
    model.train()
    before = copy.deepcopy(model.state_dict())
    folded = fold_batch_norm(model)
    assert folded.training
    assert model[0].bias is None
    assert all(module.training for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    with torch.no_grad():
        folded[0].weight.zero_()
    assert model[0].weight.any()


def test_folded_model_is_the_same_in_train_and_eval_mode():
    folded = fold_batch_norm(ready(copy.deepcopy(FOLDED["conv2d"][0])))
    x = draw(2, 2, 5, 5)
    torch.testing.assert_close(folded.train()(x), folded.eval()(x), rtol=0, atol=0)


def test_frozen_layers_stay_frozen():
    model = ready(copy.deepcopy(FOLDED["no bias"][0]))
    model[0].weight.requires_grad_(False)
    folded = fold_batch_norm(model)
    assert not any(tensor.requires_grad for tensor in folded[0].parameters())


def test_folded_curvature_does_not_depend_on_the_scale_of_a_layer():
    model = ready(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (other[0].weight, other[0].bias, other[1].running_mean):
            tensor.mul_(10)
        # Exact with the small constant beside the variance scaled as well.
        other[1].running_var.copy_(100 * (other[1].running_var + other[1].eps) - other[1].eps)
    data = (draw(6, 3), draw(6, 1))
    risks = [Risk(m, nn.MSELoss(), data) for m in (model, other)]
    folded = [Risk(fold_batch_norm(m), nn.MSELoss(), data) for m in (model, other)]
    losses = [risk.loss() for risk in (*risks, *folded)]
    assert losses == pytest.approx([losses[0]] * 4)
    assert float(risks[0].gradient().norm()) != pytest.approx(float(risks[1].gradient().norm()))
    torch.testing.assert_close(folded[0].gradient(), folded[1].gradient())


def shared_layer():
    layer = nn.Linear(3, 3)
    return nn.ModuleList(
        [nn.Sequential(layer, nn.BatchNorm1d(3)), nn.Sequential(layer, nn.BatchNorm1d(3))]
    )


def hooked():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    return model


UNFOLDED = {
    "pre-activation": (PreActivation(), "norm: its input is not the output"),
    "forked": (Forked(), "norm: its input is not the output"),
    "weights used": (Peeking(), "norm: its input is not the output"),
    "two layers": (TwoInputs(), "norm: its input is not the output"),
    "backwards": (Backwards(nn.Linear(3, 3), nn.BatchNorm1d(3)), "1: its input is not"),
    "alone": (nn.BatchNorm1d(3), "itself: its input is not"),
    "after a pool": (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.AvgPool2d(2), nn.BatchNorm2d(2)),
        "2: its input is not",
    ),
    "batch statistics": (
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)),
        "1: it has no running statistics",
    ),
    "parametrised": (
        nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.BatchNorm1d(3)),
        "1: the ParametrizedLinear before it has parametrised weights",
    ),
    "other axis": (
        nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(4)),
        "1: the Linear before it has 5 outputs, not 4",
    ),
    "shared": (shared_layer(), "0.1: the Linear before it, or its weights, are used in several"),
    "hooks": (hooked(), "1: it or the Linear before it has hooks"),
}


@pytest.mark.parametrize("name", UNFOLDED)
def test_batch_norm_that_cannot_be_folded_raises_or_is_skipped(name):
    model, match = UNFOLDED[name]
    with pytest.raises(ValueError, match=f"batch norm cannot be folded.*{match}.*strict=False"):
        fold_batch_norm(model)
    left = fold_batch_norm(model, strict=False)
    assert size(left) == size(model)
    assert left.state_dict().keys() == model.state_dict().keys()


def test_strict_false_folds_the_other_batch_norms():
    model = ready(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4)))
    model.eval()
    folded = fold_batch_norm(model, strict=False)
    assert isinstance(folded[1], nn.Identity)
    assert isinstance(folded[3], nn.BatchNorm1d)
    torch.testing.assert_close(folded(draw(5, 3)), model(draw(5, 3)))


def test_folding_a_model_without_batch_norm_returns_a_copy():
    model = nn.Linear(2, 2)
    folded = fold_batch_norm(model)
    assert folded is not model
    assert torch.equal(folded.weight, model.weight)


def test_folding_raises_for_something_that_is_not_a_module():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        fold_batch_norm("model")
