"""Noise summed over two processes has the covariance of all samples of the step."""

from pathlib import Path

import pytest
import torch
from curvature.noise_cases import assert_covariance, expected
from processes import run_processes

TESTS = str(Path(__file__).parents[1])
SCRIPT = f"""
sys.path.insert(0, {TESTS!r})
import math
from curvature.noise_cases import NETWORKS, N, data
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from ritz.optim import CovarianceNoise

torch.set_num_threads(1)
part = slice(0, 80) if rank == 0 else slice(80, N)  # uneven shares
share = (part.stop - part.start) * size / N
found = {{}}
for kind in KINDS:
    model = DistributedDataParallel(NETWORKS["mlp"]())
    optimizer = SGD(model.parameters(), lr=0.0)
    noise = CovarianceNoise(optimizer, model, kind=kind, small=32)
    rows = []
    for step in range(STEPS):
        optimizer.zero_grad()
        noise.backward(tuple(tensor[part] for tensor in data("mlp")), share=share)
        noise.collect()
        rows.append(torch.cat([noise._noise[p].flatten() for p in noise._named.values()]))
        optimizer.step()
    found[kind] = torch.stack(rows, 1) / math.sqrt(1 / 32 - 1 / N)
torch.save(found, f"{{folder}}/rank{{rank}}.pt")
dist.barrier()  # gloo may end a process whose neighbour has left already
dist.destroy_process_group()
"""


def check(folder, kinds, steps):
    script = SCRIPT.replace("KINDS", repr(kinds)).replace("STEPS", str(steps))
    for code, error in run_processes(script, 2, folder):
        assert code == 0, error
    first, second = (torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(2))
    for kind in kinds:
        # Both processes must add the same, or their weights would drift apart.
        assert torch.equal(first[kind], second[kind])
        largest, square = assert_covariance(first[kind], expected("mlp", kind))
        print(f"two processes, {kind}: largest |z| {largest:.2f}, mean z^2 {square:.3f}")


@pytest.mark.distributed
def test_two_processes_give_the_covariance_of_the_whole_step(tmp_path):
    check(tmp_path, ["full", "centred", "diagonal", "kfac"], 700)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["full", "centred", "true", "diagonal", "kfac"])
def test_twenty_thousand_steps_of_two_processes(kind, tmp_path):
    check(tmp_path, [kind], 20_000)
