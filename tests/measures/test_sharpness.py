import re
from functools import partial

import pytest
import torch
from curvature.networks import seeded, small
from torch import nn
from torch.nn import functional

from ritz.curvature import Risk, curvature_operator, ggn
from ritz.curvature._tracing import Linearization
from ritz.measures import sharpness
from ritz.operators import Exact
from ritz.testing import assert_within_stderr

N, INPUTS, CLASSES = 24, 3, 3


network = partial(small, seed=4)


def risk_of(model, **options):
    x = torch.randn(N, INPUTS, generator=seeded(0), dtype=torch.float64)
    y = torch.randint(CLASSES, (N,), generator=seeded(1))
    return Risk(model, functional.cross_entropy, (x, y), batch_size=8, **options)


def normed(**options):
    return risk_of(network(nn.BatchNorm1d(4)), **options)


def check_row(row, matrix, num_probes):
    """Every number of a row against the eigenvalues of the dense matrix."""
    values = torch.linalg.eigvalsh(matrix)
    # Scales before a batch norm matter through its epsilon alone: 1e-14 is no zero.
    roundoff = 1e-15
    assert float(row.spectral_norm) == pytest.approx(float(values.abs().max()), rel=1e-10)
    assert float(row.spectral_norm.truncation) < 1e-10
    assert row.largest == pytest.approx(float(values[-1]), rel=1e-10)
    assert row.smallest == pytest.approx(float(values[0]), rel=1e-8, abs=1e-14)
    assert_within_stderr(row.trace, float(values.sum()))
    assert_within_stderr(row.mean_eigenvalue, float(values.mean()))
    assert_within_stderr(row.frobenius_norm, float(values.norm()))
    assert_within_stderr(row.negative_mass, float((values < -roundoff).double().mean()))
    assert len(row.negative_mass.samples) == num_probes
    kernel = float((values.abs() < roundoff).double().mean())
    assert kernel > 0
    if row.matrix == "ggn":
        assert_within_stderr(row.degeneracy.mass, kernel)
        assert abs(float(row.degeneracy.value.mean)) < roundoff
    else:  # with the nearest eigenvalue beside it
        nearest = values.abs()[values.abs() > roundoff].min()
        share = float((values.abs() <= nearest).double().mean())
        assert_within_stderr(row.degeneracy.mass, share)


@pytest.fixture(scope="module")
def plain():
    risk = risk_of(network())
    return risk, sharpness(
        risk, num_steps=risk.space.size, num_probes=12, engine="eager", generator=seeded(5)
    )


def test_sharpness_from_full_krylov_spaces_equals_the_dense_values(plain):
    risk, report = plain
    assert [(row.matrix, row.batch_norm) for row in report.rows] == [
        ("hessian", None),
        ("ggn", None),
    ]
    for row in report.rows:
        matrix = curvature_operator(risk, row.matrix, engine="eager").dense()
        check_row(row, matrix, 12)


def test_sharpness_in_both_batch_norm_modes_equals_the_dense_values():
    risk = normed()
    size = risk.space.size
    report = sharpness(risk, num_steps=size, num_probes=8, engine="eager", generator=seeded(6))
    found = [(row.batch_norm, row.matrix) for row in report.rows]
    assert found == [(m, k) for m in ("eval", "train") for k in ("hessian", "ggn")]
    for row in report.rows:
        part = risk.with_batch_norm(row.batch_norm)
        check_row(row, curvature_operator(part, row.matrix, engine="eager").dense(), 8)
        assert report.summaries[row.batch_norm].loss == pytest.approx(part.loss(), rel=1e-12)


def test_num_products_is_the_number_of_products_computed():
    risk = risk_of(network())
    report = sharpness(risk, num_steps=5, num_probes=3, matrix="ggn", engine="eager")
    (row,) = report.rows
    assert (row.num_products, report.num_steps, report.num_probes) == (15, 5, 3)
    assert row.frobenius_norm.num_products == 15
    assert row.status.outcome == "completed"


@pytest.mark.parametrize(("num_probes", "traced"), [(2, False), (3, True)])
def test_a_model_is_traced_only_if_the_products_repay_it(num_probes, traced, monkeypatch):
    traces, build = [], Linearization.__init__

    def counted(self, *args, **options):
        traces.append(self)
        build(self, *args, **options)

    monkeypatch.setattr(Linearization, "__init__", counted)

    sharpness(risk_of(network()), num_steps=2, num_probes=num_probes)  # of three batches each

    assert bool(traces) == traced


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}


def test_an_impossible_matrix_raises_before_the_first_product(monkeypatch):
    batch = {"x": torch.ones(4, 3), "labels": torch.tensor([0, 1, 0, 1])}
    risk = Risk(WithLoss(), None, [batch])
    monkeypatch.setattr("ritz.measures._sharpness.lanczos_block", None)

    with pytest.raises(ValueError, match="needs outputs that are separate from the loss"):
        sharpness(risk, matrix=("hessian", "ggn"))


def test_a_model_that_returns_its_loss_has_the_sharpness_of_its_hessian_alone():
    def forward(model, batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    model = network()
    data = torch.randn(N, INPUTS, dtype=torch.float64, generator=seeded(0)), torch.arange(N) % 3
    risk = Risk(model, None, data, forward=forward)
    with pytest.raises(ValueError, match="matrix must be 'hessian' for a risk with loss_fn=None"):
        sharpness(risk, num_steps=3)

    (row,) = sharpness(risk, num_steps=3, matrix="hessian").rows

    assert row.matrix == "hessian"


def test_trace_is_exact_if_the_operator_knows_it(monkeypatch):
    risk = risk_of(network())
    options = {"num_steps": 3, "num_probes": 2, "matrix": ("ggn",), "engine": "eager"}
    for known, method in ((7.0, "exact, by structure"), (None, "Lanczos quadrature")):
        monkeypatch.setattr("ritz.measures._sharpness.exact", lambda *_, known=known: Exact(known))
        (row,) = sharpness(risk, **options).rows
        assert row.trace.method == method
        assert (row.trace.samples is None) == (float(row.trace.stderr) == 0) == (known is not None)
        assert float(row.mean_eigenvalue) == pytest.approx(float(row.trace) / risk.space.size)


@pytest.mark.parametrize("num_probes", [1, 2, 3])
def test_the_frobenius_norm_is_not_below_the_spectral_norm(num_probes):
    risk = risk_of(network())
    options = {"num_steps": 6, "num_probes": num_probes, "matrix": ("ggn",), "engine": "eager"}
    raised = 0
    for seed in range(10):
        (row,) = sharpness(risk, generator=seeded(seed), **options).rows
        assert float(row.frobenius_norm) >= float(row.spectral_norm)
        sampled = float(row.frobenius_norm.samples.mean().sqrt())
        assert float(row.frobenius_norm) >= sampled * (1 - 1e-12)
        raised += float(row.frobenius_norm) > sampled * (1 + 1e-12)
    assert raised >= 2  # after six steps too little has converged to be split off


def test_eigenvalues_found_by_every_probe_have_no_sampling_error():
    risk = risk_of(network())
    options = {"num_probes": 4, "matrix": ("ggn",), "engine": "eager", "generator": seeded(5)}
    (row,) = sharpness(risk, num_steps=risk.space.size, **options).rows
    split = re.search(r"(\d+) simple eigenvalues", row.frobenius_norm.method)
    values = torch.linalg.eigvalsh(curvature_operator(risk, "ggn", engine="eager").dense())
    assert 1 < int(split[1]) <= int((values > 1e-12).sum())
    # All that is left to sample is the kernel, and what is as small as roundoff.
    assert float(row.frobenius_norm.stderr) < 1e-6 * float(row.frobenius_norm)
    assert float(row.frobenius_norm) == pytest.approx(float(values.norm()), rel=1e-6)


def test_rows_share_probes_and_do_not_depend_on_the_block_size():
    risk = risk_of(network())
    options = {"num_steps": 4, "num_probes": 3, "matrix": ("ggn", "ggn"), "engine": "eager"}
    one = sharpness(risk, **options)
    assert torch.equal(one.rows[0].frobenius_norm.samples, one.rows[1].frobenius_norm.samples)
    two = sharpness(risk, block_size=1, **options)
    for row, same in zip(one.rows, two.rows, strict=True):
        torch.testing.assert_close(row.frobenius_norm.samples, same.frobenius_norm.samples)
    assert one.seed == two.seed == 0


def test_sharpness_of_a_recomputed_risk_defaults_to_recomputed_and_train():
    options = {"num_steps": 2, "num_probes": 2, "matrix": ("ggn",), "engine": "eager"}
    report = sharpness(normed(batch_norm="recomputed"), **options)
    assert [row.batch_norm for row in report.rows] == ["recomputed", "train"]
    chosen = sharpness(normed(), batch_norm="train", **options)
    assert [row.batch_norm for row in chosen.rows] == ["train"]
    without = sharpness(risk_of(network()), batch_norm=("eval", "train"), **options)
    assert [row.batch_norm for row in without.rows] == [None]


def test_sharpness_is_printed_as_a_table(plain):
    risk, report = plain
    text = str(report)
    lines = text.splitlines()
    assert lines[0] == (
        f"Sharpness of Sequential: {risk.space.size} parameters, 24 samples in batches of 8"
    )
    assert lines[1] == (
        "  31 Lanczos steps, 12 probes (± standard error, which is known to 21%), seed 5"
    )
    assert lines[2].split() == ["hessian", "ggn"]
    for name in ("accuracy", "loss", "spectral norm", "negative fraction", "fraction near zero"):
        assert sum(line.strip().startswith(name) for line in lines) == 1
    assert len({len(line) for line in lines[2:]}) == 1


def test_printed_sharpness_shows_l2_and_uneven_batches():
    x = torch.randn(5, INPUTS, generator=seeded(0), dtype=torch.float64)
    target = torch.zeros(5, CLASSES, dtype=torch.float64)
    risk = Risk(network(), functional.mse_loss, (x, target), batch_size=3, l2=0.5)
    report = sharpness(risk, num_steps=3, num_probes=1, engine="eager")
    assert "in batches of 2 to 3, l2 0.5" in str(report)
    assert "3 Lanczos steps, one probe (no error bars), seed 0" in str(report)
    assert "accuracy" not in str(report)
    assert report.rows[1].smallest >= 0.5 - 1e-12


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"num_steps": 0}, "num_steps must be between 1 and 31, got 0"),
        ({"num_steps": 32}, "num_steps must be between 1 and 31, got 32"),
        ({"num_probes": 0}, "num_probes must be at least 1, got 0"),
        ({"matrix": ()}, r"matrix must be one or more of hessian, ggn; got \(\)"),
        ({"matrix": ("fisher",)}, "matrix must be one of hessian, ggn; got 'fisher'"),
        ({"batch_norm": "both"}, "batch_norm must be one of train, eval, recomputed; got 'both'"),
        ({"batch_norm": ()}, "batch_norm must be one or more of"),
    ],
)
def test_error_names_the_wrong_option(bad, message):
    with pytest.raises(ValueError, match=message):
        sharpness(risk_of(network()), **bad)


def test_truncation_of_the_negative_mass_covers_eigenvalues_of_unknown_sign():
    risk = risk_of(network())
    matrix = curvature_operator(risk, "hessian").dense()
    truth = float((torch.linalg.eigvalsh(matrix) < -1e-9).double().mean())
    few = sharpness(risk, num_steps=6, num_probes=8, matrix=["hessian"], generator=seeded(3)).rows[
        0
    ]
    low, undecided = few.negative_mass, float(few.negative_mass.truncation)
    noise = 4 * float(low.stderr)
    assert undecided > 0.05
    assert float(low) - noise <= truth <= float(low) + undecided + noise


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_bars_in_single_precision_hold_the_roundoff_of_products(scale):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        x, y = torch.randn(30, 5), torch.randint(3, (30,))
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    model[2].weight.data *= scale
    risk = Risk(model, nn.functional.cross_entropy, (x, y), batch_size=10)
    precise = Risk(model, nn.functional.cross_entropy, (x, y), batch_size=10, precision="float64")
    matrix = ggn(precise).dense()

    norms = {"spectral_norm": torch.linalg.matrix_norm(matrix, 2), "frobenius_norm": matrix.norm()}

    row = sharpness(risk, matrix="ggn", num_steps=30, num_probes=8).rows[0]

    for name, exact in (norms | {"trace": matrix.trace()}).items():
        found = getattr(row, name)
        assert abs(float(found) - float(exact)) <= float(found.error()), name
        assert 0 < float(found.truncation) < 1e-3 * float(exact)
