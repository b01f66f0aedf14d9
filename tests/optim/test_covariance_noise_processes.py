"""Noise summed over two processes has the covariance of all samples of the step."""

from pathlib import Path

import pytest
import torch
from curvature.noise_cases import NETWORKS, assert_covariance, expected
from processes import run_processes

from ritz.curvature._noise_kinds import BY_MOMENTS, NOISE_KINDS

TESTS = str(Path(__file__).parents[1])
SCRIPT = f"""
sys.path.insert(0, {TESTS!r})
import math
from curvature.noise_cases import NETWORKS, N, data, sample_options
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from ritz.curvature._noise_kinds import OF_STEP
from ritz.optim import CovarianceNoise

torch.set_num_threads(1)
# Uneven shares, of whole ghost batches.
part = slice(0, 96) if rank == 0 else slice(96, N)
share = (part.stop - part.start) * size / N
found = {{}}
for kind in KINDS:
    model = DistributedDataParallel(NETWORKS[NAME]().train())
    optimizer = SGD(model.parameters(), lr=0.1)
    options = sample_options(kind)
    if kind == "sgld":
        options = {{"temperature": 1 / N}}
    noise = CovarianceNoise(optimizer, model, kind=kind, small=32, refresh=REFRESH, **options)
    batch, rows = tuple(tensor[part] for tensor in data(NAME)), []
    start = [p.detach().clone() for p in model.parameters()]
    for step in range(STEPS):
        optimizer.zero_grad()
        noise.backward(batch, share=share)
        noise.collect()
        drawn = noise._noise.formed()
        rows.append(torch.cat([drawn[name].flatten() for name in noise._named]))
        optimizer.step()
        with torch.no_grad():  # the weights, and with them the covariance, stay
            for p, q in zip(model.parameters(), start):
                p.copy_(q)
    factor = 1.0 if kind in OF_STEP else math.sqrt(1 / 32 - 1 / N)
    found[kind] = torch.stack(rows, 1) / factor
torch.save(found, f"{{folder}}/rank{{rank}}.pt")
dist.barrier()  # gloo may end a process whose neighbour has left already
dist.destroy_process_group()
"""


# The weights stay, and so do second moments: computed once, they are drawn from many times.
def check(folder, name, kinds, steps, *, refresh=1):
    script = SCRIPT.replace("KINDS", repr(kinds)).replace("STEPS", str(steps))
    script = script.replace("NAME", repr(name)).replace("REFRESH", str(refresh))
    for code, error in run_processes(script, 2, folder, seconds=1700):
        assert code == 0, error
    first, second = (torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(2))
    for kind in kinds:
        # Both processes must add the same, or their weights would drift apart.
        assert torch.equal(first[kind], second[kind])
        largest, square = assert_covariance(first[kind], expected(name, kind))
        print(f"two processes, {name} {kind}: largest |z| {largest:.2f}, mean z^2 {square:.3f}")


@pytest.mark.distributed
def test_two_processes_give_the_covariance_of_the_whole_step(tmp_path):
    check(tmp_path, "mlp", list(NOISE_KINDS), 200, refresh=200)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", NOISE_KINDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_twenty_thousand_steps_of_two_processes(name, kind, tmp_path):
    check(tmp_path, name, [kind], 20_000, refresh=10**6 if kind in BY_MOMENTS else 1)
