import itertools

import pytest
import torch
from optim.optimizer_cases import copied, give_gradients, parameters, run, seeded

from ritz.optim import DampedAdamW, Gadam, GadamX, Padam, PadamW, _adaptive_update

BETAS = (0.9, 0.999)


def reference(w, noise, *, lr, eps, decay, partial, form, amsgrad, maximize, decoupled):
    m = v = most = torch.zeros_like(w)
    for t, z in enumerate(noise, 1):
        g = (0.5 * w + z) * (-1 if maximize else 1) + (0 if decoupled else decay * w)
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g * g
        c1, c2 = 1 - BETAS[0] ** t, 1 - BETAS[1] ** t
        w = w * (1 - lr * decay) if decoupled else w
        most = torch.maximum(most, v / c2 if form == "inside" else v) if amsgrad else v / c2
        if form == "published":
            w = w - lr * c2**0.5 / c1 * m / ((most if amsgrad else v).sqrt() + eps) ** (2 * partial)
        elif form == "inside":
            w = w - lr * m / c1 / (most + eps) ** partial
        else:
            w = w - lr * m / c1 / ((most / c2 if amsgrad else most).sqrt() + eps)
    return w


def taken(cls, w, noise, **settings):
    p = torch.nn.Parameter(w.clone())
    optimizer = cls([p], **settings)
    for z in noise:
        p.grad = 0.5 * p.detach() + z
        optimizer.step()
    return p.detach()


@pytest.fixture(scope="module")
def problem():
    rng = seeded()
    noise = torch.randn(200, 6, generator=rng, dtype=torch.float64)
    return torch.randn(6, generator=rng, dtype=torch.float64), noise


FORMS = [
    *((p, "inside") for p in (0.0, 0.0625, 0.125, 0.2, 0.25, 0.5)),
    (0.5, "outside"),
    *((p, "published") for p in (0.125, 0.2, 0.5)),
]


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("partial", "form"), FORMS)
def test_every_update_equals_the_reference_formula(problem, partial, form, foreach, flags):
    amsgrad, maximize, decoupled = flags
    cls = PadamW if decoupled else Padam
    w, noise = problem
    # A long way for plain flags, and as long as the corrections of the bias matter for the others.
    noise = noise if flags == (False, False, False) else noise[:50]
    rule = {"lr": 0.03, "eps": 1e-4, "partial": partial, "form": form}
    rule |= {"amsgrad": amsgrad, "maximize": maximize}
    found = taken(cls, w, noise, weight_decay=0.1, foreach=foreach, **rule)
    expected = reference(w, noise, decay=0.1, decoupled=decoupled, **rule)
    # A step rounds a handful of times by 1.1e-16 and the last may hold the errors of all 200.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("cls", [Gadam, GadamX])
@pytest.mark.parametrize("decoupled", [False, True])
def test_gadam_and_gadamx_take_the_steps_of_padamw(problem, cls, decoupled):
    found = taken(cls, *problem, decoupled_weight_decay=decoupled, weight_decay=0.1, start=50)
    base = PadamW if decoupled else Padam
    rule = {"lr": 1e-3, "partial": 0.5} if cls is Gadam else {"lr": 0.1, "partial": 0.125}
    assert torch.equal(found, taken(base, *problem, weight_decay=0.1, **rule))


def test_published_form_defaults_to_amsgrad(problem):
    rule = {"lr": 0.03, "eps": 1e-8, "partial": 0.125, "form": "published", "maximize": False}
    found = taken(Padam, *problem, **rule)
    expected = reference(*problem, decay=0.0, decoupled=False, amsgrad=True, **rule)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_bias_correction_of_the_published_form_acts_like_a_warm_up():
    # Its first step is (1 - beta2)^(1/2 - p) = 0.075 of the paper's, at step 100 0.41 of it.
    ratios = []
    for steps in (1, 100):
        pair = []
        for form in ("published", "inside"):
            p = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
            optimizer = PadamW([p], lr=1.0, eps=0.0, weight_decay=0.0, form=form)
            for _ in range(steps):
                before = p.detach().clone()
                p.grad = torch.ones_like(p)
                optimizer.step()
            pair.append(float(p.detach() - before))
        ratios.append(pair[0] / pair[1])
    assert ratios == pytest.approx([0.075, 0.414], abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("cls", [PadamW, Gadam, DampedAdamW])
def test_power_one_half_is_adamw_bit_for_bit(cls, dtype, amsgrad, maximize, how):
    settings = {"lr": 0.01, "weight_decay": 0.1, "amsgrad": amsgrad, "maximize": maximize}
    own = {} if cls is DampedAdamW else {"partial": 0.5}
    ours = parameters(seeded(), dtype=dtype)
    theirs = copied(ours)
    # Ours takes the fused kernel unasked.
    chosen = {} if "fused" in how else how
    found = run(cls(ours, **settings, **own, **chosen), ours, seeded(1), steps=50)
    expected = run(torch.optim.AdamW(theirs, **settings, **how), theirs, seeded(1), steps=50)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("fused", [None, True])
def test_padam_with_power_one_half_is_adam(fused):
    ours = parameters(seeded())
    theirs = copied(ours)
    settings = {"lr": 0.01, "weight_decay": 0.1}
    found = run(Padam(ours, partial=0.5, fused=fused, **settings), ours, seeded(1))
    expected = run(torch.optim.Adam(theirs, fused=True, **settings), theirs, seeded(1))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("cls", "settings", "kernel", "calls"),
    [
        (Gadam, {}, "_fused_adamw_", 3),
        (DampedAdamW, {}, "_fused_adamw_", 3),
        (PadamW, {"partial": 0.5}, "_fused_adamw_", 3),
        (Padam, {"partial": 0.5}, "_fused_adam_", 3),
        (Gadam, {"form": "inside"}, "_fused_adamw_", 0),
        (Gadam, {"foreach": True}, "_fused_adamw_", 0),
        (Gadam, {"foreach": False}, "_fused_adamw_", 0),
        (Gadam, {"fused": False}, "_fused_adamw_", 0),
        (Gadam, {"fused": True, "foreach": False}, "_fused_adamw_", 3),
        (GadamX, {}, "_fused_adamw_", 0),
    ],
)
def test_fused_kernel_is_used_where_it_is_available(monkeypatch, cls, settings, kernel, calls):
    real, seen = getattr(torch, kernel), []
    monkeypatch.setattr(torch, kernel, lambda *a, **k: (seen.append(1), real(*a, **k)))
    params = parameters(seeded())
    run(cls(params, **settings), params, seeded(1), steps=3)
    assert len(seen) == calls


def test_complex_parameters_do_not_use_the_fused_kernel():
    params = parameters(seeded(), dtype=torch.complex128)
    optimizer = Gadam(params)
    assert not optimizer._step_supports_amp_scaling
    run(optimizer, params, seeded(1))


def test_power_zero_is_momentum_without_scaling(problem):
    w, noise = problem
    rule = {"lr": 0.03, "weight_decay": 0.0, "partial": 0.0}
    found = taken(PadamW, w, noise[:2], **rule)
    first = 0.5 * w + noise[0]
    after = w - 0.03 * first
    second = 0.5 * after + noise[1]
    expected = after - 0.03 * (0.09 * first + 0.1 * second) / (1 - 0.81)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_large_parameters_are_updated_in_chunks(monkeypatch, transposed):
    ours = parameters(seeded(), shapes=((40, 30), (7,)))
    if transposed:  # cannot be cut, and need not be
        ours = [torch.nn.Parameter(p.detach().t()) for p in ours]
    whole = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    expected = run(GadamX(whole), whole, seeded(1))
    monkeypatch.setattr(_adaptive_update, "TUNING", _adaptive_update.Tuning(grain=100))
    found = run(GadamX(ours), ours, seeded(1))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("foreach", [False, True])
def test_float16_with_small_epsilon_stays_finite(foreach):
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = GadamX([p], lr=0.1, weight_decay=0.0, foreach=foreach)
    p.grad = torch.tensor([0.0, 1e-6, 0.5, 1.0], dtype=torch.float16)
    optimizer.step()
    assert p.dtype == torch.float16
    assert p[0] == 1  # no gradient, no move
    # By the paper: g / (g^2 + 1e-8)^(1/8), to the half digit of float16.
    expected = 1 - 0.1 * torch.tensor([0.5, 1.0]) ** 0.75
    torch.testing.assert_close(p[2:].detach().float(), expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("foreach", [False, True])
def test_bfloat16_steps_are_close_to_float32_steps(foreach):
    rng = seeded()
    wide = torch.nn.Parameter(torch.randn(50, generator=rng))
    narrow = torch.nn.Parameter(wide.detach().bfloat16())
    for p in (wide, narrow):
        optimizer = GadamX([p], lr=0.1, foreach=foreach)
        noise = seeded(1)
        for _ in range(5):
            p.grad = torch.randn(50, generator=noise).to(p.dtype)
            optimizer.step()
    # Five updates of at most 0.1 each, rounded to 8 bits on weights of at most 4.
    torch.testing.assert_close(narrow.detach().float(), wide.detach(), rtol=0, atol=5 * 2**-7)


def test_power_can_be_scheduled_between_steps():
    params = parameters(seeded())
    optimizer = Gadam(params, lr=0.01)
    run(optimizer, params, seeded(1))
    optimizer.param_groups[0]["partial"] = 0.125
    give_gradients(params, seeded(2))
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 6
