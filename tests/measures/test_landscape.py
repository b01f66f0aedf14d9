"""Landscapes and the directions of their lines and planes."""

import copy
import dataclasses
import math

import pytest
import torch
from processes import run_processes
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import ritz
from ritz.curvature import Risk, hessian
from ritz.measures import (
    filter_normalized,
    landscape,
    landscape2d,
    random_direction,
    ritz_directions,
)

KINDS = ("none", "split")


def draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def labels(n, classes, seed):
    return torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(seed))


def filled(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))
    return model


@pytest.fixture(scope="module")
def regression():
    """Linear regression, whose Hessian is 2 X'X / N: everything is known."""
    x, y = draw(30, 4, seed=1), draw(30, 1, seed=2)
    model = filled(nn.Linear(4, 1, bias=False).double(), 3)
    return Risk(model, mse_loss, (x, y), batch_size=7), 2 * x.T @ x / 30


@pytest.fixture(scope="module")
def normed():
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)).double()
    filled(model, 4)
    train = Risk(model, cross_entropy, (draw(24, 3, seed=5), labels(24, 4, 6)), batch_size=12)
    test = Risk(model, cross_entropy, (draw(10, 3, seed=7), labels(10, 4, 8)), batch_size=10)
    return train, test


@pytest.fixture(scope="module")
def risk(normed):
    return normed[0]


@pytest.fixture(scope="module")
def spectrum(regression):
    return ritz.lanczos(regression[1], num_steps=4, vectors=True)


def test_ritz_directions_are_the_vectors_of_the_extreme_values():
    found = ritz.lanczos(torch.diag(torch.tensor([-3.0, 0.5, 2.0, 7.0])), num_steps=4, vectors=True)
    chosen = ritz_directions(found)
    assert list(chosen) == ["largest", "smallest", "smallest magnitude"]
    for name, row in (("largest", 3), ("smallest", 0), ("smallest magnitude", 1)):
        torch.testing.assert_close(chosen[name].abs(), torch.eye(4)[row], atol=1e-5, rtol=0)


def test_random_direction_has_unit_length_and_depends_on_the_seed(risk):
    u = random_direction(risk)
    assert float(u.norm()) == pytest.approx(1)
    assert torch.equal(u, random_direction(risk))
    assert not torch.equal(u, random_direction(risk, generator=torch.Generator().manual_seed(1)))


def test_filters_have_the_norm_of_the_weights_and_biases_are_zero(risk):
    u = filter_normalized(risk, random_direction(risk))
    weights, parts = risk.params, risk.space.unflatten(u)
    for name, part in parts.items():
        if part.ndim == 2:
            torch.testing.assert_close(part.norm(dim=1), weights[name].norm(dim=1))
        else:
            assert not part.any()


def test_filter_normalisation_does_not_depend_on_the_length_of_the_direction(risk):
    u = random_direction(risk)
    torch.testing.assert_close(filter_normalized(risk, 100 * u), filter_normalized(risk, u))


def test_a_filter_that_is_zero_stays_zero(risk):
    u = risk.space.unflatten(random_direction(risk))
    u["0.weight"][2] = 0
    found = risk.space.unflatten(filter_normalized(risk, risk.space.flatten(u)))
    assert not found["0.weight"][2].any()
    assert torch.isfinite(found["0.weight"]).all()


def test_landscape_of_linear_regression_is_a_parabola(regression):
    risk, matrix = regression
    u = draw(4, seed=9)
    found = landscape(risk, u, distance=2.0, num_points=9)
    slope, curvature = risk.gradient() @ u, u @ matrix @ u
    expected = risk.loss() + slope * found.t + curvature * found.t**2 / 2
    torch.testing.assert_close(found.loss[0], expected)
    assert (float(found.t[0]), float(found.t[4]), float(found.t[8])) == (-2.0, 0.0, 2.0)
    torch.testing.assert_close(found.norms, u.norm()[None])


def test_second_difference_along_a_ritz_vector_equals_its_ritz_value(regression, spectrum):
    risk, _ = regression
    found = landscape(risk, spectrum, num_points=3, distance=0.5)
    assert found.names == ("largest", "smallest")
    second = (found.loss[:, 0] + found.loss[:, 2] - 2 * found.loss[:, 1]) / 0.25
    torch.testing.assert_close(second, spectrum.values[[-1, 0]])


def test_second_difference_of_a_network_equals_the_dense_curvature(normed):
    risk, _ = normed
    op = hessian(risk, engine="eager")
    full = ritz.lanczos(op, num_steps=op.shape[0], vectors=True)
    found = landscape(risk, full, num_points=3, distance=1e-3)
    assert found.names == ("largest", "smallest", "smallest magnitude")
    second = (found.loss[:, 0] + found.loss[:, 2] - 2 * found.loss[:, 1]) / 1e-6
    chosen = full.values[[-1, 0, int(full.values.abs().argmin())]]
    torch.testing.assert_close(second, chosen, rtol=0, atol=1e-5)


def test_eigenpairs_are_directions_named_by_their_eigenvalues(regression):
    risk, hessian_ = regression
    pairs = ritz.eigenpairs(hessian_, largest=2)

    found = landscape(risk, pairs, num_points=3)

    assert found.names == tuple(
        f"eigenvalue {value:.6g}" for value in reversed(pairs.values.tolist())
    )
    by_hand = landscape(risk, pairs.vectors.flip(1), num_points=3)
    torch.testing.assert_close(found.loss, by_hand.loss)
    with pytest.raises(ValueError, match="got eigenpairs with vectors=False"):
        landscape(risk, ritz.eigenpairs(hessian_, largest=1, vectors=False))


def test_centre_of_a_landscape_is_the_loss_of_the_risk(normed):
    risk, test = normed
    found = landscape(risk, random_direction(risk), num_points=3, test=test)
    assert float(found.loss[0, 1]) == pytest.approx(risk.loss(), rel=1e-14)
    assert float(found.test_loss[0, 1]) == pytest.approx(test.loss(), rel=1e-14)


def test_accuracy_is_the_fraction_of_correct_predictions(normed):
    risk, test = normed
    u = random_direction(risk)
    found = landscape(risk, u, num_points=2, distance=3.0, test=test)
    model = copy.deepcopy(risk.model).eval()
    for column, t in enumerate((-3.0, 3.0)):
        state = risk.space.unflatten(risk.theta + t * u)
        for part, accuracy in ((risk, found.accuracy), (test, found.test_accuracy)):
            (x, y), _ = part.join_batches()
            chosen = torch.func.functional_call(model, state, (x,)).argmax(1)
            assert float(accuracy[0, column]) == float((chosen == y).double().mean())


def test_squared_error_has_no_accuracy(regression):
    found = landscape(regression[0], torch.eye(4, dtype=torch.float64), num_points=2)
    assert found.accuracy is found.test_accuracy is found.test_loss is found.batch_norm is None
    assert found.names == ("direction 1", "direction 2", "direction 3", "direction 4")
    assert found.loss.shape == (4, 2)


def test_a_model_that_returns_its_loss_has_no_accuracy():
    class Own(nn.Linear):
        def forward(self, x, labels):
            return {"loss": cross_entropy(super().forward(x), labels)}

    batch = {"x": draw(6, 3, seed=1), "labels": labels(6, 2, 2)}
    found = landscape(risk := Risk(Own(3, 2).double(), None, batch), risk.theta, num_points=2)
    assert found.accuracy is None
    assert found.loss.shape == (1, 2)


def test_one_output_has_no_accuracy():
    # The largest of one output is always the first.
    model = filled(nn.Linear(4, 1).double(), 3)
    data = (draw(6, 4, seed=1), labels(6, 2, seed=2))
    risk = Risk(model, lambda outputs, y: mse_loss(outputs[:, 0], y.double()), data)
    assert landscape(risk, risk.theta, num_points=2).accuracy is None


def test_labels_that_are_not_along_the_first_axis_give_no_accuracy():
    def loss(outputs, target):
        return cross_entropy(outputs.transpose(1, 2), target)

    data = (draw(4, 5, 3, seed=1), labels(20, 2, 2).reshape(4, 5))
    risk = Risk(nn.Linear(3, 2).double(), loss, data)
    assert landscape(risk, risk.theta, num_points=2).accuracy is None


def test_the_l2_term_is_part_of_the_loss():
    x, y = draw(6, 2, seed=1), draw(6, 1, seed=2)
    model = filled(nn.Linear(2, 1).double(), 3)
    risk = Risk(model, mse_loss, (x, y), l2=0.3)
    u = draw(3, seed=4)
    found = landscape(risk, u, num_points=2)
    for column, t in enumerate((-1.0, 1.0)):
        assert float(found.loss[0, column]) == pytest.approx(risk.at(risk.theta + t * u).loss())


def test_recomputed_statistics_come_from_the_training_data_at_each_point(normed):
    risk, test = normed
    u = random_direction(risk)
    found = landscape(risk, u, num_points=2, test=test, batch_norm="recomputed")
    assert found.batch_norm == "recomputed"
    model = copy.deepcopy(risk.model).eval()
    for column, t in enumerate((-1.0, 1.0)):
        there = risk.with_batch_norm("recomputed").at(risk.theta + t * u)
        assert float(found.loss[0, column]) == pytest.approx(there.loss(), rel=1e-12)
        (x, y), _ = test.join_batches()
        state = there.params | there.constants()
        expected = float(cross_entropy(torch.func.functional_call(model, state, (x,)), y))
        assert float(found.test_loss[0, column]) == pytest.approx(expected, rel=1e-12)


def test_test_data_use_the_statistics_of_a_recomputed_risk(normed):
    risk, test = normed
    u = random_direction(risk)
    asked = landscape(risk, u, num_points=2, test=test, batch_norm="recomputed")
    own = landscape(risk.with_batch_norm("recomputed"), u, num_points=2, test=test)
    torch.testing.assert_close(own.test_loss, asked.test_loss)


def test_train_mode_uses_the_statistics_of_each_batch(normed):
    risk, test = normed
    u = random_direction(risk)
    found = landscape(risk, u, num_points=2, test=test, batch_norm="train")
    there = [part.with_batch_norm("train").at(risk.theta - u).loss() for part in normed]
    assert [float(found.loss[0, 0]), float(found.test_loss[0, 0])] == pytest.approx(there)


def test_landscape_leaves_out_ignored_labels():
    target = torch.tensor([0, -100, 1, 1])
    x = torch.tensor([[2.0, 0.0], [0.0, 9.0], [0.0, 1.0], [3.0, 0.0]]).double()
    model = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    risk = Risk(model, cross_entropy, (x, target))
    found = landscape(risk, risk.theta, num_points=3, distance=0.5)
    assert float(found.accuracy[0, 1]) == pytest.approx(2 / 3)


def test_a_plane_of_linear_regression_is_a_quadratic_form(regression):
    risk, matrix = regression
    u, v = draw(4, seed=10), draw(4, seed=11)
    found = landscape2d(risk, u, v, distance=(2.0, 1.0), num_points=5, names=("u", "v"))
    s, t = torch.meshgrid(found.s, found.t, indexing="ij")
    steps = s[..., None] * u + t[..., None] * v
    expected = risk.loss() + steps @ risk.gradient() + (steps @ matrix * steps).sum(-1) / 2
    torch.testing.assert_close(found.loss, expected)
    assert (float(found.s[-1]), float(found.t[-1]), found.names) == (2.0, 1.0, ("u", "v"))


def test_axes_of_a_plane_equal_the_landscapes_along_lines(normed):
    risk, test = normed
    u, v = (random_direction(risk, generator=torch.Generator().manual_seed(k)) for k in (1, 2))
    plane = landscape2d(risk, u, v, num_points=3, test=test)
    lines = landscape(risk, {"u": u, "v": v}, num_points=3, test=test)
    for name in ("loss", "accuracy", "test_loss", "test_accuracy"):
        torch.testing.assert_close(getattr(plane, name)[:, 1], getattr(lines, name)[0])
        torch.testing.assert_close(getattr(plane, name)[1], getattr(lines, name)[1])


def test_progress_counts_the_points(regression):
    class Watcher:
        def start(self, label, total):
            self.total = total

        def update(self, done, note=""):
            self.done, self.note = done, note

        def finish(self):
            self.finished = True

    watcher = Watcher()
    landscape(
        regression[0], torch.eye(4, dtype=torch.float64)[:, :2], num_points=3, progress=watcher
    )
    assert (watcher.total, watcher.done, watcher.finished) == (6, 6, True)
    assert watcher.note.startswith("loss ")


SHARED = """
    from torch import nn
    from torch.nn.functional import cross_entropy
    from ritz.curvature import Risk
    from ritz.measures import temperature
    from ritz.measures import random_direction
    from ritz.measures import landscape

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)).double()
    inputs = torch.randn(22, 3).double()
    target = model.eval()(inputs).argmax(1)
    target[::5] = (target[::5] + 1) % 4
    data = inputs, target
    for sharing in ("split", "none"):
        risk = Risk(model, cross_entropy, data, batch_size=5, sharing=sharing)
        found = landscape(risk, random_direction(risk), num_points=3, batch_norm="recomputed",
                          test=risk)
        ritz.save(found, f"{folder}/landscape-{sharing}-{rank}")
        ritz.save(temperature(risk), f"{folder}/temperature-{sharing}-{rank}")
    dist.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.parametrize("count", [2, 3])
def test_two_processes_give_the_landscape_of_one(count, tmp_path):
    for code, error in run_processes(SHARED, count, tmp_path):
        assert code == 0, error
    for rank in range(count):
        own, split = (ritz.load(tmp_path / f"landscape-{kind}-{rank}") for kind in KINDS)
        for name in ("loss", "accuracy", "test_loss", "test_accuracy"):
            torch.testing.assert_close(getattr(split, name), getattr(own, name))
        own, split = (ritz.load(tmp_path / f"temperature-{kind}-{rank}") for kind in KINDS)
        assert split.temperature == pytest.approx(own.temperature, rel=1e-9)
        assert split.before.error == pytest.approx(own.before.error)


# Errors


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"num_points": 1}, "num_points must be at least 2"),
        ({"distance": 0.0}, "distance must be finite and above 0, got 0"),
        ({"distance": math.inf}, "distance must be finite and above 0, got inf"),
        ({"batch_norm": "eval mode"}, "batch_norm must be one of train, eval, recomputed"),
    ],
)
def test_arguments_are_checked(regression, bad, match):
    with pytest.raises(ValueError, match=match):
        landscape(regression[0], torch.ones(4, dtype=torch.float64), **bad)


@pytest.mark.parametrize(
    ("directions", "error", "match"),
    [
        (torch.ones(4), TypeError, r"direction 1 must be torch.float64"),
        (torch.ones(5).double(), ValueError, r"direction 1 must be \(4,\), got"),
        (torch.ones(4, 1, 1).double(), ValueError, r"directions must be \(4,\) or \(4, k\)"),
        ({"u": torch.ones(4, 2).double()}, ValueError, r"u must be \(4,\), got \(4, 2\)"),
        ({"u": torch.zeros(4).double()}, ValueError, "u must not be zero"),
        ({"u": torch.full((4,), math.nan).double()}, ValueError, "u must be finite"),
        ({}, ValueError, "directions must have at least one direction"),
        ([1.0], TypeError, "directions must be a Spectrum, Eigenpairs, a tensor or a dict"),
    ],
)
def test_directions_are_checked(regression, directions, error, match):
    with pytest.raises(error, match=match):
        landscape(regression[0], directions, num_points=2)


def test_the_error_for_a_spectrum_without_vectors_says_how_to_get_them(regression):
    bare = ritz.lanczos(regression[1], num_steps=3)
    with pytest.raises(ValueError, match="pass vectors=True"):
        landscape(regression[0], bare)


def test_distributed_ritz_vectors_raise_as_directions(spectrum):
    half = dataclasses.replace(spectrum, vectors=spectrum.vectors[:2])
    with pytest.raises(ValueError, match="rows, got 2: use placement"):
        ritz_directions(half)


def test_test_risk_with_other_parameters_raises(regression, normed):
    with pytest.raises(ValueError, match="test must have the same parameters as risk"):
        landscape(regression[0], torch.ones(4, dtype=torch.float64), test=normed[1])


def test_parallel_directions_raise(regression):
    u = torch.ones(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="second must not be parallel to first"):
        landscape2d(regression[0], u, -2 * u)
