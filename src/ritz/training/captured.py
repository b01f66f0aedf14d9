"""Steps as CUDA graphs: recorded once for every shape of batch, and replayed."""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map

from ritz.optim import Lookahead
from ritz.training.steps import Piece, Step

WARM_UP = 3  # steps before a recording: they fill the optimiser's state and choose algorithms
MAX_GRAPHS = 2  # the batch of every step, and the shorter one at the end of an epoch
Signature = tuple[Any, ...]


@final
class CapturedStep:
    """A step that is replayed from a CUDA graph once it has been taken a few times.

    The first steps of every shape are ordinary ones, on the stream that records, so nothing is
    computed twice and the weights are those of ordinary steps. The hooks of the optimiser, and so
    averages and Lookahead, run at every replay, before and after it.

    Args:
        step: The step, whose optimiser keeps all that changes on the device.
        required: Whether a step that cannot be recorded is an error, and not just taken as it is.
    """

    def __init__(self, step: Step, *, required: bool) -> None:
        self._step, self._required = step, required
        self._stream = torch.cuda.Stream()
        self._seen: Counter[Signature] = Counter()
        self._graphs: dict[Signature, tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._given_up = False

    def __call__(self, pieces: Sequence[Piece]) -> None:
        """Take the step."""
        key = _signature(pieces)
        if key not in self._graphs and not self._record(pieces, key):
            self._ordinary(pieces)
        else:
            self._replay(pieces, key)

    def _ordinary(self, pieces: Sequence[Piece]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._step(pieces)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _replay(self, pieces: Sequence[Piece], key: Signature) -> None:
        graph, inputs = self._graphs[key]
        for held, new in zip(inputs, _tensors(pieces), strict=True):
            held.copy_(new, non_blocking=True)
        _run_hooks(self._step.optimizer, before=True)
        graph.replay()
        _run_hooks(self._step.optimizer, before=False)

    def _record(self, pieces: Sequence[Piece], key: Signature) -> bool:
        """Record the step; False where it is too early or not possible."""
        self._seen[key] += 1
        if self._given_up or self._seen[key] <= WARM_UP or len(self._graphs) >= MAX_GRAPHS:
            return False
        held = [
            piece._replace(batch=tree_map(_copied, piece.batch), share=_copied(piece.share))
            for piece in pieces
        ]
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _without_hooks(self._step.optimizer),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
            ):
                self._step(held)
        except RuntimeError as error:
            return self._give_up(error)
        self._graphs[key] = graph, _tensors(held)
        return True

    def _give_up(self, error: RuntimeError) -> bool:
        reason = str(error).splitlines()[0]
        if self._required:
            raise ValueError(f"capture=True needs a step without waits for the device, got one "
                             f"that cannot be recorded: {reason}") from error  # fmt: skip
        warnings.warn(f"steps are not captured in a CUDA graph: {reason}", stacklevel=2)
        self._given_up = True
        return False


def _signature(pieces: Sequence[Piece]) -> Signature:
    leaves, shape = tree_flatten([tuple(piece) for piece in pieces])
    return (str(shape), *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
                          for leaf in leaves))  # fmt: skip


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _tensors(pieces: Sequence[Piece]) -> list[Tensor]:
    """What is new in every step; a state stays where it is."""
    leaves, _ = tree_flatten([(piece.batch, piece.share) for piece in pieces])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _wrapped(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimiser and those inside it, outermost first."""
    yield optimizer
    while isinstance(optimizer, Lookahead):
        optimizer = optimizer.optimizer
        yield optimizer


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    tables: list[dict[int, Any]] = []
    for one in _wrapped(optimizer):
        tables += [one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks]
    before = [table.copy() for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)


def _run_hooks(optimizer: Optimizer, *, before: bool) -> None:
    chain = list(_wrapped(optimizer))
    for one in chain if before else reversed(chain):
        table: Any = one._optimizer_step_pre_hooks if before else one._optimizer_step_post_hooks
        for hook in table.values():
            hook(one, (), {})
