"""The study of covariance noise: exact examples in two dimensions, and a small run."""

import dataclasses

import pytest
import torch

import ritz
from ritz import studies
from ritz._core.journal import Journal, Parts
from ritz.studies import _covariance_noise_runs
from ritz.studies import covariance_noise as study


@pytest.fixture(scope="module")
def result():
    config = study.Config(tasks=("digits/mlp",), methods=("large", "diagonal", "full"),
                          num_epochs=2, num_seeds=2, large=512, small=64, rates=(0.1,))  # fmt: skip
    return study.run(config)


def test_every_method_is_trained_for_every_seed(result):
    assert result.accuracies.shape == (1, 3, 2)
    assert (result.accuracies > 0.3).all()
    assert result.losses.shape == result.steps.shape == (1, 3, 2)
    assert result.steps[0, 0].tolist() == [3, 6]


def test_the_result_can_be_saved_printed_and_drawn(result, tmp_path):
    ritz.save(result, tmp_path / "result.safetensors")
    again = ritz.load(tmp_path / "result.safetensors")
    assert str(again) == str(result)
    pytest.importorskip("matplotlib.pyplot").close(study.figure(result))
    assert {row.where for row in study.evidence(result)} >= {"Table 1", "Figure 1", "Figure 4"}


def test_an_interrupted_study_repeats_no_finished_run(result, tmp_path, monkeypatch):
    original, calls = _covariance_noise_runs.fit_whole, []

    def fit(*args, **options):
        calls.append(options["seed"])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(_covariance_noise_runs, "fit_whole", fit)
    with pytest.raises(KeyboardInterrupt):
        study.run(result.config, state=tmp_path / "state")
    again = study.run(result.config, state=tmp_path / "state")

    # Six runs of three methods and two seeds, the one that was interrupted, and one of Figure 2.
    assert len(calls) == 6 + 1 + 1
    assert torch.equal(again.accuracies, result.accuracies)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_rate_at_which_one_seed_diverges_is_not_chosen(monkeypatch):
    # Validation accuracies by rate and seed; the large rate is the best for most seeds.
    scores = {0.1: (0.90, 0.91, 0.90), 0.2: (0.93, 0.92, 0.94), 0.4: (0.97, 0.0, 0.98)}
    seen = []

    def score(self, method, rate, seed, state):
        seen.append((rate, seed))
        return scores[rate][seed - 1003]

    monkeypatch.setattr(_covariance_noise_runs.Runner, "_score", score)
    config = study.Config(tasks=("digits/mlp",), rates=tuple(scores), seed=3)
    runner = _covariance_noise_runs.Runner(config, "digits", "mlp")
    assert runner.choose("large", Parts(Journal(None, {}))) == 0.2
    # The last seed of the rate that diverged is not run: it cannot help.
    assert seen == [(rate, seed) for rate in scores for seed in (1003, 1004, 1005)][:-1]

    scores |= dict.fromkeys(scores, (0.0, 0.0, 0.0))
    assert runner.choose("large", Parts(Journal(None, {}))) == 0.1


def test_one_step_clouds_have_their_exact_covariance():
    planar = study.planar(0)
    for steps, exact in zip(planar.steps, planar.covariances, strict=True):
        outer = (steps - steps.mean(0))[:, :, None] * (steps - steps.mean(0))[:, None]
        error = outer.std(0) / len(steps) ** 0.5
        assert (((outer.mean(0) - exact) / error).abs() < 4.5).all()


def test_the_expected_loss_is_that_of_simulated_paths():
    planar = study.planar(0)
    A = planar.quadratic
    values, vectors = torch.linalg.eigh(A)
    root = vectors * values.sqrt() @ vectors.T
    generator = torch.Generator().manual_seed(1)
    w = torch.tensor([2.0, 1.0], dtype=A.dtype).expand(20_000, 2)
    for _ in range(60):
        xi = torch.randn(w.shape, generator=generator, dtype=A.dtype)
        w = w - study.RATE * w @ A + study.RATE * xi @ root
    losses = (w @ A * w).sum(1) / 2
    gap = losses.mean() - planar.losses[0, 59]

    assert abs(gap) < 4 * losses.std() / len(losses) ** 0.5
    # ||A||_F^2 and ||diag A||_F^2
    assert planar.norms.tolist() == pytest.approx([3.62, 2.0])


@pytest.mark.parametrize("bad", [{"tasks": ("mnist/gpt",)}, {"methods": ("noise",)},
                                 {"small": 4096}, {"num_epochs": 0}])  # fmt: skip
def test_fields_out_of_range_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        study.Config(**bad)


def test_sizes_of_the_study():
    paper = studies.sized(study, "paper")
    assert (paper.num_epochs, len(paper.tasks), len(paper.methods)) == (200, 9, 8)


SHORT = study.Config(tasks=("digits/mlp",), methods=("small", "large", "diagonal"), num_epochs=2,
                     num_seeds=1, large=512, small=64, rates=(0.1,), small_rates=(0.05,),
                     precision="bfloat16", fisher_every=2, variance_samples=100)  # fmt: skip


def test_a_study_in_half_precision_has_its_own_rate_for_small_batches():
    result = study.run(SHORT)

    assert result.rates[0].tolist() == [0.05, 0.1, 0.1]
    assert result.accuracies.isfinite().all()
    # The Fisher matrix before the first and after the second epoch.
    assert result.fisher_norms[0].isfinite().tolist() == [[True, False, True]] * 2
    assert "mean and standard deviation of 1 seed;" in str(result)


def test_methods_without_time_are_missing_and_computed_later(tmp_path, monkeypatch):
    times = iter([True])
    monkeypatch.setattr(study.TimeLimit, "begin", lambda limit: next(times, False))
    config = dataclasses.replace(SHORT, max_seconds=1.0)
    result = study.run(config, state=tmp_path / "state")

    assert result.missing == ("digits mlp large", "digits mlp diagonal")
    assert result.accuracies[0].isnan().all(1).tolist() == [False, True, True]
    assert "Not run within 1 s: digits mlp large" in str(result)
    rows = study.evidence(result)
    assert [row.what for row in rows if "test accuracy" in row.what] == [
        "digits/mlp: test accuracy in %, small"
    ]
    assert {row.where for row in rows} == {"Table 1", "Figure 1", "Figure 4"}
    studies.write(study, result, tmp_path)
    monkeypatch.undo()
    whole = study.run(SHORT, state=tmp_path / "state")
    assert not whole.missing
    assert torch.equal(whole.accuracies[0, 0], result.accuracies[0, 0])


def test_without_any_method_the_examples_in_two_dimensions_are_left(tmp_path):
    result = study.run(dataclasses.replace(SHORT, max_seconds=0.0), state=tmp_path / "state")

    assert len(result.missing) == 3
    assert {row.where for row in study.evidence(result)} == {"Figure 1", "Figure 4"}
    studies.write(study, result, tmp_path)
    assert str(ritz.load(tmp_path / "result.safetensors")) == str(result)
