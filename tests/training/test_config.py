"""The options of training: one field each, from which the function and the command follow."""

import json
import subprocess
import sys
from dataclasses import fields, make_dataclass
from inspect import Parameter, signature

import pytest
import torch
from training.examples import network, samples
from typer.testing import CliRunner

from ritz._core.storage import to_json
from ritz._core.training_config import TrainingOptions, _option
from ritz.cli._app import build
from ritz.cli._options import _parameters
from ritz.data import Augmentation
from ritz.training import TrainingConfig, fit
from ritz.training._run_folder import RunConfig


def kinds(cls):
    """Types by name; a type that is a string in the class is a ForwardRef in a TypedDict."""
    return {name: getattr(kind, "__forward_arg__", kind) for name, kind in
            cls.__annotations__.items()}  # fmt: skip


def test_the_keywords_of_fit_are_the_fields_of_the_configuration():
    own = {"optimizer", "schedule"}  # parameters of fit, which takes objects too

    expected = {name: kind for name, kind in kinds(TrainingConfig).items() if name not in own}

    assert list(kinds(TrainingOptions).items()) == list(expected.items())


def test_fit_has_at_most_fifteen_parameters_beside_the_options():
    parameters = signature(fit).parameters.values()

    assert len([each for each in parameters if each.kind is not Parameter.VAR_KEYWORD]) <= 15


def test_every_field_is_an_option_of_the_command_with_help_and_default():
    command = {each.name: each for each in _parameters(TrainingConfig)}

    for entry in fields(TrainingConfig):
        assert f"        {entry.name}: {entry.metadata['help']}" in TrainingConfig.__doc__
        if entry.name == "optimizer_settings":  # --lr, --weight-decay and --set
            continue
        option = command[entry.name].annotation.__metadata__[0]
        assert entry.metadata["help"][:15] in option.help
        assert command[entry.name].default == (entry.default or command[entry.name].default)


def test_a_new_field_alone_makes_a_new_option():
    """Beside it stands one line of the TypedDict, which type checkers read."""
    longer = make_dataclass(
        "Longer", [("patience_scale", float, _option(1.0, "Scale of patience.", low=0.0))],
        bases=(TrainingConfig,), frozen=True, kw_only=True,
    )  # fmt: skip

    option = next(_parameters(longer))

    assert option.default == 1.0
    # Typer calls the first of the names "default".
    assert option.annotation.__metadata__[0].default == "--patience-scale"
    assert longer().to_plain()["patience_scale"] == 1.0
    with pytest.raises(ValueError, match="patience_scale must be at least 0"):
        longer(patience_scale=-1.0)


def test_options_replace_fields_of_the_configuration():
    config = TrainingConfig(num_epochs=2, batch_size=12, optimizer="adam")

    result = fit(network(), samples(), config, num_epochs=1, optimizer="adamw")

    assert (result.num_epochs, result.num_steps) == (1, 4)
    assert result.settings["optimizer"] == "adamw"
    assert config.num_epochs == 2


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("num_epoch", "did you mean num_epochs"),
        ("xyz", r"see help\(ritz.training.TrainingConfig\)"),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest(name, hint):
    with pytest.raises(TypeError, match=f"no option '{name}'; {hint}"):
        fit(network(), samples(), **{name: 3})


def test_the_file_of_a_run_is_the_plain_form_of_its_configuration():
    training = TrainingConfig(keep=[1], optimizer_settings={"betas": (0.9, 0.99)}, augment=None)
    config = RunConfig(model="m", data="d", training=training)

    plain = json.loads(to_json(config))

    assert plain["training"] == training.to_plain()
    assert to_json(RunConfig.from_plain(plain)) == to_json(config)


def test_objects_have_a_plain_form_that_does_not_change_between_processes():
    class Shift:
        pass

    assert TrainingConfig(augment=Shift()).to_plain()["augment"] == "Shift"
    plain = TrainingConfig(augment=Augmentation(padding=2), device=torch.device("cpu")).to_plain()
    assert plain["augment"] == "Augmentation(padding=2, flip=True, crop=None)"
    assert plain["device"] == "cpu"


def test_the_options_are_read_without_torch():
    code = "import sys, ritz.cli.train; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"


def test_help_fits_eighty_columns_and_names_every_option():
    result = CliRunner().invoke(build(), ["train", "--help"], env={"COLUMNS": "80"})

    assert max(map(len, result.output.splitlines())) <= 80
    for option in _parameters(TrainingConfig):
        assert option.annotation.__metadata__[0].default.split("/")[0] in result.output
