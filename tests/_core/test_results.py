import pytest
import torch

from ritz._core.results import Estimate, NotConvergedError, Status, format_uncertain

DONE = Status(outcome="completed", message="8 probes")


def estimate(mean, stderr, **more):
    return Estimate(
        mean=torch.tensor(mean),
        stderr=torch.tensor(stderr),
        truncation=more.pop("truncation", torch.zeros(torch.tensor(mean).shape)),
        num_products=8,
        method="hutchinson",
        status=more.pop("status", DONE),
        **more,
    )


@pytest.mark.parametrize("outcome", ["completed", "converged", "breakdown"])
def test_outcomes_that_are_ok_do_not_raise(outcome):
    status = Status(outcome=outcome, message="so it was")
    status.raise_if_failed()
    assert status.ok


def test_a_failure_raises_with_message_and_advice():
    for outcome in ("max_steps", "uncertain"):
        status = Status(outcome=outcome, message="residual 1e-2", advice="raise num_steps")
        assert not status.ok
        with pytest.raises(NotConvergedError, match=f"^{outcome}: residual 1e-2"):
            status.raise_if_failed()
    with pytest.raises(NotConvergedError, match=r"residual 1e-2 \(raise num_steps\)"):
        estimate(1.0, 0.5, status=status).raise_if_failed()


def test_an_estimate_converts_to_float():
    assert float(estimate(2.5, 0.1)) == 2.5


def test_text_of_an_estimate():
    assert str(estimate(2.5, 0.125)) == "2.50 ± 0.12  [hutchinson, 8 products; completed: 8 probes]"
    bracketed = estimate(2.5, 0.125, truncation=torch.tensor(0.01))
    assert "truncation 0.01" in str(bracketed)
    assert "shape (2,), largest stderr 0.3" in str(estimate([1.0, 2.0], [0.1, 0.3]))


@pytest.mark.parametrize(
    ("mean", "stderr", "text"),
    [
        (123.456, 0.78, "123.46 ± 0.78"),
        (123456.0, 250.0, "123456 ± 250"),
        (-0.001234, 0.000056, "-0.001234 ± 0.000056"),
        (1.5, 0.0, "1.5"),
        (3e12, 2e10, "3e+12 ± 2e+10"),
        (1e-20, 3e-22, "1e-20 ± 3e-22"),
        (1.0, float("inf"), "1 ± inf"),
        (float("nan"), 0.0, "nan"),
    ],
)
def test_the_error_sets_the_number_of_digits(mean, stderr, text):
    assert format_uncertain(mean, stderr) == text


def test_an_estimate_of_samples_has_their_mean_and_standard_error():
    samples = torch.tensor([[1.0, 2.0], [3.0, 2.0], [5.0, 2.0]])
    mean = Estimate.of(samples, method="probes", num_products=3, seed=7)
    torch.testing.assert_close(mean.mean, torch.tensor([3.0, 2.0]))
    torch.testing.assert_close(mean.stderr, torch.tensor([2 / 3**0.5, 0.0]))
    assert (mean.status.message, mean.seed) == ("3 probes", 7)


def test_an_exact_estimate_has_no_error():
    exact = Estimate.exact(2.5, method="exact, by structure")
    assert (float(exact), float(exact.stderr), float(exact.truncation)) == (2.5, 0.0, 0.0)
    assert (exact.samples, exact.degrees) == (None, 0)
    assert exact.mean.dtype == torch.float64


def test_scaling_by_a_negative_factor_keeps_errors_positive():
    scaled = estimate(
        2.0, 0.5, truncation=torch.tensor(0.25), samples=torch.tensor([1.0, 3.0])
    ).scaled(-2)
    assert (float(scaled), float(scaled.stderr), float(scaled.truncation)) == (-4.0, 1.0, 0.5)
    assert scaled.samples.tolist() == [-2.0, -6.0]
