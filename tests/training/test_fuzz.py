"""Damaged run.json, .pt and safetensors files: one line or the right content, at little cost."""

import json
import random

import pytest
import torch
from fuzz import CASES, cheap, damaged
from torch import nn

from ritz.training import load_weights, save_weights
from ritz.training._run_folder import RunConfig, read_run, to_json

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["zip", "legacy", "ritz", "safetensors"])
def test_damaged_weights_are_refused_in_one_line(tmp_path, kind):
    model, path = nn.Linear(3, 2), tmp_path / "weights"
    if kind == "ritz":
        save_weights(model, path)
    elif kind == "safetensors":
        from safetensors.torch import save_file

        save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path, _use_new_zipfile_serialization=kind == "zip")
    content = path.read_bytes()

    refused = 0
    with cheap(seconds=600):
        for data in damaged(content, CASES):
            path.write_bytes(data)
            with cheap():
                refused += is_refused(path)

    assert refused > CASES / 4


def is_refused(path):
    try:
        load_weights(nn.Linear(3, 2), path)
    except (ValueError, OSError) as error:
        assert len(str(error)) < 3000  # noqa: PT017 - any message, but not a whole file
        return True
    return False


ODD = [None, True, -1, 0, 2**70, 1e400, "", "x", "a:b", [], [1], {}, {"a": 1}, [[]] * 3, "9" * 5000]


def mutated(source, plain):
    """Return values of JSON with one of them, at any depth, replaced, removed or added."""
    if not isinstance(plain, dict) or not plain or source.random() < 0.1:
        return source.choice(ODD)
    key = source.choice(list(plain))
    changed = dict(plain)
    kind = source.random()
    if kind < 0.1:
        del changed[key]
    elif kind < 0.2:
        changed[source.choice(["extra", "training", "seed", "batch_size"])] = source.choice(ODD)
    else:
        inner = plain[key]
        changed[key] = mutated(source, inner) if isinstance(inner, dict) else source.choice(ODD)
    return changed


def test_a_damaged_configuration_is_refused_in_one_line(tmp_path):
    config = RunConfig(model="mlp", data="digits", model_options={"hidden": [8]}, data_dir="data")
    text, source = to_json(config), random.Random(0)
    nested = ["[" * 100_000, '{"a":' * 100_000, "[" * 500 + "]" * 500]
    texts = [json.dumps(mutated(source, json.loads(text))).encode() for _ in range(CASES // 2)]
    texts += [*damaged(text.encode(), CASES // 2), *(each.encode() for each in nested)]

    refused = 0
    with cheap(seconds=600):
        for content in texts:
            (tmp_path / "run.json").write_bytes(content)
            with cheap():
                try:
                    read_run(tmp_path)
                except ValueError as error:
                    assert "run.json does not describe a run" in str(error)  # noqa: PT017
                    refused += 1

    assert refused > CASES / 2
