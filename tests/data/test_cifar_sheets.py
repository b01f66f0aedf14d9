"""CIFAR-10 as PNG sheets with one image per row of pixels, and labels in JSON."""

import json

import numpy as np
import pytest

from ritz import data

Image = pytest.importorskip("PIL.Image")
SIZES = (3, 4, 5, 6, 7, 8)


@pytest.fixture
def sheets(tmp_path, rgb):
    """The images (n, 3, 32, 32) of six sheets, written to files."""
    images = [rgb(count) for count in SIZES]
    names = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
    for name, part in zip(names, images, strict=True):
        rows = part.transpose(0, 2, 3, 1).reshape(len(part), 32 * 32, 3)
        Image.fromarray(rows).save(tmp_path / f"{name}.png")
    (tmp_path / "train_lables.json").write_text(json.dumps([n % 10 for n in range(25)]))
    (tmp_path / "test_lables.json").write_text(json.dumps(list(range(8))))
    return images


def test_sheets_are_read_pixel_by_pixel(tmp_path, sheets):
    found = data.load("cifar10", data_dir=tmp_path)
    np.testing.assert_array_equal(found.train.inputs.numpy(), np.concatenate(sheets[:5]))
    np.testing.assert_array_equal(found.test.inputs.numpy(), sheets[5])
    assert found.train.targets.tolist() == [n % 10 for n in range(25)]
    assert found.test.targets.tolist() == list(range(8))
    assert (found.shape, found.classes[3]) == ((3, 32, 32), "cat")
    assert found.augmentation == data.Augmentation(padding=4, flip=True)


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        ([0] * 24, "must have 25 classes, got 24"),
        ([0] * 24 + [10], "the label 10 at place 24"),
        ([0] * 24 + [10**30], "the label 10 at place 24"),
        ([0] * 24 + ["cat"], "must have a list of integers"),
        ({"labels": []}, "must have a list of integers"),
        ([], "has no samples"),
    ],
)
def test_wrong_labels_are_named(tmp_path, sheets, labels, match):
    (tmp_path / "train_lables.json").write_text(json.dumps(labels))
    with pytest.raises(data.DataError, match=match):
        data.load("cifar10", data_dir=tmp_path)


def test_damaged_files_are_named(tmp_path, sheets):
    (tmp_path / "test_lables.json").write_text("[1, 2")
    with pytest.raises(data.DataError, match=r"test_lables.json is not a file of JSON"):
        data.load("cifar10", data_dir=tmp_path)
    Image.fromarray(np.zeros((3, 1000, 3), np.uint8)).save(tmp_path / "data_batch_2.png")
    (tmp_path / "test_lables.json").write_text(json.dumps(list(range(8))))
    with pytest.raises(data.DataError, match=r"data_batch_2.png must be 1024 pixels wide"):
        data.load("cifar10", data_dir=tmp_path)


def test_without_all_files_the_pickles_are_asked_for(tmp_path, sheets):
    (tmp_path / "data_batch_5.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"cifar-10-python\.tar\.gz"):
        data.load("cifar10", data_dir=tmp_path)
