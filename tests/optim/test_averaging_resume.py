"""Training with averaging, killed at random moments, ends with the same bits."""

import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

WORKER = """
    import sys
    from pathlib import Path
    import torch
    from torch import nn
    from ritz._core.storage import atomic_path
    from ritz.optim import IterateAverage
    from ritz.optim import Lookahead

    torch.set_num_threads(1)
    file, num_steps, dtype = Path(sys.argv[1]), 100, torch.bfloat16
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
        print(done, flush=True)
        with atomic_path(file) as temporary:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "rng": torch.get_rng_state(), "done": done}, temporary)
    print(average.count, average.step)
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
def test_kills_at_random_moments_change_no_bit(tmp_path):
    """Of weights in bfloat16, whose average and slow weights are in float32."""
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))

    def start(name):
        command = [sys.executable, str(script), str(tmp_path / name)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    undisturbed = start("calm")
    moments = random.Random(3)
    for step in (20, 60):  # before the average begins, and while it goes on
        with start("killed") as process:
            while int(process.stdout.readline()) < step:
                pass
            time.sleep(moments.uniform(0, 0.01))
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert step - 1 <= torch.load(tmp_path / "killed", weights_only=True)["done"] < 100
    for process in (undisturbed, start("killed")):
        assert process.communicate()[0].endswith("\n100\n9 100\n")
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
