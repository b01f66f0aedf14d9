"""A run folder is data: whatever it names, nothing runs that its user did not write."""

import json
import py_compile
import shutil
import sys
from pathlib import Path

import pytest
from cli.own import ritz

from ritz.cli._targets import Trust

MARK = "from pathlib import Path\nPath({!r}).touch()\n"
MINE = """
import functools
import this_is_callable_of_mine as a_module
from random import seed

thin = functools.partial(net, width=4)
smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
"""
CALLABLE = """
import sys, types

class Callable(types.ModuleType):
    def __call__(self): ...

sys.modules[__name__].__class__ = Callable
"""
SOURCE = "from torch import nn\n\ndef net(**options):\n    return nn.Linear(64, 10)\n"
DATA = """
import torch

def load():
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(0)), torch.arange(8)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The current folder of a user, with his own files in it."""
    here = tmp_path / "work"
    here.mkdir()
    (here / "net_of_mine.py").write_text(
        "import os\nfrom os import system\nfrom subprocess import check_call\n" + SOURCE
    )
    (here / "data_of_mine.py").write_text(DATA)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    yield here
    for name in [name for name in sys.modules if "_of_mine" in name]:
        del sys.modules[name]


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "ran"


def write_run(folder, **names):
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__), folder / "weights.safetensors")  # never come to
    known = {"model": "mlp", "data": "digits"} | names
    (folder / "run.json").write_text(json.dumps(known))
    return folder


def payload(folder, mark, name="payload.py"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(MARK.format(str(mark)) + SOURCE)


def refusal(name, run, mark):
    with pytest.raises(ValueError, match=r"the run names .*where you trust it, name it yourself"):
        Trust(run).check_module(name, f"{name}:net")
    assert not mark.exists()


@pytest.mark.parametrize("command", ["spectrum", "sharpness", "landscape"])
def test_no_command_runs_what_a_run_names(work, mark, refused, command):
    options = {"command": f"touch {mark}"}
    run = write_run(work / "evil", model="os:system", model_options=options)
    line = refused(command, run)
    assert line.startswith("ritz: the run names 'os:system', which is not a Python file of your")
    assert not mark.exists()


@pytest.mark.parametrize(
    "names",
    [
        {"model": "posix:system", "model_options": {"command": "touch MARK"}},
        {"data": "subprocess:check_call", "data_options": {"args": ["touch", "MARK"]}},
        {"loss": "os:abort"},
        {"model": "runs.x.payload:net"},
        {"data": "runs.x.payload:net"},
        {"loss": "runs.x.payload:net"},
        {"model": "net_of_mine:system", "model_options": {"command": "touch MARK"}},
        {"data": "net_of_mine:check_call", "data_options": {"args": ["touch", "MARK"]}},
    ],
)
def test_neither_model_nor_data_nor_loss_leads_elsewhere(work, mark, refused, names):
    text = json.dumps(names).replace("MARK", str(mark))
    payload(work / "runs" / "x", mark)
    line = refused("spectrum", write_run(work / "runs" / "x", **json.loads(text)))
    assert "where you trust it, name it yourself (--model, --data, --loss)" in line
    assert not mark.exists()


def test_places_that_are_not_the_users(work, mark, tmp_path):
    run = write_run(work / "runs" / "x")
    payload(run, mark)
    payload(run / "package", mark, "__init__.py")
    payload(work / "runs", mark, "beside.py")  # came in one folder with the run
    payload(work / "venv" / "lib" / "site-packages", mark)
    (work / "linked.py").symlink_to(run / "payload.py")
    (work / "linked_folder").symlink_to(run)
    (tmp_path / "elsewhere.py").write_text(MARK.format(str(mark)))
    (work / "outside.py").symlink_to(tmp_path / "elsewhere.py")
    (work / "extension.so").touch()
    py_compile.compile(str(run / "payload.py"), str(work / "compiled.pyc"))
    for name in ("runs.x.payload", "runs.x.package", "runs.x", "runs", "runs.beside", "linked",
                 "linked_folder.payload", "outside", "extension", "compiled", "os", "venv.lib",
                 "posix", "sys", "builtins", "zipimport", "os.path", "torch", "torch.nn",
                 "ritz.cli._app", "__main__", "importlib._bootstrap"):  # fmt: skip
        refusal(name, run, mark)


def test_a_package_of_the_users_may_not_be_left_for_one_that_is_not(work, mark):
    run = write_run(work / "runs" / "x")
    payload(run, mark)
    package = work / "package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner").symlink_to(run)
    refusal("package_of_mine.inner.payload", run, mark)
    refusal("package_of_mine.nothing", run, mark)


def test_nothing_is_trusted_where_the_run_is_the_current_folder(work, mark, monkeypatch, refused):
    write_run(work, model="payload:net")
    payload(work, mark)
    assert "the run names 'payload:net'" in refused("spectrum", ".")
    assert not mark.exists()
    (work / "below").mkdir()
    monkeypatch.chdir(work / "below")
    payload(work / "below", mark)
    refusal("payload", Path(".."), mark)


def test_a_link_to_the_run_does_not_make_it_another(work, mark, tmp_path):
    away = write_run(tmp_path / "away", model="link.payload:net")
    payload(away, mark)
    (work / "link").symlink_to(away)
    refusal("link.payload", Path("link"), mark)
    refusal("link.payload", away, mark)
    (work / "net").mkdir()
    (work / "net" / "run").symlink_to(work / "kept")
    payload(work / "kept", mark)
    refusal("kept.payload", Path("net/run"), mark)
    run = write_run(work / "runs" / "x")
    (run / "back.py").symlink_to(work / "net_of_mine.py")
    refusal("runs.x.back", run, mark)


def test_what_was_imported_from_elsewhere_does_not_pass_for_a_file(work, mark, monkeypatch):
    """A module that is loaded already is taken by Python whatever lies in the folder."""
    run = write_run(work / "run")
    for name in ("os", "subprocess", "json"):
        (work / f"{name}.py").write_text(SOURCE)
        refusal(name, run, mark)
    installed = work.parent / "installed"
    payload(installed, mark, "shadowed.py")
    (work / "shadowed.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [str(installed), str(work), *sys.path])
    refusal("shadowed", run, mark)


@pytest.mark.parametrize("attribute", ["system", "check_call", "__class__", "__init__", "__dir__"])
def test_only_what_was_written_in_a_file_is_called(work, attribute):
    from ritz.cli._targets import own

    with pytest.raises(ValueError, match="which was not written there but comes from"):
        own(f"net_of_mine:{attribute}", written_in=work / "run")
    assert own("net_of_mine:net", written_in=work / "run")(width=3).out_features == 10


def test_partial_functions_and_instances_are_of_the_file_that_holds_them(work):
    from ritz.cli._targets import own

    (work / "net_of_mine.py").write_text(SOURCE + MINE)
    (work / "this_is_callable_of_mine.py").write_text(CALLABLE)
    run = work / "run"
    assert own("net_of_mine:thin", written_in=run)().out_features == 10
    assert own("net_of_mine:smooth", written_in=run).label_smoothing == 0.1
    with pytest.raises(ValueError, match="which was not written there but comes from random"):
        own("net_of_mine:seed", written_in=run)
    with pytest.raises(ValueError, match="net_of_mine has no function 'a_module'"):
        own("net_of_mine:a_module", written_in=run)


def test_a_users_own_files_are_found_by_the_run_alone(work, capsys):
    package = work / "nets_of_mine" / "deep"
    package.mkdir(parents=True)
    (work / "nets_of_mine" / "__init__.py").write_text("")
    (package / "nets.py").write_text(SOURCE)  # in a folder without a file of its own
    assert ritz("train", "--model", "nets_of_mine.deep.nets:net", "--data", "data_of_mine:load",
                "--epochs", "1", "--out", "runs/x", "--json") == 0  # fmt: skip
    for name in [name for name in sys.modules if "_of_mine" in name]:
        del sys.modules[name]  # as for another process
    assert ritz("spectrum", "runs/x", "--steps", "2", "--json") == 0


def test_a_name_that_nobody_has_is_looked_for_nearby(work, mark, refused):
    run = write_run(work / "run", model="net_of_mina:net")
    line = refused("spectrum", run)
    assert "no module 'net_of_mina' in" in line
    assert "did you mean net_of_mine" in line
