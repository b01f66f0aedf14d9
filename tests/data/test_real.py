"""Published data sets, where ``RITZ_DATA`` names a folder with them: counts and means as known."""

import hashlib
import os
import time

import pytest
import torch

from ritz import data
from ritz._core.random import epoch_generator
from ritz.data._images import hold_out

pytestmark = pytest.mark.slow

# Training and test images, classes, and mean and deviation of the channels as commonly quoted.
IMAGES = {
    "mnist": (60_000, 10_000, 10, (0.1307,), (0.3081,)),
    "fashion-mnist": (60_000, 10_000, 10, (0.2860,), (0.3530,)),
    "cifar10": (50_000, 10_000, 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": (50_000, 10_000, 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
# Words of training, validation and test, and different ones.
TEXTS = {
    "ptb": (929_589, 73_760, 82_430, 10_000),
    "wikitext-2": (2_088_628, 217_646, 245_569, 33_278),
}
MNIST_TEST = "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"  # of the idx file


def load(name, **options):
    if not os.environ.get("RITZ_DATA"):
        pytest.skip("needs RITZ_DATA")
    try:
        return data.load(name, **options)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", IMAGES)
def test_published_images_have_the_known_counts_and_means(name):
    found = load(name)
    _, num_test, num_classes, mean, std = IMAGES[name]
    assert (len(found.train), len(found.test), found.num_classes) == IMAGES[name][:3]
    # Quoted to four places.
    torch.testing.assert_close(found.train.mean, torch.tensor(mean).double(), atol=6e-5, rtol=0)
    torch.testing.assert_close(found.train.std, torch.tensor(std).double(), atol=6e-5, rtol=0)
    counts = torch.bincount(found.test.targets, minlength=num_classes)
    assert name == "mnist" or (counts == num_test // num_classes).all()


def test_imagenet32_has_the_known_counts():
    found = load("imagenet32")
    assert (len(found.train), len(found.test)) == (1_281_167, 50_000)
    assert (torch.bincount(found.test.targets) == 50).all()


def test_mnist_pixels_match_the_file():
    found = load("mnist").test.inputs.numpy()
    head = bytes([0, 0, 8, 3, 0, 0, 39, 16, 0, 0, 0, 28, 0, 0, 0, 28])
    assert hashlib.sha256(head + found.tobytes()).hexdigest() == MNIST_TEST


def test_cifar_is_split_into_45_000_and_5_000():
    whole, cut = load("cifar100"), load("cifar100", validation=5000)
    stay, out = (part for part, _ in hold_out((torch.arange(50_000),) * 2, 5000))
    assert torch.equal(cut.train.inputs, whole.train.inputs[stay])
    assert torch.equal(cut.validation.targets, whole.train.targets[out])
    assert torch.equal(cut.train.mean, whole.train.mean)


def test_cifar100_has_class_names_and_coarse_labels():
    fine, coarse = load("cifar100"), load("cifar100", labels="coarse")
    assert torch.equal(fine.train.inputs, coarse.train.inputs)
    names = {
        fine.classes[int(y)]: coarse.classes[int(z)]
        for y, z in zip(fine.test.targets, coarse.test.targets, strict=True)
    }
    assert names["0" if fine.classes[0] == "0" else "apple"] in ("fruit_and_vegetables", "4")
    assert len(set(names.values())) == 20


def test_an_augmented_epoch_of_cifar_takes_seconds():
    train = load("cifar100").train
    settings = {"generator": epoch_generator(0, 0), "augment": data.Augmentation()}
    start = time.process_time()
    count = sum(len(y) for _, y in train.batches(128, **settings))
    # One second of a processor, whatever else the machine does.
    assert (count, time.process_time() - start < 30) == (50_000, True)


@pytest.mark.parametrize("name", TEXTS)
def test_published_texts_have_the_known_counts(name):
    found = load(name)
    sizes = [len(part.tokens) for part in (found.train, found.validation, found.test)]
    assert (*sizes, found.num_classes) == TEXTS[name]


def test_shakespeare_is_read_as_characters():
    found = load("text", file="tinyshakespeare.txt")
    assert (len(found.train.tokens), found.num_classes) == (1_003_854, 65)
