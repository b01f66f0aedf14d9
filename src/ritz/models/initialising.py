"""First weights of layers, drawn from a generator alone."""

import math
from functools import singledispatch

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def draw_weights(model: nn.Module, generator: torch.Generator) -> None:
    r"""Fill every parameter and buffer of a model, layer by layer.

    Convolutions are :math:`\mathcal{N}(0, 2 / n_\text{out})` with
    :math:`n_\text{out} = k_h k_w c_\text{out}` and zero biases (He et al., 2015); linear layers
    uniform on :math:`\pm n_\text{in}^{-1/2}`, biases too; recurrent ones likewise with the hidden
    size; embeddings uniform on :math:`\pm 0.1`; norms the identity. Numbers are drawn in
    float32 on the device of the generator and then moved, so that neither device nor dtype
    changes the network.
    """
    for module in model.modules():
        draw_layer(module, generator)


def draw_by_fan_in(model: nn.Module, generator: torch.Generator) -> None:
    r"""As :func:`draw_weights`, but convolutions too uniform on :math:`\pm n_\text{in}^{-1/2}`."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            _fan_in(module.weight, module.bias, generator)
        else:
            draw_layer(module, generator)


@singledispatch
def draw_layer(module: nn.Module, generator: torch.Generator) -> None:
    """Fill what a layer owns itself; one of an unknown kind raises if it owns anything."""
    own = [name for name, _ in module.named_parameters(recurse=False)]
    own += [name for name, _ in module.named_buffers(recurse=False)]
    if own:
        raise TypeError(f"no first weights are known for {type(module).__name__}, which owns {own}")


@draw_layer.register
def _(module: nn.Conv2d, generator: torch.Generator) -> None:
    rows, _, height, width = module.weight.shape
    normal(module.weight, math.sqrt(2 / (rows * height * width)), generator)
    fill(module.bias, 0.0)


@draw_layer.register
def _(module: nn.Linear, generator: torch.Generator) -> None:
    _fan_in(module.weight, module.bias, generator)


@draw_layer.register
def _(module: nn.LSTM, generator: torch.Generator) -> None:
    for parameter in module.parameters(recurse=False):
        uniform(parameter, module.hidden_size**-0.5, generator)


@draw_layer.register
def _(module: nn.Embedding, generator: torch.Generator) -> None:
    uniform(module.weight, 0.1, generator)


@draw_layer.register
def _(module: _BatchNorm, generator: torch.Generator) -> None:
    module.reset_parameters()


@draw_layer.register
def _(module: nn.LayerNorm, generator: torch.Generator) -> None:
    module.reset_parameters()


@torch.no_grad()
def normal(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill with normal numbers of mean zero."""
    noise = torch.empty(tensor.shape, dtype=torch.float32, device=generator.device)
    tensor.copy_(noise.normal_(0.0, std, generator=generator))


@torch.no_grad()
def uniform(tensor: Tensor, bound: float, generator: torch.Generator) -> None:
    """Fill with numbers uniform between ``-bound`` and ``bound``."""
    noise = torch.empty(tensor.shape, dtype=torch.float32, device=generator.device)
    tensor.copy_(noise.uniform_(-bound, bound, generator=generator))


@torch.no_grad()
def fill(tensor: Tensor | None, value: float) -> None:
    """Fill with one number, where there is a tensor."""
    if tensor is not None:
        tensor.fill_(value)


def _fan_in(weight: Tensor, bias: Tensor | None, generator: torch.Generator) -> None:
    bound = weight[0].numel() ** -0.5
    uniform(weight, bound, generator)
    if bias is not None:
        uniform(bias, bound, generator)
