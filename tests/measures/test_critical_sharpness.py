"""Critical sharpness against the curvature of quadratics."""

import math

import pytest
import torch
from measures.quadratics import quadratic

from ritz.curvature import Risk, hessian
from ritz.measures import critical_sharpness


def test_critical_sharpness_along_the_gradient_is_the_curvature_there():
    risk = quadratic([0.1, 1.0, 7.0])
    gradient, matrix = risk.gradient(), hessian(risk).dense()

    found = critical_sharpness(risk)

    exact = float(gradient @ matrix @ gradient / (gradient @ gradient))
    assert abs(float(found) - exact) <= float(found.truncation) <= 0.06 * exact
    assert int(found.method.split()[0]) <= 16  # forward passes


@pytest.mark.parametrize(("floor", "outcome"), [(0.0, "converged"), (1e13, "max_steps")])
def test_a_tolerance_below_the_roundoff_of_the_loss_is_not_reached(floor, outcome):
    found = critical_sharpness(quadratic([1.0, 2.0], floor=floor), rtol=1e-3)

    assert found.status.outcome == outcome
    assert abs(float(found) - 1.8) <= float(found.truncation)  # (1 + 8) / (1 + 4)
    assert (float(found.truncation) <= 1e-3 * float(found)) == found.status.ok


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_critical_sharpness_finds_its_scale(scale):
    risk = quadratic([scale, 3 * scale])
    direction = torch.tensor([0.0, 1.0], dtype=torch.float64)

    found = critical_sharpness(risk, direction)

    # L(w - eta u) - L(w) = 3 s (-eta + eta^2 / 2) rises beyond eta = 2: its sharpness is one.
    assert abs(float(found) - 1) <= float(found.truncation)


def test_critical_sharpness_uses_no_gradient_of_a_direction(monkeypatch):
    risk = quadratic([1.0, 2.0])
    direction = risk.gradient()
    monkeypatch.setattr(Risk, "gradient", None)

    critical_sharpness(risk, direction)


def test_a_direction_without_a_critical_step_is_uncertain():
    risk = quadratic([1.0, 2.0])

    uphill = critical_sharpness(risk, -risk.gradient())
    flat = critical_sharpness(quadratic([-1.0, -1.0]))

    assert math.isnan(float(uphill))
    assert "does not fall" in str(uphill.status)
    assert (float(flat), flat.status.outcome) == (0.0, "uncertain")


def test_critical_sharpness_refuses_a_direction_of_zero():
    with pytest.raises(ValueError, match="direction must not be zero"):
        critical_sharpness(quadratic([1.0, 2.0], start=0.0))
