"""The reader of pickles: it reads CIFAR, executes nothing, and stays small."""

import os
import pickle
import struct
import time
import tracemalloc

import numpy as np
import pytest
from data.formats import cifar_bytes, python2_array, python2_list, python2_pickle, python2_text
from hypothesis import given
from hypothesis import strategies as st

from ritz.data import DataError
from ritz.data._cifar import read_pickle

IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 12)


def test_a_file_of_python_2_is_read():
    names = python2_list([python2_text(b"apple"), python2_text(b"b\xe9")])

    read = read_pickle(python2_pickle({"names": names, "data": python2_array(IMAGES)}), name="file")

    assert read["names"] == [b"apple", b"b\xe9"]
    np.testing.assert_array_equal(read["data"], IMAGES)


def test_a_file_of_python_3_with_protocol_2_is_read():
    contents = {b"labels": [0, 1, 300, 70000], b"data": IMAGES, "k": "text"}

    read = read_pickle(pickle.dumps(contents, protocol=2), name="file")

    np.testing.assert_array_equal(read.pop("data"), IMAGES)
    assert read == {"labels": [0, 1, 300, 70000], "k": "text"}


atoms = st.none() | st.booleans() | st.integers(-(2**31), 2**31 - 1) | st.text(max_size=9)
plain = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=9), plain, max_size=4), st.integers(0, 3))
def test_lists_numbers_and_text_are_read_in_protocols_0_to_3(contents, protocol):
    contents.pop("data", None)

    assert read_pickle(pickle.dumps(contents, protocol=protocol), name="file") == contents


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
    yield pickle.dumps({b"data": Command(touch)}, protocol=3)
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
    with pytest.raises(DataError, match="is not read, because it could execute code"):
        read_pickle(content, name="train")
    assert not marker.exists()


@pytest.mark.parametrize("number", [0, 3, 4, 5, 6])
def test_the_standard_unpickler_executes_the_malicious_files(tmp_path, number):
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
def test_arrays_other_than_bytes_in_row_major_order_are_refused(array):
    with pytest.raises(DataError, match="only arrays of bytes in row-major order"):
        read_pickle(pickle.dumps({"data": array}, protocol=2), name="train")


GOOD = cifar_bytes(np.zeros((2, 3, 4, 4), np.uint8), labels=[1, 2])


@pytest.mark.parametrize("size", range(0, len(GOOD), 7))
def test_a_truncated_file_is_named_wherever_it_ends(size):
    # A name that is cut is unknown, and refused.
    with pytest.raises(DataError, match=r"train is (truncated or not a pickle|not read)"):
        read_pickle(GOOD[:size], name="train")


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_a_changed_byte_raises_one_line_or_changes_values_only(place, value):
    content = bytearray(GOOD)
    content[place] = value
    try:
        read = read_pickle(content, name="train")
    except DataError:
        return
    assert type(read) is dict


# Chains that a small file makes long: memory, recursion and time must stay bounded.
NESTED = b"]" * 100_000 + b"a" * 99_999
TWICE = b"2\x86" * 40  # every level holds the one below twice
KEY = b"\x80\x02}U\x04data"


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}Nr" + struct.pack("<I", 2**31 - 1) + b".",  # a memo of two billion entries
        b"\x80\x02}" + b"K\x01" + b"\x85" * 300_000 + b"Ns.",  # a nested tuple as a key
        b"\x80\x02}" + b"K\x01" + TWICE + b"Ns.",
        b"\x80\x02" + b"]" * 3_000_000 + b".",
        KEY + NESTED + b"s.",
        KEY + b"]" + TWICE + b"s.",
        KEY + b"c_codecs\nencode\nJ\xff\xff\xff\x7f\x85Rs.",  # bytes(2**31 - 1)
        b"\x80\x05\x96" + struct.pack("<Q", 2**33) + b".",  # a bytearray of eight gigabytes
        b"\x80\x02}X" + struct.pack("<I", 2**32 - 1) + b".",
        b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".",  # an integer of two gigabytes
        b"\x80\x02I" + b"9" * 100_000 + b"\n.",
        pickle.dumps({"data": [IMAGES] * 3}, protocol=5),
    ],
    ids=range(12),
)
def test_a_small_file_costs_little_memory_and_time(content):
    begin = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="train is truncated or not a pickle of a dict"):
            read_pickle(content, name="train")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 3e8
    assert time.process_time() - begin < 20


def test_bytes_that_are_repeated_a_thousand_times_are_copied_once():
    array = python2_array(np.zeros((1000, 1000), np.uint8))
    content = KEY + array + b"q\x05s" + b"".join(b"K%ch\x05s" % n for n in range(200)) + b"."
    tracemalloc.start()
    try:
        read_pickle(content, name="train")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 1e7


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02K\x01.", "one dictionary"),
        (b"\x80\x02}K\x01a.", "has no attribute"),
        (b"\x80\x02](K\x01K\x01u.", "list assignment"),
        (b"\x80\x02}(K\x01u.", "list index out of range"),
        (b"\x80\x02}h\x05.", "is truncated or not a pickle"),
        (b"\x80\x02}T\xff\xff\xff\xff.", "negative byte count"),
        (b"\x80\x02\x87.", "one dictionary, got list"),
        (b"\x80\x02}K\x01b.", "has no attribute '__dict__'"),
        (b"\x80\x02}N)R.", "not callable"),
        (b"\x80\x02cnumpy\nndarray\n)R.", "one dictionary, got _Part"),
        (b"\x80\x02c" + b"n" * 300 + b"\nx\n.", "is not read.* to n{80}, which"),
    ],
)
def test_instructions_without_meaning_name_the_file(content, message):
    with pytest.raises(DataError, match=message):
        read_pickle(content, name="train")
