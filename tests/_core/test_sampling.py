"""Averages over probes: how many are drawn, when sampling stops, and what is exact."""

import pytest
import torch
from matrices import hidden, seeded

from ritz._core.blocks import column_dots
from ritz._core.results import Estimate, Status, stderr
from ritz._core.sampling import ALIKE, Samples, Sampling, check_samples, doubling, is_settled
from ritz.testing import with_spectrum


@pytest.fixture
def op():
    return hidden(with_spectrum(torch.linspace(-1, 2, 40, dtype=torch.float64)).matrix)


def test_stderr_is_that_of_the_mean_and_unknown_for_one_sample():
    samples = torch.tensor([[1.0, 5.0], [3.0, 5.0]], dtype=torch.float64)
    assert stderr(samples).tolist() == [1.0, 0.0]
    assert stderr(samples[:1]).isnan().all()


def mean_of(samples):
    """The mean of the samples as an Estimate."""
    return samples.estimate(method="test", num_products=len(samples.values), truncation=0.0, seed=0)


def run(plan, op, measure, finish=mean_of, **more):
    return plan.run(op, measure, finish, generator=seeded(0), progress=False, label="test", **more)


def test_probes_are_drawn_one_after_another_whatever_the_block(op):
    def sample(width):
        widths = []

        def measure(block):
            widths.append(block.shape[1])
            return block[:3].T

        estimate = run(Sampling(7, block_size=width), op, measure)
        assert estimate.status == Status(outcome="completed", message="7 probes")
        return estimate.samples, widths

    narrow, wide = sample(2), sample(100)
    assert torch.equal(narrow[0], wide[0])
    assert (narrow[1], wide[1]) == ([2, 2, 2, 1], [7])


def test_the_least_number_of_probes_is_taken_even_if_fewer_would_do(op):
    plan = Sampling(13, rtol=0.5, max_probes=30, block_size=2)
    estimate = run(plan, op, lambda block: torch.ones(block.shape[1]))
    assert (len(estimate.samples), estimate.status.outcome) == (13, "converged")


def test_probes_are_doubled_until_the_interval_is_narrow_enough(op):
    plan = Sampling(4, rtol=0.2, max_probes=30)
    looks = []

    def finish(samples):
        looks.append(len(samples.values))
        return mean_of(samples)

    # One plus half a random sign: the 95 % interval of 30 samples is 0.19 wide.
    estimate = run(plan, op, lambda block: 1 + 0.5 * block[0], finish)
    assert looks[:3] == [4, 8, 16]
    assert estimate.status.ok == (float(estimate.error()) <= 0.2 * abs(float(estimate)))


def test_sampling_stops_at_once_if_the_truncation_exceeds_the_tolerance(op):
    def finish(samples):
        return Estimate.of(
            samples.values, method="test", num_products=len(samples.values), truncation=0.5
        )

    plan, products = Sampling(8, rtol=0.1, max_probes=30), []

    def measure(block):
        products.append(block.shape[1])
        return 1 + 0.01 * block[0]

    estimate = run(plan, op, measure, finish)
    assert sum(products) == 8
    assert estimate.status.outcome == "max_steps"


@pytest.mark.parametrize("probes", [40, 41, 1000])
def test_as_many_probes_as_rows_are_a_whole_basis_and_exact(op, probes):
    blocks = []

    def measure(block):
        blocks.append(block)
        return column_dots(block, op.matmat(block))

    estimate = run(Sampling(probes, block_size=16), op, measure)
    basis = torch.cat(blocks, 1)
    torch.testing.assert_close(basis @ basis.T, 40 * torch.eye(40, dtype=torch.float64))
    assert float(estimate) == pytest.approx(20.0, rel=1e-12)
    assert (float(estimate.stderr), estimate.degrees, estimate.samples) == (0.0, 0, None)
    assert "with a whole basis in place of random probes" in estimate.method


def test_a_tolerance_that_needs_more_probes_than_rows_is_reached_by_a_whole_basis(op):
    plan = Sampling(8, rtol=1e-6, max_probes=100)
    estimate = run(plan, op, lambda block: column_dots(block, op.matmat(block)))
    assert float(estimate) == pytest.approx(20.0, rel=1e-12)
    assert estimate.status.outcome == "converged"


@pytest.mark.parametrize(
    ("first", "limit", "counts"),
    [(4, 4, [4]), (4, 30, [4, 8, 16, 30]), (4, 32, [4, 8, 16, 32]), (8, 5, [5]), (1, 2, [1, 2])],
)
def test_numbers_of_probes_double_up_to_a_limit(first, limit, counts):
    assert doubling(first, limit) == counts


@pytest.mark.parametrize(
    ("probes", "rtol", "limit", "n", "looks"),
    [
        (8, None, 1000, 100, [8]),
        (8, None, 1000, 8, [8]),  # a whole basis
        (9, None, 1000, 8, [8]),
        (8, 0.1, 50, 100, [8, 16, 32, 50]),
        (8, 0.1, 50, 20, [8, 16, 20]),  # the last is a whole basis
        (8, 0.1, 16, 16, [8, 16]),
    ],
)
def test_the_error_is_judged_at_few_numbers_of_probes(probes, rtol, limit, n, looks):
    assert Sampling(probes, rtol, limit).looks(n) == looks


def test_sampling_ends_when_it_converged_or_cannot():
    values = torch.tensor([0.9, 1.1] * 8, dtype=torch.float64)

    def settled(rtol, truncation):
        estimate = Estimate.of(values, method="test", num_products=16, truncation=truncation)
        return is_settled(estimate.with_status(rtol), rtol)

    assert settled(None, 0.0)  # no tolerance
    assert settled(0.1, 0.0)  # converged
    assert not settled(0.01, 0.0)  # more probes help
    assert settled(0.01, 0.02)  # more probes do not
    assert settled(0.01, torch.inf)


@pytest.mark.parametrize("count", range(2, 14))
def test_few_equal_samples_have_an_unknown_error(count):
    estimate = mean_of(Samples(torch.full((count,), 7.0, dtype=torch.float64))).with_status(0.1)
    known = count >= ALIKE
    assert estimate.status.outcome == ("converged" if known else "uncertain")
    assert float(estimate.truncation) == (0.0 if known else torch.inf)


def test_only_the_entries_with_equal_samples_are_unknown():
    values = torch.tensor([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], dtype=torch.float64)
    assert mean_of(Samples(values)).truncation.tolist() == [torch.inf, 0.0]


def test_samples_that_are_not_finite_name_their_probe():
    check_samples(torch.ones(3, 2), 0)
    with pytest.raises(ValueError, match="the product with probe 12 has"):
        check_samples(torch.tensor([[1.0, 1.0], [1.0, float("inf")]]), 10)
