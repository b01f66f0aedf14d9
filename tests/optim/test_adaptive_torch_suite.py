"""The tests that torch has for optimisers, if its test file is available."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SUITE = Path(__file__).with_name("torch_suite.py")


def torch_test_file():
    """From RITZ_TORCH_TEST_OPTIM, or of the source tree that torch is installed from."""
    given = os.environ.get("RITZ_TORCH_TEST_OPTIM")
    path = Path(given) if given else Path(torch.__file__).parents[1] / "test" / "test_optim.py"
    if not path.is_file():
        pytest.skip("set RITZ_TORCH_TEST_OPTIM to test/test_optim.py of torch's source")
    if importlib.util.find_spec("expecttest") is None:
        pytest.skip("torch's test file needs the package expecttest")
    return path


@pytest.mark.slow
def test_optimiser_passes_the_tests_of_torch(capsys):
    command = [sys.executable, str(SUITE), str(torch_test_file())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    passed = counts["run"] - len(counts["skipped"]) - len(counts["failed"])
    with capsys.disabled():
        print(
            f" torch's tests: {passed} passed, {len(counts['skipped'])} do not apply here", end=""
        )
    assert counts["failed"] == []
    assert passed >= 150
