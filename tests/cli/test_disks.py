"""Disks that are full or read-only: one line, a code, and what was there before is there still."""

import errno
import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli.own import OWN, ritz

TRAIN = ["train", *OWN, "--batch-size", "16"]
MEASURES = {
    "spectrum": ["--steps", "6"],
    "landscape": ["--points", "3", "--directions", "random"],
    "sharpness": ["--steps", "6", "--probes", "2"],
}


@contextmanager
def quota(size):
    """The system itself writes no file beyond that size, which leaves half of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", refuse)  # the first thing that writing does
        yield


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_training_on_a_full_disk_keeps_the_last_checkpoint(
    here, finished, tmp_path, refused, capsys
):
    run = tmp_path / "run"
    few = [*TRAIN, "--json", "--out", run, "--epochs"]
    assert ritz(*few, "2") == 0
    checkpoint = (run / "checkpoint.safetensors").read_bytes()
    with quota(2000):
        line = refused(*few, "4")
    assert "cannot write the checkpoint" in line
    assert "File too large" in line
    assert "the previous checkpoint (2 epochs" in line
    assert (run / "checkpoint.safetensors").read_bytes() == checkpoint
    assert not list(run.glob(".*"))
    assert ritz(*few, "4") == 0
    assert ritz(*TRAIN, "--json", "--out", tmp_path / "whole", "--epochs", "4") == 0
    name = "weights.safetensors"
    assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("command", MEASURES)
def test_a_full_disk_is_one_line_and_keeps_earlier_results(
    here, finished, tmp_path, refused, command
):
    arguments = [command, "run", *OWN, "--json", *MEASURES[command], "--out", tmp_path]
    assert ritz(*arguments) == 0
    before = contents(tmp_path)
    with quota(300):
        line = refused(*arguments, "--seed", "1")
    assert f"cannot write to {tmp_path}: " in line
    assert "File too large" in line
    assert contents(tmp_path) == before


@pytest.mark.parametrize("command", ["train", *MEASURES])
def test_a_read_only_folder_is_one_line(here, finished, tmp_path, refused, monkeypatch, command):
    shutil.copytree(finished, tmp_path / "run")
    before = contents(tmp_path / "run")
    arguments = {"train": [*TRAIN, "--out", tmp_path / "run", "--epochs", "4",
                           "--average-from", "2", "--watch", "1"]}  # fmt: skip
    measured = [command, tmp_path / "run", *OWN, *MEASURES.get(command, ())]
    with read_only(monkeypatch):
        line = refused(*arguments.get(command, measured), "--json")
    assert f"cannot write to {tmp_path / 'run'}: Read-only file system" in line
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("command", MEASURES)
def test_a_read_only_folder_is_refused_before_the_computation(
    here, finished, tmp_path, refused, monkeypatch, command
):
    monkeypatch.setattr(
        "ritz.cli._measurement.measured_risk", lambda *a, **k: pytest.fail("too late")
    )
    with read_only(monkeypatch):
        line = refused(command, "run", *OWN, *MEASURES[command], "--json", "--out", tmp_path)
    assert line == f"ritz: cannot write to {tmp_path}: Read-only file system\n"


def test_temporary_files_of_a_killed_run_are_removed(here, finished, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "run")
    names = (".checkpoint.safetensors.123.0a1b2c3d", ".tmpaB3dE6", ".tmpaB3dE7")
    left, old, new = (tmp_path / "run" / name for name in names)
    for path in (left, old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert ritz(*TRAIN, "--out", tmp_path / "run", "--epochs", "2", "--average-from", "2",
                "--watch", "1", "--json") == 0  # fmt: skip
    assert not left.exists()
    assert not old.exists()
    assert new.exists()  # another command may be writing it
