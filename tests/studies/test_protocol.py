import dataclasses
import types
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

import ritz
from ritz import plots, studies
from ritz._core.registry import UnknownNameError
from ritz.studies import _protocol
from ritz.studies._protocol import check_entries, check_minimums, compute_cells, record, versions


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
        ("size", "many", "size must be a whole number, got 'many'"),
        ("rate", "", "rate must be a number, got ''"),
        ("fast", "perhaps", "fast must be one of false, true; got 'perhaps'"),
        ("kind", "wigher", "kind must be one of wigner, wishart"),
        ("steps", "5,x", "steps must be a whole number, got 'x'"),
        ("limit", "nothing", "limit must be a whole number"),
    ],
)
def test_text_of_the_wrong_type_names_the_field(key, text, match):
    with pytest.raises(ValueError, match=match):
        studies.configure(Config, {key: text})


def test_an_unknown_key_raises():
    with pytest.raises(UnknownNameError, match=r"no option .* 'sise'; did you mean size"):
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


def test_an_unknown_size_lists_those_of_the_study():
    assert studies.sized(studies.find("averaging"), "small") == studies.find("averaging").Config()
    with pytest.raises(ValueError, match="size must be one of small, smoke; got 'paper'"):
        studies.sized(studies.find("averaging"), "paper")


@pytest.mark.parametrize("name", studies.available())
def test_every_size_of_a_study_is_one_of_its_configurations(name):
    study = studies.find(name)
    for size in ("small", *getattr(study, "SIZES", {})):
        config = studies.configure(studies.sized(study, size), {"seed": "3"})
        assert isinstance(config, study.Config)
        assert config.seed == 3


def test_an_interrupted_study_computes_only_the_missing_cells(tmp_path):
    calls = []

    def compute(cell):
        calls.append(cell)
        if cell == 3 and calls.count(3) == 1:
            raise KeyboardInterrupt
        return torch.tensor([float(cell)])

    def run(config, *, progress=False, state=None):
        cells = {str(i): i for i in range(5)}
        return compute_cells(compute, cells, "cells", config=config, state=state)

    study = types.SimpleNamespace(run=run)
    with pytest.raises(KeyboardInterrupt):
        studies.run(study, Config(), tmp_path / "out")
    with pytest.raises(ValueError, match=r"made with config=.*rate=0\.5.*this run has"):
        studies.run(study, Config(rate=0.1), tmp_path / "out")
    result = studies.run(study, Config(), tmp_path / "out")

    assert calls == [0, 1, 2, 3, 3, 4]
    assert [float(value) for value in result.values()] == [0, 1, 2, 3, 4]

    studies.write(types.SimpleNamespace(), ritz.trace(torch.eye(3)), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["result.safetensors"]


def test_evidence_has_a_row_per_figure_and_the_command_of_each_result(tmp_path):
    study = studies.find("averaging")
    config = study.SIZES["smoke"]
    studies.write(study, study.run(config), tmp_path)

    page = studies.evidence(tmp_path)

    rows = [line for line in page.splitlines() if line.startswith("| Figure 4")]
    assert rows
    assert all(row.count(" | ") == 4 for row in rows)
    assert "`ritz study averaging --size smoke`" in page
    assert versions()["machine"] in page


@record
class Sized:
    names: tuple[str, ...] = ("a",)
    count: int | None = None
    sizes: tuple[int, ...] = (4,)

    def __post_init__(self):
        check_minimums(self, count=2, sizes=3)
        check_entries(self, names=("a", "b"))


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"count": 1}, "count must be at least 2"),
        ({"sizes": (4, 2)}, "sizes must be at least 3"),
        ({"sizes": ()}, "sizes must have at least one entry"),
        ({"names": ("a", "c")}, "names must be one of a, b"),
        ({"names": ()}, "names must not be empty"),
    ],
)
def test_every_entry_of_a_field_is_checked(bad, match):
    with pytest.raises(ValueError, match=match):
        Sized(**bad)
    assert Sized(count=2).count == 2


def test_no_cell_begins_that_would_end_after_the_limit(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_protocol.time, "monotonic", lambda: now[0])

    def compute(seconds):
        now[0] += seconds
        return seconds

    cells = {"a": 1.0, "b": 4.0, "c": 1.0}
    for seconds, done in ((None, "abc"), (10.0, "abc"), (8.9, "ab"), (1.9, "a")):
        limit = _protocol.TimeLimit(seconds)
        table = _protocol.compute_cells(compute, cells, "cells", config=None, limit=limit)
        assert "".join(table) == done, seconds
    assert _protocol.compute_cells(
        compute, cells, "cells", config=None, limit=_protocol.TimeLimit(0.0)
    ) == {"a": 1.0}
