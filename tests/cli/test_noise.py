"""Noise, ghost batches, batch schedules, published settings and calibrated sharpness by command."""

import json

import pytest
from cli.own import ritz

from ritz.training import read_log
from ritz.training._run_folder import read_run

DIGITS = ["--model", "mlp", "--data", "digits", "--set-model", "hidden=[8]"]
LARGE = ["--batch-size", "512", "--epochs", "2"]


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("noisy") / "run"
    options = ["--noise", "diagonal", "--noise-batch", "64", "--noise-until", "0.5", "--lr", "0.3"]
    watch = ["--watch", "2", "--quantity", "fisher"]
    assert ritz("train", *DIGITS, *LARGE, *options, *watch, "--out", folder) == 0
    return folder


def test_noise_is_an_option_of_train(noisy):
    config = read_run(noisy).training
    assert (config.noise, config.noise_batch, config.noise_until) == ("diagonal", 64, 0.5)
    (record,) = (r for r in read_log(noisy / "log.jsonl") if r["kind"] == "curvature")
    assert record["fisher_norm"] > record["fisher_diagonal_norm"] > 0


def test_calibrated_sharpness_is_a_flag(noisy, tmp_path, capsys):
    capsys.readouterr()
    assert ritz("sharpness", noisy, "--calibrated", "--json", "--out", tmp_path) == 0
    found = json.loads(capsys.readouterr()[0])
    assert found["result"]["calibrated sharpness"]["lambda_max"] > 0
    assert [name.rpartition("/")[2] for name in found["files"]] == ["calibrated.safetensors"]


def test_a_batch_schedule_is_an_option_of_train(tmp_path, capsys):
    options = ["--batch-schedule", "0:64,1:640", "--epochs", "2", "--json"]
    assert ritz("train", *DIGITS, *options, "--out", tmp_path / "run") == 0
    assert json.loads(capsys.readouterr()[0])["result"]["num_steps"] == 20 + 2


def test_a_published_setting_yields_to_the_other_options(tmp_path, capsys):
    options = ["--preset", "noisy_sgd/vgg16_bn/cifar10", *LARGE, "--noise-batch", "32"]
    # The network has no batch norm, which the setting wants ghosts for.
    assert ritz("train", *DIGITS, *options, "--warmup", "1", "--out", tmp_path / "run") == 2
    assert "--ghost-batch needs a model with batch norm" in capsys.readouterr()[1]

    options = ["--preset", "sgd/vgg16/cifar100", *LARGE, "--schedule", "constant"]
    assert ritz("train", *DIGITS, *options, "--out", tmp_path / "run") == 0
    config = read_run(tmp_path / "run").training
    chosen = (config.num_epochs, config.batch_size, config.schedule, config.optimizer)
    assert chosen == (2, 512, "constant", "sgd/vgg16/cifar100")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--noise", "diagonal", "--noise-batch", "512", "--batch-size", "128"],
         "--noise-batch must be less than the samples of a step, got 512 and 128"),
        (["--noise-until", "0.5"], "--noise-until must be given with noise"),
        (["--ghost-batch", "32"], "--ghost-batch needs a model with batch norm"),
        (["--ghost-batch", "128", "--batch-size", "64"],
         "--ghost-batch must be at most the batch size, got 128 and batches of at most 64 samples"),
        (["--batch-schedule", "64"], "--batch-schedule must be EPOCH:SIZE"),
        (["--preset", "noisy_sgd/vgg16_bn/cifar10", "--optimizer", "adam"],
         "--preset noisy_sgd/vgg16_bn/cifar10 brings its optimiser"),
        (["--preset", "noisy_sgd/vgg16_bn/cifar1"], "did you mean noisy_sgd/vgg16_bn/cifar10"),
    ],
)  # fmt: skip
def test_wrong_options_end_in_one_line(options, error, tmp_path, capsys):
    assert ritz("train", *DIGITS, *options, "--out", tmp_path / "run") == 2
    _, err = capsys.readouterr()
    assert error in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_an_error_of_the_noise_names_its_option(here, refused, tmp_path):
    own = ["--model", "own_model:WithLoss", "--data", "own_data:named", "--loss", "model"]
    line = refused("train", *own, "--noise", "diagonal", "--noise-batch", "4", "--json",
                   "--out", tmp_path)  # fmt: skip
    assert line.startswith("ritz: --noise diagonal needs outputs that are separate from the loss")
