import pytest
import torch

import ritz
from ritz.studies import kernel_determinants, write
from ritz.studies.kernel_determinants import LENGTHSCALES, METHODS, Config, run

SMALL = Config(size=300, num_products=270, num_seeds=2, num_draws=1)


@pytest.fixture(scope="module")
def result():
    return run(SMALL)


def test_every_method_has_an_error_on_every_matrix(result):
    assert result.names == tuple(METHODS)
    for name in METHODS:
        assert result.errors[name].shape == (len(LENGTHSCALES), 1, 2)
        assert bool(torch.isfinite(result.errors[name]).all())
    assert bool((result.conditions[1:] > result.conditions[:-1]).all())


def test_krylov_is_most_accurate_for_large_condition_numbers(result):
    bad = slice(3, None)
    ours = result.errors["krylov"][bad].abs().amax()
    assert float(ours) < 0.03
    for name in ("lanczos 50 probes", "maxent", "chebyshev"):
        assert float(result.errors[name][bad].square().mean().sqrt()) > 3 * float(ours)


def test_the_truth_is_within_the_error_bars_of_the_quadratures(result):
    for name in ("krylov", "lanczos 10 probes", "lanczos 50 probes"):
        assert float(result.covered[name].double().mean()) >= 0.95


def test_as_many_products_as_rows_give_the_exact_value():
    found = run(Config(size=200, num_products=200, num_seeds=1, num_draws=1))
    assert float(found.errors["krylov"].abs().max()) < 1e-6


def test_the_table_has_the_published_errors(result):
    text = str(result)
    for word in ("krylov", "maxent", "condition", "as published", "MEMe", "in 4"):
        assert word in text


def test_the_result_and_its_figure_are_written_and_read(result, tmp_path):
    files = write(kernel_determinants, result, tmp_path)
    assert [file.suffix for file in files] == [".safetensors", ".png"]
    assert str(ritz.load(files[0])) == str(result)
