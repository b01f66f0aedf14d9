"""Published settings of the optimisers, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ritz._core.checks import check_count
from ritz._core.registry import Registry
from ritz.optim._adaptive import AveragedOptimizer, DampedAdamW, Gadam, GadamX, Padam
from ritz.optim._kfac import KFAC
from ritz.optim._newton import LanczosNewton
from ritz.optim._spectral import SpectralSGD


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings of one published experiment.

    Attributes:
        optimizer: Class of the optimiser.
        epochs: Length of training.
        average_from: First epoch, counted from one, that is averaged; the weights are averaged once
            per epoch. None without averaging.
        source: Where the settings were published.
        settings: Keywords of the optimiser, read-only.
    """

    optimizer: type[Optimizer]
    epochs: int
    average_from: int | None
    source: str
    settings: Mapping[str, Any]


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

    Args:
        name: ``optimiser/network/data``; :func:`preset_names` lists them.
        params: Parameters or groups of them; for K-FAC the model.
        steps_per_epoch: Optimiser steps per epoch, needed for presets with averaging. With None,
            call ``optimizer.average.restart()`` to start the average.
        **changes: Keywords of the optimiser, which take precedence over the published ones.
    """
    chosen = preset(name)
    settings = dict(chosen.settings)
    if steps_per_epoch is not None:
        check_count("steps_per_epoch", steps_per_epoch)
        if issubclass(chosen.optimizer, AveragedOptimizer) and chosen.average_from is not None:
            # The average begins with the weights at the end of the epoch before.
            settings["start"] = (chosen.average_from - 1) * steps_per_epoch + 1
            settings["interval"] = steps_per_epoch
        elif chosen.optimizer is SpectralSGD:
            settings["interval"] = 20 * steps_per_epoch  # "every 20 epochs"
    build: Any = chosen.optimizer
    return build(params, **(settings | changes))  # type: ignore[no-any-return]


_PRESETS: Registry[Preset] = Registry("preset")


def _add(name: str, *entry: Any, **settings: Any) -> None:
    # The optimiser, epochs, first averaged epoch and source, in the order of Preset.
    make: Any = Preset
    _PRESETS.register(name)(make(*entry, MappingProxyType(settings)))


def _register_all() -> None:
    gadam = "Granziol et al. (2021), Iterate averaged adaptive gradient methods, "
    cifar = gadam + "appendix B.2; averaging from epoch 161"
    searched = "; the paper does not give the weight decay, so this is the default"
    flat = "Granziol (2020), Flatness is a false friend, section 5 (decay); " + cifar
    _add("gadam/vgg16/cifar10", Gadam, 300, 161, flat, lr=5e-4, weight_decay=0.35)
    _add("gadam/vgg16/cifar100", Gadam, 300, 161, flat, lr=5e-4, weight_decay=0.25)
    _add("gadam/preresnet110/cifar", Gadam, 300, 161, cifar + searched, lr=1e-3)
    _add("gadamx/vgg16/cifar", GadamX, 300, 161, cifar + searched, lr=0.1)
    _add("gadamx/preresnet110/cifar", GadamX, 300, 161, cifar + searched, lr=0.1)
    _add("padam/cifar", Padam, 300, None, cifar + searched, lr=0.1)

    wide = gadam + "appendix B.2; averaging from epoch 30"
    _add("padam/wideresnet28x10/imagenet32", Padam, 50, None, wide, lr=0.03, weight_decay=1e-4)
    _add("gadam/wideresnet28x10/imagenet32", Gadam, 50, 30, wide, lr=1e-3, weight_decay=0.01)
    _add("gadamx/wideresnet28x10/imagenet32", GadamX, 50, 30, wide, lr=0.03, weight_decay=3e-4)

    deep = gadam + "appendix B.2; the paper does not give the start of the average"
    _add("padam/preresnet110/imagenet32", Padam, 200, None, deep, lr=0.1, weight_decay=1e-5)
    _add("gadam/preresnet110/imagenet32", Gadam, 200, None, deep, lr=1e-3, weight_decay=1e-3)
    _add("gadamx/preresnet110/imagenet32", GadamX, 200, None, deep, lr=0.1, weight_decay=3e-4)

    # With eps = 1 the step of Gadam is nearly that of SGD, hence the large learning rate.
    resnet = gadam + "section 5.3; averaging from epoch 61, one of three that were tried"
    _add("gadam/resnet50/imagenet", Gadam, 90, 61, resnet, lr=0.5, eps=1.0, weight_decay=1e-4)
    # The learning rate was searched in factors of 3 from 0.1; 0.3 was best.
    best = resnet + "; learning rate: Spectral Machine Learning, section 7.10" + searched
    _add("gadamx/resnet50/imagenet", GadamX, 90, 61, best, lr=0.3, eps=1e-4)

    newton = "Granziol, Spectral Machine Learning, section 4.3.1, Table 4.4: curvature batch 128"
    table: dict[str, Any] = {"lr": 1.0, "delta": 10.0, "num_steps": 20, "start": "random"}
    _add("lanczosnewton/vgg16/cifar100", LanczosNewton, 100, None, newton, **table)
    lopt = "Granziol et al. (2020), Explaining the adaptive generalisation gap, section 4; one of "
    lopt += "the dampings that were tried"
    convex: dict[str, Any] = {"lr": 0.01, "delta": 0.1, "num_steps": 50, "start": "random"}
    _add("lanczosnewton/logistic/mnist", LanczosNewton, 300, None, lopt, **convex)
    # Measured every 20 epochs of 391 batches of 128.
    spectral = "Granziol, Spectral Machine Learning, section 4.3.2; averaging from epoch 161"
    often = {"interval": 20 * 391, "num_steps": 20}
    for name, nesterov in (("ssgdm", False), ("ssgdmn", True)):
        settings = often | {"nesterov": nesterov}
        _add(
            f"spectralsgd/preresnet110/cifar100/{name}", SpectralSGD, 180, 161, spectral, **settings
        )
    gap = "Granziol et al. (2020), Explaining the adaptive generalisation gap, section 5.2"
    damped = {"lr": 1e-3, "delta": 5e-3, "weight_decay": 0.0}
    _add("dampedadamw/vgg16/cifar100", DampedAdamW, 300, None, gap, **damped)

    lstm: dict[str, Any] = {"weight_decay": 1.2e-6}
    coupled = lstm | {"decoupled_weight_decay": False}
    ptb = gadam + "appendix B.3; averaging from epoch 100 at a constant learning rate"
    tuned = ptb + "; the paper does not give the learning rate of Gadam, so this is the default"
    _add("padam/lstm/ptb", Padam, 200, None, gadam + "appendix B.3", lr=1.0, partial=0.2, **lstm)
    _add("gadam/lstm/ptb", Gadam, 200, 100, tuned, **coupled)
    _add("gadamx/lstm/ptb", GadamX, 200, 100, ptb, lr=1.0, partial=0.2, **coupled)

    # The best run of the table, on VGG-16 without batch norm and weight decay.
    gap = "Granziol et al. (2020), Explaining the adaptive generalisation gap, table 2 (right); "
    gap += "momentum, length and steps between inverses: Spectral Machine Learning, section 5.8.2"
    _add("kfac/vgg16/cifar100", KFAC, 300, None, gap, lr=0.1, delta=0.1, inverse_every=100)


_register_all()
