import math
from itertools import combinations

import pytest
import torch

import ritz
from ritz.optim import (
    effective_rates,
    scale_invariant_weights,
    solution_diversity,
    spectral_rates,
    weight_norms,
)


def looped(logits):
    """The definitions, a pair and a sample at a time."""
    kl, variation, distance, count = 0.0, 0.0, 0.0, 0
    for a, b in combinations(logits.double().softmax(-1).tolist(), 2):
        for p, q in zip(a, b, strict=True):
            classes = list(zip(p, q, strict=True))
            forward = sum(x * math.log(x / y) for x, y in classes)
            backward = sum(y * math.log(y / x) for x, y in classes)
            kl += (forward + backward) / 2
            variation += (sum(abs(x - y) for x, y in classes) / 2) ** 2
            distance += sum((x - y) ** 2 for x, y in classes)
            count += 1
    return [kl / count, variation / count, distance / count]


def test_diversity_equals_its_definitions(rng):
    logits = 3 * torch.randn(4, 7, 5, generator=rng)
    found = solution_diversity(logits)
    assert [found.kl, found.total_variation, found.distance] == pytest.approx(looped(logits), 1e-12)
    for i, j in combinations(range(4), 2):
        expected = looped(logits[[i, j]])
        pairs = (found.kl_pairs, found.total_variation_pairs, found.distance_pairs)
        assert [float(pair[i, j]) for pair in pairs] == pytest.approx(expected, 1e-12)
        assert all(bool(torch.equal(pair, pair.T)) for pair in pairs)


def test_diversity_accepts_a_list_and_counts_further_dimensions_as_samples(rng):
    logits = torch.randn(3, 4, 6, 5, generator=rng)
    whole = solution_diversity(logits.flatten(1, 2))
    found = solution_diversity(list(logits))
    assert found.num_samples == 24
    assert found.kl == whole.kl


def test_diversity_of_equal_solutions_is_zero(rng):
    logits = torch.randn(1, 6, 3, generator=rng).expand(4, -1, -1)
    shift = torch.arange(4.0).view(4, 1, 1)  # the softmax does not see it
    found = solution_diversity((logits + shift).double())
    assert found.kl < 1e-14
    assert found.distance < 1e-14


def test_diversity_does_not_underflow():
    # p = (1, e^-2000): its logarithm is known although it is zero as a float.
    logits = torch.tensor([[[0.0, -2000.0]], [[-2000.0, 0.0]]])
    found = solution_diversity(logits)
    assert found.kl == pytest.approx(2000.0)
    assert found.total_variation == pytest.approx(1.0)
    assert found.distance == pytest.approx(2.0)


def test_diversity_of_classes_with_logit_minus_infinity():
    both = torch.tensor([[[0.0, 1.0, -math.inf]], [[1.0, 0.0, -math.inf]]])
    assert solution_diversity(both).kl == pytest.approx(solution_diversity(both[..., :2]).kl)
    one = torch.tensor([[[0.0, 1.0, 0.0]], [[1.0, 0.0, -math.inf]]])
    assert solution_diversity(one).kl == math.inf


def test_diversity_is_printed_and_saved(rng, tmp_path):
    found = solution_diversity(torch.randn(3, 10, 4, generator=rng))
    assert "3 solutions, 10 samples" in str(found)
    ritz.save(found, tmp_path / "diversity.safetensors")
    again = ritz.load(tmp_path / "diversity.safetensors")
    assert again.kl == found.kl
    assert torch.equal(again.kl_pairs, found.kl_pairs)


@pytest.mark.parametrize(
    ("logits", "match"),
    [
        (torch.zeros(1, 3, 2), "at least two models, got 1"),
        ([torch.zeros(3, 2), torch.zeros(4, 2)], r"one shape \(n, c\).*\(4, 2\)"),
        (torch.zeros(2, 3), "one shape"),
        (torch.zeros(2, 0, 3), "one shape"),
        (torch.full((2, 3, 2), math.nan), "must not contain NaN"),
    ],
)
def test_diversity_error_names_wrong_logits(logits, match):
    with pytest.raises(ValueError, match=match):
        solution_diversity(logits)


def test_diversity_of_integer_tensors_raises():
    with pytest.raises(TypeError, match="logits must be of a real floating-point dtype"):
        solution_diversity(torch.zeros(2, 3, 2, dtype=torch.long))


def test_diagnostics_name_an_argument_of_another_type():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="or named tensors, got str"):
        weight_norms("model")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        scale_invariant_weights("model", torch.ones(2, 2))
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer, got Linear"):
        effective_rates(model, model, ["weight"])
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got SGD"):
        effective_rates(optimizer, optimizer, ["weight"])
    with pytest.raises(TypeError, match=r"spectrum must be the result of ritz\.lanczos"):
        spectral_rates(torch.ones(3))
