from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from scipy import stats

import ritz
from ritz.studies import configure, entropy_moments, find, write
from ritz.studies.entropy_moments import SERIES, Config, bmxnt, figure, run

NEW, OLD, NEW_EXACT, OLD_EXACT = SERIES
COUNTS = (2, 4, 8, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A matrix with eigenvalues from 0.1 to 4.1, and a graph."""
    folder = tmp_path_factory.mktemp("data")
    ones = np.ones(199)
    chain = scipy.sparse.diags_array([np.full(200, 2.1), -ones, -ones], offsets=[0, 1, -1])
    scipy.io.mmwrite(folder / "chain.mtx", chain)
    graph = nx.to_scipy_sparse_array(nx.random_regular_graph(3, 300, seed=0), dtype=float)
    scipy.io.mmwrite(folder / "graph.mtx", scipy.sparse.coo_array(graph))
    return folder


@pytest.fixture(scope="module")
def config(folder):
    return Config(
        matrices=("chain.mtx",),
        graphs=("graph.mtx",),
        counts=COUNTS,
        dense_order=250,
        max_sweeps=50,
        data=str(folder),
    )


@pytest.fixture(scope="module")
def result(config):
    return run(config)


def test_log_determinants_equal_dense_ones(result, folder):
    chain = scipy.io.mmread(folder / "chain.mtx").toarray()
    graph = scipy.io.mmread(folder / "graph.mtx").toarray()
    laplacian = np.eye(300) + np.diag(graph.sum(1)) - graph
    exact = [np.linalg.slogdet(matrix)[1] for matrix in (chain, laplacian)]
    assert result.exact == pytest.approx(exact)
    assert result.names == ("chain", "I + L, graph")
    assert result.orders == (200, 300)


def test_entropy_and_error_decrease_with_more_moments(result):
    for series, row in ((NEW, 0), (NEW, 1), (NEW_EXACT, 0)):
        entropies, errors = result.entropies[series][row], result.errors[series][row]
        assert bool((entropies.diff() <= 1e-3).all())
        assert float(errors[-1]) < float(errors[0]) / 3
        assert bool(result.solved[series][row].all())
    assert float(result.errors[NEW_EXACT][0, -1]) < 1e-3


def test_bmxnt_does_not_match_many_moments(result):
    assert not bool(result.solved[OLD][:, -1].any())
    for series, other in ((NEW, OLD), (NEW_EXACT, OLD_EXACT)):
        assert float(result.entropies[other][0, -1]) > float(result.entropies[series][0, -1]) + 0.01
    # With 50 probes of 200 entries the error of the moments is most of that of either.
    assert float(result.errors[OLD_EXACT][0, -1]) > 3 * float(result.errors[NEW_EXACT][0, -1])


def test_eigenvalues_are_computed_up_to_dense_order(result):
    assert bool(result.entropies[NEW_EXACT][0].isfinite().all())
    assert bool(result.entropies[NEW_EXACT][1].isnan().all())


def test_both_methods_get_the_same_moments():
    """Power moments on [0, 1] from Chebyshev moments: exactly those of a known law."""
    t = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    degrees = torch.arange(31, dtype=torch.float64)
    chebyshev = torch.cos(degrees * torch.arccos(2 * t - 1)[:, None]).mean(0)
    found = entropy_moments._powers(30) @ chebyshev
    torch.testing.assert_close(found, (t[:, None] ** degrees).mean(0), rtol=1e-12, atol=1e-15)


def test_the_table_has_a_row_per_series(result):
    text = str(result)
    assert "chain, order 200, log det" in text
    assert text.count("MEMe: entropy") == 2
    assert text.count("MEMe, exact moments: error") == 1
    assert "*" in text.splitlines()[-1]


def test_the_result_and_its_figure_are_written_and_read(result, tmp_path):
    files = write(entropy_moments, result, tmp_path)
    assert [file.suffix for file in files] == [".safetensors", ".png"]
    assert str(ritz.load(files[0])) == str(result)
    assert len(figure(result).axes) == 4


def test_a_missing_file_is_named_with_the_folder(config, folder, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no file 'matrices/1138_bus.mtx' in .*RITZ_DATA"):
        run(Config(data=str(folder)))
    monkeypatch.delenv("RITZ_DATA", raising=False)
    with pytest.raises(
        FileNotFoundError, match=r"no folder for 'matrices/1138_bus.mtx': give data"
    ):
        run(Config())


def test_the_folder_defaults_to_the_environment_variable(folder, monkeypatch):
    monkeypatch.setenv("RITZ_DATA", str(folder))
    found = run(Config(matrices=("chain.mtx",), graphs=(), counts=(2,), dense_order=0))
    assert found.names == ("chain",)


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        ("counts", "5,3", "counts must be numbers of moments, ascending"),
        ("counts", "0,3", "counts must be at least 1"),
        ("num_probes", "1", "num_probes must be at least 2"),
        ("dense_order", "-1", "dense_order must be at least 0"),
        ("max_sweeps", "0", "max_sweeps must be at least 1"),
        ("seed", "-1", "seed must be at least 0"),
    ],
)
def test_wrong_settings_name_the_field(field, text, message):
    with pytest.raises(ValueError, match=message):
        configure(find("entropy-moments").Config, {field: text})


BETA = stats.beta(2, 3)


def power_moments(law, m):
    return torch.tensor([float(law.moment(k)) if k else 1.0 for k in range(m + 1)]).double()


def test_bmxnt_solves_one_moment_as_maximum_entropy_does():
    density = bmxnt(power_moments(BETA, 1), rtol=1e-12)
    exact = ritz.maxent(power_moments(BETA, 1), basis="power", interval=(0.0, 1.0))

    assert density.solved
    assert density.entropy == pytest.approx(exact.entropy)
    assert density.mean_log == pytest.approx(exact.expectation(torch.log), rel=1e-5)


def test_bmxnt_finds_an_exponential_density_from_two_moments():
    law = stats.truncexpon(b=3, scale=1 / 3)
    density = bmxnt(power_moments(law, 2))

    assert density.mean_log == pytest.approx(law.expect(np.log), rel=2e-3)
    assert density.entropy == pytest.approx(law.entropy(), abs=2e-3)


def test_bmxnt_needs_no_sweep_for_uniform_moments():
    density = bmxnt(1 / torch.arange(1, 9, dtype=torch.float64), max_sweeps=0)

    assert density.solved
    assert density.entropy == pytest.approx(0.0, abs=1e-12)
    assert density.mean_log == pytest.approx(-1.0, abs=1e-5)


def test_the_entropy_of_bmxnt_rises_with_the_moments_and_that_of_maxent_does_not():
    """With more moments more is known, so the entropy must fall: BMxnt stops too early."""
    counts = (2, 3, 5, 8)
    old = [bmxnt(power_moments(BETA, m)) for m in counts]
    new = [ritz.maxent(power_moments(BETA, m), basis="power", interval=(0.0, 1.0)) for m in counts]

    assert all(b.entropy > a.entropy + 1e-3 for a, b in pairwise(old))
    assert all(b.entropy <= a.entropy for a, b in pairwise(new))
    assert not any(density.solved for density in old)


def test_the_bound_of_bmxnt_scales_the_density():
    targets = power_moments(BETA, 2)
    unit, wide = bmxnt(targets), bmxnt(targets, bound=4.0)

    assert wide.mean_log == pytest.approx(unit.mean_log + np.log(4))
    assert wide.entropy == unit.entropy  # relative to the flat density


@pytest.mark.parametrize(
    ("moments", "message"),
    [
        ([1.0], "positive power moments"),
        ([[1.0, 0.5]], "positive power moments"),
        ([1.0, -0.5], "positive power moments"),
        ([1.0, float("nan")], "moments must be finite"),
        ([1.0, float("inf")], "moments must be finite"),
    ],
)
def test_bmxnt_rejects_wrong_moments(moments, message):
    with pytest.raises(ValueError, match=message):
        bmxnt(torch.tensor(moments))
