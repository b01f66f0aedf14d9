import json
import shutil
import subprocess
import sys
import time
from importlib import import_module

import pytest
import torch
from cli.own import SMALL, ritz

from ritz.cli._factories import parse_settings
from ritz.training import CurvatureMonitor, load_weights, read_log, read_weights
from ritz.training._run_folder import read_run

OWN = ["--model", "own_model:net", "--data", "own_data:load"]


def test_a_run_folder_has_configuration_log_checkpoint_and_weights(finished):
    names = {path.name for path in finished.glob("*.*")}
    assert {"run.json", "log.jsonl", "checkpoint.safetensors", "weights.safetensors",
            "average.safetensors"} <= names  # fmt: skip
    config = read_run(finished)
    assert (config.model, config.data, config.batch_size) == ("own_model:net", "own_data:load", 16)
    assert config.training.average_from == 2
    kinds = [record["kind"] for record in read_log(finished / "log.jsonl")]
    assert kinds == ["epoch", "curvature", "epoch", "curvature"]


def test_a_registered_model_takes_shape_and_classes_from_the_data(tmp_path, capsys):
    arguments = ["--model", "mlp", "--data", "digits", "--set-model", "hidden=[3]", "--epochs", "1"]
    assert ritz("train", *arguments, "--batch-size", "512", "--out", tmp_path / "run") == 0
    out, err = capsys.readouterr()
    assert "1 epochs, 3 steps" in out
    assert "training" in err
    shapes = {
        name: tuple(x.shape)
        for name, x in read_weights(tmp_path / "run/weights.safetensors").items()
    }
    assert shapes == {"1.weight": (3, 64), "1.bias": (3,), "3.weight": (10, 3), "3.bias": (10,)}


def test_json_output_is_all_that_is_printed(here, tmp_path, capsys):
    assert ritz("train", *OWN, *SMALL, "--out", tmp_path / "run", "--seed", "3") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert found["result"]["num_steps"] == 6
    assert found["result"]["seed"] == 3
    assert str(tmp_path / "run/weights.safetensors") in found["files"]


def test_results_of_measurements_are_not_listed_as_written(here, finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    for name in ("spectrum-hessian.safetensors", "spectrum.png", "notes.epoch-0001.safetensors"):
        (run / name).touch()
    capsys.readouterr()
    assert ritz("train", *OWN, *SMALL, "--keep", "2", "--restart", "--out", run) == 0
    assert json.loads(capsys.readouterr().out)["files"] == [
        str(run / name)
        for name in ("checkpoint.safetensors", "epoch-0002.safetensors", "log.jsonl",
                     "log.times.jsonl", "run.json", "weights.safetensors")
    ]  # fmt: skip


def test_the_seed_fixes_the_weights_and_a_finished_run_is_unchanged(here, tmp_path, capsys):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert ritz("train", *OWN, *SMALL, "--out", tmp_path / name, "--seed", seed) == 0
    files = {name: (tmp_path / name / "weights.safetensors").read_bytes() for name in "abc"}
    assert files["a"] == files["b"] != files["c"]
    assert ritz("train", *OWN, *SMALL, "--out", tmp_path / "a", "--seed", 1) == 0
    assert (tmp_path / "a" / "weights.safetensors").read_bytes() == files["a"]


def test_another_model_in_the_folder_of_a_run_needs_restart(here, finished, tmp_path, refused):
    shutil.copytree(finished, tmp_path / "run")
    other = ["--model", "own_model:smooth", "--data", "own_data:load", *SMALL]
    line = refused("train", *other, "--out", tmp_path / "run")
    assert "was made with --model 'own_model:net', this run has 'own_model:smooth'" in line
    assert read_run(tmp_path / "run").model == "own_model:net"
    assert ritz("train", *other, "--out", tmp_path / "run", "--restart") == 0
    assert read_run(tmp_path / "run").model == "own_model:smooth"


def test_torch_loaders_are_accepted_as_data(here, tmp_path, capsys):
    arguments = ["--model", "own_model:smooth", "--data", "own_data:loaders", "--epochs", "1"]
    assert ritz("train", *arguments, "--out", tmp_path / "run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["result"]["num_steps"] == 3


@pytest.mark.parametrize(("data", "size"), [("loaders", 16), ("named", 24)])
def test_data_in_batches_have_the_batch_size_of_the_run(here, tmp_path, refused, data, size):
    names = ["--model", "own_model:smooth", "--data", f"own_data:{data}"]
    if data == "named":
        names = ["--model", "own_model:WithLoss", "--data", "own_data:named", "--loss", "model"]
    command = ["train", *names, "--epochs", "1"]

    assert ritz(*command, "--batch-size", str(size), "--out", tmp_path / "equal") == 0
    assert ritz(*command, "--out", tmp_path / "run") == 0
    other = refused(*command, "--batch-size", "8", "--out", tmp_path / "other")
    measured = refused("spectrum", tmp_path / "run", *names, "--batch-size", "8")

    assert read_run(tmp_path / "run").training.batch_size == size
    assert "--batch-size must not be passed for data in batches" in other
    assert "--batch-size must not be passed for data in batches" in measured
    assert not (tmp_path / "other").exists()


def test_quantities_of_a_loader_are_for_its_batch_size(here, tmp_path):
    names = ["--model", "own_model:smooth", "--data", "own_data:loaders", "--epochs", "1"]
    watch = ["--watch", "1", "--quantity", "norm_test", "--watch-samples", "48"]

    assert ritz("train", *names, *watch, "--out", tmp_path / "run") == 0

    model = import_module("own_model").smooth()
    load_weights(model, tmp_path / "run/weights.safetensors")
    data = import_module("own_data").load()[0]
    monitor = CurvatureMonitor(data, quantities=["norm_test"], train_batch_size=16)
    logged = read_log(tmp_path / "run/log.jsonl")[-1]["norm_test"]
    assert logged == pytest.approx(monitor.measure(model)["norm_test"], rel=1e-4)


def test_a_run_that_diverges_exits_with_code_one(here, tmp_path, capsys):
    model = ["--model", "own_model:smooth", "--data", "own_data:load", "--loss", "own_model:worse"]
    assert ritz("train", *model, *SMALL, "--lr", "1e6", "--out", tmp_path / "run") == 1
    assert "diverged: the loss of epoch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--watch", "0"], "--watch must be at least 1, got 0"),
        (["--watch", "3"], "--watch must be between 1 and 2, got 3"),
        (["--average-from", "9"], "--average-from must be between 1 and 2, got 9"),
        (["--optimizer", "gadan"], "no optimiser is named 'gadan'; did you mean gadam"),
        (["--schedule", "cosine"], "linear, linear_held, step; got 'cosine'"),
        (["--set", "momentum"], "--set takes KEY=VALUE, got 'momentum'"),
        (["--device", "tpu"], "device must be cpu, cuda or cuda:<number>, got 'tpu'"),
        (["--loss", "cross_entropi"], "did you mean cross_entropy?"),
        (["--set-model", "depth=3"], "got an unexpected keyword argument 'depth'; it takes"),
        (["--lr", "nan"], "--lr must be finite and above 0, got nan"),
        (["--lr", "-1"], "--lr must be finite and above 0, got -1.0"),
        (["--set", "lr=NaN"], "--set lr must be finite and above 0, got nan"),
        (["--set", "lr=fast"], "--set lr must be a number, got str"),
        (["--weight-decay", "-0.1"], "--weight-decay must be finite and at least 0, got -0.1"),
        (["--weight-decay", "inf"], "--weight-decay must be finite and at least 0, got inf"),
        (["--clip-norm", "0"], "--clip-norm must be finite and above 0, got 0.0"),
        (["--clip-norm", "nan"], "--clip-norm must be finite and above 0, got nan"),
        (["--warmup", "99"], "--warmup must be between 0 and 2, got 99"),
        (["--warmup", "-1"], "--warmup must be between 0 and 2, got -1"),
        (["--save-interval", "-1"], "--save-interval must be at least 0.0, got -1.0"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(here, tmp_path, refused, arguments, line):
    # The later of two options counts.
    assert line in refused("train", *OWN, *SMALL, "--out", tmp_path / "run", *arguments)
    assert not (tmp_path / "run" / "weights.safetensors").exists()


def test_a_refused_learning_rate_leaves_the_folder_usable(here, tmp_path, refused):
    refused("train", *OWN, *SMALL, "--out", tmp_path / "run", "--lr", "nan")
    assert ritz("train", *OWN, *SMALL, "--out", tmp_path / "run", "--lr", "0.1",
                "--weight-decay", "0", "--clip-norm", "5", "--warmup", "2") == 0  # fmt: skip
    config = read_run(tmp_path / "run").training
    assert config.optimizer_settings == {"lr": 0.1, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("setting", "shapes"),
    [("hidden=64", [64]), ("hidden=6,3", [6, 3]), ("hidden=(6,)", [6]), ("hidden=()", [])],
)
def test_a_model_option_is_one_number_or_a_list(tmp_path, setting, shapes):
    arguments = ["--model", "mlp", "--data", "digits", "--set-model", setting, "--epochs", "1",
                 "--batch-size", "1024", "--json", "--out", tmp_path / "run"]  # fmt: skip
    assert ritz("train", *arguments) == 0
    weights = read_weights(tmp_path / "run" / "weights.safetensors")
    found = [len(x) for name, x in weights.items() if name.endswith("weight")]
    assert sorted(found) == sorted([*shapes, 10])
    assert ritz("train", *arguments) == 0  # what was written is what is asked for again


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.9,0.99", [0.9, 0.99]),
        ("(0.9, 0.99)", [0.9, 0.99]),
        ("[1, 2]", [1, 2]),
        ("5,", [5]),
        ("True", True),
        ("true,false", "true,false"),
        ("a,b", "a,b"),
        ("story.txt", "story.txt"),
        (",", ","),
        ("(a)", "(a)"),
        ("", ""),
    ],
)
def test_values_of_settings_are_json_lists_or_text(text, value):
    assert parse_settings("--set", [f"key={text}"]) == {"key": value}


@pytest.mark.parametrize(
    ("model", "data", "line"),
    [
        ("vgg61", "digits", "no model is named 'vgg61'; did you mean vgg6"),
        ("mlp", "digit", "no data set is named 'digit'; did you mean digits?"),
        ("own_modal:net", "own_data:load", "no module 'own_modal' in"),
        ("own_modal:net", "own_data:load", "did you mean own_model"),
        ("own_model:nett", "own_data:load", "own_model has no function 'nett'; did you mean net?"),
        ("own_model:number", "own_data:load", "must return a torch.nn.Module, got int"),
        ("own_model:broken", "own_data:load", "raised RuntimeError: no such layer"),
        ("own model:net", "own_data:load", "must be of the form module:factory"),
        ("own_model:net", "own_data:net", "own_data has no function 'net'"),
        ("mlp", "cifar10", "must be given for 'cifar10'"),
    ],
)  # fmt: skip
def test_a_wrong_name_suggests_the_nearest(here, tmp_path, monkeypatch, refused, model, data, line):
    monkeypatch.delenv("RITZ_DATA", raising=False)
    assert line in refused("train", "--model", model, "--data", data, "--out", tmp_path / "run")


def test_a_missing_data_folder_is_named(tmp_path, refused):
    arguments = ["--model", "mlp", "--data", "mnist", "--out", tmp_path / "run"]
    line = refused("train", *arguments, "--data-dir", tmp_path / "nowhere")
    assert "--data-dir must be an existing folder, got" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(here, tmp_path, refused):
    line = refused("train", *OWN, *SMALL, "--out", tmp_path / "run", "--device", "cuda")
    assert "device must be one of this machine, got 'cuda': torch finds no CUDA device" in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ritz tr", {"train"}),
        ("ritz train --schedule l", {"linear", "linear_held"}),
        ("ritz list m", {"models"}),
    ],
)
def test_the_shell_completes_names(monkeypatch, capsys, words, expected):
    monkeypatch.setenv("_RITZ_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit):
        ritz()
    assert set(capsys.readouterr().out.split()) == expected


def test_ctrl_c_saves_and_says_how_to_resume(here, tmp_path):
    command = [sys.executable, "-m", "ritz", "train", *OWN, "--epochs", "100000",
               "--batch-size", "4", "--json", "--out", str(tmp_path / "run")]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=here)
    log = tmp_path / "run" / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.stat().st_size):
        time.sleep(0.05)
    process.send_signal(2)
    err = process.communicate()[1]
    assert process.returncode == 1
    assert "interrupted: SIGINT after" in err
    assert "repeat the call to resume" in err
    done = len(read_log(log))
    assert 0 < done < 100_000
