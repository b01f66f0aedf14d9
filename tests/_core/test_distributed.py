import subprocess
import sys

import pytest
import torch

from ritz._core.distributed import (
    all_gather_rows,
    all_max,
    all_min,
    all_sum,
    rank,
    shard,
    world_size,
)

TOGETHER = """
import sys, torch
import torch.distributed as dist
from ritz._core.distributed import *
place, mine = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=mine, world_size=2)
"""
SUMS = """
whole = torch.arange(7.0)
part = whole[shard(7)]
assert (world_size(), rank(), len(part)) == (2, mine, 3 + mine)
assert torch.equal(all_gather_rows(part, 7), whole)
assert torch.equal(all_sum(torch.tensor([1.0, mine])), torch.tensor([2.0, 1.0]))
assert (all_max(mine), all_min(mine)) == (1, 0)
dist.destroy_process_group()
"""
LEFT_ALONE = """
import os
if mine == 1:
    os._exit(0)
all_sum(torch.ones(3))
"""


def pair(code, place):
    command = [sys.executable, "-c", TOGETHER + code, str(place)]
    both = [subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in (0, 1)]
    errors = [process.communicate(timeout=100)[1] for process in both]
    return [process.returncode for process in both], errors


def test_one_process_needs_no_group():
    part = torch.arange(3.0)
    assert (world_size(), rank(), shard(5)) == (1, 0, slice(0, 5))
    assert all_sum(part) is part
    assert all_gather_rows(part, 3) is part
    assert (all_max(3), all_min(3)) == (3, 3)


@pytest.mark.distributed
def test_two_processes_see_the_same_sums(tmp_path):
    codes, errors = pair(SUMS, tmp_path)
    assert codes == [0, 0], errors


@pytest.mark.distributed
def test_a_process_left_alone_says_so(tmp_path):
    codes, errors = pair(LEFT_ALONE, tmp_path)
    assert codes == [1, 0]
    assert "process 0 could not exchange data with the others" in errors[0]
