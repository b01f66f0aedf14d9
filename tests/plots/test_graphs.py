import pytest
import torch

from ritz import graphs, plots


def test_a_heat_map_has_names_numbers_and_lines_between_groups():
    made = [graphs.watts_strogatz(60, num_neighbors=4, p=p) for p in (0.0, 0.2, 0.9)]
    found = graphs.similarity(dict(zip("abc", made, strict=True)), num_moments=8)
    ax = plots.similarity(found, groups=(2, 1))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b", "c"]
    assert len(ax.texts) == 9
    assert len(ax.lines) == 2
    with pytest.raises(ValueError, match="groups must have a sum of at most 3"):
        plots.similarity(found, groups=(3, 1))


def test_a_density_is_drawn_over_the_exact_histogram():
    graph = graphs.erdos_renyi(80, p=0.2)
    values = graphs.eigenvalues(graph)
    ax = plots.over_histogram(graphs.density(graph, num_moments=8), values, num_bins=10, label="8")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["exact", "8"]
    (line,) = ax.lines
    area = torch.trapezoid(*(torch.as_tensor(part) for part in reversed(line.get_data())))
    assert float(area) == pytest.approx(1.0, abs=0.02)
    with pytest.raises(ValueError, match="num_bins must be at least 1"):
        plots.over_histogram(graphs.density(graph, num_moments=8), values, num_bins=0)
