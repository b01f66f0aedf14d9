import dataclasses

import pytest
import torch

import ritz
from ritz import studies
from ritz.studies import averaging_options as study
from ritz.studies._evidence import spread


@pytest.fixture(scope="module")
def result():
    return study.run(study.SIZES["smoke"])


def test_every_choice_has_a_last_iterate_and_averaged_choices_have_an_average(result):
    rows = study.choices(result.config.num_epochs)
    assert result.names == tuple(rows)
    assert bool(result.measure("last").isfinite().all())
    for name, average in zip(result.names, result.measure("average"), strict=True):
        if "average_from" in rows[name]:
            assert bool(average.isfinite().all()), name
        elif "patience" not in rows[name]:
            assert bool(average.isnan().all()), name


def test_choices_with_the_same_schedule_have_the_same_iterates(result):
    places = [result.names.index(f"Gadam {part}") for part in ("every step", "every 10 steps")]
    last = result.measure("last")[places]
    assert torch.equal(last[0], last[1])  # averaging does not change the iterates


def test_the_result_is_written_and_its_evidence_has_every_claim(result, tmp_path):
    files = studies.write(study, result, tmp_path)
    assert [file.suffix for file in files] == [".safetensors", ".png"]
    assert str(ritz.load(files[0])) == str(result)
    assert len(list(study.evidence(result))) == 15


def test_ensembles_agree_only_if_their_gain_hardly_depends_on_the_decay(result):
    for gains, verdict in ((0.05, "differs"), (0.001, "agrees")):
        ensembles = result.ensembles.clone()
        ensembles[result.names.index("SWA, decay 0.002")] -= gains
        changed = dataclasses.replace(result, ensembles=ensembles, singles=result.ensembles)
        rows = [row for row in study.evidence(changed) if "by the ensemble" in row.what]
        assert [row.verdict for row in rows] == [verdict]


def test_starts_of_the_average_are_compared_with_the_base_optimiser(result):
    row = next(row for row in study.evidence(result) if "25, 50, 75" in row.what)
    gap = result.difference("Gadam from 25%", "AdamW, linear")
    assert row.measured.split(", ")[0] == spread(gap)


@pytest.mark.parametrize("bad", [{"num_epochs": 3}, {"label_noise": 1.5}, {"num_seeds": 1}])
def test_options_out_of_range_name_the_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        dataclasses.replace(study.Config(), **bad)
