"""Models, weights, data and losses that do not go together: one line that says which."""

import pytest
import torch
from cli.own import ritz
from safetensors.torch import load_file, save_file


@pytest.mark.parametrize("command", ["spectrum", "sharpness", "landscape"])
def test_weights_that_are_not_finite_are_named(here, finished, tmp_path, refused, command):
    weights = load_file(finished / "weights.safetensors")
    weights["1.weight"][2, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    save_file(weights, tmp_path / "weights.safetensors")
    (tmp_path / "run.json").write_bytes((finished / "run.json").read_bytes())
    line = refused(command, tmp_path)
    assert "parameter '1.weight' must be finite, got NaN or Inf in 3 of its 24 values" in line


def test_a_model_that_returns_its_own_loss_has_a_hessian_alone(here, tmp_path, refused, capsys):
    run = tmp_path / "run"
    assert ritz("train", "--model", "own_model:WithLoss", "--data", "own_data:named", "--loss",
                "model", "--epochs", "1", "--out", run, "--json") == 0  # fmt: skip
    for arguments in (["sharpness", run], ["spectrum", run, "--matrix", "ggn"]):
        line = refused(*arguments)
        assert "with --loss model the network returns the loss alone: give --matrix hessian" in line
    few = ["--matrix", "hessian", "--steps", "3", "--json"]
    assert ritz("sharpness", run, "--probes", "2", *few) == 0
    assert ritz("spectrum", run, *few) == 0
