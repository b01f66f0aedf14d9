"""A start vector in the kernel of the operator, where every product is roundoff."""

import torch

import ritz
from ritz import graphs


def test_a_density_accepts_starts_in_the_kernel(tmp_path):
    # A triangle and an edge: many sign vectors are in the kernel of the normalized Laplacian.
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n1 2\n2 0\n3 4\n")
    op = graphs.laplacian(graphs.read(edges))
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        result = ritz.density(op, num_probes=8, num_steps=5, generator=generator)
        assert abs(float(result.weights.sum()) - 8) < 1e-9


def test_a_run_that_starts_in_the_kernel_ends_after_one_step(tmp_path):
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n1 2\n2 0\n3 4\n")
    op = graphs.laplacian(graphs.read(edges))
    result = ritz.lanczos(op, num_steps=5, start=torch.ones(5, dtype=torch.float64))
    assert result.status.outcome == "breakdown"
    assert float(result.values.abs().max()) < 1e-15
