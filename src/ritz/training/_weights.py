"""Weights of models in files: our own, safetensors, and ``.pt`` without what could run."""

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ritz._core.storage import CorruptFileError, is_own, read_tensors, write_tensors

PREFIX = "model."  # of the weights in a checkpoint of training
COMPILED = "_orig_mod"  # the part that torch.compile puts into names
NESTED = ("state_dict", "model_state_dict", "model")  # where others put them in a .pt file


def save_weights(model: nn.Module, path: str | os.PathLike[str], **header: Any) -> None:
    """Write the parameters and buffers of a model as one safetensors file, atomically.

    Args:
        model: Any module.
        path: The file.
        **header: What else to say, in plain values.
    """
    write_tensors(path, tensor_state(model), {"kind": "weights"} | header)


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Put the weights and buffers of a file into a model, in place.

    Args:
        model: Of the architecture that the file was made from; the first tensor that differs is
            named otherwise, and the model left as it was. Weights that it ties stay tied: the file
            may have them under all their names, which must agree, or under one.
        path: A checkpoint or weights of ritz, any other safetensors file of named tensors, or a
            ``.pt`` file, which is read with ``weights_only=True``: nothing in it runs.
    """
    held = tensor_state(model)
    found = _with_tied(held, read_weights(path), path)
    check_matches(held, found, path)
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(found[name])


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The named tensors of a file, on the CPU; see :func:`load_weights` for which files."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    found = _plain_names(_read_pickle(path) if _is_pickle(path) else _read_safetensors(path))
    wrapped = all(name.startswith("module.") for name in found)  # by DistributedDataParallel
    return {name.removeprefix("module."): x for name, x in found.items()} if wrapped else found


def tensor_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model by name."""
    found = {name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    return _plain_names(found)


def _plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under the names that they have where neither model nor part of it is compiled."""
    if not any(COMPILED in name.split(".") for name in tensors):
        return tensors
    return {".".join(part for part in name.split(".") if part != COMPILED): x
            for name, x in tensors.items()}  # fmt: skip


def _with_tied(
    held: Mapping[str, Tensor], found: dict[str, Tensor], path: str | os.PathLike[str]
) -> dict[str, Tensor]:
    """The tensors of a file with those that the model ties under all their names."""
    groups: dict[Any, list[str]] = {}
    for name, x in held.items():
        # Alike in all this, two are one; an empty tensor lies nowhere.
        place = (x.data_ptr(), x.dtype, x.shape, x.stride()) if x.numel() else name
        groups.setdefault(place, []).append(name)
    for names in groups.values():
        for name in names:
            first = next((each for each in names if each in found), name)
            if first in found and not _equal(found.setdefault(name, found[first]), found[first]):
                raise ValueError(f"{path} is of another architecture: {first} and {name} differ "
                                 "there, and are one in the model")  # fmt: skip
    return found


def _equal(one: Tensor, other: Tensor) -> bool:
    if one is other or one.shape != other.shape:
        return one is other
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def check_matches(
    held: Mapping[str, Tensor], found: Mapping[str, Tensor], path: str | os.PathLike[str]
) -> None:
    """Raise unless a file has the tensors of a model, naming the first that differs."""
    for name, tensor in held.items():
        if name not in found:
            raise ValueError(f"{path} is of another architecture: it has no {name}, which the "
                             f"model has")  # fmt: skip
        if found[name].shape != tensor.shape:
            raise ValueError(f"{path} is of another architecture: {name} has shape "
                             f"{tuple(found[name].shape)} there, {tuple(tensor.shape)} in the "
                             f"model")  # fmt: skip
    extra = next((name for name in found if name not in held), None)
    if extra is not None:
        raise ValueError(f"{path} is of another architecture: it has {extra}, which the model has "
                         f"not")  # fmt: skip


def _is_pickle(path: str | os.PathLike[str]) -> bool:
    with open(path, "rb") as file:
        start = file.read(2)
    # Zip archives are torch's format; a lone pickle begins with its protocol.
    return start == b"PK" or start[:1] == b"\x80"


def _read_pickle(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    try:
        # Open, for torch goes by the names of files, and this one may be called .safetensors.
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of an unknown protocol: then it raises
            found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CorruptFileError(f"{path} is refused: it holds more than tensors and plain values, "
                               "and reading that could run anything, or has another protocol of "
                               "pickle than torch's own, 2") from error  # fmt: skip
    except (RuntimeError, EOFError, OSError) as error:
        raise CorruptFileError(f"{path} is damaged or not a file of torch: {error}") from error
    for key in NESTED:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(x, Tensor) for x in found.values()):
        raise CorruptFileError(f"{path} must hold named tensors, got {type(found).__name__}")
    return dict(found)


def _read_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    if is_own(path):
        tensors, header = read_tensors(path)
        if isinstance(header, Mapping) and header.get("kind") == "weights":
            return tensors
        return {name.removeprefix(PREFIX): x
                for name, x in tensors.items() if name.startswith(PREFIX)}  # fmt: skip
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(f"{path} is truncated or not a safetensors file: {error}") from error
