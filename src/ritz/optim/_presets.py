"""Presets: published settings of optimisers and of training, by name."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from ritz._core.checks import check_count
from ritz._core.registry import Registry
from ritz.optim._adaptive import DampedAdamW, Gadam, GadamX, Padam
from ritz.optim._averaging import swa
from ritz.optim._kfac import KFAC
from ritz.optim._newton import LanczosNewton
from ritz.optim._spectral import SpectralSGD


@dataclass(frozen=True, slots=True, repr=False)
class Preset:
    """Settings of one published experiment.

    Attributes:
        optimizer: Class of the optimiser.
        epochs: Length of training.
        average_from: First epoch that is averaged, counted from one. The weights are averaged once
            per epoch. None without averaging.
        source: Where the settings were published.
        settings: Keyword arguments of the optimiser, read-only.
        training: Options of :func:`ritz.training.fit`, read-only, such as batch size and schedule.
    """

    optimizer: Callable[..., Optimizer]
    epochs: int
    average_from: int | None
    source: str
    settings: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        options = {**self.settings, **self.training}
        pairs = ", ".join(f"{name}={value!r}" for name, value in options.items())
        start = f", averaged from epoch {self.average_from}" if self.average_from else ""
        name = self.optimizer.__name__
        return f"{name}, {self.epochs} epochs{start}: {pairs}\n  {self.source}"


def preset(name: str) -> Preset:
    """Return published settings by name.

    Args:
        name: ``optimiser/network/data``; :func:`preset_names` lists them.
    """
    return _PRESETS[name]


def preset_names() -> tuple[str, ...]:
    """Return the names of all published settings."""
    return tuple(_PRESETS)


def from_preset(
    name: str, params: ParamsT | nn.Module, *, steps_per_epoch: int | None = None, **changes: Any
) -> Optimizer:
    """Return an optimiser with published settings.

    If the published run averaged its weights, the optimiser averages once per epoch.
    :func:`ritz.training.preset_config` also has the schedule, the batch size and other options of
    training.

    Args:
        name: ``optimiser/network/data``; :func:`preset_names` lists them.
        params: Parameters or groups of them. For K-FAC, the model.
        steps_per_epoch: Optimiser steps per epoch, needed for presets with averaging. With None,
            call ``optimizer.average.restart()`` to start the average.
        **changes: Keyword arguments of the optimiser that replace the published ones.
    """
    chosen = preset(name)
    settings = dict(chosen.settings)
    if steps_per_epoch is not None:
        steps_per_epoch = check_count("steps_per_epoch", steps_per_epoch)
        takes = inspect.signature(chosen.optimizer).parameters
        if {"start", "interval"} <= takes.keys() and chosen.average_from is not None:
            # The average begins with the weights at the end of the previous epoch.
            settings["start"] = (chosen.average_from - 1) * steps_per_epoch + 1
            settings["interval"] = steps_per_epoch
        elif chosen.optimizer is SpectralSGD:
            settings["interval"] = 20 * steps_per_epoch  # "every 20 epochs"
    return chosen.optimizer(params, **(settings | changes))


_PRESETS: Registry[Preset] = Registry("preset", listing="ritz list optimizers")


def _add(
    name: str, *entry: Any, training: Mapping[str, Any] | None = None, **settings: Any
) -> None:
    # ``entry``: optimiser, epochs, first averaged epoch and source, in the order of Preset.
    make: Any = Preset
    options = MappingProxyType(dict(training or {}))
    _PRESETS.register(name)(make(*entry, MappingProxyType(settings), options))


# Appendix B.2 of the Gadam paper: batch size 128, and the schedule of equations 12 and 13.
LINEAR = {"batch_size": 128, "schedule": "linear"}
# Appendix E.1 of the paper on covariance noise: warm-up, then division by 10 at the milestones.
LARGE = {
    "batch_size": 4096, "ghost_batch": 128, "schedule": "step", "milestones": (100, 150),
    "warmup": 10,
}  # fmt: skip
# With an average, the schedule of wide residual networks is equation 12 until the average starts.
HELD = {"batch_size": 128, "schedule": "linear_held"}
# Settings of the code base of the paper, appendix B.3.
PTB = {
    "batch_size": 20, "clip_norm": 0.25, "random_segments": True, "activation_penalty": 2.0,
    "change_penalty": 1.0,
}  # fmt: skip
PTB_STEPS = PTB | {"schedule": "step", "milestones": (100, 150)}
NOISE = {"noise": "diagonal", "noise_batch": 128, "noise_until": 0.25}

# Sources of several presets, and a remark on a missing setting.
GADAM = "Granziol et al. (2021), Iterate averaged adaptive gradient methods, "
NO_DECAY = "; the paper does not give the weight decay, so this is the default"
GAP = "Granziol et al. (2020), Explaining the adaptive generalisation gap, "


def _register_all() -> None:
    _register_adaptive()
    _register_curvature()
    _register_adaptive_text()
    _register_sgd()
    _register_large_batches()


def _register_sgd() -> None:
    vgg = GADAM + "appendix B.1" + NO_DECAY
    sgd: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
    _add("sgd/vgg16/cifar100", SGD, 300, None, vgg, **sgd, training=LINEAR)
    # The first of three terminal learning rates, 0.03.
    _add("swa/vgg16/cifar100", swa, 300, 161, vgg, **sgd, training=LINEAR | {"final_ratio": 0.6})
    cifar, sgd = GADAM + "appendix B.2" + NO_DECAY, {"lr": 0.1, "momentum": 0.9}
    _add("sgd/preresnet110/cifar", SGD, 300, None, cifar, **sgd, training=LINEAR)
    _add("swa/preresnet110/cifar", swa, 300, 161, cifar, **sgd, training=LINEAR)
    _add("adamw/preresnet110/cifar", AdamW, 300, None, cifar, lr=1e-3, training=LINEAR)
    flat = "Granziol (2020), Flatness is a false friend, section 5 (decay); " + GADAM + "B.2"
    for data, decay in (("cifar10", 0.35), ("cifar100", 0.25)):
        settings: Any = {"lr": 5e-4, "weight_decay": decay}
        _add(f"adamw/vgg16/{data}", AdamW, 300, None, flat, **settings, training=LINEAR)
    wide, plain = GADAM + "appendix B.2", {"lr": 0.03, "momentum": 0.9, "weight_decay": 1e-4}
    place = "wideresnet28x10/imagenet32"
    _add(f"sgd/{place}", SGD, 50, None, wide, **plain, training=LINEAR)
    _add(f"swa/{place}", swa, 50, 30, wide, **plain, training=HELD)
    _add(f"adamw/{place}", AdamW, 50, None, wide, lr=1e-3, weight_decay=0.01, training=LINEAR)
    deep: Any = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-5}
    _add("sgd/preresnet110/imagenet32", SGD, 200, None, wide, **deep, training=LINEAR)
    steps = {"schedule": "step", "milestones": (30, 60)}
    best = GADAM + "section 5.3: division by 10 every 30 epochs"
    plain = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
    _add("sgd/resnet50/imagenet", SGD, 90, None, best, **plain, training=steps)
    _add("adamw/resnet50/imagenet", AdamW, 90, None, best, lr=1e-3, weight_decay=0.01,
         training=steps)  # fmt: skip
    ptb = GADAM + "appendix B.3; averaging from epoch 100 at a constant learning rate"
    # ASGD is SGD without momentum, averaged in every step.
    asgd = {"lr": 30.0, "momentum": 0.0, "weight_decay": 1.2e-6}
    every: Any = PTB | {"average_every": "step"}
    _add("asgd/lstm/ptb", swa, 200, 100, ptb, **asgd, training=every)
    triggered: Any = every | {"patience": 10, "patience_rule": "non_monotone"}
    _add("nt_asgd/lstm/ptb", swa, 200, None, GADAM + "appendix C.2", **asgd, training=triggered)
    searched = GADAM + "appendices B.3 and C.2; the learning rate is one of four that were tried"
    adam: dict[str, Any] = {"lr": 1e-3, "weight_decay": 1.2e-6}
    _add("adam/lstm/ptb", Adam, 200, None, searched, **adam, training=PTB)
    _add("scheduled_adam/lstm/ptb", Adam, 200, None, searched, **adam, training=PTB_STEPS)


def _register_large_batches() -> None:
    source = (
        "Wen et al., Interplay between optimization and generalization of SGD with covariance "
        "noise, appendix E.1; momentum and weight decay are not given there, so this is 0.9 and 0"
    )
    # The paper has ResNet-44 for CIFAR-10, and twice its width for CIFAR-100.
    rates = {
        "resnet44/cifar10": (3.2, 1.6),
        "resnet44x2/cifar100": (3.2, 1.6),
        "vgg16_bn/cifar10": (1.6, 1.6),
        "vgg16_bn/cifar100": (1.6, 1.6),
    }
    for place, (plain, noisy) in rates.items():
        for name, rate, training in (
            ("large_sgd", plain, LARGE),
            ("noisy_sgd", noisy, LARGE | NOISE),
        ):
            _add(f"{name}/{place}", SGD, 200, None, source, lr=rate, momentum=0.9,
                 training=training)  # fmt: skip


def _register_adaptive() -> None:
    cifar = GADAM + "appendix B.2; averaging from epoch 161"
    flat = "Granziol (2020), Flatness is a false friend, section 5 (decay); " + cifar
    _add("gadam/vgg16/cifar10", Gadam, 300, 161, flat, lr=5e-4, weight_decay=0.35, training=LINEAR)
    _add("gadam/vgg16/cifar100", Gadam, 300, 161, flat, lr=5e-4, weight_decay=0.25, training=LINEAR)
    _add("gadam/preresnet110/cifar", Gadam, 300, 161, cifar + NO_DECAY, lr=1e-3, training=LINEAR)
    _add("gadamx/vgg16/cifar", GadamX, 300, 161, cifar + NO_DECAY, lr=0.1, training=LINEAR)
    _add("gadamx/preresnet110/cifar", GadamX, 300, 161, cifar + NO_DECAY, lr=0.1, training=LINEAR)
    _add("padam/cifar", Padam, 300, None, cifar + NO_DECAY, lr=0.1, training=LINEAR)

    wide = GADAM + "appendix B.2; averaging from epoch 30"
    _add("padam/wideresnet28x10/imagenet32", Padam, 50, None, wide, lr=0.03, weight_decay=1e-4,
         training=LINEAR)  # fmt: skip
    _add("gadam/wideresnet28x10/imagenet32", Gadam, 50, 30, wide, lr=1e-3, weight_decay=0.01,
         training=HELD)  # fmt: skip
    _add("gadamx/wideresnet28x10/imagenet32", GadamX, 50, 30, wide, lr=0.03, weight_decay=3e-4,
         training=HELD)  # fmt: skip

    deep = GADAM + "appendix B.2; the paper does not give the start of the average"
    _add("padam/preresnet110/imagenet32", Padam, 200, None, deep, lr=0.1, weight_decay=1e-5,
         training=LINEAR)  # fmt: skip
    _add("gadam/preresnet110/imagenet32", Gadam, 200, None, deep, lr=1e-3, weight_decay=1e-3,
         training=LINEAR)  # fmt: skip
    _add("gadamx/preresnet110/imagenet32", GadamX, 200, None, deep, lr=0.1, weight_decay=3e-4,
         training=LINEAR)  # fmt: skip

    # With eps = 1 the step of Gadam is nearly that of SGD, hence the large learning rate.
    resnet = GADAM + "section 5.3; averaging from epoch 61, one of three that were tried"
    _add("gadam/resnet50/imagenet", Gadam, 90, 61, resnet, lr=0.5, eps=1.0, weight_decay=1e-4)
    # The learning rate was searched in factors of 3 from 0.1; 0.3 was best.
    best = resnet + "; learning rate: Spectral Machine Learning, section 7.10" + NO_DECAY
    _add("gadamx/resnet50/imagenet", GadamX, 90, 61, best, lr=0.3, eps=1e-4)


def _register_curvature() -> None:
    newton = "Granziol, Spectral Machine Learning, section 4.3.1, Table 4.4: curvature batch 128"
    table: dict[str, Any] = {"lr": 1.0, "delta": 10.0, "num_steps": 20, "start": "random"}
    _add("lanczosnewton/vgg16/cifar100", LanczosNewton, 100, None, newton, **table)
    lopt = GAP + "section 4; one of the dampings that were tried"
    convex: dict[str, Any] = {"lr": 0.01, "delta": 0.1, "num_steps": 50, "start": "random"}
    _add("lanczosnewton/logistic/mnist", LanczosNewton, 300, None, lopt, **convex)
    # Measured every 20 epochs of 391 batches of 128.
    spectral = "Granziol, Spectral Machine Learning, section 4.3.2; averaging from epoch 161"
    often: dict[str, Any] = {"interval": 20 * 391, "num_steps": 20}
    for name, nesterov in (("ssgdm", False), ("ssgdmn", True)):
        settings = often | {"nesterov": nesterov}
        _add(
            f"spectralsgd/preresnet110/cifar100/{name}", SpectralSGD, 180, 161, spectral, **settings
        )
    gap = GAP + "section 5.2"
    damped: dict[str, Any] = {"lr": 1e-3, "delta": 5e-3, "weight_decay": 0.0}
    _add("dampedadamw/vgg16/cifar100", DampedAdamW, 300, None, gap, **damped)

    # The best run of the table, on VGG-16 without batch norm and weight decay.
    gap = GAP + "table 2 (right); "
    gap += "momentum, length and steps between inverses: Spectral Machine Learning, section 5.8.2"
    _add("kfac/vgg16/cifar100", KFAC, 300, None, gap, lr=0.1, delta=0.1, inverse_every=100)


def _register_adaptive_text() -> None:
    lstm: dict[str, Any] = {"weight_decay": 1.2e-6}
    coupled = lstm | {"decoupled_weight_decay": False}
    ptb = GADAM + "appendix B.3; averaging from epoch 100 at a constant learning rate"
    tuned = ptb + "; the paper does not give the learning rate of Gadam, so this is the default"
    _add("padam/lstm/ptb", Padam, 200, None, GADAM + "appendix B.3", lr=1.0, partial=0.2, **lstm,
         training=PTB_STEPS)  # fmt: skip
    _add("gadam/lstm/ptb", Gadam, 200, 100, tuned, **coupled, training=PTB)
    _add("gadamx/lstm/ptb", GadamX, 200, 100, ptb, lr=1.0, partial=0.2, **coupled, training=PTB)


_register_all()
