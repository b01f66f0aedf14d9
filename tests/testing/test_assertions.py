import pytest
import torch
from matrices import seeded

from ritz._core.results import Estimate, Status
from ritz.operators import DiagonalOperator, FunctionOperator, LinearOperator
from ritz.testing import assert_within_stderr, check_operator


class Broken(LinearOperator):
    def __init__(self, product):
        super().__init__(4, dtype=torch.float64, device="cpu")
        self.product = product

    def _matmat(self, block):
        return self.product(block)


def changed_input(block):
    block.numpy()[...] *= 2.0  # torch does not see this
    return block.clone()


def moody():
    calls = iter(range(1000))
    return lambda block: block * (1 + next(calls))


ENTRIES = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
BROKEN = {
    "affine": (lambda block: block + 1, "linear"),
    "quadratic": (lambda block: block.square(), "linear"),
    "columns mixed": (lambda block: block * block[:1].sum().sign(), "linear|block equals columns"),
    "changes its input": (changed_input, "must not change its input"),
    "returns its input": (lambda block: block, "must be a new tensor"),
    "never twice the same": (moody(), "bit for bit"),
}


@pytest.mark.parametrize(("product", "match"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_contract_is_named(product, match):
    with pytest.raises(AssertionError, match=match):
        check_operator(Broken(product))


def test_asymmetry_fails():
    with pytest.raises(ValueError, match="must be symmetric"):
        check_operator(Broken(lambda block: block.cumsum(0)))


def test_a_matrix_other_than_the_expected_one_fails():
    op = DiagonalOperator(ENTRIES)
    check_operator(op)
    check_operator(op, dense=torch.diag(ENTRIES))
    with pytest.raises(AssertionError, match="dense match"):
        check_operator(op, dense=torch.diag(ENTRIES + 1e-6))
    check_operator(op, dense=torch.diag(ENTRIES + 1e-6), rtol=1e-4)


def test_the_test_vectors_come_from_the_generator():
    seen = []

    def product(block):
        seen.append(block.clone())
        return 2 * block

    op = FunctionOperator(product, n=3)
    check_operator(op, generator=seeded(1))
    check_operator(op, generator=seeded(1))
    assert torch.equal(seen[0], seen[len(seen) // 2])


def estimate(mean, stderr, truncation=0.0):
    return Estimate(
        mean=torch.tensor(mean),
        stderr=torch.tensor(stderr),
        truncation=torch.tensor(truncation).expand(torch.tensor(mean).shape),
        num_products=0,
        method="test",
        status=Status(outcome="completed", message="test"),
    )


def test_four_standard_errors_are_the_border():
    assert_within_stderr(estimate(1.39, 0.1), 1.0)
    with pytest.raises(AssertionError, match=r"off by 0.41, 4.1 standard errors"):
        assert_within_stderr(estimate(1.41, 0.1), 1.0)
    assert_within_stderr(estimate(1.41, 0.1), 1.0, sigmas=5.0)


def test_the_truncation_is_added_to_the_tolerance():
    assert_within_stderr(estimate(1.41, 0.1, 0.05), 1.0)


def test_no_standard_error_asks_for_equality_to_roundoff():
    assert_within_stderr(estimate(1.0, 0.0), 1.0)
    with pytest.raises(AssertionError, match="off by"):
        assert_within_stderr(estimate(1.001, 0.0), 1.0)


def test_one_entry_that_is_off_fails_the_whole():
    with pytest.raises(AssertionError, match="off by 1,"):
        assert_within_stderr(estimate([0.0, 1.0], [0.1, 0.1]), torch.zeros(2))


def test_a_mean_that_is_not_a_number_fails():
    with pytest.raises(AssertionError, match="off by nan"):
        assert_within_stderr(estimate(float("nan"), 0.1), 0.0)
