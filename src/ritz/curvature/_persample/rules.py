"""Gradients of single samples in the parameters of one module, and sums of their squares."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from ritz._core.batches import is_rows, take_rows
from ritz.curvature._persample.capture import Call
from ritz.curvature._risk import Params

# ------------------------------------------------------------------------------------------
# Gradients of single samples in the parameters of one module, and sums of their squares.
#
# Each function dispatches on the class of the module, and is open to others: for a module of
# your own, ``sample_gradients.register(MyModule)(rule)``. Without a rule the module is
# differentiated by itself, at the inputs it had. Everywhere ``deltas`` ``(c, batch, ...)``
# are derivatives by the output of the module, one for each of ``c`` columns.

ENTRIES = 2**22  # of sample gradients at once: what caches hold is faster than what they do not


@singledispatch
def unrolled(module: nn.Module, call: Call, deltas: Tensor) -> tuple[Tensor, Tensor] | None:
    r"""Return :math:`a` and :math:`\delta` of a module that is linear at positions, else ``None``.

    The gradient of a sample in the weight is :math:`\sum_t \delta_t a_t^\top`, group by group, and
    in the bias :math:`\sum_t \delta_t`; inputs are ``(batch, groups, i, T)``, deltas
    ``(c, batch, groups, o, T)``.
    """
    return None


@singledispatch
def sample_gradients(module: nn.Module, call: Call, deltas: Tensor) -> Params:
    """Return the gradients ``(c, batch, *shape)`` of the chosen parameters, by name."""
    parts = unrolled(module, call, deltas)
    if parts is None:
        return _differentiated(module, call, deltas)
    a, delta = parts
    found = {"weight": _products(a, delta).movedim(2, 0), "bias": delta.sum(-1)}
    lead = deltas.shape[:2]
    return {name: found[name].reshape(*lead, *call.state[name].shape) for name in call.chosen}


@singledispatch
def squared_gradients(module: nn.Module, call: Call, deltas: Tensor) -> Params:
    """Return the sums of squares ``(*shape)`` over columns and samples, by name."""
    parts = unrolled(module, call, deltas)
    if parts is None:
        return _squares(module, call, deltas)
    a, delta = parts
    found = {}
    if "weight" in call.chosen:
        found["weight"] = _weight_squares(a, delta)
    if "bias" in call.chosen:
        found["bias"] = delta.sum(-1).square().sum((0, 1))
    return {name: value.reshape(call.state[name].shape) for name, value in found.items()}


@singledispatch
def squared_norm(module: nn.Module, call: Call, deltas: Tensor) -> Tensor:
    """Return the sum of all of these, a number in float64."""
    parts = unrolled(module, call, deltas)
    if parts is None:
        squares = squared_gradients(module, call, deltas).values()
        return torch.stack([square.sum(dtype=torch.float64) for square in squares]).sum()
    a, delta = parts
    total = torch.zeros((), dtype=torch.float64, device=deltas.device)
    if "weight" in call.chosen:
        total += _weight_norm(a, delta)
    if "bias" in call.chosen:
        total += delta.sum(-1).square().sum(dtype=torch.float64)
    return total


@unrolled.register
def _(module: nn.Linear, call: Call, deltas: Tensor) -> tuple[Tensor, Tensor] | None:
    x, (count, batch) = call.args[0], deltas.shape[:2]
    a = x.reshape(batch, 1, -1, x.shape[-1]).transpose(-1, -2)
    return a, deltas.reshape(count, batch, 1, -1, deltas.shape[-1]).transpose(-1, -2)


@unrolled.register(nn.Conv1d)
@unrolled.register(nn.Conv2d)
@unrolled.register(nn.Conv3d)
def _(module: Any, call: Call, deltas: Tensor) -> tuple[Tensor, Tensor] | None:
    count, batch, channels = deltas.shape[:3]
    a = _patches(module, call.args[0])
    groups = module.groups
    return (
        a.reshape(batch, groups, -1, math.prod(deltas.shape[3:])),
        deltas.reshape(count, batch, groups, channels // groups, -1),
    )


@sample_gradients.register
def _(module: nn.Embedding, call: Call, deltas: Tensor) -> Params:
    (count, batch), (vocabulary, width) = deltas.shape[:2], module.weight.shape
    found = deltas.new_zeros(count, batch * vocabulary, width)
    found.index_add_(1, _used_rows(module, call).flatten(), deltas.reshape(count, -1, width))
    found = found.view(count, batch, vocabulary, width)
    if module.padding_idx is not None:
        found[:, :, module.padding_idx] = 0
    return {"weight": found}


@squared_gradients.register
def _(module: nn.Embedding, call: Call, deltas: Tensor) -> Params:
    # Nearly all entries of a sample's gradient are zero: rows that it uses are summed alone.
    vocabulary, width = module.weight.shape
    pairs, inverse = torch.unique(_used_rows(module, call), return_inverse=True)
    total = deltas.new_zeros(vocabulary, width)
    for delta in deltas:
        sums = deltas.new_zeros(len(pairs), width)
        sums.index_add_(0, inverse.flatten(), delta.reshape(-1, width))
        total.index_add_(0, pairs % vocabulary, sums.square_())
    if module.padding_idx is not None:
        total[module.padding_idx] = 0
    return {"weight": total}


def chunks(deltas: Tensor, entries: int) -> Iterator[tuple[slice, slice]]:
    """Columns and rows to take at once where each of their pairs has so many entries."""
    count, batch = deltas.shape[:2]
    limit = ENTRIES if deltas.device.type == "cpu" else 16 * ENTRIES
    columns = min(count, max(1, limit // entries))
    size = min(batch, max(1, limit // (entries * columns)))
    for start in range(0, count, columns):
        for first in range(0, batch, size):
            yield slice(start, start + columns), slice(first, first + size)


def _used_rows(module: nn.Embedding, call: Call) -> Tensor:
    """The rows ``(batch, T)`` that samples use, were there a table for each sample."""
    ids: Tensor = call.args[0].flatten(1)
    first = torch.arange(len(ids), device=ids.device)[:, None] * module.num_embeddings
    return first + ids


def _patches(module: Any, x: Tensor) -> Tensor:
    """What the kernel of a convolution sees: ``(batch, channels, *kernel, *positions)``."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = functional.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    dims = len(module.kernel_size)
    for axis, (size, step, gap) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        x = x.unfold(2 + axis, gap * (size - 1) + 1, step)[..., ::gap]
    return x.permute(0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))


def _folded(delta: Tensor) -> Tensor:
    """Columns beside outputs, ``(batch, groups, c * o, T)``: one product for all of them."""
    count, batch, groups, width, positions = delta.shape
    return delta.permute(1, 2, 0, 3, 4).reshape(batch, groups, count * width, positions)


def _products(a: Tensor, delta: Tensor) -> Tensor:
    """Sample gradients in the weight, ``(batch, groups, c, o, i)``."""
    count, batch, groups, width, _ = delta.shape
    found = _folded(delta) @ a.transpose(-1, -2)
    return found.view(batch, groups, count, width, -1)


def _weight_squares(a: Tensor, delta: Tensor) -> Tensor:
    groups, inputs, positions = a.shape[1:]
    outputs = delta.shape[3]
    if positions == 1:
        # The square of an outer product is that of the squares.
        energy = delta[..., 0].square().sum(0)
        return torch.einsum("bgo,bgi->goi", energy, a[..., 0].square())
    total = a.new_zeros(groups, outputs, inputs)
    for columns, part in chunks(delta, groups * outputs * inputs):
        total += _products(a[part], delta[columns, part]).square_().sum((0, 2))
    return total


def _weight_norm(a: Tensor, delta: Tensor) -> Tensor:
    groups, inputs, positions = a.shape[1:]
    count, outputs = delta.shape[0], delta.shape[3]
    if positions == 1:
        sizes = delta.square().sum((0, 3, 4)) * a.square().sum((2, 3))
        return sizes.sum(dtype=torch.float64)
    if positions * (count * outputs + inputs) < count * outputs * inputs:
        # |sum_t delta_t a_t'|^2 from the inner products of positions, which are fewer.
        total = torch.zeros((), dtype=torch.float64, device=a.device)
        for columns, part in chunks(delta, groups * max(outputs * positions, positions**2)):
            d = _folded(delta[columns, part])
            inner = (d.transpose(-1, -2) @ d) * (a[part].transpose(-1, -2) @ a[part])
            total += inner.sum(dtype=torch.float64)
        return total
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for columns, part in chunks(delta, groups * outputs * inputs):
        flat = (_folded(delta[columns, part]) @ a[part].transpose(-1, -2)).flatten()
        total += flat.dot(flat)
    return total


def _squares(module: nn.Module, call: Call, deltas: Tensor) -> Params:
    total = {name: torch.zeros_like(call.state[name]) for name in call.chosen}
    entries = sum(value.numel() for value in total.values())
    for columns, part in chunks(deltas, entries):
        found = sample_gradients(module, some_rows(call, part), deltas[columns, part])
        for name, gradients in found.items():
            total[name] += gradients.square().sum((0, 1))
    return total


def some_rows(call: Call, part: slice) -> Call:
    """The call on some of the samples."""
    size = len(call.output)
    args, kwargs = take_rows((call.args, call.kwargs), part, size)
    return replace(call, args=args, kwargs=kwargs, output=call.output[part])


def _differentiated(module: nn.Module, call: Call, deltas: Tensor) -> Params:
    """By a module that is called on each sample alone."""

    def forward(params: Params, sample: Any) -> Tensor:
        args, kwargs = sample
        found: Tensor = functional_call(module, call.state | params, args, kwargs)
        return found

    chosen = {name: call.state[name] for name in call.chosen}
    return mapped_gradients(forward, chosen, (call.args, call.kwargs), deltas)


def mapped_gradients(
    forward: Callable[[Params, Any], Tensor], params: Params, batch: Any, columns: Tensor
) -> Params:
    """Gradients ``(c, batch, *shape)`` of a function that is called on one sample at a time.

    Args:
        forward: Takes parameters and a batch of one sample, and returns its output, a batch too.
        params: Where, and in which parameters.
        batch: All samples: tensors with a row for each are cut, all else is passed on.
        columns: Cotangents of the output, ``(c, batch, ...)``.
    """
    leaves, spec = tree_flatten(batch)
    places = [i for i, leaf in enumerate(leaves) if is_rows(leaf, columns.shape[1])]

    def one(column: Tensor, *sample: Tensor) -> Params:
        own = list(leaves)
        for place, leaf in zip(places, sample, strict=True):
            own[place] = leaf.unsqueeze(0)
        alone = tree_unflatten(own, spec)
        found: Params = vjp(lambda point: forward(point, alone)[0], params)[1](column)[0]
        return found

    # Not mapped over columns as well: under two maps some operations of torch sum wrongly.
    found = [vmap(one)(column, *(leaves[place] for place in places)) for column in columns]
    return {name: torch.stack([part[name] for part in found]) for name in params}


# ------------------------------------------------------------------------------------------
# Rules for modules with a scale, or a scale and a shift: those that normalise, and PReLU.


@sample_gradients.register
def _(module: _BatchNorm, call: Call, deltas: Tensor) -> Params:
    mean, variance = call.state.get("running_mean"), call.state.get("running_var")
    bare = functional.batch_norm(call.args[0], mean, variance, eps=module.eps)
    return _scale_and_shift(call, deltas, bare)


@sample_gradients.register
def _(module: nn.GroupNorm, call: Call, deltas: Tensor) -> Params:
    bare = functional.group_norm(call.args[0], module.num_groups, eps=module.eps)
    return _scale_and_shift(call, deltas, bare)


@sample_gradients.register
def _(module: nn.LayerNorm, call: Call, deltas: Tensor) -> Params:
    shape = module.normalized_shape
    bare = functional.layer_norm(call.args[0], shape, eps=module.eps)
    # Positions are ahead of what is normalised, not behind.
    return {
        name: part.reshape(*deltas.shape[:2], -1, *shape).sum(2)
        for name, part in _parts(call, deltas, bare).items()
    }


@sample_gradients.register
def _(module: nn.PReLU, call: Call, deltas: Tensor) -> Params:
    return _scale_and_shift(call, deltas, call.args[0].clamp_max(0))


def _scale_and_shift(call: Call, deltas: Tensor, bare: Tensor) -> Params:
    """For parameters by channel, the second axis of a batch; or one for all."""
    return {
        name: part.reshape(*deltas.shape[:2], len(call.state[name]), -1).sum(-1)
        for name, part in _parts(call, deltas, bare).items()
    }


def _parts(call: Call, deltas: Tensor, bare: Tensor) -> Params:
    return {name: deltas * bare if name == "weight" else deltas for name in call.chosen}
