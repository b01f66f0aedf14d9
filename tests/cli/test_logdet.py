import json
import math

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sparse

from ritz.cli import _app


@pytest.fixture
def matrix(tmp_path):
    path = tmp_path / "matrix.mtx"
    scipy.io.mmwrite(path, sparse.diags_array([1.0, 2.0, 4.0]).tocsr())
    return str(path)


def test_the_value_is_printed_with_error_bar_method_products_and_time(matrix, capsys):
    assert _app.run(["logdet", matrix]) == 0
    out = capsys.readouterr().out
    assert f"log det = {math.log(8):.7f}"[:16] in out
    assert "factor of a sparse matrix of order 3, 0 products" in out


def test_a_matrix_saved_by_numpy_is_read(tmp_path, capsys):
    np.save(tmp_path / "matrix.npy", np.diag([1.0, 2.0, 4.0]))
    assert _app.run(["logdet", str(tmp_path / "matrix.npy")]) == 0
    assert "factor of a dense matrix of order 3" in capsys.readouterr().out


def test_json_has_the_estimate(matrix, capsys):
    assert _app.run(["logdet", matrix, "--method", "krylov", "--json", "--seed", "3"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    estimate = result["logdet"]
    assert estimate["mean"] == pytest.approx(math.log(8))
    assert (result["rows"], estimate["num_products"], estimate["stderr"]) == (3, 3, 0.0)


def test_bad_input_is_one_line_and_exit_code_2(matrix, tmp_path, capsys):
    assert _app.run(["logdet", str(tmp_path / "none.mtx")]) == 2
    assert "ritz: no matrix file" in capsys.readouterr().err
    assert _app.run(["logdet", matrix, "--method", "magic"]) == 2
    assert "--method must be one of" in capsys.readouterr().err
    scipy.io.mmwrite(tmp_path / "negative.mtx", sparse.diags_array([1.0, -2.0]).tocsr())
    assert _app.run(["logdet", str(tmp_path / "negative.mtx")]) == 2
    assert "positive definite, got a pivot of -2" in capsys.readouterr().err


def test_an_unknown_truncation_is_null_in_json(tmp_path, capsys):
    line = sparse.diags_array([-1.0, 3.0, -1.0], offsets=[-1, 0, 1], shape=(50, 50))
    scipy.io.mmwrite(tmp_path / "line.mtx", line.tocsr())
    options = ["--method", "lanczos", "--products", "10", "--json"]
    assert _app.run(["logdet", str(tmp_path / "line.mtx"), *options]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["result"]["logdet"]["truncation"] is None
