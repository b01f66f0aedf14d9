import pytest
import torch

import ritz
from ritz.studies import synthetic_spectra, write
from ritz.studies.synthetic_spectra import Config, run

SMALL = Config(size=300, network_size=200, num_steps=30, network_steps=(5, 30), seed=1)


@pytest.fixture(scope="module")
def result():
    return run(SMALL)


def test_every_matrix_has_a_case(result):
    names = [case.name for case in result.cases]
    assert names == [
        "Wigner",
        "Marchenko-Pastur, q = 1/2",
        "Marchenko-Pastur, q = 2",
        "network-like",
        "network-like",
    ]
    assert [len(case.spectrum.values) for case in result.cases] == [30, 30, 30, 5, 30]


def test_ritz_values_lie_in_the_exact_support_and_nearly_fill_it(result):
    for case in result.cases:
        span = case.exact[-1] - case.exact[0]
        values = case.spectrum.values
        assert values[0] >= case.exact[0] - 1e-4 * span
        assert values[-1] <= case.exact[-1] + 1e-4 * span
        if len(values) == 30:
            assert values[-1] - values[0] > 0.98 * span


def test_half_of_the_rank_deficient_spectrum_is_at_zero(result):
    case = result.cases[2]
    at_zero = case.spectrum.values.abs() < 1e-3
    assert abs(float(case.spectrum.weights[at_zero].sum()) - 0.5) < 4 * (0.5 / 300) ** 0.5
    assert abs(float((case.exact.abs() < 1e-3).double().mean()) - 0.5) < 0.01


def test_the_diagonal_misses_the_support(result):
    for case in result.cases:
        spread = case.diagonal.max() - case.diagonal.min()
        assert spread < 0.5 * (case.exact[-1] - case.exact[0])


def test_the_start_vector_is_the_same_for_every_number_of_steps(result):
    few, many = (case.spectrum.diagonal for case in result.cases[3:])
    torch.testing.assert_close(few, many[:5])


def test_a_spectrum_without_one_of_its_ends_differs(result):
    verdicts = [row.verdict for row in synthetic_spectra.evidence(result)]
    assert verdicts == ["agrees", "agrees", "agrees", "differs", "agrees"]


def test_the_result_and_its_figure_are_written_and_read(result, tmp_path):
    stored, picture = write(synthetic_spectra, result, tmp_path / "new")
    found = ritz.load(stored)
    assert found.config == SMALL
    assert found.versions == result.versions
    torch.testing.assert_close(found.cases[0].exact, result.cases[0].exact)
    assert picture.stat().st_size > 20_000


def test_the_same_seed_gives_the_same_numbers(result):
    again = run(SMALL)
    for old, new in zip(result.cases, again.cases, strict=True):
        assert torch.equal(old.exact, new.exact)
        assert torch.equal(old.spectrum.weights, new.spectrum.weights)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"size": 3}, "size must be at least 4"),
        ({"network_size": 99}, "network_size must be at least 100"),
        ({"num_steps": 301}, "num_steps must be between 1 and"),
        ({"network_steps": (0,)}, "network_steps"),
        ({"precision": "float16"}, "precision must be one of"),
    ],
)
def test_a_wrong_configuration_names_the_field(bad, match):
    with pytest.raises(ValueError, match=match):
        Config(**({"size": 300} | bad))
