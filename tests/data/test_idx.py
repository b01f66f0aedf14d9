import gzip
import struct

import numpy as np
import pytest
import torch
from data.formats import idx_bytes

from ritz import data
from ritz.data._image_sets import read_idx


def test_mnist_round_trip(mnist_folder):
    found = data.load("mnist", data_dir=mnist_folder.parent)
    raw = (mnist_folder / "t10k-images-idx3-ubyte").read_bytes()[16:]
    assert found.test.inputs.numpy().tobytes() == raw
    assert found.test.inputs.shape == (15, 1, 28, 28)
    assert found.test.inputs.dtype == torch.uint8
    assert found.train.targets.tolist() == [n % 10 for n in range(40)]
    assert found.train.targets.dtype == torch.int64
    assert (found.name, found.num_classes, found.shape) == ("mnist", 10, (1, 28, 28))
    assert found.validation is None
    assert found.split_seed is None


def test_mean_and_deviation_are_computed_from_the_training_images(mnist_folder):
    found = data.load("mnist", data_dir=mnist_folder, validation=7)
    pixels = torch.cat([found.train.inputs, found.validation.inputs]).double() / 255
    torch.testing.assert_close(found.train.mean, pixels.mean().reshape(1))
    torch.testing.assert_close(found.train.std, pixels.std(correction=0).reshape(1))


@pytest.mark.parametrize("place", [".", "MNIST/raw"])
def test_files_are_found_in_the_folder_and_in_sub_folders(mnist_folder, tmp_path, place):
    target = tmp_path / "elsewhere" / place
    target.parent.mkdir(parents=True, exist_ok=True)
    mnist_folder.rename(target)
    assert len(data.load("mnist", data_dir=tmp_path / "elsewhere").train) == 40


def test_mnist_files_are_not_read_as_fashion_mnist(mnist_folder):
    with pytest.raises(
        FileNotFoundError, match=r"train-images.*and 3 other files, not found.*zalandoresearch"
    ):
        data.load("fashion-mnist", data_dir=mnist_folder)
    mnist_folder.rename(mnist_folder.with_name("fashion-mnist"))
    found = data.load("fashion-mnist", data_dir=mnist_folder.parent)
    assert found.classes[9] == "Ankle boot"


def test_a_truncated_gzip_file_is_named(mnist_folder):
    path = mnist_folder / "train-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(data.DataError, match=r"train-labels-idx1-ubyte.gz is a truncated gzip"):
        data.load("mnist", data_dir=mnist_folder)


def test_a_damaged_gzip_file_is_named(mnist_folder):
    path = mnist_folder / "train-labels-idx1-ubyte.gz"
    raw = bytearray(path.read_bytes())
    raw[-6] ^= 1  # of the checksum
    path.write_bytes(raw)
    with pytest.raises(data.DataError, match="damaged gzip file: CRC"):
        data.load("mnist", data_dir=mnist_folder)


LABELS = idx_bytes(np.arange(6, dtype=np.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must begin with 00000801, got nothing"),
        (b"\x00\x00\x08\x03" + LABELS[4:], "must begin with 00000801, got 00000803"),
        (b"\x00\x00\x0d\x01" + LABELS[4:], "got 00000d01"),
        (LABELS[:6], "ends in its header"),
        (LABELS[:-1], r"declares 6 bytes \[6\], but has fewer"),
        (LABELS + b"!", r"declares 6 bytes \[6\], but has more"),
        (gzip.compress(LABELS[:-1], mtime=0), r"declares 6 bytes \[6\], but has fewer"),
    ],
    ids=["empty", "images", "floats", "header", "short", "long", "packed"],
)
def test_a_file_that_contradicts_its_header_is_refused(tmp_path, content, message):
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(data.DataError, match=message):
        read_idx(path, ndim=1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [((2**32 - 1,) * 3, "at most 536870912"), ((2**9, 2**9, 2**11), "but has fewer")],
)
def test_a_large_size_in_the_header_takes_no_memory(tmp_path, packed, sizes, message):
    path = tmp_path / "images"
    content = struct.pack(">HBB3I", 0, 8, 3, *sizes) + bytes(100)
    path.write_bytes(gzip.compress(content, mtime=0) if packed else content)

    with pytest.raises(data.DataError, match=message):
        read_idx(path, ndim=3)


def test_a_label_out_of_range_is_refused(mnist_folder):
    labels = np.array([3, 1, 10, *[0] * 12], dtype=np.uint8)
    (mnist_folder / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    with pytest.raises(data.DataError, match="label 10 at place 2, which is not between 0 and 9"):
        data.load("mnist", data_dir=mnist_folder)


def test_different_numbers_of_labels_and_images_are_refused(mnist_folder):
    (mnist_folder / "t10k-labels-idx1-ubyte").write_bytes(LABELS)
    with pytest.raises(data.DataError, match=r"has 15 images, but .*t10k-labels.* 6 labels"):
        data.load("mnist", data_dir=mnist_folder)


def test_a_part_without_samples_is_refused(mnist_folder):
    for kind, shape in (("images-idx3", (0, 28, 28)), ("labels-idx1", (0,))):
        path = mnist_folder / f"t10k-{kind}-ubyte"
        path.write_bytes(idx_bytes(np.empty(shape, np.uint8)))
    with pytest.raises(data.DataError, match="has no samples"):
        data.load("mnist", data_dir=mnist_folder)
