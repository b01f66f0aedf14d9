"""Checkpoints and weights: other architectures, files that would run, disks that are full."""

import errno
import os
import pickle
from pathlib import Path

import pytest
import torch
from processes import start
from safetensors.torch import save_file
from torch import nn
from training.examples import assert_same_bits, network, samples, state

import ritz
from ritz._core.storage import CorruptFileError
from ritz.training import CheckpointError, fit, load_weights, read_log, read_weights, save_weights
from ritz.training._log import Log

RUN = {"num_epochs": 2, "batch_size": 12}


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("nested", [None, "state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_of_torch_are_read(tmp_path, nested, prefix):
    model = network(norm=True)
    weights = {prefix + name: value for name, value in state(model).items()}
    torch.save({nested: weights, "epoch": 3} if nested else weights, tmp_path / "model.pt")
    load_weights(other := network(norm=True, seed=1), tmp_path / "model.pt")
    assert_same_bits(state(other), state(model))


def test_weights_of_safetensors_and_of_checkpoints_are_read(tmp_path):
    model = network(norm=True)
    save_file(state(model), tmp_path / "plain.safetensors")
    fit(model, samples(), checkpoint=tmp_path / "run", **RUN)
    save_weights(model, tmp_path / "own.safetensors", epoch=2)
    for path in ("run/checkpoint.safetensors", "run/weights.safetensors", "own.safetensors"):
        load_weights(other := network(norm=True, seed=1), tmp_path / path)
        assert_same_bits(state(other), state(model))
    assert read_weights(tmp_path / "plain.safetensors").keys() == state(model).keys()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("whole", [True, False])
def test_a_malicious_file_is_refused_and_nothing_in_it_runs(tmp_path, whole, protocol):
    path, target = tmp_path / "model.pt", tmp_path / "ran"
    content = {"0.weight": Malicious(str(target))}
    if whole:
        torch.save(content, path, pickle_protocol=protocol)
    else:
        path.write_bytes(pickle.dumps(content, protocol))
    with pytest.raises(CorruptFileError, match=r"model\.pt is refused"):
        load_weights(network(), path)
    assert not target.exists()


def test_a_malicious_checkpoint_is_refused(tmp_path):
    target = tmp_path / "ran"
    torch.save({"0.weight": Malicious(str(target))}, tmp_path / "checkpoint.safetensors")
    with pytest.raises(CorruptFileError, match="not a safetensors file"):
        fit(network(), samples(), checkpoint=tmp_path, **RUN)
    assert not target.exists()


def test_the_first_tensor_that_differs_is_named(tmp_path):
    fit(network(), samples(), checkpoint=tmp_path, **RUN)
    path = tmp_path / "weights.safetensors"
    with pytest.raises(ValueError, match=r"\(8, 6\) in the file and of shape \(9, 6\) in"):
        load_weights(network(width=9), path)
    with pytest.raises(ValueError, match=r"1\.weight is missing in the file"):
        load_weights(network(norm=True), path)
    with pytest.raises(ValueError, match=r"3\.bias is .* missing in the model"):
        load_weights(nn.Sequential(nn.Linear(6, 8)), path)
    wide = network(width=9)
    before = state(wide)
    with pytest.raises(ValueError, match=r"0\.weight is of shape"):
        fit(wide, samples(), checkpoint=tmp_path, **RUN)
    assert_same_bits(state(wide), before)


def test_files_of_other_formats_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_weights(network(), tmp_path / "missing.pt")
    (tmp_path / "text").write_text("hello, this is no model")
    with pytest.raises(CorruptFileError, match="not a safetensors file"):
        read_weights(tmp_path / "text")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CorruptFileError, match="must contain named tensors, got list"):
        read_weights(tmp_path / "list.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "list.pt").read_bytes()[:100])
    with pytest.raises(CorruptFileError, match="damaged"):
        read_weights(tmp_path / "cut.pt")
    ritz.save(ritz.trace(torch.eye(3)), tmp_path / "checkpoint.safetensors")
    with pytest.raises(
        ValueError, match="must hold the checkpoint of a training run, got Estimate"
    ):
        fit(network(), samples(), checkpoint=tmp_path, **RUN)


class Break:
    """Makes files impossible to write after so many steps."""

    unit = "step"

    def __init__(self, monkeypatch, step, error):
        self.monkeypatch, self.step, self.error = monkeypatch, step, error

    def __call__(self, count, model, optimizer):
        if count == self.step:
            self.monkeypatch.setattr("ritz._core.storage.save_file", self.fail)

    def fail(self, tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(self.error, os.strerror(self.error))


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    full = Break(monkeypatch, 6, errno.ENOSPC)
    common = {"num_epochs": 3, "batch_size": 12, "checkpoint": tmp_path, "save_interval": 0.0}
    with pytest.raises(CheckpointError, match=r"No space left on device.*1 epochs, 5 steps"):
        fit(network(), samples(), monitors=[full], **common)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.safetensors"]
    fit(found := network(), samples(), **common)
    fit(expected := network(), samples(), num_epochs=3, batch_size=12)
    assert_same_bits(state(found), state(expected))


# The system itself refuses to write beyond a size, which leaves half a file.
LIMITED = """
import resource, sys
from training.examples import network, samples
from ritz.training import CheckpointError, fit

class Limit:
    unit = "step"
    def __call__(self, count, model, optimizer):
        if count == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    fit(network(), samples(), num_epochs=3, batch_size=12, checkpoint=sys.argv[1],
        save_interval=0.0, monitors=[Limit()])
except CheckpointError as error:
    print(error, file=sys.stderr)
"""


def test_a_quota_of_the_system_leaves_the_last_good_checkpoint(tmp_path):
    run, errors = tmp_path / "run", tmp_path / "errors"
    process = start(LIMITED, run, errors=errors)
    process.join()
    assert process.exitcode == 0
    assert "cannot write the checkpoint" in errors.read_text()
    assert "the previous checkpoint (1 epochs, 5 steps) is intact" in errors.read_text()
    result = fit(network(), samples(), num_epochs=3, batch_size=12, checkpoint=run)
    assert result.num_steps == 12


def test_a_read_only_folder_is_seen_before_training(tmp_path, monkeypatch):
    def refuse(path, flags):
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))

    # The first thing that writing does.
    monkeypatch.setattr("ritz.training._checkpoint.open_file", refuse)
    model = network()
    with pytest.raises(CheckpointError, match="Read-only file system; the previous checkpoint"):
        fit(model, samples(), checkpoint=tmp_path, **RUN)
    assert_same_bits(state(model), state(network()))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_seen_before_training(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(CheckpointError, match="Permission denied"):
        fit(network(), samples(), checkpoint=tmp_path, **RUN)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot make the checkpoint folder"):
        fit(network(), samples(), checkpoint=tmp_path / "file", **RUN)


def test_a_log_that_cannot_be_written_keeps_its_lines(tmp_path, monkeypatch):
    log = Log(tmp_path / "log.jsonl")
    log.write({"kind": "epoch", "loss": float("nan")})
    whole, write = (tmp_path / "log.jsonl").read_bytes(), os.write

    def half(file, line):
        if len(line) > 4:
            return write(file, line[:4])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(CheckpointError, match="No space left on device"):
        log.write({"a": 1})
    monkeypatch.undo()
    assert (tmp_path / "log.jsonl").read_bytes() == whole
    assert read_log(tmp_path / "log.jsonl") == [{"kind": "epoch", "loss": None}]
    log.close()
    with pytest.raises(CheckpointError, match="cannot write the log"):
        Log(tmp_path / "missing" / "log.jsonl")


def test_half_a_line_is_not_read_and_a_foreign_log_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": 2}\n{"c')
    assert read_log(path) == [{"a": 1}, {"b": 2}]
    fit(network(), samples(), checkpoint=tmp_path / "run", log=path, **RUN)
    path.write_text("short")
    with pytest.raises(
        ValueError, match=r"fewer than the 270 at the time .* resume=False \(--restart\)"
    ):
        fit(network(), samples(), checkpoint=tmp_path / "run", log=path, num_epochs=3,
            batch_size=12)  # fmt: skip


def test_a_damaged_checkpoint_is_named_with_a_way_out(tmp_path):
    fit(network(), samples(), checkpoint=tmp_path, **RUN)
    file = tmp_path / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"is truncated .* resume=False \(--restart\)"):
        fit(network(), samples(), checkpoint=tmp_path, **RUN)


def test_weights_in_place_of_a_result_are_named(tmp_path):
    save_weights(network(), tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"must hold a result, .* got weights of a model"):
        ritz.load(tmp_path / "weights.safetensors")
