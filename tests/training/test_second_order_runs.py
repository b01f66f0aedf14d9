"""Optimisers that need curvature, and readings of steps, in ``fit`` and from the shell."""

import json

import pytest
import torch
from cli.own import ritz as ritz_command
from optim.second_order_cases import EVERY, network, samples
from torch import nn
from torch.nn.functional import cross_entropy

import ritz
from ritz.curvature import Risk
from ritz.curvature._tracing import Linearization
from ritz.optim import LanczosNewton
from ritz.training import CurvatureMonitor, fit, read_log

NAMES = {
    "lanczos_newton": {"lr": 0.5, "delta": 1.0, "num_steps": 5, "interval": 3, "momentum": 0.5},
    "hessian_free": {"delta": 1.0, "max_steps": 6},
    "spectral_sgd": {"lr": 0.3, "interval": 2, "num_steps": 5, "matrix": "ggn"},
}
by_name = pytest.mark.parametrize("name", NAMES)


def normed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.1), nn.Tanh(), nn.Linear(5, 3)
        return nn.Sequential(*layers)


def settings(name, **more):
    usual = {"batch_size": 16, "num_epochs": 2, "optimizer": name}
    return usual | {"optimizer_settings": NAMES[name]} | more


@by_name
def test_fit_takes_the_steps_of_a_plain_loop(name):
    batches = [samples(16, seed=seed) for seed in range(3)]
    model = network()
    fit(model, batches, **settings(name, num_epochs=1))
    other = network()
    cls = {"lanczos_newton": 0, "hessian_free": 2, "spectral_sgd": 4}[name]
    make = list(EVERY.values())[cls][0]
    optimizer = make(other.parameters(), **NAMES[name])
    for step, (inputs, labels) in enumerate(batches):
        if optimizer.curvature_due(step):
            optimizer.update_curvature(Risk(other, cross_entropy, [(inputs, labels)]))
        optimizer.zero_grad()
        cross_entropy(other(inputs), labels).backward()
        optimizer.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@by_name
@pytest.mark.parametrize("drawn", [None, 24])
def test_a_killed_run_resumes_bit_for_bit(name, drawn, tmp_path):
    data = samples(64, dtype=torch.float32)
    more = {"save_interval": 0.0, "curvature_batch_size": drawn, "schedule": "step"}
    more |= {"damping": "constant" if name == "spectral_sgd" else "ratio"}

    def train(folder, **extra):
        model = normed()
        fit(model, data, checkpoint=folder, **settings(name, **more), **extra)
        return model.state_dict()

    whole = train(tmp_path / "whole")

    def stop(step, model, optimizer):
        if step == 5:  # between two refreshes
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", monitors=[stop])
    resumed = train(tmp_path / "parts")
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_fifty_refreshes_of_a_run_make_one_trace(monkeypatch):
    made, whole = [], Linearization.__init__

    def init(self, *args, **options):
        made.append(1)
        whole(self, *args, **options)

    monkeypatch.setattr(Linearization, "__init__", init)
    refreshes, update = [], LanczosNewton.update_curvature

    def counted(self, risk):
        refreshes.append(risk.num_samples)
        update(self, risk)

    monkeypatch.setattr(LanczosNewton, "update_curvature", counted)
    fit(normed(), samples(50 * 8, dtype=torch.float32), num_epochs=1, batch_size=8,
        optimizer="lanczos_newton", optimizer_settings={"num_steps": 3})  # fmt: skip
    assert refreshes == [8] * 50
    assert len(made) == 1


def test_the_curvature_batch_may_be_larger_and_is_drawn_anew(monkeypatch):
    seen, update = [], LanczosNewton.update_curvature

    def noted(self, risk):
        seen.append((risk.num_samples, risk.loss()))
        self.param_groups[0]["lr"] = 0.0  # the weights stay, so the loss tells the samples apart
        update(self, risk)

    monkeypatch.setattr(LanczosNewton, "update_curvature", noted)
    fit(network(), samples(64), curvature_batch_size=40,
        **settings("lanczos_newton", num_epochs=1))  # fmt: skip
    sizes, losses = zip(*seen, strict=True)
    assert set(sizes) == {40}
    assert len(set(losses)) == len(losses) > 1


def test_batch_norm_has_the_statistics_of_the_batch(monkeypatch):
    modes, update = [], LanczosNewton.update_curvature

    def noted(self, risk):
        modes.append(risk.batch_norm)
        update(self, risk)

    monkeypatch.setattr(LanczosNewton, "update_curvature", noted)
    data = samples(32, dtype=torch.float32)
    fit(normed(), data, **settings("lanczos_newton", num_epochs=1))
    fit(network(), samples(32), **settings("lanczos_newton", num_epochs=1))
    assert modes == ["train", "eval"]


@by_name
def test_a_run_that_diverges_says_so(name):
    wild = {"lanczos_newton": {"lr": 1e9, "delta": 1e-8, "num_steps": 2},
            "hessian_free": {"lr": 1e12, "delta": 1.0, "adapt": False},
            "spectral_sgd": {"lr": 1e9, "interval": 1}}[name]  # fmt: skip
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    result = fit(model, samples(64, dtype=torch.float32), num_epochs=30, batch_size=16,
                 optimizer=name, optimizer_settings=wild)  # fmt: skip
    assert result.status.outcome == "diverged"


@by_name
def test_a_batch_with_nan_is_one_clear_error(name):
    inputs, labels = samples(32)
    inputs[3] = float("nan")
    with pytest.raises(ValueError, match="batch 0 must be finite"):
        fit(network(), [(inputs, labels)], **settings(name, num_epochs=1, batch_size=32))


def test_batch_norm_with_a_batch_of_one_says_what_to_do():
    data = samples(33, dtype=torch.float32)
    with pytest.raises(ValueError, match="use drop_last=True"):
        fit(normed(), data, **settings("lanczos_newton", num_epochs=1))


@by_name
def test_the_command_line_trains_with_it(name, tmp_path, capsys):
    command = ["train", "--model", "mlp", "--set-model", "hidden=8", "--data", "digits", "--epochs",
               "1", "--batch-size", "256", "--optimizer", name, "--out", str(tmp_path / "run"),
               "--curvature-batch-size", "300", "--json"]  # fmt: skip
    if name == "lanczos_newton":
        command += ["--damping", "ratio", "--lr", "0.1", "--set", "delta=1.0", "--set",
                    "num_steps=4"]  # fmt: skip
    assert ritz_command(*command) == 0
    metrics = json.loads(capsys.readouterr().out)["result"]["metrics"]
    assert metrics["train_loss"] < 2.6
    if name == "spectral_sgd":
        # The logged rate is the measured one.
        assert metrics["learning_rate"] != 1.0
    if name == "lanczos_newton":
        assert metrics["damping"] == 1.0


@pytest.mark.parametrize("name", ["sgd", "adamw", "lanczos_newton"])
def test_the_monitor_reads_steps(name, tmp_path):
    data, log = samples(64), tmp_path / "log.jsonl"
    chosen = {"lr": 0.1} | ({"delta": 1.0} if name == "lanczos_newton" else {})
    monitor = CurvatureMonitor(data, quantities=["step"], every=2, unit="step", num_steps=6)
    fit(network(), data, num_epochs=1, batch_size=16, optimizer=name, log=log, monitors=[monitor],
        optimizer_settings=chosen | ({"momentum": 0.0} if name == "sgd" else {}))  # fmt: skip
    records = [record for record in read_log(log) if record["kind"] == "curvature"]
    assert len(records) == 2
    for record in records:
        assert len(record["step_values"]) == len(record["step_rates"]) == 6
        ratio = record["curvature_ratio"]
        assert ratio == pytest.approx(1.0) if name == "sgd" else ratio != pytest.approx(1.0)


def test_the_monitor_reads_steps_in_a_plain_loop():
    model, batch = network(), samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = CurvatureMonitor(batch, quantities=["step"], num_steps=5)
    assert "curvature_ratio" not in monitor.measure(model, optimizer)
    monitor.attach(optimizer)
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    assert monitor.measure(model, optimizer)["curvature_ratio"] == pytest.approx(1.0)


def test_presets_name_published_settings():
    preset = ritz.optim.preset("lanczosnewton/vgg16/cifar100")
    assert preset.settings["lr"] == 1.0
    assert preset.settings["delta"] == 10.0
    result = fit(network(), samples(32), optimizer="lanczosnewton/vgg16/cifar100", num_epochs=1)
    assert result.status.ok
