"""The noise of a step has the covariance of the samples of the step, and enters where it should."""

import copy
import math
import pickle

import pytest
import torch
from curvature.noise_cases import (
    GHOST,
    NETWORKS,
    N,
    Reference,
    assert_covariance,
    data,
    expected,
    randomised,
)
from torch import nn
from torch.optim import SGD, Adam

from ritz._core.random import epoch_generator
from ritz.curvature import _noise_step
from ritz.models import GhostBatchNorm2d
from ritz.optim import KFAC, CovarianceNoise, IterateAverage, Lookahead, NoisySGD

CROSS_ENTROPY = nn.functional.cross_entropy
SMALL = 32
FACTOR = math.sqrt(1 / SMALL - 1 / N)


def parts_of(batch, count):
    return list(zip(*(tensor.chunk(count) for tensor in batch), strict=True))


def noise_of(name, kind, *, pieces=1, model=None, **options):
    """The noise of one step as a vector, before the root of the batch sizes."""
    model = NETWORKS[name]().train() if model is None else model
    noise = CovarianceNoise(SGD(model.parameters(), lr=0.1), model, kind=kind, small=SMALL,
                            **options)  # fmt: skip
    for piece in parts_of(data(name), pieces):
        noise.backward(piece, share=1 / pieces)
    noise.collect()
    return noise, flat(noise) / FACTOR


def flat(noise):
    drawn = noise._noise.formed()
    return torch.cat([drawn[name].flatten() for name in noise._named])


def fixed_signs(monkeypatch):
    signs = torch.randint(0, 2, (1, N), generator=torch.Generator().manual_seed(5)) * 2 - 1
    remaining = iter(signs.split(1, 1))

    def draw(shape, generator):
        return torch.cat([next(remaining) for _ in range(shape[1])], 1)

    monkeypatch.setattr(_noise_step, "random_signs", draw)
    return signs[0].double()


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", ["full", "centred"])
def test_signed_losses_give_the_signed_sum_of_sample_gradients(name, kind, pieces, monkeypatch):
    signs, g = fixed_signs(monkeypatch), Reference(name).gradients()
    _, noise = noise_of(name, kind, pieces=pieces)
    weights = signs - signs.mean() if kind == "centred" else signs

    # (1 / M) sum_i s_i g_i over root M: its covariance over the signs is that of the table.
    torch.testing.assert_close(noise, weights @ g / math.sqrt(N))


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_diagonal_is_that_of_the_dense_matrix(name, pieces):
    # The roots are divided by the number of samples if they are reused.
    noise, _ = noise_of(name, "diagonal", pieces=pieces, refresh=2)
    roots = noise._step.roots
    found = torch.cat([roots[key]["root"].flatten() for key in noise._named])

    torch.testing.assert_close(found.square(), expected(name, "diagonal").diagonal())


@pytest.mark.parametrize("kind", ["trace", "trace_unscaled"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_trace_is_that_of_the_dense_matrix(name, kind):
    noise, _ = noise_of(name, kind)
    (root,) = (entry["deviation"] for entry in noise._step.roots.values())

    torch.testing.assert_close(root.square(), expected(name, kind)[0, 0])


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_kronecker_factors_are_those_of_the_formula(name, pieces):
    noise, _ = noise_of(name, "kfac", pieces=pieces)
    # Draws with many seeds from the factors of one step.
    block = []
    for step in range(1000):
        noise._step.generators.begin(step)
        drawn = noise._step._draw(N).formed()
        block.append(torch.cat([drawn[key].flatten() for key in noise._named]))

    assert_covariance(torch.stack(block, 1), expected(name, "kfac"))


@pytest.mark.parametrize("kind", ["true", "diagonal", "multiplicative", "isotropic"])
def test_noise_of_many_steps_has_the_covariance(kind):
    model = NETWORKS["mlp"]()
    options = {"refresh": 10**6} if kind == "diagonal" else {"sigma": 0.5}
    options = {} if kind == "true" else options
    # A learning rate of zero: the weights, and with them the covariance, stay.
    optimizer = SGD(model.parameters(), lr=0.0)
    noise = CovarianceNoise(optimizer, model, kind=kind, small=SMALL, **options)
    batch, block = data("mlp"), []
    for _ in range(1000):
        optimizer.zero_grad()
        noise.backward(batch)
        noise.collect()
        block.append(flat(noise))
        optimizer.step()
    scale = 1 if kind in ("multiplicative", "isotropic") else FACTOR

    assert_covariance(torch.stack(block, 1) / scale, expected("mlp", kind))


@pytest.mark.parametrize("momentum", ["after", "before"])
def test_noise_enters_after_or_before_momentum(momentum):
    model = NETWORKS["mlp"]()
    plain = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    noise = CovarianceNoise(optimizer, model, small=SMALL, momentum=momentum)
    buffer = {}
    for _ in range(3):
        optimizer.zero_grad()
        noise.backward(data("mlp"))
        noise.collect()
        drawn = noise._noise.formed()
        optimizer.step()
        loss = CROSS_ENTROPY(plain(data("mlp")[0]), data("mlp")[1])
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        with torch.no_grad():
            for (name, p), g in zip(plain.named_parameters(), gradients, strict=True):
                before = momentum == "before"
                buffer[name] = 0.9 * buffer.get(name, 0) + g - (drawn[name] if before else 0)
                # w <- w - alpha buffer + alpha C xi
                p -= 0.1 * buffer[name] - (0 if before else 0.1 * drawn[name])
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def train(model, optimizer, noise, steps, batch=None):
    for _ in range(steps):
        optimizer.zero_grad()
        noise.backward(batch or data("mlp"))
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "refresh"), [("diagonal", 1), ("diagonal", 3), ("kfac", 3), ("full", 1), ("trace", 4)]
)
@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, momentum=0.9), Adam])
def test_a_resumed_run_is_the_same_bit_for_bit(kind, refresh, make):
    def begin():
        model = NETWORKS["mlp"]()
        optimizer = make(model.parameters())
        return model, optimizer, CovarianceNoise(optimizer, model, kind=kind, small=SMALL,
                                                 refresh=refresh, until=8)  # fmt: skip

    whole = begin()
    train(*whole, 9)
    first = begin()
    train(*first, 5)
    second = begin()
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    train(*second, 4)

    for p, q in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("kind", ["diagonal", "trace"])
@pytest.mark.parametrize("refresh", [1, 2])
def test_micro_batches_of_any_share_have_the_moments_of_their_samples(kind, refresh):
    _, expected = noise_of("mlp", kind, refresh=refresh)
    model = NETWORKS["mlp"]().train()
    noise = CovarianceNoise(SGD(model.parameters(), lr=0.1), model, kind=kind, small=SMALL,
                            refresh=refresh)  # fmt: skip
    x, y = data("mlp")
    for rows, share in ((slice(0, 32), 0.5), (slice(32, N), torch.tensor(0.5).double())):
        noise.backward((x[rows], y[rows]), share=share)
    noise.collect()

    torch.testing.assert_close(flat(noise) / FACTOR, expected)


def test_numbers_depend_on_seed_and_step_alone():
    generators = _noise_step.StepGenerators(3, torch.device("cpu"))
    for step in (1, 5, 2, 2):
        generators.begin(step)
        for stream, generator in enumerate((generators.shared, generators.own)):
            # An odd number of draws leaves half a pair of normal numbers behind.
            found = torch.randn(5, generator=generator), torch.rand(3, generator=generator)
            again = epoch_generator(3, (step << 16) + stream)
            expected = torch.randn(5, generator=again), torch.rand(3, generator=again)
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", ["diagonal", "trace", "kfac"])
def test_new_roots_are_written_to_the_place_of_the_old(kind):
    """From where the CUDA graphs of later steps read them."""
    model = NETWORKS["mlp"]()
    optimizer = SGD(model.parameters(), lr=0.1)
    noise = CovarianceNoise(optimizer, model, kind=kind, small=SMALL, refresh=2)
    train(model, optimizer, noise, 2)
    roots = [root for each in noise._step.roots.values() for root in each.values()]
    old = [root.clone() for root in roots]

    train(model, optimizer, noise, 1)

    now = [root for each in noise._step.roots.values() for root in each.values()]
    assert all(a is b for a, b in zip(now, roots, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(now, old, strict=True))


def test_noise_stops_and_training_is_then_plain():
    model = NETWORKS["mlp"]()
    optimizer = SGD(model.parameters(), lr=0.1)
    noise = CovarianceNoise(optimizer, model, small=SMALL, until=3)
    train(model, optimizer, noise, 2)
    assert not noise.active
    plain = copy.deepcopy(model)
    train(model, optimizer, noise, 1)
    loss = CROSS_ENTROPY(plain(data("mlp")[0]), data("mlp")[1])
    gradients = torch.autograd.grad(loss, list(plain.parameters()))
    for p, q, g in zip(model.parameters(), plain.parameters(), gradients, strict=True):
        torch.testing.assert_close(p, q - 0.1 * g)


def test_averages_and_lookahead_see_the_weights_with_their_noise():
    model = NETWORKS["mlp"]()
    optimizer = SGD(model.parameters(), lr=0.1)
    average = IterateAverage(optimizer, start=1)
    noise = CovarianceNoise(optimizer, model, small=SMALL)
    start = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, noise, 1)
    last = [p.detach().clone() for p in model.parameters()]
    with average.applied(model):
        for p, q, r in zip(start, last, model.parameters(), strict=True):
            torch.testing.assert_close(r.detach(), (p + q) / 2)

    other = NETWORKS["mlp"]()
    ahead = Lookahead(SGD(other.parameters(), lr=0.1), k=1, alpha=1.0)
    train(other, ahead, CovarianceNoise(ahead.optimizer, other, small=SMALL), 1)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("kind", ["full", "diagonal", "kfac"])
def test_a_gradient_scaler_leaves_the_noise_as_it_is(kind):
    model, scaled = NETWORKS["mlp"]().float(), NETWORKS["mlp"]().float()
    batch = data("mlp")[0].float(), data("mlp")[1]
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    noise = CovarianceNoise(optimizer, model, kind=kind, small=SMALL)
    train(model, optimizer, noise, 3, batch)
    other = SGD(scaled.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    gained = CovarianceNoise(other, scaled, kind=kind, small=SMALL)
    for _ in range(3):
        other.zero_grad()
        gained.backward(batch, scaler=scaler)
        scaler.step(other)
        scaler.update()
    for p, q in zip(model.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_ghost_batches_keep_their_running_statistics():
    def begin():
        model = NETWORKS["normalised"]().train()
        return model, SGD(model.parameters(), lr=0.0)

    (model, optimizer), (plain, other) = begin(), begin()
    noise = CovarianceNoise(optimizer, model, small=SMALL)
    train(model, optimizer, noise, 1, data("normalised"))
    CROSS_ENTROPY(plain(data("normalised")[0]), data("normalised")[1]).backward()
    other.step()
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert int(plain[1].num_batches_tracked) == N // GHOST


@pytest.mark.parametrize("kind", ["diagonal", "trace", "kfac"])
@pytest.mark.parametrize("norm", [lambda: GhostBatchNorm2d(4, GHOST), nn.Identity])
def test_an_activation_in_place_leaves_the_second_moments_as_they_are(norm, kind):
    found = []
    for inplace in (False, True):
        body = nn.Conv2d(1, 4, 3), norm(), nn.ReLU(inplace=inplace), nn.Flatten()
        model = randomised(nn.Sequential(*body, nn.Linear(16, 3)))
        optimizer = SGD(model.parameters(), lr=0.1)
        noise = CovarianceNoise(optimizer, model, kind=kind, small=SMALL)
        noise.backward(data("normalised"))
        noise.collect()
        found.append(flat(noise))

    torch.testing.assert_close(*found)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["full", "centred", "diagonal", "trace", "kfac", "multiplicative"])
def test_steps_that_overflow_in_half_precision_leave_finite_weights(kind, fused):
    model, labels = NETWORKS["mlp"]().float(), data("mlp")[1]
    batch = data("mlp")[0].float(), labels
    optimizer = SGD(model.parameters(), lr=0.01, fused=fused)
    noise = CovarianceNoise(optimizer, model, kind=kind, small=SMALL, refresh=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    skipped = 0
    for _ in range(20):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        noise.begin()
        with noise.observing(batch), torch.autocast("cpu", dtype=torch.float16):
            outputs = model(batch[0])
            loss = CROSS_ENTROPY(outputs, labels)
        scale = scaler.scale(torch.ones(()))
        noise.pull(scaler.scale(loss), outputs, labels, batch, scale, 1.0)
        noise.collect(scale)
        scaler.step(optimizer)
        scaler.update()
        skipped += all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert all(p.isfinite().all() for p in model.parameters())

    # The scale halves until nothing overflows; the steps after that are taken.
    assert 0 < skipped < 15


def test_sgd_with_noise_is_an_optimiser_of_torch():
    model, other = NETWORKS["mlp"](), NETWORKS["mlp"]()
    noisy = NoisySGD(model, lr=0.1, momentum=0.9, small=SMALL, kind="full")
    train(model, noisy, noisy.noise, 2)
    optimizer = SGD(other.parameters(), lr=0.1, momentum=0.9)
    train(other, optimizer, CovarianceNoise(optimizer, other, small=SMALL, kind="full"), 2)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def tied():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3)).double()


@pytest.mark.parametrize(
    ("options", "model", "error"),
    [
        ({"small": N}, NETWORKS["mlp"], f"small must be less than the samples .* {N} and {N}"),
        ({"kind": "diag"}, NETWORKS["mlp"], "kind"),
        ({"momentum": "never"}, NETWORKS["mlp"], "momentum"),
        ({"until": 0}, NETWORKS["mlp"], "until"),
        ({"refresh": 0}, NETWORKS["mlp"], "refresh"),
        ({"kind": "sgld"}, NETWORKS["mlp"], "temperature must be given"),
        ({"kind": "sgld", "temperature": -1.0}, NETWORKS["mlp"], "temperature must be at least 0"),
        ({"kind": "diagonal"}, tied, "per-sample gradients, .*: use kind='full'"),
        ({"loss_fn": nn.CrossEntropyLoss(reduction="sum")}, NETWORKS["mlp"], "reduction='sum'"),
        ({"loss_fn": lambda f, y: CROSS_ENTROPY(f, y) ** 2}, NETWORKS["mlp"],
         "must be the mean of the losses of its samples"),
        ({"loss_fn": lambda f, y: CROSS_ENTROPY(f, y), "kind": "true"}, NETWORKS["mlp"],
         "likelihood"),
    ],
)  # fmt: skip
def test_wrong_input_is_named_in_one_line(options, model, error):
    network = model()
    optimizer = SGD(network.parameters(), lr=0.1)

    def one_step():
        noise = CovarianceNoise(optimizer, network, **({"small": SMALL} | options))
        train(network, optimizer, noise, 1)

    with pytest.raises(ValueError, match=error) as raised:
        one_step()
    assert "\n" not in str(raised.value)


def test_a_step_without_its_batch_is_refused():
    model = NETWORKS["mlp"]()
    optimizer = SGD(model.parameters(), lr=0.1)
    noise = CovarianceNoise(optimizer, model, small=SMALL)
    with pytest.raises(RuntimeError, match=r"call noise\.backward"):
        optimizer.step()
    assert noise.num_steps == 0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_noise_of_a_skipped_step_is_dropped_with_its_gradients(set_to_none):
    results = []
    for skips in (False, True):
        model, batch = NETWORKS["mlp"](), data("mlp")
        optimizer = SGD(model.parameters(), lr=0.1)
        noise = CovarianceNoise(optimizer, model, kind="full", small=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for bad in (False, True, False) if skips else (False, False):
            optimizer.zero_grad(set_to_none=set_to_none)
            inputs = batch[0] * (float("inf") if bad else 1.0)
            noise.backward((inputs, batch[1]), scaler=scaler)
            scaler.step(optimizer)
            scaler.update(4.0)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


def test_a_copy_of_noisy_sgd_refuses_steps_without_noise():
    model, batch = NETWORKS["mlp"](), data("mlp")
    optimizer = NoisySGD(model, lr=0.1, small=2)
    optimizer.noise.backward(batch)
    optimizer.step()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        with pytest.raises(RuntimeError, match="a copy of NoisySGD has no model"):
            copied.step()
    fresh = NoisySGD(model, lr=0.1, small=2)
    fresh.load_state_dict(optimizer.state_dict())
    fresh.noise.backward(batch)
    fresh.step()


def test_noisy_sgd_takes_a_model_and_not_its_parameters():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got generator"):
        NoisySGD(NETWORKS["mlp"]().parameters())


@pytest.mark.parametrize("kind", ["full", "centred", "true", "diagonal"])
def test_passes_of_the_noise_leave_the_curvature_of_kfac(kind):
    factors = []
    # Noise of ``isotropic`` needs no pass.
    for each in ("isotropic", kind):
        model = NETWORKS["mlp"]()
        optimizer = KFAC(model, lr=0.01)
        train(model, optimizer, CovarianceNoise(optimizer, model, kind=each, small=SMALL), 1)
        factors.append([block.average for block in optimizer.curvature.blocks])
    for plain, beside in zip(*factors, strict=True):
        torch.testing.assert_close(plain, beside)
