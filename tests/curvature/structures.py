"""Small networks of every structure, and their Gauss-Newton matrices without the library."""

from functools import partial

import torch
from curvature.networks import labels, noise
from torch import nn
from torch.func import jacrev
from torch.nn import functional

from ritz import diagonal, trace
from ritz.curvature import Risk, ggn

CROSS_ENTROPY = functional.cross_entropy
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


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


def ggn_diagonal(risk):
    return diagonal(ggn(risk), method="exact").mean


def ggn_trace(risk):
    return float(trace(ggn(risk), method="exact"))
