import math

import numpy as np
import pytest
import torch
from matrices import seeded

from ritz import Density, density, load, maxent, save, trace_function
from ritz.spectra._maxent.dual import chebyshev
from ritz.testing import with_spectrum

INTERVAL = (0.5, 3.5)


def angles(size=6000):
    return (torch.arange(size, dtype=torch.float64) + 0.5) * (math.pi / size)


def integral(function, interval):
    """Integrate by the midpoint rule in the angle: exact to roundoff for smooth functions."""
    low, high = interval
    theta = angles()
    x = (low + high) / 2 - (high - low) / 2 * theta.cos()
    return float((function(x) * theta.sin()).mean()) * math.pi * (high - low) / 2


def of_law(pdf, m, interval=INTERVAL, **options):
    low, high = interval
    theta = angles()
    x = (low + high) / 2 - (high - low) / 2 * theta.cos()
    moments = (pdf(x) * theta.sin()) @ chebyshev(-theta.cos(), m)
    return maxent(moments / moments[0], interval=interval, **options)


def bump(centre, width):
    return lambda x: (-0.5 * ((x - centre) / width) ** 2).exp()


def cubic(x):
    return 1 / x**3


CASES = {
    "flat": {},
    "semicircle": {"prior": "semicircle"},
    "marchenko_pastur": {"prior": "marchenko_pastur"},
    "own": {"prior": cubic},
}


@pytest.fixture(scope="module", params=CASES)
def found(request):
    return of_law(bump(1.5, 0.4), 7, **CASES[request.param])


@pytest.fixture(scope="module")
def flat():
    return of_law(bump(1.5, 0.4), 7)


def test_the_result_satisfies_the_density_protocol(found):
    assert isinstance(found, Density)
    assert found.support == INTERVAL
    assert found.status.outcome == "converged"
    assert integral(found.pdf, INTERVAL) == pytest.approx(1.0, abs=1e-7)
    outside = torch.tensor([-1.0, 0.5, 3.5, 9.0], dtype=torch.float64)
    assert found.pdf(outside).tolist() == [0.0] * 4
    assert bool((found.log_pdf(outside) == -torch.inf).all())
    assert found.pdf(torch.ones(2, 0, 3)).shape == found.cdf(torch.ones(2, 0, 3)).shape == (2, 0, 3)
    assert found.pdf(torch.tensor(1.5)).shape == found.cdf(torch.tensor(1.5)).shape == ()


def test_the_cdf_is_the_integral_of_the_pdf(found):
    x = torch.linspace(0.4, 3.6, 1001, dtype=torch.float64)
    below = found.cdf(x)
    assert bool((below.diff() >= -1e-15).all())
    assert below[x <= 0.5].abs().max() == 0.0
    assert float((below[x >= 3.5] - 1).abs().max()) < 1e-12
    for point in (0.6, 1.2, 2.9):
        part = integral(found.pdf, (0.5, point))
        assert float(found.cdf(torch.tensor(point).double())) == pytest.approx(part, abs=1e-7)
        assert found.mass(0.5, point) == pytest.approx(part, abs=1e-7)


def test_masses_add_up(found):
    parts = [found.mass(-math.inf, 1.0), found.mass(1.0, 2.0), found.mass(2.0, math.inf)]
    assert sum(parts) == pytest.approx(1.0, abs=1e-12)
    assert found.mass(4.0, 5.0) == found.mass(1.0, 1.0) == 0.0


def test_moments_and_expectations_are_integrals(found):
    assert found.moment(0) == pytest.approx(1.0, abs=1e-12)
    for degree in (1, 2, 5):
        exact = integral(lambda x, k=degree: x**k * found.pdf(x), INTERVAL)
        assert found.moment(degree) == pytest.approx(exact, rel=1e-6)
    exact = integral(lambda x: x.log() * found.pdf(x), INTERVAL)
    assert found.expectation(torch.log) == pytest.approx(exact, rel=1e-6)
    mapped = found.expectation(lambda x: chebyshev((2 * x - 4) / 3, 3)[..., 3])
    assert mapped == pytest.approx(float(found.fitted[2]), abs=1e-10)


def relative(name, x):
    """Values of the prior, not normalised."""
    low, high = INTERVAL
    edges = ((x - low) * (high - x)).sqrt()
    values = {
        "flat": torch.ones_like,
        "semicircle": lambda _: edges,
        "marchenko_pastur": lambda x: edges / x,
        "own": cubic,
    }[name]
    return values(x)


@pytest.mark.parametrize("name", CASES)
def test_the_entropy_is_minus_the_integral_of_q_log_q_over_the_prior(name):
    found = of_law(bump(1.5, 0.4), 7, **CASES[name])
    total = 1.0 if name == "flat" else integral(lambda x: relative(name, x), INTERVAL)
    exact = integral(
        lambda x: -found.pdf(x) * (found.log_pdf(x) - (relative(name, x) / total).log()), INTERVAL
    )
    assert found.entropy == pytest.approx(exact, abs=1e-7)
    if name != "flat":
        assert found.entropy < 0.0


@pytest.mark.parametrize("name", CASES)
def test_moments_of_the_prior_give_the_prior(name):
    found = of_law(lambda x: relative(name, x), 9, **CASES[name])
    assert float(found.alphas.abs().max()) < 1e-5
    assert found.entropy == pytest.approx(math.log(3.0) if name == "flat" else 0.0, abs=1e-10)


def test_the_semicircle_under_its_own_prior_is_exact():
    catalan = torch.tensor([1.0, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    found = maxent(catalan, prior="semicircle")
    assert float(found.alphas.abs().max()) < 1e-6
    assert found.entropy == pytest.approx(0.0, abs=1e-12)
    x = torch.linspace(-0.99, 0.99, 9, dtype=torch.float64)
    torch.testing.assert_close(found.pdf(x), 2 / math.pi * (1 - x**2).sqrt(), rtol=1e-6, atol=0)


def closed_form(p, q):
    r""":math:`\sum_i (\beta_i - \alpha_i) \mu_i + \log Z_q - \log Z_p`."""
    return float((q.alphas - p.alphas) @ p.fitted) + q.log_partition - p.log_partition


@pytest.mark.parametrize("name", CASES)
def test_the_divergence_has_a_closed_form(name):
    p = of_law(bump(1.5, 0.4), 7, **CASES[name])
    q = of_law(bump(2.2, 0.7), 7, **CASES[name])
    assert p.kl(p) == pytest.approx(0.0, abs=1e-13)
    assert p.kl(q) == pytest.approx(closed_form(p, q), rel=1e-9)
    assert q.kl(p) == pytest.approx(closed_form(q, p), rel=1e-9)
    assert min(p.kl(q), q.kl(p)) > 0.1
    half = 0.5 * float((p.alphas - q.alphas) @ (q.fitted - p.fitted))
    assert p.symmetric_kl(q) == pytest.approx(half, rel=1e-9)
    assert p.symmetric_kl(q) == q.symmetric_kl(p)


def test_the_divergence_is_infinite_where_the_other_vanishes(flat):
    narrower = of_law(bump(1.5, 0.4), 7, interval=(1.0, 2.0))
    assert flat.kl(narrower) == math.inf
    assert narrower.kl(flat) == pytest.approx(
        integral(lambda x: narrower.pdf(x) * (narrower.log_pdf(x) - flat.log_pdf(x)), (1.0, 2.0)),
        abs=1e-8,
    )
    assert flat.symmetric_kl(narrower) == math.inf


def test_underflow_of_the_density_adds_no_divergence():
    """The mass of the peak underflows to zero where the other density is zero."""
    peak = of_law(bump(0.3, 0.01), 2, interval=(-1.0, 1.0))
    other = maxent(torch.tensor([1.0, 0.0]), interval=(-1.0, 0.9))
    assert peak.kl(other) == pytest.approx(math.log(1.9) - peak.entropy, abs=1e-9)


@pytest.mark.parametrize("method", ["lanczos", "kpm"])
def test_the_divergence_to_another_kind_of_density(flat, method):
    # Quantiles of the density itself, by interpolation of its distribution function.
    x = np.linspace(*flat.interval, 2001)
    quantiles = np.interp((np.arange(200) + 0.5) / 200, flat.cdf(torch.from_numpy(x)).numpy(), x)
    op = with_spectrum(torch.from_numpy(quantiles), generator=seeded(0))
    other = density(op, num_probes=8, num_steps=40, method=method)
    if method == "lanczos":
        other = other.smoothed(0.3)
    near = flat.kl(other)
    assert near == math.inf or 0.0 <= near < 0.3
    if method == "lanczos":
        exact = integral(
            lambda x: flat.pdf(x) * (flat.log_pdf(x) - other.pdf(x).log()), flat.interval
        )
        assert near == pytest.approx(exact, abs=1e-8)


def test_a_discrete_density_has_no_divergence(flat):
    op = with_spectrum(torch.linspace(1, 2, 30), generator=seeded(0))
    with pytest.raises(TypeError, match="smoothed"):
        flat.kl(density(op, num_probes=2, num_steps=5))


def test_the_pdf_has_a_gradient(flat):
    x = torch.tensor([0.7, 1.5, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(flat.log_pdf, x)


@pytest.mark.parametrize("name", [name for name in CASES if name != "own"])
def test_an_entropic_density_survives_save_and_load(name, tmp_path):
    found = of_law(bump(1.5, 0.4), 7, **CASES[name])
    save(found, tmp_path / "density.safetensors")
    back = load(tmp_path / "density.safetensors")
    x = torch.linspace(0, 4, 41, dtype=torch.float64)
    torch.testing.assert_close(back.pdf(x), found.pdf(x))
    torch.testing.assert_close(back.cdf(x), found.cdf(x))
    assert torch.equal(back.alphas, found.alphas)
    assert back.entropy == pytest.approx(found.entropy, rel=1e-12)
    assert (back.interval, back.prior, back.status) == (INTERVAL, found.prior, found.status)


def test_a_prior_that_is_a_function_cannot_be_saved(tmp_path):
    found = of_law(bump(1.5, 0.4), 3, prior=cubic)
    with pytest.raises(TypeError, match=r"cannot save .*prior: function is not storable"):
        save(found, tmp_path / "density.safetensors")
    assert not list(tmp_path.iterdir())


def test_the_text_names_moments_prior_and_status(found):
    text = str(found)
    assert text.startswith("EntropicDensity on [0.5, 3.5], 7 moments (")
    assert "converged" in text
    assert ("user-defined prior" in text) == callable(found.prior)


def test_means_on_a_short_interval_far_from_zero_are_within_their_errors():
    # Mapped to the interval and back, the nodes lose nine digits, and narrow peaks magnify that.
    eigenvalues = torch.tensor([1.0, 1.0 + 1e-6], dtype=torch.float64).repeat_interleave(50)
    op = with_spectrum(eigenvalues, generator=seeded(0))

    for seed in range(5):
        found = trace_function(op, torch.exp, method="maxent", num_steps=12, generator=seeded(seed))

        low, high = found.interval(0.999)
        assert float(low) <= float(eigenvalues.exp().sum()) <= float(high)
        assert float(high - low) < 1e-4
