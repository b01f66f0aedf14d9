import pytest
import torch
from optim.optimizer_cases import parameters, seeded
from torch.nn.functional import cross_entropy

from ritz import data as datasets
from ritz import models
from ritz._core.registry import UnknownNameError
from ritz.curvature import Risk
from ritz.optim import (
    KFAC,
    CurvatureOptimizer,
    Gadam,
    GadamX,
    LanczosNewton,
    Padam,
    SpectralSGD,
    from_preset,
    held_from,
    linear_decay,
    preset,
    preset_names,
)
from ritz.training import fit, preset_config

BASES = {
    "swa": "sgd", "asgd": "sgd", "nt_asgd": "sgd", "large_sgd": "sgd", "noisy_sgd": "sgd",
    "scheduled_adam": "adam",
}  # fmt: skip


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_makes_an_optimiser_that_steps(name):
    model = torch.nn.Linear(3, 2)
    params = list(model.parameters())
    subject = model if preset(name).optimizer is KFAC else params
    optimizer = from_preset(name, subject, steps_per_epoch=10)
    kind = name.split("/")[0]
    # Averages and noise are around SGD itself.
    assert type(optimizer).__name__.lower() == BASES.get(kind, kind)
    batch = torch.eye(3), torch.tensor([0, 1, 1])
    if isinstance(optimizer, CurvatureOptimizer):
        optimizer.update_curvature(Risk(model, cross_entropy, [batch]))
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in params)


@pytest.mark.parametrize("name", preset_names())
def test_presets_use_the_names_of_models_and_data_sets(name):
    # Both sets of CIFAR share settings; ImageNet at full size is a folder of images.
    known = {*datasets.available(), "cifar", "imagenet"}
    places = name.split("/")[1:]
    end = next(i for i, place in enumerate(places) if place in known)
    assert set(places[:end]) <= set(models.available())
    # A variant of the optimiser may follow.
    assert len(places) <= end + 2


@pytest.mark.parametrize(
    ("name", "cls", "expected"),
    [
        ("gadam/vgg16/cifar100", Gadam, {"lr": 5e-4, "weight_decay": 0.25, "partial": 0.5}),
        ("gadamx/vgg16/cifar", GadamX, {"lr": 0.1, "partial": 0.125}),
        ("gadamx/wideresnet28x10/imagenet32", GadamX, {"lr": 0.03, "weight_decay": 3e-4}),
        ("gadam/resnet50/imagenet", Gadam, {"lr": 0.5, "eps": 1.0, "weight_decay": 1e-4}),
        ("gadamx/resnet50/imagenet", GadamX, {"lr": 0.3, "eps": 1e-4}),
        (
            "gadamx/lstm/ptb",
            GadamX,
            {"lr": 1.0, "partial": 0.2, "weight_decay": 1.2e-6, "decoupled_weight_decay": False},
        ),
        (
            "lanczosnewton/vgg16/cifar100",
            LanczosNewton,
            {"lr": 1.0, "delta": 10.0, "num_steps": 20},
        ),
        ("lanczosnewton/logistic/mnist", LanczosNewton, {"lr": 0.01, "num_steps": 50}),
        (
            "spectralsgd/preresnet110/cifar100/ssgdmn",
            SpectralSGD,
            {"interval": 20 * 391, "num_steps": 20, "nesterov": True},
        ),
        ("padam/lstm/ptb", Padam, {"lr": 1.0, "partial": 0.2, "decoupled_weight_decay": False}),
    ],
)
def test_presets_have_the_published_numbers(name, cls, expected):
    optimizer = from_preset(name, parameters(seeded()))
    assert type(optimizer) is cls
    assert {key: optimizer.param_groups[0][key] for key in expected} == expected


def test_preset_averages_from_its_published_epoch():
    # From epoch 161 of 300, once an epoch: the first iterate is that after 160 epochs.
    optimizer = from_preset("gadam/vgg16/cifar100", parameters(seeded()), steps_per_epoch=391)
    assert preset("gadam/vgg16/cifar100").epochs == 300
    assert optimizer.average.start == 160 * 391 + 1
    assert optimizer.average.interval == 391


def test_preset_of_spectral_sgd_measures_every_twenty_epochs():
    name = "spectralsgd/preresnet110/cifar100/ssgdm"
    optimizer = from_preset(name, parameters(seeded()), steps_per_epoch=7)
    assert optimizer.param_groups[0]["interval"] == 140


def test_preset_without_steps_per_epoch_does_not_start_averaging():
    assert from_preset("gadam/vgg16/cifar100", parameters(seeded())).average.start is None


def test_from_preset_accepts_changes_and_presets_are_read_only():
    optimizer = from_preset("gadamx/vgg16/cifar", parameters(seeded()), lr=0.05, compile=True)
    assert optimizer.param_groups[0]["lr"] == 0.05
    with pytest.raises(TypeError, match="does not support item assignment"):
        preset("gadamx/vgg16/cifar").settings["lr"] = 1.0


def test_error_names_wrong_preset_or_steps_per_epoch():
    with pytest.raises(UnknownNameError, match="did you mean gadam/vgg16/cifar100"):
        preset("gadam/vgg16/cifar-100")
    with pytest.raises(ValueError, match="steps_per_epoch must be at least 1, got 0"):
        from_preset("gadamx/vgg16/cifar", parameters(seeded()), steps_per_epoch=0)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_configuration_of_training(name):
    config = preset_config(name)
    assert config.num_epochs == preset(name).epochs
    assert config.average_from == preset(name).average_from
    # A short run leaves out what it does not reach.
    assert preset_config(name, num_epochs=2, warmup=0, schedule="constant").num_epochs == 2


def test_presets_of_large_batches_are_those_of_the_paper():
    config = preset_config("noisy_sgd/resnet44/cifar10")
    assert preset(config.optimizer).settings["lr"] == 1.6
    assert preset("large_sgd/resnet44/cifar10").settings["lr"] == 3.2
    assert preset("large_sgd/vgg16_bn/cifar100").settings["lr"] == 1.6
    found = (config.batch_size, config.ghost_batch, config.milestones, config.warmup)
    assert found == (4096, 128, (100, 150), 10)
    assert (config.noise, config.noise_batch, config.noise_until) == ("diagonal", 128, 0.25)


def test_wide_residual_networks_keep_the_rate_that_they_have_when_averaging_starts():
    # Equation 12 over 50 epochs, followed up to epoch 30: 1 - 0.99 * 0.1 / 0.4.
    config = preset_config("swa/wideresnet28x10/imagenet32")
    assert (config.schedule, config.average_from) == ("linear_held", 30)
    shape = held_from(30, linear_decay(50))
    assert [shape(t) for t in (25, 30, 40, 50)] == pytest.approx([1.0, 0.7525, 0.7525, 0.7525])
    with pytest.raises(ValueError, match="linear_held must be given with average_from"):
        preset_config("swa/wideresnet28x10/imagenet32", average_from=None)


def test_swa_averages_the_last_quarter_unless_told_otherwise():
    x, y = torch.randn(32, 4, generator=seeded()), torch.arange(32) % 3
    model = torch.nn.Linear(4, 3)
    result = fit(model, (x, y), optimizer="swa", num_epochs=8, batch_size=16, test=(x, y))
    # Epochs 6, 7 and 8, and the weights before.
    history = result.history["average_test_loss"]
    assert history.isfinite().tolist() == [False] * 5 + [True] * 3
