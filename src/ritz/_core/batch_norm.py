"""Batch-norm layers of a model, their modes, and recomputed running statistics."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice
from math import ceil
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ritz._core.batches import known_length, num_rows, split_labels, to_device
from ritz._core.checks import check_choice, check_range
from ritz._core.distributed import Group, all_max, all_sum, is_sharded, unwrapped, world_size
from ritz._core.modes import attributes_set, hooked

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
    return attributes_set(changes)


def recomputed_statistics(
    model: nn.Module,
    call: Callable[[object], object],
    batches: Iterable[tuple[object, float]],
    *,
    reduce: Callable[[Tensor], Tensor] = lambda total: total,
) -> dict[str, Tensor]:
    """Return recomputed running means and variances by the name of their buffer.

    As in torch, these are weighted averages over batches of the mean and the unbiased variance of
    the inputs of each layer. During these passes all layers normalise by the statistics of the
    batch. Layers that are never called are left out. The model and its buffers do not change.

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

    with hooked(model, _BatchNorm, hook, before=True), torch.no_grad():
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


# ------------------------------------------------------------------------------------------
# Statistics for the current weights of a model, weighted by sample.


Forward = Callable[[nn.Module, Any], Any]
Count = Callable[[Any], int]
Sharing = Literal["own", "none"]


class StatisticsOptions(TypedDict, total=False):
    """Options of :func:`with_statistics` that other functions pass on."""

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
    """Set the running statistics of batch norm to those of ``data`` inside the block.

    They are recomputed for the current weights of the model; see :func:`recomputed_statistics`.
    Each batch is weighted by its number of samples.

    Args:
        model: The model, plain or wrapped (DDP, FSDP2, compiled). Nothing is done without batch
            norm.
        data: Batches. ``None`` leaves the statistics unchanged.
        fraction: Fraction of the batches to use, beginning with the first.
        forward: Called with the model and a batch. Defaults to ``model(*inputs)``.
        count: Returns the number of samples of a batch. Defaults to the length of its first tensor.
        sharing: ``own``: all processes of ``group`` make this call, each with its own batches.
            ``none``: this process computes the statistics alone.
        group: Process group. Defaults to all processes.
        keep: Keep the new statistics after the block, instead of restoring the old ones.
    """
    plain = unwrapped(model)
    tracked = any(layer.running_mean is not None for layer in batch_norms(plain).values())
    if data is None or not tracked:
        yield
        return
    check_choice("sharing", sharing, ("own", "none"))
    shared = sharing == "own" and world_size(group) > 1
    # Layers that communicate must be called equally often in all processes.
    in_step = shared and any(
        is_sharded(module) or isinstance(module, nn.SyncBatchNorm) for module in plain.modules()
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
        raise ValueError(
            "data must have at least one batch that reaches a batch-norm layer, got none"
        )
    buffers = {name: plain.get_buffer(name) for name in statistics}
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        for name, buffer in buffers.items():
            buffer.copy_(statistics[name])
        yield
    finally:
        for name, buffer in buffers.items() if not keep else ():
            buffer.copy_(before[name])


def _first_batches(data: Iterable[Any], fraction: float) -> Iterable[Any]:
    check_range("fraction", fraction, low=0.0, high=1.0)
    if fraction == 1.0:
        return data
    length = known_length(data)
    if length is None:
        raise TypeError(f"data must have a length if fraction < 1, got {type(data).__name__}")
    return islice(data, ceil(fraction * length))


def _weigh_batches(
    data: Iterable[Any], model: nn.Module, count: Count, in_step: bool, group: Group | None
) -> Iterator[tuple[Any, float]]:
    """Yield batches on the device of the model, each with its number of samples as weight.

    With ``in_step``, a process without further batches repeats its last batch with weight 0 until
    all processes are done.
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
            raise ValueError("data must have at least one batch in every process for a sharded "
                             "model or SyncBatchNorm, got none in this one")  # fmt: skip
        yield last, float(count(last)) if more else 0.0
