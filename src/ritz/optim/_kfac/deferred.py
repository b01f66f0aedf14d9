"""`DeferredSums`: the sums of all layers of a step at once, replayed from a CUDA graph.

On a GPU the sums of a layer are some twenty small kernels, whose launches take longer than the
kernels. A graph of all layers has one launch. It needs the inputs and derivatives of all layers at
the same time, so calls of layers wait until the end of the step.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor

from ritz.curvature._shared import Call, Replayed, Values, may_replay
from ritz.optim._kfac.blocks import Block, LayerCall

# Calls wait if inputs and derivatives of the step before took at most this many bytes, and a graph
# is recorded if its copies of them and its results do. By count, VGG-16 with batches of 128 needs
# 0.75e9 bytes in float32.
MEMORY = 2**31
NO_VALUES = Values()
# By block: groups of calls on the same samples, with the number of derivatives of each call.
Groups = list[list[list[int]]]
# By block: rows, names of the sums, and number of the columns of each name.
Layout = list[tuple[int, list[str], dict[str, int]]]


def size_of_step(blocks: Sequence[Block]) -> int:
    """Return the bytes of all inputs and derivatives that blocks have received in this step."""
    return sum(block.nbytes for block in blocks)


@final
class DeferredSums:
    """Computes the sums of blocks from the calls that wait."""

    def __init__(self) -> None:
        self._key: Any = None
        self._replayed: Replayed | None = None
        self._layouts: dict[Any, Layout] = {}

    def let_wait(self, blocks: Sequence[Block]) -> None:
        """Decide which blocks let their calls wait in the next step."""
        # The size of a step is not known before the first one, and EK-FAC keeps the calls of the
        # first one.
        useful = self._replayed is None or self._replayed.may_record
        small = 0 < size_of_step(blocks) <= MEMORY
        for block in blocks:
            usable = block.may_wait and block.device.type == "cuda" and bool(block.inverse)
            block.waits = small and usable and useful and may_replay()

    def compute(self, blocks: Sequence[Block]) -> list[Tensor]:
        """Compute the sums of all blocks whose calls wait.

        Returns:
            A number that is finite if and only if all these sums are; nothing if no calls wait.
        """
        blocks = [block for block in blocks if block.waiting]
        if not blocks:
            return []
        groups = [[[len(call[1]) for call in calls] for calls in b.waiting] for b in blocks]
        inputs = [tensor for block in blocks for tensor in block.take_waiting()]
        # A graph reads eigenbases where they were when it was recorded.
        places = [value.data_ptr() for block in blocks for value in block.inverse.values()]
        key = str(groups), *map(id, blocks), *places
        if self._replayed is None or self._key != key:
            self._key, self._layouts = key, {}
            self._replayed = Replayed(self._function(blocks, groups), borrowed=True)
        results = sum(total.nbytes for block in blocks for total in block.average.values())
        total, *sums = self._replayed(
            NO_VALUES, *inputs, replay=lambda size: size + results <= MEMORY
        )
        _place(blocks, self._layouts[_shapes(inputs)], sums)
        return [total]

    def _function(self, blocks: list[Block], groups: Groups) -> Callable[..., list[Tensor]]:
        layouts = self._layouts

        def function(*inputs: Tensor) -> list[Tensor]:
            remaining = iter(inputs)
            for block, parts in zip(blocks, groups, strict=True):
                block.restart()
                for counts in parts:
                    block.add([_call(block, count, remaining) for count in counts])
                block.join()
            # A replay computes tensors alone, so the rest of the result is noted here.
            layouts[_shapes(inputs)] = [
                (block.rows, list(block.sums), {k: len(v) for k, v in block.columns.items()})
                for block in blocks
            ]
            checks = [each.sum() for block in blocks for each in block.checked()]
            return [torch.stack(checks).sum(), *_sums(blocks)]

        return function


def _shapes(inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple((each.shape, each.dtype) for each in inputs)


def _call(block: Block, count: int, tensors: Iterator[Tensor]) -> LayerCall:
    x, *columns = islice(tensors, 1 + count)
    return Call(args=(x,), kwargs={}, output=columns[0][0], state={}, chosen=block.keys), columns


def _sums(blocks: Sequence[Block]) -> Iterator[Tensor]:
    for block in blocks:
        yield from block.sums.values()
        for parts in block.columns.values():
            yield from parts


def _place(blocks: Sequence[Block], layout: Layout, tensors: Sequence[Tensor]) -> None:
    remaining = iter(tensors)
    for block, (rows, names, counts) in zip(blocks, layout, strict=True):
        block.rows = rows
        block.sums = dict(zip(names, islice(remaining, len(names)), strict=True))
        block.columns = {name: list(islice(remaining, n)) for name, n in counts.items()}
