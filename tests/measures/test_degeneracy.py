import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from ritz.curvature import Risk, ggn
from ritz.measures import rank_bound, rank_degeneracy
from ritz.operators import DiagonalOperator
from ritz.spectra import eigenpairs, lanczos, lanczos_block
from ritz.testing import assert_within_stderr, with_spectrum


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def network(*sizes):
    before = torch.get_rng_state()
    torch.manual_seed(2)
    layers = [
        layer for pair in itertools.pairwise(sizes) for layer in (nn.Tanh(), nn.Linear(*pair))
    ]
    model = nn.Sequential(*layers[1:]).double()
    torch.set_rng_state(before)
    return model


def data(n, inputs, classes):
    x = torch.randn(n, inputs, generator=seeded(0), dtype=torch.float64)
    return x, torch.randint(classes, (n,), generator=seeded(1))


def with_kernel(zeros=30, rest=(-1.0, 2.0, 5.0, 9.0)):
    return DiagonalOperator(torch.cat([torch.zeros(zeros), torch.tensor(rest)]).double())


def test_degeneracy_equals_the_fraction_of_zero_eigenvalues():
    spectra = lanczos_block(with_kernel(), num_steps=10, num_probes=200, generator=seeded(3))
    found = rank_degeneracy(spectra, matrix="ggn")
    assert_within_stderr(found.mass, 30 / 34)
    assert abs(float(found.value.mean)) < 1e-12
    assert found.mass.num_products == sum(spectrum.num_products for spectrum in spectra)
    assert len(found.mass.samples) == 200
    assert "of the eigenvalues is near zero: in" in str(found)


def test_degeneracy_of_a_hessian_adds_the_two_nearest_ritz_values():
    op = DiagonalOperator(torch.tensor([-0.1, 0.3, 4.0, 9.0], dtype=torch.float64))
    start = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    spectrum = lanczos(op, num_steps=4, start=start)
    nearest = rank_degeneracy(spectrum, matrix="ggn")
    assert float(nearest.mass) == pytest.approx(1 / 30)
    assert float(nearest.value) == pytest.approx(-0.1)
    both = rank_degeneracy([spectrum], matrix="hessian")
    assert float(both.mass) == pytest.approx(5 / 30)
    assert float(both.value) == pytest.approx((-0.1 + 4 * 0.3) / 5)
    assert torch.isnan(both.mass.stderr)  # one probe has no error bars


def crowded():
    """A kernel of 35, beside eigenvalues that crowd towards zero."""
    rest = torch.logspace(-7, -0.3, 96, dtype=torch.float64)
    return with_spectrum(torch.cat([torch.zeros(35).double(), rest]), generator=seeded(0)), 35 / 131


def separated():
    """A kernel of 239 of 300, whose Krylov space closes after 62 steps."""
    rest = torch.logspace(-2, 1.5, 61, dtype=torch.float64)
    return DiagonalOperator(torch.cat([torch.zeros(239).double(), rest])), 239 / 300


@pytest.mark.parametrize("num_steps", [5, 30, 131])
@pytest.mark.parametrize("case", [crowded, separated])
@pytest.mark.parametrize("matrix", ["ggn", "hessian"])
def test_the_share_of_the_kernel_lies_within_the_interval(case, num_steps, matrix):
    op, truth = case()
    inside = 0
    for seed in range(3):
        spectra = lanczos_block(op, num_steps=num_steps, num_probes=6, generator=seeded(seed))
        mass = rank_degeneracy(spectra, matrix=matrix).mass
        low, high = mass.interval(0.99)
        inside += int(low <= truth <= high)
    assert inside == 3


def test_every_value_at_zero_counts_once_the_space_is_closed():
    op, truth = separated()
    spectra = lanczos_block(op, num_steps=200, num_probes=20, generator=seeded(1))
    found = rank_degeneracy(spectra, matrix="ggn")
    assert_within_stderr(found.mass, truth)
    assert float(found.mass.truncation) < 1e-6
    low, high = found.interval
    assert -1e-6 < low <= 0 <= high < 1e-6
    assert "in [" in str(found)


def test_one_step_gives_no_information_about_the_origin():
    op, _ = separated()
    mass = rank_degeneracy(lanczos(op, num_steps=1), matrix="ggn").mass
    assert float(mass.mean - mass.truncation) <= 0.0
    assert float(mass.mean + mass.truncation) >= 1.0
    assert mass.status.outcome == "uncertain"


def low_rank():
    """290 zeros of 300."""
    return DiagonalOperator(torch.cat([torch.zeros(290), torch.linspace(1, 2, 10)]).double())


def low_rank_wide():
    return DiagonalOperator(torch.cat([torch.zeros(290), torch.logspace(-3, 2, 10)]).double())


@pytest.mark.parametrize("num_steps", [4, 6, 15])
@pytest.mark.parametrize("make", [low_rank, low_rank_wide])
def test_the_share_of_a_large_kernel_lies_within_the_interval_in_95_of_100_runs(make, num_steps):
    op, held = make(), 0
    for seed in range(40):
        spectra = lanczos_block(op, num_steps=num_steps, num_probes=6, generator=seeded(seed))
        low, high = rank_degeneracy(spectra, matrix="ggn").mass.interval()
        held += int(low <= 290 / 300 <= high)
    assert held >= 37


@pytest.mark.parametrize("num_steps", [4, 12, 40])
@pytest.mark.parametrize("matrix", ["ggn", "hessian"])
def test_the_mass_is_that_of_the_eigenvalues_in_the_interval(num_steps, matrix):
    start = torch.logspace(-6, 1, 120, dtype=torch.float64)
    values = start if matrix == "ggn" else torch.cat([-start[:40], start[40:]])
    op, held = DiagonalOperator(values), 0
    for seed in range(20):
        spectra = lanczos_block(op, num_steps=num_steps, num_probes=6, generator=seeded(seed))
        found = rank_degeneracy(spectra, matrix=matrix)
        truth = float(
            ((values >= found.interval[0]) & (values <= found.interval[1])).double().mean()
        )
        low, high = found.mass.interval()
        held += int(low <= truth <= high)
    assert held >= 18


def test_small_eigenvalues_that_look_like_zero_are_within_the_interval():
    rest = torch.cat([torch.full((50,), 1e-6), torch.logspace(0, 1, 200)])
    op = DiagonalOperator(torch.cat([torch.zeros(50), rest]).double())
    found = rank_degeneracy(lanczos_block(op, num_steps=30, num_probes=8), matrix="ggn")
    assert found.interval[0] <= 0 < 1e-6 < found.interval[1] < 1
    assert_within_stderr(found.mass, 100 / 300)
    assert found.mass.status.ok


def test_a_mass_that_may_belong_to_other_eigenvalues_is_uncertain():
    op, _ = crowded()
    mass = rank_degeneracy(lanczos_block(op, num_steps=30, num_probes=8), matrix="ggn").mass
    assert mass.status.outcome == "uncertain"
    assert "may belong to eigenvalues other than zero" in mass.status.message


def test_degeneracy_raises_for_something_that_is_not_a_spectrum():
    some = eigenpairs(with_kernel(), largest=2)
    with pytest.raises(TypeError, match="spectra must be a result of lanczos"):
        rank_degeneracy(some, matrix="ggn")
    with pytest.raises(ValueError, match="spectra must have at least one spectrum"):
        rank_degeneracy([], matrix="ggn")
    whole = lanczos(with_kernel(), num_steps=3)
    with pytest.raises(ValueError, match="matrix must be one of hessian, ggn; got 'fisher'"):
        rank_degeneracy(whole, matrix="fisher")


def rank(risk):
    return int(torch.linalg.matrix_rank(ggn(risk, engine="eager").dense(), hermitian=True))


@pytest.mark.parametrize("n", [1, 4, 11])
def test_rank_for_cross_entropy_reaches_but_does_not_exceed_the_bound(n):
    risk = Risk(network(4, 6, 3), functional.cross_entropy, data(n, 4, 3), batch_size=3)
    found = rank_bound(risk)
    assert found.bound == min(51, 2 * n)
    assert (found.num_terms, found.num_outputs, found.num_parameters) == (n, 3 * n, 51)
    assert rank(risk) == found.bound
    assert found.comparison == 4 * 3 * (6 + 4)


def test_rank_bound_of_other_losses_is_one_higher_per_sample():
    x, _ = data(5, 4, 3)
    target = torch.zeros(5, 3, dtype=torch.float64)
    risk = Risk(network(4, 6, 3), functional.mse_loss, (x, target))
    assert rank(risk) == rank_bound(risk).bound == 15


def test_rank_bound_does_not_count_ignored_labels():
    x, y = data(6, 4, 3)
    y[:2] = -100
    risk = Risk(network(4, 6, 3), functional.cross_entropy, (x, y))
    assert rank(risk) == rank_bound(risk).bound == 8


def test_rank_bound_counts_positions_as_terms():
    x = torch.randn(2, 3, 5, generator=seeded(0), dtype=torch.float64)
    y = torch.randint(4, (2, 5), generator=seeded(1))
    model = nn.Sequential(nn.Conv1d(3, 2, 1), nn.Tanh(), nn.Conv1d(2, 4, 1)).double()
    found = rank_bound(Risk(model, functional.cross_entropy, (x, y)))
    assert (found.num_terms, found.num_outputs) == (10, 40)
    assert (found.bound, found.hidden_units, found.num_inputs) == (20, 2, 15)


def test_rank_bound_treats_probability_targets_as_softmax():
    x, y = data(4, 4, 3)
    target = functional.one_hot(y, 3).double()
    assert rank_bound(Risk(network(4, 6, 3), functional.cross_entropy, (x, target))).bound == 8


def test_rank_can_exceed_the_heuristic_comparison():
    """A small version of the tanh network of 640 whose matrix has rank 1260."""
    risk = Risk(network(16, 16, 2), functional.cross_entropy, data(400, 16, 2))
    found, measured = rank_bound(risk), rank(risk)
    # Shifts of the logits take a row of the last layer from the rank.
    assert measured == found.num_parameters - 17 == 289
    assert found.comparison == 4 * 2 * (16 + 16) == 256
    assert found.comparison < measured <= found.bound == 306


def test_printed_rank_bound_says_that_the_comparison_is_not_a_bound():
    risk = Risk(network(4, 6, 3), functional.cross_entropy, data(4, 4, 3), l2=0.5)
    text = str(rank_bound(risk))
    assert "<= 8 = min(51 parameters, 12 outputs - 4 terms)" in text
    assert "so a fraction of at least 0.8431 of the eigenvalues is 0.5" in text
    assert "for comparison only, not a bound: 4 d_y (sum N_l + d_x) = 120" in text


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return self.scale * x


def test_rank_bound_of_a_model_without_layers_has_no_comparison():
    found = rank_bound(Risk(Bare(), functional.cross_entropy, data(2, 3, 3)))
    assert found.hidden_units is found.comparison is None
    assert "comparison" not in str(found)


def test_rank_bound_raises_if_the_model_returns_its_loss():
    model = nn.Linear(3, 1).double()
    risk = Risk(model, None, data(2, 3, 3), forward=lambda m, batch: m(batch[0]).square().mean())
    with pytest.raises(
        ValueError, match=r"rank_bound\(\) needs outputs that are separate from the loss"
    ):
        rank_bound(risk)


def test_rank_bound_counts_several_outputs_together():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2).double()

        def forward(self, x):
            found = self.inner(x)
            return {"logits": (found[:, :1], found[:, 1:])}

    def loss(outputs, target):
        return (outputs[0] * outputs[1]).mean()

    assert rank_bound(Risk(Two(), loss, data(3, 3, 2))).bound == 6
