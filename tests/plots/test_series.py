from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ritz import lanczos
from ritz.measures import Landscape, Landscape2d
from ritz.plots._series import density_curve, landscape_lines, landscape_surface, spectrum_stems


@pytest.fixture
def spectrum():
    return lanczos(torch.diag(torch.linspace(-1, 9, 40).double()), num_steps=12)


def normal(width=None):
    return SimpleNamespace(
        support=(-3.0, 5.0),
        width=width,
        pdf=lambda x: torch.exp(-(x**2)),
        cdf=lambda x: torch.sigmoid(x),
        pdf_interval=lambda x, *, level: (x - level, x + level),
        cdf_interval=lambda x, *, level: (0 * x, 0 * x + 1),
    )


def test_stems_have_the_values_and_weights_of_the_spectrum(spectrum):
    stems = spectrum_stems(spectrum)
    np.testing.assert_array_equal(stems.values, spectrum.values.numpy())
    np.testing.assert_array_equal(stems.weights, spectrum.weights.numpy())


@pytest.mark.parametrize("rtol", [0.0, 1e-3, 0.1, 10.0])
def test_converged_stems_have_small_residuals(spectrum, rtol):
    limit = rtol * float(spectrum.values.abs().max())
    expected = [float(residual) <= limit for residual in spectrum.residuals]
    assert spectrum_stems(spectrum, rtol=rtol).converged.tolist() == expected


def test_a_zero_eigenvalue_is_not_drawn_as_negative(rng):
    basis = torch.linalg.qr(torch.randn(60, 60, generator=rng)).Q
    values = torch.cat([torch.tensor([-2.0]), torch.zeros(40), torch.linspace(1, 2, 19)])
    matrix = (basis * values) @ basis.T
    stems = spectrum_stems(lanczos((matrix + matrix.T) / 2, num_steps=15))
    assert abs(stems.values[1]) < 1e-5
    assert stems.signs[:2].tolist() == [-1, 0]
    assert (stems.signs[stems.values > 0.5] == 1).all()  # below there are copies of zero


def test_a_sign_is_known_only_beyond_the_residual(spectrum):
    """Within the residual the eigenvalue can have either sign."""
    found = replace(
        spectrum,
        values=torch.tensor([-3.0, -2.0, -2.5e-4, 0.0, 0.02, 0.5, 900.0]),
        residuals=torch.tensor([0.1, 2.0, 0.027, 0.0, 0.01, 5.0, 0.1]),
        weights=torch.full((7,), 1 / 7),
    )
    stems = spectrum_stems(found)
    assert stems.signs.tolist() == [-1, 0, 0, 0, 1, 0, 1]
    assert stems.converged.tolist() == [True, False, True, True, True, False, True]


def test_a_curve_covers_the_support_of_the_density():
    curve = density_curve(normal(), level=0.5, num_points=5)
    np.testing.assert_allclose(curve.x, [-3, -1, 1, 3, 5])
    np.testing.assert_allclose(curve.y, np.exp(-(curve.x**2)))
    np.testing.assert_allclose(curve.high - curve.low, 1.0)


def test_a_cumulative_curve_is_the_distribution_function():
    curve = density_curve(normal(), cumulative=True, num_points=3)
    np.testing.assert_allclose(curve.y, 1 / (1 + np.exp(-curve.x)))
    assert (curve.low == 0).all()
    assert (curve.high == 1).all()


def test_the_band_of_a_density_without_errors_is_nan():
    bare = normal()
    del bare.pdf_interval
    curve = density_curve(bare, num_points=4)
    assert np.isnan(curve.low).all()
    assert np.isnan(curve.high).all()


def test_a_narrow_density_gets_enough_points():
    curve = density_curve(normal(width=0.001))
    assert curve.x[1] - curve.x[0] <= 0.001 / 4 * 1.001
    assert len(density_curve(normal(width=1e-9)).x) == 100_000


def test_wrong_arguments_are_rejected(spectrum):
    with pytest.raises(ValueError, match="rtol must be at least 0"):
        spectrum_stems(spectrum, rtol=-1.0)
    with pytest.raises(ValueError, match="num_points must be at least 2"):
        density_curve(normal(), num_points=1)


def along(**changes):
    loss = torch.tensor([[3.0, 1.0, 2.0], [5.0, 4.0, 6.0]]).double()
    fields = {
        "names": ("largest", "smallest"),
        "t": torch.tensor([-1.0, 0.0, 1.0]).double(),
        "norms": torch.ones(2),
        "loss": loss,
        "accuracy": loss / 10,
        "test_loss": 2 * loss,
        "test_accuracy": loss / 20,
        "batch_norm": "eval",
        "risk": "Risk(...)",
    }
    return Landscape(**(fields | changes))


def plane(loss, **changes):
    steps = {"s": torch.tensor([-2.0, 0.0, 2.0]).double(), "t": torch.tensor([-1.0, 1.0]).double()}
    fields = {"accuracy": None, "test_loss": None, "test_accuracy": None, "batch_norm": "eval"}
    rest = {"names": ("u", "v"), "norms": torch.ones(2), "loss": loss, "risk": "Risk(...)"}
    return Landscape2d(**(steps | fields | rest | changes))


PLANE = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 100.0]]).double()


@pytest.mark.parametrize("direction", [1, "smallest"])
def test_lines_are_one_direction_of_a_landscape(direction):
    lines = landscape_lines(along(), direction)
    np.testing.assert_array_equal(lines["loss"]["train"], [5, 4, 6])
    np.testing.assert_allclose(lines["accuracy"]["train"], [50, 40, 60])  # per cent
    np.testing.assert_array_equal(lines["loss"]["test"], [10, 8, 12])
    np.testing.assert_allclose(lines["accuracy"]["test"], [25, 20, 30])


def test_missing_accuracy_and_test_data_are_left_out():
    lines = landscape_lines(along(accuracy=None, test_loss=None, test_accuracy=None))
    assert [list(parts) for parts in lines.values()] == [["train"], []]


@pytest.mark.parametrize("direction", [2, -1, "second"])
def test_an_unknown_direction_is_rejected(direction):
    with pytest.raises(ValueError, match="direction must be one of largest, smallest, or a number"):
        landscape_lines(along(), direction)


def test_the_first_direction_of_a_surface_is_horizontal():
    z, levels = landscape_surface(plane(PLANE), num_levels=3)
    np.testing.assert_array_equal(z, PLANE.numpy().T)
    np.testing.assert_allclose(levels, [1, 10, 100])


def test_levels_have_equal_steps_if_a_loss_is_not_positive():
    _, levels = landscape_surface(plane(PLANE - 1), num_levels=3)
    np.testing.assert_allclose(levels, [0, 49.5, 99])


def test_a_surface_is_nan_where_the_loss_is_not_finite():
    loss = PLANE.clone()
    loss[2, 1] = float("inf")
    z, levels = landscape_surface(plane(loss))
    assert np.isnan(z[1, 2])
    assert levels[-1] == 16


def test_a_surface_of_the_test_loss_needs_test_data():
    z, _ = landscape_surface(plane(PLANE, test_loss=3 * PLANE), test=True)
    np.testing.assert_array_equal(z, 3 * PLANE.numpy().T)
    with pytest.raises(ValueError, match="must have a test loss"):
        landscape_surface(plane(PLANE), test=True)
    with pytest.raises(ValueError, match="two different finite values"):
        landscape_surface(plane(torch.ones(3, 2)))
    with pytest.raises(ValueError, match="num_levels must be at least 2"):
        landscape_surface(plane(PLANE), num_levels=1)
