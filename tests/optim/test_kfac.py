"""K-FAC and EK-FAC against dense matrices: factors, damping and steps."""

import copy

import pytest
import torch
from optim.kfac_cases import (
    ALL_STEPS,
    built,
    convolutional,
    curvature,
    flat,
    labels,
    linear_network,
    noise,
    small_network,
    take_step,
)
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, mse_loss

from ritz import data
from ritz.curvature import Risk, kfac
from ritz.optim import KFAC, GroupSchedule

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


@pytest.mark.parametrize("factor", [1.2, 0.1, 10.0])
def test_factored_inverses_follow_a_damping_that_changes_much(factor):
    """Otherwise rules of the damping would act on inverses that are up to 100 steps old."""
    model, x, y = built(small_network), noise(5, 3), labels(3, 5)
    optimizer = KFAC(model, lr=0.1, delta=0.1)
    take_step(model, optimizer, x, y)
    block = curvature(optimizer)["0"]
    before = block.inverse["inputs_inverse"].clone()

    optimizer.param_groups[0]["delta"] = 0.1 * factor
    take_step(model, optimizer, x, y)

    assert torch.equal(before, block.inverse["inputs_inverse"]) == (factor == 1.2)


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


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_default_settings_train_a_network_on_digits(kind):
    torch.manual_seed(0)
    inputs, classes = data.load("digits").train.tensors()
    inputs = ((inputs - inputs.mean()) / inputs.std()).flatten(1)
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    model = nn.Sequential(*layers)
    optimizer = KFAC(model, kind=kind)

    for _ in range(80):
        some = torch.randint(len(classes), (64,))
        take_step(model, optimizer, inputs[some], classes[some])

    with torch.no_grad():
        assert cross_entropy(model(inputs), classes) < 0.2


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
