import dataclasses

import pytest
import torch

import ritz
from ritz import studies
from ritz.data import TextData, TextSplit
from ritz.studies import language as study


@pytest.fixture(scope="module")
def result():
    config = study.SIZES["smoke"]
    return study.run(dataclasses.replace(config, num_words=600))


def test_every_method_has_perplexities_of_every_epoch(result):
    assert result.test.shape == (7, 2)
    assert result.curves.shape == (7, 2, 4)
    assert bool(result.test.isfinite().all())
    assert bool((result.test > 1).all())
    begun = dict(zip(result.names, result.starts[:, 0].tolist(), strict=True))
    # Averages from epoch 2 of 4: there is one at its end.
    assert {name for name, start in begun.items() if start == 2} >= {"ASGD", "Gadam", "GadamX"}
    for name in ("Adam", "Adam, steps", "Padam, steps"):
        assert begun[name] != begun[name]  # no average


def test_adam_is_the_last_iterate_of_gadam(result):
    config = result.config
    text = study._text(config)
    scores = study._train(config, text, "Gadam", config.seed)
    rows = [result.names.index(name) for name in ("Adam", "Gadam")]
    assert result.test[rows, 0].tolist() == scores[:, 0].tolist()


def test_a_part_of_the_methods_has_the_comparisons_between_them(result):
    config = dataclasses.replace(result.config, methods=("Gadam",), num_seeds=1)

    part = study.run(config)

    assert part.names == ("Adam", "Gadam")
    row = [result.names.index(name) for name in part.names]
    assert torch.equal(part.test, result.test[row, :1])
    (claim,) = study.evidence(part)
    assert claim.what.endswith("Gadam against Adam")
    assert "one seed" in claim.why


def test_rare_words_become_unknown_and_frequent_ones_stay():
    words = ("a", "<unk>", "b", "c")
    tokens = torch.tensor([0, 2, 2, 2, 0, 3, 1])
    split = TextSplit(tokens=tokens)
    text = TextData(name="x", train=split, validation=split, test=split, vocabulary=words)

    small = study._with_frequent_words(text, 3)

    assert small.vocabulary == ("<unk>", "b", "a")
    assert [small.vocabulary[i] for i in small.train.tokens] == [
        "a", "b", "b", "b", "a", "<unk>", "<unk>",
    ]  # fmt: skip
    assert study._with_frequent_words(text, 4) is text


def test_the_result_is_written_and_its_evidence_has_every_comparison(result, tmp_path):
    files = studies.write(study, result, tmp_path)
    assert [file.suffix for file in files] == [".safetensors", ".png"]
    assert str(ritz.load(files[0])) == str(result)
    rows = list(study.evidence(result))
    assert len(rows) == len(study.CLAIMS)
    assert rows[0].published == "-7.0"  # 58.77 against 63.16


def test_the_paper_has_the_published_sizes():
    paper = studies.sized(study, "paper")
    assert (paper.width, paper.hidden, paper.depth, paper.num_epochs) == (400, 1150, 3, 200)
    assert study._changes(paper, "Gadam")["average_from"] == 100
    assert study._changes(paper, "Padam, steps")["milestones"] == (100, 150)


@pytest.mark.parametrize("bad", [{"num_epochs": 3}, {"regularization": 1.5}, {"vocabulary": 3},
                                 {"methods": ("Adam",)}])  # fmt: skip
def test_options_out_of_range_name_the_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        dataclasses.replace(study.Config(), **bad)
