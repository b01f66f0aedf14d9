"""Training with averaging, killed at random moments, ends with the same bits."""

import random
import signal

import pytest
import torch
from processes import start

WORKER = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from torch import nn
from ritz._core.storage import atomic_path
from ritz.optim import IterateAverage, Lookahead

file, num_steps, dtype = Path(sys.argv[1]), 100, torch.bfloat16
step, moment = int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Dropout(0.2),
                      nn.Linear(30, 3)).to(dtype)
optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=0.01), until=40)
average = IterateAverage(optimizer, start=40, interval=7)
done = 0
if file.exists():
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
    done = saved["done"]
while done < num_steps:
    x = torch.randn(16, 20).to(dtype)
    optimizer.zero_grad()
    (model(x) - x[:, :3]).square().mean().backward()
    optimizer.step()
    done += 1
    if done == step:  # kill -9 so many seconds later
        threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if done == step + 20:
        time.sleep(60)  # until the kill comes
    with atomic_path(file) as temporary:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "rng": torch.get_rng_state(), "done": done}, temporary)
assert (average.count, average.step) == (9, 100)
"""


def leaves(state, name=""):
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, f"{name}.{key}")
    elif isinstance(state, list | tuple):
        yield from leaves(dict(enumerate(state)), name)
    else:
        yield name, state


@pytest.mark.timeout(300)
def test_run_killed_at_random_moments_ends_with_the_same_bits(tmp_path):
    """Of weights in bfloat16, whose average and slow weights are in float32."""

    def run(name, step=1000, moment=0.0):
        process = start(WORKER, tmp_path / name, step, moment, errors=tmp_path / "errors")
        process.join()
        assert (tmp_path / "errors").read_text() == ""
        return process.exitcode

    moments = random.Random(3)
    for step in (20, 60):  # before the average begins, and while it goes on
        assert run("killed", step, moments.uniform(0, 0.01)) == -signal.SIGKILL
        assert step - 1 <= torch.load(tmp_path / "killed", weights_only=True)["done"] < 100
    assert run("killed") == run("calm") == 0
    found, expected = (
        dict(leaves(torch.load(tmp_path / name, weights_only=True))) for name in ("killed", "calm")
    )
    assert found.keys() == expected.keys()
    assert sum("average" in name for name in found) == 4 * 6
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else (
            found[name] == value
        )  # fmt: skip
        assert same, name
