"""Ghost batch norm against batch norm on the groups, one after another."""

import copy

import pytest
import torch
from models.tiny import sample, tiny, wave
from torch import nn

import ritz
from ritz._core.batch_norm import batch_norms, evaluating, recomputed_statistics
from ritz.models import GhostBatchNorm1d, GhostBatchNorm2d, with_ghost_batch_norm
from ritz.models._ghost import group_sizes

SHAPES = [(11, 3), (11, 3, 4), (11, 3, 4, 2)]


def pair(shape, size, **options):
    """A ghost and a batch norm with the same weights."""
    kinds = (
        (GhostBatchNorm2d, nn.BatchNorm2d)
        if len(shape) == 4
        else (GhostBatchNorm1d, nn.BatchNorm1d)
    )
    ghost, plain = kinds[0](3, size, **options).double(), kinds[1](3, **options).double()
    with torch.no_grad():
        for layer in (ghost, plain):
            for index, parameter in enumerate(layer.parameters()):
                parameter.copy_(1 + 0.3 * wave(3, phase=index))
    return ghost, plain


@pytest.mark.parametrize(
    ("samples", "size", "expected"),
    [(12, 4, [4, 4, 4]), (11, 4, [4, 4, 3]), (9, 4, [4, 5]), (5, 4, [5]), (3, 4, [3]), (1, 4, [1])],
)
def test_a_single_remaining_sample_joins_the_previous_group(samples, size, expected):
    assert group_sizes(samples, size) == expected


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_training_is_batch_norm_on_each_group_in_turn(shape, momentum):
    ghost, plain = pair(shape, 4, momentum=momentum)
    x = wave(*shape).requires_grad_()
    expected = torch.cat([plain(part) for part in x.split([4, 4, 3])])
    found = ghost(x)
    torch.testing.assert_close(found, expected)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(ghost.state_dict()[key], value)
    target = wave(*shape, phase=1.0)
    torch.testing.assert_close(
        *(torch.autograd.grad((y * target).sum(), x)[0] for y in (found, expected))
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_eval_mode_and_state_are_those_of_batch_norm(shape):
    ghost, plain = pair(shape, 4)
    plain(wave(*shape))
    ghost.load_state_dict(plain.state_dict())
    torch.testing.assert_close(ghost.eval()(wave(*shape)), plain.eval()(wave(*shape)))
    assert ghost.state_dict().keys() == plain.state_dict().keys()


def test_without_running_statistics_groups_have_their_own_in_eval_mode_too():
    ghost, plain = pair((11, 3), 4, track_running_stats=False)
    expected = torch.cat([plain(part) for part in wave(11, 3).split([4, 4, 3])])
    torch.testing.assert_close(ghost.eval()(wave(11, 3)), expected)


def test_a_group_as_large_as_the_batch_is_batch_norm():
    ghost, plain = pair((11, 3), 64)
    torch.testing.assert_close(ghost(wave(11, 3)), plain(wave(11, 3)))


def test_batch_statistics_are_those_of_groups_and_change_no_buffer():
    ghost, plain = pair((11, 3), 4)
    ghost.eval()
    before = copy.deepcopy(ghost.state_dict())
    with evaluating(ghost, batch_statistics=True):
        found = ghost(wave(11, 3))
    assert not ghost.training
    for key, value in before.items():
        assert torch.equal(ghost.state_dict()[key], value)
    expected = torch.cat([plain(part) for part in wave(11, 3).split([4, 4, 3])])
    torch.testing.assert_close(found, expected)


def test_recomputed_statistics_are_those_of_the_samples():
    ghost, _ = pair((11, 3), 4)
    x = wave(11, 3)
    with evaluating(ghost, batch_statistics=True):
        found = recomputed_statistics(ghost, ghost, [(x, 1.0)])
    torch.testing.assert_close(found["running_mean"], x.mean(0))
    torch.testing.assert_close(found["running_var"], x.var(0))


def test_recomputed_statistics_use_the_outputs_of_the_groups_below():
    model = nn.Sequential(GhostBatchNorm1d(3, 4), nn.ReLU(), GhostBatchNorm1d(3, 4)).double()
    x = wave(12, 3)
    with evaluating(model, batch_statistics=True):
        inner = torch.relu(model[0](x)).detach()
        found = recomputed_statistics(model, model, [(x, 1.0)])
    torch.testing.assert_close(found["2.running_mean"], inner.mean(0))


@pytest.mark.parametrize("mode", ["train", "eval", "recomputed"])
def test_hessian_products_are_right_with_ghost_batch_norm(mode):
    model = with_ghost_batch_norm(
        nn.Sequential(nn.Linear(9, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)).double(), 4
    )
    x, y = wave(11, 9), torch.arange(11) % 3
    loss_fn = nn.functional.cross_entropy
    risk = ritz.Risk(model, loss_fn, (x, y), batch_norm=mode, batch_size=11)
    v = wave(len(risk.theta), phase=2.0)
    found = ritz.hessian(risk) @ v
    if mode == "recomputed":
        model[1].running_mean.copy_(model[0](x).detach().mean(0))
        model[1].running_var.copy_(model[0](x).detach().var(0))
    with evaluating(model, batch_statistics=mode == "train"):
        loss = loss_fn(model(x), y)
    params = list(model.parameters())
    first = torch.autograd.grad(loss, params, create_graph=True)
    along = sum((g.reshape(-1) @ part) for g, part in
                zip(first, v.split([p.numel() for p in params]), strict=True))  # fmt: skip
    second = torch.autograd.grad(along, params)
    expected = torch.cat([part.reshape(-1) for part in second])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


# Replacing


@pytest.mark.parametrize("name", ["vgg11_bn", "preresnet8", "resnet18"])
def test_every_batch_norm_of_a_model_is_replaced(name):
    model, (x, _) = tiny(name), sample(name, batch=6)
    plain = copy.deepcopy(model)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert with_ghost_batch_norm(model, 3) is model
    assert batch_norms(model).keys() == batch_norms(plain).keys()
    assert all(type(layer) is GhostBatchNorm2d for layer in batch_norms(model).values())
    for key, tensor in (dict(model.named_parameters()) | dict(model.named_buffers())).items():
        assert tensor is tensors[key]
    assert torch.equal(model.eval()(x), plain.eval()(x))
    expected = torch.cat([plain.train()(part) for part in x.split(3)])
    torch.testing.assert_close(model.train()(x), expected)


def test_a_shared_layer_stays_shared_and_existing_ghosts_get_the_new_size():
    norm = nn.BatchNorm1d(3)
    model = with_ghost_batch_norm(nn.Sequential(norm, nn.Linear(3, 3), norm).eval(), 4)
    assert model[0] is model[2]
    assert not model[0].training
    assert with_ghost_batch_norm(model, 8)[0].size == 8
    assert "size=8" in repr(model)


def test_a_model_that_is_itself_a_batch_norm_is_converted():
    norm = nn.BatchNorm2d(3)
    ghost = with_ghost_batch_norm(norm, 4)
    assert isinstance(ghost, GhostBatchNorm2d)
    assert ghost.weight is norm.weight


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="size must be at least 2, got 1"):
        GhostBatchNorm2d(3, 1)
    with pytest.raises(TypeError, match=r"size must be an integer, got 2\.5"):
        with_ghost_batch_norm(nn.Linear(1, 1), 2.5)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
        with_ghost_batch_norm(3, 4)
    with pytest.raises(TypeError, match="1d or 2d, but 0 is a BatchNorm3d"):
        with_ghost_batch_norm(nn.Sequential(nn.BatchNorm3d(2)), 4)
    with pytest.raises(ValueError, match="expected 4D input"):
        GhostBatchNorm2d(3, 2)(torch.ones(4, 3))
