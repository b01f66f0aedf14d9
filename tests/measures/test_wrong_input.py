"""Wrong arguments of the measures raise one line that names the argument."""

import pytest
import torch
from curvature.networks import seeded
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD

from ritz.curvature import Risk, hessian
from ritz.measures import (
    bulk_edge,
    calibrated_sharpness,
    critical_sharpness,
    curvature_ratio,
    excess_risk,
    filter_normalized,
    gradient_overlap,
    landscape,
    landscape2d,
    least_damping,
    measured_batches,
    random_direction,
    ritz_directions,
    scaled,
    sharpness,
    stable_rate,
    temperature,
    trainable_rate,
)
from ritz.spectra import lanczos

model = nn.Sequential(nn.Linear(3, 2))
x = torch.randn(12, 3, generator=seeded(0))
y = torch.randint(0, 2, (12,), generator=seeded(1))
risk = Risk(model, cross_entropy, (x, y))
run = lanczos(hessian(risk), num_steps=4, vectors=True)
other = lanczos(torch.eye(5), num_steps=2, vectors=True)
u, v = run.vectors[:, 0], run.vectors[:, 1]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: bulk_edge(risk), "spectrum must be a Spectrum from lanczos"),
        (lambda: bulk_edge([3]), "spectrum must be a Spectrum from lanczos"),
        (lambda: bulk_edge(run, variance="a"), "variance must be a number, got str"),
        (lambda: calibrated_sharpness(model, risk, risk), "risk must be a function from a model"),
        (lambda: calibrated_sharpness(model, lambda m: 3, lambda m: 3), r"held_out\(model\) must"),
        (lambda: critical_sharpness(model), "risk must be ritz.Risk"),
        (lambda: curvature_ratio("a", 1.0), "largest must be numbers or a tensor, got 'a'"),
        (
            lambda: curvature_ratio(torch.ones(2), torch.ones(3)),
            r"must broadcast, got shapes \(2,\)",
        ),
        (lambda: excess_risk(model, risk), "train must be a ritz.Risk, got Sequential"),
        (lambda: excess_risk(risk, risk, minimum="a"), "minimum must be a number, got str"),
        (lambda: filter_normalized(model, u), "risk must be ritz.Risk"),
        (lambda: gradient_overlap(risk, other), "pairs must have vectors of 8 rows, got 5"),
        (
            lambda: gradient_overlap(risk, run, gradient=torch.ones(8, 2)),
            r"gradient must be \(8,\)",
        ),
        (lambda: landscape(model, run), "risk must be ritz.Risk"),
        (lambda: landscape(risk, run, test=model), "test must be a ritz.Risk, got Sequential"),
        (lambda: landscape2d(risk, u, v, distance=(1, 2, 3)), "distance must have one entry per"),
        (lambda: landscape2d(risk, u, v, names=("a",)), "names must have one entry per direction"),
        (lambda: least_damping(3.0, variance=1.0), r"outliers must be \(k,\), got \(\)"),
        (
            lambda: least_damping([1.0], variance=float("nan")),
            "variance must be at least 0, got nan",
        ),
        (
            lambda: least_damping([1.0, 2.0], variance=torch.ones(3)),
            "outliers, variance must broad",
        ),
        (
            lambda: measured_batches(risk, batch_sizes=[4], leading=run),
            "leading must be a torch.Te",
        ),
        (lambda: random_direction(model), "risk must be ritz.Risk"),
        (lambda: ritz_directions(risk), "spectrum must be a Spectrum"),
        (lambda: scaled(3, 1.0), "model must be a torch.nn.Module, got int"),
        (lambda: scaled(model, "a"), "temperature must be a number, got str"),
        (lambda: sharpness(risk, matrix=3), "matrix must be one of hessian, ggn; got 3"),
        (lambda: sharpness(risk, batch_norm=3), "batch_norm must be one of .*; got 3"),
        (lambda: stable_rate(None), "curvature must be numbers or a tensor, got None"),
        (lambda: stable_rate(torch.ones(3), full=torch.ones(2)), "curvature, full must broadcast"),
        (lambda: stable_rate(1.0, optimizer=SGD([u], lr=1.0)), "optimizer must be .*; got SGD$"),
        (lambda: temperature(model), "risk must be ritz.Risk"),
        (lambda: trainable_rate(risk, SGD([u], lr=1.0), batch_size=2, start=1.0), "got SGD$"),
    ],
)
def test_a_wrong_argument_is_named_in_one_line(call, match):
    with pytest.raises((TypeError, ValueError), match=match) as caught:
        call()

    assert "\n" not in str(caught.value)


def test_a_list_of_outliers_is_accepted():
    expected = least_damping(torch.tensor([2.0, 3.0]), variance=1.0)

    torch.testing.assert_close(least_damping([2.0, 3.0], variance=1.0), expected)


def test_measured_batches_print_a_row_per_size():
    curve = measured_batches(risk, batch_sizes=[4, 12], leading=run.vectors[:, -1], num_batches=2)

    lines = str(curve).splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["lambda_1", "spread", "overlap", "from"]
    assert lines[2].endswith("measured")


def test_many_overlaps_are_printed_as_ten_rows():
    wide = Risk(
        nn.Linear(20, 1), mse_loss, (torch.randn(9, 20, generator=seeded(2)), torch.ones(9, 1))
    )
    overlap = gradient_overlap(wide, lanczos(hessian(wide), num_steps=21, vectors=True))

    text = str(overlap)
    assert bool((overlap.overlaps.truncation <= 1).all())
    assert text.count(" ± ") == 10
    assert f"and {len(overlap.values) - 10} smaller eigenvalues" in text
