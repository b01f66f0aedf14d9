"""What surrounds the recording of a CUDA graph; the CUDA of these tests only notes its calls."""

import contextlib

import pytest
import torch

from ritz._core.cuda_graphs import recorded


class Generator:
    """A random generator, which shares its state with a graph that is recorded."""

    def __init__(self, state):
        self.state = state

    def clone_state(self):
        return Generator({"capturing": False, "seed": self.state["seed"]})

    def graphsafe_get_state(self):
        return Generator(self.state)

    def graphsafe_set_state(self, other):
        self.state = other.state


class Graph:
    def __init__(self, default):
        self.default, self.states = default, []

    def register_generator_state(self, generator):
        self.states.append(generator.state)

    def capture_begin(self, **options):
        self.register_generator_state(self.default)
        for state in self.states:
            state["capturing"] = True

    def capture_end(self):
        if self.failed:
            raise RuntimeError("operation failed due to a previous error during capture")
        for state in self.states:
            state["capturing"] = False

    failed = False


class Stream:
    def wait_stream(self, other):
        pass


@pytest.fixture
def cuda(monkeypatch):
    """The default generator, and the calls that end allocations."""
    default, calls = Generator({"capturing": False, "seed": 5}), []
    for name, value in {
        "current_device": lambda: 0,
        "default_generators": (default,),
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        note = lambda device, pool, name=name: calls.append((name, device, pool))  # noqa: E731
        monkeypatch.setattr(torch._C, name, note, raising=False)
    return default, calls


def fail(graph, *generators):
    graph.failed = True
    with (
        pytest.raises(RuntimeError, match="previous error"),
        recorded(graph, Stream(), pool=7, generators=generators),
    ):
        raise ValueError("the block reads a value of the device")


@pytest.mark.parametrize("failed", [False, True])
def test_a_recording_without_random_numbers_leaves_the_default_generator_alone(cuda, failed):
    default, _ = cuda
    graph, state = Graph(default), default.state
    if failed:
        fail(graph)
    else:
        with recorded(graph, Stream(), pool=7):
            assert all(each is not state for each in graph.states)

    assert default.state is state
    assert not state["capturing"]


def test_generators_leave_capture_mode_after_a_recording_that_failed(cuda):
    default, _ = cuda
    other = Generator({"capturing": False, "seed": 9})
    fail(Graph(default), default, other)

    assert [each.state for each in (default, other)] == [
        {"capturing": False, "seed": 5},
        {"capturing": False, "seed": 9},
    ]


def test_a_recording_reads_the_generators_that_it_is_given(cuda):
    default, calls = cuda
    other, graph = Generator({"capturing": False, "seed": 9}), Graph(default)
    with recorded(graph, Stream(), pool=7, generators=[default, other]):
        assert other.state["capturing"]
        assert default.state["capturing"]

    assert [id(state) for state in graph.states] == [id(other.state), id(default.state)]
    assert not calls


def test_the_allocator_no_longer_serves_a_recording_that_failed(cuda):
    default, calls = cuda
    fail(Graph(default), default)

    assert calls == [("_cuda_endAllocateToPool", 0, 7), ("_cuda_releasePool", 0, 7)]
