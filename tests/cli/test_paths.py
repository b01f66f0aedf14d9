"""Files of the current folder do not hide installed modules, except the one that is named."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.own import ritz

import ritz as ritz_itself
from ritz.cli._factories import import_target

NET = """
def net():
    import beside_of_mine

    return beside_of_mine.__file__

def place():
    return __file__
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The current folder of a user, which is not on the path; some of its names are installed."""
    here, installed = tmp_path / "work", tmp_path / "installed"
    for folder in (here, installed):
        folder.mkdir()
        for name in ("shared_of_mine", "named_of_mine"):
            (folder / f"{name}.py").write_text(NET)
    (here / "beside_of_mine.py").touch()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(installed), *sys.path])
    yield here
    for name in [name for name in sys.modules if "_of_mine" in name]:
        del sys.modules[name]


def test_the_current_folder_is_searched_first_for_the_named_module_only(work):
    before = list(sys.path)
    factory = import_target("named_of_mine:net")
    assert sys.path == [*before, str(work)]
    assert factory() == str(work / "beside_of_mine.py")
    assert import_target("named_of_mine:place")() == str(work / "named_of_mine.py")
    assert importlib.util.find_spec("shared_of_mine").origin.startswith(before[0])


def test_a_python_path_set_by_the_user_is_not_changed(work, monkeypatch):
    monkeypatch.setattr(sys, "path", ["first", str(work), *sys.path])
    before = list(sys.path)
    import_target("named_of_mine:net")
    assert sys.path == before


def test_a_module_in_the_run_folder_does_not_replace_an_installed_one(work, capsys):
    small = ["--set-model", "hidden=2", "--epochs", "1", "--out", "run", "--json"]
    assert ritz("train", "--model", "mlp", "--data", "digits", *small) == 0
    (work / "run" / "matplotlib.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    command = [sys.executable, "-m", "ritz", "spectrum", ".", "--steps", "2", "--json"]
    folder, source = work / "run", str(Path(ritz_itself.__file__).parents[1])
    path = os.environ | {"PYTHONPATH": source}  # an empty entry would be the current folder
    done = subprocess.run(command, cwd=folder, env=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(folder.glob("spectrum*.png"))
    assert not (folder / "ran").exists()
