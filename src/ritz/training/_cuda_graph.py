"""Training steps as CUDA graphs: recorded once for each shape of batch, and replayed."""

import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only

from ritz._core.batches import tensors
from ritz._core.cuda_graphs import recorded
from ritz._core.distributed import world_size
from ritz._core.params import parameters
from ritz._core.training_config import TrainingConfig
from ritz.optim import CovarianceNoise
from ritz.optim._shared import NoiseReplay
from ritz.training._optimizers import nested
from ritz.training._step import Piece, Step

Signature = tuple[Any, ...]


def is_captured(
    optimizer: Optimizer,
    config: TrainingConfig,
    device: torch.device,
    noise: CovarianceNoise | None = None,
) -> bool:
    """Return whether to capture steps in a CUDA graph; raise if that is required but impossible."""
    refused = noise is not None and not NoiseReplay(noise).is_possible
    if config.capture and refused:
        raise ValueError(
            "capture must be False with noise='kfac', whose factorisations the host checks"
        )
    inner = nested(optimizer)[-1]
    if config.capture and config.random_segments:
        raise ValueError("capture must be False with random_segments, whose batches differ in size")
    # A graph can only read and write memory of the device, including the learning rate.
    on_device = all(p.is_cuda for p in parameters(inner)) and all(
        isinstance(rate := group.get("lr"), Tensor)
        and rate.is_cuda
        and (group.get("capturable") or (isinstance(inner, SGD) and group["fused"]))
        for group in inner.param_groups
    )
    # The gradient scaler of float16 reads from the device whether to skip the step.
    single_process = device.type == "cuda" and world_size() == 1 and config.precision != "float16"
    if config.capture and not (single_process and on_device):
        raise ValueError(
            "capture=True needs a CUDA device, a single process, a precision other than float16 "
            "and an optimiser with capturable=True (SGD: fused=True) and lr as a CUDA tensor, got "
            f"{type(optimizer).__name__} on {device} in {config.precision}"
        )
    possible = single_process and on_device and not (config.random_segments or refused)
    return possible and config.capture is not False


@final
class CapturedStep:
    """A step that is replayed from a CUDA graph after a few ordinary steps.

    The first three steps with each shape of batch run as usual, on the stream that later records
    the graph. Recording does not repeat a step, so the weights are those of a run without graphs.
    The hooks of the optimiser run before and after each replay. Averages and Lookahead are such
    hooks. Those of gradient noise compute on the device, and are part of the graph. Steps that
    compute other things for the noise have other graphs.

    Args:
        step: The step to record. Everything that changes between two steps must be on the device.
        required: Raise, instead of warning, if the step cannot be recorded.
    """

    def __init__(self, step: Step, *, required: bool) -> None:
        self._step, self._required = step, required
        self._noise = None if step.noise is None else NoiseReplay(step.noise)
        self._optimizers = nested(step.optimizer)
        self._stream = torch.cuda.Stream()
        self._seen: Counter[Signature] = Counter()
        self._graphs: dict[Signature, tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._failed = False

    def __call__(self, pieces: Sequence[Piece]) -> None:
        """Take the step."""
        noise = self._noise
        key = (*_signature(pieces), None if noise is None else noise.phase)
        if key in self._graphs or self._record(pieces, key):
            self._replay(pieces, *self._graphs[key])
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._step(pieces)
            torch.cuda.current_stream().wait_stream(self._stream)

    def _replay(
        self, pieces: Sequence[Piece], graph: torch.cuda.CUDAGraph, inputs: Sequence[Tensor]
    ) -> None:
        noise, inside = self._noise, hooks_inside(self._noise)
        for static, new in zip(inputs, _inputs(pieces), strict=True):
            static.copy_(new, non_blocking=True)
        if noise is not None:
            noise.begin()  # sets the seeds that the graph reads
        for optimizer in self._optimizers:
            _call(optimizer._optimizer_step_pre_hooks, optimizer, inside)
        graph.replay()
        if noise is not None:
            noise.advance()
        for optimizer in reversed(self._optimizers):
            _call(optimizer._optimizer_step_post_hooks, optimizer, inside)

    def _record(self, pieces: Sequence[Piece], key: Signature) -> bool:
        """Record the step; return whether it was recorded."""
        self._seen[key] += 1
        # Three ordinary steps before a recording fill the state of the optimiser and choose
        # algorithms, as in torch's recipe for capturing a training step. Two graphs for each phase
        # of the noise: the usual batch, and the smaller one at the end of an epoch.
        count = sum(other[-1] == key[-1] for other in self._graphs)
        if self._failed or self._seen[key] <= 3 or count >= 2:
            return False
        # The graph reads batches and shares from these copies. A recurrent state is not copied.
        copies = [tree_map_only(Tensor, torch.clone, piece[:2]) for piece in pieces]
        static = [Piece._make((*copy, *x[2:])) for copy, x in zip(copies, pieces, strict=True)]
        graph = torch.cuda.CUDAGraph()
        # While a graph is recorded, torch cannot free memory that it has cached.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        try:
            with (
                recording_hooks(self._step.optimizer, self._noise),
                recorded(graph, self._stream, pool=self._pool, generators=_generators(self._noise)),
            ):
                self._step(static)
        except RuntimeError as error:
            # Earlier graphs would draw from the former states of the generators.
            self._graphs.clear()
            self._failed = True
            reason = str(error).splitlines()[0]
            if self._required:
                message = f"capture=True: the step cannot be captured in a CUDA graph: {reason}"
                raise ValueError(message) from error
            warnings.warn(f"steps are not captured in a CUDA graph: {reason}", stacklevel=2)
            return False
        self._graphs[key] = graph, _inputs(static)
        return True


def _signature(pieces: Sequence[Piece]) -> Signature:
    # A graph can be replayed if shapes and dtypes agree, and all numbers that are not tensors.
    leaves, shape = tree_flatten([tuple(piece) for piece in pieces])
    return (
        str(shape),
        *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves),
    )


def _generators(noise: NoiseReplay | None) -> list[torch.Generator]:
    """Return the random generators from which a step draws: dropout uses the default one."""
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    return [default, *(() if noise is None else noise.generators)]


def _inputs(pieces: Sequence[Piece]) -> list[Tensor]:
    return tensors([(piece.batch, piece.share) for piece in pieces])


def hooks_inside(noise: NoiseReplay | None) -> tuple[int, ...]:
    """Return the hooks whose work is part of a graph."""
    return () if noise is None else noise.hooks


@contextmanager
def recording_hooks(optimizer: Optimizer, noise: NoiseReplay | None) -> Iterator[None]:
    """Leave the optimiser those hooks alone whose work is part of a graph."""
    inside = hooks_inside(noise)
    with ExitStack() as stack:
        stack.enter_context(nullcontext() if noise is None else noise.recording())
        for one in nested(optimizer):
            # Averages and Lookahead count steps on the host. A replay would not repeat that.
            for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                hooks = getattr(one, name)
                stack.callback(setattr, one, name, hooks)
                setattr(one, name, OrderedDict((k, hooks[k]) for k in hooks if k in inside))
        yield


def _call(hooks: dict[int, Any], optimizer: Optimizer, inside: Sequence[int]) -> None:
    for number, hook in hooks.items():
        if number not in inside:
            hook(optimizer, (), {})
