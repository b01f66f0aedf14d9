import sys

import pytest
import torch

from ritz import data
from ritz._core.registry import UnknownNameError
from ritz.data._images import SPLIT_SEED

NAMES = (
    "cifar10", "cifar100", "digits", "fashion-mnist", "folder", "imagenet32", "mnist", "ptb",
    "text", "wikitext-2",
)  # fmt: skip


def test_all_data_sets_are_listed():
    assert data.available() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_has_a_description_of_one_line(name):
    line = data.describe(name)
    assert line.endswith(".")
    assert len(line) < 100


@pytest.mark.parametrize(
    ("wrong", "right"), [("minst", "mnist"), ("cifar-100", "cifar100"), ("wikitext", "wikitext-2")]
)
def test_an_unknown_name_suggests_the_nearest(wrong, right):
    with pytest.raises(UnknownNameError, match=rf"no data set is named '{wrong}'; did .*{right}"):
        data.load(wrong)


def test_an_unknown_or_missing_option_names_the_known_ones():
    message = "data set mnist: got an .*'labels'; its options are validation"
    with pytest.raises(TypeError, match=message):
        data.load("mnist", labels="fine")
    with pytest.raises(TypeError, match=r"data set text: missing .*argument: 'file'; its options"):
        data.load("text")


def test_digits_need_no_files():
    found = data.load("digits", validation=80)
    assert (len(found.train), len(found.validation), len(found.test)) == (1200, 80, 517)
    assert found.shape == (1, 8, 8)
    assert int(found.train.inputs.max()) == 240
    assert set(found.train.targets.tolist()) == set(range(10))
    assert found.split_seed == SPLIT_SEED


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        data.load("digits")


def test_the_folder_defaults_to_the_environment_variable(mnist_folder, monkeypatch):
    monkeypatch.setenv("RITZ_DATA", str(mnist_folder.parent))
    assert len(data.load("mnist").train) == 40
    # An argument goes before it.
    message = "data_dir must be an existing folder, got 'nowhere'"
    with pytest.raises(FileNotFoundError, match=message):
        data.load("mnist", data_dir="nowhere")
    # A fault of the variable is not one of the argument.
    monkeypatch.setenv("RITZ_DATA", "nowhere")
    message = "^the environment variable RITZ_DATA must name an existing folder, got 'nowhere'"
    with pytest.raises(FileNotFoundError, match=message):
        data.load("mnist")
    with pytest.raises(FileNotFoundError, match=r"^data_dir must be an existing folder, got 'else"):
        data.load("mnist", data_dir="elsewhere")
    assert len(data.load("digits").train)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("digits", "text")])
def test_a_missing_folder_says_which_option_to_give(name):
    message = rf"data_dir.* must be (given for '{name}'|a folder of images)"
    with pytest.raises(FileNotFoundError, match=message):
        data.load(name)


def test_a_missing_file_is_named_with_the_folders_searched_and_its_source(mnist_folder):
    (mnist_folder / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(FileNotFoundError) as raised:
        data.load("mnist", data_dir=mnist_folder.parent)
    message = str(raised.value)
    assert message.startswith("'mnist' needs t10k-images-idx3-ubyte (or .gz), not found in")
    assert str(mnist_folder) in message
    assert "yann.lecun.com" in message
    assert "\n" not in message


def test_data_are_stored_on_the_device(mnist_folder):
    found = data.load("mnist", data_dir=mnist_folder, device="meta", validation=5)
    devices = {part.device.type for part in (found.train, found.test, found.validation)}
    assert devices == {"meta"}
    assert found.train.inputs.dtype == torch.uint8


def test_a_missing_device_is_refused(mnist_folder):
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"got 'cuda:{count}': torch finds {count or 'no'} CUDA"):
        data.load("mnist", data_dir=mnist_folder, device=f"cuda:{count}")
    with pytest.raises(ValueError, match="device must be cpu, cuda or cuda:<number>, got 'gpu'"):
        data.load("mnist", data_dir=mnist_folder, device="gpu")


def test_images_print_as_one_line_with_their_sizes():
    images = data.load("digits", validation=280)

    assert str(images) == (
        "ImageData(digits, 10 classes, images of 1 x 8 x 8, train 1,000, validation 280, test 517, "
        "cpu)"
    )
    assert str(images.test) == "Split(517 images of 1 x 8 x 8, cpu)"
    assert str(images.test.batches(100)) == "Epoch(6 batches)"


def test_a_text_prints_as_one_line_with_its_sizes(tmp_path):
    (tmp_path / "story.txt").write_text("abcd" * 25)

    text = data.load("text", file=str(tmp_path / "story.txt"), length=5)

    sizes = "train 90, validation 5, test 5"
    assert str(text) == f"TextData(text, vocabulary of 4, tokens: {sizes}, cpu)"
    assert str(text.train) == "TextSplit(90 tokens, segments of 5, cpu)"
