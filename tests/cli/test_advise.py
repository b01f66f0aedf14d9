import json

import pytest
from cli.own import OWN, ritz

import ritz as library
from ritz._core.training_config import TrainingConfig
from ritz.measures import Advice
from ritz.training import optimizer_names
from ritz.training._run_folder import RunConfig
from ritz.training._shared import advised_settings

FEW = ["--batch-sizes", "4,8"]


def test_advice_is_printed_saved_and_drawn_after_its_cost(here, finished, tmp_path, capsys):
    assert ritz("advise", "run", *OWN, *FEW, "--out", tmp_path) == 0
    out, err = capsys.readouterr()

    assert "Advice for" in out
    assert err.startswith("About ")
    assert "gradients of" in err.splitlines()[0]
    found = library.load(tmp_path / "advise-4,8.safetensors")
    assert isinstance(found, Advice)
    assert found.batch_sizes == (4, 8)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".png"}


def test_advice_as_json_takes_the_optimiser_of_the_command(here, finished, tmp_path, capsys):
    arguments = [*FEW, "--optimizer", "nesterov", "--momentum", "0.5", "--matrix", "ggn", "--json"]

    assert ritz("advise", "run", *OWN, *arguments, "--out", tmp_path) == 0

    found = json.loads(capsys.readouterr().out)["result"]["advice"]
    assert (found["optimizer"], found["momentum"]) == ("nesterov", 0.5)
    assert found["prediction"]["matrix"] == "ggn"
    assert len(found["edge"]["mean"]) == len(found["sentences"]) == 2


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ("8,x", "--batch-sizes takes whole numbers such as 8,64, got '8,x'"),
        ("0", "--batch-sizes must be between 1 and"),
        ("1000000", "--batch-sizes must be between 1 and"),
    ],
)
def test_wrong_sizes_are_one_line(here, finished, tmp_path, refused, sizes, line):
    assert line in refused("advise", "run", *OWN, "--batch-sizes", sizes, "--out", tmp_path)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"optimizer": "sgd"}, ("momentum", 0.9, (32, 0.1))),
        ({"optimizer": "sgd", "optimizer_settings": {"momentum": 0.0, "lr": 0.3}},
         ("sgd", 0.0, (32, 0.3))),
        ({"optimizer": "sgd", "optimizer_settings": {"nesterov": True}},
         ("nesterov", 0.9, (32, 0.1))),
        ({"optimizer": "damped_adamw", "optimizer_settings": {"betas": (0.8, 0.99)}},
         ("adam", 0.8, (32, 1e-3))),
    ],
)  # fmt: skip
def test_the_optimiser_of_a_run_is_the_one_that_is_advised_on(options, found):
    config = RunConfig(
        model="mlp", data="digits", training=TrainingConfig(batch_size=32, **options)
    )

    settings = advised_settings(config)

    assert (settings["optimizer"], settings["momentum"], settings["known"]) == found
    assert advised_settings(config, "kfac") == {"optimizer": "kfac", "momentum": None}


@pytest.mark.parametrize("name", optimizer_names())
def test_the_settings_of_every_optimiser_of_a_run_are_read(name):
    settings = advised_settings(
        RunConfig(model="mlp", data="digits", training=TrainingConfig(optimizer=name))
    )
    assert settings["optimizer"] in ("sgd", "momentum", "nesterov", "adam", "kfac")
    assert (settings["optimizer"] == "kfac") == ("kfac" in name)


def test_the_help_lists_the_choices_of_an_option_without_a_default(capsys):
    assert ritz("advise", "--help") == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Choices: sgd, momentum, nesterov, adam, kfac." in shown
