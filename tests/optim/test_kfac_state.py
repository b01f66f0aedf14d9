"""K-FAC around other optimisers, saved, loaded and copied."""

import copy
import pickle
from functools import partial

import pytest
import torch
from optim.kfac_cases import (
    built,
    convolutional,
    curvature,
    flat,
    labels,
    noise,
    small_network,
    take_step,
)
from torch.nn.functional import cross_entropy

from ritz.optim import KFAC, IterateAverage, KFACPreconditioner, Lookahead

# ------------------------------------------------------------------------------------------
# Around other optimisers.


def test_a_preconditioned_sgd_is_kfac():
    models = built(small_network), built(small_network)
    ours = KFAC(models[0], lr=0.1, delta=0.05, momentum=0.9, kl_clip=0.01, factor_every=2)
    sgd = torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)
    KFACPreconditioner(sgd, models[1], delta=0.05, kl_clip=0.01, factor_every=2)
    for step in range(5):
        x, y = noise(5, 3, seed=step), labels(3, 5, seed=step)
        for model, optimizer in zip(models, (ours, sgd), strict=True):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            before = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(flat(models[0].parameters()), flat(models[1].parameters()))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.SGD])
def test_a_preconditioned_optimiser_resumes_bit_for_bit(make):
    def begin():
        model = built(small_network)
        optimizer = make(model.parameters(), lr=0.01)
        return model, optimizer, KFACPreconditioner(optimizer, model, factor_every=2, kind="ekfac")

    def run(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            cross_entropy(model(noise(5, 3, seed=step)), labels(3, 5, seed=step)).backward()
            optimizer.step()

    whole, optimizer, _ = begin()
    run(whole, optimizer, range(7))
    model, optimizer, _ = begin()
    run(model, optimizer, range(3))
    saved = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
    model, optimizer, _ = begin()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    run(model, optimizer, range(3, 7))
    assert torch.equal(flat(whole.parameters()), flat(model.parameters()))


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
def test_fused_optimisers_take_the_preconditioned_steps(kind):
    # Fused kernels read gradients in the order of memory of the parameters.
    models = [built(convolutional) for _ in range(2)]
    models[1].to(memory_format=torch.channels_last)
    for model, fused in zip(models, (False, True), strict=True):
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, fused=fused)
        KFACPreconditioner(optimizer, model, factor_every=1)
        for step in range(4):
            optimizer.zero_grad()
            cross_entropy(model(noise(7, 2, 5, 5, seed=step)), labels(3, 7, seed=step)).backward()
            optimizer.step()

    torch.testing.assert_close(*(flat(model.parameters()) for model in models))


def test_a_removed_preconditioner_leaves_the_optimiser_alone():
    models = built(small_network), built(small_network)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    KFACPreconditioner(optimizers[0], models[0]).remove()
    for model, optimizer in zip(models, optimizers, strict=True):
        cross_entropy(model(noise(5, 3)), labels(3, 5)).backward()
        optimizer.step()
    assert torch.equal(flat(models[0].parameters()), flat(models[1].parameters()))
    assert not models[0][0]._forward_hooks


def test_lookahead_and_averages_work_around_kfac():
    model = built(small_network)
    optimizer = Lookahead(KFAC(model, lr=0.1), k=2)
    average = IterateAverage(optimizer, start=2)
    for step in range(4):
        optimizer.zero_grad()
        cross_entropy(model(noise(5, 3, seed=step)), labels(3, 5)).backward()
        optimizer.step()
    assert average.count == 4  # the weights before step 2, and after each step from it
    assert torch.isfinite(flat(model.parameters())).all()


# ------------------------------------------------------------------------------------------
# State.


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
@pytest.mark.parametrize("damping", ["exact", "factored"])
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_resuming_is_bit_for_bit(kind, damping, stop):
    make = partial(
        KFAC, lr=0.05, kind=kind, damping=damping, factor_every=2, inverse_every=3,
        fisher="monte_carlo", basis="qr",
    )  # fmt: skip

    def run(model, optimizer, steps):
        for step in steps:
            x, y = noise(5, 2, 6, 6, seed=step), labels(3, 5, seed=step)
            take_step(model, optimizer, x, y)

    whole = built(convolutional)
    run(whole, make(whole), range(7))
    model = built(convolutional)
    optimizer = make(model)
    run(model, optimizer, range(stop))
    saved = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
    model = built(convolutional)
    optimizer = make(model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    run(model, optimizer, range(stop, 7))
    assert torch.equal(flat(whole.parameters()), flat(model.parameters()))


def test_the_curvature_of_half_precision_weights_is_saved_in_float32():
    model = built(small_network).to(torch.bfloat16)
    optimizer = KFAC(model, lr=0.1)
    cross_entropy(model(noise(5, 3).bfloat16()).float(), labels(3, 5)).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    before = {k: v.clone() for k, v in curvature(optimizer)["0"].average.items()}
    optimizer.load_state_dict(copy.deepcopy(saved))
    after = curvature(optimizer)["0"].average
    assert all(after[k].dtype == torch.float32 and torch.equal(after[k], before[k]) for k in before)


def test_a_state_of_other_settings_is_refused():
    model = built(small_network)
    optimizer = KFAC(model)
    take_step(model, optimizer, noise(5, 3), labels(3, 5))
    with pytest.raises(ValueError, match="curvature of layer '0' was saved with other settings"):
        KFAC(built(small_network), damping="exact").load_state_dict(optimizer.state_dict())


def test_copies_and_pickles_have_no_hooks():
    model = built(small_network)
    optimizer = KFAC(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        cross_entropy(other(noise(5, 3)), labels(3, 5)).backward()
        assert not curvature(optimizer)["0"].sums
    again = copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match="a copy of KFAC has no model"):
        again.step()


def test_hooks_go_with_the_optimiser():
    import gc

    model = built(small_network)
    optimizer = KFAC(model)
    assert model[0]._forward_hooks
    del optimizer
    gc.collect()
    assert not model[0]._forward_hooks
    assert not model._forward_pre_hooks
