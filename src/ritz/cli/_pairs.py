"""Whether a model takes some data: a few samples are tried, before work that may be long."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from ritz._core.batchnorm import evaluating
from ritz.training.sources import DataParts, first_batch

LABELS = (torch.int64, torch.uint8)
HALF = (torch.float16, torch.bfloat16)


def check_pair(
    model: nn.Module,
    parts: DataParts,
    *,
    name: str,
    loss_fn: Any = None,
    device: torch.device | None = None,
) -> None:
    """Raise unless a model can be called on the first samples of its training data.

    The model, its mode and the generators are as before. What cannot be tried passes: batches that
    come only once, layers that take their shape from the first batch, half precision, which may
    need a device.

    Args:
        model: On any device.
        parts: The data.
        name: Of the model.
        loss_fn: Cross-entropy takes labels of two types alone.
        device: Where to try what fails on the CPU: it may have parts that are for a GPU alone.
    """
    with torch.random.fork_rng(devices=[]):
        batch = _batch(parts)
        inputs = _inputs(batch)
        if loss_fn is cross_entropy:
            _check_labels(batch, parts)
        if inputs is None or not _can_be_tried(model, inputs):
            return
        error = _failure(model, inputs)
        before = _device(model)
        if error is not None and device not in (None, before):
            error = error if _failure(model.to(device), inputs) else None
            model.to(before)
    if error is not None:
        raise ValueError(f"model {name} does not take the data {parts.name}, with inputs of "
                         f"{_described(inputs)}: {_first_line(error)}"
                         f"{_advice(model, inputs)}") from error  # fmt: skip


def _batch(parts: DataParts) -> Any:
    try:
        return first_batch(parts.train)
    except Exception as error:
        raise ValueError(f"the first samples of the data {parts.name} raised "
                         f"{_first_line(error)}") from error  # fmt: skip


def _inputs(batch: Any) -> Any:
    """A batch without its target; ``None`` where there is none to look at."""
    if isinstance(batch, Mapping):
        return dict(batch)
    return tuple(batch[:-1]) if isinstance(batch, tuple | list) and len(batch) > 1 else None


def _check_labels(batch: Any, parts: DataParts) -> None:
    labels = batch[-1] if isinstance(batch, tuple | list) and batch else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype in LABELS:
        return
    raise TypeError(f"the targets of the data {parts.name} must be int64 or uint8 for "
                    f"cross-entropy, got {_plain(labels.dtype)}")  # fmt: skip


def _advice(model: nn.Module, inputs: Any) -> str:
    """What to do about inputs of double precision, as NumPy has them unless told otherwise."""
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    double = any(leaf.dtype == torch.float64 for leaf in leaves)
    single = any(tensor.dtype == torch.float32 for tensor in model.parameters())
    if not (double and single):
        return ""
    return '; the model is float32: give float32 inputs (for NumPy: .astype("float32"))'


def _can_be_tried(model: nn.Module, inputs: Any) -> bool:
    tensors = list(chain(model.parameters(), model.buffers()))
    if any(is_lazy(tensor) for tensor in tensors):
        return False
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return not any(tensor.dtype in HALF for tensor in chain(tensors, leaves))


def _failure(model: nn.Module, inputs: Any) -> Exception | None:
    """What a model raises; by name, it may take the labels or not."""
    device = _device(model)
    moved = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, inputs)
    first: Exception | None = None
    for chosen in _ways(moved):
        try:
            with _unchanged(model), torch.no_grad():
                model(**chosen) if isinstance(chosen, dict) else model(*chosen)
        except torch.OutOfMemoryError:
            return None  # others may be using the device
        except Exception as error:
            first = first or error
        else:
            return None
    return first


def _ways(inputs: Any) -> list[Any]:
    if isinstance(inputs, dict) and "labels" in inputs:
        return [{name: part for name, part in inputs.items() if name != "labels"}, inputs]
    return [inputs]


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    # Tables with a largest norm are the parameters that a call changes: those it looks up.
    bounded = (each for each in model.modules() if getattr(each, "max_norm", None) is not None)
    tables = chain.from_iterable(each.parameters(recurse=False) for each in bounded)
    kept = [(each, each.detach().clone()) for each in chain(tables, model.buffers())]
    try:
        with evaluating(model, batch_statistics=False):
            yield
    finally:
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)


def _device(model: nn.Module) -> torch.device:
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _described(inputs: Any) -> str:
    named = inputs.items() if isinstance(inputs, dict) else (("", part) for part in inputs)
    found = [f"{name} {_shape(part)}".lstrip() for name, part in named]
    return " and ".join(found)


def _shape(part: Any) -> str:
    if not isinstance(part, Tensor):
        return type(part).__name__
    return f"shape {tuple(part.shape)}, {_plain(part.dtype)}"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
