import math

import pytest
import torch

from ritz._core.propagation import propagate
from ritz._core.results import Estimate


def sampled(mean, error, degrees=10):
    like = Estimate.exact(torch.as_tensor(mean, dtype=torch.float64), method="x")
    values = {"mean": like.mean, "truncation": torch.zeros_like(like.mean), "method": "x"}
    stderr = torch.as_tensor(error, dtype=torch.float64).expand(like.mean.shape)
    return Estimate(
        **values, stderr=stderr, degrees=degrees, num_products=0, status=like.status, seed=3
    )


def test_errors_of_a_linear_function_add_in_quadrature_and_truncations_add():
    x = sampled(1.0, 3.0)
    y = Estimate.exact(2.0, method="y", truncation=0.5)
    z = sampled(5.0, 4.0)

    found = propagate(lambda a, b, c: a + 2 * b - c, x, y, z, method="sum")

    assert (float(found), float(found.stderr), float(found.truncation)) == (0.0, 5.0, 1.0)
    assert (found.method, found.seed) == ("sum", 3)


def test_entries_of_arrays_have_their_own_errors():
    x, y = sampled([1.0, 2.0], [0.1, 0.2]), sampled(3.0, 0.3)

    found = propagate(lambda a, b: a * b, x, y, method="product")

    expected = torch.tensor([0.3, 0.6]).hypot(torch.tensor([0.3, 0.6])).double()
    torch.testing.assert_close(found.stderr, expected)


def test_degrees_of_freedom_are_those_of_welch_and_satterthwaite():
    x, y = sampled(1.0, 3.0, degrees=4), sampled(1.0, 1.0, degrees=9)

    found = propagate(torch.add, x, y, method="sum")

    # (9 + 1)^2 / (81/4 + 1/9) = 4.91
    assert found.degrees == 4
    assert propagate(torch.add, x, Estimate.exact(1.0, method="y"), method="sum").degrees == 4
    assert propagate(torch.exp, Estimate.exact(1.0, method="y"), method="exp").degrees == 0


def test_the_error_at_a_kink_is_not_zero():
    x = sampled(1.0, 0.5)

    found = propagate(lambda a: a.clamp(max=1.0), x, method="clamped")

    assert float(found.stderr) == pytest.approx(0.5)


def test_a_function_that_bends_has_the_larger_of_the_two_errors():
    found = propagate(lambda a: 1 / a, sampled(1.0, 0.5), method="inverse")

    assert float(found.stderr) == pytest.approx(1.0)  # 1/0.5 - 1, not 1 - 1/1.5


def test_an_error_across_the_end_of_the_domain_is_infinite():
    found = propagate(torch.sqrt, sampled(1.0, 2.0), method="root")

    assert math.isinf(float(found.stderr))
    nan = propagate(torch.sqrt, Estimate.exact(-1.0, method="x"), method="root")
    assert math.isinf(float(nan.truncation))


def test_skewed_samples_make_the_interval_of_a_function_as_wide_as_their_own():
    squares = torch.linspace(-2, 2, 12, dtype=torch.float64) ** 4
    x = Estimate.of(squares, method="x", num_products=0)

    found = propagate(lambda a: 2 * a, x, method="twice")

    assert float(x.error()) > 1.1 * 2.201 * float(x.stderr)  # Student's 95 % quantile for 11
    assert float(found.error()) == pytest.approx(2 * float(x.error()))
