"""Batch norm and dropout in a chosen mode, and statistics recomputed, with the model unchanged."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

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
