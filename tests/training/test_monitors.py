import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from training.examples import Stop, StoppedError, assert_same_bits, network, samples, state

import ritz
from ritz.data import Augmentation, Split, TextSplit
from ritz.training import (
    CurvatureMonitor,
    TrainingConfig,
    fit,
    quantity_names,
    read_log,
    read_weights,
    sweep,
)
from ritz.training._data import DataParts
from ritz.training._quantities import QUANTITIES
from ritz.training._run_folder import RunConfig, make_monitor

EVERYTHING = ("lambda_max", "trace", "variance", "spectrum")


def dense(model, data, kind):
    op = ritz.curvature.curvature_operator(
        ritz.Risk(model, cross_entropy, data), kind, engine="eager"
    )
    return op.dense().double()


def exact(model, data, kind="hessian"):
    return torch.linalg.eigvalsh(dense(model, data, kind))


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_quantities_agree_with_the_dense_matrix(kind):
    data, model = samples(12), network(width=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    monitor = CurvatureMonitor(data, matrix=kind, quantities=EVERYTHING, num_probes=8, num_steps=8)
    found = monitor.measure(model, optimizer)
    values = exact(model, data, kind)
    # The value errs by the square of its residual, 1e-2 of the norm.
    assert found["lambda_max"] == pytest.approx(float(values[-1]), rel=1e-3)
    assert found["threshold"] == 8.0
    assert found["sharpness_ratio"] == pytest.approx(found["lambda_max"] / 8)
    error = found["trace_stderr"] or 1e-5 * abs(float(values.sum()))
    assert abs(found["trace"] - float(values.sum())) < 4 * error
    matrices = torch.stack(
        [dense(model, tuple(part[i : i + 1] for part in data), kind) for i in range(12)]
    )
    spread = (matrices - matrices.mean(0)).square().sum((1, 2)).mean() / len(values)
    assert abs(found["variance"] - float(spread)) < 4 * found["variance_stderr"]
    weights = torch.tensor(found["ritz_weights"])
    assert len(found["ritz_values"]) == 8
    assert float(weights.sum()) == pytest.approx(1)


def test_fit_logs_what_monitors_return(tmp_path):
    data = samples()
    by_step = CurvatureMonitor(data, quantities=["lambda_max"], every=3, unit="step")
    by_epoch = CurvatureMonitor(data, quantities=["spectrum"], every=2, num_steps=3)
    fit(network(), data, num_epochs=2, batch_size=12, monitors=[by_step, by_epoch],
        log=tmp_path / "log.jsonl")  # fmt: skip
    lines = [line for line in read_log(tmp_path / "log.jsonl") if line["kind"] == "curvature"]
    assert [(line["step"], line["epoch"]) for line in lines] == [(3, 1), (6, 2), (8, 2)]
    assert "lambda_max" in lines[0]
    assert len(lines[2]["ritz_values"]) == 3


class Writer:
    def __init__(self):
        self.told = []

    def add_scalar(self, tag, scalar_value, global_step):
        self.told.append((tag, global_step))


@pytest.mark.parametrize(
    "number", [3, np.float32(3.0), np.int64(3), torch.tensor(3.0), torch.tensor(3)]
)
def test_every_kind_of_number_of_a_monitor_reaches_the_writer_and_sweeps(number):
    writer = Writer()

    def monitor(count, model, optimizer):
        return {"depth": number, "text": "a", "flag": True, "list": [1.0]}

    fit(network(), samples(), num_epochs=1, batch_size=48, monitors=(m for m in [monitor]),
        writer=writer)  # fmt: skip
    result = sweep(network, samples(), {}, seeds=1, num_epochs=1, monitors=[monitor])

    assert [tag for tag, _ in writer.told if tag.startswith("curvature/")] == ["curvature/depth"]
    assert float(result.metrics["depth"]) == 3.0
    assert not {"flag", "epoch", "step"} & result.metrics.keys()


def test_a_sweep_has_nan_where_the_last_number_of_a_monitor_is_not_finite():
    def monitor(count, model, optimizer):
        return {"depth": 3.0 if count == 1 else math.inf}

    monitor.unit = "epoch"
    result = sweep(network, samples(), {}, seeds=1, num_epochs=2, monitors=[monitor])

    assert math.isnan(result.metrics["depth"])


def test_a_user_defined_loop_is_monitored_and_unchanged(tmp_path):
    data, models = samples(), [network(norm=True, dropout=0.3) for _ in range(2)]
    writer = Writer()
    monitor = CurvatureMonitor(
        data, quantities=["lambda_max", "trace"], every=2, unit="step", writer=writer,
        log=tmp_path / "own.jsonl", num_probes=2,
    )  # fmt: skip
    for model, watch in zip(models, (False, True), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(0)
        for step in range(1, 5):
            optimizer.zero_grad()
            cross_entropy(model(data[0]), data[1]).backward()
            before = [p.grad.clone() for p in model.parameters()]
            if watch:
                monitor(step, model, optimizer)
            assert model.training
            for p, grad in zip(model.parameters(), before, strict=True):
                assert torch.equal(p.grad, grad)
            optimizer.step()
    assert_same_bits(state(models[1]), state(models[0]))
    assert [line["step"] for line in read_log(tmp_path / "own.jsonl")] == [2, 4]
    assert ("curvature/lambda_max", 4) in writer.told
    assert ("curvature/trace_stderr", 2) in writer.told
    assert ("curvature/sharpness_ratio", 2) in writer.told


def images(count=40):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 1, 6, 6, generator=generator)
    return x, torch.randint(3, (count,), generator=generator)


def augmented():
    """The same images as data whose batches are shifted and flipped."""
    x, y = images()
    bytes_ = (255 * x).to(torch.uint8)
    return Split(inputs=bytes_, targets=y, mean=torch.tensor([0.5]), std=torch.tensor([0.3]))


def convolutional(seed=0):
    """Batch norm, dropout and a convolution."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.4),
            nn.Linear(64, 3),
        )  # fmt: skip


OPTIONS = {"num_epochs": 3, "batch_size": 10, "augment": Augmentation(padding=1),
           "average_from": 2, "optimizer": "adamw", "optimizer_settings": {"lr": 0.02}}  # fmt: skip


REMEMBERED = ("lambda_max", "lambda_min", "edge", "distance", "update_size", "alpha", "gsnr")


def watching(unit, batch_norm="eval", quantities=None):
    """Return a monitor of quantities, or of every one that the mode of batch norm allows."""
    names = [name for name in quantity_names()
             if batch_norm != "train" or not QUANTITIES[name].separable]  # fmt: skip
    return CurvatureMonitor(
        images(12), quantities=quantities or names, unit=unit, every=2,
        batch_norm=batch_norm, batch_size=6, num_steps=4, num_probes=2, num_runs=2, num_vectors=2,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_watching_everything_changes_no_bit_of_a_run(tmp_path):
    plain, watched = convolutional(), convolutional()
    torch.manual_seed(1)
    fit(plain, augmented(), checkpoint=tmp_path / "plain", **OPTIONS)
    before = torch.get_rng_state()
    torch.manual_seed(1)
    monitors = [watching("step"), watching("epoch", "train")]
    monitors[0].every = 5
    fit(watched, augmented(), checkpoint=tmp_path / "watched", monitors=monitors, **OPTIONS)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_bits(state(watched), state(plain))
    for name in ("weights", "average"):
        files = [(tmp_path / kind / f"{name}.safetensors") for kind in ("plain", "watched")]
        assert_same_bits(*(read_weights(file) for file in files))


def remember():
    return watching("step", quantities=REMEMBERED)


def test_a_resumed_run_measures_the_same_numbers(tmp_path):
    """Warm starts, initial weights and the weights before a step come from the checkpoint."""
    common = OPTIONS | {"save_interval": 0.0}
    whole, parts = convolutional(), convolutional()
    fit(whole, augmented(), monitors=[remember()], log=tmp_path / "whole.jsonl", **common)
    options = {"checkpoint": tmp_path / "run", "log": tmp_path / "parts.jsonl", **common}
    for step in (5, 8):
        with pytest.raises(StoppedError):
            fit(parts, augmented(), monitors=[remember(), Stop(step)], **options)
    # From a model and a monitor that know nothing of the run.
    parts = convolutional(seed=1)
    fit(parts, augmented(), monitors=[remember()], **options)
    assert_same_bits(state(parts), state(whole))
    logs = [read_log(tmp_path / f"{name}.jsonl") for name in ("whole", "parts")]
    curvature = [[x for x in log if x["kind"] == "curvature"] for log in logs]
    assert len(curvature[0]) == 6
    assert curvature[1] == curvature[0]
    assert "distance" in curvature[0][-1]


def test_a_shuffled_training_loader_is_watched_on_a_fixed_subset():
    data, model = samples(60), network()
    loader = DataLoader(TensorDataset(*data), batch_size=16, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    monitor = CurvatureMonitor(loader, max_samples=20, quantities=["lambda_max", "gradient_norm"])
    with pytest.raises(ValueError, match="max_samples= to draw a subset"):
        CurvatureMonitor(loader).measure(model, optimizer)

    first, again = (monitor.measure(model, optimizer) for _ in range(2))

    assert first["watched_loss"] == again["watched_loss"]
    whole = ritz.Risk(model, cross_entropy, data).loss()
    assert first["watched_loss"] != pytest.approx(whole, rel=1e-9)
    assert len(repr(monitor)) < 700  # without the data


def test_a_user_defined_risk_is_measured():
    data, model = samples(), network()
    monitor = CurvatureMonitor(
        lambda model: ritz.Risk(model, cross_entropy, data, l2=10.0), quantities=["lambda_max"]
    )
    found = monitor(1, model)
    assert "threshold" not in found
    expected = float(exact(model, data)[-1]) + 10
    assert found["lambda_max"] == pytest.approx(expected, rel=1e-3)


def test_a_text_is_monitored_by_its_tokens():
    """Segments of unequal length count by tokens, and streams have whole segments."""
    tokens = torch.randint(7, (300,), generator=torch.Generator().manual_seed(0))
    split = TextSplit(tokens=tokens, length=50)
    config = RunConfig(model="", data="", training=TrainingConfig(batch_size=600))
    table = torch.randn(7, 7, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Sequential(torch.nn.Embedding.from_pretrained(table, freeze=False), Turned())
    parts = DataParts(train=split)
    monitor = make_monitor(config, model, parts, cross_entropy, 1, ("trace",), {})
    risk = monitor._snapshot(model, None).risk
    batches = list(split.batches(5))  # five streams of sixty: a segment of fifty, and of nine
    with torch.no_grad():
        total = sum(float(cross_entropy(model(x), y, reduction="sum")) for x, y in batches)
    assert [y.shape[1] for _, y in batches] == [50, 9]
    # Single precision, added up in another order.
    assert risk.loss() == pytest.approx(total / (5 * 59), rel=1e-6)


def test_large_networks_are_watched_on_half_as_many_samples():
    data = DataParts(train=samples(1200))
    config = RunConfig(model="", data="", training=TrainingConfig(batch_size=600))
    for width, options, count in ((8, {}, 1024), (200_000, {}, 512), (8, {"num_samples": 30}, 30)):
        model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Linear(width, 3))
        monitor = make_monitor(config, model, data, cross_entropy, 1, None, options)
        assert monitor._snapshot(model, None).risk.num_samples == count


class Turned(torch.nn.Module):
    """Classes in dimension 1, as the loss wants them."""

    def forward(self, x):
        return x.transpose(1, 2)


def test_a_monitor_prints_what_it_measures_and_not_its_data():
    monitor = CurvatureMonitor(samples(), quantities=["trace", "lambda_max"], every=5, unit="step")

    assert str(monitor) == "CurvatureMonitor(trace, lambda_max; hessian, every 5 steps)"
