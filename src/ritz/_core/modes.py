"""Modes set for a block and then restored: batch norm, dropout, and the precision of torch."""

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from math import ceil
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from ritz._core.batches import num_rows, split_labels, to_device
from ritz._core.checks import check_choice, check_range
from ritz._core.distributed import Group, all_max, all_sum, world_size

# ------------------------------------------------------------------------------------------
# Precision and algorithms of torch.

Precision = Literal["float32", "tf32", "float64"]


@contextmanager
def arithmetic(precision: Precision | None) -> Iterator[None]:
    """Whether a GPU may round float32 products to TF32, for the block; ``None``: as it is.

    Never in the half precision of an autocast around the call, which is meant for training.
    """
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, convolution.allow_tf32
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if precision is None:
            yield
            return
        matmul.allow_tf32 = convolution.allow_tf32 = precision == "tf32"
        try:
            yield
        finally:
            matmul.allow_tf32, convolution.allow_tf32 = before


@contextmanager
def searched_convolutions(wanted: bool) -> Iterator[None]:
    """Let cuDNN time its algorithms for every shape, and not guess, for the block.

    Its guess for the gradient of a weight with many columns is a Fourier transform at several times
    the cost. Not where determinism is asked for: two searches may end with different algorithms.
    """
    before = torch.backends.cudnn.benchmark
    fixed = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.benchmark = before or (wanted and not fixed)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


# ------------------------------------------------------------------------------------------
# Batch norm and dropout in a chosen mode, and statistics recomputed, with the model
# unchanged.

BatchNormMode = Literal["train", "eval", "recomputed"]
BATCH_NORM_MODES = ("train", "eval", "recomputed")


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch-norm layers of a model by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}


@contextmanager
def evaluating(model: nn.Module, *, batch_statistics: bool) -> Iterator[None]:
    """Put every module in eval mode for the block, and then back as it was.

    With ``batch_statistics`` batch norm uses those of each batch, and keeps no memory of them.
    """
    before = [(module, module.training) for module in model.modules()]
    layers = batch_norms(model).values() if batch_statistics else ()
    tracking = [(layer, layer.track_running_stats) for layer in layers]
    try:
        for module, _ in before:
            module.training = False
        for layer, _ in tracking:
            # Without running statistics to track, a layer in train mode touches no buffer.
            layer.training, layer.track_running_stats = True, False
        yield
    finally:
        for layer, tracked in tracking:
            layer.track_running_stats = tracked
        for module, mode in before:
            module.training = mode


@contextmanager
def masked_dropout(model: nn.Module, masks: list[Tensor] | None) -> Iterator[None]:
    """Multiply what the dropout layers pass on by ``masks``, in the order of their calls."""
    if masks is None:
        yield
        return
    remaining = iter(masks)

    def hook(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * next(remaining)

    with _hooked(model, _DropoutNd, hook):
        yield


def dropout_shapes(
    model: nn.Module, call: Callable[[], object]
) -> list[tuple[tuple[int, ...], float]]:
    """The shape of every mask that a call needs, with the probability of a zero in it."""
    found: list[tuple[tuple[int, ...], float]] = []

    def hook(layer: _DropoutNd, args: tuple[Tensor, ...], output: Tensor) -> None:
        if "Alpha" in type(layer).__name__:
            raise ValueError(f"dropout='fixed' needs layers whose masks are zeros and ones, got "
                             f"{layer}")  # fmt: skip
        # Dropout1d, 2d, 3d drop whole channels.
        whole = len(output.shape) if type(layer).__name__ == "Dropout" else 2
        shape = tuple(output.shape[:whole]) + (1,) * (output.ndim - whole)
        found.append((shape, layer.p))

    with _hooked(model, _DropoutNd, hook):
        call()
    return found


def recomputed_statistics(
    model: nn.Module,
    call: Callable[[object], object],
    batches: Iterable[tuple[object, float]],
    *,
    reduce: Callable[[Tensor], Tensor] = lambda total: total,
) -> dict[str, Tensor]:
    """Return running means and variances by buffer name: averages over batches by weight.

    The convention of torch: at every layer the mean and the unbiased variance of each batch, as
    normalised by its own statistics below, averaged over all calls; nothing for a layer that is
    never called. Neither model nor buffers change.

    Args:
        model: Its batch-norm layers are looked at.
        call: Evaluates the model on a batch, in batch-statistics mode.
        batches: Batches of this process with their weights, which sum to one over all processes.
        reduce: Sums over the processes that share the batches.
    """
    layers = batch_norms(model)
    names = {layer: name for name, layer in layers.items()}
    sums = {name: torch.zeros(3, layer.num_features, dtype=torch.float64)
            for name, layer in layers.items()}  # fmt: skip
    weight = 0.0

    def hook(layer: _BatchNorm, args: tuple[Tensor, ...]) -> None:
        rows = args[0].detach().transpose(0, 1).flatten(1)
        if rows.shape[1] < 2:
            raise ValueError(
                f"batch norm {names[layer]} must see more than one value a channel in a batch"
            )
        means, variances = rows.mean(1), rows.var(1)
        found = torch.stack([means, variances, torch.ones_like(means)])
        sums[names[layer]] += weight * found.double().cpu()

    with _hooked(model, _BatchNorm, hook, before=True), torch.no_grad():
        for batch, share in batches:
            weight = share
            call(batch)
    found = {}
    for name, own in sums.items():
        like = layers[name].running_mean
        if like is None:
            continue
        mean, variance, called = reduce(own.to(like.device))
        if bool(called[0] == 0):
            continue
        for key, value in (("running_mean", mean), ("running_var", variance)):
            found[f"{name}.{key}" if name else key] = (value / called).to(like.dtype)
    return found


@contextmanager
def _hooked(
    model: nn.Module, kind: type, hook: Callable[..., object], *, before: bool = False
) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in model.modules():
            if isinstance(layer, kind):
                handle = (
                    layer.register_forward_pre_hook(hook)
                    if before
                    else layer.register_forward_hook(hook)
                )
                stack.callback(handle.remove)
        yield


# ------------------------------------------------------------------------------------------
# Statistics of batch norm for the weights that a model has now, by sample.

Forward = Callable[[nn.Module, Any], Any]
Count = Callable[[Any], int]
Sharing = Literal["own", "none"]


@contextmanager
def with_statistics(
    model: nn.Module,
    data: Iterable[Any] | None = None,
    *,
    fraction: float = 1.0,
    forward: Forward | None = None,
    count: Count | None = None,
    sharing: Sharing = "own",
    group: Group | None = None,
    keep: bool = False,
) -> Iterator[None]:
    """Let batch norm have the statistics of the present weights on ``data`` for the block.

    The convention of torch, with every batch weighted by its samples: the mean and the unbiased
    variance of each batch, as normalised by its own statistics in the layers below.

    Args:
        model: Itself or wrapped (DDP, FSDP2, compiled). Nothing happens without batch norm.
        data: Batches; ``None`` leaves the statistics alone.
        fraction: Part of the batches to use, the first ones.
        forward: Takes the model and a batch, and calls the one on the other.
        count: Takes a batch and returns its number of samples.
        sharing: ``own``: the processes of ``group`` bring batches of their own, any number of
            them, and all enter the block. ``none``: this process alone.
        group: The processes.
        keep: Whether the model keeps the statistics after the block.
    """
    plain = unwrapped(model)
    if data is None or not batch_norms(plain):
        yield
        return
    check_choice("sharing", sharing, ("own", "none"))
    call = forward or _default_forward
    shared = sharing == "own" and world_size(group) > 1
    batches = _placed(_part(data, fraction), plain)
    # A model whose layers exchange data must be called as often by all processes.
    if shared and any(map(_exchanges, plain.modules())):
        batches = _in_step(batches, group)
    sizes: list[int] = []
    with evaluating(plain, batch_statistics=True):
        found = recomputed_statistics(
            plain,
            lambda batch: call(plain, batch),
            _weighted(batches, sizes, count or num_rows),
            reduce=(lambda total: all_sum(total, group)) if shared else (lambda total: total),
        )
    if not (all_max(sum(sizes), group) if shared else sum(sizes)):
        raise ValueError("data must hold at least one batch, got none")
    with _replaced(plain, found, keep=keep):
        yield


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without what distributes or compiles it."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        inner = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def reshard(model: nn.Module) -> None:
    """Have a sharded model drop gathered weights, which would outlive a change of the shards."""
    for module in model.modules():
        if _is_sharded(module):
            module.reshard()  # type: ignore[operator]


def _is_sharded(module: nn.Module) -> bool:
    return hasattr(module, "reshard") and hasattr(module, "unshard")


def _exchanges(module: nn.Module) -> bool:
    return _is_sharded(module) or isinstance(module, nn.SyncBatchNorm)


def _part(data: Iterable[Any], fraction: float) -> Iterable[Any]:
    check_range("fraction", fraction, low=0.0, high=1.0)
    if fraction == 1.0:
        return data
    if not isinstance(data, Sized):
        raise TypeError(f"data must have a length for a fraction of {fraction} to be taken, got "
                        f"{type(data).__name__}")  # fmt: skip
    return islice(data, ceil(fraction * len(data)))


def _placed(data: Iterable[Any], model: nn.Module) -> Iterator[tuple[Any, bool]]:
    device = next(chain(model.parameters(), model.buffers())).device
    for batch in data:
        yield to_device(batch, device), True


def _in_step(
    batches: Iterator[tuple[Any, bool]], group: Group | None
) -> Iterator[tuple[Any, bool]]:
    """Batches, and after the last it again, marked so, until no process has any."""
    last = None
    while True:
        item = next(batches, None)
        if not all_max(int(item is not None), group):
            return
        last = item or last
        if last is None:
            raise ValueError("data must hold at least one batch in every process where the model "
                             "is sharded or its batch norm synchronised, got none")  # fmt: skip
        yield last[0], item is not None


def _weighted(
    batches: Iterable[tuple[Any, bool]], sizes: list[int], count: Count
) -> Iterator[tuple[Any, float]]:
    """Batches by their samples, those that only keep step by nothing; notes down the samples."""
    for batch, real in batches:
        sizes.append(count(batch) if real else 0)
        yield batch, float(sizes[-1])


def _default_forward(model: nn.Module, batch: Any) -> Any:
    args, kwargs, _ = split_labels(batch)
    return model(*args, **kwargs)


@contextmanager
def _replaced(model: nn.Module, found: dict[str, Tensor], *, keep: bool) -> Iterator[None]:
    buffers = {name: model.get_buffer(name) for name in found}
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        for name, buffer in buffers.items():
            buffer.copy_(found[name])
        yield
    finally:
        for name, buffer in buffers.items() if not keep else ():
            buffer.copy_(before[name])
