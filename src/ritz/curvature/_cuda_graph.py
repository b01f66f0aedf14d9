"""`Replayed`: a function of tensors on a GPU, replayed from a CUDA graph where that is faster."""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ritz._core.checks import is_below
from ritz._core.cuda_graphs import recorded
from ritz._core.distributed import world_size
from ritz._core.modes import uses_tf32


@dataclass(frozen=True, slots=True)
class Tuning:
    """When a function is replayed."""

    # A graph is recorded if launching the kernels takes this fraction of the time of a call. On an
    # H200, a product with the Gauss-Newton matrix of VGG-16 takes 5.9 ms for 128 samples, of which
    # launches take 5.4 ms and kernels 4.1 ms.
    launches: float = 0.6
    # Largest size of the copies of the inputs, in bytes. If launches take most of the time, the
    # inputs and all results in between are small.
    memory: int = 2**31
    # Graphs of a function: one for each number of samples, and each precision.
    graphs: int = 4
    # Largest relative difference between the first replay and an ordinary call, in eps. Both run
    # the same kernels; some of these add in an order that changes from call to call.
    alike: float = 1e3


TUNING = Tuning()
# Returns whether a graph may have copies of so many bytes.
Reserve = Callable[[int], bool]


class Values(list[Tensor | int]):
    """Inputs that stay the same for many calls, recognised by their identity."""


def reserve_little(size: int) -> bool:
    """Allow copies up to a fixed size."""
    return size <= TUNING.memory


@dataclass(eq=False, slots=True, kw_only=True)
class _Recorded:
    """A CUDA graph with its inputs and outputs, which keep their places in memory.

    Attributes:
        graph: The graph.
        fixed: Copies of the inputs that stay the same.
        inputs: Copies of the other inputs.
        outputs: Overwritten by every replay.
        source: Returns the values that were copied to ``fixed`` last, while they exist.
        settings: The :func:`_settings` for which the graph holds.
    """

    graph: torch.cuda.CUDAGraph
    fixed: list[Tensor]
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    source: Callable[[], Values | None]
    settings: Any

    def load(self, values: Values) -> None:
        if self.fixed:  # torch refuses empty lists
            torch._foreach_copy_(self.fixed, _tensors(values))
        self.source = weakref.ref(values)

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        torch._foreach_copy_(self.inputs, list(inputs))
        self.graph.replay()
        return self.outputs


@final
class Replayed:
    """A function of tensors. If they are all on one GPU, it may be replayed from a CUDA graph.

    Small products take less time on a GPU than the launches of their kernels. A replayed graph has
    one launch. The first call runs as usual, and prepares the libraries of CUDA. The second one is
    timed. If launches take most of its time, the third one records the graph, and compares its
    first replay with an ordinary call. A function that cannot be recorded is called as usual.

    Nothing is recorded if torch must be deterministic, or if there are several processes, because
    they would decide by different times.

    Args:
        function: Takes tensors and integers, and returns new tensors. It must not read values on
            the host or draw random numbers.
        borrowed: The results are only used until the next call, which may overwrite them.
    """

    def __init__(
        self, function: Callable[..., Sequence[Tensor]], *, borrowed: bool = False
    ) -> None:
        self._function, self._borrowed = function, borrowed
        self._calls: dict[Any, int] = {}
        self._recorded: dict[Any, _Recorded] = {}
        self._last: _Recorded | None = None

    @property
    def num_graphs(self) -> int:
        """Number of graphs that were recorded."""
        return len(self._recorded)

    @property
    def may_record(self) -> bool:
        """Whether there is a graph, or there may be one for calls like those before."""
        return bool(self._recorded) or all(calls < 3 for calls in self._calls.values())

    def __call__(
        self, values: Values, /, *inputs: Tensor, replay: Reserve | None = reserve_little
    ) -> Sequence[Tensor]:
        """Return the tensors that the function returns for the values and the inputs.

        Args:
            values: Inputs that stay the same for many calls.
            *inputs: The other inputs.
            replay: Called with the size of the copies before a graph is recorded. ``None`` allows
                no graph.
        """
        if replay is None or not inputs[0].is_cuda or not may_replay():
            return self._function(*values, *inputs)
        with torch.cuda.device(inputs[0].device):
            return self._replay(values, inputs, replay)

    def _replay(
        self, values: Values, inputs: Sequence[Tensor], replay: Reserve
    ) -> Sequence[Tensor]:
        last, settings = self._last, _settings(inputs)
        if last is not None and last.source() is values and last.settings == settings:
            return self._results(last, inputs)
        # A number on the CPU would be part of the graph, and would keep its value.
        if any(tensor.device != inputs[0].device for tensor in [*_tensors(values), *inputs]):
            return self._function(*values, *inputs)
        key = settings, *map(_kind, values)
        if key in self._recorded:
            self._last = last = self._recorded[key]
            last.load(values)
            return self._results(last, inputs)
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        if calls == 2:
            return self._time(key, values, inputs)
        size = sum(tensor.nbytes for tensor in [*_tensors(values), *inputs])
        if calls == 3 and len(self._recorded) < TUNING.graphs and replay(size):
            return self._record(key, values, inputs)
        return self._function(*values, *inputs)

    def _results(self, entry: _Recorded, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        outputs = entry.replay(inputs)
        return outputs if self._borrowed else tuple(output.clone() for output in outputs)

    def _time(self, key: Any, values: Values, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the outputs of an ordinary call, and decide whether to record the next one."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        outputs = self._function(*values, *inputs)
        launched = time.perf_counter() - begin
        torch.cuda.synchronize()
        if launched < TUNING.launches * (time.perf_counter() - begin):
            self._calls[key] += 1  # past the call that records
        return outputs

    def _record(self, key: Any, values: Values, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Record the graph. Return the outputs of an ordinary call."""
        expected = self._function(*values, *inputs)
        try:
            static = Values(each.clone() if isinstance(each, Tensor) else each for each in values)
            places, graph = [each.clone() for each in inputs], torch.cuda.CUDAGraph()
            pool = torch.cuda.graph_pool_handle()
            with recorded(graph, torch.cuda.Stream(), pool=pool):
                outputs = tuple(self._function(*static, *places))
        except RuntimeError:  # also if memory is short
            return expected
        entry = _Recorded(
            graph=graph, fixed=_tensors(static), inputs=places, outputs=outputs,
            source=weakref.ref(values), settings=key[0],
        )  # fmt: skip
        for output in outputs:
            output.fill_(torch.nan)  # a graph without kernels must not pass
        if all(map(_is_same, entry.replay(inputs), expected)):
            self._recorded[key] = self._last = entry
        return expected


def _tensors(values: Sequence[Tensor | int]) -> list[Tensor]:
    return [each for each in values if isinstance(each, Tensor)]


def may_replay() -> bool:
    """Return whether functions are replayed now, if they can be."""
    fixed = torch.are_deterministic_algorithms_enabled() or world_size() > 1
    return not fixed and not torch.cuda.is_current_stream_capturing()


def _kind(value: Tensor | int) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else value


def _settings(inputs: Sequence[Tensor]) -> Any:
    """Return the kinds of inputs, and the settings of torch on which kernels depend."""
    cudnn = torch.backends.cudnn
    flags = uses_tf32(), cudnn.enabled, cudnn.deterministic, cudnn.benchmark
    return (torch.cuda.current_device(), flags, *map(_kind, inputs))


def _is_same(product: Tensor, expected: Tensor) -> bool:
    gap, size = float((product - expected).norm()), float(expected.norm())
    return gap == 0 or is_below(gap, TUNING.alike * torch.finfo(product.dtype).eps * size)
