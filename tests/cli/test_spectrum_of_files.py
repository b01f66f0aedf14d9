"""``ritz spectrum`` with the matrix of a file instead of a trained network."""

import json

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sparse
import torch
from cli.own import ritz, stopping_after

import ritz as library

LINE = sparse.diags_array([-1.0, 2.5, -1.0], offsets=[-1, 0, 1], shape=(60, 60)).tocsr()


@pytest.fixture
def matrix(tmp_path):
    scipy.io.mmwrite(tmp_path / "line.mtx", LINE)
    return tmp_path / "line.mtx"


def test_the_spectrum_of_a_matrix_file_is_printed_saved_and_drawn(matrix, tmp_path, capsys):
    assert ritz("spectrum", matrix, "--steps", 60) == 0

    out = capsys.readouterr().out
    assert "Spectrum of SparseOperator(60 x 60" in out
    assert "Frobenius norm" in out
    assert "spectrum-line.mtx-steps60.png" in out
    saved = library.load(tmp_path / "spectrum-line.mtx-steps60.safetensors")
    exact = torch.linalg.eigvalsh(torch.from_numpy(LINE.toarray()))
    torch.testing.assert_close(saved.values, exact)


def test_a_saved_sparse_matrix_of_scipy_gives_the_same_spectrum(matrix, tmp_path, capsys):
    sparse.save_npz(tmp_path / "line.npz", LINE)
    np.save(tmp_path / "line.npy", LINE.toarray())

    values = []
    for name in ("line.mtx", "line.npz", "line.npy"):
        assert ritz("spectrum", tmp_path / name, "--json", "--steps", 9, "--max-products", 7) == 0
        values.append(json.loads(capsys.readouterr().out)["result"][name]["values"])

    assert len(values[0]) == 7
    assert values[0] == values[1]


def test_an_interrupted_spectrum_of_a_file_resumes_bit_for_bit(matrix, tmp_path, monkeypatch):
    arguments = ("spectrum", matrix, "--json", "--save-interval", 0, "--steps", 20, "--out")
    assert ritz(*arguments, tmp_path / "whole") == 0
    with stopping_after(8, "ritz.spectra.lanczos", monkeypatch):
        assert ritz(*arguments, tmp_path / "torn") == 1

    assert ritz(*arguments, tmp_path / "torn") == 0

    name = "spectrum-line.mtx-steps20.safetensors"
    whole, torn = (library.load(tmp_path / part / name) for part in ("whole", "torn"))
    assert torch.equal(whole.values, torn.values)


def test_a_file_without_a_symmetric_matrix_is_one_line_and_exit_code_2(tmp_path, capsys):
    scipy.io.mmwrite(tmp_path / "general.mtx", sparse.csr_array([[1.0, 2.0], [0.0, 1.0]]))

    assert ritz("spectrum", tmp_path / "general.mtx") == 2

    assert "must contain a symmetric matrix" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--samples=3", "--matrix=ggn", "--average", "--split=test"])
def test_options_of_networks_are_refused_for_a_matrix(matrix, option, capsys):
    assert ritz("spectrum", matrix, option) == 2

    assert f"{option.partition('=')[0]} is for trained networks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "name"),
    [("spectrum", "data.py"), ("spectrum", "matrix.csv"), ("sharpness", "matrix.mtx")],
)
def test_a_file_of_another_kind_gets_a_line_that_says_what_to_pass(command, name, tmp_path, capsys):
    np.savetxt(tmp_path / name, np.eye(2))

    assert ritz(command, tmp_path / name) == 2

    error = capsys.readouterr().err
    assert "is no run folder" in error
    assert ".mtx" in error
