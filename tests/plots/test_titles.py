"""Titles of spectra and directions."""

import os

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ritz
from ritz import plots
from ritz.cli import _app
from ritz.plots._style import direction_title, result_title, titled


def network(*layers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), *layers, nn.Linear(5, 3))
    return ritz.Risk(model, cross_entropy, (torch.randn(12, 4), torch.arange(12) % 3), batch_size=6)


def spectrum(op):
    return ritz.lanczos(op, num_steps=3)


@pytest.fixture
def normed():
    return network(nn.BatchNorm1d(5))


@pytest.mark.parametrize(
    ("matrix", "name"),
    [(ritz.hessian, "Hessian"), (ritz.ggn, "Gauss-Newton"), (ritz.fisher, "Fisher")],
)
def test_the_title_has_matrix_and_batch_norm_mode(normed, matrix, name):
    trained = matrix(normed.with_batch_norm("train"))
    assert result_title(spectrum(matrix(normed))) == f"{name}, batch norm eval"
    assert result_title(spectrum(trained)) == f"{name}, batch norm train"
    assert result_title(spectrum(matrix(network()))) == name


def test_other_matrices_have_no_title(normed):
    assert result_title(spectrum(torch.eye(5))) == ""
    assert result_title(spectrum(2 * ritz.hessian(normed))) == ""


def test_spectra_get_titles_only_if_all_titles_differ(normed):
    files = {"spectrum-1": spectrum(ritz.hessian(normed)), "spectrum-2": spectrum(ritz.ggn(normed))}
    found = titled(files)
    assert list(found) == ["Hessian, batch norm eval", "Gauss-Newton, batch norm eval"]
    assert list(found.values()) == list(files.values())
    alike = files | {"spectrum-3": files["spectrum-1"]}
    assert titled(alike) == alike
    other = files | {"matrix": spectrum(torch.eye(5))}
    assert titled(other) == other


def test_files_are_drawn_with_the_titles_of_their_results(normed, tmp_path):
    for name, op in (("a", ritz.hessian(normed)), ("b", ritz.ggn(normed))):
        ritz.save(spectrum(op), tmp_path / f"{name}.safetensors")
    files = [os.fspath(tmp_path / name) for name in ("b.safetensors", "a.safetensors", "c.svg")]
    assert _app.run(["plot", *files[:2], "--out", files[2]]) == 0
    drawn = (tmp_path / "c.svg").read_text(encoding="utf-8")
    titles = [f"{name}, batch norm eval" for name in ("Gauss-Newton", "Hessian")]
    assert 0 < drawn.index(titles[0]) < drawn.index(titles[1])  # in the order of the files


def test_the_plot_of_one_spectrum_has_its_title(normed):
    (ax,) = plots.plot(spectrum(ritz.hessian(normed))).axes
    assert ax.get_title("left") == "Hessian, batch norm eval"


def test_titles_of_directions():
    assert direction_title("largest") == "Ritz vector of the largest value"
    assert direction_title("smallest magnitude") == "Ritz vector of the value nearest zero"
    assert direction_title("towards the average") == "towards the average"
