import gzip

import pytest
import torch

from ritz import data
from ritz._core.random import epoch_generator
from ritz.data import TextSplit

TRAIN = " the cat <unk> \n the dog sat\n\n"
VALID = "the bird sat"
TEST = "a dog\n"


@pytest.fixture
def ptb_folder(tmp_path):
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "ptb.train.txt").write_text(TRAIN)
    (tmp_path / "ptb" / "ptb.valid.txt.gz").write_bytes(gzip.compress(VALID.encode(), mtime=0))
    (tmp_path / "ptb" / "ptb.test.txt").write_text(TEST)
    return tmp_path


def words(found, split):
    return " ".join(found.vocabulary[token] for token in split.tokens)


def test_words_are_numbered_by_first_use(ptb_folder):
    found = data.load("ptb", data_dir=ptb_folder)
    assert found.vocabulary == ("the", "cat", "<unk>", "<eos>", "dog", "sat")
    assert words(found, found.train) == "the cat <unk> <eos> the dog sat <eos> <eos>"
    assert words(found, found.validation) == "the <unk> sat <eos>"
    assert words(found, found.test) == "<unk> dog <eos>"
    assert found.train.tokens.dtype == torch.int64
    assert found.num_classes == 6


def test_wikitext_2_is_read_from_its_own_file_names(ptb_folder):
    folder = ptb_folder / "wikitext-2"
    folder.mkdir()
    for part in ("train", "valid", "test"):
        (folder / f"wiki.{part}.tokens").write_text(" = Title = \n")
    found = data.load("wikitext-2", data_dir=ptb_folder, length=2)
    assert words(found, found.test) == "= Title = <eos>"
    assert found.test.length == 2


def test_a_word_that_is_not_in_the_training_text_becomes_unknown(ptb_folder):
    (ptb_folder / "ptb" / "ptb.train.txt").write_text("the dog sat")
    with pytest.raises(data.DataError, match=r"ptb.valid.txt.gz has the word 'bird'"):
        data.load("ptb", data_dir=ptb_folder)


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "is empty"), (b"caf\xe9\n", "is not a text in UTF-8")]
)
def test_a_file_that_is_not_text_is_refused(ptb_folder, content, message):
    (ptb_folder / "ptb" / "ptb.test.txt").write_bytes(content)
    with pytest.raises(data.DataError, match=rf"ptb.test.txt {message}"):
        data.load("ptb", data_dir=ptb_folder)


@pytest.mark.parametrize("packed", [False, True])
def test_any_text_file_is_read_as_characters(tmp_path, packed):
    text = "żółw, " * 20
    content = text.encode()
    path = tmp_path / f"story.txt{'.gz' * packed}"
    path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    found = data.load("text", data_dir=tmp_path, file="story.txt")
    assert found.vocabulary == tuple(sorted(set(text)))
    joined = torch.cat([found.train.tokens, found.validation.tokens, found.test.tokens])
    assert "".join(found.vocabulary[token] for token in joined) == text
    sizes = [len(part.tokens) for part in (found.train, found.validation, found.test)]
    assert sizes == [108, 6, 6]
    assert data.load("text", file=str(path)).vocabulary == found.vocabulary


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A data folder and the current folder, with a text of the same name that tells which."""
    for name, letters in (("data", "de"), ("here", "hi")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "story.txt").write_text(letters * 30)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("RITZ_DATA", raising=False)
    return tmp_path


@pytest.mark.parametrize("file", ["story.txt", "./story.txt", "../here/story.txt", "~/story.txt"])
def test_a_text_in_the_current_folder_needs_no_data_folder(places, monkeypatch, file):
    monkeypatch.setenv("HOME", str(places / "here"))
    assert data.load("text", file=file).vocabulary == ("h", "i")


@pytest.mark.parametrize(
    ("file", "letters"),
    [("story.txt", "de"), ("./story.txt", "hi"), ("mine.txt", "mn"), ("deep/mine.txt", "op")],
)
def test_a_plain_name_is_searched_in_the_data_folder_first(places, file, letters):
    (places / "here" / "mine.txt").write_text("mn" * 30)
    (places / "here" / "deep").mkdir()
    (places / "here" / "deep" / "mine.txt").write_text("op" * 30)
    assert data.load("text", data_dir=places / "data", file=file).vocabulary == tuple(letters)


def test_an_absolute_path_is_not_searched_in_the_data_folder(places):
    (places / "here" / "text").mkdir()
    (places / "here" / "text" / "story.txt").write_text("xy" * 30)
    assert data.load("text", file=str(places / "here" / "story.txt")).vocabulary == ("h", "i")


@pytest.mark.parametrize(
    ("file", "looked"),
    [("no.txt", r"no\.txt .* not found in .*data/text, .*data, .*here;"),
     ("./no.txt", r"no\.txt .* not found in [^,]*here; file= \(--set-data file=PATH\)")],
)  # fmt: skip
def test_a_missing_text_names_the_folders_searched(places, file, looked):
    with pytest.raises(FileNotFoundError, match=looked):
        data.load("text", data_dir=places / "data", file=file)


def test_a_text_too_short_for_three_parts_is_refused(tmp_path):
    (tmp_path / "short").write_text("abc")
    with pytest.raises(
        data.DataError, match="too short for training, validation and test: 3 characters"
    ):
        data.load("text", data_dir=tmp_path, file="short")


def test_each_segment_continues_the_one_before():
    split = TextSplit(tokens=torch.arange(26))
    batches = split.batches(2, length=5)
    assert [inputs.tolist() for inputs, _ in batches] == [
        [[0, 1, 2, 3, 4], [13, 14, 15, 16, 17]],
        [[5, 6, 7, 8, 9], [18, 19, 20, 21, 22]],
        [[10, 11], [23, 24]],
    ]
    for inputs, targets in batches:
        assert torch.equal(targets, inputs + 1)
    assert len(batches[1:]) == 2
    assert torch.equal(batches[1:][0][0], batches[1][0])


@pytest.mark.parametrize("consecutive", [True, False])
def test_segments_say_whether_the_recurrent_state_is_passed_on(consecutive):
    split = TextSplit(tokens=torch.arange(26), consecutive=consecutive).to("cpu")
    assert split.batches(2, length=5)[1:].consecutive is consecutive
    assert TextSplit(tokens=torch.arange(26)).batches(2).consecutive


def test_one_stream_has_every_token_but_the_first_as_a_target():
    targets = [y for _, y in TextSplit(tokens=torch.arange(100), length=7).batches(1)]
    assert torch.cat(targets, 1).tolist() == [list(range(1, 100))]


def test_random_lengths_cover_the_text_and_are_reproducible():
    split = TextSplit(tokens=torch.arange(40_000))
    settings = {"length": 30, "variable": True}
    epoch = split.batches(4, generator=epoch_generator(0, 0), **settings)
    again = split.batches(4, generator=epoch_generator(0, 0), **settings)
    other = split.batches(4, generator=epoch_generator(0, 1), **settings)
    assert epoch.bounds == again.bounds != other.bounds
    assert torch.cat([x for x, _ in epoch], 1).tolist() == split.tokens.view(4, -1)[:, :-1].tolist()
    lengths = torch.tensor([x.shape[1] for x, _ in epoch][:-1]).double()
    assert lengths.min() >= 5
    # About half of the length once in twenty times; what is cut off after the point costs 0.5.
    mean = 0.95 * 30 + 0.05 * 15 - 0.5
    assert abs(lengths.mean() - mean) < 4 * lengths.std() / len(lengths) ** 0.5


def test_a_generator_without_variable_lengths_changes_nothing():
    split = TextSplit(tokens=torch.arange(100))
    assert split.batches(2, generator=epoch_generator(0, 0)).bounds == split.batches(2).bounds


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        (
            {"batch_size": 51},
            "batch_size must be at most half of the 100 tokens of the text, got 51",
        ),
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"variable": True}, "variable needs a generator"),
    ],
)
def test_wrong_settings_name_the_argument(settings, message):
    with pytest.raises(ValueError, match=message):
        TextSplit(tokens=torch.arange(100)).batches(**{"batch_size": 2} | settings)


def test_data_move_to_another_device(ptb_folder):
    found = data.load("ptb", data_dir=ptb_folder, device="meta", length=2)
    assert found.train.device == found.test.device == torch.device("meta")
    assert found.train.batches(2)[0][0].device.type == "meta"
    assert found.train.length == 2


def test_a_length_below_one_is_refused(ptb_folder):
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        data.load("ptb", data_dir=ptb_folder, length=0)
