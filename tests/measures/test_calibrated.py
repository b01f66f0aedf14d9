"""The calibrated largest eigenvalue does not change with the scale of layers or of outputs."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ritz import load, save
from ritz.curvature import Risk, hessian
from ritz.measures import calibrated_sharpness, excess_risk, fold_batch_norm, scaled, temperature


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Identity(), nn.Dropout(0.3), nn.BatchNorm1d(8),
                          nn.ReLU(), nn.Linear(8, 3)).double()  # fmt: skip
    x = torch.randn(64, 5, dtype=torch.float64)
    model(x)  # running statistics
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


@pytest.fixture(autouse=True)
def _own_random_numbers():
    with torch.random.fork_rng(devices=[]):
        yield


def test_the_value_is_that_of_the_folded_and_scaled_network():
    model = network()
    result = measure(model)
    folded = fold_batch_norm(model)
    found = temperature(risk_on(data(2))(folded))
    matrix = hessian(risk_on(data(1))(scaled(folded, found)), engine="eager").dense()

    assert result.lambda_max == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=1e-6)
    assert (result.num_folded, result.unfolded, result.status.outcome) == (1, (), "converged")


def test_the_scale_of_layers_and_of_outputs_leaves_it_unchanged():
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


def test_it_can_be_saved_and_names_norms_that_are_left(tmp_path):
    model = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(5), nn.Linear(5, 3)).double().eval()
    with torch.no_grad():
        model[2].weight.copy_(torch.linspace(-1, 1, 15).view(3, 5))
    batch = data(3)
    labels = (model(batch[0]) + torch.randn(48, 3, dtype=torch.float64)).argmax(1)
    pair = batch[0], labels
    result = calibrated_sharpness(model, risk_on(pair), risk_on(pair))
    save(result, tmp_path / "result.safetensors")

    assert str(load(tmp_path / "result.safetensors")) == str(result)
    assert result.unfolded == ("1",)


def test_the_terms_of_the_excess_risk_add_up():
    model = network()
    train, held = risk_on(data(1))(model), risk_on(data(2))(model)
    terms = excess_risk(train, held, minimum=0.1)

    assert terms.generalisation == pytest.approx(held.loss() - train.loss())
    assert terms.optimisation == pytest.approx(train.loss() - 0.1)
    with pytest.raises(ValueError, match="minimum"):
        excess_risk(train, held, minimum=10.0)
