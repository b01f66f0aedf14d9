import os
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

# Matrices of tests are small, and threads would spend their time waiting for each other. Libraries
# read the variable when they are imported, also in processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch

try:
    from hypothesis import settings
except ModuleNotFoundError:
    pass  # tests on a GPU do not need it, and such a machine may have only pytest
else:
    # No deadline: the first example includes imports, and cores may be shared.
    settings.register_profile("ritz", deadline=None, max_examples=60, derandomize=True)
    settings.load_profile("ritz")

# Processes that tests start find ritz in the source folder, even if it is not installed.
SOURCE = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])


# A script that runs torch's own tests in a separate process.
collect_ignore = ["optim/torch_suite.py"]


@pytest.fixture(autouse=True, scope="session")
def no_call_stacks() -> Iterator[None]:
    """Keep torch from reading the call stack when it traces an operation or seeds a generator.

    The stack of a test is deep. Reading it takes two fifths of the time of a trace, and nearly all
    of the time of ``torch.manual_seed``, which reads it once for each kind of device.
    """
    stackless = {"extract_stack": list, "format_stack": list}
    without = SimpleNamespace(**(vars(traceback) | stackless))
    with pytest.MonkeyPatch.context() as patch:
        for module in ("_subclasses.fake_tensor", "cuda", "xpu", "mtia"):
            patch.setattr(f"torch.{module}.traceback", without, raising=False)
        yield


@pytest.fixture(autouse=True)
def no_figures_left() -> Iterator[None]:
    """Close the figures of a test: pyplot keeps them and warns if there are many."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(20)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Use the default signal handlers, here and in processes that a test starts.

    A process that was started in the background inherits SIGINT as ignored.
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
    """Seed before every fixture, so that it does not depend on earlier tests."""
    seed_global_generators()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Seed before every test, so that it does not depend on earlier tests."""
    seed_global_generators()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name byte strings after their argument, so that test ids stay readable."""
    return argname if isinstance(val, bytes) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
