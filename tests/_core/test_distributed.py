import pytest
import torch
from processes import run_processes

from ritz._core.distributed import (
    all_gather_rows,
    all_max,
    all_min,
    all_sum,
    rank,
    shard,
    world_size,
)

SUMS = """
mine = rank
from ritz._core.distributed import *
whole = torch.arange(7.0)
part = whole[shard(7)]
assert (world_size(), rank(), len(part)) == (2, mine, 3 + mine)
assert torch.equal(all_gather_rows(part, 7), whole)
assert torch.equal(all_sum(torch.tensor([1.0, mine])), torch.tensor([2.0, 1.0]))
assert (all_max(mine), all_min(mine)) == (1, 0)
dist.destroy_process_group()
"""
LEFT_ALONE = """
from ritz._core.distributed import all_sum
all_sum(torch.ones(3))  # both have joined the group
if rank == 1:
    os._exit(0)
all_sum(torch.ones(3))
"""


def test_a_single_process_needs_no_process_group():
    part = torch.arange(3.0)
    assert (world_size(), rank(), shard(5)) == (1, 0, slice(0, 5))
    assert all_sum(part) is part
    assert all_gather_rows(part, 3) is part
    assert (all_max(3), all_min(3)) == (3, 3)


@pytest.mark.distributed
def test_two_processes_get_the_same_sums(tmp_path):
    for code, error in run_processes(SUMS, 2, tmp_path):
        assert code == 0, error


@pytest.mark.distributed
def test_error_says_that_another_process_has_ended(tmp_path):
    (code, error), (other, _) = run_processes(LEFT_ALONE, 2, tmp_path)
    assert (code, other) == (1, 0)
    assert "process 0 could not exchange data with the others" in error
