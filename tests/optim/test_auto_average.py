"""The rule by which averaging begins and training stops."""

import json

import pytest
import torch
from optim.walks import assert_near, assert_same, averages, network, tail, walked
from torch.optim import SGD, Adam

from ritz.optim import AutoAverage, IterateAverage


def auto(**options):
    model = network(torch.float64)
    return AutoAverage(Adam(model.parameters()), **options)


def phases(found, metrics):
    """Where it is after each evaluation."""
    seen = []
    for metric in metrics:
        stop = found.update(metric)
        assert stop == found.finished
        seen.append("finished" if stop else "averaging" if found.averaging else "training")
    return seen


def test_averaging_begins_and_training_ends_after_patience_evaluations():
    found = auto(patience=3)
    assert phases(found, [5, 4, 4.5, 4.2]) == ["training"] * 4
    assert phases(found, [3, 3, 3.1, 9]) == ["training"] * 3 + ["averaging"]
    assert (found.best, found.best_before, found.waited) == (None, 3.0, 0)
    # The averaged weights have a best of their own, even where that is worse.
    assert phases(found, [8, 7, 7, 7]) == ["averaging"] * 4
    assert phases(found, [6, 6, 6, 6]) == ["averaging"] * 3 + ["finished"]
    assert (found.best, found.best_before) == (6.0, 3.0)
    assert found.update(0.0)
    assert found.best == 6.0


def test_patience_defaults_to_ten_evaluations():
    assert phases(auto(), [1.0] * 22) == ["training"] * 10 + ["averaging"] * 11 + ["finished"]


def test_mode_max_and_min_delta_define_an_improvement():
    found = auto(patience=2, mode="max", min_delta=0.5)
    assert phases(found, [1, 1.6, 2.0, 2.1]) == ["training"] * 3 + ["averaging"]
    assert found.best_before == 1.6
    assert phases(auto(patience=1), [2, 1, 1]) == ["training", "training", "averaging"]
    assert phases(auto(patience=1, mode="max"), [2, 1]) == ["training", "averaging"]


def test_average_started_by_patience_has_the_iterates_since_then():
    model = network(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1)
    found = AutoAverage(optimizer, patience=2)
    before = walked(model, optimizer, 4)
    with found.applied(model):  # the weights themselves, before
        assert_near(model.parameters(), before[-1], rtol=0, atol=0)
    assert phases(found, [1, 1, 1])[-1] == "averaging"
    assert found.average.count == 1
    expected = tail(walked(model, optimizer, 6))
    assert_near(averages(model, optimizer), expected)
    with found.applied(model):
        assert_near(model.parameters(), expected)


def test_auto_average_accepts_a_user_defined_average():
    optimizer = SGD(network().parameters(), lr=0.1)
    average = IterateAverage(optimizer, start=None, kind="ema", interval=3)
    assert AutoAverage(average).average is average
    assert AutoAverage(optimizer).average is average


def test_repr_of_auto_average_shows_its_phase():
    found = auto(patience=2)
    assert "AutoAverage(patience=2, mode='min': waiting, best None, 0 evalu" in repr(found)
    phases(found, [1, 1, 1, 3])
    assert "averaging, best 3.0, 0 evaluations" in repr(found)
    phases(found, [3, 3])
    assert "finished" in repr(found)


def test_auto_average_resumes_bit_for_bit():
    runs = []
    for interrupted in (False, True):
        model = network()
        optimizer = Adam(model.parameters(), lr=0.05)
        found = AutoAverage(optimizer, patience=2)
        for epoch, metric in enumerate([3, 2, 2, 2, 5, 4, 4, 4]):
            walked(model, optimizer, 3)
            if interrupted and epoch in (2, 5):
                states = optimizer.state_dict(), json.loads(json.dumps(found.state_dict()))
                twin = network(seed=4)
                twin.load_state_dict(model.state_dict())
                model, optimizer = twin, Adam(twin.parameters(), lr=0.05)
                found = AutoAverage(optimizer, patience=2)
                optimizer.load_state_dict(states[0])
                found.load_state_dict(states[1])
            found.update(metric)
        assert found.finished
        runs.append([*averages(model, optimizer), torch.tensor(found.average.count)])
    assert_same(*runs)


@pytest.mark.parametrize("metric", [float("nan"), torch.tensor(float("nan"))])
def test_metric_nan_raises(metric):
    with pytest.raises(ValueError, match="metric must be a number, got nan"):
        auto().update(metric)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"patience": 0}, "patience must be at least 1"),
        ({"mode": "best"}, "mode must be one of min, max"),
        ({"min_delta": -1.0}, "min_delta must be at least 0"),
    ],
)
def test_error_names_the_setting_that_is_out_of_range(bad, match):
    with pytest.raises(ValueError, match=match):
        auto(**bad)


def test_auto_average_raises_for_an_average_with_a_start():
    optimizer = SGD(network().parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"average must have start=None, got start=5"):
        AutoAverage(IterateAverage(optimizer, start=5))
    with pytest.raises(TypeError, match="average must be an IterateAverage or an optimiser, got S"):
        AutoAverage(network())


def test_auto_average_refuses_a_state_of_another_mode_or_object():
    found = auto()
    with pytest.raises(ValueError, match="state_dict must be one of AutoAverage, got one without"):
        found.load_state_dict({"best": 1.0})
    with pytest.raises(ValueError, match="state_dict must have mode='min', got 'max'"):
        found.load_state_dict(auto(mode="max").state_dict())
