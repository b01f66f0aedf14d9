import dataclasses

import pytest
import torch

import ritz
from ritz import studies
from ritz.studies import flatness

CONFIG = flatness.SIZES["smoke"]


def test_the_toy_agrees_with_differences_of_its_loss():
    def loss(weights):
        return torch.exp(-weights.prod())

    for w in flatness.TOY:
        point = torch.full((3,), w, dtype=torch.float64)
        exact = torch.autograd.functional.hessian(loss, point)
        values = torch.linalg.eigvalsh(exact)

        toy = flatness._toy(w)

        torch.testing.assert_close(toy[2:], torch.stack([values[-1], values.sum(), values[0]]))


def test_evidence_says_agrees_only_if_the_growth_is_above_its_error():
    decays, seeds = len(CONFIG.decays), 4
    table = torch.zeros(len(flatness.MEASURES), decays, seeds, dtype=torch.float64)
    noise = torch.tensor([0.1, -0.1, 0.05, -0.05], dtype=torch.float64)
    table[flatness.MEASURES.index("lambda_max"), 1] = 5 + noise  # grows
    table[flatness.MEASURES.index("accuracy"), 1] = noise  # does not
    result = flatness.Result(
        config=flatness.Config(
            networks=("logistic",), decays=CONFIG.decays, num_epochs=(1,), num_seeds=seeds
        ),
        tables={"logistic": table},
        sizes={"logistic": 7850},
        toy=torch.stack([flatness._toy(w) for w in flatness.TOY], 1),
    )

    verdicts = {row.what.split(":")[1].split(" by ")[0].strip(): row.verdict
                for row in flatness.evidence(result)}  # fmt: skip

    assert verdicts["lambda_max"] == "agrees"
    assert verdicts["accuracy"] == "undecided"
    # Section 4 has no Frobenius norm of logistic regression.
    assert verdicts["Frobenius norm"] == "extends"


@pytest.mark.parametrize(
    "bad", [{"num_epochs": (1,)}, {"num_train": 3}, {"decays": (-1.0,)}, {"measured": 50_000}]
)
def test_options_out_of_range_name_the_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        flatness.Config(**bad)


def test_an_interrupted_run_resumes_to_the_same_result(monkeypatch, tmp_path):
    config = dataclasses.replace(CONFIG, networks=("logistic",), num_epochs=(1,))
    whole = flatness.run(config)
    train, calls = flatness._train, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train(*arguments)

    monkeypatch.setattr(flatness, "_train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flatness.run(config, state=tmp_path / "state")
    resumed = flatness.run(config, state=tmp_path / "state")

    assert len(calls) == 5  # four cells, one of them twice
    assert torch.equal(resumed.tables["logistic"], whole.tables["logistic"])
    assert str(resumed) == str(whole)


def test_the_result_is_written_and_drawn(tmp_path):
    result = flatness.run(CONFIG)
    files = studies.write(flatness, result, tmp_path)
    assert [file.suffix for file in files] == [".safetensors", ".png"]
    assert str(ritz.load(files[0])) == str(result)
