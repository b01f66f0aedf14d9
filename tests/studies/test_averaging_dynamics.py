import dataclasses

import pytest
import torch

import ritz
from ritz import optim, studies, training
from ritz.studies import averaging_dynamics as study


@pytest.fixture(scope="module")
def result():
    return study.run(study.SIZES["smoke"])


def test_averaged_runs_have_an_average_from_the_half(result):
    rows = study.choices(result.config)
    assert result.names == tuple(rows)
    for name in rows:
        assert bool(result.of("error", name).isfinite().all()), name
        begun = result.of("average norm", name).isfinite()
        expected = torch.tensor([False, False, True, True]) & ("average_from" in rows[name])
        assert bool((begun == expected).all()), name
        errors = result.of("average error", name).isfinite()
        assert torch.equal(errors, begun), name


def test_runs_without_an_average_yet_have_the_same_iterates(result):
    # The schedules are those of the paper: with an average the learning rate begins to fall sooner.
    for name in ("error", "norm"):
        both = [result.of(name, f"{kind}, decay 0.0005")[:, 0] for kind in ("SGD", "SWA")]
        assert torch.equal(*both)


def test_recorded_norms_are_those_of_weights_and_average():
    found, norms = [], study.Norms()

    def watch(epoch, model, optimizer):
        norms(epoch, model, optimizer)
        found.append((optim.weight_norms(model), [p.detach().clone() for p in model.parameters()]))

    watch.unit = "epoch"
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
    training.fit(model, (inputs, inputs[:, :2].argmax(1)), num_epochs=4, batch_size=10,
                 average_from=3, monitors=[watch])  # fmt: skip

    rows = torch.tensor(norms.rows)
    assert rows[:, 0].tolist() == pytest.approx([weights.l2 for weights, _ in found])
    assert rows[:, 2].tolist() == pytest.approx([weights.linf for weights, _ in found])
    assert bool(rows[:2, 1].isnan().all())
    # The weights after epochs 2, 3 and 4.
    mean = [torch.stack(each).mean(0) for each in zip(*(w for _, w in found[1:]), strict=True)]
    flat = torch.cat([each.flatten() for each in mean]).double()
    assert rows[3, [1, 3]].tolist() == pytest.approx(
        [flat.norm().item(), flat.abs().max().item()], rel=1e-6
    )


def test_ensembles_are_compared_with_their_members(result):
    gains = result.gains("ensemble")
    name = "SGD, decay 0.002"
    place = result.names.index(name)
    expected = 100 * result.ensembles[place] - 100 * result.of("error", name)[:, -1]
    torch.testing.assert_close(gains[-1], expected)


def test_the_result_is_written_and_its_evidence_has_every_figure(result, tmp_path):
    files = studies.write(study, result, tmp_path)
    assert [file.suffix for file in files] == [".safetensors", ".png"]
    assert str(ritz.load(files[0])) == str(result)
    rows = study.evidence(result)
    shown = {row.where.split(",")[0].removeprefix("Figure ") for row in rows}
    assert shown == {"7.1a", "7.1b", "7.2a", "7.2b", "7.3a", "7.3b", "7.4", "7.5", "7.6"}
    assert len(rows) == 15


@pytest.mark.parametrize("bad", [{"num_epochs": 3}, {"num_train": 5}, {"num_seeds": 1}])
def test_options_out_of_range_name_the_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        dataclasses.replace(study.Config(), **bad)
