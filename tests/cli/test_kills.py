"""Commands that are killed at random moments, and given again, end with the same files."""

import os
import random
import re
import subprocess
import sys
import time

import pytest

# Kernels, running statistics and dropout all have to survive.
NET = """
from torch import nn

def net(num_classes):
    return nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(),
                         nn.Dropout(0.1), nn.Flatten(), nn.Linear(54, num_classes))
"""
COMMANDS = (
    ("train", "--model", "net:net", "--data", "digits", "--epochs", "40", "--average-from", "20",
     "--optimizer", "gadam", "--watch", "10", "--out", "run"),
    ("spectrum", "run", "--model", "net:net", "--matrix", "both", "--steps", "120", "--vectors"),
    ("landscape", "run", "--model", "net:net", "--plane", "--points", "25", "--steps", "60"),
    ("sharpness", "run", "--model", "net:net", "--probes", "2", "--steps", "60"),
)  # fmt: skip
KILLS = 7  # a command
TIMES = "log.times.jsonl"  # what differs from run to run has a file of its own


def started(command, folder):
    return subprocess.Popen(
        [sys.executable, "-m", "ritz", *command, "--save-interval", "0", "--json"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(command, folder):
    process = started(command, folder)
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def written(folder):
    """When each file was last written, by name."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("run/*") if path.exists()}


def kill(command, folder, pause):
    """Kill a command that long after it first wrote something; return whether it was killed."""
    before, process = written(folder), started(command, folder)
    while process.poll() is None and written(folder) == before:
        time.sleep(0.01)
    time.sleep(pause)
    process.kill()
    process.communicate()
    return process.returncode != 0


def contents(folder):
    """All files but the times, and what safetensors was writing when a kill came."""
    paths = [path for path in (folder / "run").iterdir() if path.name != TIMES]
    unfinished = re.compile(r"\.tmp\w{6}")  # of nobody in particular; what has our names is gone
    return {path.name: path.read_bytes() for path in paths if not unfinished.fullmatch(path.name)}


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_killed_commands_resume_to_the_same_files(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    clock, kills = random.Random(11), []
    for folder in (whole, broken):
        folder.mkdir()
        (folder / "net.py").write_text(NET)
    for command in COMMANDS:
        finish(command, whole)
        kills.append(sum(kill(command, broken, clock.uniform(0.0, 0.8)) for _ in range(KILLS)))
        finish(command, broken)
    print("kills of training, spectrum, landscape and sharpness:", kills)
    assert sum(kills) >= 27
    assert contents(broken) == contents(whole)
