import textwrap

import processes
import pytest
import torch
from matrices import seeded

pytestmark = pytest.mark.distributed
SETUP = """
from ritz.operators import DenseOperator, FunctionOperator, ShardedOperator
from ritz.spectra import lanczos

samples = torch.randn(31, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
mine = samples[[slice(0, 3), slice(3, 20), slice(20, 31)][rank] if size == 3
               else [slice(0, 5), slice(5, 31)][rank]]
block = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(12, 3)
"""


def run_processes(script, count, folder):
    return processes.run_processes(SETUP + textwrap.dedent(script), count, folder)


def expected_matrix():
    generator = seeded(1)
    samples = torch.randn(31, 12, dtype=torch.float64, generator=generator)
    return samples.T @ samples


@pytest.mark.parametrize("count", [2, 3])
def test_uneven_parts_sum_to_the_whole_on_every_process(count, tmp_path):
    script = """
        op = ShardedOperator(DenseOperator(mine.T @ mine))
        kept = block.clone()
        product, again = op.matmat(block), op.matmat(block)
        assert torch.equal(block, kept) and torch.equal(product, again)
        assert f"sum over {size} processes" in repr(op)
        values = lanczos(op, num_steps=12).values
        torch.save((product, values), f"{folder}/{rank}.pt")
        dist.destroy_process_group()
    """
    for code, error in run_processes(script, count, tmp_path):
        assert code == 0, error
    block = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(12, 3)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(count)]
    for product, values in found:
        torch.testing.assert_close(product, expected_matrix() @ block)
        torch.testing.assert_close(values, torch.linalg.eigvalsh(expected_matrix()))
        assert torch.equal(product, found[0][0])  # every process has the same bits


def test_parts_that_reuse_or_transpose_their_result_are_summed_correctly(tmp_path):
    script = """
        kept = torch.empty(3, 12, dtype=torch.float64)
        def product(x):  # into memory of its own, in Fortran's order
            return torch.mm(x.T, mine.T @ mine, out=kept).T
        op = ShardedOperator(FunctionOperator(product, n=12, dtype=torch.float64))
        first = op.matmat(block)
        second = op.matmat(block)
        assert torch.equal(first, second)
        torch.save(first, f"{folder}/{rank}.pt")
        dist.destroy_process_group()
    """
    for code, error in run_processes(script, 2, tmp_path):
        assert code == 0, error
    block = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(12, 3)
    torch.testing.assert_close(torch.load(tmp_path / "0.pt"), expected_matrix() @ block)


def test_a_process_that_dies_ends_the_others_with_an_error_that_says_so(tmp_path):
    script = """
        op = ShardedOperator(DenseOperator(mine.T @ mine))
        op.matmat(block)
        if rank == 1:
            os._exit(7)
        lanczos(op, num_steps=12)
    """
    (code, error), (killed, _) = run_processes(script, 2, tmp_path)
    assert killed == 7
    assert code == 1
    assert "RuntimeError: process 0 could not exchange data with the others" in error
