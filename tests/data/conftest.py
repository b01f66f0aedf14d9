"""Small files in the formats that data sets are published in."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from data.formats import cifar_bytes, idx_bytes

MNIST = {"train": 40, "t10k": 15}


@pytest.fixture
def rgb():
    """Colour images of 32 x 32 pixels, by their number."""
    return lambda count: np.random.RandomState(count).randint(
        0, 256, (count, 3, 32, 32), dtype=np.uint8
    )


@pytest.fixture
def mnist_folder(tmp_path):
    """Small files of MNIST in ``mnist``, the labels packed by gzip."""
    folder, random = tmp_path / "mnist", np.random.RandomState(5)
    folder.mkdir()
    for part, count in MNIST.items():
        images = random.randint(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        packed = gzip.compress(idx_bytes(labels), mtime=0)
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(packed)
    return folder


@pytest.fixture(autouse=True)
def no_data_folder(request, monkeypatch):
    """Fast tests read what they wrote, wherever the user keeps data."""
    if not request.node.get_closest_marker("slow"):
        monkeypatch.delenv("RITZ_DATA", raising=False)


@pytest.fixture
def write_cifar100(tmp_path, rgb):
    """Write small files of CIFAR-100 below a folder and return the images."""

    def write(counts=(30, 8)) -> tuple[Path, list[np.ndarray]]:
        folder, found = tmp_path / "cifar-100-python", []
        folder.mkdir()
        for file, count in zip(("train", "test"), counts, strict=True):
            images = rgb(count)
            fine, coarse = [n % 100 for n in range(count)], [n % 20 for n in range(count)]
            (folder / file).write_bytes(cifar_bytes(images, fine_labels=fine, coarse_labels=coarse))
            found.append(images)
        return tmp_path, found

    return write
