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
def others():
    """The names of all tests, as a process with other hashes of strings collects them."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    process = subprocess.run(
        [sys.executable, *COLLECT, str(TESTS)],
        cwd=TESTS.parent,
        env=os.environ | {"PYTHONHASHSEED": seed, "PYTEST_ADDOPTS": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout
    return [line for line in process.stdout.splitlines() if "::" in line]


def by_file(names):
    """The tests of each file, in their order."""
    files = {}
    for name in names:
        files.setdefault(name.partition("::")[0], []).append(name)
    return files


def test_tests_have_the_same_names_in_the_same_order_in_every_process(others, request):
    # This process has collected too: some of the tests perhaps, in the order of its files.
    here = [item.nodeid for item in request.session.items if item.nodeid.startswith("tests/")]
    chosen = set(here)

    assert len(others) > 1000
    assert by_file(here) == by_file(name for name in others if name in chosen)


def test_the_names_of_tests_can_be_read_and_typed(others):
    wrong = [name for name in others if len(name) > LONGEST or UNREADABLE.search(name)]

    assert wrong == []
