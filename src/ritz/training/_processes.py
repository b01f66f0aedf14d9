"""Processes of torchrun, and the global state of torch that a run sets and restores."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ritz._core.distributed import rank, world_size
from ritz._core.modes import arithmetic, searched_convolutions

# ------------------------------------------------------------------------------------------
# Processes of torchrun, and the state of torch that a run sets and puts back.

OWN = "loader."  # generators that loaders were given
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def joined_processes(device: str | torch.device | None) -> Iterator[str | torch.device | None]:
    """Join the processes that ``torchrun`` has started, for the block; give this one's device.

    Nothing happens in a lone process, or where torch.distributed is in use already.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    if not launched or not dist.is_available() or dist.is_initialized():
        yield device
        return
    cuda = device is not None and torch.device(device).type == "cuda"
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def distributed(model: nn.Module, device: torch.device) -> nn.Module:
    """The model, wrapped where several processes train it."""
    if world_size() == 1:
        return model
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids)


@contextmanager
def channels_last(model: nn.Module, precision: str, device: torch.device) -> Iterator[None]:
    """Keep the kernels of convolutions pixel by pixel for the block, and then as they were.

    That is the order of tensor cores: with another every step turns all maps round and back. The
    numbers are the same.
    """
    layers = (layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    kernels = [p for layer in layers for p in layer.parameters(recurse=False) if p.ndim == 4]
    if device.type != "cuda" or precision == "float32":
        kernels = []
    turned = [p for p in kernels if not p.is_contiguous(memory_format=torch.channels_last)]
    for p in turned:
        p.data = p.data.contiguous(memory_format=torch.channels_last)
    try:
        yield
    finally:
        for p in turned:
            p.data = p.data.contiguous()


@contextmanager
def arranged(
    *, precision: str, deterministic: bool, seed: int, device: torch.device
) -> Iterator[None]:
    """Precision, determinism and seeds of torch for the block, and then all back as it was."""
    with ExitStack() as stack:
        stack.enter_context(arithmetic("float32" if precision == "float32" else "tf32"))
        if deterministic:
            stack.enter_context(_deterministic())
        stack.enter_context(searched_convolutions(device.type == "cuda"))
        cuda = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        torch.default_generator.manual_seed(seed + rank())
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed + rank())
        yield


def generator_states(
    device: torch.device, own: Sequence[torch.Generator] = ()
) -> dict[str, Tensor]:
    """States of the global generators, by device, and of others, a row for each process."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    found |= {f"{OWN}{number}": each.get_state() for number, each in enumerate(own)}
    return {name: _gathered(state, device) for name, state in found.items()}


def set_generator_states(
    states: dict[str, Tensor], device: torch.device, own: Sequence[torch.Generator] = ()
) -> None:
    """Go on from such states."""
    count = sum(name.startswith(OWN) for name in states)
    if count != len(own):
        raise ValueError(f"a run must be resumed with loaders of as many generators of their own "
                         f"as it was begun with, {count}, got {len(own)}")  # fmt: skip
    for name, rows in states.items():
        if len(rows) != world_size():
            raise ValueError(f"a run must be resumed by as many processes as it was begun with, "
                             f"{len(rows)}, got {world_size()}")  # fmt: skip
        state = rows[rank()].cpu().clone()  # torch reads a state from where its storage begins
        if name == "cpu":
            torch.set_rng_state(state)
        elif name.startswith(OWN):
            own[int(name.removeprefix(OWN))].set_state(state)
        elif device.type == "cuda":
            torch.cuda.set_rng_state(state, device)


def gathered(values: Tensor) -> Tensor:
    """The values of all processes, a row for each, on the CPU."""
    return _gathered(values, values.device)


def _gathered(state: Tensor, device: torch.device) -> Tensor:
    if world_size() == 1:
        return state.cpu()[None].clone()
    here = state.to(device)
    rows = [torch.empty_like(here) for _ in range(world_size())]
    dist.all_gather(rows, here)
    return torch.stack(rows).cpu()


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    workspace = os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, ":4096:8")
    chosen = torch.backends.cudnn.deterministic
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = chosen
        torch.use_deterministic_algorithms(before)
        if workspace is None:
            del os.environ[WORKSPACE]
