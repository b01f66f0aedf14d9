"""When averaging starts, how often it takes the weights, and what it takes over from."""

import math

import pytest
import torch
from torch.nn.functional import mse_loss
from training.examples import assert_same_bits, network, samples, state
from training.texts import recurrent, text

from ritz.optim import AutoAverage, Gadam, Lookahead
from ritz.training import fit, load_weights

LENGTH = 4  # steps per epoch
USUAL = {"batch_size": 12, "optimizer_settings": {"lr": 0.05}}


def opposed():
    """Validation data on which training makes loss and accuracy worse."""
    x, y = samples()
    return x, (y + 1) % 3


class Path:
    """The weights after every step, and where Lookahead ends."""

    unit = "step"

    def __init__(self):
        self.weights, self.ends = [], []

    def __call__(self, count, model, optimizer):
        self.weights.append(state(model))
        self.ends.append(getattr(optimizer, "until", None))

    def mean(self, start, interval):
        """The mean of the weights after steps start - 1, start - 1 + interval and so on."""
        chosen = self.weights[start - 2 :: interval]
        return {name: sum(each[name] for each in chosen) / len(chosen) for name in chosen[0]}


# ------------------------------------------------------------------------------------------
# Patience.


@pytest.mark.parametrize(
    ("every", "number", "interval"),
    [("epoch", 1, LENGTH), ("epoch", 2, 2 * LENGTH), ("step", 1, 1), ("step", 3, 3)],
)
@pytest.mark.parametrize("optimizer", ["sgd", "gadam", Gadam, "lookahead_sgd"])
def test_patience_averages_as_often_as_it_is_told(tmp_path, optimizer, every, number, interval):
    settings = {"lr": 0.05} | ({"interval": interval} if optimizer is Gadam else {})
    path = Path()

    result = fit(network(), samples(), validation=opposed(), num_epochs=20, batch_size=12,
                 optimizer=optimizer, optimizer_settings=settings, patience=2, checkpoint=tmp_path,
                 average_every=every, average_interval=number, monitors=[path])  # fmt: skip

    # The first evaluation is the best one. Two more end the first phase, after epoch 3.
    assert result.num_epochs >= 6
    load_weights(average := network(seed=1), tmp_path / "average.safetensors")
    torch.testing.assert_close(state(average), path.mean(3 * LENGTH + 1, interval))


def first_stagnation(values, patience, sign):
    """The first epoch after which averaging starts, for a metric of every epoch."""
    best, waited = math.inf, 0
    for epoch, value in enumerate(values, start=1):
        best, waited = (sign * value, 0) if sign * value < best else (best, waited + 1)
        if waited == patience:
            return epoch
    return None


def first_average(result):
    return int((~result.history["average_validation_loss"].isnan()).nonzero()[0])


@pytest.mark.parametrize(
    ("options", "name", "sign"),
    [
        ({}, "validation_accuracy", -1),
        ({"patience_metric": "accuracy"}, "validation_accuracy", -1),
        ({"patience_metric": "loss"}, "validation_loss", 1),
    ],
)
def test_patience_judges_the_validation_accuracy_unless_told_otherwise(options, name, sign):
    held = samples(30, seed=0)

    result = fit(network(), samples(seed=0), validation=held, test=opposed(), num_epochs=40,
                 batch_size=12, optimizer_settings={"lr": 0.02}, patience=2, **options)  # fmt: skip

    loss, accuracy = (result.history[f"validation_{each}"] for each in ("loss", "accuracy"))
    assert first_stagnation(loss, 2, 1) != first_stagnation(accuracy, 2, -1)
    assert first_average(result) == first_stagnation(result.history[name], 2, sign)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_mode_of_a_user_defined_rule_chooses_the_metric(mode):
    name, sign = ("validation_loss", 1) if mode == "min" else ("validation_accuracy", -1)
    model, held = network(), samples(30, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    auto = AutoAverage(optimizer, patience=2, mode=mode)

    result = fit(model, samples(seed=0), validation=held, num_epochs=40, batch_size=12,
                 optimizer=optimizer, average=auto)  # fmt: skip

    assert first_average(result) == first_stagnation(result.history[name], 2, sign)


def test_text_and_regression_are_judged_by_their_loss():
    runs = [
        fit(recurrent(), text(), validation=text(90, seed=1), num_epochs=6, batch_size=3,
            patience=1, optimizer_settings={"lr": 0.5}),
        fit(network(classes=1), (samples()[0], samples()[0][:, :1]), num_epochs=60,
            validation=(samples()[0], -samples()[0][:, :1]), loss_fn=mse_loss, patience=1, **USUAL),
    ]  # fmt: skip

    for result in runs:
        losses = result.history["validation_loss"]
        assert first_average(result) == first_stagnation(losses, 1, 1)


def test_accuracy_without_classes_is_refused_before_a_file_is_written(tmp_path):
    x = samples()[0]

    with pytest.raises(ValueError, match="patience_metric must be loss, got accuracy"):
        fit(network(classes=1), (x, x[:, :1]), validation=(x, x[:, :1]), loss_fn=mse_loss,
            patience=1, patience_metric="accuracy", checkpoint=tmp_path, **USUAL)  # fmt: skip

    assert not list(tmp_path.glob("*.safetensors"))


def test_the_test_data_do_not_decide():
    with pytest.raises(ValueError, match=r"--set-data validation=500"):
        fit(network(), samples(), test=opposed(), patience=1, **USUAL)


# ------------------------------------------------------------------------------------------
# Lookahead.


@pytest.mark.parametrize(
    ("options", "until"),
    [
        ({}, 2 * LENGTH + 1),
        ({"lookahead_until": 2}, LENGTH + 1),
        ({"lookahead_until": 50}, 49 * LENGTH + 1),
        ({"optimizer_settings": {"lr": 0.05, "until": 7}}, 7),
    ],
)
def test_lookahead_by_name_hands_over_to_the_average(options, until):
    common = {"num_epochs": 5, "average_from": 3}
    named, made = network(), network()
    inner = torch.optim.AdamW(made.parameters(), lr=0.05)
    optimizer = Lookahead(inner, until=until)

    fit(named, samples(), optimizer="lookahead_adamw", final="average",
        **(USUAL | common | options))  # fmt: skip
    fit(made, samples(), optimizer=optimizer, final="average", **USUAL, **common)

    assert_same_bits(state(named), state(made))


def test_lookahead_by_name_stops_when_patience_starts_the_average():
    path, own = Path(), Path()
    common = {"validation": opposed(), "num_epochs": 5, "patience": 2, **USUAL}
    model = network()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.05))

    fit(network(), samples(), optimizer="lookahead_sgd", monitors=[path], **common)
    fit(model, samples(), optimizer=optimizer, monitors=[own], **(common | {
        "optimizer_settings": {}}))  # fmt: skip

    # The average starts after epoch 3.
    assert path.ends == [None] * (3 * LENGTH) + [3 * LENGTH + 1] * (2 * LENGTH)
    assert own.ends == [None] * (5 * LENGTH)


def test_lookahead_around_gadam_uses_its_average():
    model = network()
    optimizer = Lookahead(Gadam(model.parameters(), start=LENGTH + 1, interval=LENGTH))

    fit(model, samples(), optimizer=optimizer, num_epochs=3, batch_size=12, average_from=2)

    assert optimizer.optimizer.average.count == 3


# ------------------------------------------------------------------------------------------
# Milestones and final ratio.


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({"schedule": "step"}, [1, 1, 1, 0.1, 0.01, 0.01]),
        ({"schedule": "step", "milestones": [1, 5]}, [1, 0.1, 0.1, 0.1, 0.1, 0.01]),
        ({"schedule": "linear", "final_ratio": 0.3, "average_from": 3}, [1, 1, 0.3, 0.3, 0.3, 0.3]),
        (
            {"schedule": "step", "milestones": [LENGTH, 3 * LENGTH], "schedule_unit": "step"},
            [0.1, 0.1, 0.01, 0.01, 0.01, 0.01],
        ),
    ],
)
def test_milestones_and_final_ratio_set_the_learning_rate(options, factors):
    result = fit(network(), samples(), num_epochs=6, **USUAL, **options)

    rates = result.history["learning_rate"].tolist()
    assert rates == pytest.approx([0.05 * factor for factor in factors])


def test_a_schedule_with_milestones_can_be_extended(tmp_path):
    common = {"schedule": "step", "milestones": [1], "checkpoint": tmp_path, **USUAL}
    whole = fit(network(), samples(), num_epochs=3, **(common | {"checkpoint": None}))
    fit(network(), samples(), num_epochs=2, **common)

    result = fit(network(), samples(), num_epochs=3, **common)

    assert result.history["train_loss"].tolist() == whole.history["train_loss"].tolist()
