"""`Replayed`: a function of tensors on a GPU, replayed from a CUDA graph where that is faster."""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ritz._core.checks import is_below


@dataclass(frozen=True, slots=True)
class Tuning:
    """When a function is replayed."""

    # A graph is recorded if launching the kernels takes this fraction of the time of a call. On an
    # H200, a product with the Gauss-Newton matrix of VGG-16 takes 5.9 ms for 128 samples, of which
    # launches take 5.4 ms and kernels 4.1 ms.
    launches: float = 0.6
    # A graph has copies of its inputs and the memory of all results in between. If launches take
    # most of the time, these are small; this is the largest size of the copies, in bytes.
    memory: int = 2**31
    # Graphs of a function: one for each number of samples, and each precision.
    graphs: int = 4
    # Largest relative difference between the first replay and an ordinary call. Both run the same
    # kernels; some of these add in an order that changes from call to call.
    rtol: float = 1e-3


TUNING = Tuning()


class Values(list[Tensor | int]):
    """Inputs that stay the same for many calls, recognised by their identity."""


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
        for static, new in zip(self.fixed, _tensors(values), strict=True):
            static.copy_(new)
        self.source = weakref.ref(values)

    def replay(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for static, new in zip(self.inputs, inputs, strict=True):
            static.copy_(new)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


@final
class Replayed:
    """A function of tensors. If they are all on one GPU, it may be replayed from a CUDA graph.

    Small products take less time on a GPU than the launches of their kernels. A replayed graph has
    one launch. The first call runs as usual, and prepares the libraries of CUDA. The second one is
    timed. If launches take most of its time, the third one records the graph, and compares its
    first replay with an ordinary call. A function that cannot be recorded is called as usual.

    Args:
        function: Takes tensors and integers, and returns new tensors. It must not read values on
            the host or draw random numbers.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]]) -> None:
        self._function = function
        self._calls: dict[Any, int] = {}
        self._recorded: dict[Any, _Recorded] = {}
        self._last: _Recorded | None = None

    @property
    def num_graphs(self) -> int:
        """Number of graphs that were recorded."""
        return len(self._recorded)

    def __call__(self, values: Values, /, *inputs: Tensor, replay: bool = True) -> Sequence[Tensor]:
        """Return the tensors that the function returns for the values and the inputs.

        Args:
            values: Inputs that stay the same for many calls.
            *inputs: The other inputs.
            replay: Allow a graph, which has a copy of all inputs.
        """
        if not replay or not inputs[0].is_cuda or torch.cuda.is_current_stream_capturing():
            return self._function(*values, *inputs)
        last, settings = self._last, _settings(inputs)
        if last is not None and last.source() is values and last.settings == settings:
            return last.replay(inputs)
        if not _can_record([*_tensors(values), *inputs]):
            return self._function(*values, *inputs)
        key = settings, *(each.shape if isinstance(each, Tensor) else each for each in values)
        if key in self._recorded:
            self._last = last = self._recorded[key]
            last.load(values)
            return last.replay(inputs)
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        if calls == 2:
            return self._time(key, values, inputs)
        if calls == 3 and len(self._recorded) < TUNING.graphs:
            return self._record(key, values, inputs)
        return self._function(*values, *inputs)

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
        static = Values(each.clone() if isinstance(each, Tensor) else each for each in values)
        places = [each.clone() for each in inputs]
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                # Other threads, such as those of a data loader, may call CUDA meanwhile.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    outputs = tuple(self._function(*static, *places))
                finally:
                    graph.capture_end()
        except RuntimeError:
            return expected
        finally:
            torch.cuda.current_stream().wait_stream(stream)
        recorded = _Recorded(
            graph=graph, fixed=_tensors(static), inputs=places, outputs=outputs,
            source=weakref.ref(values), settings=key[0],
        )  # fmt: skip
        if all(map(_is_same, recorded.replay(inputs), expected)):
            self._recorded[key] = self._last = recorded
        return expected


def _tensors(values: Sequence[Tensor | int]) -> list[Tensor]:
    return [each for each in values if isinstance(each, Tensor)]


def _can_record(tensors: Sequence[Tensor]) -> bool:
    # A number on the CPU would be part of the graph, and would keep its value.
    on_device = all(tensor.is_cuda for tensor in tensors)
    return on_device and sum(tensor.nbytes for tensor in tensors) <= TUNING.memory


def _settings(inputs: Sequence[Tensor]) -> Any:
    """Return the shapes of inputs, and the settings of torch on which kernels depend."""
    cudnn, shapes = torch.backends.cudnn, [each.shape for each in inputs]
    return (*shapes, torch.cuda.current_device(), torch.backends.cuda.matmul.allow_tf32,
            cudnn.allow_tf32, cudnn.enabled, cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled())  # fmt: skip


def _is_same(product: Tensor, expected: Tensor) -> bool:
    gap, size = float((product - expected).norm()), float(expected.norm())
    return gap == 0 or is_below(gap, TUNING.rtol * size)
