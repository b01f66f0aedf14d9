"""Wrong arguments raise an error that names them."""

from functools import partial

import pytest
import torch
from curvature.networks import Named, case, cnn, dictionaries, images, labels, mlp, noise, vectors
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ritz.curvature import (
    Risk,
    block_diagonal,
    curvature_operator,
    distance,
    fisher,
    ggn,
    gradient_covariance,
    gradient_statistics,
    hessian,
    kfac,
    summary,
)
from ritz.curvature import _batches as batches
from ritz.curvature._shared import batch_products
from ritz.measures import sharpness

CE = functional.cross_entropy
NAN = float("nan")


@pytest.fixture
def model():
    return mlp().double()


def changed(index, inputs=None, target=None):
    """Three batches, of which one is changed."""
    data = vectors(4, 3, 2)
    x, y = data[index]
    data[index] = (x if inputs is None else inputs(x), y if target is None else target(y))
    return data


class Noisy(nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.net, self.noise = mlp(), noise

    def forward(self, x):
        return self.net(self.noise(x))


NOISES = {
    "dropout left on": lambda x: functional.dropout(x, 0.5),
    "noise": lambda x: x + 0.01 * torch.randn_like(x),
}


@pytest.mark.parametrize("noise", NOISES)
def test_a_model_whose_two_calls_differ_raises(noise):
    with torch.random.fork_rng(), pytest.raises(ValueError, match="same loss in two calls, got"):
        Risk(Noisy(NOISES[noise]).double(), CE, vectors(4))


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        ([], ValueError, "data must contain at least one batch, got none"),
        ((), ValueError, "data must contain at least one batch, got none"),
        (None, TypeError, "data must be .* tensors, or a dataset, got NoneType"),
        (changed(1, lambda x: x[:0], lambda y: y[:0]), ValueError, "samples in batch 1 must be at"),
        ((noise(0, 3), labels(3, 0)), ValueError, "must have at least one sample"),
        ((noise(4, 3), labels(3, 5)), ValueError, r"tensors of the same length, got \[4, 5\]"),
        (noise(4, 3), TypeError, "or a dictionary with 'labels', got inputs alone"),
        ([(noise(4, 3),)], TypeError, "pass forward=lambda"),
        (list(zip(noise(4, 3), labels(3, 4), strict=True)), ValueError, "data holds batches; a"),
        ([noise(4, 3)], TypeError, r"got Tensor \(a list holds batches, a tuple all samples\)"),
        ([("a", 3)], TypeError, "batch 0 must contain a tensor .*, got tuple: other"),
        ([(torch.tensor(1.0), torch.tensor(0))], TypeError, "pass count="),
    ],
)  # fmt: skip
def test_wrong_data_raise(model, data, error, match):
    with pytest.raises(error, match=match):
        Risk(model, CE, data)


@pytest.mark.parametrize("memory", [2**30, 0])
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize(("label", "classes"), [(3, "got 3"), (-1, "got -1")])
def test_labels_out_of_range_name_the_batch(model, index, label, classes, memory, monkeypatch):
    monkeypatch.setattr(batches, "TUNING", batches.Tuning(memory=memory))
    data = changed(index, target=lambda y: torch.full_like(y, label))

    class Again:
        def __iter__(self):
            return iter(data)

    match = f"labels of batch {index} must be between 0 and 2, {classes}"
    with pytest.raises(ValueError, match=match):
        Risk(model, CE, Again()).loss()
    with pytest.raises(ValueError, match=match):
        Risk(model, nn.CrossEntropyLoss(weight=torch.ones(3).double()), Again()).gradient()


def test_labels_that_are_all_ignored_raise(model):
    data = changed(1, target=lambda y: torch.full_like(y, -100))
    with pytest.raises(ValueError, match="labels of batch 1 must not all be ignored"):
        Risk(model, CE, data)


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_loss_that_is_not_finite_names_the_batch(model, index, bad):
    data = changed(index, lambda x: torch.full_like(x, bad))

    def loss_fn(outputs, target):
        return CE(outputs, target) + 0 * outputs.sum()

    calls = [
        lambda risk: risk.loss(),
        lambda risk: risk.gradient(),
        lambda risk: hessian(risk) @ risk.theta,
        lambda risk: ggn(risk, engine="eager") @ risk.theta,
        lambda risk: gradient_covariance(risk),
    ]
    model = nn.Linear(3, 3).double()
    for call in calls:
        with pytest.raises(ValueError, match=f"the loss of batch {index} must be finite, got nan"):
            call(Risk(model, loss_fn, data))


def test_a_gradient_that_is_not_finite_at_a_finite_loss_raises(model):
    def loss_fn(outputs, target):
        return (outputs * 0).sum().sqrt() + CE(outputs, target)

    risk = Risk(model, loss_fn, vectors(4, 3))
    assert risk.loss() > 0
    for call in (risk.gradient, lambda: hessian(risk) @ risk.theta):
        with pytest.raises(
            ValueError, match=r"the gradient of batch 0, .* must be finite, got 31 NaN or Inf"
        ):
            call()


@pytest.mark.parametrize(
    ("loss_fn", "error", "match"),
    [
        (
            nn.CrossEntropyLoss(reduction="none"),
            ValueError,
            r"one number, .* got \(4,\) in batch 0",
        ),
        (lambda outputs, target: 3.0, ValueError, "one number, .* got float in batch 0"),
        (nn.CrossEntropyLoss(reduction="sum"), ValueError, "the mean over a batch, .*'sum'"),
        (partial(CE, size_average=False), ValueError, r"reduction='mean', .*size_average"),
        (nn.HuberLoss(reduction="sum"), ValueError, "the mean over a batch, .*'sum'"),
        ("cross_entropy", TypeError, "loss_fn must be callable or None, got str"),
        (None, TypeError, r"loss_fn must be passed for batches of \(inputs, target\), got None"),
        (functional.mse_loss, ValueError, r"the shape of the outputs, \(4, 3\), got \(4,\)"),
    ],
)
def test_wrong_losses_raise(model, loss_fn, error, match):
    with pytest.raises(error, match=match):
        Risk(model, loss_fn, vectors(4))


@pytest.mark.parametrize("name", ["forward", "count"])
def test_functions_that_cannot_be_called_are_named(model, name):
    with pytest.raises(TypeError, match=f"{name} must be callable or None, got int"):
        Risk(model, CE, vectors(4), **{name: 3})


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ("9", "params must match one of .*, got '9'"),
        ([], "match one of"),
        (lambda name: False, "match one of"),
        (
            ["0.weight", "0.scale"],
            r"among the trainable .*, got \['0.scale'\]",
        ),
        ("(", r"params must be a regular expression, got '\('"),
        (["0.bias"], r"among the trainable \['0.weight'.*, got \['0.bias'\]"),
    ],
)
def test_wrong_choices_of_parameters_raise(model, params, match):
    model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=match):
        Risk(model, CE, vectors(4), params=params)
    with pytest.raises(ValueError, match=match):
        Risk(model, CE, vectors(4)).on(params)


def test_a_model_without_trainable_parameters_raises(model):
    with pytest.raises(ValueError, match="parameters that require a gradient, got none"):
        Risk(model.requires_grad_(False), CE, vectors(4))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"batch_norm": "frozen"}, ValueError, "batch_norm must be one of train, eval, recomputed"),
        ({"dropout": "on"}, ValueError, "dropout must be one of off, fixed; got 'on'"),
        ({"sharing": "all"}, ValueError, "sharing must be one of"),
        ({"precision": "bfloat16"}, ValueError, "precision must be one of float32, tf32, float64"),
        ({"l2": -0.1}, ValueError, "l2 must be at least 0"),
        ({"l2": NAN}, ValueError, "l2 must be a number that is at least 0.0, got nan"),
        (
            {"batch_size": 4},
            ValueError,
            "batch_size must not be passed for data in batches",
        ),
        (
            {"count": lambda batch: 0},
            ValueError,
            "number of samples in batch 0 must be at least 1, got 0",
        ),
        (
            {"forward": lambda model, batch: 1},
            TypeError,
            r"forward must return \(outputs, target\)",
        ),
    ],
)
def test_wrong_options_of_a_risk_raise(model, options, error, match):
    with pytest.raises(error, match=match):
        Risk(model, CE, vectors(4), **options)


def test_a_model_that_is_no_module_raises():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got function"):
        Risk(mlp, CE, vectors(4))


@pytest.mark.parametrize(
    "call",
    [hessian, ggn, fisher, gradient_covariance, block_diagonal, kfac, summary, gradient_statistics,
     partial(distance, initial=torch.zeros(1)), sharpness],
)  # fmt: skip
def test_a_model_in_place_of_a_risk_raises(model, call):
    with pytest.raises(TypeError, match=r"risk must be ritz\.Risk\(model, .*, got Sequential"):
        call(model)


def test_complex_parameters_raise():
    model = nn.Linear(3, 3, dtype=torch.complex128)
    with pytest.raises(TypeError, match="parameters must be of a real floating-point dtype"):
        Risk(model, lambda outputs, target: outputs.abs().mean(), vectors(4))


def test_parameters_of_several_dtypes_raise(model):
    model[2].float()
    with pytest.raises(ValueError, match=r"of one dtype, got .* pass precision= to choose"):
        Risk(model, CE, vectors(4))
    single = [(x.float(), y) for x, y in vectors(4)]
    assert Risk(model, CE, single, precision="float64").theta.dtype == torch.float64
    with pytest.raises(RuntimeError, match="same dtype"):
        Risk(mlp(), CE, vectors(4))


@pytest.mark.parametrize("data", [images(4)[0], TensorDataset(*images(4)[0])])
def test_batch_statistics_without_a_batch_size_raise(data):
    model = cnn().double()
    with pytest.raises(ValueError, match="batch_size is required with batch_norm='train'"):
        Risk(model, CE, data, batch_norm="train")
    with pytest.raises(ValueError, match="batch_size is required with batch_norm='train'"):
        Risk(model, CE, data).with_batch_norm("train")
    assert Risk(model, CE, data, batch_norm="train", batch_size=4).num_batches == 1


def test_batch_statistics_of_one_value_raise(model):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    for mode in ("train", "recomputed"):
        with pytest.raises(ValueError, match="more than "):
            Risk(model, CE, vectors(4, 1), batch_norm=mode).loss()


@pytest.mark.parametrize(
    ("theta", "error", "match"),
    [
        (torch.zeros(30).double(), ValueError, r"theta must be \(31,\)"),
        (torch.zeros(31), TypeError, "theta must be torch.float64"),
        (torch.zeros(31, 2).double(), ValueError, r"theta must be .31,., got \(31, 2\)"),
        ([0.0], TypeError, "theta must be a torch.Tensor, got list"),
    ],
)
def test_wrong_points_raise(theta, error, match):
    with pytest.raises(error, match=match):
        case("mlp").risk().at(theta)


def test_wrong_batches_and_samples_raise():
    risk = case("mlp").risk()
    for index in (3, -1):
        with pytest.raises(IndexError, match=f"index must be between 0 and 2, got {index}"):
            risk.batch(index)
    with pytest.raises(ValueError, match="number of indices must be at least 1, got 0"):
        risk.samples(torch.tensor([], dtype=torch.long))
    with pytest.raises(TypeError, match=r"indices must be one vector of int64, got torch\.bool"):
        risk.samples(torch.ones(12, dtype=torch.bool))
    with pytest.raises(ValueError, match="indices must be between 0 and 11, got -1"):
        risk.samples(torch.tensor([2, -1]))
    with pytest.raises(ValueError, match=r"samples\(\) needs batch_norm='eval' or 'recomputed'"):
        case("cnn train").risk().samples(torch.tensor([0]))
    with pytest.raises(ValueError, match="batch_norm must be one of"):
        risk.with_batch_norm("best")


def test_fixed_dropout_without_dropout_layers_raises(model):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(functional.dropout(x, 0.5, training=self.training))

    with pytest.raises(ValueError, match="dropout='fixed' needs dropout layers, but the model"):
        Risk(Functional(), CE, vectors(4), dropout="fixed")


def test_dropout_that_cannot_be_fixed_raises(model):
    layers = nn.Sequential(nn.Linear(3, 3), nn.AlphaDropout(0.5)).double()
    with pytest.raises(ValueError, match=r"does not support AlphaDropout"):
        Risk(layers, CE, vectors(4), dropout="fixed")
    layers = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).double()
    with pytest.raises(ValueError, match="needs dropout='off', got 'fixed'"):
        Risk(layers, CE, vectors(4), dropout="fixed").samples(torch.tensor([0]))


@pytest.mark.parametrize("call", [ggn, fisher, gradient_covariance])
def test_operators_of_outputs_raise_if_the_loss_is_inside_the_model(call):
    class Smoothed(nn.Linear):
        def forward(self, inputs, labels):
            logits = super().forward(inputs)
            # Not the plain cross-entropy of the logits, which would be recognised.
            loss = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
            return {"loss": loss, "logits": logits}

    [(inputs, labels)] = vectors(4)
    risk = Risk(Smoothed(3, 3).double(), None, [{"inputs": inputs, "labels": labels}])
    with pytest.raises((TypeError, ValueError), match="loss_fn"):
        call(risk)


def test_dictionaries_without_labels_or_a_loss_raise():
    model = Named().double()
    unlabelled = [{name: d[name] for name in ("inputs", "scale")} for d in dictionaries(4)]
    with pytest.raises(TypeError, match="a dictionary with 'labels', got the keys"):
        Risk(model, CE, unlabelled)
    with pytest.raises(ValueError, match="must return an output with 'loss', got dict"):
        Risk(model, None, unlabelled)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"engine": "fast"}, "engine must be one of auto, linearized, eager"),
        ({"engine": "eager", "compile": True}, "compile=True needs engine='linearized'"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"memory": -1}, "memory must be at least 0"),
    ],
)
def test_wrong_options_of_products_raise(options, match):
    with pytest.raises(ValueError, match=match):
        hessian(case("mlp").risk(), **options)


def test_wrong_kinds_and_blocks_raise():
    risk = case("mlp").risk()
    with pytest.raises(ValueError, match="matrix must be one of hessian, ggn"):
        curvature_operator(risk, "fisher")
    with pytest.raises(ValueError, match="kind must be one of"):
        fisher(risk, kind="exact")
    with pytest.raises(ValueError, match="num_draws must be at least 1"):
        fisher(risk, num_draws=0)
    with pytest.raises(ValueError, match=r"block must be \(31,\) or \(31, k\)"):
        next(batch_products(risk, noise(30)))


@pytest.mark.parametrize(
    ("target", "error", "match"),
    [
        (
            labels(3, 4).double(),
            TypeError,
            "must be integers for cross-entropy, got float64",
        ),
        (labels(3, 4).int(), TypeError, "batch 0 must be int64 for cross-entropy, got int32"),
        (labels(3, 4).tolist(), TypeError, "batch 0 must be a tensor for this loss, got list"),
        (labels(3, 4)[:, None], ValueError, r"shape \(4,\) .*, got \(4, 1\): remove the last"),
        (labels(3, 4)[:2], ValueError, r"shape \(4,\) for outputs of shape \(4, 3\), got \(2,\)"),
    ],
    ids=["floating-point", "int32", "list", "column", "too few"],
)
def test_labels_that_do_not_fit_the_outputs_are_named_before_torch_sees_them(
    model, target, error, match
):
    with pytest.raises(error, match=match):
        Risk(model, CE, [(noise(4, 3), target)])


def test_binary_targets_of_another_shape_than_the_outputs_raise(model):
    target = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"shape of the outputs, \(4, 3\), got \(4,\)"):
        Risk(model, functional.binary_cross_entropy_with_logits, [(noise(4, 3), target)])


def test_an_error_of_the_model_names_the_batch_and_its_tensors(model):
    match = r"batch 0 with tensors float64 \(4, 2\), int64 \(4,\), for .* float64: mat1"
    with pytest.raises(RuntimeError, match=match):
        Risk(model, CE, [(noise(4, 2), labels(3, 4))])


@pytest.mark.parametrize(
    ("dtype", "inputs", "match"),
    [
        ("float32", noise(4, 3), "Pass precision='float32' to convert the data, or 'float64' for"),
        ("float64", noise(4, 3).float(), "Pass precision='float64' to convert the data$"),
        ("float32", labels(9, 4, 3), "Convert the inputs to float32$"),
    ],
)
def test_inputs_of_another_dtype_than_the_parameters_say_how_to_convert_them(
    model, dtype, inputs, match
):
    model = model.to(getattr(torch, dtype))
    with pytest.raises(RuntimeError, match=match):
        Risk(model, CE, (inputs.numpy(), labels(3, 4).numpy()))


def test_options_of_a_wrong_type_raise(model):
    risk = Risk(model, CE, vectors(4))
    with pytest.raises(TypeError, match=r"options must be among engine, .*, got egnine"):
        hessian(risk, egnine="eager")
    with pytest.raises(TypeError, match="memory must be an integer, got '1GB'"):
        block_diagonal(risk, memory="1GB")
    with pytest.raises(TypeError, match="seed must be an integer, got 'a'"):
        Risk(model, CE, vectors(4), seed="a")
    with pytest.raises(ValueError, match=r"theta must be \(\d+,\), got \(1,\)"):
        risk.at(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"risk must be ritz\.Risk\(model, .*, got Sequential"):
        hessian(risk).at(model)
