"""Samples of gradient noise have the covariance of the dense matrix, for every kind."""

import pytest
import torch
from curvature.noise_cases import NETWORKS, assert_covariance, expected, make_risk, sample_options

from ritz.curvature import noise_sample
from ritz.curvature._noise_kinds import NOISE_KINDS

# Kinds without structure are the same for all networks.
CASES = [
    (name, kind)
    for name in NETWORKS
    for kind in NOISE_KINDS
    if name == "normalised" or kind not in ("trace_unscaled", "isotropic", "sgld")
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_samples_have_the_covariance_of_the_dense_matrix(name, kind):
    # z does not depend on the number of samples; 20,000 of them are drawn by the slow test.
    block = noise_sample(make_risk(name), kind, num_samples=3000, **sample_options(kind))
    assert_covariance(block, expected(name, kind))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_twenty_thousand_samples_have_the_covariance_of_the_dense_matrix(name, kind):
    generator = torch.Generator().manual_seed(1)
    options = sample_options(kind) | {"generator": generator}
    block = noise_sample(make_risk(name), kind, num_samples=20_000, **options)
    largest, square = assert_covariance(block, expected(name, kind))
    print(f"{name} {kind}: largest |z| {largest:.2f}, mean z^2 {square:.3f}")
