import subprocess
import sys

import pytest
import torch
from matplotlib import pyplot

import ritz
from ritz import plots


@pytest.fixture
def matrix():
    return torch.diag(torch.cat([torch.tensor([-4.0, 12.0]), torch.linspace(0, 3, 98)]).double())


@pytest.fixture
def ax():
    figure, (ax,) = plots.panels()
    yield ax
    pyplot.close(figure)


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def save(ax, tmp_path):
    ax.figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000


def test_a_spectrum_tells_signs_and_convergence_apart(matrix, ax, tmp_path):
    assert plots.spectrum(ritz.lanczos(matrix, num_steps=20), ax=ax) is ax
    assert ax.get_yscale() == "log"
    assert ax.get_xlabel() == r"Ritz value $\theta$"
    assert ax.get_ylabel() == r"weight $\tau$"
    assert legend(ax) == ["Ritz value ≥ 0", "Ritz value ≥ 0, unconverged", "Ritz value < 0"]
    colours = {line.get_color() for line in ax.get_lines()}
    assert len(colours) == 2
    assert {line.get_markerfacecolor() for line in ax.get_lines()} == colours | {"white"}
    save(ax, tmp_path)


@pytest.mark.parametrize(("cumulative", "ylabel"), [(False, "density"), (True, "mass below")])
@pytest.mark.parametrize("log", [False, True])
def test_a_density_has_a_band(matrix, ax, tmp_path, cumulative, ylabel, log):
    smooth = ritz.density(matrix, num_probes=4, num_steps=20, width=0.2)
    assert plots.density(smooth, ax=ax, cumulative=cumulative, log=log) is ax
    assert ax.get_ylabel() == ylabel
    assert legend(ax) == ["mean ± 2 stderr"]
    assert len(ax.collections) == 1
    save(ax, tmp_path)


def test_exact_and_lanczos_share_one_picture(matrix, ax, tmp_path):
    spectrum = ritz.lanczos(matrix, num_steps=20)
    exact = matrix.diagonal()
    assert plots.against_exact(spectrum, exact, diagonal=exact, ax=ax) is ax
    assert {"exact", "diagonal"} <= set(legend(ax))
    save(ax, tmp_path)


def test_panels_share_one_legend(matrix):
    figure, axes = plots.panels(1, 2)
    for ax in axes:
        plots.spectrum(ritz.lanczos(matrix, num_steps=20), ax=ax)
    plots.share_legend(figure)
    assert [ax.get_legend() for ax in axes] == [None, None]
    assert [len(legend.get_texts()) for legend in figure.legends] == [3]
    pyplot.close(figure)


def test_without_axes_a_new_figure_is_made(matrix):
    spectrum = ritz.lanczos(matrix, num_steps=5)
    first, second = plots.spectrum(spectrum), plots.spectrum(spectrum)
    assert first.figure is not second.figure
    pyplot.close("all")


def test_a_figure_is_pyplots_where_pyplot_is_in_use():
    figure, axes = plots.panels(2, 3)
    assert len(axes) == 6
    assert figure.number in pyplot.get_fignums()
    pyplot.close(figure)


def test_a_program_without_pyplot_never_loads_it(tmp_path):
    code = (
        "import sys, torch, ritz\n"
        "ax = ritz.plots.spectrum(ritz.lanczos(torch.eye(4), num_steps=1))\n"
        f"ax.figure.savefig({str(tmp_path / 'p.png')!r})\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "p.png").exists()


def test_a_missing_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "ritz\[plots\]"'):
        plots.panels()


def test_bins_are_counted(matrix):
    with pytest.raises(ValueError, match="num_bins"):
        plots.against_exact(ritz.lanczos(matrix, num_steps=5), matrix.diagonal(), num_bins=0)
