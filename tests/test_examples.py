"""Every script in ``examples``, and the README's first example, runs in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))

# torch's own, when it first takes a forward derivative
TORCH = "ignore:`torch.jit.script` is deprecated:DeprecationWarning"


def run(*arguments, cwd):
    command = [sys.executable, "-W", "error", "-W", TORCH, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(script, tmp_path):
    run(script, "--quick", "--out", "found", cwd=tmp_path)
    assert list(tmp_path.glob("found/*.png"))
    assert list(tmp_path.glob("found/*.safetensors"))


def test_the_readme_runs_at_a_hundredth_of_its_size(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    small = code.replace("300", "30").replace("90_000", "900")
    run("-c", small, cwd=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"spectrum.png", "spectrum.safetensors"}


def test_there_are_examples():
    assert SCRIPTS
