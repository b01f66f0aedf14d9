"""`recorded`: records a CUDA graph, and leaves torch intact if that fails."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def recorded(
    graph: torch.cuda.CUDAGraph,
    stream: torch.cuda.Stream,
    *,
    pool: Any,
    generators: Sequence[torch.Generator] = (),
) -> Iterator[None]:
    """Record the kernels of the block. If that fails, leave torch as it was, and raise.

    A recording that failed gives each of the generators a new state with the same numbers. Graphs
    that were recorded with them before still read the old state and must be dropped.

    Args:
        graph: A new graph.
        stream: Stream of the recording.
        pool: Memory pool of the graph, a result of :func:`torch.cuda.graph_pool_handle`.
        generators: Random generators of the current device from which the block draws. A replay
            draws the numbers that an ordinary call would draw then. The block may draw from the
            default generator only if it is among them.
    """
    device = torch.cuda.current_device()
    default = torch.cuda.default_generators[device]
    drawn = any(generator is default for generator in generators)
    state = default.graphsafe_get_state()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        for generator in generators:
            if generator is not default:
                graph.register_generator_state(generator)
        if not drawn:
            # torch registers the default generator with every graph. If the end of a recording
            # fails, the state stays in capture mode, in which torch refuses to draw.
            default.graphsafe_set_state(default.clone_state())
        with torch.cuda.stream(stream):
            # Other threads, such as those of a data loader, may call CUDA meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    except BaseException:
        # If the end of a recording fails, torch goes on to allocate for it, and refuses to empty
        # its cache. There is no public function to end that.
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        for generator in generators:
            # A copy is not in capture mode.
            generator.graphsafe_set_state(generator.clone_state())
        raise
    finally:
        if not drawn:
            default.graphsafe_set_state(state)
        torch.cuda.current_stream().wait_stream(stream)
