import json

import pytest
from cli.own import ritz


@pytest.mark.parametrize(
    ("what", "name", "words"),
    [
        ("models", "vgg16_bn", "--set-model: width"),
        ("datasets", "cifar100", "32 x 32"),
        ("optimizers", "gadamx/vgg16/cifar", "averaging from epoch 161"),
        ("studies", "synthetic_spectra", "Spectra of random matrices"),
    ],
)
def test_names_are_listed_with_a_description(capsys, what, name, words):
    assert ritz("list", what) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == [name])
    assert words in line
    assert ritz("list", what, "--json") == 0
    assert words in json.loads(capsys.readouterr().out)["result"][name]


def test_an_unknown_list_is_one_line(refused):
    assert "must be one of models, datasets, optimizers, quantities, studies; got" in refused(
        "list", "colours"
    )
