"""The test suite itself: every process collects the same tests, with readable names.

``make test`` starts two processes with different hash seeds, and pytest-xdist ends the run if they
collect different tests. The slow test here says which files differ.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
COLLECT = ["-m", "pytest", "--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider"]
LONGEST = 200
# Addresses of objects, and escaped control characters of byte strings.
UNREADABLE = re.compile(r"0x[0-9a-f]{4}|\\x[0189][0-9a-f]")


@pytest.fixture
def others():
    """The ids of all tests, collected by a process with another hash seed."""
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
    """Group test ids by file, in order."""
    files = {}
    for name in names:
        files.setdefault(name.partition("::")[0], []).append(name)
    return files


@pytest.mark.slow
def test_every_process_collects_the_same_tests_in_the_same_order(others, request):
    # This process may have collected only some of the tests.
    here = [item.nodeid for item in request.session.items if item.nodeid.startswith("tests/")]
    chosen = set(here)

    assert len(others) > 1000
    assert by_file(here) == by_file(name for name in others if name in chosen)


def test_test_ids_are_short_and_printable(request):
    names = [item.nodeid for item in request.session.items]

    wrong = [name for name in names if len(name) > LONGEST or UNREADABLE.search(name)]

    assert wrong == []
