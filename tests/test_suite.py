"""The suite itself: its tests have the same readable names in every process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
COLLECT = ["-m", "pytest", "--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider"]
LONGEST = 200
# Addresses of objects, and the escapes of control characters: somebody's bytes.
UNREADABLE = re.compile(r"0x[0-9a-f]{4}|\\x[0189][0-9a-f]")


@pytest.fixture(scope="module")
def names():
    """The names of all tests, as processes with different hashes of strings collect them."""
    running = [
        subprocess.Popen(
            [sys.executable, *COLLECT, str(TESTS)],
            cwd=TESTS.parent,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTEST_ADDOPTS": ""},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    texts = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], texts
    return [[line for line in text.splitlines() if "::" in line] for text in texts]


def test_tests_have_the_same_names_in_the_same_order_in_every_process(names):
    first, second = names

    assert len(first) > 1000
    assert first == second


def test_the_names_of_tests_can_be_read_and_typed(names):
    wrong = [name for name in names[0] if len(name) > LONGEST or UNREADABLE.search(name)]

    assert wrong == []
