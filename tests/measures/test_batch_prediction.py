"""Predictions of the largest eigenvalue of batches against brute force on a linear model."""

from dataclasses import replace

import pytest
import torch
from curvature.networks import seeded, small
from torch import nn
from torch.nn.functional import cross_entropy

import ritz
from ritz.curvature import Risk, hessian
from ritz.measures import _batch_prediction as module
from ritz.measures import batch_prediction, batch_variance, curvature_variance, measured_batches
from ritz.measures._batch_subspace import outliers
from ritz.measures._groups import share_of_variance
from ritz.spectra import eigenpairs

N, P = 256, 30
SIZES = (8, 32, 128)


def half_square(outputs, target):
    return 0.5 * (outputs - target).square().sum(1).mean()


def inputs(seed=0):
    generator = seeded(1000 + seed)
    scales = torch.cat([torch.tensor([2.0, 1.6, 1.2, 0.9]), torch.full((P - 4,), 0.3)])
    x = torch.randn(N, P, generator=generator, dtype=torch.float64) * scales
    return x @ torch.linalg.qr(torch.randn(P, P, generator=generator, dtype=torch.float64))[0]


def linear_risk(x, **options):
    """Linear regression, whose samples have the Hessians ``x_i x_i'`` at every point."""
    model = nn.Linear(x.shape[1], 1, bias=False, dtype=torch.float64)
    target = torch.zeros(len(x), 1, dtype=torch.float64)
    return Risk(model, half_square, (x, target), batch_size=64, **options)


@pytest.fixture
def traced(monkeypatch):
    """Trace the products of small batches: with hundreds of batches, this takes less time."""
    monkeypatch.setattr(module, "TUNING", replace(module.TUNING, traced=1))


def brute_force(x, sizes=SIZES, num_draws=1000):
    """Value, spread and overlap of many batches, ``(3, S)``, and the matrices of the samples."""
    matrices = x[:, :, None] * x[:, None, :]
    leading = torch.linalg.eigh(matrices.mean(0)).eigenvectors[:, -1]
    columns = []
    for size in sizes:
        order = torch.rand(num_draws, len(x), generator=seeded(5)).argsort(1)[:, :size]
        weights = torch.zeros(num_draws, len(x), dtype=torch.float64).scatter_(1, order, 1 / size)
        means = (weights @ matrices.flatten(1)).view(num_draws, P, P)
        values, vectors = torch.linalg.eigh(means)
        overlap = (vectors[:, :, -1] @ leading).square().mean()
        # The change of first order has mean zero over all batches: without it the mean of large
        # batches, which moves by little else, is known as well as a prediction is.
        first = (means - matrices.mean(0)) @ leading @ leading
        mean = (values[:, -1] - first).mean()
        columns.append(torch.stack([mean, values[:, -1].std(), overlap]))
    return torch.stack(columns, 1), matrices


def parts(curve):
    return curve.value, curve.spread, curve.overlap


def covered(estimate, truth):
    low, high = estimate.interval(0.95)
    return (truth >= low) & (truth <= high)


@pytest.mark.parametrize("group_size", [1, 4])
def test_predictions_agree_with_all_batches_of_a_linear_model(group_size):
    hits, deviations = [], []
    for seed in range(3):
        x = inputs(seed)
        truth, _ = brute_force(x)

        found = batch_prediction(
            linear_risk(x), batch_sizes=SIZES, num_vectors=8, group_size=group_size,
            generator=seeded(seed),
        )  # fmt: skip

        hits += [covered(part, row) for part, row in zip(parts(found.best), truth, strict=True)]
        deviations.append(found.best.value.mean / truth[0] - 1)
    # 9 curves of three sizes, with intervals of 95 %.
    assert float(torch.stack(hits).double().mean()) > 0.85
    assert float(torch.stack(deviations).mean(0).abs().max()) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [1, 4])
def test_intervals_contain_the_exact_values_over_thirty_seeds(group_size):
    hits = {0.95: [], 0.999: []}
    for seed in range(30):
        x = inputs(seed)
        truth, matrices = brute_force(x, num_draws=4000)
        found = batch_prediction(
            linear_risk(x), batch_sizes=SIZES, num_vectors=8, group_size=group_size,
            generator=seeded(seed),
        )  # fmt: skip
        gaps = matrices - matrices.mean(0)
        variance = gaps.square().sum((1, 2)).mean() / P
        known = zip((*parts(found.best), found.variance), (*truth, variance), strict=True)
        for estimate, exact in known:
            for level, column in hits.items():
                low, high = estimate.interval(level)
                column.append(((exact >= low) & (exact <= high)).reshape(-1))
    assert float(torch.cat(hits[0.95]).double().mean()) >= 0.88
    assert float(torch.cat(hits[0.999]).double().mean()) >= 0.99


def test_variances_and_bulk_are_those_of_the_samples():
    x = inputs()
    _, matrices = brute_force(x, sizes=(8,), num_draws=2)
    gaps = matrices - matrices.mean(0)
    values, vectors = torch.linalg.eigh(matrices.mean(0))

    found = batch_prediction(linear_risk(x), batch_sizes=(8,), num_vectors=8, group_size=1)

    along = (gaps @ vectors[:, -1]).square().sum(1).mean()
    # Exact for groups of one sample, except for the error of the eigenvector.
    assert abs(float(found.along) - along) <= float(found.along.truncation) + 1e-9 * along
    assert abs(float(found.along) - along) < 1e-4 * along
    assert bool(covered(found.variance, gaps.square().sum((1, 2)).mean() / P))
    low, high = found.bulk.interval(0.99)
    assert low <= values[:-8].mean() <= high
    assert float(found.lambda_max) == pytest.approx(float(values[-1]), rel=1e-4)


def test_the_whole_subspace_gives_the_exact_distribution():
    x = inputs()
    truth, _ = brute_force(x)

    # With all vectors nothing leaks: the bootstrap is brute force itself.
    found = batch_prediction(
        linear_risk(x), batch_sizes=SIZES, num_vectors=P, group_size=1, num_draws=500
    )

    for part, row in zip(parts(found.subspace), truth, strict=True):
        assert float((part.truncation / row).max()) < 0.1
        torch.testing.assert_close(part.mean, row, rtol=0.1, atol=0.02)


def test_a_batch_of_all_samples_is_exact():
    found = batch_prediction(linear_risk(inputs()), batch_sizes=(N,), num_vectors=6)
    for curve in (found.best, found.directional, found.additive):
        assert float(curve.value.mean) == pytest.approx(float(found.lambda_max), rel=1e-6)
        assert float(curve.overlap.mean) == pytest.approx(1.0, abs=1e-6)
    assert float(found.best.spread.mean) == pytest.approx(0.0, abs=1e-9)


def test_an_l2_term_only_shifts_all_values():
    x, options = inputs(), {"batch_sizes": (16, 64), "num_vectors": 6}
    plain = batch_prediction(linear_risk(x), **options)
    shifted = batch_prediction(linear_risk(x, l2=0.7), **options)
    for name in ("subspace", "directional", "additive", "multiplicative"):
        one, other = getattr(plain, name), getattr(shifted, name)
        torch.testing.assert_close(other.value.mean, one.value.mean + 0.7, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(other.overlap.mean, one.overlap.mean, rtol=1e-3, atol=1e-3)


def test_sizes_below_a_group_are_measured():
    found = batch_prediction(
        linear_risk(inputs()), batch_sizes=(4, 64), num_vectors=6, group_size=16
    )
    assert found.best.source == ("measured", "subspace")
    assert found.cost > found.num_products
    truth, _ = brute_force(inputs(), sizes=(4,))
    assert abs(found.best.value.mean[0] - truth[0, 0]) < 4 * found.best.value.stderr[0]
    # The predicted curve itself uses no batch.
    assert found.subspace.source == ("subspace", "subspace")


def test_measured_batches_agree_with_brute_force():
    x = inputs()
    truth, matrices = brute_force(x)
    leading = torch.linalg.eigh(matrices.mean(0)).eigenvectors[:, -1]

    found = measured_batches(
        linear_risk(x), batch_sizes=(*SIZES, N), leading=leading, num_batches=8
    )

    for part, row in zip(parts(found), truth, strict=True):
        assert bool(((part.mean[:3] - row).abs() < 4 * part.stderr[:3]).all())
    assert found.spread.mean[3] == 0
    assert float(found.overlap.mean[3]) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.usefixtures("traced")
def test_the_mean_of_drawn_batches_leaves_out_the_noise_of_first_order():
    # The mean over batches of phi' H_B phi is known, and explains most of how their largest
    # eigenvalues differ: from 20 batches the mean is known better than their spread says.
    x = inputs()
    truth, matrices = brute_force(x, sizes=(8,), num_draws=4000)
    leading, risk = torch.linalg.eigh(matrices.mean(0)).eigenvectors[:, -1], linear_risk(x)

    found = [
        measured_batches(
            risk, batch_sizes=(8,), leading=leading, num_batches=20, generator=seeded(seed)
        )
        for seed in range(30)
    ]

    errors = torch.cat([one.value.mean - truth[0, 0] for one in found])
    plain = float(truth[1, 0]) / 20**0.5
    assert float(errors.square().mean().sqrt()) < 0.75 * plain
    assert abs(float(errors.mean())) < 3 * float(errors.std()) / 30**0.5
    assert sum(bool(covered(one.value, truth[0, :1])) for one in found) >= 25


def test_batches_that_cost_little_are_drawn():
    x = torch.cat([inputs(seed) for seed in range(4)])  # 1,024 samples
    found = batch_prediction(linear_risk(x), batch_sizes=(8, 9, 64), num_vectors=6, group_size=1)
    assert found.best.source == ("measured", "subspace", "subspace")
    # 32 batches of 8 of 1,024 samples, with 16 products each, are four products with all samples.
    assert found.cost - found.num_products < 6
    assert found.trusted["subspace"] == (True, True, True)


@pytest.mark.parametrize("matrix", ["hessian", "ggn"])
def test_indefinite_networks_are_predicted_within_their_spread(matrix):
    x = 2 * torch.randn(120, 3, generator=seeded(0), dtype=torch.float64)
    labels = torch.randint(3, (120,), generator=seeded(1))
    risk = Risk(small(seed=3), cross_entropy, (x, labels), batch_size=40)
    if matrix == "hessian":
        assert float(torch.linalg.eigvalsh(hessian(risk).dense())[0]) < -0.01
    pairs = eigenpairs(ritz.curvature.curvature_operator(risk, matrix), largest=10, certify="none")

    found = batch_prediction(risk, batch_sizes=(12, 48), matrix=matrix, num_vectors=8, pairs=pairs)

    seen = measured_batches(
        risk, batch_sizes=(12, 48), leading=pairs.vectors[:, -1], matrix=matrix, num_batches=12
    )
    assert bool(((found.best.value.mean / seen.value.mean - 1).abs() < 0.15).all())
    assert bool(((found.best.overlap.mean - seen.overlap.mean).abs() < 0.2).all())
    assert found.num_products == 16  # the pairs were given


def test_batch_norm_in_eval_mode_is_supported_and_train_mode_is_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    data = (torch.randn(30, 4), torch.arange(30) % 3)
    found = batch_prediction(Risk(model, cross_entropy, data), batch_sizes=(5,), num_vectors=4)
    assert float(found.best.value.mean) > float(found.lambda_max)
    train = Risk(model, cross_entropy, data, batch_norm="train", batch_size=10)
    with pytest.raises(ValueError, match=r"batch_prediction\(\) needs batch_norm='eval'"):
        batch_prediction(train, batch_sizes=(5,))


def test_the_outlier_equation_is_that_of_the_whole_matrix():
    # One group with a leak into one direction of curvature d: a 3 x 3 matrix without remainder.
    means = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))[None]
    leak = torch.tensor([0.8, -0.5], dtype=torch.float64)
    whole = torch.zeros(3, 3, dtype=torch.float64)
    whole[:2, :2], whole[2, 2] = means[0], 0.9
    whole[2, :2] = whole[:2, 2] = leak
    exact = torch.linalg.eigh(whole)

    value, overlap = outliers(
        means, torch.ones(1, 1).double(), torch.outer(leak, leak)[None], torch.tensor([0.9])
    )

    assert float(value) == pytest.approx(float(exact.eigenvalues[-1]), rel=1e-9)
    assert float(overlap) == pytest.approx(float(exact.eigenvectors[0, -1] ** 2), rel=1e-6)


def test_with_fewer_vectors_the_rest_becomes_a_part_of_the_leak():
    x = inputs()
    risk, seen = linear_risk(x), []
    for count in (5, 10):
        seen.append(batch_prediction(risk, batch_sizes=(16,), num_vectors=count, group_size=1))
    # The truncation of ten vectors covers what five change.
    change = abs(float(seen[0].best.value.mean) - float(seen[1].best.value.mean))
    error = sum(float(one.best.value.error()) for one in seen)
    assert change < error


def test_bars_without_sampling_hold_the_roundoff_of_float32():
    x, model = torch.randn(16, 2, generator=seeded(1)), nn.Linear(2, 2)

    def predict(precision):
        risk = Risk(model, cross_entropy, (x, x.argmax(1)), precision=precision)
        return batch_prediction(risk, batch_sizes=(4,), num_vectors=6, group_size=1)

    found, exact = predict("float32"), predict("float64")

    for name in ("variance", "along"):
        ours, theirs = getattr(found, name), getattr(exact, name)
        assert float(ours.stderr) == 0
        assert 0 < abs(float(ours) - float(theirs)) <= float(ours.error()) < 1e-3 * float(theirs)


def test_variance_of_a_batch_is_that_of_drawn_batches():
    x = inputs()
    risk = linear_risk(x)
    direction = torch.linalg.eigh((x.T @ x) / N).eigenvectors[:, -1]
    single = curvature_variance(risk, along=direction, group_size=1)
    single = replace(single, mean=single.mean[0], stderr=single.stderr[0],
                     truncation=single.truncation[0])  # fmt: skip

    found = batch_variance(single, batch_sizes=(8, 64, N), num_samples=N)

    matrices = x[:, :, None] * x[:, None, :]
    for size, predicted in zip((8, 64), found.mean, strict=False):
        order = torch.rand(4000, N, generator=seeded(2)).argsort(1)[:, :size]
        weights = torch.zeros(4000, N, dtype=torch.float64).scatter_(1, order, 1 / size)
        products = weights @ (matrices @ direction) - (matrices @ direction).mean(0)
        squares = products.square().sum(1)
        assert abs(squares.mean() - predicted) < 4 * squares.std() / 4000**0.5
    assert found.mean[2] == 0
    assert share_of_variance(1, N) == 1
    torch.testing.assert_close(
        batch_variance(single, batch_sizes=(8,)).mean, single.mean / torch.tensor([8.0]).double()
    )


def test_predictions_repeat_with_the_same_generator():
    risk = linear_risk(inputs())
    one, other = (
        batch_prediction(risk, batch_sizes=(8,), num_vectors=4, generator=seeded(3))
        for _ in range(2)
    )
    assert torch.equal(one.best.value.mean, other.best.value.mean)


def test_the_table_names_sources_and_failing_conditions():
    found = batch_prediction(linear_risk(inputs()), batch_sizes=(8, 64), num_vectors=4)
    text = str(found)
    for word in (
        "V(phi_1)",
        "subspace",
        "Use the first three columns",
        "additive model does not apply",
    ):
        assert word in text


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"batch_sizes": ()}, "batch_sizes must not be empty"),
        ({"batch_sizes": (0,)}, "batch_sizes must be"),
        ({"batch_sizes": (N + 1,)}, "batch_sizes must be"),
        ({"num_vectors": 0}, "num_vectors"),
        ({"num_draws": 1}, "num_draws"),
        ({"group_size": N}, "group_size"),
        ({"matrix": "fisher"}, "matrix"),
    ],
)
def test_bad_values_name_the_argument(bad, message):
    with pytest.raises(ValueError, match=message):
        batch_prediction(linear_risk(inputs()), **({"batch_sizes": (8,)} | bad))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {"batch_sizes": 8},
            r"batch_sizes must be a sequence of integers such as \(8, 64\), got 8",
        ),
        ({"batch_sizes": "8"}, "batch_sizes must be a sequence of integers"),
        ({"pairs": 3}, "pairs must be a result of eigenpairs"),
        ({"risk": nn.Linear(2, 1)}, "risk must be ritz.Risk"),
    ],
)
def test_bad_types_name_the_argument(bad, message):
    settings = {"risk": linear_risk(inputs()), "batch_sizes": (8,)} | bad
    with pytest.raises(TypeError, match=message):
        batch_prediction(settings.pop("risk"), **settings)


def test_a_negative_definite_matrix_has_batches_of_negative_eigenvalues():
    x = inputs()[:40, :3]

    def minus(outputs, target):
        return -0.5 * (outputs - target).square().sum(1).mean()

    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    risk = Risk(model, minus, (x, torch.zeros(40, 1, dtype=torch.float64)))

    found = batch_prediction(risk, batch_sizes=(8, 40), num_draws=400)

    matrices = -x[:, :, None] * x[:, None, :]
    exact = torch.linalg.eigvalsh(matrices.mean(0))[-1]
    order = torch.rand(4000, 40, generator=seeded(5)).argsort(1)[:, :8]
    drawn = torch.linalg.eigvalsh(torch.stack([matrices[rows].mean(0) for rows in order]))[:, -1]
    assert float(found.best.value.mean[1]) == pytest.approx(float(exact), rel=1e-12)
    assert float(found.best.value.mean[0]) == pytest.approx(float(drawn.mean()), rel=0.1)
    assert "the mean eigenvalue is not positive" in str(found)


def test_a_matrix_of_zeros_has_no_shift_and_no_division_by_zero():
    def flat(outputs, target):
        return (outputs - target).mean()

    risk = Risk(nn.Linear(3, 1), flat, (torch.ones(9, 3), torch.zeros(9, 1)))

    found = batch_prediction(risk, batch_sizes=(2, 9))

    assert found.best.value.mean.tolist() == [0, 0]
    assert bool(found.directional.value.mean.isnan().all())
    assert "V(phi_1) = 0" in str(found)


@pytest.mark.parametrize("missing", [0, 1, 5])
def test_probes_that_span_the_complement_have_no_sampling_error(missing):
    x = inputs()
    matrices = x[:, :, None] * x[:, None, :]

    found = batch_prediction(
        linear_risk(x), batch_sizes=(8,), num_vectors=P - missing, group_size=1
    )

    exact = (matrices - matrices.mean(0)).square().sum((1, 2)).mean() / P
    assert float(found.variance.error()) < 1e-9
    assert float(found.variance) == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_of_all_samples_is_as_uncertain_as_its_eigenvalue(dtype):
    x = inputs()
    model = nn.Linear(P, 1, bias=False, dtype=dtype)
    risk = Risk(model, half_square, (x.to(dtype), torch.zeros(N, 1, dtype=dtype)), batch_size=64)

    found = batch_prediction(risk, batch_sizes=(N,))

    exact = torch.linalg.eigvalsh(x.T @ x / N)[-1]
    for part in (found.best, found.directional):
        assert abs(float(part.value.mean[0] - exact)) <= float(part.value.error()[0])


def test_a_repeated_batch_size_is_measured_twice():
    found = batch_prediction(linear_risk(inputs()), batch_sizes=(4, 64, 4), group_size=16)

    assert found.best.source == ("measured", "subspace", "measured")
    values, curve = found.best.value.mean, found.subspace.value.mean
    assert float(values[2]) == pytest.approx(float(values[0]), rel=0.5)
    assert float(values[2]) != float(curve[2])


def test_pairs_without_vectors_or_of_another_size_are_refused():
    risk = linear_risk(inputs())
    pairs = eigenpairs(hessian(risk), largest=4, vectors=False)
    with pytest.raises(ValueError, match="pairs must have vectors"):
        batch_prediction(risk, batch_sizes=(8,), pairs=pairs)
    few = eigenpairs(hessian(risk), largest=4)
    with pytest.raises(ValueError, match="pairs must have at least 6 vectors, got 4"):
        batch_prediction(risk, batch_sizes=(8,), num_vectors=6, pairs=few)


def heavy_risk(n=640, dtype=torch.float64):
    """Return a linear model of whose samples one in forty has nearly all curvature."""
    x = torch.randn(n, 6, dtype=dtype, generator=seeded(5))
    x = x * torch.where(torch.arange(n) % 40 == 0, 4.0, 0.3)[:, None].to(dtype)
    return linear_risk(x)


@pytest.mark.usefixtures("traced")
def test_predictions_that_cannot_be_trusted_are_printed_in_brackets():
    sizes = (2, 8, 32, 320, 640)
    risk = heavy_risk()
    found = batch_prediction(risk, batch_sizes=sizes, num_vectors=6, group_size=1)
    leading = torch.linalg.eigh(hessian(risk) @ torch.eye(6, dtype=torch.float64))[1][:, -1]

    real = measured_batches(
        risk, batch_sizes=sizes, leading=leading, num_batches=60, generator=seeded(8)
    )

    off = found.directional.value.mean / real.value.mean - 1
    # It overstates small batches several times, and says so; where it is trusted it holds.
    assert float(off[0]) > 1
    trusted = torch.tensor(found.trusted["directional"])
    assert trusted.tolist() == [False, False, False, True, True]
    assert bool((off[trusted].abs() < 0.2).all())
    for place, size in enumerate(sizes):
        row = next(line for line in str(found).splitlines() if line.startswith(f"  {size:>8,}"))
        number = f"{found.directional.value.mean[place]:.4g}"
        assert (f"({number})" in row) == (not trusted[place])
    # The others hold everywhere or are in brackets, too.
    for name in ("subspace", "additive", "multiplicative"):
        gap = getattr(found, name).value.mean / real.value.mean - 1
        slack = 0.15 + 3 * real.value.stderr / real.value.mean
        assert bool((gap.abs() < slack)[torch.tensor(found.trusted[name])].all()), name
    assert found.best.source[0] == "measured"
    assert not found.trusted["subspace"][0]


def test_batches_of_samples_without_curvature_are_measured_in_float32():
    # Most samples are at zero curvature to roundoff: their matrices are not symmetric to roundoff
    # of themselves, but are to that of all data.
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(64, 6, generator=seeded(1))
    with torch.no_grad():
        model[2].weight.mul_(60)
    labels = model(x).argmax(1)
    labels[:3] = (labels[:3] + 1) % 3
    risk = Risk(model, cross_entropy, (x, labels))
    pairs = eigenpairs(hessian(risk), largest=1)

    found = measured_batches(
        risk, batch_sizes=[1, 2], leading=pairs.vectors[:, 0].contiguous(), num_batches=20
    )

    assert bool(found.value.mean.isfinite().all())
    # A mean of batches is at least the eigenvalue of all data.
    assert float(found.value.mean[0]) > 0.5 * float(pairs.values[0])


@pytest.mark.parametrize(
    ("scale", "message"), [(0.0, "leading must not be zero"), (3.0, "norm 1, got 3")]
)
def test_a_leading_vector_that_is_not_a_unit_vector_is_refused(scale, message):
    leading = scale * torch.eye(P, dtype=torch.float64)[0]
    with pytest.raises(ValueError, match=message):
        measured_batches(linear_risk(inputs()), batch_sizes=[5], leading=leading)
