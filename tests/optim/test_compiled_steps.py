import functools
from contextlib import nullcontext

import pytest
import torch
from optim.optimizer_cases import EVERY, build, parameters, run, seeded
from torch._dynamo.testing import CompileCounter
from torch.optim.lr_scheduler import OneCycleLR

from ritz.optim import GadamX, PadamW

# torch.compile takes a float64 number without dimensions for a constant, in torch's own optimisers
# too: whoever compiles the step from outside meets that.
SHAPES = ((4, 3), (5,))


@pytest.fixture
def traced_only(monkeypatch):
    """Trace steps as the compiler does, and run what it traced without generating code."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def assert_near(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("name", ["Gadam", "GadamX"])
def test_steps_under_torch_compile_equal_eager_steps(traced_only, name):
    ours, compiled = (parameters(seeded(), shapes=SHAPES) for _ in range(2))
    expected = run(build(name, ours), ours, seeded(1))
    optimizer = build(name, compiled)
    optimizer.step = torch.compile(optimizer.step)
    assert_near(run(optimizer, compiled, seeded(1)), expected)


@pytest.mark.parametrize("name", ["Gadam inside", "GadamX", "PadamW amsgrad"])
def test_torch_compile_captures_the_whole_step_in_one_graph(name):
    torch._dynamo.reset()
    params = parameters(seeded(), shapes=((4, 3), (5,)) * 2)
    optimizer, counter = build(name, params), CompileCounter()
    optimizer.step = torch.compile(optimizer.step, backend=counter)
    run(optimizer, params, seeded(1), steps=6)
    # The state of a parameter has new keys after the first step.
    assert 1 <= counter.frame_count <= 2


# The numbers of a step are float64 in the graph where a parameter is.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float64) for name in EVERY),
        *(
            (name, kind)
            for name in ("DampedAdamW", "GadamX")
            for kind in (torch.float32, torch.complex64)
        ),
    ],
)
def test_steps_with_compile_true_equal_eager_steps(traced_only, name, dtype):
    ours, compiled = parameters(seeded(), dtype=dtype), parameters(seeded(), dtype=dtype)
    expected = run(build(name, ours), ours, seeded(1))
    # In float64 numbers of float32 would show.
    close = {"rtol": 1e-13, "atol": 1e-14} if dtype == torch.float64 else {}
    assert_near(run(build(name, compiled, compile=True), compiled, seeded(1)), expected, **close)


@pytest.mark.parametrize("name", ["GadamX", "PadamW amsgrad", "Padam published"])
def test_new_learning_rates_and_decays_do_not_recompile(traced_only, name):
    params = parameters(seeded())
    decay = 0.0 if name == "Padam published" else 0.1  # an L2 coefficient is a constant
    optimizer = build(name, params, compile=True, weight_decay=decay)
    run(optimizer, params, seeded(1), steps=1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rate in (0.3, 0.2, 0.1):
            optimizer.param_groups[0]["lr"] = rate
            if decay:
                optimizer.param_groups[0]["weight_decay"] = rate
            run(optimizer, params, seeded(2), steps=2)
    assert optimizer.state[params[0]]["step"] == 7


def test_each_of_many_optimisers_compiles_its_step(traced_only):
    # Graphs of one function are limited to eight; beyond it torch would run unfused.
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for size in range(2, 8):
            params = parameters(seeded(), shapes=((size,), (size + 1,)))
            run(PadamW(params, compile=True), params, seeded(1), steps=2)


def test_groups_may_be_added_to_a_compiled_optimiser(traced_only):
    ours, compiled = parameters(seeded()), parameters(seeded())
    results = []
    for params, flag in ((ours, False), (compiled, True)):
        optimizer = GadamX(params[:1], compile=flag)
        run(optimizer, params[:1], seeded(1), steps=2)
        optimizer.add_param_group({"params": params[1:], "partial": 0.25})
        results.append(run(optimizer, params, seeded(2)))
    assert_near(*results)


def test_betas_that_change_at_every_step_end_compilation_with_a_warning(traced_only):
    ours, compiled = parameters(seeded()), parameters(seeded())
    results = []
    for params, flag in ((ours, False), (compiled, True)):
        optimizer = GadamX(params, compile=flag)
        schedule = OneCycleLR(optimizer, 0.1, total_steps=20)
        noise = seeded(1)
        with (
            pytest.warns(UserWarning, match="compile=True: settings.*more than 8")
            if flag
            else nullcontext()
        ):
            for _ in range(12):
                found = run(optimizer, params, noise, steps=1)
                schedule.step()
        results.append(found)
    assert_near(*results)


def test_step_whose_compilation_fails_is_not_counted(monkeypatch):
    def broken(function, **options):
        def fail(*args):
            raise RuntimeError("no compiler")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    params = parameters(seeded())
    optimizer = GadamX(params, compile=True)
    with pytest.raises(RuntimeError, match="no compiler"):
        run(optimizer, params, seeded(1), steps=1)
    assert optimizer.state[params[0]]["step"] == 0


@pytest.mark.parametrize("name", ["GadamX", "GadamX L2", "PadamW amsgrad", "Padam published"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_steps_can_be_captured_in_a_cuda_graph(traced_only, name, dtype):
    expected, found = (parameters(seeded(), dtype=dtype) for _ in range(2))
    run(build(name, expected, lr=0.01), expected, seeded(1))
    rate = torch.tensor(0.01, dtype=torch.float64)
    optimizer = build(name, found, compile=True, capturable=True, lr=rate)
    run(optimizer, found, seeded(1))
    assert_near(found, expected)


def test_compile_with_differentiable_raises():
    with pytest.raises(ValueError, match="compile=True does not support differentiable=True"):
        GadamX(parameters(seeded()), compile=True, differentiable=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["GadamX", "GadamX L2", "PadamW amsgrad", "Padam published"])
def test_generated_code_of_a_compiled_step_equals_the_eager_step(name):
    torch._dynamo.reset()
    ours, compiled = (parameters(seeded(), dtype=torch.float32) for _ in range(2))
    expected = run(build(name, ours), ours, seeded(1), steps=20)
    found = run(build(name, compiled, compile=True), compiled, seeded(1), steps=20)
    # Products are contracted otherwise: some last digits of float32 over twenty steps.
    assert_near(found, expected, rtol=1e-5, atol=1e-6)
