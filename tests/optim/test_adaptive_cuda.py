"""The adaptive optimisers on a CUDA device: kernels, graphs, checkpoints from the host."""

import copy

import pytest
import torch
from optim.optimizer_cases import EVERY, build, parameters, run, seeded

pytestmark = pytest.mark.gpu

every = pytest.mark.parametrize("name", EVERY)
PLAIN = [name for name in EVERY if not name.startswith("Gadam")]


def on_cuda(params):
    return [torch.nn.Parameter(p.detach().cuda()) for p in params]


def assert_near(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), **tolerance)


@every
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}, {"capturable": True}])
def test_steps_on_cuda_equal_steps_on_the_cpu(name, how):
    host, device = parameters(seeded()), on_cuda(parameters(seeded()))
    expected = run(build(name, host), host, seeded(1))
    assert_near(run(build(name, device, **how), device, seeded(1)), expected)


@every
def test_compiled_steps_on_cuda_equal_eager_steps(name):
    host, device = (parameters(seeded(), dtype=torch.float32) for _ in range(2))
    device = on_cuda(device)
    expected = run(build(name, host), host, seeded(1))
    found = run(build(name, device, compile=True), device, seeded(1))
    # Float32 over five steps on two devices.
    assert_near(found, expected, rtol=1e-5, atol=1e-6)


@every
def test_checkpoint_from_the_cpu_resumes_on_cuda(name):
    host = parameters(seeded())
    first = build(name, host)
    run(first, host, seeded(1))
    device = on_cuda(host)
    second = build(name, device)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert_near(run(second, device, seeded(2)), run(first, host, seeded(2)))


@pytest.mark.parametrize("name", PLAIN)
def test_step_can_be_captured_in_a_cuda_graph(name):
    results = []
    for captured in (False, True):
        params = on_cuda(parameters(seeded()))
        optimizer = build(name, params, capturable=True)
        run(optimizer, params, seeded(1), steps=1)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            graph.replay()
            graph.replay()
        else:
            optimizer.step()
            optimizer.step()
        results.append([p.detach() for p in params])
    assert_near(*results)


@every
def test_gradient_scaler_skips_steps_that_overflow(name):
    plain, scaled = on_cuda(parameters(seeded())), on_cuda(parameters(seeded()))
    first, second = build(name, plain), build(name, scaled)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    noise = seeded(1)
    for index in range(4):
        overflow = index == 2
        for p, q in zip(plain, scaled, strict=True):
            p.grad = torch.randn(p.shape, generator=noise, dtype=p.dtype).cuda()
            q.grad = p.grad * scaler.scale(torch.ones((), device="cuda"))
            q.grad.view(-1)[0] = torch.inf if overflow else q.grad.view(-1)[0]
        if not overflow:
            first.step()
        scaler.step(second)
        scaler.update()
    assert_near(scaled, plain)
