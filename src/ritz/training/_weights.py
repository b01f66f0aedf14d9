"""Weights of models: files of ritz, other safetensors files, and ``.pt`` files of tensors."""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ritz._core import storage
from ritz._core.storage import CorruptFileError
from ritz.training._checkpoint import FilePath

PREFIX = "model."  # names of the weights in a checkpoint begin with it


def save_weights(model: nn.Module, path: FilePath, **header: Any) -> None:
    """Write the parameters and buffers of a model as one safetensors file, atomically.

    Args:
        model: Any module.
        path: The file.
        **header: Metadata (numbers and strings) to store in the header of the file.
    """
    save_tensors(tensor_state(model), path, **header)


def save_tensors(tensors: dict[str, Tensor], path: FilePath, **header: Any) -> None:
    """Write parameters and buffers by name; see :func:`save_weights`."""
    storage.write_tensors(path, tensors, {"kind": "weights"} | header)


def epoch_file_name(epoch: int) -> str:
    """Return the name of the file of the weights after an epoch; 0 is before the first one."""
    return f"epoch-{epoch:04d}.safetensors"


def load_weights(model: nn.Module, path: FilePath) -> None:
    """Load the weights and buffers of a file into a model, in place.

    Args:
        model: Must have the same architecture as the file. If not, an error names the first tensor
            that differs, and the model is not changed. Tied weights stay tied: the file may have
            them under all their names, with equal values, or under one.
        path: A checkpoint or weights of ritz, any other safetensors file of named tensors, or a
            ``.pt`` file. The latter is read with ``weights_only=True``: nothing in it is executed.
    """
    copy_weights(model, _untie(tensor_state(model), read_weights(path), path), path)


def copy_weights(model: nn.Module, tensors: dict[str, Tensor], path: FilePath) -> None:
    """Copy tensors into a model; raise, naming the first that differs, unless all fit."""
    state = tensor_state(model)
    # In the order of the model, then tensors of the file alone.
    for name in state | tensors:
        here, there = (_shape(name, each) for each in (state, tensors))
        if here != there:
            both = f"{name} is {there} in the file and {here} in the model"
            raise ValueError(f"{path} does not match the model: {both}")
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(tensors[name])


def _shape(name: str, tensors: Mapping[str, Tensor]) -> str:
    return f"of shape {tuple(tensors[name].shape)}" if name in tensors else "missing"


def read_weights(path: FilePath) -> dict[str, Tensor]:
    """Return the named tensors of a file, on the CPU; see :func:`load_weights` for formats."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    with open(path, "rb") as file:
        start = file.read(2)
    # Zip archives are the format of torch; a lone pickle begins with its protocol.
    pickled = start == b"PK" or start[:1] == b"\x80"
    tensors = _plain_names(_read_pickle(path) if pickled else _read_safetensors(path))
    wrapped = all(name.startswith("module.") for name in tensors)  # by DistributedDataParallel
    return {name.removeprefix("module."): x for name, x in tensors.items()} if wrapped else tensors


def tensor_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model by name."""
    state = model.state_dict()
    return _plain_names({name: x for name, x in state.items() if isinstance(x, Tensor)})


def _plain_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names that they have if no part of the model is compiled."""
    # torch.compile inserts this into names.
    return {name.replace("_orig_mod.", ""): x for name, x in tensors.items()}


def _untie(
    state: Mapping[str, Tensor], tensors: dict[str, Tensor], path: FilePath
) -> dict[str, Tensor]:
    """Return the tensors of a file, with those that the model ties under all their names."""
    groups: dict[Any, list[str]] = {}
    for name, x in state.items():
        # Tied tensors share address, dtype, shape and strides. Empty tensors have no address.
        place = (x.data_ptr(), x.dtype, x.shape, x.stride()) if x.numel() else name
        groups.setdefault(place, []).append(name)
    for names in groups.values():
        first, *others = [name for name in names if name in tensors] or names
        for name in others:
            one, other = tensors[first], tensors[name]
            same = one.shape == other.shape
            if not (same and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)):
                tied = f"the model ties {first} and {name}, which differ in the file"
                raise ValueError(f"{path} does not match the model: {tied}")
        if first in tensors:
            tensors |= dict.fromkeys(names, tensors[first])
    return tensors


def _read_pickle(path: FilePath) -> dict[str, Tensor]:
    try:
        # As an open file, because torch goes by the name, and this one may end in .safetensors.
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of an unknown protocol, which raises
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CorruptFileError(
            f"{path} is refused: it has pickled Python objects, which could run code when they are "
            "read, or a pickle protocol other than 2; save model.state_dict() with torch.save"
        ) from error
    except Exception as error:  # a damaged file can raise anything
        raise CorruptFileError(f"{path} is damaged or not a file of torch: {error}") from error
    for key in ("state_dict", "model_state_dict", "model"):  # in files of others
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(x, Tensor) for x in content.values()):
        raise CorruptFileError(f"{path} must contain named tensors, got {type(content).__name__}")
    return dict(content)


def _read_safetensors(path: FilePath) -> dict[str, Tensor]:
    if storage.is_ritz_file(path):
        tensors, header = storage.read_tensors(path)
        if isinstance(header, Mapping) and header.get("kind") == "weights":
            return tensors
        return {
            name.removeprefix(PREFIX): x for name, x in tensors.items() if name.startswith(PREFIX)
        }
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(f"{path} is truncated or not a safetensors file: {error}") from error
