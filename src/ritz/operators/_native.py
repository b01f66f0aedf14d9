"""The inner loops of a sparse block product, compiled by numba for the local processor.

Each entry of a row needs a cache line of the block, from anywhere in memory, so most of the time is
spent waiting for memory. Numba supports neither vector registers nor prefetching, and without
prefetching the loop takes 2.7 times as long. With the intrinsics below it is as fast as LLVM code
written by hand (``benchmarks/loops.py``: 1.06 times its time, quartiles 0.90 and 1.17). This module
needs numba, so ``_sparse`` imports it only when the first large matrix is multiplied.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

# Number of entries between the prefetch of a line and its use, which covers the latency of memory.
# 96 entries and the second-level cache were 1.2 times as fast as 32 entries and the first.
AHEAD = np.uint64(96)

Loop = Callable[..., None]


# ------------------------------------------------------------------------------------------
# Vectors in registers, for numba.


class Line(types.Type):
    """A vector of ``width`` numbers, at most one cache line, in a vector register."""

    def __init__(self, dtype: Any, width: int) -> None:
        self.dtype, self.width = dtype, width
        super().__init__(name=f"Line({dtype}, {width})")


@register_model(Line)
class _LineModel(models.PrimitiveModel):
    def __init__(self, manager: Any, line: Line) -> None:
        scalar = manager.lookup(line.dtype).get_value_type()
        super().__init__(manager, line, ir.VectorType(scalar, line.width))


def _pointer(context: Any, builder: Any, kind: Any, target: Any, array: Any, offset: Any) -> Any:
    # The address of an element of an array, as a pointer to another type.
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), target.as_pointer())


@intrinsic(prefer_literal=True)
def zeros(_: Any, array: Any, width: Any) -> Any:
    """Return a line of zeros of the dtype of ``array``."""
    line = Line(array.dtype, width.literal_value)
    return line(array, width), lambda context, *_: ir.Constant(context.get_value_type(line), None)


@intrinsic(prefer_literal=True)
def load(_: Any, array: Any, offset: Any, width: Any) -> Any:
    """Return the line of ``array`` that begins at ``offset``."""
    line = Line(array.dtype, width.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = context.get_value_type(line)
        pointer = _pointer(context, builder, array, vector, *arguments[:2])
        return builder.load(pointer, align=array.dtype.bitwidth // 8)

    return line(array, types.uintp, width), generate


@intrinsic
def store(_: Any, array: Any, offset: Any, line: Any) -> Any:
    """Write a line to ``array`` from ``offset`` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, builder, array, arguments[2].type, *arguments[:2])
        builder.store(arguments[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.uintp, line), generate


@intrinsic
def prefetch(_: Any, array: Any, offset: Any) -> Any:
    """Request the cache line of ``array`` at ``offset`` without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i32, pointer = ir.IntType(32), _pointer(context, builder, array, ir.IntType(8), *arguments)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # A read (0) of data (1) into the second-level cache (2), which supports more simultaneous
        # requests than the first.
        builder.call(function, [pointer, i32(0), i32(2), i32(1)])
        return context.get_dummy_value()

    return types.void(array, types.uintp), generate


@intrinsic
def add_multiple(_: Any, total: Any, factor: Any, line: Any) -> Any:
    """Return ``total + factor * line``, rounded once if the processor supports it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = arguments[0].type
        undefined, i32 = ir.Constant(vector, ir.Undefined), ir.IntType(32)
        # The factor in every place of a vector.
        first = builder.insert_element(undefined, arguments[1], i32(0))
        places = ir.Constant(ir.VectorType(i32, vector.count), None)
        factors = builder.shuffle_vector(first, undefined, places)
        # "contract" allows a fused multiply-add. Full fastmath would allow other orders of
        # summation, and the result of a column would depend on the other columns.
        product = builder.fmul(factors, arguments[2], flags=("contract",))
        return builder.fadd(arguments[0], product, flags=("contract",))

    return total(total, total.dtype, line), generate


# ------------------------------------------------------------------------------------------
# The loops. Offsets are unsigned, since numba adds code for negative indices otherwise.


@cache
def product_loop(width: int) -> Loop:
    """Return the loop over rows of a product with a packed block of ``width`` columns."""
    size = np.uint64(width)

    @njit(nogil=True, cache=True)
    def product(
        begin: Any, end: Any, pointers: Any, columns: Any, values: Any,
        outer: Any, diagonal: Any, x: Any, y: Any, first: Any, stride: Any,
    ) -> None:  # fmt: skip
        # y_i = outer_i * sum_e values_e x_{columns_e} + diagonal_i * x_i for begin <= i < end.
        # Row i of y begins at first + i * stride. Without values every entry is one.
        last = np.uint64(len(columns) - 1)
        for i in range(np.uint64(begin), np.uint64(end)):
            total = zeros(x, width)
            for e in range(np.uint64(pointers[i]), np.uint64(pointers[i + np.uint64(1)])):
                prefetch(x, np.uint64(columns[min(e + AHEAD, last)]) * size)
                value = 1.0 if values is None else values[e]
                total = add_multiple(total, value, load(x, np.uint64(columns[e]) * size, width))
            if outer is not None:
                shifted = add_multiple(zeros(x, width), diagonal[i], load(x, i * size, width))
                total = add_multiple(shifted, outer[i], total)
            store(y, np.uint64(first) + i * np.uint64(stride), total)

    loop: Loop = product
    return loop


@njit(nogil=True, cache=True)
def pack_loop(begin: Any, end: Any, inner: Any, block: Any, packed: Any) -> None:
    """Write ``inner * block`` to ``packed``, whose rows follow each other in memory."""
    for i in range(begin, end):
        for k in range(packed.shape[1]):
            packed[i, k] = block[i, k] if inner is None else inner[i] * block[i, k]
