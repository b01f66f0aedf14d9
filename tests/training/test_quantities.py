"""Each quantity of a monitor against dense matrices and sums over single samples."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from training.examples import samples

import ritz
from ritz.measures import bulk_edge, rank_degeneracy
from ritz.optim import weight_norms
from ritz.training import CurvatureMonitor, fit, quantity_names, register_quantity, scalars
from ritz.training._quantities import QUANTITIES
from ritz.training._snapshot import TUNING

COUNT, BATCH, RATE = 24, 6, 0.2


def relu_network(seed=0):
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2)
    return model


def stepped(quantities, **options):
    """Return what a monitor measures after a few steps of SGD with momentum, and the rest."""
    x, y = samples(COUNT)
    data, model = (x.double(), y), relu_network()
    initial = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    monitor = CurvatureMonitor(data, quantities=quantities, **options)
    monitor.attach(optimizer)
    for _ in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    return monitor.measure(model, optimizer), model, data, initial, before


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def sample_gradients(model, data):
    rows = []
    for x, y in zip(*data, strict=True):
        loss = cross_entropy(model(x[None]), y[None])
        rows.append(flat(torch.autograd.grad(loss, list(model.parameters()))))
    return torch.stack(rows)


def dense(model, data, kind="hessian"):
    risk = ritz.Risk(model, cross_entropy, data)
    return ritz.curvature.curvature_operator(risk, kind, engine="eager").dense()


GRADIENTS = ("gradient_norm", "gradient_variance", "layer_variance", "noise_scale",
             "signal_to_noise", "gsnr", "norm_test", "inner_product_test", "orthogonality_test",
             "cabs", "early_stopping", "tic_trace", "tic_diagonal")  # fmt: skip


@pytest.mark.parametrize(("size", "epsilon"), [(None, 0.0), (BATCH, 1e-3)])
def test_quantities_of_gradients_are_sums_over_single_samples(size, epsilon):
    found, model, data, _, _ = stepped(GRADIENTS, train_batch_size=size, epsilon=epsilon)
    rows, n, b = sample_gradients(model, data), COUNT, size or COUNT
    g = rows.mean(0)
    gaps = rows - g
    total, square = gaps.square().sum() / n, g @ g
    variance, along = rows.var(0, correction=0), rows @ g
    alive = (rows != 0).any(0)
    loss = cross_entropy(model(data[0]), data[1]).detach()
    hessian = dense(model, data)
    moment = rows.square().mean(0)
    terms = moment / (hessian.diagonal() + epsilon)
    orthogonal = rows - torch.outer(along, g) / square
    expected = {
        "watched_loss": loss,
        "gradient_norm": g.norm(),
        "gradient_variance": total,
        "noise_scale": total / square,
        "signal_to_noise": b * square / total,
        "gsnr": (g.square() / (variance + epsilon))[alive].mean(),
        "norm_test": (gaps.square().sum() / (n - 1) / b / square).sqrt(),
        "inner_product_test": (along.var() / b).sqrt() / square,
        "orthogonality_test": (orthogonal.square().sum() / (n - 1) / b / square).sqrt(),
        "cabs": RATE * total / loss,
        "early_stopping": 1 - n * (g.square() / (rows.var(0) + epsilon))[alive].mean(),
        "tic_trace": moment.sum() / (hessian.trace() + epsilon),
        "tic_diagonal": terms[alive].sum(),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), rel=1e-9), name
    names = [name for name, _ in model.named_parameters()]
    sizes = [p.numel() for p in model.parameters()]
    for name, part, mean in zip(names, variance.split(sizes), g.split(sizes), strict=True):
        assert found[f"gradient_variance.{name}"] == pytest.approx(float(part.sum()), rel=1e-9)
        assert found[f"gradient_square.{name}"] == pytest.approx(float(mean @ mean), rel=1e-9)


class Positions(nn.Module):
    """Classes at three positions, from an embedding."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        ids = (x.abs() * 10).long().clamp(max=5)[:, :3]
        return self.out(self.table(ids)).transpose(1, 2)


class Recurrent(nn.Module):
    """An LSTM, whose gradients no rule for layers gives."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.lstm(x.view(-1, 3, 2))[0][:, -1])


class Tied(nn.Module):
    """One layer used twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 2, 2), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 3),
    )  # fmt: skip


@pytest.mark.parametrize("build", [relu_network, convolutions, Positions, Recurrent, Tied])
@pytest.mark.parametrize("l2", [0.0, 0.3])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
def test_the_variance_from_norms_of_layers_is_that_over_single_samples(build, l2):
    torch.manual_seed(0)
    model, (x, y) = build().double().eval(), samples(COUNT)
    y = y[:, None].expand(-1, 3) if build is Positions else y
    batches = [(x.double()[:10], y[:10]), (x.double()[10:], y[10:])]
    monitor = CurvatureMonitor(
        lambda model: ritz.Risk(model, cross_entropy, batches, l2=l2),
        quantities=["gradient_variance", "noise_scale"],
    )
    found = monitor.measure(model)
    rows = sample_gradients(model, (x.double(), y))
    rows = rows + l2 * flat(model.parameters())
    total = (rows - rows.mean(0)).square().sum() / COUNT
    assert found["gradient_variance"] == pytest.approx(float(total), rel=1e-9)
    scale = total / rows.mean(0).square().sum()
    assert found["noise_scale"] == pytest.approx(float(scale), rel=1e-9)


def test_the_variance_of_equal_samples_does_not_cancel():
    """All gradients are nearly the same: |g|^2 is a million times the variance."""
    generator = torch.Generator().manual_seed(0)
    x = torch.ones(32, 6) + 1e-3 * torch.randn(32, 6, generator=generator)
    model, y = relu_network().float(), torch.zeros(32, dtype=torch.long)
    found = CurvatureMonitor((x, y), quantities=["gradient_variance"]).measure(model)
    exact = sample_gradients(model.double(), (x.double(), y)).var(0, correction=0).sum()
    assert found["gradient_variance"] == pytest.approx(float(exact), rel=1e-3)


def test_histograms_count_every_entry_of_every_gradient():
    names = ("gradient_histogram", "gradient_weight_histogram")
    found, model, data, _, _ = stepped(names, num_bins=16, batch_size=5)
    rows, theta = sample_gradients(model, data), flat(model.parameters())
    reach, across = found["gradient_reach"], found["weight_reach"]
    # The smallest powers of two above all sizes.
    for power, values in ((reach, rows), (across, theta)):
        assert power / 2 <= float(values.abs().max()) < power
        assert math.log2(power).is_integer()
    edges = torch.linspace(-reach, reach, 17, dtype=torch.float64)
    counts = torch.histogram(rows.flatten(), edges).hist
    assert found["gradient_histogram"] == counts.tolist()
    columns = torch.linspace(-across, across, 17, dtype=torch.float64)
    pairs = torch.stack([rows.flatten(), theta.expand_as(rows).flatten()], 1)
    grid = torch.histogramdd(pairs, [edges, columns]).hist
    assert found["gradient_weight_histogram"] == grid.tolist()


def test_weights_and_steps_are_compared_with_copies():
    names = ("weight_norms", "layer_norms", "distance", "update_size", "alpha")
    found, model, data, initial, before = stepped(names)
    theta, start, last = flat(model.parameters()), flat(initial), flat(before)
    assert found["weight_norm"] == pytest.approx(float(theta.norm()))
    assert found["weight_max"] == float(theta.abs().max())
    assert found["weight_max.2.bias"] == float(model[2].bias.detach().abs().max())
    assert found["weight_norm.0.weight"] == pytest.approx(float(model[0].weight.detach().norm()))
    assert found["distance"] == pytest.approx(float((theta - start).norm()))
    assert found["distance_max"] == pytest.approx(float((theta - start).abs().max()))
    assert found["update_size"] == pytest.approx(float((theta - last).norm()))
    # The parabola by weighted least squares, in the length of the step.
    length = float((theta - last).norm())
    direction = (theta - last) / length
    rows = []
    for params in (before, list(model.parameters())):
        other = relu_network()
        with torch.no_grad():
            for p, value in zip(other.parameters(), params, strict=True):
                p.copy_(value)
        losses = cross_entropy(other(data[0]), data[1], reduction="none").detach()
        rows.append((losses, sample_gradients(other, data) @ direction))
    (f0, d0), (f1, d1) = rows
    t = length
    design = torch.tensor([[1, 0, 0], [1, t, t * t], [0, 1, 0], [0, 1, 2 * t]]).double()
    weights = torch.stack([each.var() for each in (f0, f1, d0, d1)]).reciprocal()
    means = torch.stack([each.mean() for each in (f0, f1, d0, d1)])
    normal = design.T @ (weights[:, None] * design)
    _, slope, bend = torch.linalg.solve(normal, design.T @ (weights * means)).tolist()
    assert found["alpha"] == pytest.approx(t / (-slope / (2 * bend)) - 1, rel=1e-6)


def test_a_step_to_the_minimum_of_a_parabola_has_alpha_zero():
    """Least squares on one input: from 3, the minimum is at 1 and the other side at -1."""
    data = (torch.ones(4, 1), torch.ones(4, 1))
    for target, alpha in ((3.0, -1.0), (1.0, 0.0), (-1.0, 1.0)):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        monitor = CurvatureMonitor(data, loss_fn=nn.functional.mse_loss, quantities=["alpha"])
        monitor.attach(optimizer)
        with torch.no_grad():
            model.weight.fill_(3.0)
        model.weight.grad = torch.full((1, 1), 3.0 - target)
        optimizer.step()
        assert monitor.measure(model, optimizer)["alpha"] == pytest.approx(alpha, abs=1e-5)


CURVATURE = ("lambda_max", "lambda_min", "trace", "frobenius_norm", "spectrum", "density",
             "negative_mass", "degeneracy", "bulk", "overlap")  # fmt: skip


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_curvature_agrees_with_the_dense_matrix(kind):
    size = 53
    found, model, data, _, _ = stepped(
        CURVATURE, matrix=kind, num_steps=size, num_runs=4, rtol=1e-6, num_probes=size
    )
    matrix = dense(model, data, kind)
    values, vectors = torch.linalg.eigh(matrix)
    norm = float(values.abs().max())
    assert found["lambda_max"] == pytest.approx(float(values[-1]))
    assert found["lambda_min"] == pytest.approx(float(values[0]), abs=1e-9 * norm)
    assert found["trace"] == pytest.approx(float(values.sum()))
    assert found["mean_eigenvalue"] == pytest.approx(float(values.mean()))
    # As many probes as parameters: exact.
    assert found["frobenius_norm"] == pytest.approx(float(matrix.norm()))
    assert found["mean_square_eigenvalue"] == pytest.approx(float(values.square().mean()))
    assert abs(found["negative_mass"] - float((values < -1e-9 * norm).double().mean())) <= (
        4 * found["negative_mass_stderr"] + 1e-12
    )
    zero = float((values.abs() < 1e-9 * norm).double().mean())
    slack = 4 * found["degeneracy_stderr"] + found["degeneracy_truncation"]
    assert abs(found["degeneracy"] - zero) <= slack
    x, y = (torch.tensor(found[name]) for name in ("density_x", "density"))
    assert float(torch.trapezoid(y, x)) == pytest.approx(1, abs=1e-3)
    g = sample_gradients(model, data).mean(0)
    unit = g / g.norm()
    cosines = (vectors.flip(1)[:, :5].T @ unit).square()
    assert found["gradient_overlap"] == pytest.approx(float(cosines.sum()), rel=1e-5)
    assert found["gradient_curvature"] == pytest.approx(float(unit @ matrix @ unit))
    assert found["overlaps"] == pytest.approx(cosines.tolist(), abs=1e-6)


def test_spectra_are_those_of_the_functions_that_they_are_named_after():
    found, model, data, _, _ = stepped(("bulk", "degeneracy"), num_steps=12, num_runs=3)
    op = ritz.hessian(ritz.Risk(model, cross_entropy, data))
    runs = ritz.spectra.lanczos_block(op, num_steps=12, num_probes=3)
    edge, zero = bulk_edge(runs), rank_degeneracy(runs, matrix="hessian")
    assert found["bulk_lower"] == pytest.approx(edge.lower)
    assert found["bulk_upper"] == pytest.approx(edge.upper)
    assert found["num_outliers"] == len(edge.outliers)
    assert found["degeneracy"] == pytest.approx(float(zero.mass))


def test_the_variance_of_the_ggn_is_that_over_single_samples():
    found, model, data, _, _ = stepped(["variance"], matrix="ggn", num_probes=32)
    alone = torch.stack([
        dense(model, tuple(part[i : i + 1] for part in data), "ggn") for i in range(COUNT)
    ])  # fmt: skip
    spread = (alone - alone.mean(0)).square().sum((1, 2)).mean() / len(alone[0])
    assert abs(found["variance"] - float(spread)) < 4 * found["variance_stderr"]


def test_averages_and_effective_rates_are_those_of_the_optimiser():
    x, y = samples()
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    average = ritz.optim.IterateAverage(optimizer, start=1)
    monitor = CurvatureMonitor((x, y), quantities=["average_norms", "effective_rates"])
    monitor.attach(optimizer)
    assert "average_weight_norm" not in monitor.measure(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    found = monitor.measure(model, optimizer)
    norms = weight_norms(average.to_averaged_model(model))
    assert found["average_weight_norm"] == pytest.approx(norms.l2)
    assert found["average_weight_max"] == norms.linf
    # The layer before batch norm, and no other.
    rate = 0.3 / float(model[0].weight.detach().double().square().sum())
    assert found["effective_rate"] == pytest.approx(rate)
    assert "effective_rate.0.weight" in found
    assert "effective_rate.3.weight" not in found


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_a_warm_search_follows_the_largest_eigenvalue(kind):
    """Six products from the previous vector, while training moves the eigenvalue."""
    x, y = samples()
    data, model = (x.double(), y), relu_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    monitor = CurvatureMonitor(data, quantities=["lambda_max"], matrix=kind)
    for step in range(60):
        optimizer.zero_grad()
        cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
        if step % 5 == 0:
            found = monitor.measure(model, optimizer)
            largest = float(torch.linalg.eigvalsh(dense(model, data, kind))[-1])
            assert found["lambda_max"] == pytest.approx(largest, rel=0.01)
            assert found["lambda_max"] <= largest * (1 + 1e-12)


def test_the_default_leaves_out_what_a_model_does_not_have():
    x, y = samples(12)

    def weighted(outputs, target):
        weight = torch.tensor([1.0, 5.0, 0.1])
        return cross_entropy(outputs, target, weight=weight)

    monitor = CurvatureMonitor((x, y), loss_fn=weighted)
    with pytest.warns(UserWarning, match="gradients of single samples are not watched"):
        found = monitor.measure(nn.Linear(6, 3))
    assert {"lambda_max", "weight_norm", "gradient_norm"} <= found.keys()
    assert "noise_scale" not in found
    assert "noise_scale" not in CurvatureMonitor((x, y), batch_norm="train").names
    chosen = CurvatureMonitor((x, y), loss_fn=weighted, quantities=["noise_scale"])
    with pytest.raises(ValueError, match="must be the mean of the losses of its samples"):
        chosen.measure(nn.Linear(6, 3))
    with pytest.raises(ValueError, match="do not exist with batch_norm='train'"):
        CurvatureMonitor((x, y), batch_norm="train", quantities=["gsnr"])


IMPOSSIBLE = {
    "gsnr": ("gsnr cannot be measured: the loss of a batch must be the mean", {}),
    "noise_scale": ("noise_scale cannot be measured: the loss of a batch must be the mean", {}),
    "tic_diagonal": ("tic_diagonal cannot be measured: .*no exact diag", {"loss": cross_entropy}),
    "effective_rates": ("effective_rates cannot be measured: no normalisation layer", {}),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_quantity_that_the_run_does_not_have_is_refused_before_training(name, tmp_path):
    data, model = samples(12), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    message, options = IMPOSSIBLE[name]
    before = flat(model.parameters()).clone()

    def weighted(outputs, target):
        return cross_entropy(outputs, target, weight=torch.tensor([1.0, 5.0, 0.1]))

    loss_fn = options.get("loss", weighted)
    monitor = CurvatureMonitor(data, loss_fn=loss_fn, quantities=[name], every=5)
    with pytest.raises(ValueError, match=message):
        fit(model, data, loss_fn=loss_fn, monitors=[monitor], num_epochs=9, batch_size=6,
            checkpoint=tmp_path / "run")  # fmt: skip
    assert torch.equal(flat(model.parameters()), before)
    assert not list((tmp_path / "run").iterdir())


def test_a_user_defined_quantity_is_measured_and_costed():
    name = "squared_loss_of_a_test"
    if name not in quantity_names():

        @register_quantity(name, "the squared loss", parts=["gradient"], cost=2.0)
        def squared(watched):
            return {name: watched.loss**2}

    found, _, data, _, _ = stepped([name, "gradient_norm"])
    assert found[name] == pytest.approx(found["watched_loss"] ** 2)
    assert CurvatureMonitor(data, quantities=[name, "gradient_norm"]).cost == 3.0
    with pytest.raises(ValueError, match=r"parts must be among gradient, .* got nothing"):
        register_quantity("other", "", parts=["nothing"])


def test_scalars_are_the_finite_numbers_of_a_record():
    record = {"matrix": "ggn", "a": 1.0, "b": math.nan, "c": [1.0], "step": 3, "d": math.inf}
    assert scalars(record) == {"a": 1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_bins": 48}, "num_bins must be a power of two, got 48"),
        ({"max_products": 0}, "max_products must be at least 1, got 0"),
        ({"batch_norm": "off"}, "batch_norm must be one of train, eval, recomputed"),
        (
            {"quantities": ["lambda"]},
            "'lambda'; did you mean lambda_m",
        ),
        ({"quantities": "trace"}, "quantities must be a list of alpha"),
    ],
)
def test_wrong_options_name_the_argument(options, message):
    with pytest.raises(ValueError, match=message):
        CurvatureMonitor(samples(), **options)


def spent(quantities, monkeypatch, **options):
    """Return gradients, products and passes over samples of a second measurement, and its cost."""
    from ritz.curvature import CurvatureOperator, Risk
    from ritz.training import _snapshot

    counts = {"gradients": 0, "products": 0, "passes": 0}
    x, y = samples(COUNT)
    model = relu_network().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    monitor = CurvatureMonitor((x, y), quantities=quantities, batch_size=COUNT, **options)
    monitor.attach(optimizer)
    monitor.measure(model, optimizer)
    product, gradient, run = (
        CurvatureOperator._matmat,
        Risk.batch_gradient,
        _snapshot.sample_gradients,
    )

    def counted_product(self, block):
        counts["products"] += block.shape[1]
        return product(self, block)

    def counted_gradient(self, context):
        counts["gradients"] += 1
        return gradient(self, context)

    def counted_pass(*args, **kwargs):
        counts["passes"] += 1
        return run(*args, **kwargs)

    monkeypatch.setattr(CurvatureOperator, "_matmat", counted_product)
    monkeypatch.setattr(Risk, "batch_gradient", counted_gradient)
    monkeypatch.setattr(_snapshot, "sample_gradients", counted_pass)
    monitor.measure(model, optimizer)
    return counts, monitor


def test_the_default_set_takes_six_products_a_gradient_and_no_pass_over_samples(monkeypatch):
    counts, monitor = spent(None, monkeypatch)

    assert counts == {"gradients": 1, "products": 6, "passes": 0}
    assert monitor.cost == TUNING.product * 6 + 1 + TUNING.norms


def test_quantities_of_single_samples_share_one_pass(monkeypatch):
    names = [name for name in GRADIENTS if not name.startswith("tic")]
    counts, monitor = spent([*names, "gradient_histogram"], monkeypatch)

    assert (counts["gradients"], counts["passes"], counts["products"]) == (1, 1, 0)
    alone = sum(QUANTITIES[name].cost(monitor) for name in monitor.names)
    assert monitor.cost < alone / 2.5


PRODUCTS = {"lambda_max": 6, "lambda_min": 6, "edge": 6, "frobenius_norm": 8, "spectrum": 20,
            "density": 20, "negative_mass": 20, "degeneracy": 20, "bulk": 20, "step": 20,
            "weight_norms": 0, "distance": 0, "update_size": 0, "gradient_norm": 0}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_stated_cost_is_that_of_the_products_that_are_made(name, monkeypatch):
    counts, monitor = spent([name], monkeypatch)

    assert counts["products"] == PRODUCTS[name]
    assert monitor.cost == TUNING.product * counts["products"] + counts["gradients"]


def test_the_documented_table_is_that_of_the_registry():
    text = (Path(__file__).parents[2] / "docs" / "monitors.md").read_text()
    monitor = CurvatureMonitor(samples())

    rows = ["| quantity | what it is | shares | cost |", "| --- | --- | --- | --- |"]
    for group in ("curvature", "stability", "gradients", "weights", "steps"):
        for each in (QUANTITIES[name] for name in quantity_names()):
            if each.group == group and each.measure.__module__.startswith("ritz."):
                words, shares = each.text.replace("|", "\\|"), ", ".join(each.parts) or "-"
                rows.append(f"| `{each.name}` | {words} | {shares} | {each.cost(monitor):g} |")
    assert "\n".join(rows) in text
