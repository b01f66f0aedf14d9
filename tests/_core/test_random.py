import pytest
import torch
from matrices import seeded

from ritz._core.random import probes, resolve_generator

CPU = torch.device("cpu")


def draw(n, k, kind, generator, dtype=torch.float64):
    return probes((n, k), kind=kind, generator=generator, dtype=dtype, device=CPU)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
@pytest.mark.parametrize("widths", [(1, 1, 1, 1, 1), (2, 3), (4, 1)])
def test_probes_do_not_depend_on_the_block_size(kind, widths):
    whole = draw(7, 5, kind, seeded(3))
    generator = seeded(3)
    pieces = torch.cat([draw(7, k, kind, generator) for k in widths], dim=1)
    assert torch.equal(whole, pieces)


def test_rademacher_probes_are_plus_or_minus_one(rng):
    block = draw(1000, 4, "rademacher", rng, torch.float32)
    assert set(block.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(block.mean())) < 4 / 4000**0.5


def test_gaussian_probes_have_unit_variance(rng):
    block = draw(2000, 4, "gaussian", rng)
    assert abs(float(block.square().mean()) - 1) < 4 * (2 / 8000) ** 0.5


def test_an_unknown_distribution_is_rejected(rng):
    with pytest.raises(ValueError, match="got 'uniform'"):
        draw(3, 1, "uniform", rng)


def test_default_generator_has_seed_zero_and_is_not_the_global_one():
    state = torch.get_rng_state()
    first = draw(9, 1, "gaussian", resolve_generator(None))
    assert torch.equal(first, draw(9, 1, "gaussian", seeded(0)))
    assert torch.equal(state, torch.get_rng_state())


def test_a_seed_is_not_accepted_as_a_generator():
    with pytest.raises(TypeError, match=r"torch\.Generator or None, got 7"):
        resolve_generator(7)
