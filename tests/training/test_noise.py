"""Gradient noise, ghost batches and batch schedules as options of training."""

import os
import signal

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from training.examples import assert_same_bits, network, samples, state

from ritz._core.training_config import NoiseName, TrainingConfig
from ritz.curvature._noise_kinds import NOISE_KINDS
from ritz.models import GhostBatchNorm1d
from ritz.optim import CovarianceNoise, NoisySGD
from ritz.training import CurvatureMonitor, fit
from ritz.training._step import check_ghosts

OPTIONS = {"num_epochs": 4, "batch_size": 24, "optimizer_settings": {"lr": 0.2}, "noise_batch": 4}


def trained(**options):
    model = network(norm=options.pop("norm", False))
    result = fit(model, samples(48), **(OPTIONS | options))
    return model, result


def test_every_kind_has_its_name():
    assert set(NoiseName.__args__) == {"none", *NOISE_KINDS}


@pytest.mark.parametrize("kind", NOISE_KINDS)
def test_every_kind_trains(kind):
    model, result = trained(noise=kind, noise_until=0.5)
    plain, _ = trained(noise="none", noise_batch=None)

    assert result.status.outcome == "completed"
    assert result.num_steps == 8
    assert not torch.equal(model[0].weight, plain[0].weight)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", NOISE_KINDS)
def test_a_micro_batch_without_labels_adds_no_noise(kind):
    (x, y), model = samples(48), network()
    y = torch.cat([y[:24], torch.full_like(y[24:], -100)])
    batches = [(x[:24], y[:24]), (x[24:], y[24:])]
    fit(model, batches, num_epochs=2, accumulate=2, noise=kind, noise_batch=4,
        optimizer_settings={"lr": 0.2})  # fmt: skip

    assert all(p.isfinite().all() for p in model.parameters())


class Weights:
    """Keeps the weights after every step."""

    def __init__(self):
        self.found = []

    def __call__(self, count, model, optimizer):
        self.found.append(state(model))


def test_noise_ends_after_its_fraction_of_the_run():
    watch = Weights()
    trained(noise="diagonal", noise_until=0.25, monitors=[watch])
    # Two of eight steps have noise. From there on the steps are plain.
    model = network()
    model.load_state_dict(watch.found[1])
    plain = Weights()
    fit(model, samples(48), monitors=[plain], **(OPTIONS | {"noise_batch": None, "num_epochs": 1}),
        optimizer=lambda p, lr: torch.optim.SGD(p, lr=lr))  # fmt: skip

    assert len(watch.found) == 8
    active = CovarianceNoise(torch.optim.SGD(model.parameters()), model, small=4, until=3)
    active.optimizer.param_groups[0]["noise_step"] = 1
    assert active.active
    active.optimizer.param_groups[0]["noise_step"] = 2
    assert not active.active


class Stop:
    """Interrupts the run after a step."""

    def __init__(self, count):
        self.count = count

    def __call__(self, count, model, optimizer):
        if count == self.count:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    "options",
    [
        {"noise": "diagonal"},
        {"noise": "kfac", "noise_refresh": 3},
        {"noise": "full", "accumulate": 2, "batch_size": 12},
        {"noise": "diagonal", "norm": True, "ghost_batch": 8, "noise_momentum": "before"},
        {"noise": "none", "noise_batch": None, "batch_schedule": "0:12,2:24"},
    ],
    ids=str,
)
def test_an_interrupted_run_ends_with_the_same_bits(options, tmp_path):
    options = {"noise_until": 0.75} | options if options["noise"] != "none" else options
    whole, _ = trained(**options)
    first = trained(**options, checkpoint=tmp_path, monitors=[Stop(4)])[1]
    model, result = trained(**options, checkpoint=tmp_path)

    assert first.status.outcome == "interrupted"
    assert result.status.outcome == "completed"
    assert_same_bits(state(model), state(whole))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", ["diagonal", "full", "kfac"])
def test_noise_in_mixed_precision_is_nearly_the_same(kind, norm):
    options = {"noise": kind, "noise_until": 1.0, "num_epochs": 1, "norm": norm}
    model, _ = trained(**options)
    mixed, result = trained(**options, precision="bfloat16")

    assert result.status.outcome == "completed"
    for p, q in zip(model.parameters(), mixed.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0.1, atol=0.02)


def test_accumulated_batches_have_the_noise_of_the_whole_step():
    model, _ = trained(noise="diagonal", num_epochs=1, noise_until=1.0)
    parts, result = trained(noise="diagonal", num_epochs=1, noise_until=1.0, accumulate=2,
                            batch_size=12)  # fmt: skip

    assert result.num_steps == 2
    for p, q in zip(model.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_sgd_with_noise_by_name_and_as_an_object():
    by_name, _ = trained(optimizer="noisy_sgd", optimizer_settings={"lr": 0.2}, noise_until=1.0)
    model = network()
    noisy = NoisySGD(model, lr=0.2, momentum=0.9, small=4)
    fit(model, samples(48), optimizer=noisy, num_epochs=4, batch_size=24)

    assert_same_bits(state(model), state(by_name))


def test_ghost_batches_replace_batch_norm_and_change_training():
    model, _ = trained(norm=True, ghost_batch=8, noise_batch=None)
    plain, _ = trained(norm=True, noise_batch=None)

    (ghost,) = (m for m in model if isinstance(m, GhostBatchNorm1d))
    assert ghost.size == 8
    assert not torch.equal(model[0].weight, plain[0].weight)


def test_some_batches_may_be_smaller_than_a_ghost_batch():
    # The last batch of an epoch, and the first batches of a schedule.
    last = {"batch_size": 20, "ghost_batch": 20}
    first = {"batch_schedule": "0:12,1:24", "ghost_batch": 16}
    for options in (last, first):
        assert trained(norm=True, noise_batch=None, **options)[1].status.ok
    batches = [tuple(t[i : i + 24] for t in samples(48)) for i in (0, 24)]
    for data in (batches, DataLoader(TensorDataset(*samples(48)), batch_size=24)):
        fit(network(norm=True), data, ghost_batch=24, num_epochs=1)
        with pytest.raises(ValueError, match="got 25 and batches of at most 24 samples"):
            fit(network(norm=True), data, ghost_batch=25, num_epochs=1)


def test_ghost_batches_divide_the_rows_of_each_process(monkeypatch):
    monkeypatch.setattr("ritz.training._step.world_size", lambda: 4)
    # Processes have 17 or 18 rows of 70.
    check_ghosts(TrainingConfig(ghost_batch=18), 70)
    with pytest.raises(ValueError, match=r"got 19 and .* 18 samples per process \(70 in 4 proc"):
        check_ghosts(TrainingConfig(ghost_batch=19), 70)


def test_a_batch_schedule_sets_the_number_of_steps():
    _, result = trained(noise_batch=None, batch_schedule="0:12,1:24,3:48")
    assert result.num_steps == 4 + 2 + 2 + 1
    whole, _ = trained(noise_batch=None, batch_schedule="0:24")
    plain, _ = trained(noise_batch=None)
    assert_same_bits(state(whole), state(plain))


def test_the_monitor_logs_norms_of_fisher_matrices():
    model = network()
    x, y = samples(16)
    monitor = CurvatureMonitor((x, y), quantities=["fisher"], num_probes=400, batch_size=16)
    record = monitor(1, model)
    rows = []
    for sample in range(16):
        loss = cross_entropy(model(x[sample : sample + 1]), y[sample : sample + 1])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in gradients]))
    fisher = torch.stack(rows).T @ torch.stack(rows) / 16

    assert record["fisher_diagonal_norm"] == pytest.approx(
        float(fisher.diagonal().norm()), rel=1e-5
    )
    gap = abs(record["fisher_norm"] - float(fisher.norm()))
    assert gap < 4 * record["fisher_norm_stderr"] + 1e-5 * float(fisher.norm())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"noise": "diagonal", "noise_batch": 24}, "noise_batch must be less than .* 24 and 24"),
        ({"noise": "none", "noise_batch": 4}, "noise_batch must be given with noise"),
        ({"noise": "diagonal", "compile": True}, "compile must be False with noise"),
        ({"noise": "diagonal", "capture": True}, "capture=True needs a CUDA device"),
        ({"noise": "kfac", "capture": True}, "capture must be False with noise='kfac'"),
        ({"noise_batch": None, "ghost_batch": 8}, "ghost_batch needs a model with batch norm"),
        ({"noise_batch": None, "batch_schedule": "0:24,1"}, "batch_schedule must be EPOCH:SIZE"),
        ({"noise_batch": None, "batch_schedule": "1:24"}, "ascending epochs from 0"),
        ({"noise_batch": None, "batch_schedule": "0:24,1:0"}, "batch_schedule"),
        ({"noise_batch": None, "batch_schedule": "0:24", "average_from": 2}, "with average_from"),
        ({"noise": "diagonal", "loss_fn": lambda f, y: cross_entropy(f, y) ** 2},
         "must be the mean of the losses.*: use a loss without them"),
        ({"noise": "diagonal", "loss_fn": None}, r"^noise='diagonal' needs outputs .* pass loss_"),
        ({"noise_batch": None, "norm": True, "ghost_batch": 25},
         r"ghost_batch must be at most the batch size, got 25 and batches of at most 24 sampl"),
        # All 48 samples are in one batch.
        ({"noise_batch": None, "norm": True, "ghost_batch": 64, "batch_size": 128},
         "got 64 and batches of at most 48 samples"),
        ({"noise_batch": None, "norm": True, "ghost_batch": 32, "batch_schedule": "0:12,1:24"},
         "got 32 and batches of at most 24 samples"),
    ],
)  # fmt: skip
def test_wrong_options_are_named_in_one_line(options, error):
    with pytest.raises(ValueError, match=error) as raised:
        trained(**options)
    assert "\n" not in str(raised.value)


def test_a_loader_has_no_batch_schedule_and_its_noise_a_default():
    batches = [tuple(t[i : i + 24] for t in samples(48)) for i in (0, 24)]
    with pytest.raises(ValueError, match="batch_schedule needs tensors"):
        fit(network(), batches, batch_schedule="0:24", num_epochs=1)
    with pytest.raises(ValueError, match=r"noise_batch must be less than .* 128 and 24"):
        fit(network(), batches, noise="full", num_epochs=1)


def test_a_model_whose_sample_gradients_are_unknown_is_pointed_to_another_kind():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.out = nn.Linear(6, 3)

        def forward(self, x):
            return self.out(self.layer(self.layer(x).tanh()))

    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"^noise='diagonal' needs .*: use noise='full', which d"):
        fit(Twice(), samples(48), noise="diagonal", **OPTIONS)
    assert fit(Twice(), samples(48), noise="full", **OPTIONS).status.ok


def test_the_end_of_the_noise_fixes_the_length_of_a_run():
    config = TrainingConfig(noise="diagonal")
    assert "num_epochs" in config.fingerprint()
    assert "num_epochs" not in TrainingConfig(noise="diagonal", noise_until=1.0).fingerprint()
    assert "num_epochs" in TrainingConfig(optimizer="noisy_sgd").fingerprint()
