import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset
from training.examples import assert_same_bits, digits, network, samples, state

import ritz
from ritz._core.random import epoch_generator
from ritz.data import load
from ritz.models import create
from ritz.optim import AutoAverage, IterateAverage
from ritz.training import evaluate, fit, optimizer_names, read_log

SHORT = {"num_epochs": 2, "batch_size": 12, "optimizer_settings": {"lr": 0.1}}


@pytest.mark.parametrize(
    ("optimizer", "rate"), [("sgd", 0.1), ("gadam", 3e-3), ("gadamx", 0.03), ("adamw", 3e-3)]
)
def test_digits_are_learnt_and_averages_evaluated(optimizer, rate):
    train, held = digits()
    model = network(64, 10, norm=True, width=64)
    result = fit(
        model,
        train,
        validation=held,
        num_epochs=8,
        batch_size=50,
        optimizer=optimizer,
        optimizer_settings={"lr": rate},
        schedule="linear",
        average_from=6,
        statistics_fraction=1.0,
    )
    assert result.status.outcome == "completed"
    assert result.metrics["validation_accuracy"] > 0.93
    assert result.metrics["average_validation_accuracy"] > 0.93
    assert result.history["train_loss"].shape == (8,)
    assert result.history["average_validation_loss"].isnan().tolist() == [True] * 5 + [False] * 3
    assert result.history["learning_rate"][0] == pytest.approx(rate)
    assert result.history["learning_rate"][-1] == pytest.approx(rate / 2)


def test_steps_are_those_of_a_plain_loop():
    x, y = samples()
    found, expected = network(), network()
    fit(found, (x, y), num_epochs=3, batch_size=20, optimizer_settings={"lr": 0.2}, seed=5)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.2, momentum=0.9)
    for epoch in (1, 2, 3):
        order = torch.randperm(len(x), generator=epoch_generator(5, epoch))
        for rows in order.split(20):
            optimizer.zero_grad()
            cross_entropy(expected(x[rows]), y[rows]).backward()
            optimizer.step()
    assert_same_bits(state(found), state(expected))


@pytest.mark.parametrize("name", optimizer_names())
def test_every_optimiser_lowers_the_loss(name):
    x, y = samples()
    rate = 0.1 if "sgd" in name or name in ("padam", "padamw", "gadamx") else 0.03
    result = fit(network(), (x, y), num_epochs=4, batch_size=12, optimizer=name,
                 optimizer_settings={"lr": rate})  # fmt: skip
    assert result.history["train_loss"][-1] < result.history["train_loss"][0]


@pytest.mark.parametrize("last", [12, 7])
def test_accumulated_batches_are_one_large_batch(last):
    x, y = samples(36 + last)
    batches = [(x[i : i + 12], y[i : i + 12]) for i in range(0, len(x), 12)]
    united = [(x[:24], y[:24]), (x[24:], y[24:])]
    models = [network() for _ in range(2)]
    for model, data, accumulate in zip(models, (batches, united), (2, 1), strict=True):
        fit(model, data, num_epochs=3, accumulate=accumulate, optimizer_settings={"lr": 0.5})
    # Sums in another order: roundoff alone.
    torch.testing.assert_close(state(models[0]), state(models[1]), rtol=1e-5, atol=1e-6)


WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=1), None,
                nn.CrossEntropyLoss(weight=WEIGHTS)],
    ids=["ignored", "another ignored", "function", "weighted"],
)  # fmt: skip
def test_ignored_labels_and_weighted_classes_count_as_in_the_loss(loss_fn):
    x, y = samples(48)
    y[::3] = -100
    y[:12] = -100  # the first batch has nothing but ignored ones
    if loss_fn is not None and loss_fn.ignore_index == 1:
        y = torch.where(y == -100, 1, y)
    loss_fn = loss_fn or nn.functional.cross_entropy
    whole, parts = network(), network()
    before = {name: value.clone() for name, value in state(whole).items()}
    found = evaluate(whole, list(zip(x.split(12), y.split(12), strict=True)), loss_fn=loss_fn)
    with torch.no_grad():
        outputs = whole(x)
    kept = y != getattr(loss_fn, "ignore_index", -100)
    assert found["loss"] == pytest.approx(float(loss_fn(outputs, y)), rel=1e-6)
    right = (outputs.argmax(1) == y)[kept].double().mean()
    assert found["accuracy"] == pytest.approx(float(right), rel=1e-12)
    common = {"num_epochs": 1, "loss_fn": loss_fn, "optimizer_settings": {"lr": 0.5}}
    together = fit(whole, [(x, y)], **common)
    apart = fit(parts, list(zip(x.split(12), y.split(12), strict=True)), accumulate=4, **common)
    torch.testing.assert_close(state(parts), state(whole), rtol=1e-5, atol=1e-6)
    moved = [(before[name] - value).abs().max() for name, value in state(whole).items()]
    assert max(moved) > 1e-3
    assert apart.metrics["train_loss"] == pytest.approx(together.metrics["train_loss"], rel=1e-6)


def test_the_average_is_that_of_the_ends_of_epochs(tmp_path):
    data = samples()
    ends = []

    class Watch:
        unit = "epoch"

        def __call__(self, count, model, optimizer):
            ends.append(state(model))

    model = network()
    fit(model, data, num_epochs=5, batch_size=12, average_from=3, monitors=[Watch()],
        optimizer_settings={"lr": 0.2}, final="average", checkpoint=tmp_path)  # fmt: skip
    # The weights before epoch 3, which are those after epoch 2, begin it.
    expected = {name: sum(end[name] for end in ends[1:]) / 4 for name in ends[0]}
    torch.testing.assert_close(state(model), expected)
    ritz.training.load_weights(other := network(seed=1), tmp_path / "average.safetensors")
    assert_same_bits(state(other), state(model))


def test_averaged_weights_are_evaluated_with_recomputed_batch_norm():
    data = samples(60)
    model = network(norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    average = IterateAverage(optimizer, start=4)
    result = fit(model, data, validation=data, num_epochs=2, batch_size=20, optimizer=optimizer,
                 average=average)  # fmt: skip
    order = torch.randperm(60, generator=epoch_generator(0, 0))
    batches = [tuple(part[rows] for part in data) for rows in order.split(20)]
    with average.applied(model, data=batches):
        expected = evaluate(model, [data])
        assert evaluate(model, data) == evaluate(model, tuple(x.numpy() for x in data)) == expected
    assert result.metrics["average_validation_loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_patience_begins_the_average_and_ends_training():
    data = samples()
    result = fit(network(), data, validation=data, num_epochs=50, batch_size=12, patience=1,
                 optimizer_settings={"lr": 0.0})  # fmt: skip
    # At rate zero nothing improves: one evaluation sets the best of each part, one ends it.
    assert result.status.outcome == "stopped"
    assert result.num_epochs == 4
    assert "average_validation_loss" in result.metrics


def test_a_user_defined_auto_average_is_used():
    model, data = network(), samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    auto = AutoAverage(optimizer, patience=1)
    result = fit(model, data, validation=data, num_epochs=50, batch_size=12, optimizer=optimizer,
                 average=auto)  # fmt: skip
    assert auto.finished
    assert result.num_epochs == 4


def test_data_of_every_kind_are_accepted():
    x, y = samples(24)
    pairs = [(x[:12], y[:12]), (x[12:], y[12:])]

    class Own:
        def __len__(self):
            return 24

        def batches(self, batch_size, *, generator=None):
            return iter(pairs)

    seen = []

    def by_epoch(epoch):
        seen.append(epoch)
        return pairs

    kinds = [pairs, by_epoch, DataLoader(TensorDataset(x, y), batch_size=12), Own()]
    found = []
    for data in kinds:
        model = network()
        fit(model, data, num_epochs=2, batch_size=12, optimizer_settings={"lr": 0.1})
        found.append(state(model))
    for other in found[1:]:
        assert_same_bits(other, found[0])
    assert seen == [1, 2]


def test_registered_data_and_models_are_trained():
    data = load("digits")
    model = create("logistic", num_classes=10, input_shape=data.shape)
    result = fit(model, data, num_epochs=3, batch_size=64, optimizer_settings={"lr": 0.01})
    assert result.metrics["test_accuracy"] > 0.85
    assert result.metrics["train_accuracy"] > 0.85


def test_a_regression_has_a_loss_and_no_accuracy():
    x, _ = samples()
    y = x[:, :1] * 2
    result = fit(nn.Linear(6, 1), (x, y), num_epochs=40, batch_size=12, loss_fn=mse_loss,
                 optimizer_settings={"lr": 0.05})  # fmt: skip
    assert result.metrics["train_loss"] < 1e-3
    assert "train_accuracy" not in result.metrics


def test_batches_may_be_dictionaries_or_have_a_user_defined_forward():
    x, y = samples(24)
    found = []
    for data, forward in (
        ([{"input": x, "labels": y}], None),
        ([{"a": x, "b": y}], lambda model, batch: (model(batch["a"]), batch["b"])),
    ):
        model = network()
        fit(model, data, num_epochs=2, forward=forward, optimizer_settings={"lr": 0.1})
        found.append(state(model))
    assert_same_bits(found[0], found[1])


def test_arrays_of_names_beside_tensors_are_passed_to_the_model():
    x, y = samples(24)
    names = np.array(["a"] * 24)
    models = network(), network()

    def forward(model, batch):
        assert batch["names"] is names
        return model(batch["input"]), batch["labels"]

    batch = {"input": x, "names": names, "labels": y}
    loader = DataLoader(range(1), batch_size=None, collate_fn=lambda _: batch)
    fit(models[0], loader, num_epochs=1, forward=forward)
    fit(models[1], [(x, y)], num_epochs=1)

    assert_same_bits(*map(state, models))


def test_gradients_are_clipped():
    x, y = samples(24)
    model, before = network(), state(network())
    fit(model, [(x, y)], num_epochs=1, clip_norm=1e-3,
        optimizer_settings={"lr": 1.0, "momentum": 0.0})  # fmt: skip
    moved = sum((p - before[n]).square().sum() for n, p in model.named_parameters())
    torch.testing.assert_close(moved.sqrt(), torch.tensor(1e-3), rtol=1e-3, atol=0)


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_other_precisions_learn_too(precision):
    result = fit(network(), samples(), num_epochs=10, batch_size=12, precision=precision,
                 optimizer_settings={"lr": 0.1})  # fmt: skip
    assert result.history["train_loss"][-1] < 0.7 * result.history["train_loss"][0]


def test_half_precision_is_really_used():
    seen = []
    model = network()
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    fit(model, samples(), num_epochs=1, batch_size=48, precision="bfloat16")
    assert set(seen) == {torch.bfloat16}


def test_the_global_generators_and_settings_stay_as_they_were():
    model = network(dropout=0.5)
    before = torch.get_rng_state()
    fit(model, samples(), deterministic=True, **SHORT)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()


def test_runs_depend_on_their_seed_alone():
    found = []
    for seed, noise in ((1, 0), (1, 5), (2, 0)):
        torch.manual_seed(noise)
        model = network(dropout=0.5)
        fit(model, samples(), seed=seed, **SHORT)
        found.append(state(model))
    assert_same_bits(found[0], found[1])
    assert not torch.equal(found[0]["0.weight"], found[2]["0.weight"])


def test_schedules_may_be_stepped_per_step_or_be_user_defined():
    times = []
    fit(network(), samples(), schedule=lambda t: times.append(t) or 1.0, schedule_unit="step",
        **SHORT)  # fmt: skip
    assert sorted(set(times)) == list(range(9))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    halved = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    result = fit(model, samples(), num_epochs=3, batch_size=12, optimizer=optimizer,
                 schedule=halved)  # fmt: skip
    assert result.history["learning_rate"].tolist() == [1.0, 0.5, 0.25]


def test_a_divergent_run_says_so_and_keeps_its_checkpoint(tmp_path):
    x, _ = samples()
    result = fit(nn.Linear(6, 1), (x, x[:, :1]), num_epochs=60, batch_size=4, loss_fn=mse_loss,
                 save_interval=0.0, optimizer_settings={"lr": 100.0}, checkpoint=tmp_path
    )  # fmt: skip
    assert result.status.outcome == "diverged"
    assert "lower the learning rate" in str(result.status)
    weights = ritz.training.read_weights(tmp_path / "checkpoint.safetensors")
    assert all(value.isfinite().all() for value in weights.values())


def test_the_progress_bar_counts_steps_and_shows_the_speed():
    told = []

    class Told:
        def start(self, label, total):
            told.append((label, total))

        def update(self, done, note=""):
            told.append((done, note))

        def finish(self):
            pass

    fit(network(), samples(), progress=Told(), **SHORT)
    assert told[0] == ("training", 8)
    # After each step, and once more after each of the two epochs.
    assert [done for done, _ in told[1:]] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert told[5][1].startswith("epoch 1: loss ")
    assert told[6][1].startswith("epoch 1: loss ")
    assert "; epoch 2/2, " in told[6][1]
    assert told[-1][1].startswith("epoch 2: loss ")


def test_the_log_has_one_line_per_epoch(tmp_path):
    data = samples()
    result = fit(network(), data, validation=data, test=data, evaluate_every=2, num_epochs=3,
                 batch_size=12, log=tmp_path / "log.jsonl")  # fmt: skip
    lines = read_log(tmp_path / "log.jsonl")
    assert [line["kind"] for line in lines] == ["epoch"] * 3 + ["final"]
    names = ["kind", "epoch", "step", "learning_rate", "train_loss", "train_accuracy"]
    assert list(lines[0]) == names
    assert "validation_loss" in lines[1]
    assert lines[3]["test_loss"] == result.metrics["test_loss"]
    times = read_log(tmp_path / "log.times.jsonl")
    assert [time["epoch"] for time in times] == [1, 2, 3]
    assert all(time["seconds"] > 0 for time in times)


def test_a_thread_may_train():
    done = []
    thread = threading.Thread(target=lambda: done.append(fit(network(), samples(), **SHORT)))
    thread.start()
    thread.join()
    assert done[0].status.ok


def test_results_are_saved_and_printed(tmp_path):
    result = fit(network(), samples(), **SHORT)
    ritz.save(result, tmp_path / "result.safetensors")
    again = ritz.load(tmp_path / "result.safetensors")
    assert again.metrics == result.metrics
    assert "2 epochs, 8 steps" in str(again)
    assert "train_loss" in str(again)
