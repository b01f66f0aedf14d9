"""Products of compressed rows by the compiled loop and by torch."""

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse
import torch
from matrices import PRECISIONS, seeded
from processes import output_of

from ritz.operators import SparseOperator, _sparse
from ritz.operators._sparse import TUNING, CompressedRows, native_loops
from ritz.testing import check_operator

INDICES = [torch.int32, torch.int64]
needs_compiler = pytest.mark.skipif(native_loops() is None, reason="numba is not installed")


def matrix(n=300, *, density=0.05, dtype=torch.float64, seed=0):
    """A symmetric matrix, some rows of which are empty and one of which is full."""
    noise = np.random.default_rng(seed).standard_normal((n, n))
    mask = np.random.default_rng(seed + 1).random((n, n)) < density
    mask[0] = True
    mask |= mask.T
    mask[5:9] = mask[:, 5:9] = False
    return torch.from_numpy((noise + noise.T) * mask).to(dtype)


def compressed_rows(dense, *, pointer=torch.int32, column=torch.int32, pattern=False):
    csr = scipy.sparse.csr_array(dense.numpy())
    return CompressedRows(
        torch.from_numpy(csr.indptr).to(pointer),
        torch.from_numpy(csr.indices).to(column),
        None if pattern else torch.from_numpy(csr.data),
        dtype=dense.dtype,
    )


def drawn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=seeded(seed))


def close(left, right):
    # sums of up to 300 products of order one
    scale = float(right.abs().max())
    tolerance = 100 * torch.finfo(right.dtype).eps
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance * scale)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def loops(monkeypatch):
    """Compiled loops for any matrix, cut into pieces of any size; how often one ran."""
    tuning = replace(TUNING, min_entries=0, numbers_per_piece=1)
    monkeypatch.setattr(_sparse, "TUNING", tuning)
    calls = []
    original = CompressedRows._spread

    def spread(self, loop, *arguments):
        calls.append(loop)
        original(self, loop, *arguments)

    monkeypatch.setattr(CompressedRows, "_spread", spread)
    return calls


@needs_compiler
@pytest.mark.parametrize("columns", [1, 2, 3, 7, 8, 9, 16, 17, 33])
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_compiled_product_is_right_at_every_width(columns, dtype, num_threads, loops, threads):
    threads(num_threads)
    dense = matrix(dtype=dtype)
    rows = compressed_rows(dense)
    block = drawn(300, columns, dtype=dtype)
    close(rows.multiply(block), dense @ block)
    assert len(loops) >= -(-columns // rows.width)
    inner, outer, diagonal = drawn(3, 300, dtype=dtype, seed=1)
    u = inner[:, None] * block
    expected = outer[:, None] * (dense @ u) + diagonal[:, None] * u
    found = rows.multiply(block, (inner, outer, diagonal))
    close(found, expected)
    close(rows._plain(block, (inner, outer, diagonal)), expected)


@needs_compiler
@pytest.mark.parametrize("pattern", [False, True], ids=["values", "pattern"])
@pytest.mark.parametrize("column", INDICES, ids=str)
@pytest.mark.parametrize("pointer", INDICES, ids=str)
@pytest.mark.parametrize("path", ["compiled", "plain"])
def test_every_type_of_index_gives_the_same_product(path, pointer, column, pattern, loops):
    dense = matrix()
    rows = compressed_rows(dense, pointer=pointer, column=column, pattern=pattern)
    block = drawn(300, 11)
    multiply = rows.multiply if path == "compiled" else rows._plain
    close(multiply(block), ((dense != 0).double() if pattern else dense) @ block)
    assert bool(loops) == (path == "compiled")


@needs_compiler
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.usefixtures("loops")
def test_products_are_equal_bit_for_bit_for_any_columns_and_threads(dtype, threads):
    rows = compressed_rows(matrix(dtype=dtype))
    block = drawn(300, 21, dtype=dtype)
    threads(1)
    alone = rows.multiply(block)
    for num_threads in (2, 3, 7):
        threads(num_threads)
        assert torch.equal(rows.multiply(block), alone)
    for i in range(21):
        assert torch.equal(rows.multiply(block[:, i : i + 1])[:, 0], alone[:, i])


@needs_compiler
def test_blocks_of_every_memory_layout_give_the_same_product(loops):
    dense = matrix()
    op = SparseOperator(compressed_rows(dense))
    wide = drawn(300, 40)
    layouts = {
        "by columns": drawn(8, 300).T,
        "every other column": wide[:, ::2],
        "some columns": wide[:, 3:11],
        "every other row": drawn(600, 8)[::2],
        "off the line": drawn(300 * 8 + 1)[1:].view(300, 8),
        "one row repeated": drawn(1, 8).expand(300, 8),
        "one column repeated": drawn(300, 1).expand(300, 8),
        "a vector of a wider block": wide[:, 7],
    }
    for name, block in layouts.items():
        kept = block.clone()
        close(op @ block, dense @ kept)
        assert torch.equal(block, kept), name
        assert (op @ block).is_contiguous(), name
    assert loops


@needs_compiler
@pytest.mark.parametrize("path", ["compiled", "plain"])
@pytest.mark.usefixtures("loops")
def test_a_nan_spreads_only_to_neighbours_in_its_column(path):
    dense = matrix()
    rows = compressed_rows(dense)
    block = drawn(300, 10)
    clean = rows.multiply(block)
    block[3, 4] = float("nan")
    found = rows.multiply(block) if path == "compiled" else rows._plain(block)
    touched = torch.zeros_like(clean, dtype=torch.bool)
    touched[:, 4] = dense[:, 3] != 0
    assert torch.equal(found.isnan(), touched)
    close(found[~touched], clean[~touched])


@needs_compiler
@pytest.mark.usefixtures("loops")
def test_matrices_of_one_row_and_without_entries_are_multiplied(threads):
    threads(2)
    one = CompressedRows(torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([2.5]))
    assert one.multiply(torch.tensor([[2.0, 4.0]])).tolist() == [[5.0, 10.0]]
    nothing = CompressedRows(torch.zeros(8, dtype=torch.int32), torch.empty(0, dtype=torch.int32))
    assert torch.equal(nothing.multiply(drawn(7, 9)), torch.zeros(7, 9, dtype=torch.float64))
    check_operator(SparseOperator(nothing))


@needs_compiler
@pytest.mark.usefixtures("loops")
def test_columns_out_of_order_and_repeated_add_up():
    rows = CompressedRows(
        torch.tensor([0, 3, 5]), torch.tensor([1, 0, 1, 0, 0]), torch.tensor([1.0, 5, 2, 1, 2])
    )
    for product in (rows.multiply(torch.eye(2)), rows._plain(torch.eye(2))):
        assert product.tolist() == [[5.0, 3.0], [3.0, 0.0]]
    assert rows.diagonal().tolist() == [5.0, 0.0]
    assert rows.sums().tolist() == [8.0, 3.0]


@needs_compiler
@pytest.mark.usefixtures("loops")
def test_read_only_arrays_are_accepted():
    csr = scipy.sparse.csr_array(matrix().numpy())
    for part in (csr.data, csr.indices, csr.indptr):
        part.flags.writeable = False
    block = drawn(300, 8)
    close(SparseOperator(csr) @ block, matrix() @ block)


@needs_compiler
@pytest.mark.usefixtures("loops")
def test_several_threads_can_multiply_with_one_operator(threads):
    threads(2)
    dense = matrix()
    op = SparseOperator(compressed_rows(dense))
    blocks = [drawn(300, 20, seed=seed) for seed in range(24)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(op.matmat, blocks))
    assert all(
        torch.equal(product, op @ block) for product, block in zip(found, blocks, strict=True)
    )


def in_a_child(queue, rows, block):
    queue.put(rows.multiply(block).tolist())


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.usefixtures("loops")
def test_a_forked_process_starts_its_own_threads(threads):
    threads(2)
    rows = compressed_rows(matrix(40, density=0.3))
    block = drawn(40, 9)
    expected = rows.multiply(block)  # so that the parent has its threads
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_a_child, args=(queue, rows, block))
    child.start()
    found = torch.tensor(queue.get(timeout=240), dtype=torch.float64)
    child.join(240)
    assert child.exitcode == 0
    assert torch.equal(found, expected)


def test_without_a_compiler_torch_multiplies(monkeypatch):
    monkeypatch.setattr(_sparse, "TUNING", replace(TUNING, min_entries=0))
    monkeypatch.setattr(_sparse, "native_loops", lambda: None)
    dense = matrix()
    check_operator(SparseOperator(compressed_rows(dense)), dense=dense)


def test_without_numba_nothing_fails(tmp_path):
    program = (
        "import sys, warnings; sys.modules['numba'] = None; warnings.simplefilter('ignore')\n"
        "import torch; from ritz.operators import SparseOperator, _sparse\n"
        "op = SparseOperator(torch.ones(200, 200).to_sparse_csr())\n"
        "print(_sparse.native_loops(), float((op @ torch.ones(200)).sum()), op.block_size)\n"
    )
    assert output_of(program, tmp_path) == "None 40000.0 16\n"


def test_a_small_matrix_compiles_nothing(monkeypatch):
    def refuse():
        raise AssertionError("a loop was compiled")

    monkeypatch.setattr(_sparse, "native_loops", refuse)
    dense = matrix(100)
    assert (dense != 0).sum() < TUNING.min_entries
    close(SparseOperator(dense.to_sparse_csr()) @ drawn(100, 9), dense @ drawn(100, 9))


@needs_compiler
@pytest.mark.usefixtures("loops")
def test_a_product_with_a_block_that_requires_gradients_is_differentiable():
    dense = matrix(40, density=0.3)
    op = SparseOperator(compressed_rows(dense))
    block = drawn(40, 3).requires_grad_()
    (op @ block).square().sum().backward()
    close(block.grad, 2 * dense @ dense @ block.detach())
    with torch.no_grad():
        assert not (op @ block).requires_grad


def test_pieces_balance_the_work_and_cover_every_row():
    rows = compressed_rows(matrix(500, density=0.1))
    for number in (2, 3, 8, 40):
        pieces = rows._pieces(number)
        assert pieces[0][0] == 0
        assert pieces[-1][1] == 500
        assert all(left[1] == right[0] for left, right in pairwise(pieces))
        cost = [int(rows.pointers[b] - rows.pointers[a]) + 2 * (b - a) for a, b in pieces]
        longest = int(rows.pointers.diff().max()) + 2
        assert max(cost) <= sum(cost) / number + longest


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("pattern", [False, True], ids=["values", "pattern"])
def test_diagonal_and_row_sums_do_not_depend_on_chunks(chunk, pattern, monkeypatch):
    monkeypatch.setattr(_sparse, "TUNING", replace(TUNING, chunk=chunk))
    dense = matrix(120)
    rows = compressed_rows(dense, pattern=pattern)
    expected = (dense != 0).double() if pattern else dense
    assert torch.equal(rows.diagonal(), expected.diagonal())
    close(rows.sums(), expected.abs().sum(1))


def test_row_sums_of_a_matrix_without_entries_are_zero():
    nothing = torch.empty(0, dtype=torch.int64)
    rows = CompressedRows(torch.zeros(4, dtype=torch.int64), nothing, torch.empty(0))
    assert rows.sums().tolist() == [0.0, 0.0, 0.0]
    assert rows.diagonal().tolist() == [0.0, 0.0, 0.0]


def test_the_block_size_is_one_cache_line():
    assert SparseOperator(matrix(20).to_sparse_csr()).block_size == 8
    assert SparseOperator(matrix(20, dtype=torch.float32).to_sparse_csr()).block_size == 16


EDGES = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
WRONG = {
    "falling pointers": (
        (torch.tensor([0, 3, 2]), EDGES[1]),
        ValueError,
        "pointers must not decrease",
    ),
    "pointers from one": ((torch.tensor([1, 1, 2]), EDGES[1]), ValueError, "got 1 to 2"),
    "pointers too far": (
        (torch.tensor([0, 1, 3]), EDGES[1]),
        ValueError,
        "to 2 entries, got 0 to 3",
    ),
    "a column beyond": ((EDGES[0], torch.tensor([1, 2])), ValueError, "between 0 and 1, got 2"),
    "a column below": ((EDGES[0], torch.tensor([-1, 0])), ValueError, "columns .* got -1"),
    "short columns": ((EDGES[0].short(), EDGES[1]), TypeError, "pointers must be .* torch.int16"),
    "columns a block": ((EDGES[0], EDGES[1][None]), TypeError, r"columns must be .*\(1, 2\)"),
    "values": ((*EDGES, torch.ones(3)), ValueError, r"values must be \(2,\), got \(3,\)"),
    "integers": ((*EDGES, torch.ones(2).long()), TypeError, "values must be of a real floating"),
}


@pytest.mark.parametrize(("arguments", "kind", "match"), WRONG.values(), ids=WRONG.keys())
def test_wrong_compressed_rows_raise(arguments, kind, match):
    with pytest.raises(kind, match=match):
        CompressedRows(*arguments)


def test_an_operator_of_an_empty_matrix_raises():
    with pytest.raises(ValueError, match="at least one row, got 0"):
        SparseOperator(CompressedRows(torch.tensor([0]), EDGES[1][:0]))


def test_compressed_rows_of_a_matrix_that_is_not_symmetric_raise():
    with pytest.raises(ValueError, match="must be symmetric"):
        SparseOperator(CompressedRows(torch.tensor([0, 1, 1]), torch.tensor([1])))
