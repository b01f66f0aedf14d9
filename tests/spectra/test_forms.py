import math

import pytest
import torch

from ritz.spectra._functions.quadrature import Brackets, Forms, Known

PLAIN = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], dtype=torch.float64)
ODD = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)


def forms(mixed):
    zeros = torch.zeros_like(mixed)
    return Forms(Brackets(mixed, mixed, mixed, zeros), PLAIN[: len(mixed)], 3, 3 * len(mixed))


def test_the_control_variate_removes_the_regression_and_counts_its_degree_of_freedom():
    mixed = 2 * PLAIN + 0.1 * ODD
    found, how = forms(mixed).samples(lambda: Known(4.0, 0.0))
    assert "controlled by the trace" in how
    spread = PLAIN - PLAIN.mean()
    slope = float((spread * mixed).sum() / spread.square().sum())
    assert float(found.mean()) == pytest.approx(float(mixed.mean()) - slope * (5.0 - 4.0))
    left = mixed - mixed.mean() - slope * spread
    # Of nine numbers a mean and a slope leave seven free.
    assert float(found.std()) == pytest.approx(math.sqrt(float(left.square().sum()) / 7))


@pytest.mark.parametrize(
    ("mixed", "known"),
    [
        (2 * PLAIN, None),
        (2 * PLAIN, Known(4.0, 0.1)),  # a difference of large numbers: more noise than it is worth
        (ODD, Known(4.0, 0.0)),  # which the trace does not explain
        (2 * PLAIN[:7], Known(4.0, 0.0)),  # too few for a slope
    ],
    ids=["unknown", "noisy", "unrelated", "few"],
)
def test_samples_are_unchanged_if_the_trace_does_not_help(mixed, known):
    found, how = forms(mixed).samples(lambda: known)
    assert torch.equal(found, mixed)
    assert how == ""
