import io
import os
import zipfile

import numpy as np
import pytest

from ritz import data
from ritz.data._image_sets import read_member

FILES = [*(f"train_data_batch_{n}.npz" for n in range(1, 11)), "val_data.npz"]


@pytest.fixture
def folder(tmp_path, rgb):
    place = tmp_path / "imagenet32"
    place.mkdir()
    for number, file in enumerate(FILES):
        images = rgb(number + 1).reshape(number + 1, -1)
        save = np.savez_compressed if number % 2 else np.savez
        save(place / file, data=images, labels=np.arange(number + 1) + 990, mean=images.mean(0))
    return place


def test_the_training_files_are_joined_in_order(folder, rgb):
    found = data.load("imagenet32", data_dir=folder.parent)
    images = np.concatenate([rgb(number + 1) for number in range(10)])
    np.testing.assert_array_equal(found.train.inputs.numpy(), images)
    np.testing.assert_array_equal(found.test.inputs.numpy(), rgb(11))
    # The files count classes from 1.
    assert found.train.targets[:6].tolist() == [989, 989, 990, 989, 990, 991]
    assert found.num_classes == 1000


class Command:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_arrays_of_objects_are_refused_and_not_executed(folder, tmp_path):
    marker = tmp_path / "ran"
    array = np.array([Command(marker)], dtype=object)
    np.savez(folder / "val_data.npz", data=array, labels=array)
    with pytest.raises(data.DataError, match="Object arrays cannot be loaded"):
        data.load("imagenet32", data_dir=folder)
    assert not marker.exists()
    with np.load(folder / "val_data.npz", allow_pickle=True) as file:
        _ = file["labels"]  # the file is what it is said to be
    assert marker.exists()


ROW = np.zeros((1, 3072), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"data": ROW}, "has no array 'labels'"),
        ({"labels": np.ones(1, np.int64)}, "has no array 'data'"),
        ({"data": ROW, "labels": np.ones(1)}, r"integers \(n,\) under 'labels', got float64"),
        ({"data": ROW, "labels": np.ones((1, 1), int)}, r"integers \(n,\) under 'labels'"),
        ({"data": ROW, "labels": np.array([1001])}, "label 1000 at place 0"),
        ({"data": ROW, "labels": np.array([0])}, "label -1 at place 0"),
        ({"data": ROW, "labels": np.array([1, 2])}, r"must be uint8 \(2, 3072\), got uint8 \(1, "),
        ({"data": ROW.astype(float), "labels": np.array([1])}, "must be uint8 .*got float64"),
    ],
)
def test_files_with_other_content_are_refused(folder, arrays, message):
    np.savez(folder / "val_data.npz", **arrays)
    with pytest.raises(data.DataError, match=message):
        data.load("imagenet32", data_dir=folder)


def npy_bytes(shape, body):
    file = io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + body


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (npy_bytes((10**12,), b"0" * 10), "Unable to allocate|expected 10+ bytes"),
        (npy_bytes((11,), b"0" * 10), "expected 11 bytes got 10"),
        (b"\x93NUMPX" + bytes(40), "is truncated or not an npz file"),
        (b"\x93NUMPY\x01\x00\x10\x00__import__('os')", "is truncated or not an npz file"),
    ],
)
def test_an_array_that_contradicts_its_header_is_refused(tmp_path, member, message):
    path = tmp_path / "file.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", member)
    with pytest.raises(data.DataError, match=message):
        read_member(path, "data")


def test_an_array_larger_than_the_limit_is_not_decompressed(folder, monkeypatch):
    monkeypatch.setattr("ritz.data._image_sets.LIMIT", 3000)

    with pytest.raises(data.DataError, match=r"'data' has 3200 bytes; at most 3000"):
        data.load("imagenet32", data_dir=folder)


@pytest.mark.parametrize("damage", ["cut", "changed", "text"])
def test_a_damaged_archive_is_named(folder, damage):
    path = folder / "train_data_batch_4.npz"
    content = bytearray(path.read_bytes())
    if damage == "changed":
        content[3000] ^= 1
    path.write_bytes({"cut": content[:-40], "changed": content, "text": b"text"}[damage])
    with pytest.raises(data.DataError, match=r"batch_4.npz is truncated or not an npz file"):
        data.load("imagenet32", data_dir=folder)
