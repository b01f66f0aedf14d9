import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

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


def test_printing_an_estimate_with_a_gradient_does_not_warn():
    mean = torch.tensor(2.0, requires_grad=True)
    assert str(replace(estimate(2.0, 0.5), mean=mean)).startswith("2.00 ± 0.50")


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
        (1.0, float("nan"), "1 ± ?"),
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


@pytest.mark.parametrize("truncation", [math.inf, math.nan])
def test_an_unknown_error_is_uncertain_also_without_a_tolerance(truncation):
    exact = Estimate.exact(1.0, method="", truncation=truncation)
    sampled = Estimate.of(torch.arange(3.0), method="", num_products=0, truncation=truncation)

    assert exact.status.outcome == sampled.status.outcome == "uncertain"
    assert "no sampling" in exact.status.message


def test_scaling_by_a_negative_factor_keeps_errors_positive():
    scaled = estimate(
        2.0, 0.5, truncation=torch.tensor(0.25), samples=torch.tensor([1.0, 3.0])
    ).scaled(-2)
    assert (float(scaled), float(scaled.stderr), float(scaled.truncation)) == (-4.0, 1.0, 0.5)
    assert scaled.samples.tolist() == [-2.0, -6.0]


def normal_quantiles(count):
    """Samples whose skewness is zero: they lie at quantiles of the normal distribution."""
    levels = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return 3.0 + torch.special.ndtri(levels)


@pytest.mark.parametrize(
    ("count", "excess"), [(2, 2.5), (8, 0.7), (16, 0.2), (64, 0.02), (1000, 0.001)]
)
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_the_interval_of_normal_samples_is_students_but_for_few_samples(count, excess, level):
    samples = normal_quantiles(count)
    found = Estimate.of(samples, method="probes", num_products=count).error(level)
    student = stats.t.ppf(0.5 + level / 2, count - 1) * float(samples.std()) / math.sqrt(count)
    # The skewness of few samples cannot be estimated, so their interval is wider.
    assert student * 0.98 <= float(found) <= student * (1 + excess)


@pytest.mark.parametrize(("count", "slack"), [(4, 0.16), (16, 0.03), (64, 0.01)])
def test_the_interval_of_normal_samples_contains_the_mean_with_its_probability(rng, count, slack):
    draws = torch.randn(count, 20_000, generator=rng, dtype=torch.float64)
    estimates = Estimate.of(draws, method="probes", num_products=count)
    for level in (0.8, 0.95, 0.99):
        low, high = estimates.interval(level)
        held = float(((low <= 0) & (high >= 0)).double().mean())
        assert level - 0.005 < held < level + slack


@pytest.mark.parametrize("count", [4, 8, 16, 32, 64])
def test_the_interval_of_quadratic_forms_of_rank_one_contains_their_mean(rng, count):
    skewed = torch.randn(count, 20_000, generator=rng, dtype=torch.float64).square()
    estimates = Estimate.of(skewed, method="probes", num_products=count)
    for level, least in ((0.95, 0.94), (0.999, 0.993)):
        low, high = estimates.interval(level)
        assert float(((low <= 1) & (high >= 1)).double().mean()) >= least


@pytest.mark.parametrize("count", [10, 12, 16, 20])
def test_two_values_of_few_samples_leave_room_for_a_third(rng, count):
    # (z_1 + z_2 + z_3 + z_4)^2 is 0, 4 or 16, and 16 only with probability 1/8.
    signs = 2.0 * torch.randint(0, 2, (count, 4000, 4), generator=rng, dtype=torch.float64) - 1
    estimate = Estimate.of(signs.sum(2).square(), method="", num_products=0)

    held = ((estimate.mean - 4).abs() <= estimate.error()).double().mean()

    assert float(held) > 0.94  # 0.87 to 0.93 without


def test_samples_of_three_values_have_the_plain_interval():
    two, three = (
        Estimate.of(torch.tensor(values, dtype=torch.float64), method="", num_products=0)
        for values in ([0, 0, 4, 4, 4, 4], [0, 0, 4, 4, 4, 3.9])
    )
    many = Estimate.of(two.samples.repeat(4), method="", num_products=0)

    assert float(two.error() / two.stderr) > 1.2 * float(three.error() / three.stderr)
    assert not many._unseen()


def test_the_interval_of_skewed_samples_is_wider(rng):
    skewed = torch.randn(12, 20_000, generator=rng, dtype=torch.float64).square()
    estimates = Estimate.of(skewed, method="probes", num_products=12)
    student = float(stats.t.ppf(0.975, 11)) * estimates.stderr
    held = [float(((estimates.mean - 1).abs() <= half).double().mean()) for half in
            (student, estimates.error())]  # fmt: skip
    # Student's interval of chi-squared samples is too short.
    assert held[0] < held[1] - 0.005
    assert held[1] > 0.9
    assert bool((estimates.error() >= student).all())
    # The error does not depend on the sign of the skewness.
    torch.testing.assert_close(estimates.scaled(-1).error(), estimates.error())


def test_the_truncation_is_added_in_full():
    samples = normal_quantiles(9)
    plain = Estimate.of(samples, method="probes", num_products=9)
    fixed = Estimate.of(samples, method="probes", num_products=9, truncation=0.5)
    for level in (0.0, 0.5, 0.99):
        torch.testing.assert_close(fixed.error(level), plain.error(level) + 0.5)


@pytest.mark.parametrize("count", [3, 4, 8])
def test_intervals_of_few_skewed_samples_grow_with_the_level(count):
    skewed = Estimate.of(torch.eye(count)[0].double(), method="probes", num_products=count)

    errors = [float(skewed.error(level)) for level in (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)]

    assert errors == sorted(errors)
    assert errors[0] >= 0


def test_intervals_of_level_zero_and_one():
    estimate = Estimate.of(normal_quantiles(9), method="probes", num_products=9, truncation=0.25)
    assert float(estimate.error(0.0)) == 0.25
    assert float(estimate.error(1.0)) == math.inf
    exact = Estimate.exact(2.0, method="exact", truncation=0.25)
    for level in (0.0, 0.95, 1.0):
        assert [float(end) for end in exact.interval(level)] == [1.75, 2.25]
    partly = torch.stack([normal_quantiles(9), torch.ones(9, dtype=torch.float64)], 1)
    found = Estimate.of(partly, method="probes", num_products=9)
    assert found.error(1.0).tolist() == [math.inf, 0.0]


def test_an_error_without_degrees_of_freedom_is_that_of_a_normal_distribution():
    known = replace(Estimate.exact(2.0, method="propagated"), stderr=torch.tensor(0.5).double())
    assert float(known.error(0.95)) == pytest.approx(0.5 * stats.norm.ppf(0.975))


@pytest.mark.parametrize("level", [-0.1, 1.1, math.nan])
def test_a_level_that_is_not_a_probability_is_refused(level):
    with pytest.raises(ValueError, match=r"level must be .*between 0\.0 and 1\.0"):
        Estimate.exact(2.0, method="exact").interval(level)


def test_an_unknown_truncation_makes_the_interval_infinite():
    estimate = Estimate.of(
        normal_quantiles(9), method="probes", num_products=9, truncation=math.inf
    )
    for level in (0.0, 0.5, 1.0):
        assert [float(end) for end in estimate.interval(level)] == [-math.inf, math.inf]


def test_equal_samples_have_an_interval_of_their_truncation():
    estimate = Estimate.of(
        torch.full((8,), 7.0, dtype=torch.float64),
        method="probes",
        num_products=8,
        truncation=0.5,
    )
    assert [float(end) for end in estimate.interval()] == [6.5, 7.5]


def test_an_interval_of_arrays_has_an_entry_for_each():
    samples = torch.stack([normal_quantiles(9), torch.full((9,), 2.0).double()], 1)
    truncation = torch.tensor([0.0, math.inf], dtype=torch.float64)
    estimate = Estimate.of(samples, method="probes", num_products=9, truncation=truncation)
    low, high = estimate.interval()
    single = Estimate.of(samples[:, 0], method="probes", num_products=9).interval()
    assert (float(low[0]), float(high[0])) == pytest.approx([float(end) for end in single])
    assert (float(low[1]), float(high[1])) == (-math.inf, math.inf)


@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e170, 1e300])
def test_the_interval_scales_with_the_samples(scale):
    samples = normal_quantiles(9) ** 3
    plain = Estimate.of(samples, method="probes", num_products=9)
    scaled = Estimate.of(samples * scale, method="probes", num_products=9)
    torch.testing.assert_close(scaled.error() / scale, plain.error())


def test_without_a_tolerance_a_known_error_is_completed():
    estimate = Estimate.of(normal_quantiles(9), method="probes", num_products=9)
    assert estimate.with_status(None) is estimate
    assert estimate.status == Status(outcome="completed", message="9 probes")


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_tolerance_is_reached_if_the_whole_interval_is_within_it(sign):
    estimate = Estimate.of(
        normal_quantiles(9), method="probes", num_products=9, truncation=0.1
    ).scaled(sign)
    relative = float(estimate.error()) / abs(float(estimate))
    assert estimate.with_status(relative * 1.001).status == Status(
        outcome="converged", message=f"relative error below {relative * 1.001:.2g}"
    )
    failed = estimate.with_status(relative * 0.999).status
    assert failed.outcome == "max_steps"
    assert failed.message == f"relative error {relative:.2g}, above rtol {relative * 0.999:.2g}"


def test_a_truncation_above_the_tolerance_is_never_converged():
    estimate = Estimate.exact(1.0, method="exact", truncation=0.2)
    assert estimate.with_status(0.1, "use more steps").status.outcome == "max_steps"
    assert estimate.with_status(0.1, "use more steps").status.advice == "use more steps"
    assert estimate.with_status(0.3).status.outcome == "converged"


def test_the_advice_is_the_square_of_the_missing_factor():
    samples = normal_quantiles(400)
    estimate = Estimate.of(samples, method="probes", num_products=400)
    rtol = float(estimate.error()) / float(estimate) / 3
    assert estimate.with_status(rtol).status.advice == "use about 9 times as many probes"
    # Half of what is allowed is truncation, so sampling has the other half.
    half = rtol * float(estimate) / 2
    mixed = Estimate.of(samples, method="probes", num_products=400, truncation=half)
    assert mixed.with_status(rtol).status.advice == "use about 36 times as many probes"
    # More probes do not help if the truncation is not allowed.
    for scale in (2, 2.1):
        fixed = Estimate.of(samples, method="probes", num_products=400, truncation=scale * half)
        assert fixed.with_status(rtol, "use more steps").status.advice == "use more steps"
        assert "more probes do not reduce it" in fixed.with_status(rtol).status.advice


@pytest.mark.parametrize("rtol", [None, 0.1, 1.0])
@pytest.mark.parametrize("truncation", [math.inf, math.nan])
def test_an_unknown_error_is_uncertain_with_and_without_a_tolerance(rtol, truncation):
    estimate = Estimate.of(
        normal_quantiles(9), method="probes", num_products=9, truncation=truncation
    ).with_status(rtol, "pass floor=")
    assert estimate.status.outcome == "uncertain"
    assert estimate.status.advice == "pass floor="
    assert not estimate.status.ok
    with pytest.raises(NotConvergedError, match="the error is unknown"):
        estimate.raise_if_failed()


def test_one_unknown_entry_makes_an_array_uncertain():
    estimate = Estimate.exact(
        torch.ones(3), method="exact", truncation=torch.tensor([0.0, math.inf, 0.0])
    )
    assert estimate.with_status(0.5).status.outcome == "uncertain"


def test_a_mean_of_zero_is_converged_only_without_an_error():
    assert Estimate.exact(0.0, method="exact").with_status(0.1).status.outcome == "converged"
    failed = Estimate.exact(0.0, method="exact", truncation=0.1).with_status(0.1).status
    assert (failed.outcome, failed.message) == ("max_steps", "relative error inf, above rtol 0.1")


def test_the_tolerance_of_an_array_is_that_of_its_norm():
    # Errors (0.3, 0.4) have norm 0.5, and the mean (3, 4) has norm 5.
    estimate = Estimate.exact(
        torch.tensor([3.0, 4.0]), method="exact", truncation=torch.tensor([0.3, 0.4])
    )
    assert estimate.with_status(0.101).status.outcome == "converged"
    assert estimate.with_status(0.099).status.outcome == "max_steps"
