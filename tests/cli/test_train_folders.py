"""What a command to train leaves in its folder, and its options beyond the usual ones."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
from cli.own import SMALL, ritz

from ritz.training import read_log
from ritz.training._run_folder import read_run

OWN = ["--model", "own_model:net", "--data", "own_data:load"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "change",
    [["--optimizer", "adam"], ["--weight-decay", "0.1"], ["--schedule", "linear"], ["--seed", "5"],
     ["--drop-last"], ["--no-augment"]],
)  # fmt: skip
def test_a_refused_command_leaves_the_run_and_mentions_restart(
    here, finished, tmp_path, refused, change
):
    shutil.copytree(finished, tmp_path / "run")
    before = contents(tmp_path / "run")
    usual = ["train", *OWN, *SMALL, "--average-from", "2", "--out", tmp_path / "run"]
    assert "start again with --restart" in refused(*usual, *change)
    assert contents(tmp_path / "run") == before


def test_fewer_epochs_than_are_completed_are_refused(here, tmp_path, refused):
    usual = ["train", *OWN, *SMALL, "--out", tmp_path / "run"]
    assert ritz(*usual) == 0
    before = contents(tmp_path / "run")
    line = refused(*usual, "--epochs", "1")
    assert "--epochs must be at least 2" in line
    assert "pass a larger number" in line
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize(
    "wrong", [["--optimizer", "gadm"], ["--model", "own_model:number"], ["--device", "tpu"]]
)
def test_a_first_command_that_fails_does_not_block_the_folder(here, tmp_path, refused, wrong):
    usual = ["train", *OWN, *SMALL, "--out", tmp_path / "run"]
    refused(*usual, *wrong)
    assert ritz(*usual, "--seed", "3", "--batch-size", "24") == 0
    assert read_run(tmp_path / "run").training.seed == 3


def test_a_second_command_in_one_folder_is_refused(here, tmp_path, refused):
    usual = [*OWN, "--out", tmp_path / "run", "--json", "--epochs", "100000"]
    first = subprocess.Popen([sys.executable, "-m", "ritz", "train", *map(str, usual)],
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        checkpoint = tmp_path / "run" / "checkpoint.safetensors"
        while first.poll() is None and not checkpoint.exists():
            time.sleep(0.05)
        line = refused("train", *usual)
        assert f"another process (pid {first.pid}) is writing in {tmp_path / 'run'}" in line
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait(10)
    lines = read_log(tmp_path / "run" / "log.jsonl")
    assert [line["epoch"] for line in lines] == list(range(1, len(lines) + 1))
    assert ritz("train", *OWN, "--out", tmp_path / "run", "--json", "--restart", *SMALL) == 0


@pytest.mark.parametrize("name", [".lock", "log.jsonl"])
def test_a_link_to_another_file_is_refused(here, tmp_path, refused, name):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(precious)
    assert f"{name} is a symbolic link" in refused("train", *OWN, *SMALL, "--out", tmp_path / "run")
    assert precious.read_text() == "mine"


def test_a_last_batch_of_one_row_suggests_drop_last(here, tmp_path, refused, capsys):
    usual = ["train", *OWN, "--set-data", "rows=33", *SMALL, "--out", tmp_path / "run"]
    assert "--drop-last" in refused(*usual)
    assert ritz(*usual, "--drop-last", "--restart") == 0
    assert json.loads(capsys.readouterr().out)["result"]["num_steps"] == 4


def test_averages_schedules_and_quantities_are_options(here, tmp_path, capsys):
    options = ["--average-from", "1", "--average-every", "step", "--schedule", "linear",
               "--schedule-unit", "step", "--warmup", "3", "--watch", "2", "--quantity", "variance",
               "--quantity", "trace", "--no-augment"]  # fmt: skip
    assert ritz("train", *OWN, *SMALL, *options, "--out", tmp_path / "run") == 0
    training = read_run(tmp_path / "run").training
    assert (training.average_every, training.schedule_unit) == ("step", "step")
    assert training.augment is False
    watched = [x for x in read_log(tmp_path / "run/log.jsonl") if x["kind"] == "curvature"]
    assert {"variance", "variance_stderr", "trace"} <= watched[0].keys()
    assert "lambda_max" not in watched[0]


def test_steps_milestones_ratio_interval_and_lookahead_are_options(here, tmp_path, capsys):
    first = ["--max-steps", "7", "--epochs", "9", "--schedule", "step", "--milestones", "1",
             "--milestones", "2", "--optimizer", "lookahead_sgd",
             "--lookahead-until", "2"]  # fmt: skip
    second = ["--schedule", "linear", "--final-ratio", "0.2", "--average-from", "1",
              "--average-interval", "2"]  # fmt: skip
    assert ritz("train", *OWN, *SMALL, *first, "--out", tmp_path / "first") == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["num_steps"], result["num_epochs"]) == (7, 3)
    training = read_run(tmp_path / "first").training
    assert (training.milestones, training.lookahead_until) == ((1, 2), 2)
    assert ritz("train", *OWN, *SMALL, *second, "--out", tmp_path / "second") == 0
    training = read_run(tmp_path / "second").training
    assert (training.final_ratio, training.average_interval) == (0.2, 2)


def test_patience_ends_a_run(here, tmp_path, capsys):
    usual = ["--epochs", "60", "--batch-size", "16", "--json", "--lr", "1", "--patience", "1"]
    data = ["--model", "own_model:net", "--data", "own_data:parts", "--patience-metric", "loss"]
    assert ritz("train", *data, *usual, "--out", tmp_path / "run") == 0
    found = json.loads(capsys.readouterr().out)["result"]
    assert found["status"]["outcome"] == "stopped"
    assert found["num_epochs"] < 60
    assert (tmp_path / "run" / "average.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--patience", "0"], "--patience must be at least 1, got 0"),
        (["--final-ratio", "0.1"], "--final-ratio must be given with schedule linear, got con"),
        (["--milestones", "3"], "--milestones must be given with schedule step, got constant"),
        (["--quantity", "trace"], "--quantity trace needs --watch: add --watch 1"),
        (["--watch-matrix", "ggn"], "--watch-matrix ggn needs --watch: add --watch 1"),
        (["--watch-samples", "64"], "--watch-samples 64 needs --watch: add --watch 1"),
        (["--watch", "1", "--quantity", "norm"], "named 'norm'; did you mean"),
        (["--average-every", "hour"], "--average-every must be one of step, epoch; got 'hour'"),
    ],
)
def test_bad_input_is_one_line(here, tmp_path, refused, arguments, line):
    assert line in refused("train", *OWN, *SMALL, "--out", tmp_path / "run", *arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--patience", "2"],
            "--patience needs validation data, got none: pass validation= to fit()",
        ),
        (["--lookahead-until", "2"], "--lookahead-until must agree with the optimiser, got 2"),
    ],
)
def test_options_that_do_not_fit_data_or_optimiser_write_no_file(
    here, tmp_path, refused, arguments, line
):
    assert line in refused("train", *OWN, *SMALL, "--out", tmp_path / "run", *arguments)
    assert not list((tmp_path / "run").glob("*"))
