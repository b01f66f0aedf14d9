"""The reader of pickles: what it reads, and that it executes nothing."""

import os
import pickle

import numpy as np
import pytest
from data.formats import cifar_bytes, python2_array, python2_list, python2_pickle, python2_text
from hypothesis import given
from hypothesis import strategies as st

from ritz.data import DataError
from ritz.data._image_sets import read_pickle

IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 12)


def test_a_file_as_python_2_wrote_it():
    names = python2_list([python2_text(b"apple"), python2_text(b"b\xe9")])
    found = read_pickle(
        python2_pickle({"names": names, "data": python2_array(IMAGES)}), name="file"
    )
    assert found["names"] == [b"apple", b"b\xe9"]
    np.testing.assert_array_equal(found["data"], IMAGES)


def test_a_file_as_python_3_writes_it_with_protocol_2():
    contents = {b"labels": [0, 1, 300, 70000], b"data": IMAGES, b"batch_label": b"one", "k": "text"}
    found = read_pickle(pickle.dumps(contents, protocol=2), name="file")
    np.testing.assert_array_equal(found.pop("data"), IMAGES)
    assert found == {"labels": [0, 1, 300, 70000], "batch_label": b"one", "k": "text"}


atoms = st.none() | st.booleans() | st.integers(-(2**31), 2**31 - 1) | st.text(max_size=9)
plain = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=9), plain, max_size=4))
def test_plain_data_come_back(contents):
    assert read_pickle(pickle.dumps(contents, protocol=2), name="file") == contents


class Command:
    """What unpickling would run as a shell command."""

    def __init__(self, command, function=os.system):
        self.command, self.function = command, function

    def __reduce__(self):
        return self.function, (self.command,)


def malicious(marker):
    """Pickles that make a file when they are unpickled, each by another instruction."""
    touch = f"touch {marker}"
    yield pickle.dumps({b"data": Command(touch)}, protocol=2)
    yield pickle.dumps({b"data": Command(touch)}, protocol=0)
    yield pickle.dumps({b"data": Command(touch)}, protocol=4)
    yield pickle.dumps(
        {b"data": Command(f"__import__('os').mkdir({str(marker)!r})", eval)}, protocol=2
    )
    text = python2_text(touch.encode())
    yield b"\x80\x02cos\nsystem\n" + text + b"\x85R."
    yield b"\x80\x02(" + text + b"ios\nsystem\n."
    yield b"\x80\x02(cos\nsystem\n" + text + b"o."
    yield b"\x80\x02cposix\nsystem\n" + text + b"\x85\x81."
    # Behind a name that is allowed, and as a value of one.
    yield b"\x80\x02c_codecs\nencode\n(cos\nsystem\n" + text + b"tR."
    yield python2_pickle({"data": b"cbuiltins\nexec\n" + text + b"\x85R"})


@pytest.mark.parametrize("number", range(10))
def test_a_malicious_file_is_refused_and_nothing_in_it_runs(tmp_path, number):
    marker = tmp_path / "ran"
    content = list(malicious(marker))[number]
    with pytest.raises(DataError, match="is refused, and nothing in it was executed"):
        read_pickle(content, name="train")
    assert not marker.exists()


@pytest.mark.parametrize("number", [0, 3, 4, 5, 6])
def test_the_malicious_files_are_malicious(tmp_path, number):
    marker = tmp_path / "ran"
    content = list(malicious(marker))[number]
    pickle.loads(content, encoding="latin1")
    assert marker.exists()


@pytest.mark.parametrize(
    "array",
    [
        np.array([None, 1], dtype=object),
        np.arange(4.0),
        np.array(["a"]),
        np.asfortranarray(IMAGES),
    ],
)
def test_only_arrays_of_bytes_in_row_major_order(array):
    with pytest.raises(
        DataError,
        match=r"an array must have bytes, got dtype|only arrays of bytes in row-major order",
    ):
        read_pickle(pickle.dumps({"data": array}, protocol=2), name="train")


GOOD = cifar_bytes(np.zeros((2, 3, 4, 4), np.uint8), labels=[1, 2])


@pytest.mark.parametrize("size", range(0, len(GOOD), 7))
def test_every_truncation_is_one_line(size):
    with pytest.raises(DataError, match="train is truncated or not a pickle of a dictionary"):
        read_pickle(GOOD[:size], name="train")


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_a_changed_byte_raises_one_line_or_changes_values_only(place, value):
    content = bytearray(GOOD)
    content[place] = value
    try:
        found = read_pickle(content, name="train")
    except DataError:
        return
    assert all(isinstance(key, str) for key in found)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02K\x01.", "one dictionary"),
        (b"\x80\x02}K\x01a.", "no attribute 'append'"),
        (b"\x80\x02](K\x01K\x01u.", "list assignment"),
        (b"\x80\x02}(K\x01u.", "odd number of items"),
        (b"\x80\x02}h\x05.", "is truncated or not a pickle"),
        (b"\x80\x02}T\xff\xff\xff\xff.", "was truncated"),
        (b"\x80\x02\x87.", "stack underflow"),
        (b"\x80\x02}K\x01b.", "state is not a dictionary"),
        (b"\x80\x02}N)R.", "not callable"),
        (b"\x80\x02cnumpy\nndarray\n)R.", "one dictionary, got _Array"),
        (b"\x80\x02cnumpy\ndtype\nU\x02O8\x85R.", "an array must have bytes, got dtype 'O8'"),
        (b"\x80\x02c" + b"n" * 300 + b"\nx\n.", "is refused.* the name n{80}, which"),
    ],
)
def test_nonsense_is_one_line(content, message):
    with pytest.raises(DataError, match=message):
        read_pickle(content, name="train")
