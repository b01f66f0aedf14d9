"""Every registered model in a size that a test can afford, with weights by formula."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ritz import models

WORDS = ("lstm", "gpt", "gpt2")


def options(name):
    """What makes a registered model small, without dropout."""
    if name in ("logistic", "mlp"):
        return {"input_shape": (1, 3, 3)}
    if name == "lstm":
        off = {f"{kind}dropout": 0.0 for kind in ("", "input_", "hidden_", "embedding_")}
        return {"width": 3, "hidden": 4, "weight_drop": 0.0, **off}
    if name in WORDS:
        return {"input_shape": (5,), "width": 4, "heads": 2, "depth": 2}
    if name == "lenet":
        return {"input_shape": (1, 12, 12), "width": 2, "hidden": (4, 3)}
    if name == "alexnet":
        return {"input_shape": (1, 29, 29), "width": 1}
    if name == "allcnn":
        return {"input_shape": (1, 9, 9), "width": 2, "dropout": 0.0, "input_dropout": 0.0}
    if name.startswith("vgg"):
        return {"input_shape": (1, 32, 32), "width": 2, "hidden": 16, "dropout": 0.0}
    if name in ("resnet18", "resnet50"):
        return {"input_shape": (1, 32, 32), "width": 1}
    if name.startswith("resnext"):
        return {"input_shape": (1, 8, 8), "width": 2, "groups": 2, "breadth": 1}
    return {"input_shape": (1, 8, 8)} | ({} if name == "resnet44x2" else {"width": 2})


def wave(*shape, phase=0.0):
    """Numbers between -1 and 1 that depend on nothing but the shape."""
    count = torch.Size(shape).numel()
    places = torch.arange(1, count + 1, dtype=torch.float64)
    return torch.sin(0.7 * places**1.1 + phase).view(shape)


@torch.no_grad()
def fill(model):
    """Weights that keep signals alive, and that no generator can change."""
    for index, parameter in enumerate(model.parameters()):
        scale = 2.0 * parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3
        parameter.copy_(scale * wave(*parameter.shape, phase=index))
    for index, layer in enumerate(model.modules()):
        if isinstance(layer, _BatchNorm):
            layer.weight += 1.0
            layer.running_mean.copy_(0.1 * wave(layer.num_features, phase=index))
            layer.running_var.copy_(1 + 0.5 * wave(layer.num_features, phase=index + 1))
    return model


def tiny(name, num_classes=3, **changes):
    given = options(name) | changes
    return fill(models.create(name, num_classes=num_classes, dtype=torch.float64, **given))


def sample(name, num_classes=3, batch=4):
    """Inputs and labels for a tiny model."""
    if name in WORDS:
        tokens = torch.arange(6 * batch).view(batch, 6) ** 2 % 11 % num_classes
        return tokens[:, :-1], tokens[:, 1:]
    images = wave(batch, *options(name)["input_shape"], phase=0.5)
    return images, torch.arange(batch) % num_classes
