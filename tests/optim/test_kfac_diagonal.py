"""Factors of large order that are diagonal, against dense matrices."""

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
    noise,
    take_step,
)
from torch import nn
from torch.nn.functional import cross_entropy

from ritz.optim import KFAC

LIMITS = {"all": 0, "inputs": 5, "some inputs": 17}


def matrix(factor, groups):
    """A factor as a matrix for each group."""
    lead = factor if groups > 1 else factor.unsqueeze(0)
    return torch.diag_embed(lead) if lead.ndim == 2 else lead


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_large_factors_are_the_diagonals_of_whole_ones(limit):
    averages = []
    for max_order in (None, limit):
        model = built(convolutional)
        optimizer = KFAC(model, max_order=max_order)
        take_step(model, optimizer, noise(6, 2, 6, 6), labels(3, 6))
        averages.append({name: block.average for name, block in curvature(optimizer).items()})
    for whole, found in zip(averages[0].values(), averages[1].values(), strict=True):
        for name in ("inputs", "outputs"):
            factor = whole[name]
            large = factor.shape[-1] > limit
            expected = factor.diagonal(dim1=-2, dim2=-1) if large else factor
            torch.testing.assert_close(found[name], expected)


@pytest.mark.parametrize("damping", ["exact", "factored"])
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_steps_are_those_of_the_dense_formula(damping, limit):
    delta, model = 0.02, built(convolutional)
    settings = {"lr": 1.0, "delta": delta, "momentum": 0, "damping": damping}
    optimizer = KFAC(model, max_order=limit, **settings)
    before = copy.deepcopy(model.state_dict())
    take_step(model, optimizer, noise(6, 2, 6, 6), labels(3, 6))

    for name, block in curvature(optimizer).items():
        groups = getattr(block.module, "groups", 1)

        def by_group(tensors, groups=groups):
            return torch.cat([t.reshape(groups, len(t) // groups, -1) for t in tensors], 2)

        V = by_group([p.grad for p in block.params.values()])
        step = by_group([before[f"{name}.{k}"] - p.detach() for k, p in block.params.items()])
        factors = [matrix(block.average[k], groups) for k in ("inputs", "outputs")]
        for A, S, gradient, change in zip(*factors, V, step, strict=True):
            if damping == "exact":
                dense = torch.kron(S, A) + delta * torch.eye(len(A) * len(S))
            else:
                pi = ((A.trace() / len(A)) / (S.trace() / len(S))).sqrt()
                S = S + delta**0.5 / pi * torch.eye(len(S))
                dense = torch.kron(S, A + delta**0.5 * pi * torch.eye(len(A)))
            expected = torch.linalg.solve(dense, gradient.flatten()).view_as(gradient)
            torch.testing.assert_close(change, expected)


def test_ekfac_of_diagonal_factors_has_the_second_moments_of_sample_gradients():
    model, x, y = built(lambda: nn.Linear(4, 3)), noise(7, 4), labels(3, 7)
    optimizer = KFAC(model, lr=0.0, kind="ekfac", max_order=0, **ALL_STEPS)

    take_step(model, optimizer, x, y)

    delta = torch.softmax(model(x).detach(), 1) - nn.functional.one_hot(y, 3)
    rows = torch.cat([x, torch.ones(7, 1)], 1)
    expected = (delta[:, :, None] * rows[:, None]).square().mean(0)
    torch.testing.assert_close(curvature(optimizer)[""].average["scales"], expected)


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_a_resumed_run_takes_the_same_steps(kind):
    def build():
        model = built(convolutional)
        return model, KFAC(model, lr=0.1, kind=kind, max_order=10, factor_every=2)

    model, optimizer = build()
    other, resumed = build()
    for step in range(6):
        if step == 3:
            other.load_state_dict(model.state_dict())
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        x, y = noise(5, 2, 6, 6, seed=step), labels(3, 5, seed=step)
        for one, each in ((model, optimizer), (other, resumed)):
            take_step(one, each, x, y)
    assert torch.equal(flat(model.parameters()), flat(other.parameters()))


def test_a_state_with_another_limit_names_the_layer():
    whole, diagonal = (KFAC(built(convolutional), max_order=limit) for limit in (None, 0))
    model = built(convolutional)
    optimizer = KFAC(model)
    take_step(model, optimizer, noise(5, 2, 6, 6), labels(3, 5))
    whole.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="curvature of layer '0' was saved with other settings"):
        diagonal.load_state_dict(optimizer.state_dict())


def test_small_and_large_batches_of_a_step_add_up():
    # A linear layer with many inputs for each row keeps the rows of a batch until the step.
    x, y, found = noise(9, 24), labels(3, 9), []
    for cuts in ([9], [1, 2, 6], [3, 3, 3]):
        model = built(lambda: nn.Linear(24, 3))
        optimizer = KFAC(model, lr=0.1, **ALL_STEPS)
        for _ in range(2):
            optimizer.zero_grad()
            for part, target in zip(x.split(cuts), y.split(cuts), strict=True):
                (cross_entropy(model(part), target) * len(part) / 9).backward()
            optimizer.step()
        found.append(flat(model.parameters()))
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_max_order_is_checked():
    with pytest.raises(ValueError, match="max_order must be at least 0, got -1"):
        KFAC(nn.Linear(2, 2), max_order=-1)
