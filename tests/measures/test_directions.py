import pytest
import torch
from curvature.networks import labels, noise, small
from torch import nn
from torch.nn.functional import cross_entropy

import ritz
from ritz.curvature import Risk
from ritz.measures import filter_normalized, random_direction, ritz_directions


@pytest.fixture(scope="module")
def risk():
    model = small(nn.BatchNorm1d(4), seed=5)
    return Risk(model, cross_entropy, (noise(12, 3), labels(3, 12)), batch_size=6)


def test_ritz_directions_are_the_vectors_of_the_extreme_values():
    found = ritz.lanczos(torch.diag(torch.tensor([-3.0, 0.5, 2.0, 7.0])), num_steps=4, vectors=True)
    chosen = ritz_directions(found)
    assert list(chosen) == ["largest", "smallest", "smallest magnitude"]
    for name, row in (("largest", 3), ("smallest", 0), ("smallest magnitude", 1)):
        torch.testing.assert_close(chosen[name].abs(), torch.eye(4)[row], atol=1e-5, rtol=0)


def test_random_direction_has_unit_length_and_depends_on_the_seed(risk):
    u = random_direction(risk)
    assert float(u.norm()) == pytest.approx(1)
    assert torch.equal(u, random_direction(risk))
    assert not torch.equal(u, random_direction(risk, generator=torch.Generator().manual_seed(1)))


def test_filters_have_the_norm_of_the_weights_and_biases_are_zero(risk):
    u = filter_normalized(risk, random_direction(risk))
    weights, parts = risk.params, risk.space.unflatten(u)
    for name, part in parts.items():
        if part.ndim == 2:
            torch.testing.assert_close(part.norm(dim=1), weights[name].norm(dim=1))
        else:
            assert not part.any()


def test_filter_normalisation_does_not_depend_on_the_length_of_the_direction(risk):
    u = random_direction(risk)
    torch.testing.assert_close(filter_normalized(risk, 100 * u), filter_normalized(risk, u))


def test_a_filter_that_is_zero_stays_zero(risk):
    u = risk.space.unflatten(random_direction(risk))
    u["0.weight"][2] = 0
    found = risk.space.unflatten(filter_normalized(risk, risk.space.flatten(u)))
    assert not found["0.weight"][2].any()
    assert torch.isfinite(found["0.weight"]).all()
