import os
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

# Matrices of tests are small: threads would wait for each other more than they work. The libraries
# below read it as they load, and so do those of processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch

try:
    from hypothesis import settings
except ModuleNotFoundError:
    pass  # no test that needs a GPU needs it, and a machine with one may have nothing but pytest
else:
    # The first example of a run pays for imports and threads, and two cores are shared.
    settings.register_profile("ritz", deadline=None, max_examples=60, derandomize=True)
    settings.load_profile("ritz")

# Processes that tests start find the library as the tests do, installed or not.
SOURCE = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])


# Runs by itself, with torch's own tests.
collect_ignore = ["optim/torch_suite.py"]


@pytest.fixture(autouse=True, scope="session")
def no_stacks_of_traces() -> Iterator[None]:
    """Let torch not read the whole stack of calls at every operation that it traces.

    The stack of a test is deep: that is two fifths of the time of a trace, for a line of one error.
    """
    without = SimpleNamespace(**(vars(traceback) | {"extract_stack": list}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._subclasses.fake_tensor.traceback", without, raising=False)
        yield


@pytest.fixture(autouse=True)
def no_figures_left() -> Iterator[None]:
    """Close what a test drew: matplotlib keeps figures, and warns of many."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(20)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Handle signals as at a terminal, here and in processes that the test starts.

    A process that is started in the background inherits SIGINT as ignored.
    """
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def seed_global_generators() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 - other libraries draw from it
    random.seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """Let no fixture depend on the tests and fixtures that came before it."""
    seed_global_generators()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Let no test depend on the tests that came before it."""
    seed_global_generators()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes after their argument: a test has a name that can be read and typed."""
    return argname if isinstance(val, bytes) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
