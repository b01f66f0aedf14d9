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


def test_one_process_needs_no_group():
    part = torch.arange(3.0)
    assert (world_size(), rank(), shard(5)) == (1, 0, slice(0, 5))
    assert all_sum(part) is part
    assert all_gather_rows(part, 3) is part
    assert (all_max(3), all_min(3)) == (3, 3)
