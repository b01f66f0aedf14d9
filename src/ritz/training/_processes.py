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
from ritz._core.training_config import TrainingConfig

LOADER = "loader."  # names of the generators of loaders begin with it
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def joined_processes(device: str | torch.device | None) -> Iterator[str | torch.device | None]:
    """Join the processes that ``torchrun`` has started, for the block; yield this one's device.

    In a single process, or if torch.distributed is in use already, nothing is changed.
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


def is_writer() -> bool:
    """Return whether this process writes the files."""
    return rank() == 0


def distributed(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model, wrapped if several processes train it."""
    if world_size() == 1:
        return model
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids)


@contextmanager
def channels_last(model: nn.Module, precision: str, device: torch.device) -> Iterator[None]:
    """Store the kernels of convolutions channels-last for the block; the numbers are the same.

    Tensor cores use this format. With another, each step converts all feature maps and back.
    """
    layers = (layer for layer in model.modules() if isinstance(layer, nn.Conv2d))
    kernels = [p for layer in layers for p in layer.parameters(recurse=False) if p.ndim == 4]
    if device.type != "cuda" or precision == "float32":
        kernels = []
    changed = [p for p in kernels if not p.is_contiguous(memory_format=torch.channels_last)]
    for p in changed:
        p.data = p.data.contiguous(memory_format=torch.channels_last)
    try:
        yield
    finally:
        for p in changed:
            p.data = p.data.contiguous()


@contextmanager
def arranged(config: TrainingConfig, device: torch.device) -> Iterator[None]:
    """Set precision, determinism and seeds of torch for the block, and restore them."""
    with ExitStack() as stack:
        stack.enter_context(arithmetic("float32" if config.precision == "float32" else "tf32"))
        if config.deterministic:
            stack.enter_context(_deterministic())
        stack.enter_context(searched_convolutions(device.type == "cuda"))
        cuda = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        # Processes draw different dropout masks for their different rows.
        torch.default_generator.manual_seed(config.seed + rank())
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(config.seed + rank())
        yield


def generator_states(
    device: torch.device, loaders: Sequence[torch.Generator] = ()
) -> dict[str, Tensor]:
    """Return the states of the global generators and of those of loaders, one row per process."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    states |= {f"{LOADER}{number}": each.get_state() for number, each in enumerate(loaders)}
    # NCCL gathers tensors on the GPU only.
    return {name: gathered(state.to(device)) for name, state in states.items()}


def set_generator_states(
    states: dict[str, Tensor], device: torch.device, loaders: Sequence[torch.Generator] = ()
) -> None:
    """Restore the states that :func:`generator_states` returned."""
    count = sum(name.startswith(LOADER) for name in states)
    if count != len(loaders):
        raise ValueError(f"a run must be resumed with loaders that have as many generators as at "
                         f"its start, {count}, got {len(loaders)}")  # fmt: skip
    for name, rows in states.items():
        if len(rows) != world_size():
            raise ValueError(f"a run must be resumed by as many processes as at its start, "
                             f"{len(rows)}, got {world_size()}")  # fmt: skip
        state = rows[rank()].cpu().clone()  # torch reads a state from the start of its storage
        if name == "cpu":
            torch.set_rng_state(state)
        elif name.startswith(LOADER):
            loaders[int(name.removeprefix(LOADER))].set_state(state)
        elif device.type == "cuda":
            torch.cuda.set_rng_state(state, device)


def gathered(values: Tensor) -> Tensor:
    """Return the values of all processes, one row each, on the CPU."""
    if world_size() == 1:
        return values.cpu()[None].clone()
    rows = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(rows, values)
    return torch.stack(rows).cpu()


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    workspace = os.environ.get(WORKSPACE)
    os.environ.setdefault(WORKSPACE, ":4096:8")  # cuBLAS is deterministic with fixed workspaces
    cudnn = torch.backends.cudnn.deterministic
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = cudnn
        torch.use_deterministic_algorithms(before)
        if workspace is None:
            del os.environ[WORKSPACE]
