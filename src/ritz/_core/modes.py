"""Context managers for precision, batch norm and dropout, and recomputed batch-norm statistics."""

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain, islice
from math import ceil
from typing import Any, Literal, TypedDict

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
    """Allow TF32 products on a GPU only for ``tf32``; ``None`` leaves the setting of torch.

    A surrounding autocast is switched off: half precision is meant for training.
    """
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    changes = [(backend, "allow_tf32", precision == "tf32") for backend in backends]
    with _attributes(changes if precision is not None else []), ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def searched_convolutions(wanted: bool) -> AbstractContextManager[None]:
    """Let cuDNN choose convolution algorithms by timing them, unless torch is deterministic."""
    # Without a search, cuDNN picks a Fourier transform for the gradient of a weight with many
    # columns, at several times the cost. Two searches may pick different algorithms, so a
    # deterministic run must not search.
    cudnn = torch.backends.cudnn
    fixed = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    return _attributes([(cudnn, "benchmark", cudnn.benchmark or (wanted and not fixed))])


def without_fused_lstm() -> AbstractContextManager[None]:
    """Return a context without the LSTM of oneDNN, which has no forward derivative."""
    return _attributes([(torch.backends.mkldnn, "enabled", False)])


@contextmanager
def _attributes(changes: Iterable[tuple[object, str, object]]) -> Iterator[None]:
    # Attributes are restored in reverse order, so one may occur twice.
    with ExitStack() as stack:
        for target, name, value in changes:
            stack.callback(setattr, target, name, getattr(target, name))
            setattr(target, name, value)
        yield


# ------------------------------------------------------------------------------------------
# Tensors that have derivatives, even if the caller is in inference mode.


@contextmanager
def outside_inference() -> Iterator[None]:
    """Leave inference mode, because tensors made in that mode cannot have a gradient."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def recording() -> Iterator[None]:
    """Record operations for a backward pass, even within ``no_grad`` or inference mode."""
    with outside_inference(), torch.enable_grad():
        yield


def differentiable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it was made in inference mode."""
    with outside_inference():
        return tensor.clone() if tensor.is_inference() else tensor


# ------------------------------------------------------------------------------------------
# Modes of batch norm and dropout, and recomputed statistics. The model is not changed.

BatchNormMode = Literal["train", "eval", "recomputed"]
BATCH_NORM_MODES = ("train", "eval", "recomputed")


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch-norm layers of a model by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}


def evaluating(model: nn.Module, *, batch_statistics: bool) -> AbstractContextManager[None]:
    """Put all modules in eval mode, and restore their modes afterwards.

    With ``batch_statistics``, batch norm normalises by the statistics of each batch instead, and
    its running statistics stay unchanged.
    """
    changes: list[tuple[object, str, object]]
    changes = [(module, "training", False) for module in model.modules()]
    for layer in batch_norms(model).values() if batch_statistics else ():
        # In train mode, a layer that tracks no running statistics writes to no buffer.
        changes += [(layer, "training", True), (layer, "track_running_stats", False)]
    return _attributes(changes)


def masked_dropout(model: nn.Module, masks: list[Tensor] | None) -> AbstractContextManager[None]:
    """Multiply the outputs of dropout layers by ``masks``, in the order of the calls."""
    if masks is None:
        return nullcontext()
    remaining = iter(masks)
    return _hooked(model, _DropoutNd, lambda layer, args, output: output * next(remaining))


def dropout_shapes(
    model: nn.Module, call: Callable[[], object]
) -> list[tuple[tuple[int, ...], float]]:
    """Return the shape of each mask that ``call`` needs, and its probability of a zero."""
    shapes: list[tuple[tuple[int, ...], float]] = []

    def hook(layer: _DropoutNd, args: tuple[Tensor, ...], output: Tensor) -> None:
        if "Alpha" in type(layer).__name__:
            raise ValueError(f"dropout='fixed' does not support {type(layer).__name__}")
        # Dropout1d, 2d and 3d drop whole channels: one entry per sample and channel.
        whole = len(output.shape) if type(layer).__name__ == "Dropout" else 2
        shape = tuple(output.shape[:whole]) + (1,) * (output.ndim - whole)
        shapes.append((shape, layer.p))

    with _hooked(model, _DropoutNd, hook):
        call()
    return shapes


def recomputed_statistics(
    model: nn.Module,
    call: Callable[[object], object],
    batches: Iterable[tuple[object, float]],
    *,
    reduce: Callable[[Tensor], Tensor] = lambda total: total,
) -> dict[str, Tensor]:
    """Return recomputed running means and variances by the name of their buffer.

    As in torch, these are weighted averages over batches of the mean and the unbiased variance at
    each layer, while the layers below normalise by the statistics of the batch. Layers that are
    never called are left out. The model and its buffers do not change.

    Args:
        model: Model with batch-norm layers.
        call: Evaluates the model on a batch, in batch-statistics mode.
        batches: Batches of this process, with their weights.
        reduce: Sums a tensor over the processes that share the batches.
    """
    layers = batch_norms(model)
    names = {layer: name for name, layer in layers.items()}
    # Rows: sum of w * mean, sum of w * variance, and sum of w, over batches and calls.
    sums = {n: torch.zeros(3, m.num_features, dtype=torch.float64) for n, m in layers.items()}
    weight = 0.0

    def hook(layer: _BatchNorm, args: tuple[Tensor, ...]) -> None:
        channels = args[0].detach().transpose(0, 1).flatten(1)
        if channels.shape[1] < 2:
            raise ValueError(f"batch norm {names[layer]} needs more than one value per channel: "
                             "use a larger batch size")  # fmt: skip
        means = channels.mean(1)
        terms = torch.stack([means, channels.var(1), torch.ones_like(means)])
        sums[names[layer]] += weight * terms.double().cpu()

    with _hooked(model, _BatchNorm, hook, before=True), torch.no_grad():
        for batch, share in batches:
            weight = share
            call(batch)
    statistics = {}
    for name, layer in layers.items():
        if (like := layer.running_mean) is None:
            continue
        mean, variance, total = reduce(sums[name].to(like.device))
        if float(total[0]):
            for key, value in (("running_mean", mean), ("running_var", variance)):
                statistics[f"{name}.{key}".lstrip(".")] = (value / total).to(like.dtype)
    return statistics


@contextmanager
def _hooked(
    model: nn.Module, kind: type, hook: Callable[..., object], *, before: bool = False
) -> Iterator[None]:
    register = "register_forward_pre_hook" if before else "register_forward_hook"
    layers = [layer for layer in model.modules() if isinstance(layer, kind)]
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(getattr(layer, register)(hook).remove)
        yield


# ------------------------------------------------------------------------------------------
# Batch-norm statistics for the current weights of a model, weighted by sample.

Forward = Callable[[nn.Module, Any], Any]
Count = Callable[[Any], int]
Sharing = Literal["own", "none"]


class StatisticsOptions(TypedDict, total=False):
    """Keywords of :func:`with_statistics` that other functions pass on."""

    data: Iterable[Any] | None
    fraction: float
    forward: Forward | None
    count: Count | None
    sharing: Sharing
    group: Group | None


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
    """Give batch norm the statistics of ``data`` for the current weights of the model.

    See :func:`recomputed_statistics`. Each batch is weighted by its number of samples.

    Args:
        model: The model, plain or wrapped (DDP, FSDP2, compiled). Without batch norm nothing
            happens.
        data: Batches. ``None`` leaves the statistics unchanged.
        fraction: Fraction of the batches to use, beginning with the first.
        forward: Called with the model and a batch. Defaults to ``model(*inputs)``.
        count: Returns the number of samples of a batch. Defaults to the length of its first tensor.
        sharing: ``own``: each process of ``group`` passes its own batches, any number of them.
            ``none``: this process computes the statistics alone.
        group: Process group. Defaults to all processes.
        keep: Keep the new statistics afterwards instead of restoring the old ones.
    """
    plain = unwrapped(model)
    tracked = any(layer.running_mean is not None for layer in batch_norms(plain).values())
    if data is None or not tracked:
        yield
        return
    check_choice("sharing", sharing, ("own", "none"))
    shared = sharing == "own" and world_size(group) > 1
    # Layers that exchange data must be called the same number of times in all processes.
    in_step = shared and any(
        _is_sharded(module) or isinstance(module, nn.SyncBatchNorm) for module in plain.modules()
    )
    batches = _weigh_batches(
        _first_batches(data, fraction), plain, count or num_rows, in_step, group
    )

    def call(batch: Any) -> Any:
        if forward is not None:
            return forward(plain, batch)
        inputs, keywords, _ = split_labels(batch)
        return plain(*inputs, **keywords)

    def reduce(total: Tensor) -> Tensor:
        return all_sum(total, group) if shared else total

    with evaluating(plain, batch_statistics=True):
        statistics = recomputed_statistics(plain, call, batches, reduce=reduce)
    if not statistics:
        raise ValueError("data must have at least one batch that reaches a batch-norm layer")
    buffers = {name: plain.get_buffer(name) for name in statistics}
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        for name, buffer in buffers.items():
            buffer.copy_(statistics[name])
        yield
    finally:
        for name, buffer in buffers.items() if not keep else ():
            buffer.copy_(before[name])


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without the wrappers of DDP and ``torch.compile``."""
    name = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
    inner = getattr(model, name, None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def reshard(model: nn.Module) -> None:
    """Let a sharded model drop gathered weights, which do not follow a change of the shards."""
    for module in model.modules():
        if _is_sharded(module):
            module.reshard()  # type: ignore[operator]


def _is_sharded(module: nn.Module) -> bool:
    # FSDP2 adds these methods to the class of the module.
    return hasattr(module, "reshard") and hasattr(module, "unshard")


def _first_batches(data: Iterable[Any], fraction: float) -> Iterable[Any]:
    check_range("fraction", fraction, low=0.0, high=1.0)
    if fraction == 1.0:
        return data
    if not isinstance(data, Sized):
        raise TypeError(f"data must have a length if fraction < 1, got {type(data).__name__}")
    return islice(data, ceil(fraction * len(data)))


def _weigh_batches(
    data: Iterable[Any], model: nn.Module, count: Count, in_step: bool, group: Group | None
) -> Iterator[tuple[Any, float]]:
    """Yield batches on the device of the model, with their numbers of samples as weights.

    With ``in_step``, a process without further batches repeats its last one with weight 0 until no
    process has any.
    """
    device = next(chain(model.parameters(), model.buffers())).device
    batches, last = iter(data), None
    while True:
        batch = next(batches, None)
        more = int(batch is not None)
        if not (all_max(more, group) if in_step else more):
            return
        last = to_device(batch, device) if more else last
        if last is None:
            raise ValueError("data must have at least one batch in every process if the model is "
                             "sharded or its batch norm synchronised")  # fmt: skip
        yield last, float(count(last)) if more else 0.0
