"""A run of a user's own two files, in the folder that they are in."""

import os
import sys

import pytest
from cli.own import DATA, MODEL, SMALL, ritz


@pytest.fixture(scope="session")
def own_files(tmp_path_factory):
    """A folder with a user's two files, as the current one would be."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_model.py").write_text(MODEL)
    (folder / "own_data.py").write_text(DATA)
    return folder


WATCHED = ("--quantity", "lambda_max", "--quantity", "spectrum", "--quantity", "layer_norms")


@pytest.fixture(scope="session")
def finished(own_files):
    """A run in that folder, with an average."""
    before, path = os.getcwd(), list(sys.path)
    os.chdir(own_files)
    try:
        code = ritz("train", "--model", "own_model:net", "--data", "own_data:load", "--out", "run",
                    "--average-from", "2", "--watch", "1", *WATCHED, *SMALL)  # fmt: skip
    finally:
        os.chdir(before)
        sys.path[:] = path
    assert code == 0
    return own_files / "run"


@pytest.fixture
def here(own_files, monkeypatch):
    """The user is in that folder."""
    monkeypatch.chdir(own_files)
    monkeypatch.syspath_prepend(str(own_files))
    return own_files


@pytest.fixture
def refused(capsys):
    """Run a command that must fail with one line and code two; return the line."""

    def run(*arguments):
        capsys.readouterr()
        assert ritz(*arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("ritz: ")
        assert err.count("\n") == 1, err
        return err

    return run
