"""Quantities of monitors against Cockpit, on the networks of its own examples."""

import warnings

import pytest
import torch
from backpack import extend
from torch import nn
from torch.nn.functional import cross_entropy

from ritz.training import CurvatureMonitor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # cockpit imports pkg_resources, which is deprecated
    from cockpit import Cockpit, quantities
    from cockpit.utils.schedules import linear

BATCH, STEPS, RATE = 64, 4, 1e-2
# Cockpit adds these to what it divides by.
VARIANCE, CURVATURE = 1e-5, 1e-7


def perceptron():
    """The model of its first example."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def convolutional():
    """The model of its second example, for 28 x 28 images."""
    return nn.Sequential(
        nn.Conv2d(1, 11, 5), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Conv2d(11, 16, 5), nn.ReLU(), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 80), nn.ReLU(), nn.Linear(80, 10),
    )  # fmt: skip


def made(build):
    torch.manual_seed(0)
    return build()


def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 1, 28, 28, generator=generator)
    return x, torch.randint(10, (BATCH,), generator=generator)


def by_cockpit(build, kinds):
    """Return what Cockpit tracks in each step of SGD on one batch."""
    (x, y), model, loss_fn = batch(), extend(made(build)), extend(nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    cockpit = Cockpit(model.parameters(), quantities=kinds)
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = model(x)
        loss = loss_fn(outputs, y)
        losses = cross_entropy(outputs, y, reduction="none")
        info = {"batch_size": BATCH, "individual_losses": losses, "loss": loss,
                "optimizer": optimizer}  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with cockpit(step, info=info):
                loss.backward(create_graph=cockpit.create_graph(step))
        optimizer.step()
    return cockpit.get_output()


def by_ritz(build, names, epsilon, **options):
    (x, y), model = batch(), made(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    monitor = CurvatureMonitor((x, y), quantities=names, epsilon=epsilon, **options)
    monitor.attach(optimizer)
    records = []
    for _ in range(STEPS):
        records.append(monitor.measure(model, optimizer))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return records


def whole(value):
    """Return the norm of a list of norms of layers."""
    return torch.tensor(value, dtype=torch.float64).norm().item()


@pytest.mark.parametrize("build", [perceptron, convolutional])
def test_every_instrument_shows_what_cockpit_shows(build):
    s = linear(1)
    theirs = by_cockpit(build, [
        quantities.Loss(s), quantities.GradNorm(s), quantities.CABS(s), quantities.NormTest(s),
        quantities.InnerTest(s), quantities.OrthoTest(s), quantities.EarlyStopping(s),
        quantities.MeanGSNR(s), quantities.UpdateSize(s), quantities.Distance(s),
        quantities.Alpha(s), quantities.HessMaxEV(s), quantities.HessTrace(s),
        quantities.TICTrace(s), quantities.TICDiag(s),
    ])  # fmt: skip
    names = ["gradient_norm", "cabs", "norm_test", "inner_product_test", "orthogonality_test",
             "early_stopping", "gsnr", "update_size", "distance", "alpha", "lambda_max",
             "trace"]  # fmt: skip
    ours = by_ritz(build, names, VARIANCE, rtol=1e-3, max_products=30)
    informed = by_ritz(build, ["tic_trace", "tic_diagonal"], CURVATURE)
    for step in range(STEPS - 1):
        one, found, then = theirs[step], ours[step] | informed[step], ours[step + 1]
        pairs = {
            "Loss": found["watched_loss"],
            "CABS": found["cabs"],
            "NormTest": found["norm_test"],
            "InnerTest": found["inner_product_test"],
            "OrthoTest": found["orthogonality_test"],
            "EarlyStopping": found["early_stopping"],
            "MeanGSNR": found["gsnr"],
            "TICTrace": found["tic_trace"],
            "TICDiag": found["tic_diagonal"],
            "Alpha": then["alpha"],
        }
        for name, value in pairs.items():
            # Single precision, summed in another order.
            assert value == pytest.approx(float(one[name]), rel=2e-4), (step, name)
        assert found["gradient_norm"] == pytest.approx(whole(one["GradNorm"]), rel=1e-5)
        # Its power iteration stops when a step changes the value by less than 0.1 %, which was up
        # to 7 % too early here. Both are lower bounds.
        assert found["lambda_max"] == pytest.approx(float(one["HessMaxEV"]), rel=0.1)
        assert found["lambda_max"] > 0.999 * float(one["HessMaxEV"])
        assert found["trace"] == pytest.approx(sum(one["HessTrace"]), rel=1e-4)
        assert then["update_size"] == pytest.approx(whole(one["UpdateSize"]), rel=1e-4)
        assert found["distance"] == pytest.approx(whole(one["Distance"]), rel=1e-4, abs=1e-9)


def test_histograms_count_the_same_entries():
    records = by_ritz(perceptron, ["gradient_histogram", "gradient_weight_histogram"], 0.0)
    for step in range(2):
        found = records[step]
        reach, across = found["gradient_reach"], found["weight_reach"]
        s = linear(1)
        theirs = by_cockpit(perceptron, [
            quantities.GradHist1d(s, bins=64, range=(-reach, reach)),
            quantities.GradHist2d(s, bins=(64, 64), range=((-reach, reach), (-across, across))),
        ])[step]  # fmt: skip
        assert sum(found["gradient_histogram"]) == BATCH * 7850
        gap = torch.tensor(found["gradient_histogram"]) - torch.tensor(theirs["GradHist1d"]["hist"])
        # An entry at the edge of two bins may round to either.
        assert float(gap.abs().sum()) <= 1e-3 * BATCH * 7850
        mine = torch.tensor(found["gradient_weight_histogram"])
        gap = mine - torch.tensor(theirs["GradHist2d"]["hist"])
        assert float(gap.abs().sum()) <= 1e-3 * BATCH * 7850
