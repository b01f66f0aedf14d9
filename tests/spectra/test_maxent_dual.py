import math

import numpy as np
import pytest
import torch
from matrices import seeded
from numpy.polynomial.legendre import leggauss

from ritz.spectra._maxent.dual import Grid, Solution, chebyshev, log_mass, minimise

M = 7


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def moments_of(nodes, m):
    """Chebyshev moments from degree 1 of atoms of equal weight, for each row of nodes."""
    return chebyshev(nodes, m)[..., 1:].mean(-2)


def dual(alphas, targets, ridge, log_prior):
    """The dual function, by a Gauss rule written here."""
    nodes, weights = (torch.from_numpy(array) for array in leggauss(400))
    basis = torch.cos(torch.arccos(nodes)[:, None] * torch.arange(1, len(alphas) + 1))
    log_partition = (weights.log() + log_prior(nodes) - basis @ alphas).logsumexp(0)
    return log_partition + alphas @ targets + 0.5 * (ridge * alphas.square()).sum()


@pytest.mark.parametrize("size", [1, 2, 5, 16, 513])
def test_the_rule_is_exact_below_the_degree_of_its_size(size):
    grid = Grid.make(size, 0)
    assert bool((grid.weights > 0).all())
    assert bool((grid.nodes.diff() > 0).all())
    for degree in range(min(size, 60)):
        exact = 2 / (degree + 1) if degree % 2 == 0 else 0.0
        assert float(grid.weights @ grid.nodes**degree) == pytest.approx(exact, abs=1e-14)


def test_the_polynomials_are_those_of_numpy():
    x = torch.linspace(-1, 1, 41, dtype=torch.float64)
    exact = np.polynomial.chebyshev.chebvander(x.numpy(), 9)
    torch.testing.assert_close(chebyshev(x, 9), torch.from_numpy(exact))


@pytest.mark.parametrize("prior", [torch.zeros_like, lambda x: 0.5 * x - x**2], ids=["flat", "own"])
def test_at_the_minimum_the_gradient_of_the_dual_is_zero(prior):
    """The gradient is that of autograd through another quadrature."""
    targets = moments_of(0.7 * normal(1, 400).clamp(-1.4, 1.4), M)
    ridge = 1e-3 * normal(1, M, seed=1).square()
    grid = Grid.make(256, 2 * M)
    found = minimise(targets, ridge, prior(grid.nodes), grid, atol=1e-11, max_steps=100)
    alphas = found.alphas[0].clone().requires_grad_()
    value = dual(alphas, targets[0], ridge[0], prior)
    (gradient,) = torch.autograd.grad(value, alphas)
    assert float(gradient.abs().max()) < 1e-10
    assert float(found.gradient) <= 1e-11
    hessian = torch.autograd.functional.hessian(
        lambda a: dual(a, targets[0], ridge[0], prior), found.alphas[0]
    )
    assert float(torch.linalg.eigvalsh(hessian)[0]) > 0.0


def first_step(alphas_at):
    """One step from the prior that has these multipliers in its exponent."""
    grid = Grid.make(256, 2 * M)
    log_prior = -(grid.polynomials[:, 1 : M + 1] @ alphas_at)
    targets = moments_of(normal(1, 50, seed=5).clamp(-1, 1), M)
    ridge = torch.full((1, M), 0.02, dtype=torch.float64)
    found = minimise(targets, ridge, log_prior, grid, atol=0.0, max_steps=1)
    return found.alphas[0], targets[0], ridge[0]


def test_the_first_step_is_the_damped_newton_step_of_autograd():
    """The point is random: its multipliers are in the exponent of the prior."""
    point = 0.3 * normal(M, seed=4)
    step, targets, ridge = first_step(point)

    def prior(x):
        return -(chebyshev(x, M)[:, 1:] @ point)

    def value(a):
        return dual(a, targets, ridge, prior)

    zero = torch.zeros(M, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(value(zero), zero)
    hessian = torch.autograd.functional.hessian(value, zero.detach())
    damped = hessian + 0.1 * torch.eye(M, dtype=torch.float64)
    torch.testing.assert_close(step, -torch.linalg.solve(damped, gradient), rtol=1e-9, atol=1e-11)


def test_autograd_of_the_dual_agrees_with_finite_differences():
    targets, ridge = moments_of(normal(50).clamp(-1, 1), M), torch.full((M,), 0.1).double()
    point = normal(M, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: dual(a, targets, ridge, torch.zeros_like), point)


def test_a_hard_vector_does_not_disturb_an_easy_one():
    easy = moments_of(0.5 * normal(2, 300).clamp(-1.9, 1.9), M)
    atom = moments_of(torch.full((1, 4), 0.3, dtype=torch.float64), M)
    infeasible = torch.full((1, M), 1.5, dtype=torch.float64)
    grid = Grid.make(256, 2 * M)
    flat = torch.zeros(256, dtype=torch.float64)

    def solve(targets):
        ridge = torch.full_like(targets, 1e-12)
        return minimise(targets, ridge, flat, grid, atol=1e-10, max_steps=60)

    together = solve(torch.cat([easy[:1], atom, infeasible, easy[1:]]))
    for i, row in ((0, 0), (1, 3)):
        alone = solve(easy[i : i + 1])
        torch.testing.assert_close(together.alphas[row], alone.alphas[0], rtol=1e-9, atol=1e-10)
        assert int(together.iterations[row]) == int(alone.iterations[0]) < 30
    assert int(together.iterations[1]) > 30


def test_max_steps_is_respected_and_the_prior_itself_needs_no_step():
    grid = Grid.make(64, 4)
    flat = torch.zeros(64, dtype=torch.float64)
    targets = torch.tensor([[0.0, -1 / 3], [0.2, 0.1]], dtype=torch.float64)
    found = minimise(targets, torch.zeros(2, 2).double(), flat, grid, atol=1e-12, max_steps=3)
    assert found.iterations.tolist() == [0, 3]
    assert float(found.log_partition[0]) == pytest.approx(math.log(2))


def test_a_finer_grid_detects_what_a_coarse_one_does_not_resolve():
    grid, fine = Grid.make(64, 4), Grid.make(128, 2)

    def solution(alphas):
        exponents = grid.weights.log() - grid.polynomials[:, 1:3] @ alphas
        empty = torch.zeros(1)
        return Solution(alphas[None], exponents.logsumexp(0)[None], empty, empty, empty)

    wide, narrow = torch.tensor([0.5, 1.0]).double(), torch.tensor([0.0, 1e6]).double()
    flat = torch.zeros(128, dtype=torch.float64)
    assert float(log_mass(solution(wide), flat, fine)) == pytest.approx(0.0, abs=1e-13)
    assert abs(float(log_mass(solution(narrow), flat, fine))) > 1.0


@pytest.mark.parametrize("degree", [0, 1, 2, 3, 30, 200])
def test_the_polynomials_of_a_grid_are_cosines(degree):
    """The doubling formula has an error of ``degree ** 1.6`` roundoffs: 1e-12 at degree 200."""
    grid = Grid.make(400, degree)

    assert grid.polynomials.shape == (400, degree + 1)
    torch.testing.assert_close(grid.polynomials, chebyshev(grid.nodes, degree), rtol=0, atol=2e-12)


def solve_one(targets, ridge=1e-12, **options):
    grid = Grid.make(256, 2 * targets.shape[1])
    given = {"atol": 1e-10, "max_steps": 200} | options
    return minimise(
        targets, torch.full_like(targets, ridge), torch.zeros(256).double(), grid, **given
    )


def test_a_start_at_the_solution_needs_no_step_and_one_nearby_a_few():
    targets = moments_of(0.5 * normal(2, 300).clamp(-1.9, 1.9), M)
    found = solve_one(targets)
    assert solve_one(targets, start=found.alphas).iterations.tolist() == [0, 0]
    start = found.alphas + 0.01
    near = solve_one(targets, start=start, damping=1e-6)
    assert int(near.iterations.max()) <= 4 < int(found.iterations.min())
    torch.testing.assert_close(near.alphas, found.alphas, rtol=1e-6, atol=1e-6)
    assert torch.equal(start, found.alphas + 0.01)


def test_a_density_that_the_grid_does_not_resolve_is_given_up():
    targets = torch.cat([
        moments_of(0.5 * normal(1, 300).clamp(-1.9, 1.9), M),
        moments_of(torch.full((1, 4), 0.3, dtype=torch.float64), M),
    ])  # fmt: skip
    patient, wise = solve_one(targets), solve_one(targets, blurred=1.6)
    assert int(patient.iterations[1]) > 2 * int(wise.iterations[1])
    assert float(wise.gradient[1]) > 1e-10
    torch.testing.assert_close(patient.alphas[0], wise.alphas[0])


def test_patience_ends_unless_the_moments_are_nearly_matched():
    infeasible = torch.full((1, M), 1.5, dtype=torch.float64)
    slow = moments_of(0.5 * normal(1, 300).clamp(-1.9, 1.9), M)
    assert int(solve_one(infeasible, patience=7).iterations) == 7
    nearly = int((solve_one(slow, atol=1e-4)).iterations)
    assert int(solve_one(slow, patience=nearly).iterations) > nearly
    assert int(solve_one(slow, patience=1).iterations) == 1
