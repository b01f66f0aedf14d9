"""Damaged files of CIFAR, MNIST and ImageNet-32: one line or numbers, at little cost."""

import gzip

import numpy as np
import pytest
from data.formats import cifar_bytes, idx_bytes
from fuzz import CASES, cheap, damaged

from ritz.data import DataError
from ritz.data._cifar import read_pickle
from ritz.data._image_sets import read_idx, read_member

pytestmark = pytest.mark.slow

IMAGES = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)


def read_cifar(path):
    return read_pickle(path.read_bytes(), name="train")


READERS = {
    "cifar": (cifar_bytes(IMAGES, labels=[1, 2]), read_cifar),
    "idx": (idx_bytes(IMAGES[0]), lambda path: read_idx(path, ndim=3)),
    "packed idx": (
        gzip.compress(idx_bytes(IMAGES[0]), mtime=0),
        lambda path: read_idx(path, ndim=3),
    ),
    "npz": (None, lambda path: read_member(path, "data")),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, kind):
    content, read = READERS[kind]
    path = tmp_path / "file"
    if content is None:
        np.savez_compressed(tmp_path / "a.npz", data=IMAGES)
        content = (tmp_path / "a.npz").read_bytes()

    refused = 0
    with cheap(seconds=600):
        for data in damaged(content, CASES):
            path.write_bytes(data)
            with cheap():
                try:
                    read(path)
                except DataError as error:
                    assert len(str(error)) < 3000  # noqa: PT017
                    refused += 1

    assert refused > CASES / 4
