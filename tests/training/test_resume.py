"""Runs that are killed, interrupted or resumed end with the files of one that was not."""

import os
import random
import signal

import pytest
import torch
from processes import start
from torch.utils.data import DataLoader, TensorDataset
from training.examples import assert_same_bits, network, samples, state
from training.killed_run import run

from ritz.training import CurvatureMonitor, fit, read_log, read_weights

FILES = ("log.jsonl", "checkpoint.safetensors", "weights.safetensors", "average.safetensors",
         "epoch-0002.safetensors")  # fmt: skip


KILLED = """
import os, signal, sys, threading, warnings
from training.killed_run import run

warnings.simplefilter("ignore")
end = threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL))
end.daemon = True
end.start()
run(sys.argv[1], pause=0.15)
"""


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def kill_often(tmp_path, count):
    """Kill a run so many times at random moments; compare its files with an undisturbed one's."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    run(whole)
    clock, kills = random.Random(8), 0
    while kills < count:
        process = start(KILLED, broken, clock.uniform(0.0, 1.2), errors=tmp_path / "errors")
        process.join()
        assert (tmp_path / "errors").read_text() == ""
        if process.exitcode == 0:
            break  # it ended between two kills
        kills += 1
    run(broken)
    assert contents(broken) == contents(whole)
    return kills


def test_killed_runs_end_with_the_same_files(tmp_path):
    assert kill_often(tmp_path, 2) >= 1


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_twenty_kills_leave_the_same_files(tmp_path):
    assert kill_often(tmp_path, 20) >= 5


class Interrupt:
    """Sends this process a signal after so many steps."""

    unit = "step"

    def __init__(self, step, number=signal.SIGINT):
        self.step, self.number = step, number

    def __call__(self, count, model, optimizer):
        if count == self.step:
            os.kill(os.getpid(), self.number)


COMMON = {"num_epochs": 4, "optimizer_settings": {"lr": 0.1}, "average_from": 2}
KINDS = {
    "tensors": (lambda data: data, {"batch_size": 10}),
    "loader": (lambda data: DataLoader(TensorDataset(*data), batch_size=10, shuffle=True), {}),
    "function": (lambda data: lambda epoch: iter([(x, y) for x, y in zip(
        data[0].roll(epoch).split(10), data[1].roll(epoch).split(10), strict=True)]),
        {"steps_per_epoch": 5}),
}  # fmt: skip
OPTIMIZERS = ("sgd", "adamw", "padam", "lookahead_sgd", "gadam")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [1, 7, 10])
def test_an_interrupted_run_resumes_bit_for_bit(tmp_path, kind, step):
    make, more = KINDS[kind]
    models = [network(dropout=0.4) for _ in range(3)]
    logs = [tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"]
    fit(models[0], make(samples()), log=logs[0], **COMMON, **more)
    parts = {"log": logs[1], "checkpoint": tmp_path / "run", **COMMON, **more}
    first = fit(models[1], make(samples()), monitors=[Interrupt(step)], **parts)
    assert first.status.outcome == "interrupted"
    assert f"SIGINT after {step} steps" in first.status.message
    second = fit(models[2], make(samples()), **parts)
    assert second.status.outcome == "completed"
    assert_same_bits(state(models[2]), state(models[0]))
    assert logs[1].read_bytes() == logs[0].read_bytes()
    assert second.history["train_loss"].shape == (4,)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_kind_of_state_is_saved(tmp_path, optimizer):
    # A tenth of the usual rate for adaptive steps; what matters is that nothing is forgotten.
    rate = {"lr": 0.1 if "sgd" in optimizer else 0.01}
    common = {"num_epochs": 3, "batch_size": 10, "optimizer": optimizer, "schedule": "linear",
              "optimizer_settings": rate, "average_from": 2}  # fmt: skip
    whole, parts = network(norm=True), network(norm=True)
    fit(whole, samples(), **common)
    fit(parts, samples(), checkpoint=tmp_path, monitors=[Interrupt(8)], **common)
    # The weights of a resumed run come from its checkpoint, whatever the model has.
    parts = network(norm=True, seed=1)
    fit(parts, samples(), checkpoint=tmp_path, **common)
    assert_same_bits(state(parts), state(whole))


def test_sigterm_saves_a_checkpoint(tmp_path):
    result = fit(network(), samples(), num_epochs=4, batch_size=12, checkpoint=tmp_path,
                 monitors=[Interrupt(3, signal.SIGTERM)])  # fmt: skip
    assert "SIGTERM after 3 steps" in result.status.message
    assert str(tmp_path) in result.status.message
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interrupt_without_a_folder_says_what_was_missing():
    result = fit(network(), samples(), num_epochs=4, batch_size=12, monitors=[Interrupt(3)])
    assert not result.status.ok
    assert "pass checkpoint=" in str(result.status)


def test_a_signal_that_the_process_ignores_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the test ends
    result = fit(network(), samples(), num_epochs=1, batch_size=12, monitors=[Interrupt(1)])
    assert result.status.outcome == "completed"
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_second_interrupt_is_raised():
    class Twice(Interrupt):
        def __call__(self, count, model, optimizer):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(network(), samples(), num_epochs=1, batch_size=12, monitors=[Twice(1)])


def test_a_finished_run_is_not_trained_again_and_may_be_extended(tmp_path):
    common = {"batch_size": 12, "checkpoint": tmp_path, "log": tmp_path / "log.jsonl"}
    fit(network(), samples(), num_epochs=2, **common)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    again = fit(network(seed=1), samples(), num_epochs=2, **common)
    assert again.num_epochs == 2
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    longer = fit(network(seed=1), samples(), num_epochs=3, **common)
    whole = network()
    fit(whole, samples(), num_epochs=3, batch_size=12)
    assert longer.num_epochs == 3
    assert_same_bits(read_weights(tmp_path / "weights.safetensors"), state(whole))
    anew = fit(network(), samples(), num_epochs=1, resume=False, **common)
    assert anew.num_epochs == 1
    assert len(read_log(tmp_path / "log.jsonl")) == 1


@pytest.mark.parametrize("optimizer", ["sgd", "gadamx", "lookahead_sgd"])
def test_convolutions_are_resumed_again_and_again(tmp_path, optimizer):
    def build():
        model = torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, 2, 3)), torch.nn.Conv2d(1, 4, 2), torch.nn.Flatten(),
            torch.nn.Linear(8, 3),
        )  # fmt: skip
        fill = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=fill))
        return model

    common = {"batch_size": 12, "optimizer": optimizer, "average_from": 1, "final": "average",
              "optimizer_settings": {"lr": 0.05}}  # fmt: skip
    whole, parts = build(), build()
    fit(whole, samples(), num_epochs=5, **common)
    for num_epochs in range(1, 6):
        parts = build()
        fit(parts, samples(), num_epochs=num_epochs, checkpoint=tmp_path, **common)
    assert_same_bits(state(parts), state(whole))


@pytest.mark.parametrize("name", ["data", "validation"])
def test_loaders_with_persistent_workers_cause_a_warning(tmp_path, name):
    def parts(**options):
        loader = DataLoader(TensorDataset(*samples()), 12, num_workers=1, **options)
        return {"data": samples(), "batch_size": 12} | {name: loader}

    common = {"num_epochs": 1, "checkpoint": tmp_path, "resume": False}
    with pytest.warns(UserWarning, match=rf"persistent_workers=True in the DataLoader \({name}\)"):
        fit(network(), **parts(persistent_workers=True), **common)
    # Warnings are errors here: there is none without workers that are kept, or without a folder.
    assert fit(network(), **parts(), **common).status.ok
    assert fit(network(), **parts(persistent_workers=True), num_epochs=1).status.ok


def test_a_decaying_schedule_cannot_be_extended(tmp_path):
    common = {"batch_size": 12, "checkpoint": tmp_path, "schedule": "linear"}
    fit(network(), samples(), num_epochs=2, **common)
    with pytest.raises(ValueError, match="was made with num_epochs=2, this run has 4"):
        fit(network(), samples(), num_epochs=4, **common)


def test_patience_is_resumed(tmp_path):
    data = samples()
    common = {"num_epochs": 20, "batch_size": 12, "validation": data, "patience": 2,
              "optimizer_settings": {"lr": 0.0}}  # fmt: skip
    whole = fit(network(), data, **common)
    fit(network(), data, checkpoint=tmp_path, monitors=[Interrupt(15)], **common)
    parts = fit(network(), data, checkpoint=tmp_path, **common)
    assert parts.num_epochs == whole.num_epochs == 6
    assert fit(network(), data, checkpoint=tmp_path, **common).num_epochs == 6


@pytest.mark.parametrize("step", [5, 9, 12, 13, 18])
def test_patience_with_lookahead_and_an_interval_is_resumed_bit_for_bit(tmp_path, step):
    x, y = samples()
    common = {"num_epochs": 5, "batch_size": 12, "validation": (x, (y + 1) % 3), "patience": 2,
              "optimizer": "lookahead_sgd", "optimizer_settings": {"lr": 0.05, "k": 3},
              "final": "average"}  # fmt: skip
    whole, parts = network(), network()
    fit(whole, (x, y), log=tmp_path / "whole.jsonl", **common)
    common |= {"checkpoint": tmp_path / "run", "log": tmp_path / "parts.jsonl"}
    fit(network(), (x, y), monitors=[Interrupt(step)], **common)
    fit(parts, (x, y), **common)
    assert_same_bits(state(parts), state(whole))
    assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("step", [3, 8, 9, 10])
@pytest.mark.parametrize("kind", ["tensors", "loader"])
def test_a_run_with_a_largest_number_of_steps_is_resumed_bit_for_bit(tmp_path, kind, step):
    make, more = KINDS[kind]
    common = {
        "max_steps": 10,
        "num_epochs": 9,
        "average_from": 2,
        "validation": samples(seed=1),
        **more,
    }
    data = samples(35)  # four steps per epoch
    whole, parts = network(dropout=0.4), network(dropout=0.4)
    fit(whole, make(data), log=tmp_path / "whole.jsonl", **common)
    common |= {"checkpoint": tmp_path / "run", "log": tmp_path / "parts.jsonl"}
    fit(network(dropout=0.4), make(data), monitors=[Interrupt(step)], **common)
    result = fit(parts, make(data), **common)
    assert (result.num_epochs, result.num_steps) == (3, 10)
    assert_same_bits(state(parts), state(whole))
    assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert fit(network(), make(data), **common).num_steps == 10


def test_a_monitor_changes_nothing():
    data = samples()
    common = {"num_epochs": 2, "batch_size": 12, "optimizer_settings": {"lr": 0.1}}
    plain, watched = network(norm=True, dropout=0.3), network(norm=True, dropout=0.3)
    fit(plain, data, **common)
    everything = ("lambda_max", "trace", "variance", "spectrum")
    monitor = CurvatureMonitor((data[0][:9], data[1][:9]), quantities=everything, every=3,
                               unit="step", num_steps=4, num_probes=2)  # fmt: skip
    fit(watched, data, monitors=[monitor], **common)
    assert_same_bits(state(watched), state(plain))
    assert torch.is_grad_enabled()
