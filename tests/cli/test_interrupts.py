"""Ctrl-C and the signal to terminate: one line, code one, and it says what was saved."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from cli.own import OWN, ritz, stopping_after

from ritz import studies
from ritz.__main__ import main
from ritz.cli import _app

COMMANDS = {
    "spectrum": ("ritz.spectra.lanczos", ["--steps", "12"]),
    "sharpness": ("ritz.measures.sharpness", ["--steps", "6", "--probes", "2"]),
    "landscape": ("ritz.measures.landscape", ["--points", "5", "--directions", "random"]),
}


def by_keyboard():
    signal.raise_signal(signal.SIGINT)


def by_system():
    os.kill(os.getpid(), signal.SIGTERM)


# Every command, and both signals: which of them it is makes no difference to a command.
@pytest.mark.parametrize(
    ("command", "end"),
    [
        ("spectrum", by_keyboard),
        ("spectrum", by_system),
        ("sharpness", by_keyboard),
        ("landscape", by_system),
    ],
)
def test_an_interrupted_command_resumes_to_the_same_result(
    here, finished, tmp_path, monkeypatch, capsys, command, end
):
    whole, torn, handler = tmp_path / "whole", tmp_path / "torn", signal.getsignal(signal.SIGTERM)
    function, few = COMMANDS[command]
    arguments = [command, "run", *OWN, *few, "--json", "--save-interval", "0", "--out"]
    assert ritz(*arguments, whole) == 0
    capsys.readouterr()
    with stopping_after(4, function, monkeypatch, end):
        assert ritz(*arguments, torn) == 1
    out, err = capsys.readouterr()
    line = "ritz: interrupted; run the command again to resume from the last save "
    assert (out, err) == ("", f"{line}(--save-interval is 0 s)\n")
    assert signal.getsignal(signal.SIGTERM) is handler
    assert ritz(*arguments, torn) == 0
    assert {path.name: path.read_bytes() for path in torn.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }


@pytest.mark.parametrize("command", ["spectrum", "landscape"])  # sharpness saves finished parts
def test_an_interrupt_before_the_first_save_says_so(
    here, finished, tmp_path, monkeypatch, capsys, command
):
    function, few = COMMANDS[command]
    with stopping_after(4, function, monkeypatch, by_keyboard):
        assert ritz(command, "run", *OWN, *few, "--json", "--out", tmp_path) == 1
    assert capsys.readouterr().err == (
        "ritz: interrupted before the first save (--save-interval is 30 s); run the command again "
        "to restart\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_a_process_saves_and_resumes(here, finished, tmp_path):
    command = [sys.executable, "-m", "ritz", "landscape", "run", *OWN, "--directions", "random",
               "--points", "100000", "--save-interval", "0", "--out", str(tmp_path)]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(tmp_path.glob(".landscape*.state")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 1, err
    assert out == ""
    assert err.endswith("ritz: interrupted; run the command again to resume from the last save "
                        "(--save-interval is 0 s)\n")  # fmt: skip
    assert "Traceback" not in err


def test_a_signal_that_the_process_ignores_stays_ignored(
    here, finished, tmp_path, monkeypatch, capsys
):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the test ends
    function, few = COMMANDS["spectrum"]
    with stopping_after(4, function, monkeypatch, by_system):
        assert ritz("spectrum", "run", *OWN, *few, "--json", "--out", tmp_path) == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def interrupt(*arguments):
    raise KeyboardInterrupt


def test_ctrl_c_in_other_commands_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(studies, "find", interrupt)
    assert _app.run(["study", "x"]) == 1
    assert capsys.readouterr().err == "ritz: interrupted\n"


def test_ctrl_c_during_start_up_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(_app, "build", interrupt)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "ritz: interrupted\n"


def test_ctrl_c_during_the_imports_of_a_command_is_one_line(monkeypatch, capsys):
    assert _app.run(["demo", "--help"]) == 0  # imports the modules of all commands
    capsys.readouterr()
    monkeypatch.delitem(sys.modules, "ritz.cli._factories", raising=False)
    finder = SimpleNamespace(find_spec=interrupt)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert _app.run(["demo"]) == 1
    assert capsys.readouterr().err == "ritz: interrupted\n"


def test_the_first_of_several_processes_prints_the_error(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr("ritz.cli._app.time.sleep", waited.append)
    monkeypatch.setenv("RANK", "0")
    assert _app.run(["study", "x"]) == 2
    assert waited == []
    monkeypatch.setenv("RANK", "3")
    assert _app.run(["study", "x"]) == 2
    assert waited == [_app.PATIENCE]
    first, other = capsys.readouterr().err.splitlines()
    assert first.startswith("ritz: no study is named 'x'")
    assert other == first.replace("ritz: ", "ritz: rank 3: ")
