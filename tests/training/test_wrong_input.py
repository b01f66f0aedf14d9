import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset
from training.examples import network, samples

from ritz._core.registry import UnknownNameError
from ritz.optim import Gadam, IterateAverage
from ritz.training import CurvatureMonitor, TrainingConfig, evaluate, fit, register_optimizer, sweep
from ritz.training._optimizers import average_plan

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
        ({"average_from": 1, "patience": 3}, "average_from must be None if patience is set"),
        ({"patience": 3}, "patience needs validation data, got none: pass validation="),
        ({"patience": 3, "test": samples()}, "patience needs validation data"),
        ({"patience_metric": "loss"}, "patience_metric must be given with patience"),
        ({"patience": 2, "patience_metric": "f1"}, "patience_metric must be one of auto, acc"),
        ({"average_interval": 2}, "average_interval must be given with average_from or patience"),
        ({"milestones": [1]}, "milestones must be given with schedule step, got constant"),
        ({"final_ratio": 0.1}, "final_ratio must be given with schedule linear, got constant"),
        ({"lookahead_until": 2}, "lookahead_until must agree .* SGD with until=None"),
        (
            {"schedule": "cosine"},
            "schedule must be one of constant, linear, linear_held, step; got 'cosine'",
        ),
        ({"schedule_unit": "hour"}, "schedule_unit must be one of step, epoch"),
        ({"clip_norm": -1.0}, "clip_norm must be finite and above 0, got -1.0"),
        ({"clip_norm": 0.0}, "clip_norm must be finite and above 0, got 0.0"),
        ({"keep": [3]}, "keep must be between 0 and 2"),
        ({"final": "best"}, "final must be one of last, average"),
        (
            {"final": "average"},
            r"needs an average: pass average_from \(--average-from\) or patience",
        ),
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
            {"schedule": StepLR(torch.optim.SGD([nn.Parameter(torch.ones(2))]), 1)},
            "schedule must be created for the optimizer that you pass, got a StepLR of another SGD",
        ),
        (
            {"average": IterateAverage(torch.optim.SGD([nn.Parameter(torch.ones(2))]))},
            "average must be created for the optimizer",
        ),
        ({"capture": True}, "capture=True needs a CUDA device.* on cpu"),
        ({"device": "gpu"}, "device must be cpu, cuda or cuda:<number>, got 'gpu'"),
        ({"augment": "flip"}, "augment must be a bool or an Augmentation"),
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
        (
            {"schedule": 3},
            "schedule must be one of constant, linear, linear_held, step, a function",
        ),
        ({"schedule": StepLR}, "schedule must be a scheduler, got the class StepLR"),
        ({"config": {"num_epochs": 2}}, "config must be a ritz.training.TrainingConfig, got dict"),
        ({"monitors": CurvatureMonitor(samples())}, "monitors must be a list of monitors, got Cur"),
        ({"monitors": [CurvatureMonitor]}, "monitors must be .*got the class CurvatureMonitor"),
        ({"monitors": "trace"}, r"callable as \(count, model, optimizer\), got 'trace'"),
        ({"monitors": [lambda *_: 3]}, "the result of a monitor must be a dictionary or None"),
        ({"writer": "logs"}, "writer must have a method add_scalar, such as a Summ.*; got str"),
        ({"optimizer": 3}, "optimizer must be a name, a torch optimiser or a function"),
        ({"optimizer": lambda params: list(params)}, "optimizer must be a name"),
    ],
)
def test_wrong_kinds_are_named(change, message):
    with pytest.raises(TypeError, match=message):
        fit(network(), samples(), **(GOOD | change))


def test_a_monitor_refuses_a_writer_without_its_method():
    with pytest.raises(TypeError, match=r"writer must have a method add_scalar.*; got str"):
        CurvatureMonitor(samples(), writer="logs")


def test_fit_takes_a_model_and_sweep_a_function_that_makes_models():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got type"):
        fit(nn.Linear, samples(), **GOOD)
    with pytest.raises(TypeError, match="a function that returns a new model, got Sequential"):
        sweep(network(), samples(), {"optimizer.lr": [0.1]}, **GOOD)


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
    optimizer = Gadam(model.parameters(), start=1, interval=4)
    with pytest.raises(ValueError, match=r"must agree .* got start=5, .* with start=1, interval=4"):
        fit(model, samples(), optimizer=optimizer, average_from=2, **GOOD)
    with pytest.raises(ValueError, match=r"got start=1, interval=1 for a Gadam with .*interval=4"):
        fit(model, samples(), optimizer=optimizer, average_from=1, average_every="step", **GOOD)
    with pytest.raises(ValueError, match="got start=None, interval=4 for a Gadam with start=1"):
        fit(model, samples(), optimizer=optimizer, patience=1, **GOOD)


@pytest.mark.parametrize(
    "change",
    [
        {"average_from": 2},
        {"lookahead_until": 2},
        {"patience": 2},
        {"schedule": "linear", "schedule_unit": "step"},
    ],
)
def test_data_without_a_length_need_steps_per_epoch(change):
    with pytest.raises(ValueError, match="steps_per_epoch is required"):
        fit(network(), lambda epoch: iter([samples()]), num_epochs=2, **change)


def test_data_without_batches_are_refused():
    with pytest.raises(TypeError, match=r"train data must be \(inputs, targets\), both tensors"):
        fit(network(), 3, num_epochs=1)
    with pytest.raises(ValueError, match="train data must not be empty"):
        fit(network(), [], num_epochs=1)
    with pytest.raises(ValueError, match="data yielded no batch in epoch 1: every epoch"):
        fit(network(), lambda epoch: [], num_epochs=1)
    with pytest.raises(ValueError, match="batches must contain at least one batch"):
        evaluate(network(), [])
    with pytest.raises(TypeError, match="got list of str"):
        fit(network(), ["a"], num_epochs=1)


def test_a_run_is_resumed_with_the_same_settings(tmp_path):
    fit(network(), samples(), checkpoint=tmp_path, **GOOD)
    with pytest.raises(ValueError, match="was made with batch_size=12, this run has 6"):
        fit(network(), samples(), checkpoint=tmp_path, num_epochs=2, batch_size=6)
    with pytest.raises(ValueError, match="was made with optimizer='sgd', this run has 'adamw'"):
        fit(network(), samples(), checkpoint=tmp_path, optimizer="adamw", **GOOD)
    settings = {"optimizer_settings": {"lr": 0.01}}
    with pytest.raises(ValueError, match=r"was made with lr=default, this run has 0.01: pass"):
        fit(network(), samples(), checkpoint=tmp_path, **GOOD | settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantities": "trace"}, "quantities must be a list of alpha, .*; got .trace."),
        ({"quantities": []}, "quantities must be a list of"),
        ({"quantities": ["norm"]}, "no quantity is named 'norm'; did you mean norm_test"),
        ({"quantities": [3]}, "no quantity is named 3; see ritz list quantities"),
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
        ((torch.ones(0, 6), torch.ones(0).long()), "data must have at least one sample"),
        ((torch.ones(4, 6), torch.ones(3).long()), r"tensors of the same length, got \[4, 3"),
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


def test_three_pairs_are_training_validation_and_test_data():
    train, validation, test = samples(48), samples(24), samples(12)

    result = fit(network(), (train, validation, test), **GOOD)

    assert result.num_steps == 8  # four batches of the training data alone in each of two epochs
    assert {"train_loss", "validation_loss", "test_loss"} <= result.metrics.keys()


def test_a_wrong_test_label_leaves_the_folder_empty(tmp_path):
    x, y = samples(24)

    with pytest.raises(ValueError, match="labels of the test data must be between"):
        fit(network(), ((x, y), (x, y + 7)), checkpoint=tmp_path, log=tmp_path / "log", **GOOD)

    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == []


@pytest.mark.parametrize("steps", [1, 5])
def test_max_steps_ends_a_run_within_an_epoch(steps):
    result = fit(network(), samples(48), num_epochs=9, batch_size=12, max_steps=steps)

    assert (result.num_steps, result.status.outcome) == (steps, "completed")
    assert result.num_epochs == 1 + (steps > 4)


def test_milestones_and_the_final_ratio_set_the_schedule():
    usual = {"num_epochs": 10, "batch_size": 48, "optimizer_settings": {"lr": 1e-3}}
    steps = fit(network(), samples(48), schedule="step", milestones=[1, 3], **usual)
    falls = fit(network(), samples(48), schedule="linear", final_ratio=0.2, **usual)

    rates = torch.tensor([1, 0.1, 0.1, *[0.01] * 7], dtype=torch.float64) * 1e-3
    torch.testing.assert_close(steps.history["learning_rate"], rates)
    assert float(falls.history["learning_rate"][-1]) == pytest.approx(2e-4)


@pytest.mark.parametrize(("every", "interval"), [("epoch", 12), ("step", 3)])
def test_the_averaging_interval_counts_epochs_or_steps(every, interval):
    options = {"average_from": 2, "average_every": every, "average_interval": 3}

    plan = average_plan(TrainingConfig(num_epochs=5, **options), length=4)

    assert plan == {"start": 5, "interval": interval, "until": 5}


def numpy_batches(rows):
    return tuple(np.stack([np.asarray(row[place]) for row in rows]) for place in (0, 1))


@pytest.mark.parametrize("kind", ["list", "arrays", "loader of arrays", "batches of arrays"])
def test_lists_and_arrays_are_accepted_like_tensors(kind):
    x, y = samples(48)
    sources = {
        "list": [x, y],
        "arrays": (x.numpy(), y.numpy()),
        "loader of arrays": DataLoader(TensorDataset(x, y), 12, collate_fn=numpy_batches),
        "batches of arrays": [
            (a.numpy(), b.numpy()) for a, b in zip(x.split(12), y.split(12), strict=True)
        ],
    }

    result = fit(network(), sources[kind], **GOOD)

    assert result.num_steps == 8


def test_a_batch_size_beside_a_loader_is_refused_because_it_would_have_no_effect():
    loader = DataLoader(TensorDataset(*samples()), batch_size=8)
    with pytest.raises(ValueError, match="batch_size must not be passed for data in batches"):
        fit(network(), loader, num_epochs=1, batch_size=16)
    with pytest.raises(ValueError, match="such as a DataLoader, got 16"):
        fit(network(), loader, TrainingConfig(num_epochs=1, batch_size=16))
    with pytest.raises(ValueError, match="such as a DataLoader, got 16"):
        fit(network(), list(loader), num_epochs=1, batch_size=16)
    with pytest.raises(ValueError, match="such as a DataLoader, got 16"):
        sweep(network, loader, {"optimizer.lr": [0.1]}, seeds=1, num_epochs=1, batch_size=16)
    assert fit(network(), loader, num_epochs=1, batch_size=8).status.ok
    with pytest.raises(ValueError, match=r"data in batches, such as a DataLoader, got \[4, 8\]"):
        sweep(network, loader, {"batch_size": [4, 8]}, seeds=1, num_epochs=1)
    assert sweep(network, samples(), {"batch_size": [4, 8]}, seeds=1, num_epochs=1).status.ok


@pytest.mark.parametrize(
    ("reduction", "line"),
    [("sum", "got one with reduction='sum'"), ("none", r"got \(12,\) in a batch: use red")],
)
def test_a_loss_that_is_not_a_mean_is_not_evaluated(reduction, line):
    with pytest.raises(ValueError, match=line):
        evaluate(network(), samples(12), loss_fn=nn.CrossEntropyLoss(reduction=reduction))
