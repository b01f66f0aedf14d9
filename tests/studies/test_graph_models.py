import pytest

import ritz
from ritz.studies import graph_models, write
from ritz.studies.graph_models import MODELS, Config, run

SMALL = Config(
    sizes=(50,),
    num_seeds=2,
    other_neighbors=(20,),
    num_draws=2,
    large=400,
    small=150,
    large_edges=(2,),
    large_seeds=1,
)


@pytest.fixture(scope="module")
def result():
    return run(SMALL)


def test_true_parameters_are_recovered(result):
    # Four standard deviations of one graph of 50 vertices: 0.014, 0.05 and 0.3 are measured.
    for model, off in zip(MODELS, (0.06, 0.2, 1.5), strict=True):
        apart = result.estimates[model] - result.truths[model][:, None]
        assert float(apart.abs().max()) < off


def test_a_larger_graph_is_recognised_among_smaller_ones(result):
    assert MODELS[int(result.divergences[0, 0].argmin())] == "barabasi_albert"
    assert float(result.large_estimates[0, 0]) == 2


def test_the_table_has_the_published_estimates(result):
    text = str(result)
    for word in ("as published", "0.468, 0.068", "18.94, 1.1", "correct model in 1 of 1", "k = 20"):
        assert word in text


def test_other_numbers_of_neighbours_have_separate_rows(result):
    assert list(SMALL.cases) == [
        "erdos_renyi",
        "watts_strogatz",
        "watts_strogatz, 20",
        "barabasi_albert",
    ]
    # Four standard deviations of one graph: 0.02 is measured, less than with ten neighbours.
    found = result.estimates["watts_strogatz, 20"]
    assert float((found - 0.4).abs().max()) < 0.08


def test_the_standard_error_of_the_edge_density_is_binomial(result):
    # 1225 pairs twice: sqrt(0.24 / 2450).
    assert result.scatter.tolist() == pytest.approx([0.00990], rel=1e-3)
    assert float((result.drawn.mean() - 0.6).abs()) < 4 * float(result.scatter)
    assert "standard error of the edge density" in str(result)


def test_the_result_and_its_figure_are_written_and_read(result, tmp_path):
    files = write(graph_models, result, tmp_path)
    assert [file.suffix for file in files] == [".safetensors", ".png"]
    assert str(ritz.load(files[0])) == str(result)


def test_wrong_settings_name_the_field():
    with pytest.raises(ValueError, match="num_seeds must be at least 2"):
        Config(num_seeds=1)
    with pytest.raises(ValueError, match="num_neighbors must be at least 2, got 1"):
        Config(other_neighbors=(1,))
