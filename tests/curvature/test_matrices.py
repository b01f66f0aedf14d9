"""Every operator against dense matrices that were computed without the library."""

from functools import partial

import pytest
import torch
from curvature.networks import CASES, case, noise, seeded
from curvature.oracles import (
    dense_fisher,
    dense_ggn,
    dense_hessian,
    difference_hessian,
    second_derivatives,
)
from torch.func import grad

from ritz.curvature import (
    curvature_operator,
    fisher,
    fluctuation,
    ggn,
    gradient_covariance,
    hessian,
)
from ritz.curvature._shared import batch_products
from ritz.testing import check_operator

OPERATORS = {
    "hessian": (hessian, dense_hessian),
    "ggn": (ggn, dense_ggn),
    "empirical": (partial(fisher, kind="empirical"), dense_fisher),
    "covariance": (gradient_covariance, partial(dense_fisher, centred=True)),
}
# A trace takes a second or two: those of the rest differ from these in nothing.
TRACED = {
    "hessian": ["mlp", "quartic", "cnn eval", "cnn train", "residual recomputed", "layer norm",
                "group norm", "tied", "lstm", "encoder", "decoder", "loss inside", "adapter"],
    "ggn": ["mlp", "binary", "cnn train", "tied", "decoder"],
    "empirical": ["mlp", "cnn train"],
}  # fmt: skip
SAMPLED = ["mlp", "squared error", "binary", "quartic", "cnn train", "cnn recomputed", "layer norm",
           "tied", "lstm", "encoder", "decoder", "dictionaries", "adapter", "list"]  # fmt: skip


def close(found, expected, rtol=1e-10):
    """Equal to ``rtol`` of the largest entry."""
    torch.testing.assert_close(found, expected, rtol=0, atol=rtol * float(expected.abs().max()))


def eager_cases():
    for name in CASES:
        kinds = ["hessian", "ggn"] if case(name).outputs else ["hessian"]
        yield from ((name, kind) for kind in kinds)
    yield from ((name, kind) for name in SAMPLED for kind in ("empirical", "covariance"))


@pytest.mark.parametrize(("name", "kind"), list(eager_cases()))
def test_eager_products_equal_the_dense_matrix(name, kind):
    operator, dense = OPERATORS[kind]
    op = operator(case(name).risk(), engine="eager", block_size=8)
    expected = dense(case(name))
    if kind == "hessian":
        close(op.dense(), expected)
    check_operator(op, dense=expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for kind, names in TRACED.items() for name in names],
)
def test_linearized_products_equal_the_dense_matrix(name, kind):
    operator, dense = OPERATORS[kind]
    # Three columns at once, which is what the check multiplies by; then one by one.
    op = operator(case(name).risk(), engine="linearized", block_size=3)
    check_operator(op, dense=dense(case(name)), rtol=1e-10)
    assert op.products.plan in (
        "forward over reverse, linearized",
        "forward and reverse, linearized",
    )


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_the_formula(name):
    risk, loss = case(name).risk(), case(name).loss
    assert risk.loss() == pytest.approx(float(loss(case(name).theta)), rel=1e-13)
    assert torch.equal(risk.theta, case(name).theta)
    with second_derivatives():
        close(risk.gradient(), grad(loss)(risk.theta), rtol=1e-13)


@pytest.mark.parametrize("name", ["mlp", "cnn train", "layer norm", "lstm", "decoder", "tied"])
def test_finite_differences_agree_with_the_oracle_and_the_operator(name):
    expected = difference_hessian(case(name), step=1e-3)
    close(dense_hessian(case(name)), expected, rtol=1e-8)
    close(hessian(case(name).risk(), engine="eager").dense(), expected, rtol=1e-8)


@pytest.mark.parametrize("name", ["layer norm", "cnn train"])
def test_torch_still_computes_these_hessians_wrongly(name):
    """The day this fails, torch has changed: the oracle, and the products, may be chosen anew."""
    judge = difference_hessian(case(name), step=1e-3)
    theirs = torch.func.hessian(case(name).loss)(case(name).theta)
    gap = float((theirs - judge).abs().max() / judge.abs().max())
    assert gap > 1e-4
    close(dense_hessian(case(name)), judge, rtol=1e-8)


@pytest.mark.parametrize(("engine", "width"), [("eager", 1), ("eager", 4), ("linearized", 4)])
def test_blocks_of_convolutions_equal_their_columns(engine, width):
    op = hessian(case("cnn train").risk(), engine=engine, block_size=width)
    assert op.block_size == width
    block = noise(op.shape[0], 9)
    close(op @ block, dense_hessian(case("cnn train")) @ block)


@pytest.mark.parametrize(("name", "kind"), [("cnn recomputed", "hessian"), ("mlp", "ggn")])
def test_products_without_a_cache_are_equal_bit_for_bit(name, kind):
    risk = case(name).risk()
    block = noise(len(risk.theta), 9)
    kept = curvature_operator(risk, kind, engine="linearized")
    anew = curvature_operator(risk, kind, engine="linearized", memory=0)
    assert torch.equal(kept @ block, anew @ block)
    assert torch.equal(kept @ block, anew @ block)
    assert len(kept.products._cached) == risk.num_batches
    assert not anew.products._cached


@pytest.mark.parametrize("name", ["cnn train", "encoder"])
def test_products_are_repeatable_bit_for_bit(name):
    block = noise(len(case(name).theta), 3)
    first, second = (hessian(case(name).risk(), engine="eager") @ block for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_batches_and_their_fluctuations_sum_to_the_whole(kind):
    risk = case("regex").risk()
    dense = OPERATORS[kind][1](case("regex"))
    block = noise(len(risk.theta), 2)
    found = list(batch_products(risk, block, matrix=kind))
    assert sum(weight for weight, _ in found) == pytest.approx(1)
    close(sum(weight * product for weight, product in found), dense @ block)
    total = torch.zeros_like(block)
    for index, (weight, product) in enumerate(found):
        close(curvature_operator(risk.batch(index), kind, engine="eager") @ block, product)
        total += weight * (fluctuation(risk, risk.batch(index), matrix=kind) @ block)
    assert float(total.abs().max()) < 1e-14


@pytest.mark.parametrize("name", ["mlp", "squared error", "binary", "decoder"])
def test_the_mean_of_many_sampled_fishers_is_the_gauss_newton_matrix(name):
    vector, rng = noise(len(case(name).theta), 1), seeded(4)
    risk = case(name).risk()
    draws = torch.stack(
        [
            vector.T @ (fisher(risk, num_draws=20, generator=rng, engine="eager") @ vector)
            for _ in range(40)
        ]
    ).flatten()
    exact = float(vector.T @ dense_ggn(case(name)) @ vector)
    assert abs(float(draws.mean()) - exact) < 4 * float(draws.std()) / 40**0.5
    assert float(draws.std()) < exact
