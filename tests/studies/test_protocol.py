import dataclasses
import types
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

import ritz
from ritz import plots, studies
from ritz._core.registry import UnknownNameError
from ritz.studies._protocol import versions


@dataclass(frozen=True)
class Config:
    size: int = 10
    rate: float = 0.5
    fast: bool = False
    name: str = "x"
    kind: Literal["wigner", "wishart"] = "wigner"
    steps: tuple[int, ...] = (1,)
    limit: int | None = 3
    seed: int = 0


@pytest.mark.parametrize("name", studies.available())
def test_every_module_is_a_study(name):
    study = studies.find(name)
    assert study.__doc__
    fields = {field.name for field in dataclasses.fields(study.Config)}
    assert "seed" in fields
    assert study.Config.__dataclass_params__.frozen
    result = {field.name for field in dataclasses.fields(study.Result)}
    assert {"config", "versions"} <= result


def test_hyphens_and_underscores_find_a_study():
    assert studies.find("synthetic-spectra") is studies.find("synthetic_spectra")


def test_an_unknown_name_suggests_similar_ones():
    with pytest.raises(UnknownNameError, match="did you mean synthetic_spectra"):
        studies.find("sintetic_spectra")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("size", "2_000", 2000),
        ("rate", "1e-3", 1e-3),
        ("fast", "True", True),
        ("fast", "false", False),
        ("name", "a b", "a b"),
        ("kind", "wishart", "wishart"),
        ("steps", "5,15,30", (5, 15, 30)),
        ("limit", "none", None),
        ("limit", "7", 7),
    ],
)
def test_text_is_converted_to_the_type_of_the_field(key, text, value):
    assert studies.configure(Config, {key: text}) == dataclasses.replace(Config(), **{key: value})


@pytest.mark.parametrize(
    ("key", "text", "match"),
    [
        ("size", "many", "size must be of type int, got 'many'"),
        ("rate", "", "rate must be of type float"),
        ("fast", "perhaps", "fast must be one of false, true; got 'perhaps'"),
        ("kind", "wigher", "kind must be one of wigner, wishart"),
        ("steps", "5,x", "steps must be of type int, got 'x'"),
        ("limit", "nothing", "limit must be of type int"),
    ],
)
def test_text_of_the_wrong_type_names_the_field(key, text, match):
    with pytest.raises(ValueError, match=match):
        studies.configure(Config, {key: text})


def test_an_unknown_key_raises():
    with pytest.raises(UnknownNameError, match=r"no field .* 'sise'; did you mean size"):
        studies.configure(Config, {"sise": "3"})


def test_versions_name_what_numbers_depend_on():
    assert versions()["torch"] == torch.__version__
    assert versions()["ritz"] == ritz.__version__


def test_a_figure_that_fails_keeps_the_earlier_one(tmp_path, monkeypatch):
    def drawn(text):
        figure, (ax,) = plots.panels()
        ax.set_title(text)
        return figure

    estimate = ritz.trace(torch.eye(3))
    study = types.SimpleNamespace(figure=lambda result: drawn("first"))
    files = studies.write(study, estimate, tmp_path / "out")
    assert [file.name for file in files] == ["result.safetensors", "figure.png"]
    before = files[1].read_bytes()

    def half(self, path, **settings):
        path.write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    with pytest.raises(OSError, match="the disk is full"):
        studies.write(study, estimate, tmp_path / "out")
    assert files[1].read_bytes() == before
    assert sorted(path.name for path in files[0].parent.iterdir()) == [
        "figure.png", "result.safetensors"]  # fmt: skip
