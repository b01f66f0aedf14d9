import contextlib

import pytest
import torch
from curvature.test_cuda import moved

from ritz.curvature import _cuda_graph, ggn, hessian
from ritz.curvature._cuda_graph import Replayed, Values


def affine(calls):
    def function(matrix, shift, vector):
        calls.append(1)
        for _ in range(20):  # launches take longer than these kernels
            vector = torch.tanh(matrix @ vector) + shift
        return (vector,)

    return function


def inputs(seed, size=8):
    rng = torch.Generator().manual_seed(seed)
    shapes = (size, size), (size,), (size,)
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]


def test_a_function_on_the_cpu_is_called_as_it_is():
    calls = []
    replayed = Replayed(affine(calls))

    for seed in range(5):
        (found,) = replayed(Values(inputs(seed)[:2]), inputs(seed)[2])
        (expected,) = affine([])(*inputs(seed))
        assert torch.equal(found, expected)
    assert len(calls) == 5


@pytest.mark.gpu
def test_a_recorded_function_gives_the_results_of_new_inputs():
    calls = []
    replayed, plain = Replayed(affine(calls)), affine([])
    first, second = (Values(each.cuda() for each in inputs(seed)[:2]) for seed in (0, 9))
    results = []
    for values in (first, first, first, first, second, first, second):
        vector = inputs(len(results))[2].cuda()
        results.append((replayed(values, vector)[0], plain(*values, vector)[0]))

    # Compared at the end: a later replay must not overwrite an earlier result.
    for found, expected in results:
        torch.testing.assert_close(found, expected)
    # An ordinary call, one that is timed, and two to record it.
    assert len(calls) == 4
    assert replayed.num_graphs == 1


@pytest.mark.gpu
def test_other_shapes_and_settings_are_recorded_anew():
    replayed, plain = Replayed(affine([])), affine([])
    for _ in range(4):
        for size in (8, 12):
            *values, vector = [tensor.cuda() for tensor in inputs(0, size)]
            found = replayed(Values(values), vector)[0]
            torch.testing.assert_close(found, plain(*values, vector)[0])
    assert replayed.num_graphs == 2


@pytest.mark.gpu
def test_a_function_that_reads_values_is_called_as_usual():
    def function(vector):
        for _ in range(20):
            vector = vector + 1 if float(vector.sum()) > 0 else vector - 1
        return (vector,)

    replayed = Replayed(function)
    for sign in (1, -1, 1, -1, 1, -1):
        vector = torch.full((4,), float(sign), device="cuda")
        torch.testing.assert_close(replayed(Values(), vector)[0], function(vector)[0])
    assert not replayed.num_graphs
    # The device still works after a recording that failed.
    torch.cuda.empty_cache()
    assert float(torch.randn(3, device="cuda").abs().sum()) > 0
    again = Replayed(affine([]))
    matrix, shift, vector = (tensor.cuda() for tensor in inputs(0))
    values = Values([matrix, shift])
    for _ in range(5):
        again(values, vector)
    assert again.num_graphs == 1


@pytest.mark.gpu
def test_recordings_draw_nothing_from_the_default_generator():
    def reading(vector):
        return (vector + float(vector.sum()),)

    for function in (affine([]), reading):
        torch.cuda.manual_seed(3)
        expected = torch.randn(5, device="cuda")
        torch.cuda.manual_seed(3)
        replayed = Replayed(function)
        matrix, shift, vector = (tensor.cuda() for tensor in inputs(0))
        values = Values([matrix, shift] if function is not reading else [])
        for _ in range(5):
            replayed(values, vector)

        assert torch.equal(torch.randn(5, device="cuda"), expected)
        x = torch.ones(8, 8, device="cuda", requires_grad=True)
        torch.nn.functional.dropout(x, 0.5).sum().backward()


@pytest.mark.gpu
def test_no_graph_is_recorded_without_memory_for_its_copies():
    asked = []

    def reserve(size):
        asked.append(size)
        return False

    replayed = Replayed(affine([]))
    matrix, shift, vector = (tensor.cuda() for tensor in inputs(0))
    values = Values([matrix, shift])
    for _ in range(5):
        replayed(values, vector, replay=reserve)
    assert asked == [8 * (64 + 8 + 8)]
    assert not replayed.num_graphs


def test_a_graph_that_repeats_nothing_is_not_used(monkeypatch):
    """As if the kernels ran on another device than the one that records."""

    class Empty:
        def capture_begin(self, **options): ...
        def capture_end(self): ...
        def replay(self): ...

    replayed, plain = Replayed(affine([])), affine([])
    monkeypatch.setattr(_cuda_graph, "recorded", lambda *_, pool: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Empty)
    for name in ("Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, object)
    values, vector = Values(inputs(0)[:2]), inputs(0)[2]

    found = replayed._record(((), ()), values, [vector])

    torch.testing.assert_close(found[0], plain(*values, vector)[0])
    assert not replayed.num_graphs


@pytest.mark.gpu
@pytest.mark.parametrize("make", [hessian, ggn])
def test_replayed_products_follow_the_weights_and_the_batches(make, monkeypatch):
    monkeypatch.setattr(_cuda_graph, "TUNING", _cuda_graph.Tuning(launches=0.0))
    risk = moved("cnn train")
    op, vector = make(risk), torch.randn(risk.space.size, dtype=risk.space.dtype).cuda()
    for _ in range(5):
        op @ vector
    there = risk.at(risk.theta + 0.1 * torch.randn_like(risk.theta))

    found = op.at(there) @ vector

    expected = make(there, engine="eager") @ vector
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(op @ vector, make(risk, engine="eager") @ vector)
