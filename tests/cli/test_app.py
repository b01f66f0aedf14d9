import importlib.util
import json
import math
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import ritz
from ritz import cli, studies
from ritz.__main__ import main
from ritz.cli import _app
from ritz.cli._output import print_result
from ritz.studies import digits

SETTINGS = ("size=60", "network_size=100", "num_steps=8", "network_steps=4")
SMALL = [f"--set={setting}" for setting in SETTINGS]
SLOW = {"torch", "numpy", "scipy", "safetensors", "matplotlib", "networkx", "sklearn"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_entry_point_exits_with_the_code(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ritz", "--version"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"ritz {ritz.__version__}\n"


def test_without_typer_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "ritz.cli._app")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == 'the command line needs typer: pip install "ritz[cli]"\n'


def test_a_wrong_name_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ritz", "study", "synthetic_spektra"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr() == (
        "",
        "ritz: no study is named 'synthetic_spektra'; did you mean synthetic_spectra or "
        "batch_spectra?\n",
    )


def test_every_module_without_underscore_is_a_command():
    found = CliRunner().invoke(_app.build(), ["--help"])
    assert found.exit_code == 0
    assert "demo" in found.output
    assert "study" in found.output


def commands(group, *path):
    """The words of every command and group of commands below a group."""
    yield list(path)
    for name, inner in getattr(group, "commands", {}).items():
        yield from commands(inner, *path, name)


@pytest.mark.parametrize(
    ("option", "words"), [("--version", f"ritz {ritz.__version__}\n"), ("--help", "Usage: ritz")]
)
def test_the_version_and_the_help_import_no_slow_library(option, words):
    command = [sys.executable, "-X", "importtime", "-m", "ritz", option]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert words in done.stdout
    assert "ritz.cli._options" in imported
    assert not SLOW & imported


def test_the_help_of_a_command_imports_no_slow_library():
    every = list(commands(typer.main.get_command(_app.build())))
    assert ["train"] in every
    assert ["graph", "density"] in every
    code = (
        "import sys\n"
        "from ritz.cli import _app\n"
        f"for words in {every}:\n"
        "    assert _app.run([*words, '--help']) == 0, words\n"
        f"    assert not {SLOW} & set(sys.modules), words"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [[], ["train"], ["graph", "density"]])
def test_flags_show_no_value_in_the_help(capsys, command):
    assert _app.run([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "--help" in out
    assert "<bool>" not in out


def test_every_help_has_an_example_and_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    for words in commands(typer.main.get_command(_app.build())):
        assert _app.run([*words, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80, words
        assert any(f"ritz {' '.join(words)}" in line for line in lines[8:]), words


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["paint"], "No such command 'paint'"),
        (["demo", "--colour"], "No such option"),
        (["demo", "--device", "cuda:99"], "device must be one of this machine, got 'cuda:99'"),
        (["demo", "--seed", "x"], "--seed must be a whole number, got 'x'"),
        (["study"], "Missing argument 'NAME'"),
        (
            ["study", "synthetic_spectra", "--set", "size"],
            "--set takes KEY=VALUE, got 'size'",
        ),
        (["study", "synthetic_spectra", "--set", "sise=3"], "did you mean size?"),
        (["study", "synthetic_spectra", "--set", "size=x"], "size must be a whole number"),
        (["study", "synthetic_spectra", "--set", "size=2"], "size must be at least 4"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, line):
    assert _app.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ritz: ")
    assert err.count("\n") == 1
    assert line in err


def test_debug_raises_the_error_at_any_position():
    for arguments in (["--debug", "study", "x"], ["study", "x", "--debug"]):
        with pytest.raises(KeyError, match="no study is named 'x'"):
            _app.run(arguments)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RuntimeError("it\nbroke"), 1, "ritz: RuntimeError: it broke\n"),
        (ritz.NotConvergedError("not yet"), 1, "ritz: NotConvergedError: not yet\n"),
        (FileNotFoundError("no such file: x"), 2, "ritz: no such file: x\n"),
        (typer.Abort(), 1, "ritz: interrupted\n"),
    ],
)
def test_a_failed_computation_has_exit_code_1(monkeypatch, capsys, error, code, line):
    def fail(name):
        raise error

    monkeypatch.setattr(studies, "find", fail)
    assert _app.run(["study", "x"]) == code
    assert capsys.readouterr().err.lstrip() == line


def test_a_study_prints_a_table_and_writes_a_figure(here, capsys):
    assert _app.run(["study", "synthetic-spectra", *SMALL, "--out", "deep/down"]) == 0
    out, err = capsys.readouterr()
    assert "Marchenko-Pastur" in out
    assert "deep/down/figure.png" in out
    assert "4/4" in err
    assert ritz.load(here / "deep/down/result.safetensors").config.size == 60


def test_a_study_prints_json(here, capsys):
    assert _app.run(["study", "synthetic_spectra", *SMALL, "--seed", "5", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert found["result"]["config"]["seed"] == 5
    assert len(found["result"]["cases"][0]["spectrum"]["values"]) == 8
    assert all((here / file).exists() for file in found["files"])


def test_json_holds_the_result_and_the_files(capsys):
    print_result({"a": [1.5, math.nan]}, [Path("x.png")], as_json=True)
    shown = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert shown == {"result": {"a": [1.5, None]}, "files": ["x.png"]}


def test_without_matplotlib_results_are_still_written(here, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert _app.run(["study", "synthetic_spectra", *SMALL]) == 0
    assert [path.name for path in (here / "out").rglob("*.*")] == ["result.safetensors"]


@pytest.fixture(scope="module")
def demo():
    """What the demo finds, and how it was asked for it: it takes seconds, so once."""
    found, calls = digits.run(digits.Config(seed=3, **digits.QUICK)), []

    def run(config, *, device, progress):
        calls.append((config, progress, torch.get_num_threads(), device))
        return found

    return run, calls


def test_the_demo_shows_a_table_and_names_its_files(here, monkeypatch, capsys, demo):
    run, calls = demo
    monkeypatch.setattr(digits, "run", run)
    threads = torch.get_num_threads()
    assert _app.run(["demo", "--quick", "--seed", "3"]) == 0
    asked = (digits.Config(seed=3, **digits.QUICK), True, 1, torch.device("cpu"))
    assert calls[-1] == asked
    assert torch.get_num_threads() == threads
    out = capsys.readouterr().out
    assert "Sharpness of" in out
    assert "Landscape of" in out
    assert "Look at out/demo/spectra.png first. Next: ritz train" in out
    numbers = {"training", "hessian", "sharpness", "landscape", "plane"}
    pictures = {"training", "spectra", "landscape"}
    assert {path.name for path in (here / "out/demo").iterdir()} == {
        *(f"{name}.safetensors" for name in numbers),
        *(f"{name}.png" for name in pictures),
    }
    assert ritz.load(here / "out/demo/training.safetensors").seed == 3


def test_the_demo_without_matplotlib(here, monkeypatch, capsys, demo):
    run, calls = demo
    monkeypatch.setattr(digits, "run", run)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    assert _app.run(["demo", "--json"]) == 0
    assert calls[-1][:2] == (digits.Config(), False)
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["result"]["config"]["num_samples"] == 256
    assert {Path(name).suffix for name in found["files"]} == {".safetensors"}


def test_every_command_has_a_panel_of_the_help():
    listed = sorted(name for names in _app.PANELS.values() for name in names)
    assert listed == sorted(info.name for info in pkgutil.iter_modules(cli.__path__)
                            if not info.name.startswith("_"))  # fmt: skip
