"""Initial weights of layers, drawn from a generator."""

import math
from functools import singledispatch

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def draw_weights(model: nn.Module, generator: torch.Generator) -> None:
    r"""Fill every parameter and buffer of a model, layer by layer.

    Convolutions are :math:`\mathcal{N}(0, 2 / n_\text{out})` with
    :math:`n_\text{out} = k_h k_w c_\text{out}` and zero biases (He et al., 2015). Linear layers and
    their biases are uniform on :math:`\pm n_\text{in}^{-1/2}`, and so are recurrent layers, with
    :math:`n_\text{in}` the hidden size. Embeddings are uniform on :math:`\pm 0.1`. Normalisation
    layers start as the identity. Numbers are drawn in float32 on the device of the generator and
    then moved, so that the network depends on neither device nor dtype.
    """
    for module in model.modules():
        draw_layer(module, generator)


def draw_by_fan_in(model: nn.Module, generator: torch.Generator) -> None:
    r"""As :func:`draw_weights`, with convolutions uniform on :math:`\pm n_\text{in}^{-1/2}` too."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            _fan_in(module, generator)
        else:
            draw_layer(module, generator)


@singledispatch
def draw_layer(module: nn.Module, generator: torch.Generator) -> None:
    """Fill the tensors of a layer, not of its children; an unknown layer with tensors raises."""
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    if names := [name for name, _ in tensors]:
        raise TypeError(f"no initial weights are defined for {type(module).__name__}, with {names}")


@draw_layer.register
def _(module: nn.Conv2d, generator: torch.Generator) -> None:
    # This variance keeps that of the gradients through a layer with ReLU (He et al., 2015).
    rows, _, height, width = module.weight.shape
    normal(module.weight, math.sqrt(2 / (rows * height * width)), generator)
    fill(module.bias, 0.0)


@draw_layer.register(nn.Linear)
def _fan_in(module: nn.Linear | nn.Conv2d, generator: torch.Generator) -> None:
    # n_in is the number of weights of one output.
    bound = module.weight[0].numel() ** -0.5
    uniform(module.weight, bound, generator)
    uniform(module.bias, bound, generator)


@draw_layer.register
def _(module: nn.LSTM, generator: torch.Generator) -> None:
    # torch's own choice: biases are drawn too.
    for parameter in module.parameters(recurse=False):
        uniform(parameter, module.hidden_size**-0.5, generator)


@draw_layer.register
def _(module: nn.Embedding, generator: torch.Generator) -> None:
    uniform(module.weight, 0.1, generator)


@draw_layer.register(_BatchNorm)
@draw_layer.register(nn.LayerNorm)
def _(module: _BatchNorm | nn.LayerNorm, generator: torch.Generator) -> None:
    # Scale 1 and shift 0, without random numbers.
    module.reset_parameters()


@torch.no_grad()
def normal(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill with normal random numbers of mean zero."""
    # Drawn on the device of the generator and then moved: the same weights on every device.
    noise = torch.empty(tensor.shape, dtype=torch.float32, device=generator.device)
    tensor.copy_(noise.normal_(0.0, std, generator=generator))


@torch.no_grad()
def uniform(tensor: Tensor | None, bound: float, generator: torch.Generator) -> None:
    """Fill with numbers uniform between ``-bound`` and ``bound``; ``None`` is ignored."""
    if tensor is not None:
        noise = torch.empty(tensor.shape, dtype=torch.float32, device=generator.device)
        tensor.copy_(noise.uniform_(-bound, bound, generator=generator))


@torch.no_grad()
def fill(tensor: Tensor | None, value: float) -> None:
    """Fill with one number; ``None`` is ignored."""
    if tensor is not None:
        tensor.fill_(value)
