"""The inner loops of a sparse block product, compiled for the processor at hand.

One row of the product needs one cache line of the block for each of its entries, from anywhere in
memory: the time goes into waiting for them. The loop below keeps a whole line in a register and
asks for the line of an entry further on before it needs it, which neither SciPy nor MKL does. It is
written in the language of LLVM, whose compiler comes as a small binary package (llvmlite), so that
neither a C compiler nor a cache of compiled files is needed: a loop takes some 10 ms.
"""

import ctypes
import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

AHEAD = 96  # entries between asking for a line and using it: more than the latency of memory
LINE = 64  # bytes of a cache line

Loop = Callable[..., None]

_SCALARS = {torch.float32: ("float", "f32"), torch.float64: ("double", "f64")}
_INTEGERS = {torch.int32: "i32", torch.int64: "i64"}

# y_i = outer_i * sum_e values_e x_{columns_e} + diagonal_i * x_i for rows begin <= i < end, where
# x_j and y_i are vectors of `width` numbers; those of y are `stride` numbers apart. Lines are asked
# for into the second cache: it has more requests under way than the first.
_PRODUCT = """
declare {vector} @llvm.fmuladd.v{width}{suffix}({vector}, {vector}, {vector})
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)

define void @product(i64 %begin, i64 %end, i64 %last, i64 %stride,
    ptr noalias %pointers, ptr noalias %columns, ptr noalias %values,
    ptr noalias %outer, ptr noalias %diagonal, ptr noalias %x, ptr noalias %y) {{
entry:
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %row, label %done

row:
  %i = phi i64 [ %begin, %entry ], [ %next_i, %write ]
  %next_i = add nsw i64 %i, 1
  %first_at = getelementptr {pointer}, ptr %pointers, i64 %i
  %stop_at = getelementptr {pointer}, ptr %pointers, i64 %next_i
  %first_e = load {pointer}, ptr %first_at
  %stop_e = load {pointer}, ptr %stop_at
  %first = {widen_pointer} %first_e to i64
  %stop = {widen_pointer} %stop_e to i64
  %some = icmp slt i64 %first, %stop
  br i1 %some, label %entries, label %write

entries:
  %e = phi i64 [ %first, %row ], [ %next_e, %entries ]
  %sum = phi {vector} [ zeroinitializer, %row ], [ %more, %entries ]
  %beyond = add nsw i64 %e, {ahead}
  %within = icmp slt i64 %beyond, %last
  %later = select i1 %within, i64 %beyond, i64 %last
  %later_at = getelementptr {column}, ptr %columns, i64 %later
  %later_c = load {column}, ptr %later_at
  %later_j = {widen_column} %later_c to i64
  %wanted = getelementptr [{width} x {scalar}], ptr %x, i64 %later_j
  call void @llvm.prefetch.p0(ptr %wanted, i32 0, i32 2, i32 1)
  %column_at = getelementptr {column}, ptr %columns, i64 %e
  %c = load {column}, ptr %column_at
  %j = {widen_column} %c to i64
  %x_at = getelementptr [{width} x {scalar}], ptr %x, i64 %j
  %x_j = load {vector}, ptr %x_at, align {bytes}
{accumulate}
  %next_e = add nsw i64 %e, 1
  %again = icmp slt i64 %next_e, %stop
  br i1 %again, label %entries, label %write

write:
  %total = phi {vector} [ zeroinitializer, %row ], [ %more, %entries ]
{finish}
  %offset = mul nsw i64 %i, %stride
  %y_at = getelementptr {scalar}, ptr %y, i64 %offset
  store {vector} {result}, ptr %y_at, align {bytes}
  %again_i = icmp slt i64 %next_i, %end
  br i1 %again_i, label %row, label %done

done:
  ret void
}}
"""

# y_i = inner_i * x_i for rows begin <= i < end; those of x are `stride` numbers apart.
_PACK = """
define void @pack(i64 %begin, i64 %end, i64 %stride,
    ptr noalias %inner, ptr noalias %x, ptr noalias %y) {{
entry:
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %row, label %done

row:
  %i = phi i64 [ %begin, %entry ], [ %next_i, %row ]
  %offset = mul nsw i64 %i, %stride
  %x_at = getelementptr {scalar}, ptr %x, i64 %offset
  %x_i = load {vector}, ptr %x_at, align {bytes}
{scale}
  %y_at = getelementptr [{width} x {scalar}], ptr %y, i64 %i
  store {vector} {result}, ptr %y_at, align {bytes}
  %next_i = add nsw i64 %i, 1
  %again = icmp slt i64 %next_i, %end
  br i1 %again, label %row, label %done

done:
  ret void
}}
"""

_WEIGHTED = (
    "  %more = call {vector} @llvm.fmuladd.v{width}{suffix}"
    "({vector} %v, {vector} %x_j, {vector} %sum)\n"
)
_COUNTED = "  %more = fadd {vector} %sum, %x_j\n"
_AFFINE = (
    "  %x_i_at = getelementptr [{width} x {scalar}], ptr %x, i64 %i\n"
    "  %x_i = load {vector}, ptr %x_i_at, align {bytes}\n"
    "  %own = fmul {vector} %b, %x_i\n"
    "  %result = call {vector} @llvm.fmuladd.v{width}{suffix}"
    "({vector} %a, {vector} %total, {vector} %own)\n"
)


@cache
def product_loop(
    width: int,
    dtype: torch.dtype,
    *,
    pointer: torch.dtype,
    column: torch.dtype,
    weighted: bool,
    affine: bool,
) -> Loop:
    """Return the loop over the rows of a product; it must be :func:`compilable`.

    It takes ``begin, end, last, stride`` and the addresses of pointers, columns, values, outer,
    diagonal, x and y, as the comment above says; no lock is held while it runs.

    Args:
        width: Columns of the block.
        dtype: Of the numbers, float32 or float64.
        pointer: Integer type of the row pointers.
        column: Integer type of the column numbers.
        weighted: Whether there are values; else every entry is one.
        affine: Whether there are ``outer`` and ``diagonal``; else they are one and zero.
    """
    names = _names(width, dtype) | {
        "ahead": AHEAD,
        "pointer": _INTEGERS[pointer],
        "column": _INTEGERS[column],
        "widen_pointer": _widening(pointer),
        "widen_column": _widening(column),
    }
    accumulate = _spread("v", "values", "e") + _WEIGHTED if weighted else _COUNTED
    sides = _spread("a", "outer", "i") + _spread("b", "diagonal", "i") + _AFFINE
    names |= {
        "accumulate": accumulate.format(**names),
        "finish": sides.format(**names) if affine else "",
        "result": "%result" if affine else "%total",
    }
    return _compiled("product", _PRODUCT.format(**names), integers=4, addresses=7)


@cache
def pack_loop(width: int, dtype: torch.dtype, *, scaled: bool) -> Loop:
    """Return the loop that packs a strip of a block; it must be :func:`compilable`.

    It takes ``begin, end, stride`` and the addresses of inner, x and y.

    Args:
        width: Columns of the strip.
        dtype: Of the numbers, float32 or float64.
        scaled: Whether there is ``inner``; else it is one.
    """
    names = _names(width, dtype)
    scale = _spread("s", "inner", "i") + "  %result = fmul {vector} %s, %x_i\n"
    names |= {
        "scale": scale.format(**names) if scaled else "",
        "result": "%result" if scaled else "%x_i",
    }
    return _compiled("pack", _PACK.format(**names), integers=3, addresses=3)


def compilable(dtype: torch.dtype) -> bool:
    """Return whether there are loops for numbers of this type here."""
    return dtype in _SCALARS and compiler() is not None


@cache
def compiler() -> Any:
    """Return llvmlite's compiler, or ``None`` where there is none that knows plain pointers."""
    try:
        llvm: Any = importlib.import_module("llvmlite.binding")
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.parse_assembly("declare void @f(ptr)")
    except (ImportError, OSError, RuntimeError):
        return None
    return llvm


def _compiled(name: str, source: str, *, integers: int, addresses: int) -> Loop:
    llvm = compiler()
    processor = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(source), processor)
    engine.finalize_object()
    kinds = [ctypes.c_int64] * integers + [ctypes.c_void_p] * addresses
    loop: Any = ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address(name))
    loop.engine = engine  # which owns the code
    found: Loop = loop
    return found


def _names(width: int, dtype: torch.dtype) -> dict[str, Any]:
    scalar, suffix = _SCALARS[dtype]
    return {
        "width": width,
        "scalar": scalar,
        "suffix": suffix,
        "vector": f"<{width} x {scalar}>",
        "bytes": dtype.itemsize,
    }


def _spread(name: str, array: str, index: str) -> str:
    # One number of an array in every place of a vector.
    return (
        f"  %{name}_at = getelementptr {{scalar}}, ptr %{array}, i64 %{index}\n"
        f"  %{name}_s = load {{scalar}}, ptr %{name}_at\n"
        f"  %{name}_1 = insertelement {{vector}} poison, {{scalar}} %{name}_s, i32 0\n"
        f"  %{name} = shufflevector {{vector}} %{name}_1, {{vector}} poison, "
        "<{width} x i32> zeroinitializer\n"
    )


def _widening(integer: torch.dtype) -> str:
    return "sext i32" if integer == torch.int32 else "bitcast i64"
