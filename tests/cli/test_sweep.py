"""``ritz sweep``: its grid as text, its files, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from cli.own import OWN, SMALL, ritz

from ritz import load
from ritz.cli.sweep import parse_grid, parse_seeds
from ritz.training import read_log

RATES = ["--grid", "lr=0.05,0.2", "--seeds", "2"]


def test_a_sweep_leaves_runs_a_result_and_a_picture(here, tmp_path, capsys):
    folder = tmp_path / "sweep"
    usual = ["sweep", *OWN, "--epochs", "1", "--out", folder, "--jobs", "1"]
    assert ritz(*usual, *RATES, "--grid", "model.width=4", "--watch", "1") == 0

    out, err = capsys.readouterr()
    assert "4 runs: 2 values of lr x 1 value of model.width x 2 seeds; 1 epoch each; 0 done" in err
    assert "4/4" in err
    assert "lambda_max" in out
    assert out.splitlines()[2].split()[:3] == ["lr", "model.width", "test_accuracy"]
    runs = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert runs == [f"lr={x},model.width=4,seed={k}" for x in (0.05, 0.2) for k in (0, 1)]
    assert json.loads((folder / runs[3] / "run.json").read_text())["model_options"] == {"width": 4}
    assert (folder / "sweep.png").stat().st_size > 5000
    table = load(folder / "sweep.safetensors")
    log = read_log(folder / runs[3] / "log.jsonl")
    assert log[0]["test_loss"] == float(table.metrics["test_loss"][1, 0, 1])

    (folder / "sweep.png").unlink()
    assert ritz("plot", folder) == 0
    assert (folder / "sweep.png").stat().st_size > 5000
    assert ritz("spectrum", folder / runs[0], *OWN, "--steps", "3", "--json") == 0
    capsys.readouterr()
    assert ritz(*usual, *RATES, "--grid", "model.width=4", "--watch", "1") == 0
    again, err = capsys.readouterr()
    assert again == out
    assert "4 done before" in err

    # As if the sweep had been killed.
    (folder / "sweep.safetensors").unlink()
    assert ritz("plot", folder) == 2
    assert "which ritz sweep writes at its end: resume the sweep" in capsys.readouterr().err


def test_the_result_as_json(here, tmp_path, capsys):
    assert ritz("sweep", *OWN, *SMALL, "--out", tmp_path / "sweep", *RATES, "--jobs", "1",
                "--grid", "data=own_data:load,own_data:parts") == 0  # fmt: skip
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert found["result"]["grid"] == {
        "lr": [0.05, 0.2],
        "data": ["own_data:load", "own_data:parts"],
    }
    assert len(found["files"]) == 2


def test_values_are_numbers_words_and_lists():
    entries = ["lr=0.1, 1e-3", "optimizer=sgd,adam", "augment=true,false", "average-from=null,2",
               'batch_schedule=["0:4,1:8", "0:4"]', "model.hidden=[[64, 32], [16]]"]  # fmt: skip
    assert parse_grid(entries) == {
        "lr": [0.1, 0.001],
        "optimizer": ["sgd", "adam"],
        "augment": [True, False],
        "average-from": [None, 2],
        "batch_schedule": ["0:4,1:8", "0:4"],
        "model.hidden": [[64, 32], [16]],
    }
    assert parse_seeds("4") == 4
    assert parse_seeds("4,0") == [4, 0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--grid", "lr"], "--grid takes NAME=VALUE,..., got 'lr'"),
        (["--grid", "lr="], "--grid lr must have at least one value, got none"),
        (["--grid", "lr=[]"], "--grid must have at least one value of lr, got none"),
        (["--grid", "lr=0.1,,0.2"], "--grid lr must have a value between commas"),
        (["--grid", "lr=[0.1"], "--grid lr must be values or a list in JSON, got '[0.1'"),
        (["--grid", "lr=0.1,0.10"], "--grid must have each value of lr once, got 0.1 twice"),
        (["--grid", "lr=0.1", "--grid", "lr=0.2"], "--grid lr must be given once, got it twice"),
        (["--grid", "lrr=0.1"], "got 'lrr'; did you mean lr?"),
        (["--grid", "lr=-1"], "ritz: --grid lr=-1: lr must be finite and above 0, got -1"),
        (["--grid", "lr=0.1,abc"], "ritz: --grid lr=abc: lr must be a number, got str"),
        (["--grid=lr=0.1,abc"], "ritz: --grid lr=abc: lr must be a number, got str"),
        (["--grid", "optimizer.momentum=0,x"], "ritz: --grid optimizer.momentum=x: momentum of "),
        (
            ["--grid", "damping=constant,ratio", "--grid", "lr=0.1"],
            "ritz: --grid damping=ratio: damping rule 'ratio' needs an optimiser with a damping",
        ),
        (["--grid", "out=a,b"], "--grid must not have out, which is one for all runs"),
        (["--grid", "set-model=a"], "--grid must not have set-model: use model.NAME"),
        (["--grid", "set=momentum=0"], "--grid must not have set: use optimizer.NAME"),
        (["--grid", "watch=1,5"], "--grid watch=5: watch must be between 1 and 2, got 5"),
        (["--grid", "watch=0"], "--grid watch=0: watch must be at least 1, got 0"),
        (["--grid", "watch-samples=64"], "--watch-samples 64 needs --watch: add --watch 1"),
        (
            ["--watch", "1", "--grid", "watch-samples=64,1"],
            "--grid watch-samples=1: --watch-samples must be at least 2, got 1",
        ),
        (["--watch", "1", "--grid", "quantity=gsnr,foo"], "--grid quantity=foo: no quantity is na"),
        (["--watch", "1", "--grid", "watch_matrix=fisher"], "must be one of hessian, ggn; got 'f"),
        (["--grid", "preset=a,b"], "ritz: --grid preset=a: no preset is named 'a'"),
        (
            ["--grid", "preset=adamw/vgg16/cifar10", "--optimizer", "sgd"],
            "--grid preset=adamw/vgg16/cifar10: preset adamw/vgg16/cifar10 brings its optimiser",
        ),
        (["--grid", "patience=null,2"], "--grid patience=2: patience needs validation data"),
        (["--grid", "patience=2"], "pass validation= to fit() or sweep(), or hold out images"),
        (["--grid", "final=average"], ": pass --average-from or --patience\n"),
        (
            ["--grid", "curvature-batch-size=8", "--optimizer", "sgd"],
            "needs curvature, such as lanczos_newton or hessian_free, got 8 for SGD",
        ),
        (["--grid", "optimizer.momentum=true"], "momentum of optimizer sgd must be a number, got"),
        (
            ["--metric", "validation_accuracy"],
            "learning_rate, train_loss, train_accuracy, train_perplexity, test_loss, ",
        ),
        (
            ["--metric", "validation_accuracy", "--grid", "data=own_data:load,own_data:parts"],
            "--metric must be one of learning_rate, train_loss",
        ),
        (["--metric", "foo"], "ritz: --metric must be one of learning_rate, train_loss"),
        (["--grid", "batch-size=0"], "--batch-size must be at least 1, got 0"),
        (["--grid", "batch-size=x"], "--batch-size must be an integer, got 'x'"),
        (["--grid", "seed=1,2"], "--grid must not have seed: pass --seeds 0,1,2"),
        (["--seeds", "1,1"], "--seeds must differ, got 1 twice"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--seeds", "two"], "--seeds takes whole numbers such as 8,64, got 'two'"),
        (["--seeds", "1,2", "--seed", "3"], "--seed must not be given with a list of seeds"),
        (["--grid", "model=own_model:net,own_model:none"], "own_model has no function 'none'"),
        # Without advice on --set-model, which would not help here.
        (
            ["--grid", "model.depth=3"],
            "ritz: --grid model.depth=3: 'own_model:net': got an unexpected keyword argument "
            "'depth'; it takes num_classes, width\n",
        ),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--quantity", "trace"], "--quantity trace needs --watch: add --watch 1"),
    ],
)
def test_a_bad_sweep_is_refused_in_one_line(here, tmp_path, refused, arguments, line):
    usual = ["sweep", *OWN, *SMALL, "--out", tmp_path / "sweep", "--jobs", "1"]
    assert line in refused(*usual, *arguments)
    assert not (tmp_path / "sweep").exists()  # no run has begun


def test_options_of_monitors_and_published_settings_vary(here, tmp_path, capsys):
    usual = ["sweep", *OWN, *SMALL, "--seeds", "1", "--jobs", "1"]
    grid = ["--grid", "watch=1,2", "--grid", 'quantity=["gsnr",["lambda_max","trace"]]']
    assert ritz(*usual, "--out", tmp_path / "watched", *grid) == 0
    found = json.loads(capsys.readouterr().out)["result"]

    assert found["grid"] == {"watch": [1, 2], "quantity": ["gsnr", ["lambda_max", "trace"]]}
    logs = [read_log(path) for path in sorted((tmp_path / "watched").glob("*/log.jsonl"))]
    measured = [[x for x in log if x["kind"] == "curvature"] for log in logs]
    assert sorted((len(x), "gsnr" in x[0], "trace" in x[0]) for x in measured) == [
        (1, False, True), (1, True, False), (2, False, True), (2, True, False)]  # fmt: skip

    # As ritz train: options of the command line take precedence.
    grid = ["--grid", "preset=adamw/vgg16/cifar10,sgd/vgg16/cifar100"]
    assert ritz(*usual, "--out", tmp_path / "published", *grid) == 0
    runs = [json.loads(path.read_text())["training"]
            for path in (tmp_path / "published").glob("*/run.json")]  # fmt: skip
    assert sorted(run["optimizer"] for run in runs) == [
        "adamw/vgg16/cifar10", "sgd/vgg16/cifar100"]  # fmt: skip
    assert {run["num_epochs"] for run in runs} == {2}
    assert ritz("train", *OWN, *SMALL, "--preset", "adamw/vgg16/cifar10", "--out",
                tmp_path / "one") == 0  # fmt: skip
    one = json.loads((tmp_path / "one" / "run.json").read_text())["training"]
    assert one in runs


def test_an_error_names_the_folder_of_a_run_as_it_is(here, tmp_path, refused):
    damaged = tmp_path / "sweep" / "lr=0.1,batch_size=8,seed=0" / "checkpoint.safetensors"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"damaged")

    usual = ["sweep", *OWN, *SMALL, "--out", tmp_path / "sweep", "--jobs", "1", "--json"]
    grid = ["--grid", "lr=0.1", "--grid", "batch-size=8"]
    assert f"{damaged} is truncated" in refused(*usual, *grid)


def test_a_sweep_in_several_processes_is_refused(here, tmp_path, refused, monkeypatch):
    monkeypatch.setattr("ritz.training._sweep_plan.world_size", lambda: 2)
    assert "leave out torchrun" in refused("sweep", *OWN, "--out", tmp_path / "sweep", *RATES)


# ------------------------------------------------------------------------------------------
# Killed while two runs are trained at once.

NINE = ["--grid", "lr=0.02,0.1,0.5", "--seeds", "3", "--epochs", "25", "--save-interval", "0",
        "--jobs", "2", "--batch-size", "8"]  # fmt: skip


def sweeping(folder):
    command = [sys.executable, "-m", "ritz", "sweep", *OWN, *NINE, "--out", str(folder)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


def ended(folder):
    return len(list(folder.glob("*/weights.safetensors")))


def writers(folder):
    """The processes that have the lock of a run."""
    locks = (path.read_text() for path in folder.glob("*/.lock"))
    return [int(text) for text in locks if text and os.path.exists(f"/proc/{text}")]


def runs(folder):
    """The files of all runs but their times and what was being written."""
    paths = [path for path in folder.glob("lr*/*") if path.name[0] != "."]
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in paths
        if "times" not in path.name
    }


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_nine_runs_two_at_once_killed_twice_end_with_the_same_table(here, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected, _ = sweeping(whole).communicate()
    kills = []
    for least in (2, 5):
        process = sweeping(broken)
        while process.poll() is None and ended(broken) < least:
            time.sleep(0.05)
        left = writers(broken)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills.append((process.returncode, ended(broken)))
        # Without their parent, the processes that train end as well.
        patience = time.monotonic() + 60
        while writers(broken) and time.monotonic() < patience:
            time.sleep(0.05)
        assert not writers(broken), left

    found, _ = sweeping(broken).communicate()

    print("exit codes and runs that had ended:", kills)
    assert [code for code, _ in kills] == [-signal.SIGKILL] * 2
    assert all(0 < count < 9 for _, count in kills)
    assert found.replace(b"broken", b"whole") == expected
    assert runs(broken) == runs(whole)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_saves_its_runs(here, tmp_path, number):
    process = sweeping(tmp_path)
    while process.poll() is None and ended(tmp_path) < 2:
        time.sleep(0.05)
    process.send_signal(number)
    out, _ = process.communicate()

    assert process.returncode == 1
    assert b"interrupted: " in out
    assert b"saved in" in out
    assert not writers(tmp_path)
    process = sweeping(tmp_path)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert b"completed: 9 runs" in out
