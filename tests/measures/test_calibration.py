"""Temperatures, the calibrated largest eigenvalue, and the excess risk."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import ritz
from ritz.curvature import Risk, hessian
from ritz.measures import calibrated_sharpness, excess_risk, fold_batch_norm, scaled, temperature


def identity(classes):
    model = nn.Linear(classes, classes, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(classes))
    return model


def risk_of(logits, labels, **options):
    """A risk whose outputs are these."""
    return Risk(identity(logits.shape[1]), cross_entropy, (logits, labels), **options)


@pytest.fixture(scope="module")
def drawn():
    """Labels drawn from the probabilities that the logits say: calibrated, but for chance."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(400, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return logits, labels


@pytest.mark.parametrize("factor", [1e-3, 0.3, 1.0, 4.0, 1e4])
def test_temperature_recovers_a_factor_of_the_logits(drawn, factor):
    logits, labels = drawn
    own = temperature(risk_of(logits, labels))
    found = temperature(risk_of(factor * logits, labels))
    found.raise_if_failed()
    assert found.temperature == pytest.approx(factor * own.temperature, rel=1e-8)
    assert found.loss_scaled == pytest.approx(own.loss_scaled)
    assert found.after.error == pytest.approx(own.after.error, abs=1e-8)
    assert own.temperature == pytest.approx(1, abs=0.15)


def test_temperature_is_the_best_of_a_fine_grid(drawn):
    logits, labels = drawn
    found = temperature(risk_of(3 * logits, labels))
    grid = torch.logspace(-2, 2, 4001, dtype=torch.float64)
    losses = torch.stack([cross_entropy(3 * logits / t, labels) for t in grid])
    best = int(losses.argmin())
    assert grid[best - 1] < found.temperature < grid[best + 1]
    assert found.loss_scaled <= float(losses[best])
    assert found.loss == pytest.approx(float(cross_entropy(3 * logits, labels)))


def test_the_gradient_is_zero_at_the_optimum(drawn):
    logits, labels = drawn
    found = temperature(risk_of(3 * logits, labels))
    log = torch.tensor(math.log(found.temperature), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(cross_entropy(3 * logits / log.exp(), labels), log)
    assert abs(float(slope)) < 1e-10
    assert float(slope) == pytest.approx(found.slope, abs=1e-14)
    assert found.status.outcome == "converged"


def test_calibration_error_equals_one_computed_by_hand():
    # Confidences 0.9, 0.9, 0.6, 0.6; right, wrong, right, right.
    chances = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.6, 0.4], [0.4, 0.6]], dtype=torch.float64)
    found = temperature(risk_of(chances.log(), torch.tensor([0, 0, 0, 1])), num_bins=4)
    assert found.before.error == pytest.approx(0.5 * 0.4 + 0.5 * 0.4)
    assert found.before.counts.tolist() == [0, 0, 2, 2]
    torch.testing.assert_close(found.before.confidence[2:], torch.tensor([0.6, 0.9]).double())
    assert found.before.accuracy[2:].tolist() == [1.0, 0.5]
    assert found.before.accuracy[:2].isnan().all()
    assert found.before.edges.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_bin_includes_its_upper_edge():
    logits = torch.zeros(3, 2, dtype=torch.float64)
    logits[2, 0] = 800.0  # a confidence of exactly one
    logits[1, 0] = 0.1
    found = temperature(risk_of(logits, torch.tensor([0, 1, 0])), num_bins=2)
    assert found.before.counts.tolist() == [1, 2]


def test_temperature_lowers_the_calibration_error_of_an_overconfident_network(drawn):
    logits, labels = drawn
    found = temperature(risk_of(5 * logits, labels))
    assert found.temperature > 3
    assert found.after.error < 0.4 * found.before.error  # chance alone leaves 0.07
    assert "Temperature" in str(found)
    assert "calibration error" in str(found)
    assert found.num_samples == 400


def test_temperature_does_not_depend_on_the_batch_size(drawn):
    whole, cut = (temperature(risk_of(*drawn, batch_size=size)) for size in (400, 37))
    assert whole.temperature == pytest.approx(cut.temperature, rel=1e-12)
    assert whole.before.error == pytest.approx(cut.before.error, rel=1e-12)


def test_temperature_leaves_out_ignored_labels(drawn):
    logits, labels = drawn
    some = labels.clone()
    some[100:] = -100
    found = temperature(risk_of(logits, some))
    assert found.num_samples == 100
    assert float(found) == pytest.approx(float(temperature(risk_of(logits[:100], labels[:100]))))


def test_temperature_counts_positions_as_samples(drawn):
    logits, labels = drawn
    model = nn.Conv1d(5, 5, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(5)[:, :, None])
    rows = logits.reshape(40, 10, 5).transpose(1, 2)
    found = temperature(Risk(model, cross_entropy, (rows, labels.reshape(40, 10))))
    assert float(found) == pytest.approx(float(temperature(risk_of(logits, labels))), rel=1e-9)


def test_a_scaled_model_divides_its_outputs_and_shares_its_weights(drawn):
    logits, labels = drawn
    model = identity(5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = temperature(Risk(model, cross_entropy, (4 * logits, labels)))
    calibrated = scaled(model, found)
    torch.testing.assert_close(calibrated(logits), model(logits) / found.temperature)
    assert Risk(calibrated, cross_entropy, (4 * logits, labels)).loss() == pytest.approx(
        found.loss_scaled
    )
    assert calibrated.model.weight is model.weight
    assert torch.equal(model.weight, before["weight"])
    again = temperature(Risk(calibrated, cross_entropy, (4 * logits, labels)))
    assert float(again) == pytest.approx(1, rel=1e-8)
    assert "temperature=" in repr(calibrated)


def test_temperature_reports_max_steps(drawn):
    found = temperature(risk_of(1e6 * drawn[0], drawn[1]), max_steps=2)
    assert found.status.outcome == "max_steps"
    with pytest.raises(ritz.NotConvergedError, match="increase max_steps"):
        found.raise_if_failed()


def test_temperature_raises_if_all_samples_are_classified_correctly(drawn):
    logits, _ = drawn
    with pytest.raises(ValueError, match="optimal temperature is 0; got 400 correct ones"):
        temperature(risk_of(logits, logits.argmax(1)))


def test_temperature_raises_if_outputs_are_worse_than_chance(drawn):
    logits, _ = drawn
    with pytest.raises(ValueError, match="outputs better than chance"):
        temperature(risk_of(logits, logits.argmin(1)))


def test_outputs_must_be_finite(drawn):
    class Masked(nn.Linear):
        def forward(self, x):
            outputs = super().forward(x)
            return outputs.masked_fill(torch.arange(5) == 4, -math.inf)

    logits, labels = drawn
    with pytest.raises(ValueError, match="risk must have finite outputs"):
        temperature(Risk(Masked(5, 5).double(), cross_entropy, (logits, labels % 4)))


def test_targets_must_be_labels(drawn):
    logits, _ = drawn
    with pytest.raises(TypeError, match=r"risk must have class labels.*batch 0"):
        temperature(Risk(identity(5), mse_loss, (logits, logits)))


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({"num_bins": 0}, "num_bins must be at least 1"),
        ({"atol": -1.0}, "atol must be finite and at least 0"),
        ({"max_steps": 1}, "max_steps must be at least 2"),
    ],
)
def test_arguments_are_checked(drawn, bad, match):
    with pytest.raises(ValueError, match=match):
        temperature(risk_of(*drawn), **bad)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_scaled_raises_for_a_temperature_that_is_not_positive(bad):
    with pytest.raises(ValueError, match="temperature must be finite and above 0"):
        scaled(nn.Linear(2, 2), bad)


def test_scaled_model_raises_if_the_model_returns_no_tensor():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(TypeError, match="model must return a tensor, got tuple"):
        scaled(Pair(), 2.0)(torch.ones(1))


# ------------------------------------------------------------------------------------------
# The largest eigenvalue of a calibrated network, and the excess risk.


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Identity(), nn.Dropout(0.3), nn.BatchNorm1d(8),
                              nn.ReLU(), nn.Linear(8, 3)).double()  # fmt: skip
        model(torch.randn(64, 5, dtype=torch.float64))  # running statistics
    return model.eval()


def data(seed, count=48):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    # Labels that the outputs say something about, but not everything.
    noise = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        return x, (2 * network()(x) + noise).argmax(1)


def risk_on(batch):
    return lambda model: Risk(model, cross_entropy, batch)


def measure(model):
    return calibrated_sharpness(model, risk_on(data(1)), risk_on(data(2)), rtol=1e-8)


def test_calibrated_sharpness_is_that_of_the_folded_and_scaled_network():
    model = network()
    result = measure(model)
    folded = fold_batch_norm(model)
    found = temperature(risk_on(data(2))(folded))
    matrix = hessian(risk_on(data(1))(scaled(folded, found)), engine="eager").dense()

    assert result.lambda_max == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-6)
    assert (result.num_folded, result.unfolded, result.status.outcome) == (1, (), "converged")


def test_calibrated_sharpness_does_not_depend_on_the_scale_of_layers_and_outputs():
    model = network()
    other = copy.deepcopy(model)
    with torch.no_grad():
        # A layer before batch norm times 3, with its statistics.
        other[0].weight.mul_(3.0)
        other[0].bias.mul_(3.0)
        other[3].running_mean.mul_(3.0)
        other[3].running_var.mul_(9.0).add_(8 * other[3].eps)
    first, second = measure(model), measure(other)
    raw = [float(torch.linalg.eigvalsh(hessian(risk_on(data(1))(m), engine="eager").dense())[-1])
           for m in (model, other)]  # fmt: skip

    assert abs(raw[0] / raw[1] - 1) > 0.01
    assert second.lambda_max == pytest.approx(first.lambda_max, rel=1e-6)


def test_calibrated_sharpness_names_norms_that_are_not_folded():
    model = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(5), nn.Linear(5, 3)).double().eval()
    with torch.no_grad():
        model[2].weight.copy_(torch.linspace(-1, 1, 15).view(3, 5))
    noise = torch.randn(48, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    inputs = data(3)[0]
    pair = inputs, (model(inputs) + noise).argmax(1)

    result = calibrated_sharpness(model, risk_on(pair), risk_on(pair))

    assert result.unfolded == ("1",)


def test_the_terms_of_the_excess_risk_add_up():
    model = network()
    train, held = risk_on(data(1))(model), risk_on(data(2))(model)
    terms = excess_risk(train, held, minimum=0.1)

    assert terms.generalisation == pytest.approx(held.loss() - train.loss())
    assert terms.optimisation == pytest.approx(train.loss() - 0.1)
    with pytest.raises(ValueError, match="minimum"):
        excess_risk(train, held, minimum=10.0)
