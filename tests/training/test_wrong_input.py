import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from training.examples import network, samples

from ritz._core.registry import UnknownNameError
from ritz.optim import Gadam, IterateAverage
from ritz.training import CurvatureMonitor, evaluate, fit, register_optimizer

GOOD = {"num_epochs": 2, "batch_size": 12}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": None}, "batch_size is required for data of tensors or datasets"),
        ({"num_epochs": 0}, "num_epochs must be at least 1, got 0"),
        ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
        ({"evaluate_every": 0}, "evaluate_every must be at least 1"),
        ({"precision": "float64"}, "precision must be one of float32, tf32, bfloat16, float16"),
        ({"average_from": 3}, "average_from must be between 1 and 2, got 3"),
        ({"average_from": 1, "patience": 3}, "average_from must not be given with patience"),
        ({"patience": 3}, "patience needs validation data"),
        ({"schedule": "cosine"}, "schedule must be one of constant, linear, step; got 'cosine'"),
        ({"schedule_unit": "hour"}, "schedule_unit must be one of step, epoch"),
        ({"clip_norm": -1.0}, "clip_norm must be finite and above 0, got -1.0"),
        ({"clip_norm": 0.0}, "clip_norm must be finite and above 0, got 0.0"),
        ({"keep": [3]}, "keep must be between 1 and 2"),
        ({"final": "best"}, "final must be one of last, average"),
        ({"final": "average"}, "final='average' needs an average: pass average_from or patience"),
        ({"warmup": 3}, "warmup must be between 0 and 2, got 3"),
        (
            {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))])},
            "optimizer must have parameters of the model, got a SGD of others",
        ),
        (
            {"optimizer": torch.optim.LBFGS},
            "optimizer must not be LBFGS",
        ),
        (
            {"schedule": ReduceLROnPlateau(torch.optim.SGD([nn.Parameter(torch.ones(2))]))},
            "schedule must not be ReduceLROnPlateau",
        ),
        (
            {"average": IterateAverage(torch.optim.SGD([nn.Parameter(torch.ones(2))]))},
            "average must be created for the optimizer",
        ),
        ({"capture": True}, "capture=True needs a CUDA device.* on cpu"),
        ({"device": "gpu"}, "device must be cpu, cuda or cuda:<number>, got 'gpu'"),
        ({"augment": "flip"}, "augment must be auto, None or an Augmentation"),
        ({"loss_fn": nn.CrossEntropyLoss(reduction="sum")}, "reduction"),
    ],
)
def test_wrong_values_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        fit(network(), samples(), **(GOOD | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 1.5}, "batch_size must be an integer, got 1.5"),
        ({"schedule": 3}, "schedule must be one of constant, linear, step, a function"),
        ({"optimizer": 3}, "optimizer must be a name, a torch optimiser or a function"),
        ({"optimizer": lambda params: list(params)}, "optimizer must be a name"),
    ],
)
def test_wrong_kinds_are_named(change, message):
    with pytest.raises(TypeError, match=message):
        fit(network(), samples(), **(GOOD | change))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="got 'cuda': torch finds no CUDA device"):
        fit(network(), samples(), device="cuda", **GOOD)


def test_a_wrong_optimiser_name_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match=r"'gadamy'; did you mean .*gadamx"):
        fit(network(), samples(), optimizer="gadamy", **GOOD)


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="'sgd' is registered already"):
        register_optimizer("sgd")(torch.optim.SGD)


@pytest.mark.parametrize("change", [{"average_from": 2}, {"patience": 2}])
def test_a_user_defined_average_excludes_average_from_and_patience(change):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = IterateAverage(optimizer)
    with pytest.raises(ValueError, match="pass either average or"):
        fit(model, samples(), optimizer=optimizer, average=average, **change, **GOOD)


def test_an_optimiser_with_a_built_in_average_is_not_given_another():
    model = network()
    optimizer = Gadam(model.parameters(), start=1)
    with pytest.raises(ValueError, match="average_from=2 differs from the start"):
        fit(model, samples(), optimizer=optimizer, average_from=2, **GOOD)


@pytest.mark.parametrize(
    "change", [{"average_from": 2}, {"schedule": "linear", "schedule_unit": "step"}]
)
def test_data_without_a_length_need_steps_per_epoch(change):
    with pytest.raises(ValueError, match="steps_per_epoch is required"):
        fit(network(), lambda epoch: iter([samples()]), num_epochs=2, **change)


def test_data_without_batches_are_refused():
    with pytest.raises(TypeError, match="data must be tensors, a DataLoader"):
        fit(network(), 3, num_epochs=1)
    with pytest.raises(ValueError, match="data gave no batch in epoch 1"):
        fit(network(), [], num_epochs=1)
    with pytest.raises(ValueError, match="batches must hold at least one batch"):
        evaluate(network(), [])
    with pytest.raises(TypeError, match="a batch must hold a tensor"):
        fit(network(), ["a"], num_epochs=1)


def test_a_run_is_resumed_with_the_same_settings(tmp_path):
    fit(network(), samples(), checkpoint=tmp_path, **GOOD)
    with pytest.raises(ValueError, match="was made with batch_size=12, this run has 6"):
        fit(network(), samples(), checkpoint=tmp_path, num_epochs=2, batch_size=6)
    with pytest.raises(ValueError, match="was made with optimizer='sgd', this run has 'adamw'"):
        fit(network(), samples(), checkpoint=tmp_path, optimizer="adamw", **GOOD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantities": "trace"}, "quantities must be a list of lambda_max"),
        ({"quantities": []}, "quantities must be a list of"),
        ({"quantities": ["norm"]}, "quantities must be one of"),
        ({"every": 0}, "every must be at least 1"),
        ({"unit": "hour"}, "unit must be one of step, epoch"),
        ({"matrix": "fisher"}, "matrix must be one of"),
        ({"num_probes": 1}, "num_probes must be at least 2"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
    ],
)
def test_a_monitor_names_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        CurvatureMonitor(samples(), **change)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((torch.ones(0, 6), torch.ones(0).long()), "data must hold samples, got none"),
        ((torch.ones(4, 6), torch.ones(3).long()), r"tensors of one length, got \[4, 3"),
        ((torch.full((4, 6), torch.nan), torch.ones(4).long()), "finite, got NaN or Inf in"),
        ((torch.ones(4, 6), torch.tensor([0, 1, 2, 3])),
         "labels of the first batch must be between 0 and 2, got 3"),
        ((torch.ones(40, 6), torch.tensor([0] * 39 + [7])), "labels of .* must be between 0 and 2"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_trained_on_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        fit(network(), data, num_epochs=1, batch_size=4)


def test_labels_without_an_output_are_not_evaluated():
    x, y = samples(8)
    with pytest.raises(ValueError, match="labels of batches must be between 0 and 2"):
        evaluate(network(), [(x, y + 2)])


@pytest.mark.parametrize("as_loader", [False, True], ids=["ready", "made as they come"])
def test_the_batch_with_a_label_without_an_output_is_named(as_loader):
    x, y = samples(12)
    batches = [(x[:4], y[:4]), (x[4:8], y[4:8]), (x[8:], y[8:] + 2)]
    source = (lambda epoch: iter(batches)) if as_loader else batches
    with pytest.raises(ValueError, match="labels of batch 3 must be between 0 and 2"):
        fit(network(), source, num_epochs=1, optimizer_settings={"lr": 0.0})
