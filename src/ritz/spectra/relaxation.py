"""Moments that no density has, or none that can be computed: the least variance that has one."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ritz._core.checks import check_count
from ritz.spectra.dual import Solution, log_mass, minimise
from ritz.spectra.priors import Prior, Rule, quadrature

# Variances tried where exact moments have no density, or one too peaked to be computed.
LADDER = (1e-18, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2)
RESOLVED = 1e-3  # most that the integral of a density may change on a grid twice as fine
LARGEST_GRID = 16_384  # nodes that are chosen by themselves
PATIENCE = 25  # steps in which a variance that has a density shows it
BLURRED = 1.6  # total variation of shares of which most lie in peaks as narrow as the grid


@dataclass(frozen=True, slots=True)
class Solver:
    """A quadrature, one twice as fine to tell whether it resolves a density, and when to stop.

    Attributes:
        rule: With polynomials up to degree ``2 m``.
        fine: With polynomials up to degree ``m``.
        blur: By how much the logarithms of their integrals of the prior itself differ.
        tol: Largest entry of the gradient to stop at.
        max_steps: Most steps with one variance.
    """

    rule: Rule
    fine: Rule
    blur: float
    tol: float
    max_steps: int

    @classmethod
    def make(
        cls,
        prior: Prior,
        interval: tuple[float, float],
        m: int,
        grid_size: int | None,
        tol: float,
        max_steps: int,
    ) -> "Solver":
        """With a grid of that size, or, by default, of one that resolves the prior."""
        size = max(512, 16 * m) if grid_size is None else grid_size
        check_count("grid_size", size, low=2 * m + 1)
        while True:
            rule = quadrature(prior, interval, size, 2 * m)
            fine = quadrature(prior, interval, 2 * size, m)
            blur = abs(float(fine.log_mass - rule.log_mass))
            if grid_size is not None or blur <= RESOLVED / 100 or 2 * size > LARGEST_GRID:
                return cls(rule, fine, blur, tol, max_steps)
            size *= 2

    def solved(self, targets: Tensor, levels: list[Tensor]) -> tuple[Solution, Tensor]:
        """The solution at the least variance that has one, and that variance, for each vector.

        At first the least alone is tried. Where it fails, all are tried from the largest down,
        each from the solution of the one before, until one fails.

        Args:
            targets: ``(N, m)``.
            levels: Variances of the moments, each ``(N, m)``, ascending as :data:`LADDER` does; or
                one alone, to be used whatever comes of it.
        """
        if len(levels) == 1:
            return self._minimise(targets, levels[0], self.max_steps), levels[0]
        found = self._minimise(
            targets, levels[0], self.max_steps, blurred=BLURRED, patience=PATIENCE
        )
        ridge, left = levels[0].clone(), (~self._good(found)).nonzero()[:, 0]
        if not len(left):
            return found, ridge
        again = self._minimise(targets[left], levels[-1][left], self.max_steps)
        # Nothing lies above the largest variance: what it gives is kept, good or not.
        kept = torch.ones_like(left, dtype=torch.bool)
        for below in range(len(levels) - 2, -2, -1):
            _put(found, ridge, left, again, levels[below + 1], kept)
            good = self._good(again)
            left, start = left[good], again.alphas[good]
            if not len(left) or below < 0:
                break
            options = {"start": start, "damping": 100 * LADDER[below], "blurred": BLURRED}
            steps = min(PATIENCE, self.max_steps)
            again = self._minimise(targets[left], levels[below][left], steps, **options)
            kept = self._good(again)
        return found, ridge

    def resolved(self, found: Solution) -> Tensor:
        """Whether the integrals of densities are those by the finer grid, ``(N,)``."""
        # A prior that is itself resolved badly is not cured by relaxing the moments.
        gap = log_mass(found, self.fine.log_prior, self.fine.grid).abs()
        near: Tensor = gap <= RESOLVED + 10 * self.blur
        return near

    def _good(self, found: Solution) -> Tensor:
        return (found.gradient <= self.tol) & self.resolved(found)

    def _minimise(self, targets: Tensor, ridge: Tensor, steps: int, **options: Any) -> Solution:
        prior, grid = self.rule.log_prior, self.rule.grid
        return minimise(targets, ridge, prior, grid, tol=self.tol, max_steps=steps, **options)


def _put(
    found: Solution, ridge: Tensor, rows: Tensor, again: Solution, level: Tensor, kept: Tensor
) -> None:
    """Take over what was kept of a new solution for some rows, and count the steps of all."""
    chosen = rows[kept]
    for name in ("alphas", "log_partition", "fitted", "gradient"):
        getattr(found, name)[chosen] = getattr(again, name)[kept]
    ridge[chosen] = level[chosen]
    found.iterations[rows] += again.iterations
