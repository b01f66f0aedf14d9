from functools import partial

import pytest
import torch
from curvature.networks import seeded, small
from processes import run_processes
from torch import nn
from torch.nn import functional

from ritz.curvature import Risk, curvature_operator
from ritz.measures import curvature_variance, shrinkage
from ritz.testing import assert_within_stderr

N, INPUTS, CLASSES = 36, 3, 3
KINDS = ["hessian", "ggn"]


network = partial(small, seed=3)


def data(n=N):
    x = torch.randn(n, INPUTS, generator=seeded(0), dtype=torch.float64)
    return 2 * x, torch.randint(CLASSES, (n,), generator=seeded(1))


@pytest.fixture(scope="module")
def risk():
    return Risk(network(), functional.cross_entropy, data(), batch_size=10, l2=0.2)


@pytest.fixture(scope="module")
def dense(risk):
    """The matrices of all samples, without the L2 term, ``(N, P, P)`` by kind."""
    x, y = data()
    plain = [
        Risk(risk.model, functional.cross_entropy, (x[i : i + 1], y[i : i + 1])) for i in range(N)
    ]
    return {
        kind: torch.stack([curvature_operator(one, kind, engine="eager").dense() for one in plain])
        for kind in KINDS
    }


def covariance(matrices):
    """The matrix of the quadratic form V."""
    mean = matrices.mean(0)
    return (matrices @ matrices).mean(0) - mean @ mean


def units(risk, count, seed=5):
    block = torch.randn(risk.space.size, count, generator=seeded(seed), dtype=torch.float64)
    return block / block.norm(dim=0)


@pytest.mark.parametrize("kind", KINDS)
def test_variance_along_directions_is_exact_for_single_samples(risk, dense, kind):
    vectors = units(risk, 3)
    found = curvature_variance(risk, matrix=kind, along=vectors, group_size=1)
    exact = (vectors * (covariance(dense[kind]) @ vectors)).sum(0)
    torch.testing.assert_close(found.mean, exact)
    assert torch.equal(found.stderr, torch.zeros(3, dtype=torch.float64))
    assert (found.method, found.num_products, found.seed) == ("single samples", 3, None)
    assert_within_stderr(curvature_variance(risk, matrix=kind, along=vectors[:, 0]), exact[:1])


@pytest.mark.parametrize("group_size", [1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_variance_is_within_four_standard_errors_of_dense(risk, dense, kind, group_size):
    found = curvature_variance(
        risk, matrix=kind, group_size=group_size, num_probes=16, generator=seeded(7)
    )
    exact = float(covariance(dense[kind]).trace()) / risk.space.size
    assert_within_stderr(found, exact)
    assert 0 < float(found.stderr) < 0.5 * exact
    assert found.num_products == len(found.samples) == 16
    assert ("left out" in found.method) == (group_size == 5)


@pytest.mark.parametrize("group_size", [2, 4, 5])
def test_variance_from_groups_is_unbiased_with_a_correct_standard_error(dense, group_size):
    """Dense arithmetic over many draws of the groups, beside what one draw says of its error."""
    vectors = torch.linalg.qr(dense["hessian"][0]).Q[:, :2]
    products = dense["hessian"] @ vectors  # (N, P, 2)
    exact = (vectors * (covariance(dense["hessian"]) @ vectors)).sum(0)
    generator, found, told = seeded(11), [], []
    num_groups = N // group_size
    for _ in range(4000):
        order = torch.randperm(N, generator=generator)[: num_groups * group_size]
        means = products[order].unflatten(0, (num_groups, group_size)).mean(1)
        steps = torch.arange(1, num_groups, dtype=torch.float64)[:, None, None]
        before = means.cumsum(0)[:-1] / steps
        gaps = ((means[1:] - before).square() * steps / (steps + 1)).sum(1)
        gaps *= group_size * (N - 1) / N
        found.append(gaps.mean(0))
        unseen = (N - num_groups) / (N - 1)
        told.append(gaps.var(0) / (num_groups - 1) * unseen)
    samples = torch.stack(found)
    off = (samples.mean(0) - exact).abs()
    assert bool((off < 4 * samples.std(0) / 4000**0.5).all())
    # Samples of unlike size spread the groups, but a sum over all of them less: on the safe side.
    ratio = torch.stack(told).mean(0) / samples.var(0)
    assert bool((ratio > 0.8).all())
    assert bool((ratio < 6.0).all())


def test_variance_from_groups_along_a_direction_has_a_standard_error(risk, dense):
    vectors = units(risk, 2)
    found = curvature_variance(risk, along=vectors, group_size=3, generator=seeded(2))
    assert_within_stderr(found, (vectors * (covariance(dense["hessian"]) @ vectors)).sum(0))
    assert bool((found.stderr > 0).all())
    assert found.seed == 2


@pytest.mark.parametrize("batch_size", [2, 6, 18])
def test_variance_of_batches_without_replacement_has_the_stated_factor(risk, dense, batch_size):
    v = units(risk, 1)
    variance = float(curvature_variance(risk, along=v, group_size=1).mean[0])
    products = (dense["hessian"] @ v)[:, :, 0]
    generator = seeded(4)
    gaps = torch.stack(
        [
            products[torch.randperm(N, generator=generator)[:batch_size]].mean(0) - products.mean(0)
            for _ in range(2000)
        ]
    )
    squares = gaps.square().sum(1)
    expected = variance * (1 / batch_size - 1 / N) * N / (N - 1)
    assert abs(float(squares.mean()) - expected) < 4 * float(squares.std()) / 2000**0.5


def test_matrix_of_one_batch_is_the_mean_over_its_samples(risk, dense):
    """The resampling above in its own terms: a batch is a risk of its own."""
    order = torch.randperm(N, generator=seeded(4))[:6]
    v = units(risk, 1)
    part = curvature_operator(risk.samples(order), "hessian", engine="eager")
    expected = (dense["hessian"][order].mean(0) + 0.2 * torch.eye(risk.space.size)) @ v
    torch.testing.assert_close(part @ v, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_shrinkage_equals_the_dense_value(risk, dense, kind):
    sizes = (1, 4, 12, N)
    found = shrinkage(
        risk, batch_sizes=sizes, matrix=kind, num_probes=24, group_size=1, generator=seeded(6)
    )
    mean, size = dense[kind].mean(0), risk.space.size
    centred = mean - torch.eye(size) * mean.trace() / size
    d2 = float(centred.square().sum())
    assert_within_stderr(found.signal, d2)
    spread = float((dense[kind] - mean).square().sum((1, 2)).mean())
    rates = torch.tensor([(1 / b - 1 / N) * N / (N - 1) for b in sizes], dtype=torch.float64)
    assert_within_stderr(found.beta, d2 / (d2 + spread * rates))
    assert float(found.beta.mean[-1]) == 1.0
    assert float(found.beta.stderr[-1]) == 0.0
    assert found.beta.num_products == 48
    # beta H + (1 - beta) m I = beta (H + delta I)
    # with the L2 term in H
    beta, m = d2 / (d2 + spread * rates), float(mean.trace()) / size + 0.2
    assert_within_stderr(found.damping, m * (1 - beta) / beta)
    assert float(found.damping.mean[-1]) == 0.0
    assert "beta" in str(found)
    assert "damping" in str(found)


def test_shrinkage_weight_minimises_the_mean_square_error(dense):
    """The beta that least squares over batches would choose, by dense arithmetic."""
    matrices = dense["ggn"]
    mean, size, count = matrices.mean(0), matrices.shape[1], 4
    target = torch.eye(size) * mean.trace() / size
    generator = seeded(9)
    numerator = denominator = 0.0
    for _ in range(3000):
        batch = matrices[torch.randperm(N, generator=generator)[:count]].mean(0)
        numerator += float(((batch - target) * (mean - target)).sum())
        denominator += float((batch - target).square().sum())
    d2 = float((mean - target).square().sum())
    spread = float((matrices - mean).square().sum((1, 2)).mean())
    e2 = spread * (1 / count - 1 / N) * N / (N - 1)
    assert numerator / denominator == pytest.approx(d2 / (d2 + e2), rel=0.02)


def test_variances_repeat_with_the_same_generator(risk):
    one, two = (curvature_variance(risk, group_size=6, num_probes=2) for _ in range(2))
    assert torch.equal(one.samples, two.samples)
    assert one.seed == 0


def test_default_group_size_gives_at_least_128_groups():
    big = Risk(nn.Linear(1, 2).double(), functional.cross_entropy, long_data(700))
    assert curvature_variance(big, num_probes=2).method.startswith("140 random groups of 5")


def long_data(n):
    x = torch.randn(n, 1, generator=seeded(0), dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"group_size": 0}, ValueError, "group_size must be between 1 and 12, got 0"),
        ({"group_size": 13}, ValueError, "group_size must be between 1 and 12, got 13"),
        ({"num_probes": 1}, ValueError, "num_probes must be at least 2, got 1"),
        ({"matrix": "fisher"}, ValueError, "matrix must be one of hessian, ggn; got 'fisher'"),
        ({"along": torch.ones(31).double()}, ValueError, "unit length, got one of length 5.5"),
        ({"along": torch.ones(3).double()}, ValueError, r"along must be \(31,\)"),
    ],
)
def test_error_names_the_wrong_option(risk, bad, error, message):
    with pytest.raises(error, match=message):
        curvature_variance(risk, **bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [([], "batch_sizes must not be empty"), ([0], "batch_sizes must be between 1 and")],
)
def test_error_names_wrong_batch_sizes(risk, bad, message):
    with pytest.raises(ValueError, match=message):
        shrinkage(risk, batch_sizes=bad)


def test_variance_raises_if_samples_have_no_separate_matrices():
    normed = Risk(
        network(nn.BatchNorm1d(4)),
        functional.cross_entropy,
        data(),
        batch_norm="train",
        batch_size=9,
    )
    with pytest.raises(ValueError, match=r"curvature_variance\(\) needs batch_norm="):
        curvature_variance(normed)
    dropped = Risk(network(nn.Dropout()), functional.cross_entropy, data(), dropout="fixed")
    with pytest.raises(ValueError, match="needs dropout='off'"):
        curvature_variance(dropped)
    single = Risk(network(), functional.cross_entropy, data(1))
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        curvature_variance(single)


SHARED = """
from torch import nn
from torch.nn import functional
from ritz.curvature import Risk
from ritz.measures import rank_bound
from ritz.measures import sharpness
from ritz.measures import batch_prediction, curvature_variance

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
data = torch.randn(17, 3).double(), torch.randint(3, (17,))
split, alone = (Risk(model, functional.cross_entropy, data, batch_size=6, sharing=sharing)
                for sharing in ("split", "none"))
assert rank_bound(split) == rank_bound(alone)
found, same = (sharpness(risk, num_steps=3, num_probes=2, engine="eager", matrix="hessian")
               for risk in (split, alone))
torch.testing.assert_close(found.rows[0].trace.mean, same.rows[0].trace.mean)
try:
    curvature_variance(split)
except ValueError as error:
    assert "needs sharing='none', got 'split'" in str(error)
else:
    raise AssertionError("samples of other processes must not be left out")
assert float(curvature_variance(alone, num_probes=2)) > 0
try:
    batch_prediction(split, batch_sizes=(2,))
except ValueError as error:
    assert "batch_prediction() needs sharing='none', got 'split'" in str(error)
else:
    raise AssertionError("batches of other processes must not be left out")
assert float(batch_prediction(alone, batch_sizes=(2,), num_vectors=2).best.value.mean) > 0
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_variance_raises_if_processes_share_the_samples(tmp_path):
    assert run_processes(SHARED, 2, tmp_path) == [(0, ""), (0, "")]


@pytest.mark.parametrize("group_size", [1, 4])
def test_variance_raises_if_the_loss_is_not_a_mean_over_samples(group_size):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return self.net(x - x.mean(0))

    weighted = nn.CrossEntropyLoss(weight=torch.linspace(0.1, 3, CLASSES, dtype=torch.float64))
    for model, loss_fn in ((network(), weighted), (Centred(), functional.cross_entropy)):
        with pytest.raises(ValueError, match="mean of the losses of its samples"):
            curvature_variance(Risk(model, loss_fn, data()), group_size=group_size)
