import subprocess
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


def test_names():
    assert data.available() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_is_described_in_a_line(name):
    line = data.describe(name)
    assert line.endswith(".")
    assert len(line) < 100


@pytest.mark.parametrize(
    ("wrong", "right"), [("minst", "mnist"), ("cifar-100", "cifar100"), ("wikitext", "wikitext-2")]
)
def test_a_wrong_name_is_answered_with_the_nearest(wrong, right):
    with pytest.raises(UnknownNameError, match=rf"no data set is named '{wrong}'; did .*{right}"):
        data.load(wrong)


def test_wrong_options_name_the_right_ones():
    message = "the data set 'mnist' has no option 'labels', but has: validation"
    with pytest.raises(TypeError, match=message):
        data.load("mnist", labels="fine")
    with pytest.raises(TypeError, match="the data set 'text' needs the option 'file'"):
        data.load("text")


def test_digits_are_embedded():
    found = data.load("digits", validation=80)
    assert (len(found.train), len(found.validation), len(found.test)) == (1200, 80, 517)
    assert found.shape == (1, 8, 8)
    assert int(found.train.inputs.max()) == 240
    assert set(found.train.targets.tolist()) == set(range(10))
    assert found.split_seed == SPLIT_SEED


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        data.load("digits")


def test_the_environment_names_the_folder(mnist_folder, monkeypatch):
    monkeypatch.setenv("RITZ_DATA", str(mnist_folder.parent))
    assert len(data.load("mnist").train) == 40
    # An argument goes before it.
    with pytest.raises(FileNotFoundError, match="data_dir must be a folder, got 'nowhere'"):
        data.load("mnist", data_dir="nowhere")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("digits", "text")])
def test_without_a_folder_the_message_says_what_to_give(name):
    with pytest.raises(FileNotFoundError, match=rf"no folder (for '{name}'|of images).*data_dir="):
        data.load(name)


def test_a_missing_file_is_named_with_where_it_was_looked_for_and_how_to_get_it(mnist_folder):
    (mnist_folder / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(FileNotFoundError) as raised:
        data.load("mnist", data_dir=mnist_folder.parent)
    message = str(raised.value)
    assert message.startswith("no t10k-images-idx3-ubyte (or .gz) for 'mnist'")
    assert str(mnist_folder) in message
    assert "yann.lecun.com" in message
    assert "\n" not in message


def test_data_are_held_where_asked_for(mnist_folder):
    found = data.load("mnist", data_dir=mnist_folder, device="meta", validation=5)
    devices = {part.device.type for part in (found.train, found.test, found.validation)}
    assert devices == {"meta"}
    assert found.train.inputs.dtype == torch.uint8


def test_devices_that_are_not_there(mnist_folder):
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"got 'cuda:{count}': torch finds {count or 'no'} CUDA"):
        data.load("mnist", data_dir=mnist_folder, device=f"cuda:{count}")
    with pytest.raises(ValueError, match="device must be cpu, cuda or cuda:<number>, got 'gpu'"):
        data.load("mnist", data_dir=mnist_folder, device="gpu")


def test_importing_needs_no_extra():
    code = "import sys, ritz.data; print([n for n in ('sklearn', 'PIL') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
