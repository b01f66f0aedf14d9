"""K-FAC in the training loop: by name, resumed, with everything else that a step has."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ritz.optim import KFAC, IterateAverage, KFACPreconditioner
from ritz.training import fit, register_optimizer


def data(count=24):
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=noise)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


SHORT = {"factor_every": 2, "inverse_every": 4}


@pytest.mark.parametrize("name", ["kfac", "ekfac"])
@pytest.mark.parametrize("fisher", ["empirical", "monte_carlo", "ggn"])
def test_fit_trains_by_name(name, fisher):
    model = network()
    settings = SHORT | {"lr": 0.1, "delta": 0.1, "fisher": fisher}
    result = fit(
        model, data(), optimizer=name, num_epochs=15, batch_size=8, optimizer_settings=settings
    )
    losses = result.history["train_loss"]
    assert losses[-1] < losses[0] / 2


def test_fit_takes_the_steps_of_a_plain_loop():
    x, y = data()
    expected = network()
    optimizer = KFAC(expected, lr=0.05, delta=0.1, **SHORT)
    for _ in range(4):
        optimizer.zero_grad()
        cross_entropy(expected(x), y).backward()
        optimizer.step()
    model = network()
    fit(
        model, [(x, y)], optimizer="kfac", num_epochs=4,
        optimizer_settings={"lr": 0.05, "delta": 0.1} | SHORT,
    )  # fmt: skip
    assert torch.equal(flat(model), flat(expected))


@pytest.mark.parametrize("settings", [{}, {"kind": "ekfac", "fisher": "monte_carlo"}])
def test_a_resumed_run_is_bit_for_bit_the_same(settings, tmp_path):
    options = {
        "optimizer": "kfac",
        "optimizer_settings": SHORT | {"lr": 0.05} | settings,
        "batch_size": 8,
        "average_from": 2,
        "accumulate": 2,
        "clip_norm": 1.0,
    }
    whole, model = network(), network()
    fit(whole, data(), num_epochs=5, **options)
    fit(model, data(), num_epochs=3, checkpoint=tmp_path / "run", **options)
    model = network()
    fit(model, data(), num_epochs=5, checkpoint=tmp_path / "run", **options)
    assert torch.equal(flat(model), flat(whole))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains(precision):
    model = network()
    result = fit(
        model, data(), optimizer="kfac", num_epochs=10, batch_size=8, precision=precision,
        clip_norm=5.0, optimizer_settings=SHORT | {"lr": 0.1, "delta": 0.1},
    )  # fmt: skip
    assert result.status.ok
    losses = result.history["train_loss"]
    assert losses[-1] < 0.8 * losses[0]


def test_a_preconditioned_optimiser_and_an_average_train():
    model = network()

    def make(params):
        optimizer = torch.optim.AdamW(params, lr=0.02)
        KFACPreconditioner(optimizer, model, delta=0.1, **SHORT)
        return optimizer

    result = fit(model, data(), optimizer=make, num_epochs=10, batch_size=8, average_from=5)
    losses = result.history["train_loss"]
    assert losses[-1] < losses[0] / 2


def test_a_factory_with_a_parameter_called_model_gets_the_model():
    seen = []

    def make(model, lr=0.1):
        seen.append(model)
        return torch.optim.SGD(model.parameters(), lr=lr)

    register_optimizer("made_with_a_model")(make)
    model = network()
    fit(model, data(), optimizer="made_with_a_model", num_epochs=1)
    fit(model, data(), optimizer=make, num_epochs=1)
    assert seen == [model, model]


def test_an_average_can_be_attached_to_kfac():
    model = network()
    optimizer = KFAC(model, lr=0.05, **SHORT)
    average = IterateAverage(optimizer, start=2)
    fit(model, data(), optimizer=optimizer, average=average, num_epochs=3, batch_size=8)
    assert average.count > 2


def test_a_wrong_setting_lists_what_kfac_takes():
    with pytest.raises(ValueError, match=r"optimizer kfac has no setting 'eps'; it has lr, delta"):
        fit(network(), data(), optimizer="kfac", optimizer_settings={"eps": 1e-8})
