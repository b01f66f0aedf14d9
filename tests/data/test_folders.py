import sys

import numpy as np
import pytest

from ritz import data

Image = pytest.importorskip("PIL.Image")


def write(path, size=(6, 5), value=0, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    width, height = size
    pixels = np.full((height, width, 3), value, np.uint8)
    pixels[0, 1] = (1, 2, 3)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def root(tmp_path):
    for n in range(6):
        write(tmp_path / "cats" / f"{n}.png", value=10 * n)
        write(tmp_path / "dogs" / f"{n}.png", value=100 + 10 * n)
    return tmp_path


def test_a_folder_per_class_is_read_with_a_fixed_test_part(root):
    found = data.load("folder", data_dir=root, test_fraction=0.25)
    assert found.classes == ("cats", "dogs")
    assert (len(found.train), len(found.test), found.split_seed) == (9, 3, 0)
    assert found.shape == (3, 5, 6)
    inputs, targets = found.train.inputs, found.train.targets
    assert inputs[:, :, 0, 1].tolist() == [[1, 2, 3]] * 9
    assert ((inputs[:, 0, 2, 2] >= 100) == (targets == 1)).all()
    again = data.load("folder", data_dir=root, test_fraction=0.25)
    assert again.test.inputs.tolist() == found.test.inputs.tolist()


def test_train_val_and_test_folders_become_the_parts(tmp_path):
    for part, value in (("train", 50), ("val", 60), ("test", 70)):
        for name in ("a", "b"):
            write(tmp_path / part / name / "0.png", value=value)
    found = data.load("folder", data_dir=tmp_path)
    splits = (found.train, found.validation, found.test)
    assert [int(split.inputs[0, 0, 2, 2]) for split in splits] == [50, 60, 70]
    assert found.split_seed is None
    with pytest.raises(ValueError, match=r"validation must be 0 for 'folder'.*got 1"):
        data.load("folder", data_dir=tmp_path, validation=1)


def test_a_validation_folder_without_a_test_folder_is_the_test_part(tmp_path):
    write(tmp_path / "train" / "a" / "0.png")
    write(tmp_path / "val" / "a" / "0.png", value=9)
    found = data.load("folder", data_dir=tmp_path)
    assert found.validation is None
    assert int(found.test.inputs[0, 0, 2, 2]) == 9


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (1, "RGB"), (3, "P")])
def test_images_are_converted_to_one_or_three_channels(tmp_path, channels, mode):
    for name in ("a", "b"):
        write(tmp_path / name / "0.png", value=51, mode=mode)
    found = data.load("folder", data_dir=tmp_path, channels=channels)
    assert found.shape == (channels, 5, 6)
    assert set(found.train.inputs[:, :, 2, 2].flatten().tolist()) == {
        51
    }  # a colour that palettes have


def test_size_crops_the_centre_and_resamples(root):
    write(root / "cats" / "wide.png", size=(40, 10), value=200)
    with pytest.raises(data.DataError, match=r"images must be of one size, got 6 x 5 .*40 x 10"):
        data.load("folder", data_dir=root)
    assert data.load("folder", data_dir=root, size=4).shape == (3, 4, 4)


def test_files_that_are_not_images_are_skipped(root):
    (root / "cats" / "notes.txt").write_text("not an image")
    (root / "cats" / ".DS_Store").write_bytes(b"x")
    (root / ".hidden").mkdir()
    (root / "README.md").write_text("about")
    found = data.load("folder", data_dir=root)
    assert len(found.train) + len(found.test) == 12
    assert found.classes == ("cats", "dogs")


@pytest.mark.parametrize(
    "content", [b"", b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 5\n"]
)
def test_a_file_with_the_ending_of_an_image_but_other_content_is_refused(root, content):
    (root / "cats" / "0.png").write_bytes(content)
    with pytest.raises(data.DataError, match=r"0.png is not an image that can be read"):
        data.load("folder", data_dir=root)


def test_a_truncated_image_is_refused(root):
    path = root / "cats" / "0.png"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(data.DataError, match=r"0.png is not an image that can be read"):
        data.load("folder", data_dir=root)


@pytest.mark.parametrize("limit", [8, 20])
def test_an_image_of_too_many_pixels_is_refused(root, monkeypatch, limit):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)  # 30 pixels: an error, or a warning
    with pytest.raises(data.DataError, match=r"cats.0.png .*decompression bomb"):
        data.load("folder", data_dir=root)


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ([], data.DataError, "must contain a folder for each class, got none"),
        (["train/a/0.png"], FileNotFoundError, "has a folder train, but no test or val beside it"),
        (["train/a/0.png", "test/b/0.png"], data.DataError, "has a class 'b' that the training"),
        (["train/a/0.png", "train/b/0.png", "test/a/0.png"], data.DataError, "b has no images"),
    ],
)
def test_folders_without_classes_or_images_are_refused(tmp_path, files, error, message):
    for file in files:
        write(tmp_path / file)
    with pytest.raises(error, match=message):
        data.load("folder", data_dir=tmp_path)


def test_training_and_test_images_of_different_sizes_are_refused(tmp_path):
    write(tmp_path / "train" / "a" / "0.png")
    write(tmp_path / "test" / "a" / "0.png", size=(7, 7))
    with pytest.raises(
        data.DataError, match=r"one size, got 6 x 5 in .*train.* and 7 x 7 in .*test"
    ):
        data.load("folder", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 2}, "channels must be one of 1, 3; got '2'"),
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"test_fraction": 1.0}, "test_fraction must be between 0 and 0.9, got 1.0"),
    ],
)
def test_wrong_options_name_the_option(root, options, message):
    with pytest.raises(ValueError, match=message):
        data.load("folder", data_dir=root, **options)


def test_a_missing_folder_of_images_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"data_dir must be a folder of images.*nowhere.*for each class"
    ):
        data.load("folder", data_dir=tmp_path / "nowhere")


def test_a_missing_pillow_says_what_to_install(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="pip install Pillow"):
        data.load("folder", data_dir=root)
