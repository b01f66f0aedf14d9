import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optim.optimizer_cases import parameters, run, seeded

from ritz.optim import DampedAdamW, delta_to_shrinkage, shrinkage_to_delta


def test_damping_is_the_epsilon_of_adamw():
    ours, theirs = parameters(seeded()), parameters(seeded())
    found = run(DampedAdamW(ours, lr=0.01, delta=0.3), ours, seeded(1))
    expected = run(torch.optim.AdamW(theirs, lr=0.01, eps=0.3, fused=True), theirs, seeded(1))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_damping_can_be_scheduled_per_group():
    ours, theirs = parameters(seeded()), parameters(seeded())
    damped = DampedAdamW(
        [{"params": ours[:1], "delta": 0.1}, {"params": ours[1:]}], lr=0.01, delta=1.0
    )
    plain = torch.optim.AdamW(
        [{"params": theirs[:1], "eps": 0.1}, {"params": theirs[1:]}], lr=0.01, eps=1.0, fused=True
    )
    noise = seeded(1), seeded(1)
    for _ in range(4):
        run(damped, ours, noise[0], steps=1)
        run(plain, theirs, noise[1], steps=1)
        for group, other in zip(damped.param_groups, plain.param_groups, strict=True):
            group["delta"] *= 0.5
            other["eps"] *= 0.5
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_large_damping_is_sgd_with_learning_rate_over_damping():
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = DampedAdamW([p], lr=1e6 * 0.1, delta=1e6, weight_decay=0.0)
    p.grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    optimizer.step()
    # delta stands beside |g| <= 2: relative difference 2e-6.
    torch.testing.assert_close(p.detach(), -0.1 * p.grad, rtol=3e-6, atol=0)


def test_coupled_weight_decay_equals_torch_adam():
    ours, theirs = parameters(seeded()), parameters(seeded())
    settings = {"lr": 0.01, "weight_decay": 0.1}
    found = run(DampedAdamW(ours, decoupled_weight_decay=False, **settings), ours, seeded(1))
    expected = run(torch.optim.Adam(theirs, fused=True, **settings), theirs, seeded(1))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@given(st.floats(0, 100), st.floats(1e-3, 100), st.floats(1e-3, 10))
def test_damped_step_equals_a_step_on_the_shrunk_matrix(delta, curvature, rate):
    beta = delta_to_shrinkage(delta)
    shrunk = rate * beta / (beta * curvature + (1 - beta))
    assert shrunk == pytest.approx(rate / (curvature + delta), rel=1e-9)


@given(st.floats(0, 1e3))
def test_shrinkage_and_damping_conversions_are_inverse(delta):
    assert shrinkage_to_delta(delta_to_shrinkage(delta)) == pytest.approx(
        delta, rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: delta_to_shrinkage(-1.0), "delta must be at least 0, got -1.0"),
        (lambda: shrinkage_to_delta(0.0), "beta must be above 0"),
        (lambda: shrinkage_to_delta(1.5), "beta must be between 0 and 1, got 1.5"),
        (
            lambda: DampedAdamW(parameters(seeded()), delta=-1.0),
            "delta must be at least 0, got -1.0",
        ),
    ],
)
def test_error_names_the_value_that_is_out_of_range(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize("unknown", ["eps", "form"])
def test_damped_adamw_refuses_eps_and_form(unknown):
    with pytest.raises(TypeError, match=f"unknown arguments {unknown}"):
        DampedAdamW(parameters(seeded()), **{unknown: None})
