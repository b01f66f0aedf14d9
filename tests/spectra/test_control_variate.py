"""The exact trace as control variate of sampled quadratic forms."""

import math

import pytest
import torch
from matrices import seeded

from ritz._core.progress import tracking
from ritz.operators import DenseOperator
from ritz.spectra._functions.quadrature import Budget, Known, Projections, Sampler

PLAIN = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], dtype=torch.float64)
ODD = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)


def line(values):
    """Twice the argument."""
    return 2 * values


def zigzag(values):
    """A function of the integers 1 to 9 that is hardly correlated with them."""
    return ODD[(values.round().long() - 1).clamp(0, 8)]


def estimate(function, known, count=9):
    """Sample quadratic forms of the function that are its values at PLAIN."""
    budget = Budget(100, None, 0, None, None, seeded(0), False)
    spaces = Projections(PLAIN[:count, None, None], torch.zeros(count, 1, 1).double(), 0.0)
    with tracking(False, "", None) as bar:
        return Sampler(
            op=DenseOperator(torch.eye(1, dtype=torch.float64)),
            draw=lambda number: torch.ones(1, number, dtype=torch.float64),
            function=function,
            budget=budget,
            dimension=1,
            bar=bar,
            label="",
            known=lambda: known,
        ).scaled(spaces, 9)


def test_the_control_variate_removes_the_regression_and_counts_its_degree_of_freedom():
    forms = line(PLAIN) + 0.1 * zigzag(PLAIN)
    controlled = estimate(lambda x: line(x) + 0.1 * zigzag(x), Known(4.0, 0.0))

    assert "control variate" in controlled.method
    spread = PLAIN - PLAIN.mean()
    slope = float((spread * forms).sum() / spread.square().sum())
    assert float(controlled) == pytest.approx(float(forms.mean()) - slope * (5.0 - 4.0))
    left = forms - forms.mean() - slope * spread
    # Nine samples, less a mean and a slope.
    assert controlled.degrees == 7
    expected = math.sqrt(float(left.square().sum()) / 7 / 9)
    assert float(controlled.stderr) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("function", "known", "count"),
    [
        (line, None, 9),
        (line, Known(4.0, 0.1), 9),  # the trace has a larger error than the mean
        (zigzag, Known(4.0, 0.0), 9),  # not correlated with the trace
        (line, Known(4.0, 0.0), 7),  # too few for a slope
    ],
    ids=["unknown", "noisy", "unrelated", "few"],
)
def test_samples_are_unchanged_if_the_trace_does_not_help(function, known, count):
    plain = estimate(function, known, count)

    assert torch.equal(plain.samples, function(PLAIN[:count]))
    assert plain.degrees == count - 1
    assert "controlled" not in plain.method
