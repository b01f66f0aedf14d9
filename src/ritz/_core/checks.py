"""Argument checks. Each error names the argument, what was expected and what was passed."""

import math
from collections.abc import Collection
from dataclasses import fields
from numbers import Integral, Real
from operator import index
from typing import TYPE_CHECKING, Any

from ritz._core.registry import suggest

# The command line checks its options before it imports torch.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Torch takes seeds of 64 bits. Studies multiply theirs by up to 100,000, which stays below that.
MAX_SEED = 2**32 - 1


def check_range(
    name: str, value: float, *, low: float | None = None, high: float | None = None
) -> None:
    """Raise unless ``low <= value <= high``. ``None`` means no limit on that side."""
    # bool is a subclass of int, but True as a tolerance or a count is a mistake.
    if isinstance(value, bool) or not isinstance(value, Real):  # Python's or NumPy's
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    # "not value >= low" instead of "value < low", because NaN fails every comparison.
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        kind = "a number that is " if value != value else ""
        raise ValueError(f"{name} must be {kind}{_interval(low, high)}, got {value}")


def check_number(name: str, value: float) -> None:
    """Raise unless ``value`` is a finite number."""
    check_range(name, value)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def check_positive(name: str, value: float, *, zero: bool = False) -> None:
    """Raise unless a number is finite and positive, or zero if that is allowed."""
    check_range(name, value)
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        least = "at least 0" if zero else "above 0"
        raise ValueError(f"{name} must be finite and {least}, got {value}")


def check_rtol(rtol: float, *, low: float = 0.0) -> None:
    """Raise unless a relative tolerance is between ``low`` and 1."""
    check_range("rtol", rtol, low=low, high=1.0)


def check_type(name: str, value: object, kind: Any, expected: str) -> None:
    """Raise unless ``value`` is an instance of ``kind``, described by ``expected`` in the error."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")


def check_callable(name: str, value: object) -> None:
    """Raise unless ``value`` can be called, or is ``None``."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable or None, got {type(value).__name__}")


def is_below(error: "float | Tensor", bound: "float | Tensor") -> bool:
    """Return whether every error is at most its bound. NaN is never below a bound."""
    # All comparisons of an error with a tolerance use this function, since ``not error > bound``
    # would accept NaN.
    below = error <= bound
    return bool(below.all()) if hasattr(below, "all") else below


def check_count(name: str, value: int, *, low: int = 1, high: int | None = None) -> int:
    """Return an integer of Python, NumPy or torch as an ``int``. Raise unless in ``[low, high]``.

    Callers must use the returned value, because integers of NumPy overflow.
    """
    try:
        number = index(value)
    except TypeError:
        number = None
    # True is an int in Python, but True as a count is a mistake, also in a tensor.
    if number is None or "bool" in str(getattr(value, "dtype", type(value))):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    check_range(name, number, low=low, high=high)
    return number


def as_plain(value: Any) -> Any:
    """Return a number of NumPy as a Python number, which JSON can store. Others are unchanged."""
    if isinstance(value, bool | int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def plain_fields(config: Any) -> None:
    """Replace numbers of NumPy in the fields of a dataclass, which may be frozen."""
    for entry in (entry for entry in fields(config) if entry.init):
        object.__setattr__(config, entry.name, as_plain(getattr(config, entry.name)))


def check_interval(name: str, interval: tuple[float, float]) -> None:
    """Raise unless ``interval`` is ``(low, high)``, finite and with ``low < high``."""
    try:
        low, high = interval
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a pair of numbers, got {interval!r}") from None
    # The length is checked and not the two ends, because it overflows for (-1e308, 1e308).
    if not (low < high and math.isfinite(high - low)):
        raise ValueError(f"{name} must be finite with its lower end first, got {interval}")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise unless ``value`` is one of ``choices``. The message suggests similar ones."""
    if value not in choices:
        hint = suggest(value, choices) if isinstance(value, str) else ""
        hint = f"; {hint}" if hint.startswith("did you mean") else ""
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {short(value)}{hint}")


def short(value: object) -> str:
    """Return a value for an error message: its representation, or its type if that is long."""
    text = repr(value)
    return text if len(text) <= 100 and "\n" not in text else type(value).__name__


def check_finite(name: str, tensor: "Tensor") -> None:
    """Raise if ``tensor`` has NaN or Inf entries. Report their number and the first index."""
    import torch

    # The common case costs one reduction. The index is computed only for the error.
    if bool(torch.isfinite(tensor).all()):
        return
    bad = ~torch.isfinite(tensor)
    first = tuple(bad.nonzero()[0].tolist())
    raise ValueError(
        f"{name} must be finite, got {int(bad.sum())} NaN or Inf of {tensor.numel()} entries, "
        f"the first at index {first}"
    )


def check_tensor(
    name: str,
    tensor: "Tensor",
    *,
    dtype: "torch.dtype",
    device: "torch.device",
    rows: int,
    ndim: int | None = None,
    like: str = "the operator",
) -> None:
    """Raise unless ``tensor`` is ``(rows,)`` or ``(rows, k)``, of this dtype and device.

    ``ndim`` allows one of the two shapes only.
    """
    from torch import Tensor

    check_type(name, tensor, Tensor, "a torch.Tensor")
    if tensor.ndim not in ((1, 2) if ndim is None else (ndim,)) or tensor.shape[0] != rows:
        expected = {None: f"({rows},) or ({rows}, k)", 1: f"({rows},)", 2: f"({rows}, k)"}[ndim]
        raise ValueError(f"{name} must be {expected}, got {tuple(tensor.shape)}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, like {like}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, like {like}, got {tensor.device}")


def check_real_floating(name: str, dtype: "torch.dtype") -> None:
    """Raise unless ``dtype`` is a real floating-point type."""
    if not dtype.is_floating_point:
        raise TypeError(f"{name} must be of a real floating-point dtype, got {dtype}")


def check_device(device: "str | torch.device") -> "torch.device":
    """Return a device by name, with its index for CUDA. Raise unless this machine has it."""
    import torch

    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be cpu, cuda or cuda:<number>, got {device!r}") from error
    if place.type != "cuda":
        return place
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # torch would fail when the first tensor is created, perhaps after minutes of reading data.
    if (place.index or 0) >= count:
        raise ValueError(
            f"device must be one of this machine, got {str(device)!r}: torch finds "
            f"{count or 'no'} CUDA device{'s' * (count > 1)}"
        )
    # With an index, because the device of a tensor is cuda:0, which does not equal cuda.
    return torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)


def _interval(low: float | None, high: float | None) -> str:
    if high is None:
        return f"at least {low}"
    if low is None:
        return f"at most {high}"
    return f"between {low} and {high}"
