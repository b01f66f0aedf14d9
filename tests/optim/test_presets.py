import pytest
import torch
from optim.optimizer_cases import parameters, seeded

from ritz import data as datasets
from ritz import models
from ritz._core.registry import UnknownNameError
from ritz.optim import Gadam, GadamX, Padam, from_preset, preset, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_makes_a_step(name):
    params = parameters(seeded())
    optimizer = from_preset(name, params, steps_per_epoch=10)
    assert type(optimizer).__name__.lower() == name.split("/")[0]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in params)


@pytest.mark.parametrize("name", preset_names())
def test_networks_and_data_bear_the_names_of_the_catalogues(name):
    _, *network, data = name.split("/")
    assert set(network) <= set(models.available())
    # Both sets of CIFAR share settings; ImageNet at full size is a folder of images.
    assert data in {*datasets.available(), "cifar", "imagenet"}


@pytest.mark.parametrize(
    ("name", "cls", "expected"),
    [
        ("gadam/vgg16/cifar100", Gadam, {"lr": 5e-4, "weight_decay": 0.25, "partial": 0.5}),
        ("gadamx/vgg16/cifar", GadamX, {"lr": 0.1, "partial": 0.125}),
        ("gadamx/wideresnet28x10/imagenet32", GadamX, {"lr": 0.03, "weight_decay": 3e-4}),
        ("gadam/resnet50/imagenet", Gadam, {"lr": 0.5, "eps": 1.0, "weight_decay": 1e-4}),
        (
            "gadamx/lstm/ptb",
            GadamX,
            {"lr": 1.0, "partial": 0.2, "weight_decay": 1.2e-6, "decoupled_weight_decay": False},
        ),
        ("padam/lstm/ptb", Padam, {"lr": 1.0, "partial": 0.2, "decoupled_weight_decay": False}),
    ],
)
def test_published_numbers(name, cls, expected):
    optimizer = from_preset(name, parameters(seeded()))
    assert type(optimizer) is cls
    assert {key: optimizer.param_groups[0][key] for key in expected} == expected


def test_average_is_placed_by_epochs():
    # From epoch 161 of 300, once an epoch: the first iterate is that after 160 epochs.
    optimizer = from_preset("gadam/vgg16/cifar100", parameters(seeded()), steps_per_epoch=391)
    assert preset("gadam/vgg16/cifar100").epochs == 300
    assert optimizer.average.start == 160 * 391 + 1
    assert optimizer.average.interval == 391


def test_without_epochs_averaging_waits():
    assert from_preset("gadam/vgg16/cifar100", parameters(seeded())).average.start is None


def test_settings_can_be_changed_and_a_preset_cannot():
    optimizer = from_preset("gadamx/vgg16/cifar", parameters(seeded()), lr=0.05, compile=True)
    assert optimizer.param_groups[0]["lr"] == 0.05
    with pytest.raises(TypeError, match="does not support item assignment"):
        preset("gadamx/vgg16/cifar").settings["lr"] = 1.0


def test_wrong_names_and_counts_are_named():
    with pytest.raises(UnknownNameError, match="did you mean gadam/vgg16/cifar100"):
        preset("gadam/vgg16/cifar-100")
    with pytest.raises(ValueError, match="steps_per_epoch must be at least 1, got 0"):
        from_preset("gadamx/vgg16/cifar", parameters(seeded()), steps_per_epoch=0)
