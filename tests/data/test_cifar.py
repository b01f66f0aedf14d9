import gzip
import os
import pickle

import numpy as np
import pytest
import torch
from data.formats import cifar_bytes, python2_list, python2_pickle, python2_text

from ritz import data
from ritz.data._images import hold_out


def test_cifar100_round_trip(write_cifar100):
    root, (train, test) = write_cifar100()
    found = data.load("cifar100", data_dir=root)
    np.testing.assert_array_equal(found.train.inputs.numpy(), train)
    np.testing.assert_array_equal(found.test.inputs.numpy(), test)
    assert found.train.targets.tolist() == list(range(30))
    assert (found.num_classes, found.classes[7]) == (100, "7")
    assert found.augmentation == data.Augmentation(padding=4, flip=True)


def test_cifar100_reads_coarse_labels_and_class_names(write_cifar100):
    root, _ = write_cifar100()
    names = python2_list([python2_text(b"class%d" % n) for n in range(20)])
    meta = root / "cifar-100-python" / "meta"
    meta.write_bytes(python2_pickle({"coarse_label_names": names}))
    found = data.load("cifar100", data_dir=root, labels="coarse")
    assert found.train.targets.tolist() == [n % 20 for n in range(30)]
    assert found.classes[19] == "class19"
    with pytest.raises(data.DataError, match="a list of 100 names under 'fine_label_names'"):
        data.load("cifar100", data_dir=root)
    with pytest.raises(ValueError, match="labels must be one of fine, coarse; got 'both'"):
        data.load("cifar100", data_dir=root, labels="both")


@pytest.mark.parametrize("packed", [False, True])
def test_cifar10_joins_its_five_files(tmp_path, rgb, packed):
    images = [rgb(count) for count in (3, 4, 5, 6, 7, 8)]
    files = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
    for file, part in zip(files, images, strict=True):
        # As Python 3 writes it with protocol 2: bytes as latin1 text.
        contents = {b"data": part.reshape(len(part), -1), b"labels": list(range(len(part)))}
        content = pickle.dumps(contents, protocol=2)
        (tmp_path / f"{file}{'.gz' * packed}").write_bytes(
            gzip.compress(content, mtime=0) if packed else content
        )
    found = data.load("cifar10", data_dir=tmp_path)
    np.testing.assert_array_equal(found.train.inputs.numpy(), np.concatenate(images[:5]))
    np.testing.assert_array_equal(found.test.inputs.numpy(), images[5])
    assert found.train.targets[:7].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert found.classes[:2] == ("airplane", "automobile")


class Command:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("file", ["train", "test", "meta"])
def test_a_malicious_file_is_refused_and_nothing_in_it_runs(write_cifar100, tmp_path, file):
    root, _ = write_cifar100()
    marker = tmp_path / "ran"
    content = pickle.dumps({b"data": Command(marker)}, protocol=2)
    (root / "cifar-100-python" / file).write_bytes(content)
    with pytest.raises(data.DataError, match=rf"{file} is not read.*refers to posix.system"):
        data.load("cifar100", data_dir=root)
    assert not marker.exists()
    pickle.loads(content)  # the file is what it is said to be
    assert marker.exists()


def test_the_validation_split_is_fixed(write_cifar100):
    root, (train, _) = write_cifar100((100, 5))
    found = data.load("cifar100", data_dir=root, validation=10)
    stay, out = (part for part, _ in hold_out((torch.arange(100),) * 2, 10))
    assert (len(found.train), len(found.validation), found.split_seed) == (90, 10, 0)
    np.testing.assert_array_equal(found.train.inputs.numpy(), train[stay.numpy()])
    assert found.validation.targets.tolist() == out.tolist()
    with pytest.raises(ValueError, match="validation must be between 0 and 99, got 100"):
        data.load("cifar100", data_dir=root, validation=100)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"fine_labels": [0]}, r"images \(n, 3072\) under 'data', got NoneType"),
        ({"data": np.zeros((1, 9), np.uint8)}, r"images \(n, 3072\) under 'data', got \(1, 9\)"),
        ({"data": np.zeros((2, 3072), np.uint8), "fine_labels": [0]}, "a list of 2 integers"),
        ({"data": np.zeros((1, 3072), np.uint8), "fine_labels": [True]}, "a list of 1 integers"),
        ({"data": np.zeros((1, 3072), np.uint8), "fine_labels": [100]}, "label 100 at place 0"),
        ({"data": np.zeros((1, 3072), np.uint8), "fine_labels": [-1]}, "label -1 at place 0"),
    ],
)
def test_files_with_other_content_are_refused(write_cifar100, content, message):
    root, _ = write_cifar100()
    (root / "cifar-100-python" / "test").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(data.DataError, match=message):
        data.load("cifar100", data_dir=root)


def test_a_part_without_samples_is_refused(write_cifar100):
    root, _ = write_cifar100()
    content = cifar_bytes(np.zeros((0, 3072), np.uint8), fine_labels=[])
    (root / "cifar-100-python" / "test").write_bytes(content)
    with pytest.raises(data.DataError, match="has no samples"):
        data.load("cifar100", data_dir=root)


def test_a_compressed_file_above_the_limit_is_refused(write_cifar100, monkeypatch):
    root, _ = write_cifar100()
    monkeypatch.setattr("ritz.data._cifar.LIMIT", 10_000)
    packed = gzip.compress(
        cifar_bytes(np.zeros((50, 3, 32, 32), np.uint8), fine_labels=[0] * 50), mtime=0
    )
    (root / "cifar-100-python" / "train").write_bytes(packed)
    with pytest.raises(
        data.DataError, match="is too large for a file of this data set: more than 10000 bytes"
    ):
        data.load("cifar100", data_dir=root)


def test_tensors_can_be_modified_in_place(write_cifar100):
    root, _ = write_cifar100()
    found = data.load("cifar100", data_dir=root)
    found.train.inputs.zero_()  # would warn or fail on the memory of a file
    assert not torch.any(found.train.inputs)
