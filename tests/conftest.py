import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The first example of a run pays for imports and threads, and two cores are shared.
settings.register_profile("ritz", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("ritz")

# Processes that tests start find the library as the tests do, installed or not.
SOURCE = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Matrices of tests are small: threads would wait for each other more than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Runs by itself, with torch's own tests.
collect_ignore = ["optim/torch_suite.py"]


@pytest.fixture(autouse=True)
def no_figures_left() -> Iterator[None]:
    """Close what a test drew: matplotlib keeps figures, and warns of many."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
