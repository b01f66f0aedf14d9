import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from matrices import seeded
from processes import start
from safetensors.torch import save_file

from ritz._core import storage
from ritz._core.results import Estimate, Status
from ritz._core.storage import CorruptFileError, load, save, storable


@storable
@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    content: Any


@dataclass(frozen=True)
class Unstorable:
    content: int


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
RESULT = Estimate(
    mean=torch.tensor(1.5, dtype=torch.float64),
    stderr=torch.tensor(0.25, dtype=torch.float64),
    truncation=torch.tensor(torch.inf, dtype=torch.float64),
    degrees=2,
    samples=torch.arange(6.0).view(3, 2).T,
    num_products=3,
    method="hutchinson",
    status=Status(outcome="completed", message="3 probes: ± fine"),
)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    return torch.randint(0, 2, shape, generator=seeded(1)).to(dtype)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | tensors()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", "a.b", "tensor", "class", "é"]), inner)
        | inner.map(lambda content: Box(content=content))
    ),
    max_leaves=6,
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, Box):
        return isinstance(b, Box) and same(a.content, b.content)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and (a == b or a != a)


@given(content=values)
@example(content=(float("nan"), float("inf"), -float("inf"), -0.0))
@example(content={"a.b": torch.zeros(1), "a": {"b": torch.ones(2)}})  # one name, two tensors
def test_load_returns_the_saved_result(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    save(Box(content=content), path)
    assert same(load(path), Box(content=content))


def test_an_estimate_survives_a_round_trip(tmp_path):
    save(RESULT, tmp_path / "r.safetensors")
    found = load(tmp_path / "r.safetensors")
    assert isinstance(found, Estimate)
    assert found.status == RESULT.status
    torch.testing.assert_close(found.samples, RESULT.samples, rtol=0, atol=0)


def test_the_repr_of_a_result_is_its_summary():
    assert repr(RESULT) == str(RESULT)
    assert "tensor" not in repr([RESULT])


def test_fields_that_share_memory_can_be_saved(tmp_path):
    shared = torch.arange(4.0)
    save(Box(content=[shared, shared[:2], shared]), tmp_path / "b")
    assert [len(part) for part in load(tmp_path / "b").content] == [4, 2, 4]


@pytest.mark.parametrize(
    "content",
    [{1: "a"}, {1, 2}, object(), Unstorable(3), 1j],
    ids=lambda value: type(value).__name__,
)
def test_values_that_cannot_be_restored_are_rejected(tmp_path, content):
    with pytest.raises(TypeError, match=r"cannot save content: .* is not storable"):
        save(Box(content=content), tmp_path / "b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("thing", [3, torch.zeros(2), Unstorable(3), Box])
def test_only_storable_dataclasses_are_saved(tmp_path, thing):
    with pytest.raises(TypeError, match="result must be a result of ritz"):
        save(thing, tmp_path / "x")


def test_registering_a_class_twice_raises():
    with pytest.raises(ValueError, match="test_storage:Box is registered"):
        storable(Box)


# Change every byte of a small file in turn: load returns the old contents or raises.
def test_every_changed_byte_is_detected_or_harmless(tmp_path, rng):
    path = tmp_path / "r.safetensors"
    save(RESULT, path)
    whole = path.read_bytes()
    refused = 0
    for position in range(len(whole)):
        flip = int(torch.randint(1, 256, (), generator=rng))
        path.write_bytes(whole[:position] + bytes([whole[position] ^ flip]) + whole[position + 1 :])
        try:
            found = load(path)
        except CorruptFileError:
            refused += 1
        else:
            assert same(Box(content=found.samples), Box(content=RESULT.samples))
            assert dataclasses.replace(found.status) == RESULT.status
    assert refused > 0.9 * len(whole)


def test_a_truncated_file_is_rejected(tmp_path):
    path = tmp_path / "r.safetensors"
    save(RESULT, path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFileError, match="truncated or not a safetensors file"):
            load(path)


def test_a_safetensors_file_of_another_program_is_rejected(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(CorruptFileError, match="was not written by ritz"):
        load(tmp_path / "w.safetensors")


@pytest.mark.parametrize("body", ["[1]", "3", "null", '"text"', "{", '{"sha256": 1}'])
def test_a_malformed_header_is_rejected(tmp_path, body):
    save_file({"weight": torch.zeros(2)}, tmp_path / "w", metadata={"ritz": body})
    with pytest.raises(CorruptFileError):
        load(tmp_path / "w")


@pytest.mark.parametrize(
    ("key", "match"),
    [
        ("os:system", "os:system is not a known class of results"),
        ("ritz._core.storage:atomic_path", "is not a known class"),
        ("ritz.no_such_module:Thing", "cannot be imported"),
        ("ritz.cli.demo:command", "is not a known class"),
        ("ritz..x:y", "is not a known class"),
    ],
)
def test_a_file_cannot_name_a_class_that_is_not_storable(tmp_path, key, match):
    header = {"class": key, "fields": {"command": "true"}}
    storage.write_tensors(tmp_path / "x", {}, header)
    with pytest.raises(CorruptFileError, match=match):
        load(tmp_path / "x")


@pytest.mark.parametrize(
    "header",
    [
        {"class": "ritz._core.results:Status", "fields": {"colour": "red"}},
        {"class": "ritz._core.results:Status", "fields": 3},
        {"class": "ritz._core.results:Status", "fields": {"outcome": {"tensor": "nowhere"}}},
        {"list": [1, 2]},
        None,
    ],
)
def test_a_header_that_describes_no_result_is_rejected(tmp_path, header):
    storage.write_tensors(tmp_path / "x", {}, header)
    with pytest.raises(CorruptFileError, match="a result"):
        load(tmp_path / "x")


def test_a_file_of_a_later_format_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FORMAT", 2)
    save(RESULT, tmp_path / "r")
    monkeypatch.undo()
    with pytest.raises(CorruptFileError, match="has format 2, this ritz reads 1"):
        load(tmp_path / "r")


def test_the_header_has_the_versions_of_ritz_and_torch(tmp_path):
    save(RESULT, tmp_path / "r")
    with storage.safe_open(tmp_path / "r", framework="pt") as file:
        body = json.loads(file.metadata()["ritz"])
    assert body["torch"] == torch.__version__
    assert body["ritz"] == storage.__version__


def test_errors_name_missing_files_and_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file: .*nothing"):
        load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="no folder"):
        save(RESULT, tmp_path / "nowhere" / "r")


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch):
    path = tmp_path / "r"
    save(RESULT, path)
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(Box(content=1), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["r"]


def test_file_permissions_follow_the_umask(tmp_path):
    (tmp_path / "plain").touch()
    save(RESULT, tmp_path / "r")
    assert (tmp_path / "r").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_text_is_written_as_utf8(tmp_path):
    storage.write_text(tmp_path / "t", "ψ and ± stay")
    assert (tmp_path / "t").read_text(encoding="utf-8") == "ψ and ± stay"


@pytest.fixture
def gone():
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def left_behind(folder, process, *, name="some.png", machine=None, age=0.0):
    machine = storage._machine() if machine is None else machine
    path = folder / f".{name}.{machine}.{process}.0123abcd"
    path.write_bytes(b"half")
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_the_temporary_file_of_a_killed_process_is_removed_by_the_next_write(tmp_path):
    code = (
        "import os, signal\n"
        "from ritz._core.storage import atomic_path\n"
        f"with atomic_path({str(tmp_path / 'some.png')!r}) as path:\n"
        "    path.write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = start(code, errors=tmp_path.with_suffix(".errors"))
    process.join()
    assert process.exitcode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".some.png.")
    storage.write_text(tmp_path / "other.png", "whole")
    assert left.exists()
    storage.write_text(tmp_path / "some.png", "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"some.png", "other.png"}


@pytest.mark.parametrize(
    ("changes", "stays"),
    [
        ({}, False),
        ({"machine": "00000000"}, True),  # another machine may run a process with this id
        ({"machine": "00000000", "age": 4000.0}, False),
        ({"name": "some.png.state", "age": 4000.0}, True),
    ],
)
def test_temporary_files_of_ended_processes_and_old_ones_are_removed(
    tmp_path, gone, changes, stays
):
    left = left_behind(tmp_path, gone, **changes)
    storage.write_text(tmp_path / "some.png", "whole")
    assert left.exists() == stays


@pytest.mark.parametrize(("age", "stays"), [(0.0, True), (4000.0, False)])
def test_the_temporary_file_of_a_running_process_is_kept_for_an_hour(tmp_path, age, stays):
    left = left_behind(tmp_path, os.getppid(), age=age)
    storage.write_text(tmp_path / "some.png", "whole")
    assert left.exists() == stays


def test_a_temporary_file_that_cannot_be_removed_does_not_stop_the_write(tmp_path, gone):
    left = left_behind(tmp_path, gone)
    left.unlink()
    left.mkdir()
    storage.write_text(tmp_path / "some.png", "whole")
    assert (tmp_path / "some.png").read_text() == "whole"


def test_json_has_null_for_numbers_that_are_not_finite():
    value = {"a": [1.5, math.nan], 2: (-math.inf,), "d": torch.tensor([math.inf, 2.0])}
    expected = {"a": [1.5, None], "2": [None], "d": [None, 2.0]}
    assert json.loads(storage.to_json(value), parse_constant=pytest.fail) == expected


def test_json_shows_results_without_internal_fields_and_large_tensors_by_shape():
    @dataclass(frozen=True, slots=True)
    class Inner:
        values: torch.Tensor
        work: int = dataclasses.field(repr=False)

    shown = json.loads(storage.to_json([Inner(torch.zeros(257, 2), 1), Path("x.png")]))
    assert shown == [{"values": {"shape": [257, 2]}}, "x.png"]


@pytest.mark.parametrize(
    "content",
    [
        torch.arange(14.0).reshape(1, 2, 7)[..., :1, 6],  # one element, stride 7
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.zeros(0, 3),
        torch.tensor(1.5, dtype=torch.bfloat16),
    ],
)
def test_tensors_of_any_strides_are_saved(tmp_path, content):
    save(Box(content=content), tmp_path / "box.safetensors")
    assert torch.equal(load(tmp_path / "box.safetensors").content, content)
    assert storage.digest([content]) == storage.digest([content.clone()])
