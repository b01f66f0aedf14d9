"""K-FAC and EK-FAC against dense matrices: factors, damping, steps, and what they are told."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, mse_loss

from ritz.curvature import Risk, kfac
from ritz.optim import KFAC, GroupSchedule, IterateAverage, KFACPreconditioner, Lookahead

ALL_STEPS = {"factor_every": 1, "inverse_every": 1}


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(classes, *shape, seed=1):
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))


def built(make, seed=0):
    model = make().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64)
            value.copy_(drawn - 0.4)
    return model


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def take_step(model, optimizer, x, y, loss=cross_entropy):
    """One step; return the gradient and the change of the weights, over minus the rate."""
    before = flat(model.parameters()).clone()
    optimizer.zero_grad()
    outputs = model(x)
    optimizer.observe(outputs, y, loss)
    loss(outputs, y).backward()
    gradient = flat(p.grad for p in model.parameters()).clone()
    optimizer.step()
    rate = optimizer.param_groups[0]["lr"]
    return gradient, (before - flat(model.parameters())) / rate


def curvature(optimizer):
    return {block.name: block for block in optimizer.curvature.blocks}


def linear_network():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3, bias=False), nn.Linear(3, 2))


def small_network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, stride=2, dilation=1, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


# ------------------------------------------------------------------------------------------
# Steps against dense matrices.


@pytest.mark.parametrize("make", [linear_network, lambda: nn.Linear(3, 2)])
def test_step_of_a_linear_network_is_the_exactly_damped_gauss_newton_step(make):
    # Squared error: the blocks of the Gauss-Newton matrix are Kronecker products. For one layer
    # this is the natural gradient.
    x, y = noise(7, 3), noise(7, 2, seed=1)
    model = built(make)
    matrix = kfac(Risk(model, nn.MSELoss(), (x, y))).dense()
    optimizer = KFAC(model, lr=0.5, delta=0.1, momentum=0, fisher="ggn", damping="exact")

    gradient, step = take_step(model, optimizer, x, y, mse_loss)

    expected = torch.linalg.solve(matrix + 0.1 * torch.eye(len(matrix)), gradient)
    torch.testing.assert_close(step, expected)


@pytest.mark.parametrize("fisher", ["empirical", "ggn"])
def test_factors_are_those_of_curvature(fisher):
    x, y = noise(6, 2, 6, 6), labels(3, 6)
    model = built(convolutional)
    expected = kfac(Risk(model, nn.CrossEntropyLoss(), (x, y)), kind=fisher)
    optimizer = KFAC(model, fisher=fisher)

    take_step(model, optimizer, x, y)

    blocks = curvature(optimizer)
    for name, position in (("0", 0), ("5", 2)):
        factors = expected.ops[position].factors
        torch.testing.assert_close(blocks[name].average["inputs"], factors.inputs)
        torch.testing.assert_close(blocks[name].average["outputs"], factors.outputs)


def dense_blocks(block):
    """The matrices of all groups, from the averages alone."""
    A, S = block.average["inputs"], block.average["outputs"]
    A, S = (m if m.ndim == 3 else m.unsqueeze(0) for m in (A, S))
    return list(zip(A, S, strict=True))


def joint(block):
    """Gradients ``[W b]`` ``(groups, o, i)`` of a layer."""
    groups = getattr(block.module, "groups", 1)
    parts = [p.grad.reshape(groups, len(p) // groups, -1) for p in block.params.values()]
    return torch.cat(parts, 2)


@pytest.mark.parametrize("damping", ["exact", "factored"])
def test_damping_is_that_of_its_dense_formula(damping):
    x, y, delta = noise(6, 2, 6, 6), labels(3, 6), 0.02
    model = built(convolutional)
    optimizer = KFAC(model, lr=1.0, delta=delta, momentum=0, damping=damping)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    take_step(model, optimizer, x, y)

    for name, block in curvature(optimizer).items():
        change = [before[f"{name}.{key}"] - p.detach() for key, p in block.params.items()]
        groups = getattr(block.module, "groups", 1)
        steps = torch.cat([c.reshape(groups, len(c) // groups, -1) for c in change], 2)
        for (A, S), V, step in zip(dense_blocks(block), joint(block), steps, strict=True):
            eyes = torch.eye(len(S)).double(), torch.eye(len(A)).double()
            if damping == "exact":
                matrix = torch.kron(S, A) + delta * torch.eye(len(A) * len(S))
            else:
                pi = ((A.trace() / len(A)) / (S.trace() / len(S))).sqrt()
                matrix = torch.kron(S + delta**0.5 / pi * eyes[0], A + delta**0.5 * pi * eyes[1])
            expected = torch.linalg.solve(matrix, V.flatten()).view_as(V)
            torch.testing.assert_close(step, expected)


def sample_gradients(model, x, y):
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params, one, label):
        return cross_entropy(functional_call(model, params, (one[None],)), label[None])

    return vmap(grad(loss), (None, 0, 0))(params, x, y)


@pytest.mark.parametrize("steps", [1, 2])
def test_ekfac_has_the_second_moments_of_projected_sample_gradients(steps):
    model = built(convolutional)
    optimizer = KFAC(model, lr=0.0, kind="ekfac", factor_every=1, inverse_every=5)
    expected = {}
    for step in range(steps):
        x, y = noise(5, 2, 6, 6, seed=step), labels(3, 5, seed=step)
        take_step(model, optimizer, x, y)
        gradients = sample_gradients(model, x, y)
        for name, block in curvature(optimizer).items():
            groups = getattr(block.module, "groups", 1)
            parts = [gradients[f"{name}.{key}"] for key in block.params]
            G = torch.cat([g.reshape(5, groups, g.shape[1] // groups, -1) for g in parts], 3)
            U_S, U_A = block.inverse["outputs_basis"], block.inverse["inputs_basis"]
            squares = (U_S.mT @ G @ U_A).square().mean(0)
            expected[name] = expected.get(name, 0) + squares / steps  # a plain mean at first

    for name, block in curvature(optimizer).items():
        scales = block.average["scales"]
        torch.testing.assert_close(scales.reshape(expected[name].shape), expected[name])


def test_ekfac_step_divides_by_the_scales():
    x, y, delta = noise(5, 3), labels(3, 5), 0.1
    model = built(small_network)
    optimizer = KFAC(model, lr=1.0, delta=delta, momentum=0, kind="ekfac")
    gradient, step = take_step(model, optimizer, x, y)
    block = curvature(optimizer)["0"]
    V = torch.cat([gradient[:12].view(4, 3), gradient[12:16, None]], 1)
    U_S, U_A = block.inverse["outputs_basis"], block.inverse["inputs_basis"]
    expected = U_S @ ((U_S.T @ V @ U_A) / (block.average["scales"] + delta)) @ U_A.T
    torch.testing.assert_close(step[:12].view(4, 3), expected[:, :-1])


def test_rotated_scales_are_those_of_the_rotated_diagonal():
    optimizer = KFAC(built(small_network), kind="ekfac", **ALL_STEPS)
    model = small_network().double()
    optimizer = KFAC(model, lr=0.0, kind="ekfac", factor_every=2, inverse_every=1)
    take_step(model, optimizer, noise(5, 3), labels(3, 5))
    block = curvature(optimizer)["0"]
    new = {
        name: torch.linalg.qr(noise(*basis.shape, seed=3)).Q
        for name, basis in block.inverse.items()
        if name.endswith("basis")
    }
    old = torch.kron(block.inverse["outputs_basis"], block.inverse["inputs_basis"])
    turned = torch.kron(new["outputs_basis"], new["inputs_basis"])
    matrix = old @ torch.diag(block.average["scales"].flatten()) @ old.T
    block.rotate(new)
    expected = (turned.T @ matrix @ turned).diagonal()
    torch.testing.assert_close(block.average["scales"].flatten(), expected)


class Words(nn.Module):
    def __init__(self, padding=None):
        super().__init__()
        self.table = nn.Embedding(5, 3, padding_idx=padding)
        self.norm, self.last = nn.LayerNorm(3), nn.Linear(3, 4)

    def forward(self, ids):
        return self.last(self.norm(self.table(ids))).mean(1)


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
@pytest.mark.parametrize("padding", [None, 2])
def test_an_embedding_is_a_linear_layer_on_one_hot_inputs(kind, padding):
    class OneHot(nn.Module):
        def __init__(self, words):
            super().__init__()
            self.table = nn.Linear(5, 3, bias=False)
            self.norm, self.last = copy.deepcopy(words.norm), copy.deepcopy(words.last)
            self.table.weight.data = words.table.weight.data.T.clone()

        def forward(self, ids):
            hot = nn.functional.one_hot(ids, 5).double()
            return self.last(self.norm(self.table(hot))).mean(1)

    ids, y = labels(5, 6, 3, seed=4), labels(4, 6)
    if padding is not None:
        ids[ids == padding] = 0  # the rows of padding alone differ from one-hot inputs
    words = built(lambda: Words(padding))
    hot = OneHot(words)
    for model in (words, hot):
        optimizer = KFAC(model, lr=0.3, delta=0.1, kind=kind, damping="exact")
        take_step(model, optimizer, ids, y)
    torch.testing.assert_close(words.table.weight.T, hot.table.weight)
    torch.testing.assert_close(words.last.weight, hot.last.weight)


def test_padding_has_no_curvature():
    model = built(lambda: Words(2))
    optimizer = KFAC(model)
    take_step(model, optimizer, torch.tensor([[2, 0, 1], [2, 2, 4]]), labels(4, 2))
    inputs = curvature(optimizer)["table"].average["inputs"]
    torch.testing.assert_close(inputs, torch.tensor([1, 1, 0, 0, 1]).double() / 6)


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (lambda: nn.BatchNorm1d(3), (6, 3)),
        (lambda: nn.BatchNorm2d(3), (6, 3, 2, 2)),
        (lambda: nn.GroupNorm(3, 3), (6, 3, 2, 2)),
        (lambda: nn.LayerNorm(3), (6, 4, 3)),
        (lambda: nn.RMSNorm(3), (6, 4, 3)),
    ],
)
def test_a_norm_has_the_exact_block_of_each_feature(norm, shape):
    x, y, delta = noise(*shape), labels(2, 6), 0.05
    size = x[0].numel()
    model = built(lambda: nn.Sequential(norm(), nn.Flatten(), nn.Linear(size, 2)))
    statistics = {k: v.clone() for k, v in model.named_buffers()}
    once = copy.deepcopy(model)
    once(x)
    outputs = model[0](x).detach()  # z = (y - b) / w
    for name, value in statistics.items():
        dict(model.named_buffers())[name].copy_(value)
    optimizer = KFAC(model, lr=1.0, delta=delta, momentum=0)
    deltas = []
    model[0].register_forward_hook(
        lambda module, args, out: out.register_hook(lambda d: deltas.append(d * 6)) and None
    )
    weights = {key: p.detach().clone() for key, p in model[0].named_parameters()}
    _, step = take_step(model, optimizer, x, y)

    axis = -1 if isinstance(model[0], nn.LayerNorm | nn.RMSNorm) else 1
    view = [1] * x.ndim
    view[axis] = 3
    z = (outputs - weights.get("bias", torch.zeros(3)).view(view)) / weights["weight"].view(view)
    parts = [z * deltas[0], deltas[0]][: len(weights)]
    g = torch.stack([p.movedim(axis, 1).reshape(6, 3, -1).sum(2) for p in parts], 2)
    block = torch.einsum("nci,ncj->cij", g, g) / 6 + delta * torch.eye(len(weights)).double()
    gradient = g.mean(0)
    expected = torch.linalg.solve(block, gradient)
    torch.testing.assert_close(step[: expected.numel()], expected.T.flatten())
    # The running statistics are those of one forward pass.
    for name, value in once.named_buffers():
        assert torch.equal(dict(model.named_buffers())[name], value)


def test_positions_count_as_samples_or_are_reduced():
    x, y = noise(5, 4, 3), labels(2, 5)

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x).mean(1)

    found = {}
    for sharing in ("expand", "reduce"):
        model = built(Mean)
        optimizer = KFAC(model, weight_sharing=sharing, fisher="ggn")
        take_step(model, optimizer, x, y)
        found[sharing] = curvature(optimizer)["layer"].average
    ones = torch.cat([x, torch.ones(5, 4, 1)], 2)
    p = model(x).softmax(1).detach()
    ggn = (torch.diag_embed(p) - p[:, :, None] * p[:, None]).mean(0)
    flat_rows, means = ones.flatten(0, 1), ones.mean(1)
    torch.testing.assert_close(found["expand"]["inputs"], flat_rows.T @ flat_rows / 20)
    torch.testing.assert_close(found["reduce"]["inputs"], means.T @ means / 5)
    # Each position has the derivative 1/4 of the mean: the sum of squares is 1/4, that of sums 1.
    model = built(Mean)
    p = model(x).softmax(1).detach()
    ggn = (torch.diag_embed(p) - p[:, :, None] * p[:, None]).mean(0)
    torch.testing.assert_close(found["expand"]["outputs"], ggn / 4)
    torch.testing.assert_close(found["reduce"]["outputs"], ggn)


def test_reduce_is_exact_for_a_mean_over_positions():
    # A linear layer and a mean commute, so the network is softmax regression on means.
    x, y, delta = noise(1, 4, 3), labels(2, 1), 0.1

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x).mean(1)

    model = built(Mean)
    optimizer = KFAC(
        model, lr=1.0, delta=delta, momentum=0, weight_sharing="reduce", damping="exact"
    )
    gradient, step = take_step(model, optimizer, x, y)
    # One sample: the empirical Fisher matrix is g g'.
    expected = torch.linalg.solve(torch.outer(gradient, gradient) + delta * torch.eye(8), gradient)
    torch.testing.assert_close(step, expected)


# ------------------------------------------------------------------------------------------
# When factors and inverses change, and what else a step does.


def test_factors_and_inverses_are_updated_on_schedule():
    model = built(small_network)
    optimizer = KFAC(model, lr=0.1, factor_every=2, inverse_every=4)
    changes = []
    block, before = curvature(optimizer)["0"], {}
    for step in range(9):
        take_step(model, optimizer, noise(5, 3, seed=step), labels(3, 5, seed=step))
        now = {"factor": block.average["inputs"], "inverse": block.inverse["inputs_inverse"]}
        changes.append({k for k in now if not torch.equal(now[k], before.get(k, torch.zeros(1)))})
        before = {k: v.clone() for k, v in now.items()}
    expected = [{"factor", "inverse"}, set(), {"factor"}, set()]
    assert changes == [*expected, *expected, {"factor", "inverse"}]


def test_averages_are_plain_means_that_become_exponential():
    model = built(small_network)
    optimizer = KFAC(model, lr=0.0, factor_decay=0.5, **ALL_STEPS)
    moments = []
    for step in range(3):
        x = noise(4, 3, seed=step)
        take_step(model, optimizer, x, labels(3, 4))
        rows = torch.cat([x, torch.ones(4, 1)], 1)
        moments.append(rows.T @ rows / 4)
    expected = ((moments[0] + moments[1]) / 2 + moments[2]) / 2
    torch.testing.assert_close(curvature(optimizer)["0"].average["inputs"], expected)


def test_accumulated_batches_are_one_batch():
    x, y = noise(6, 2, 6, 6), labels(3, 6)
    found = []
    for cuts in ([6], [4, 2]):
        model = built(convolutional)
        optimizer = KFAC(model, lr=0.1, kind="ekfac")
        for part, target in zip(x.split(cuts), y.split(cuts), strict=True):
            (cross_entropy(model(part), target) * len(part) / 6).backward()
        optimizer.step()
        found.append(flat(model.parameters()))
    torch.testing.assert_close(*found)


def test_momentum_decay_and_clip_follow_their_formulas():
    settings = {"lr": 0.2, "delta": 0.1, "factor_every": 100}
    decay, rho, limit = 0.3, 0.8, 1e-3
    plain, full = built(small_network), built(small_network)
    bare = KFAC(plain, momentum=0, **settings)
    optimizer = KFAC(
        full, momentum=rho, nesterov=True, weight_decay=decay, kl_clip=limit, **settings
    )
    weights, buffer = flat(full.parameters()), 0.0
    for step in range(3):
        x, y = noise(5, 3, seed=step), labels(3, 5, seed=step)
        with torch.no_grad():
            nn.utils.vector_to_parameters(weights.clone(), plain.parameters())
        gradient, direction = take_step(plain, bare, x, y)
        take_step(full, optimizer, x, y)
        size = 0.2**2 * float(gradient @ direction)
        direction = direction * min(1.0, (limit / size) ** 0.5)
        assert size > limit  # the clip is at work
        buffer = rho * buffer + direction
        weights = (1 - 0.2 * decay) * weights - 0.2 * (direction + rho * buffer)
        torch.testing.assert_close(flat(full.parameters()), weights)


def test_coupled_decay_is_added_to_the_gradient():
    x, y = noise(5, 3), labels(3, 5)
    model = built(small_network)
    optimizer = KFAC(
        model, lr=1.0, momentum=0, weight_decay=0.1, decoupled_weight_decay=False, delta=0.1
    )
    bare = built(small_network)
    KFAC_bare = KFAC(bare, lr=1.0, momentum=0, delta=0.1)
    cross_entropy(bare(x), y).backward()
    for p in bare.parameters():
        p.grad.add_(p.detach(), alpha=0.1)
    KFAC_bare.step()
    take_step(model, optimizer, x, y)
    torch.testing.assert_close(flat(model.parameters()), flat(bare.parameters()))


def test_maximize_ascends():
    x, y = noise(5, 3), labels(3, 5)
    steps = []
    for sign in (False, True):
        model = built(small_network)
        steps.append(take_step(model, KFAC(model, lr=0.1, maximize=sign), x, y)[1])
    torch.testing.assert_close(steps[0], -steps[1])


def test_damping_can_be_scheduled():
    x, y = noise(5, 3), labels(3, 5)
    found = []
    for scheduled in (False, True):
        model = built(small_network)
        optimizer = KFAC(model, lr=0.1, delta=0.4 if scheduled else 0.1, damping="exact")
        if scheduled:
            GroupSchedule(optimizer, lambda step: 0.25, key="delta")
        take_step(model, optimizer, x, y)
        found.append(flat(model.parameters()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
@pytest.mark.parametrize("basis", ["eigh", "qr"])
def test_training_reduces_the_loss(kind, basis):
    x, y = noise(12, 2, 6, 6), labels(3, 12)
    model = built(convolutional)
    optimizer = KFAC(
        model, lr=0.1, delta=0.1, kind=kind, basis=basis, damping="exact", factor_every=2,
        inverse_every=2,
    )  # fmt: skip
    first = float(cross_entropy(model(x), y).detach())
    for _ in range(15):
        take_step(model, optimizer, x, y)
    assert float(cross_entropy(model(x), y).detach()) < first / 2


def test_tracked_eigenbases_converge_to_those_of_eigh():
    x, y = noise(12, 3), labels(3, 12)
    steps = {}
    for basis in ("eigh", "qr"):
        model = built(small_network)
        optimizer = KFAC(model, lr=0.0, basis=basis, damping="exact", delta=0.01, **ALL_STEPS)
        for _ in range(5):
            take_step(model, optimizer, x, y)
        steps[basis] = curvature(optimizer)["0"].inverse["inputs_values"].sort().values
    torch.testing.assert_close(*steps.values())


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


# ------------------------------------------------------------------------------------------
# What is captured, and what is not.


def test_evaluation_and_no_grad_capture_nothing():
    model = built(small_network)
    optimizer = KFAC(model)
    with torch.no_grad():
        model(noise(5, 3))
    model.eval()
    model(noise(5, 3)).sum().backward()
    model.train()
    with optimizer.paused():
        model(noise(5, 3)).sum().backward()
    assert not any(block.sums for block in curvature(optimizer).values())


def test_inputs_are_released_by_the_backward_pass():
    import weakref

    model = built(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    KFAC_ = KFAC(model)
    x = noise(5, 3)
    loss = cross_entropy(model(x), labels(3, 5))
    loss.backward()
    gone = weakref.ref(x)
    del x
    assert gone() is None
    assert KFAC_.curvature.capturing
    assert loss.grad_fn is not None  # the graph is still there


def test_in_place_activations_after_a_layer_are_seen_before_them():
    found = []
    for inplace in (False, True):
        model = built(lambda i=inplace: nn.Sequential(nn.Linear(3, 4), nn.ReLU(i), nn.Linear(4, 3)))
        for fisher in ("empirical", "ggn"):
            optimizer = KFAC(model, lr=0.0, fisher=fisher)
            take_step(model, optimizer, noise(5, 3), labels(3, 5))
            found.append(curvature(optimizer)["0"].average["outputs"])
            optimizer.curvature.remove()
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(found[1], found[3])


def test_a_gradient_scaler_does_not_change_the_factors():
    found = []
    for scale in (1.0, 1024.0):
        model = built(small_network).float()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = KFAC(model, lr=0.1, scaler=scaler, kind="ekfac")
        outputs = model(noise(5, 3).float())
        scaler.scale(cross_entropy(outputs, labels(3, 5))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append((flat(model.parameters()), curvature(optimizer)["0"].average["scales"]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_skipped_step_leaves_no_curvature():
    model = built(small_network).float()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = KFAC(model, lr=0.1, scaler=scaler)
    for bad in (True, False):
        optimizer.zero_grad()
        loss = cross_entropy(model(noise(5, 3).float()), labels(3, 5))
        scaler.scale(loss * (float("inf") if bad else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(v.isfinite().all() for b in curvature(optimizer).values() for v in b.sums.values())
    assert optimizer.curvature.steps == 1
    assert curvature(optimizer)["0"].inverse
    assert torch.isfinite(flat(model.parameters())).all()


def test_sums_that_are_not_finite_are_left_out():
    model = built(small_network)
    optimizer = KFAC(model, lr=0.1)
    (cross_entropy(model(noise(5, 3)), labels(3, 5)) * float("inf")).backward()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()  # plain gradients, and the next step captures again
    assert optimizer.curvature.capturing
    take_step(model, optimizer, noise(5, 3), labels(3, 5))
    assert curvature(optimizer)["0"].inverse
    assert torch.isfinite(flat(model.parameters())).all()


def test_gradients_that_are_cleared_leave_no_curvature():
    found = []
    for extra in (False, True):
        model = built(small_network)
        optimizer = KFAC(model, lr=0.1)
        if extra:
            cross_entropy(model(noise(7, 3, seed=5)), labels(3, 7)).backward()
        take_step(model, optimizer, noise(5, 3), labels(3, 5))
        found.append(flat(model.parameters()))
    assert torch.equal(*found)


def test_float16_needs_the_scaler():
    model = built(small_network).float()
    KFAC_ = KFAC(model)
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(ValueError, match="pass the GradScaler as scaler="),
    ):
        model(noise(5, 3).float())
    assert KFAC_.curvature.capturing


def test_autocast_captures_in_float32():
    model = built(small_network).float()
    optimizer = KFAC(model, lr=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(noise(5, 3).float())
    cross_entropy(outputs.float(), labels(3, 5)).backward()
    optimizer.step()
    assert curvature(optimizer)["0"].average["outputs"].dtype == torch.float32


# ------------------------------------------------------------------------------------------
# Hard cases.


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.attend = nn.MultiheadAttention(3, 1, batch_first=True)
        self.used = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, ids):
        x = self.used(self.embed(ids)) * self.scale
        return self.head(self.attend(x, x, x)[0].mean(1))


def test_unknown_and_tied_layers_have_the_plain_gradient_and_are_named_once():
    model = built(Odd)
    with pytest.warns(UserWarning, match="embed: it shares a parameter") as said:
        optimizer = KFAC(model, lr=1.0, momentum=0)
    assert len(said) == 1
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids, y = labels(5, 6, 3), labels(5, 6)
    cross_entropy(model(ids), y).backward()
    with pytest.warns(UserWarning, match=r"attend.out_proj: its parameters are used without"):
        optimizer.step()
    assert set(optimizer.plain) == {"the model", "embed", "head", "attend", "attend.out_proj"}
    for name, p in model.named_parameters():
        if p.grad is None:
            assert torch.equal(p, before[name])
        elif name.partition(".")[0] != "used":
            torch.testing.assert_close(before[name] - p.detach(), p.grad)
    cross_entropy(model(ids), y).backward()
    optimizer.step()  # no second warning


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
@pytest.mark.parametrize("damping", ["exact", "factored"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dead_units_single_samples_and_constant_inputs_give_finite_steps(kind, damping, dtype):
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)
    with torch.no_grad():
        model[0].bias.fill_(-100.0)  # all units are dead
    optimizer = KFAC(model, lr=0.1, delta=1e-8, kind=kind, damping=damping, **ALL_STEPS)
    for x in (torch.zeros(1, 3), torch.ones(4, 3), noise(1, 3)):
        take_step(model, optimizer, x.to(dtype), labels(3, len(x)))
    assert torch.isfinite(flat(model.parameters())).all()


def test_a_failed_decomposition_is_repeated_in_double_precision(monkeypatch):
    plain = torch.linalg.eigh

    def failing(matrix):
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("failed to converge")
        return plain(matrix)

    found = []
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(torch.linalg, "eigh", failing)
        model = built(small_network).float()
        optimizer = KFAC(model, lr=0.1, kind="ekfac")
        take_step(model, optimizer, noise(5, 3).float(), labels(3, 5))
        found.append(flat(model.parameters()))
    torch.testing.assert_close(*found)


def test_factors_below_the_normal_numbers_have_eigenvectors():
    model = built(small_network).float()
    optimizer = KFAC(model, lr=0.1, damping="exact")
    (1e-19 * cross_entropy(model(noise(5, 3).float()), labels(3, 5))).backward()
    optimizer.step()
    values = curvature(optimizer)["2"].inverse["outputs_values"]
    assert 0 < float(values.max()) < 1e-36
    assert torch.isfinite(flat(model.parameters())).all()


def test_frozen_parameters_are_left_out():
    model = built(small_network)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    optimizer = KFAC(model, lr=1.0, momentum=0, damping="exact", delta=0.1)
    x, y = noise(1, 3), labels(3, 1)
    cross_entropy(model(x), y).backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    for index, key in ((0, "bias"), (2, "weight")):
        p = getattr(model[index], key)
        g = p.grad.flatten()
        # One sample: g g' exactly.
        expected = torch.linalg.solve(torch.outer(g, g) + 0.1 * torch.eye(len(g)), g)
        step = before[f"{index}.{key}"] - p.detach()
        torch.testing.assert_close(step.flatten(), expected)


def test_a_layer_called_twice_sums_both_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(self.layer(x).tanh())

    model = built(Twice)
    x = noise(5, 3)
    optimizer = KFAC(model)
    middle = model.layer(x).tanh().detach()
    optimizer.curvature._arm()
    take_step(model, optimizer, x, labels(3, 5))
    rows = torch.cat([torch.cat([part, torch.ones(5, 1)], 1) for part in (x, middle)])
    inputs = curvature(optimizer)["layer"].average["inputs"]
    torch.testing.assert_close(inputs, rows.T @ rows / 10)


def test_a_layer_without_gradient_in_a_step_is_left_alone():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x, late=False):
            return self.b(x) if late else self.a(x)

    model = built(Branches)
    optimizer = KFAC(model, lr=0.1, **ALL_STEPS)
    before = model.b.weight.detach().clone()
    for late in (False, True):
        optimizer.zero_grad()
        cross_entropy(model(noise(5, 3), late), labels(2, 5)).backward()
        optimizer.step()
        assert torch.equal(before, model.b.weight) is not late
    assert curvature(optimizer)["b"].inverse


@pytest.mark.parametrize(
    ("shape", "make"),
    [
        ((3,), lambda: nn.Linear(3, 2)),
        ((2, 5), lambda: nn.Sequential(nn.Conv1d(2, 2, 5), nn.Flatten(0))),
    ],
)
def test_one_sample_without_an_axis_of_samples(shape, make):
    found = []
    for extra in (False, True):
        model = built(make)
        optimizer = KFAC(model, lr=0.1, damping="exact")
        x = noise(*shape)
        outputs = model(x[None] if extra else x)
        cross_entropy(outputs.reshape(1, 2), labels(2, 1)).backward()
        optimizer.step()
        found.append(flat(model.parameters()))
    if len(shape) == 1:  # elsewhere the first axis of the model is not that of samples
        torch.testing.assert_close(*found)
    assert torch.isfinite(found[0]).all()


def test_drawn_labels_give_the_gauss_newton_factor_on_average():
    x, y = noise(8, 3), labels(3, 8)
    model = built(small_network)
    exact = KFAC(model, lr=0.0, fisher="ggn")
    take_step(model, exact, x, y)
    expected = curvature(exact)["0"].average["outputs"].clone()
    exact.curvature.remove()
    optimizer = KFAC(model, lr=0.0, fisher="monte_carlo", factor_decay=1.0, **ALL_STEPS)
    samples, before = [], 0.0
    for step in range(200):
        take_step(model, optimizer, x, y)
        mean = curvature(optimizer)["0"].average["outputs"] * (step + 1)
        samples.append(mean - before)  # factor_decay=1 is a plain mean over all steps
        before = mean.clone()
    drawn = torch.stack(samples)
    assert ((drawn.mean(0) - expected).abs() <= 4 * drawn.std(0) / 200**0.5 + 1e-12).all()


# ------------------------------------------------------------------------------------------
# Errors.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delta": 0.0}, "delta must be finite and above 0, got 0.0"),
        ({"delta": float("nan")}, "delta must be at least 0.0, got nan"),
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"kind": "shampoo"}, "kind must be one of kfac, ekfac; got 'shampoo'"),
        ({"fisher": "true"}, "fisher must be one of ggn, monte_carlo, empirical"),
        ({"damping": "none"}, "damping must be one of exact, factored"),
        ({"factor_every": 0}, "factor_every must be at least 1, got 0"),
        ({"factor_decay": 2.0}, "factor_decay must be between 0.0 and 1.0, got 2.0"),
        ({"weight_sharing": "sum"}, "weight_sharing must be one of expand, reduce"),
        ({"precision": "bf16"}, "precision must be one of float32, tf32"),
        ({"kl_clip": -1.0}, "kl_clip must be at least 0.0, got -1.0"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov=True needs momentum above 0"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        KFAC(small_network(), **settings)


def test_misuse_is_explained():
    model = built(small_network)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got generator"):
        KFAC(model.parameters())
    with pytest.raises(TypeError, match="KFAC got unknown arguments eps"):
        KFAC(model, eps=1e-8)
    with pytest.raises(ValueError, match="weight has no shape yet"):
        KFAC(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="optimizer must not have a damping already"):
        KFACPreconditioner(torch.optim.SGD(KFAC(model).param_groups), model)
    optimizer = KFAC(model, fisher="ggn")
    cross_entropy(model(noise(5, 3)), labels(3, 5)).backward()
    with pytest.raises(RuntimeError, match=r"fisher='ggn' needs optimizer.observe"):
        optimizer.step()
    outputs = model(noise(5, 3))
    with pytest.raises(ValueError, match="loss_fn must be one whose Hessian in the outputs is"):
        optimizer.observe(outputs, labels(3, 5), nn.HuberLoss())
    model.eval()
    optimizer = KFAC(model)
    cross_entropy(model(noise(5, 3)), labels(3, 5)).backward()
    with pytest.raises(RuntimeError, match=r"call model.train\(\)"):
        optimizer.step()


def test_an_input_that_is_overwritten_is_named():
    model = built(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)))
    optimizer = KFAC(model, fisher="ggn")
    x = noise(5, 3)
    outputs = model(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="input of layer '0' was modified in place"):
        optimizer.observe(outputs, labels(3, 5), cross_entropy)


def test_no_warning_for_known_layers():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFAC(convolutional())
