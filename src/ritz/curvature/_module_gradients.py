r"""Per-sample gradients of one module: forward hooks, and a rule for each class of module.

The gradient of a sample in the parameters of a module follows from the input of the module and the
derivative :math:`\delta` of the loss in its output. One backward pass computes these derivatives
for all modules.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from ritz._core.batches import is_rows, split_samples, take_rows
from ritz.curvature._parameters import Params


@dataclass(frozen=True, slots=True)
class Tuning:
    """Numbers of entries at which computations are cut into parts."""

    # Entries of the derivatives in the outputs of all modules at once: 128 MB of doubles.
    derivatives: int = 2**24
    # Entries of the sample gradients of one module at once on the CPU: 32 MB of doubles, about the
    # size of an L3 cache. A GPU takes 16 times as many, so that it is busy.
    gradients: int = 2**22
    # The same if only the sum of their squares is needed: 1 MB of floats, about an L2 cache.
    products: int = 2**18
    # Number of positions of a layer up to which squares are summed over pairs of positions. With
    # 512 channels and 32 samples on the CPU, pairs take 15 ms and gradients 38 ms at 4 positions;
    # 190 ms and 29 ms at 16. A GPU is limited by memory traffic, of which pairs need less up to 16.
    pairs: int = 4
    pairs_gpu: int = 16


TUNING = Tuning()

# ------------------------------------------------------------------------------------------
# Inputs and outputs of modules in a forward pass.


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The only call of a module in a forward pass.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: The output, ``(batch, ...)``.
        state: Parameters and buffers during the call, by their names in the module.
        chosen: Names of the parameters that vary.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    state: Params
    chosen: tuple[str, ...]

    def by_sample(self) -> tuple[int, ...]:
        """Return the indices of the arguments, as leaves, that have one row per sample."""
        leaves = tree_leaves((self.args, self.kwargs))
        return tuple(i for i, leaf in enumerate(leaves) if is_rows(leaf, len(self.output)))

    def rows(self, part: slice) -> "Call":
        """Return the call on some of the samples."""
        args, kwargs = take_rows((self.args, self.kwargs), part, len(self.output))
        return replace(self, args=args, kwargs=kwargs, output=self.output[part])


def owners(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Group parameters by module: from the name of a module to its own names of its parameters."""
    modules: dict[str, tuple[str, ...]] = {}
    for name in names:
        module, _, key = name.rpartition(".")
        modules[module] = (*modules.get(module, ()), key)
    return modules


def full_name(module: str, key: str) -> str:
    """Return the full name of a parameter, from its module and its name in the module."""
    return f"{module}.{key}" if module else key


@contextmanager
def hooks_on_calls(
    modules: Mapping[str, nn.Module], record: Callable[[str, Any, Any, Any], Any]
) -> Iterator[None]:
    """Call ``record(name, args, kwargs, output)`` at every call of the modules in the block.

    The arguments are detached. If ``record`` returns a tensor, it replaces the output.
    """

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        return record(name, args, kwargs, output)

    with ExitStack() as stack:
        for name, module in modules.items():
            hook = module.register_forward_hook(partial(note, name), with_kwargs=True)
            stack.callback(hook.remove)
        yield


# ------------------------------------------------------------------------------------------
# Per-sample gradients in the parameters of one module, and sums of their squares.
#
# Each function dispatches on the class of the module. To add a rule for a user-defined module, call
# ``sample_gradients.register(MyModule)(rule)``. A module without a rule is differentiated with
# autograd at its recorded inputs. ``deltas`` ``(c, batch, ...)`` are the derivatives in the output
# of the module, for ``c`` columns.


@singledispatch
def unroll(module: nn.Module, call: Call, deltas: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return :math:`a` and :math:`\delta` of a module that is linear at each position.

    The gradient of a sample is :math:`\sum_t \delta_t a_t^\top` in the weight, for each group, and
    :math:`\sum_t \delta_t` in the bias. The shape of :math:`a` is ``(batch, groups, i, T)``, and
    that of :math:`\delta` is ``(c, batch, groups, o, T)``.
    """
    raise NotImplementedError(f"{type(module).__name__} has no rule in unroll()")


@unroll.register
def _(module: nn.Linear, call: Call, deltas: Tensor) -> tuple[Tensor, Tensor]:
    x, (count, batch) = call.args[0], deltas.shape[:2]
    a = x.reshape(batch, 1, -1, x.shape[-1]).transpose(-1, -2)
    return a, deltas.reshape(count, batch, 1, -1, deltas.shape[-1]).transpose(-1, -2)


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@unroll.register(nn.Conv1d)
@unroll.register(nn.Conv2d)
@unroll.register(nn.Conv3d)
def _(module: Any, call: Call, deltas: Tensor) -> tuple[Tensor, Tensor]:
    # A convolution is a linear layer on patches.
    (count, batch, channels), groups = deltas.shape[:3], module.groups
    return (
        patches(module, call.args[0]),
        deltas.reshape(count, batch, groups, channels // groups, -1),
    )


def has_unroll_rule(module: nn.Module) -> bool:
    """Return whether :func:`unroll` has a rule for a module."""
    return unroll.dispatch(type(module)) is not unroll.dispatch(object)


def unroll_parts(module: nn.Module, call: Call, deltas: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield :func:`unroll` for some samples at a time: patches of a convolution are large."""
    size = batch = deltas.shape[1]
    if isinstance(module, CONVOLUTIONS):
        entries = module.groups * module.weight[0].numel() * deltas[0, 0, 0].numel()
        size = max(1, _limit(deltas) // entries)
    for start in range(0, batch, size):
        part = slice(start, start + size)
        rows = call if size >= batch else call.rows(part)
        yield unroll(module, rows, deltas[:, part])


def patches(module: Any, x: Tensor) -> Tensor:
    """Return the inputs of a convolution at each position, ``(batch, groups, i, T)``."""
    x, dims = _windows(module, x), len(module.kernel_size)
    # From (batch, channels, *positions, *kernel) to (batch, channels, *kernel, *positions).
    x = x.permute(0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims))
    return x.reshape(len(x), module.groups, -1, math.prod(x.shape[2 + dims :]))


def patch_rows(module: Any, x: Tensor) -> Tensor:
    """Return the inputs of a convolution at all positions of a batch, ``(i, batch * T)``.

    With groups it is ``(groups, i, batch * T)``. The patches are copied once.
    """
    windows, dims = _windows(module, x), len(module.kernel_size)
    rows = windows.permute(1, *range(2 + dims, 2 + 2 * dims), 0, *range(2, 2 + dims))
    lead = () if module.groups == 1 else (module.groups,)
    count = len(x) * math.prod(windows.shape[2 : 2 + dims])
    return rows.reshape(*lead, module.weight[0].numel(), count)


def _windows(module: Any, x: Tensor) -> Tensor:
    """Return a view ``(batch, channels, *positions, *kernel)`` of the padded inputs."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = functional.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    for axis, (size, step, gap) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        x = x.unfold(2 + axis, gap * (size - 1) + 1, step)[..., ::gap]
    return x


@singledispatch
def sample_gradients(module: nn.Module, call: Call, deltas: Tensor) -> Params:
    """Return the gradients ``(c, batch, *shape)`` of the chosen parameters, by name."""
    if not has_unroll_rule(module):
        return _gradients_by_autograd(module, call, deltas)
    a, delta = unroll(module, call, deltas)
    gradients = {"weight": _products(a, delta).movedim(2, 0), "bias": delta.sum(-1)}
    lead = deltas.shape[:2]
    return {name: gradients[name].reshape(*lead, *call.state[name].shape) for name in call.chosen}


@singledispatch
def squared_gradients(module: nn.Module, call: Call, deltas: Tensor) -> Params:
    """Return the sums of squares ``(*shape)`` over columns and samples, by name."""
    total: Params = {}

    def add(name: str, squares: Tensor) -> None:
        square = squares.reshape(call.state[name].shape)
        total[name] = total[name].add_(square) if name in total else square

    if not has_unroll_rule(module):
        for gradients in in_chunks(module, call, deltas):
            for name, gradient in gradients.items():
                add(name, gradient.square().sum((0, 1)))
        return total
    for a, delta in unroll_parts(module, call, deltas):
        if "weight" in call.chosen:
            add("weight", weight_squares(a, delta))
        if "bias" in call.chosen:
            add("bias", _bias_squares(delta))
    return total


@singledispatch
def squared_norm(module: nn.Module, call: Call, deltas: Tensor) -> Tensor:
    """Return the sum of squares over columns, samples and parameters, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=deltas.device)
    if not has_unroll_rule(module):
        for square in squared_gradients(module, call, deltas).values():
            total += square.sum(dtype=torch.float64)
        return total
    for a, delta in unroll_parts(module, call, deltas):
        if "weight" in call.chosen:
            total += _weight_norm(a, delta)
        if "bias" in call.chosen:
            total += _bias_gradients(delta).square().sum(dtype=torch.float64)
    return total


@sample_gradients.register
def _(module: nn.Embedding, call: Call, deltas: Tensor) -> Params:
    # The gradient in a row of the table is the sum of the deltas of the positions that use it.
    (count, batch), (vocabulary, width) = deltas.shape[:2], module.weight.shape
    gradient = deltas.new_zeros(count, batch * vocabulary, width)
    gradient.index_add_(1, _used_rows(module, call).flatten(), deltas.reshape(count, -1, width))
    gradient = gradient.view(count, batch, vocabulary, width)
    if module.padding_idx is not None:
        gradient[:, :, module.padding_idx] = 0
    return {"weight": gradient}


@squared_gradients.register
def _(module: nn.Embedding, call: Call, deltas: Tensor) -> Params:
    # Nearly all rows of a sample gradient are zero, so only the rows in use are summed.
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


def _used_rows(module: nn.Embedding, call: Call) -> Tensor:
    """Return the row numbers ``(batch, T)`` in use, as if each sample had its own table."""
    ids: Tensor = call.args[0].flatten(1)
    return ids + module.num_embeddings * torch.arange(len(ids), device=ids.device)[:, None]


def in_chunks(module: nn.Module, call: Call, deltas: Tensor) -> Iterator[Params]:
    """Yield the sample gradients of a module for some columns and samples at a time."""
    if isinstance(module, _BatchNorm):
        # Not cut, because batch statistics need all samples. These gradients are small.
        yield sample_gradients(module, call, deltas)
        return
    for columns, part in chunks(deltas, sum(call.state[name].numel() for name in call.chosen)):
        yield sample_gradients(module, call.rows(part), deltas[columns, part])


def chunks(deltas: Tensor, entries: int, limit: int | None = None) -> Iterator[tuple[slice, slice]]:
    """Yield slices of columns and of samples to process at once, for ``entries`` per pair."""
    count, batch = deltas.shape[:2]
    limit = _limit(deltas) if limit is None else limit
    columns = min(count, max(1, limit // entries))
    size = min(batch, max(1, limit // (entries * columns)))
    for start in range(0, count, columns):
        for first in range(0, batch, size):
            yield slice(start, start + columns), slice(first, first + size)


def _limit(deltas: Tensor) -> int:
    return TUNING.gradients * (1 if deltas.device.type == "cpu" else 16)


def _join_columns(delta: Tensor) -> Tensor:
    """Join the axes of columns and outputs, ``(batch, groups, c * o, T)``, for a single product."""
    count, batch, groups, width, positions = delta.shape
    return delta.permute(1, 2, 0, 3, 4).reshape(batch, groups, count * width, positions)


def _products(a: Tensor, delta: Tensor) -> Tensor:
    """Return the per-sample gradients in the weight, ``(batch, groups, c, o, i)``."""
    count, batch, groups, width, _ = delta.shape
    return (_join_columns(delta) @ a.transpose(-1, -2)).view(batch, groups, count, width, -1)


def _bias_gradients(delta: Tensor) -> Tensor:
    # For a single position a view, as sum() would copy.
    return delta[..., 0] if delta.shape[-1] == 1 else delta.sum(-1)


def _bias_squares(delta: Tensor) -> Tensor:
    """Return the sum of squares ``(groups, o)`` of per-sample gradients in the bias."""
    total = delta.new_zeros(delta.shape[2:4])
    # A few samples at a time, as new memory for all squares would cost more than computing them.
    limit = TUNING.products if delta.device.type == "cpu" else None
    for columns, part in chunks(delta, delta[0, 0].numel(), limit):
        total += _bias_gradients(delta[columns, part]).square().sum((0, 1))
    return total


def weight_squares(a: Tensor, delta: Tensor) -> Tensor:
    """Return the sum of squares ``(groups, o, i)`` of per-sample gradients in the weight."""
    groups, inputs, positions = a.shape[1:]
    total = a.new_empty(groups, delta.shape[3], inputs)
    few = positions <= (TUNING.pairs if a.device.type == "cpu" else TUNING.pairs_gpu)
    return _sum_pairs(total, a, delta) if few else _sum_products(total.zero_(), a, delta)


def _sum_pairs(total: Tensor, a: Tensor, delta: Tensor) -> Tensor:
    """Compute the squares as sums over pairs of positions, with one product for many samples.

    The gradients of single samples, which are much larger than their few positions, are not formed.
    """
    (batch, groups, inputs, positions), (count, _, _, outputs, _) = a.shape, delta.shape
    # (batch, groups, T, i), contiguous if positions are read several times.
    x, d = (part.mT if positions == 1 else part.mT.contiguous() for part in (a, delta))
    size = _pair_rows(a, positions * groups * (inputs + count * outputs))
    # Buffers are reused, because allocating memory costs more than computing the squares.
    rooms = [a.new_empty(rows * size * groups * positions) for rows in (inputs, count * outputs)]
    for start in range(0, batch, size):
        part = slice(start, start + size)
        for t in range(positions):
            # (sum_t delta_t a_t)^2 = sum_t (delta_t^2 a_t^2 + 2 sum_s>t delta_t delta_s a_t a_s)
            pairs = _pair_products(x[part], t, rooms[0])
            deltas = _pair_products(d[:, part], t, rooms[1])
            energy = deltas[0] if count == 1 else deltas.sum(0)
            energy[:, :, 1:] *= 2
            left = energy.permute(1, 3, 0, 2).reshape(groups, outputs, -1)
            right = pairs.transpose(0, 1).reshape(groups, -1, inputs)
            total.baddbmm_(left, right, beta=float(start + t > 0))  # the first overwrites
    return total


def _pair_rows(a: Tensor, entries: int) -> int:
    """Return the number of samples to process at once, for ``entries`` per sample."""
    # On the CPU 512 rows per matrix product, which is fast while the buffers fit into the cache.
    size = 512 // a.shape[3] if a.device.type == "cpu" else _limit(a) // entries
    return max(1, min(len(a), size))


def _pair_products(rows: Tensor, t: int, room: Tensor) -> Tensor:
    """Return the products of row t with itself and all later rows, ``(..., T - t, i)``."""
    later = rows[..., t:, :]
    return torch.mul(rows[..., t : t + 1, :], later, out=room[: later.numel()].view(later.shape))


def _sum_products(total: Tensor, a: Tensor, delta: Tensor) -> Tensor:
    """Add the squares of per-sample gradients, which are formed for a few samples at a time."""
    (groups, outputs, inputs), room = total.shape, None
    limit = TUNING.products if a.device.type == "cpu" else None
    for columns, part in chunks(delta, total.numel(), limit):
        folded, x = _join_columns(delta[columns, part]), a[part].mT
        shape = *folded.shape[:3], inputs
        room = a.new_empty(shape) if room is None else room  # the first chunk is the largest
        gradients = torch.matmul(folded, x, out=room.flatten()[: math.prod(shape)].view(shape))
        if folded.shape[::2] == (1, outputs):  # one column of one sample
            total.addcmul_(gradients[0], gradients[0])
        else:
            squares = gradients.square_().view(len(x), groups, -1, outputs, inputs)
            total += squares.sum((0, 2))
    return total


def _weight_norm(a: Tensor, delta: Tensor) -> Tensor:
    groups, inputs, positions = a.shape[1:]
    count, outputs = delta.shape[0], delta.shape[3]
    if positions == 1:
        # |delta a'|^2 = |delta|^2 |a|^2
        norms = delta.square().sum((0, 3, 4)) * a.square().sum((2, 3))
        return norms.sum(dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    if positions * (count * outputs + inputs) < count * outputs * inputs:
        # |sum_t delta_t a_t'|^2 = sum_ts (delta_t' delta_s) (a_t' a_s): T^2 terms instead of o i.
        for columns, part in chunks(delta, groups * max(outputs * positions, positions**2)):
            d = _join_columns(delta[columns, part])
            inner = (d.transpose(-1, -2) @ d) * (a[part].transpose(-1, -2) @ a[part])
            total += inner.sum(dtype=torch.float64)
        return total
    for columns, part in chunks(delta, groups * outputs * inputs):
        flat = _products(a[part], delta[columns, part]).flatten()
        total += flat.dot(flat)
    return total


def _gradients_by_autograd(module: nn.Module, call: Call, deltas: Tensor) -> Params:
    """Differentiate a module without a rule with autograd, one sample at a time under vmap."""
    chosen = {name: call.state[name] for name in call.chosen}
    return mapped_gradients(
        lambda params, sample: functional_call(module, call.state | params, *sample),
        chosen,
        (call.args, call.kwargs),
        deltas,
    )


def mapped_gradients(
    forward: Callable[[Params, Any], Tensor], params: Params, batch: Any, columns: Tensor
) -> Params:
    """Return the per-sample gradients ``(c, batch, *shape)`` of a function, by vmap over samples.

    Args:
        forward: Takes parameters and a batch of one sample, returns its output, a batch of one.
        params: The parameters with respect to which the function is differentiated.
        batch: All samples. Tensors with one row per sample are split. Other values are not.
        columns: Cotangents of the output, ``(c, batch, ...)``.
    """
    rows, rebuild = split_samples(batch, columns.shape[1])

    def one(column: Tensor, *sample: Tensor) -> Params:
        alone = rebuild(sample)
        gradients: Params = vjp(lambda point: forward(point, alone)[0], params)[1](column)[0]
        return gradients

    # A second vmap over columns would be faster, but some operations of torch then give wrong sums.
    by_column = [vmap(one)(column, *rows) for column in columns]
    if len(by_column) == 1:  # a view instead of a copy of all gradients
        return {name: gradient.unsqueeze(0) for name, gradient in by_column[0].items()}
    return {name: torch.stack([part[name] for part in by_column]) for name in params}


# ------------------------------------------------------------------------------------------
# Modules that are affine in their parameters, y = w * z + b. For norms, z is the normalised input.
# For PReLU, y = w * min(x, 0) + max(x, 0) and z = min(x, 0).


@sample_gradients.register(_BatchNorm)
@sample_gradients.register(nn.GroupNorm)
@sample_gradients.register(nn.LayerNorm)
@sample_gradients.register(nn.RMSNorm)
@sample_gradients.register(nn.PReLU)
def _(module: nn.Module, call: Call, deltas: Tensor) -> Params:
    gradients = {}
    for name in call.chosen:
        value, part = call.state[name], deltas
        if name == "weight":
            # z = y(w = 1) - y(w = 0), dl/dw = sum delta * z and dl/db = sum delta
            states = (call.state | {name: torch.full_like(value, w)} for w in (1.0, 0.0))
            one, zero = (functional_call(module, s, call.args, call.kwargs) for s in states)
            part = deltas * (one - zero)
        # Layer norm has its features on the last axes, the others on the second.
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            gradients[name] = part.reshape(*deltas.shape[:2], -1, *value.shape).sum(2)
        else:
            gradients[name] = part.reshape(*deltas.shape[:2], len(value), -1).sum(-1)
    return gradients
