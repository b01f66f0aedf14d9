"""A folder tells the truth of one run: no file of another, one writer, nothing from a failure."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training.examples import Stop, StoppedError, assert_same_bits, network, samples, state

from ritz.training import CheckpointError, TrainingConfig, fit, read_log, read_weights
from ritz.training._checkpoint import sole_writer
from ritz.training._data import as_parts
from ritz.training._run_folder import RunConfig, read_run, run_weights, train_run

RUN = {"num_epochs": 2, "batch_size": 12}


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_restarted_run_removes_the_files_of_the_run_before(tmp_path):
    fit(network(), samples(), checkpoint=tmp_path, average_from=1, keep=[1], **RUN)
    assert names(tmp_path) == ["average.safetensors", "checkpoint.safetensors",
                               "epoch-0001.safetensors", "weights.safetensors"]  # fmt: skip
    (tmp_path / "spectrum.safetensors").write_bytes(b"a result")
    with pytest.raises(StoppedError):
        fit(network(), samples(), checkpoint=tmp_path, resume=False, seed=1, monitors=[Stop(1)],
            **RUN)  # fmt: skip
    assert names(tmp_path) == ["checkpoint.safetensors", "spectrum.safetensors"]
    fit(network(), samples(), checkpoint=tmp_path, seed=1, **RUN)
    assert "average.safetensors" not in names(tmp_path)


def test_a_longer_run_that_is_killed_has_the_weights_of_its_checkpoint(tmp_path):
    common = {"batch_size": 12, "average_from": 1, "checkpoint": tmp_path}
    fit(network(), samples(), num_epochs=1, **common)
    finished = read_weights(run_weights(tmp_path))
    with pytest.raises(StoppedError):
        fit(network(), samples(), num_epochs=3, save_interval=0.0, monitors=[Stop(7)], **common)
    assert names(tmp_path) == ["checkpoint.safetensors"]
    fit(expected := network(), samples(), num_epochs=3, monitors=[Snapshot(6, kept := {})],
        **(common | {"checkpoint": None}))  # fmt: skip
    found = read_weights(run_weights(tmp_path))
    assert_same_bits(found, kept)
    assert not torch.equal(found["0.weight"], finished["0.weight"])
    fit(whole := network(), samples(), num_epochs=3, **common)
    assert_same_bits(state(whole), state(expected))


class Snapshot:
    unit = "step"

    def __init__(self, step, kept):
        self.step, self.kept = step, kept

    def __call__(self, count, model, optimizer):
        if count == self.step:
            self.kept |= state(model)


def test_files_of_others_are_not_removed(tmp_path):
    torch.save(state(network()), tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"was not written by ritz .*: move it"):
        fit(network(), samples(), checkpoint=tmp_path, **RUN)
    assert names(tmp_path) == ["weights.safetensors"]


@pytest.mark.parametrize("gone", [[], ["weights.safetensors"]])
def test_weights_without_a_checkpoint_are_removed_only_on_restart(tmp_path, gone):
    fit(network(), samples(), checkpoint=tmp_path, keep=[1], **RUN)
    for name in ["checkpoint.safetensors", *gone]:
        (tmp_path / name).unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "epoch-0001.safetensors" in before
    with pytest.raises(CheckpointError, match=r"but no checkpoint to resume from.*--restart"):
        fit(network(), samples(), checkpoint=tmp_path, **RUN)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    fit(network(), samples(), checkpoint=tmp_path, resume=False, **RUN)
    assert names(tmp_path) == ["checkpoint.safetensors", "weights.safetensors"]


def test_fewer_epochs_than_are_completed_are_refused(tmp_path):
    fit(network(), samples(), checkpoint=tmp_path, **RUN)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"num_epochs must be at least 2.* got 1.*--restart"):
        fit(network(), samples(), checkpoint=tmp_path, num_epochs=1, batch_size=12)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_log_of_an_extended_run_equals_that_of_an_uninterrupted_run(tmp_path):
    held = {"validation": samples(seed=1), "test": samples(seed=2), "batch_size": 12}
    for name, parts in {"whole": [3], "parts": [1, 3], "thrice": [1, 2, 2, 3]}.items():
        for count in parts:
            fit(network(), samples(), num_epochs=count, checkpoint=tmp_path / name,
                log=tmp_path / f"{name}.jsonl", **held)  # fmt: skip
    whole = (tmp_path / "whole.jsonl").read_bytes()
    assert [line["kind"] for line in read_log(tmp_path / "whole.jsonl")][-2:] == ["epoch", "final"]
    assert (tmp_path / "parts.jsonl").read_bytes() == whole
    assert (tmp_path / "thrice.jsonl").read_bytes() == whole


def config(**training):
    options = {"num_epochs": 1, "batch_size": 12} | training
    return RunConfig(model="net", data="rows", training=TrainingConfig(**options))


def run(folder, model=None, data=None, *, resume=True, **training):
    parts = as_parts(samples() if data is None else data)
    return train_run(config(resume=resume, **training), model or network(), parts, folder,
                     loss_fn=nn.functional.cross_entropy)  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"optimizer": "gadm"}, "gadm"),
        ({"model": network(features=7)}, "mat1 and mat2"),
        ({"data": (torch.ones(4, 6), torch.ones(5).long())}, "same length"),
    ],
)
def test_a_first_run_that_fails_leaves_no_files(tmp_path, wrong, error):
    with pytest.raises((ValueError, RuntimeError, KeyError), match=error):
        run(tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists() or names(tmp_path / "run") == []
    # So the folder is open to another run altogether.
    assert run(tmp_path / "run", network(features=5), samples(features=5)).status.ok


def test_a_restart_that_fails_leaves_the_existing_run(tmp_path):
    run(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(tmp_path, network(features=7), resume=False)
    for refused in ({"optimizer_settings": {"weight_decay": 0.1}}, {"optimizer": "adam"}):
        with pytest.raises(ValueError, match=r"start again with resume=False \(--restart\)"):
            run(tmp_path, **refused)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    run(tmp_path, num_epochs=2)
    assert read_run(tmp_path).training.num_epochs == 2


def test_a_folder_has_one_writer(tmp_path):
    with (
        sole_writer(tmp_path),
        pytest.raises(CheckpointError, match=rf"another process \(pid {os.getpid()}\)"),
    ):
        fit(network(), samples(), checkpoint=tmp_path, **RUN)
    assert names(tmp_path) == []
    assert fit(network(), samples(), checkpoint=tmp_path, **RUN).status.ok


def test_a_file_system_without_locks_does_not_stop_a_run(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(95, os.strerror(95))  # not supported

    monkeypatch.setattr("fcntl.flock", refuse)
    assert fit(network(), samples(), checkpoint=tmp_path, **RUN).status.ok
    assert ".lock" not in names(tmp_path)


HOLDER = """
import os, sys, time
from pathlib import Path
from ritz.training._checkpoint import sole_writer
with sole_writer(Path(sys.argv[1])):
    if not os.fork():  # as the worker of a loader, it lives on for a while
        time.sleep(60)
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_leaves_no_lock(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], text=True,
                              stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip
    try:
        assert holder.stdout.readline() == "held\n"
        time.sleep(0.1)
        with pytest.raises(CheckpointError, match=rf"\(pid {holder.pid}\)"):
            fit(network(), samples(), checkpoint=tmp_path, **RUN)
        holder.kill()
        holder.wait(10)
        assert names(tmp_path) == [".lock"]
        assert fit(network(), samples(), checkpoint=tmp_path, **RUN).status.ok
        assert ".lock" not in names(tmp_path)
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait(10)
        holder.stdout.close()


@pytest.mark.parametrize("stop", [3, 4, 6])
@pytest.mark.parametrize("where", ["loader", "sampler", "replacement"])
def test_a_loader_with_a_generator_resumes_bit_for_bit(tmp_path, where, stop):
    def loaders():
        generator, other = (torch.Generator().manual_seed(seed) for seed in (5, 6))
        data = TensorDataset(*samples())
        order = torch.utils.data.RandomSampler(data, replacement=where == "replacement",
                                               generator=generator)  # fmt: skip
        given = {"shuffle": True, "generator": generator}
        train = DataLoader(data, 12, **(given if where == "loader" else {"sampler": order}))
        return train, DataLoader(data, 20, shuffle=True, generator=other)

    def trained(**options):
        train, held = loaders()
        model = network(norm=True, dropout=0.3)
        fit(model, train, validation=held, num_epochs=2, log=tmp_path / "log.jsonl", **options)
        return state(model), (tmp_path / "log.jsonl").read_bytes()

    expected, lines = trained()
    folder = {"checkpoint": tmp_path / "run", "save_interval": 0.0}
    with pytest.raises(StoppedError):
        trained(monitors=[Stop(stop)], **folder)
    found, log = trained(**folder)
    assert_same_bits(found, expected)
    assert log == lines


def test_a_resumed_loader_without_its_generator_is_refused(tmp_path):
    data, generator = TensorDataset(*samples()), torch.Generator()
    fit(network(), DataLoader(data, 12, shuffle=True, generator=generator), num_epochs=1,
        checkpoint=tmp_path)  # fmt: skip
    with pytest.raises(ValueError, match=r"1 generators at its start, got 0: pass the same"):
        fit(network(), DataLoader(data, 12, shuffle=True), num_epochs=2, checkpoint=tmp_path)


def test_initial_weights_are_kept_and_survive_resuming(tmp_path):
    initial = {name: value.clone() for name, value in state(network()).items()}
    common = {"batch_size": 12, "checkpoint": tmp_path, "keep": [0]}
    fit(network(), samples(), num_epochs=1, **common)

    fit(network(), samples(), num_epochs=2, **common)

    kept = read_weights(tmp_path / "epoch-0000.safetensors")
    assert_same_bits(kept, initial)
    assert names(tmp_path) == [
        "checkpoint.safetensors", "epoch-0000.safetensors", "weights.safetensors"
    ]  # fmt: skip
