from dataclasses import replace
from functools import partial

import pytest
import torch

import ritz
from ritz._core.journal import Journal
from ritz.curvature import hessian
from ritz.studies import batch_spectra, write
from ritz.studies.batch_spectra import PREDICTIONS, SIZES, Config, run

SMALL = Config(
    networks=("logistic",),
    dataset="digits",
    num_samples=150,
    epochs=(1, 3),
    batch_sizes=(8, 50),
    num_batches=(6,),
    matrices=("hessian",),
    train_size=25,
    num_seeds=1,
    shown=50,
    num_steps=15,
)


@pytest.fixture(scope="module")
def result():
    return run(SMALL)


def test_every_cell_has_measured_and_predicted_curves(result):
    shape = (3, 1, 2, 1, 1, 2)
    assert result.measured.shape == result.errors.shape == shape
    assert result.predicted.shape == (len(PREDICTIONS), *shape)
    assert bool(torch.isfinite(result.measured).all())
    assert result.lambda_max.shape == result.along.shape == (1, 2, 1, 1)
    assert bool((result.losses[0, 1] < result.losses[0, 0]).all())  # it was trained


def test_the_subspace_predicts_what_is_measured_and_homogeneous_noise_does_not(result):
    measured = result.measured[0].mean((1, 2, 3))[0]
    subspace, additive = (
        result.predicted[PREDICTIONS.index(name), 0].mean((1, 2, 3))[0]
        for name in ("subspace", "additive")
    )
    slack = 3 * result.errors[0].mean((1, 2, 3))[0]
    assert bool(((subspace - measured).abs() < 0.1 * measured + slack).all())
    assert additive[0] < 0.8 * measured[0]


def test_an_interrupted_run_resumes_to_the_same_result(result, tmp_path):
    state = tmp_path / "state"
    run(SMALL, state=state)
    assert state.is_file()
    again = run(SMALL, state=state)
    assert again.spectra["logistic, hessian"].keys() == {"all data", "a batch"}
    assert torch.equal(again.measured, result.measured)
    assert torch.equal(again.predicted.nan_to_num(), result.predicted.nan_to_num())


def test_a_run_that_is_killed_resumes_with_the_weights_and_the_momentum(tmp_path, monkeypatch):
    config = replace(SMALL, momentum=0.9, num_training=200)
    expected = run(config)
    # Everything is saved as soon as it is there.
    monkeypatch.setattr(batch_spectra, "Journal", partial(Journal, interval=0.0))
    whole = batch_spectra.train_epochs

    def train(*args, label, **options):
        if label == "epoch 3":
            raise KeyboardInterrupt
        whole(*args, label=label, **options)

    monkeypatch.setattr(batch_spectra, "train_epochs", train)
    with pytest.raises(KeyboardInterrupt):
        run(config, state=tmp_path / "state")
    trained = []
    monkeypatch.setattr(
        batch_spectra, "train_epochs",
        lambda *args, label, **options: (trained.append(label), whole(*args, **options)),
    )  # fmt: skip

    resumed = run(config, state=tmp_path / "state")

    assert trained == ["epoch 3"]
    assert torch.equal(resumed.measured, expected.measured)
    assert torch.equal(resumed.predicted.nan_to_num(), expected.predicted.nan_to_num())


def test_the_curvature_is_of_a_part_of_the_training_samples():
    config = replace(SMALL, num_training=300)
    training = batch_spectra.Training(config, "logistic", 0, None, False)
    assert training.risk(1).num_samples == 150
    assert len(training._train[0]) == 300


def test_the_table_says_what_to_trust(result):
    text = str(result)
    for word in (
        "logistic",
        "best, mean within",
        "trust, as all networks",
        "variance over training",
    ):
        assert word in text
    rows = batch_spectra.evidence(result)
    assert [row.verdict for row in rows[:3]] == ["extends"] * 3
    additive = rows[PREDICTIONS.index("additive")]
    assert "additive prediction" in additive.what
    assert additive.measured.startswith("-")  # too low for batches of 8
    for row in rows:
        assert max(map(len, (row.where, row.what, row.published, row.measured))) <= 110, row


def test_a_claim_names_the_largest_deviation_of_all_networks(result):
    def twice(table, dim):
        return torch.cat([table, table], dim)

    # The second network is measured at twice, and predicted at once the value.
    measured, predicted = twice(result.measured, 1), twice(result.predicted, 2)
    measured[0] = 1.0
    predicted[0, 0], predicted[0, 0, 1] = 1.0, 0.5
    both = replace(
        result, config=replace(SMALL, networks=("logistic", "mlp")), measured=measured,
        errors=twice(result.errors, 1), predicted=predicted,
        lambda_max=torch.ones_like(twice(result.lambda_max, 0)),
    )  # fmt: skip
    assert batch_spectra._claim(both, 0).measured == "-50%, -50%"


def test_the_spectra_are_those_of_all_data_and_of_the_batch(result):
    risk = batch_spectra.Training(SMALL, "logistic", 0, None, False).risk(3)
    rows = torch.randperm(150, generator=torch.Generator().manual_seed(0))[:50]
    pair = result.spectra["logistic, hessian"]
    for spectrum, one in ((pair["all data"], risk), (pair["a batch"], risk.samples(rows))):
        exact = torch.linalg.eigvalsh(hessian(one) @ torch.eye(one.space.size))
        # 15 steps find the largest of 650 eigenvalues, and no Ritz value exceeds it.
        assert float(spectrum.values[-1]) == pytest.approx(float(exact[-1]), rel=1e-3)
    assert "bulk from" in str(result)


@pytest.mark.parametrize(("exponent", "verdict"), [(-0.25, "agrees"), (-0.5, "differs")])
def test_the_exponent_of_the_spread_is_found(result, exponent, verdict):
    # Batches without replacement have the variance of 1/b = 1/B - 1/N.
    sizes = torch.tensor([size / (1 - size / 150) for size in SMALL.batch_sizes])
    measured = result.measured.clone()
    measured[1] = measured[0] * sizes**exponent
    (row,) = batch_spectra._correction(replace(result, measured=measured))
    assert row.verdict == verdict
    assert row.measured.startswith(str(exponent))


def test_a_wider_spectrum_of_a_batch_is_evidence(result):
    full = result.spectra["logistic, hessian"]["all data"]
    pair = {"all data": full, "a batch": replace(full, values=1.5 * full.values)}
    (row,) = batch_spectra._broadening(replace(result, spectra={"logistic, hessian": pair}))
    assert row.measured == "1.50, 1.50, 1.50"
    assert row.verdict == "agrees"
    pair = {"all data": pair["a batch"], "a batch": full}
    (row,) = batch_spectra._broadening(replace(result, spectra={"logistic, hessian": pair}))
    assert row.verdict == "differs"


def test_a_model_that_does_not_apply_to_a_network_is_named(result):
    predicted = result.predicted.clone()
    predicted[PREDICTIONS.index("multiplicative"), 0] = float("nan")
    rows = batch_spectra.evidence(replace(result, predicted=predicted))
    row = rows[PREDICTIONS.index("multiplicative")]
    assert "it does not apply to logistic" in row.why
    assert row.verdict == "undecided"  # nothing was tested


def test_the_panels_of_one_network_are_in_two_columns_and_name_the_matrix(result):
    both = replace(
        result, config=replace(result.config, matrices=("hessian", "ggn")),
        spectra={f"logistic, {name}": result.spectra["logistic, hessian"]
                 for name in ("hessian", "ggn")},
    )  # fmt: skip
    axes = batch_spectra.figure(both).axes
    assert axes[0].get_gridspec().get_geometry() == (2, 2)
    assert [axis.get_title(loc="left") for axis in axes[2:]] == ["Hessian", "Gauss-Newton"]


def test_the_result_and_its_figure_are_written_and_read(result, tmp_path):
    files = write(batch_spectra, result, tmp_path)
    assert [file.suffix for file in files] == [".safetensors", ".png"]
    assert str(ritz.load(files[0])) == str(result)


def test_sizes_are_valid_configurations():
    assert set(SIZES) == {"smoke", "paper"}
    assert SIZES["paper"].networks == ("vgg16",)


@pytest.mark.parametrize(
    "bad",
    [
        {"networks": ("transformer",)},
        {"networks": ()},
        {"matrices": ("fisher",)},
        {"batch_sizes": (8, 5000)},
        {"batch_sizes": ()},
        {"epochs": (0,)},
        {"num_batches": (1,)},
        {"shown": 5000},
        {"num_steps": 2},
        {"num_seeds": 0},
        {"rate": 0.0},
        {"momentum": 1.0},
        {"num_training": 4000},
        {"num_vectors": 0},
        {"train_size": 5000},
    ],
)
def test_a_wrong_configuration_names_the_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Config(**bad)
