"""Kronecker factors, against Gauss-Newton blocks where they are exact and formulas elsewhere."""

import processes
import pytest
import torch
from curvature.networks import labels, noise
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn import functional

from ritz import diagonal, trace
from ritz.curvature import Risk, ggn, kfac
from ritz.curvature import _kfac as kfac_module
from ritz.curvature._kfac import KroneckerFactors, LayerOperator
from ritz.operators import DenseOperator, DiagonalOperator
from ritz.testing import check_operator

CROSS_ENTROPY = functional.cross_entropy


def randomised(model, seed=2):
    model = model.double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.rand(value.shape, generator=generator, dtype=torch.float64) - 0.4)
    return model


def gauss_newton_blocks(risk, sizes):
    matrix = ggn(risk, engine="eager").dense()
    parts = torch.arange(len(matrix)).split(sizes)
    return torch.block_diag(*(matrix[part][:, part] for part in parts))


def test_one_sample_of_a_linear_model_is_exact():
    risk = Risk(randomised(nn.Linear(4, 3)), CROSS_ENTROPY, (noise(1, 4), labels(3, 1)), l2=0.2)
    op = kfac(risk)
    matrix = ggn(risk, engine="eager").dense()
    check_operator(op, dense=matrix)
    check_operator(op.ops[0], dense=matrix)
    torch.testing.assert_close(op.dense(), matrix)


@pytest.mark.parametrize("bias", [True, False])
def test_a_deep_linear_network_with_squared_error_is_exact(bias):
    model = nn.Sequential(*(nn.Linear(i, o, bias=bias) for i, o in [(3, 4), (4, 3), (3, 2)]))
    risk = Risk(randomised(model), nn.MSELoss(), (noise(7, 3), noise(7, 2)), batch_size=4)
    op = kfac(risk)
    torch.testing.assert_close(op.dense(), gauss_newton_blocks(risk, op.sizes))
    check_operator(op)


def test_the_factors_of_softmax_regression_are_those_of_the_formula():
    x, y = noise(6, 4), labels(3, 6)
    model = randomised(nn.Linear(4, 3))
    factors = kfac(Risk(model, CROSS_ENTROPY, (x, y), batch_size=4)).ops[0].factors
    with torch.no_grad():
        chances = model(x).softmax(1)
    inputs = torch.cat([x, torch.ones(6, 1, dtype=torch.float64)], 1)
    outputs = torch.diag(chances.mean(0)) - chances.T @ chances / 6
    torch.testing.assert_close(factors.inputs, inputs.T @ inputs / 6)
    torch.testing.assert_close(factors.outputs, outputs)


@pytest.mark.parametrize("params", ["weight", "bias", None])
def test_weight_and_bias_may_be_chosen_alone(params):
    data = noise(1, 4), labels(3, 1)
    risk = Risk(randomised(nn.Linear(4, 3)), CROSS_ENTROPY, data, params=params)
    op = kfac(risk)
    assert isinstance(op.ops[0], LayerOperator)
    torch.testing.assert_close(op.dense(), ggn(risk, engine="eager").dense())
    torch.testing.assert_close(diagonal(op).mean, op.dense().diagonal())
    assert float(trace(op)) == pytest.approx(float(op.dense().trace()))


def convolution(model, x):
    """Patches ``(batch, T, i + 1)`` and derivatives ``(batch, T, o)`` along every root column."""
    patches = functional.unfold(x, model[0].kernel_size, padding=1).transpose(1, 2)
    patches = torch.cat([patches, torch.ones_like(patches[..., :1])], 2)
    with torch.no_grad():
        middle = model[0](x)

    def chances(maps):
        return model[1:](maps)

    jacobians = torch.stack([jacrev(chances)(one[None])[0, :, 0] for one in middle]).detach()
    p = model(x).softmax(1).detach()
    hessians = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)) / len(x)
    return patches, jacobians.flatten(3), hessians


def test_the_factors_of_a_convolution_are_those_of_grosse_and_martens():
    model = nn.Sequential(nn.Conv2d(2, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 2))
    model, x = randomised(model), noise(4, 2, 3, 3)
    op = kfac(Risk(model, CROSS_ENTROPY, (x, labels(2, 4))))
    patches, J, H = convolution(model, x)
    inputs = torch.einsum("bti,btj->ij", patches, patches) / 4
    outputs = torch.einsum("bcot,bcd,bdpt->op", J, H, J) / 16
    torch.testing.assert_close(op.ops[0].factors.inputs, inputs)
    torch.testing.assert_close(op.ops[0].factors.outputs, outputs)
    assert float(trace(op.ops[0])) == pytest.approx(float(inputs.trace() * outputs.trace()))
    check_operator(op.ops[0], dense=joint(outputs, inputs))


def joint(outputs, inputs):
    """The Kronecker product on [W b], moved to the flat order."""
    order = torch.arange(len(outputs) * len(inputs)).view(len(outputs), -1)
    flat = torch.cat([order[:, :-1].flatten(), order[:, -1]])
    return torch.kron(outputs, inputs)[flat][:, flat]


def test_positions_of_a_linear_layer_count_as_samples():
    model = randomised(nn.Linear(4, 3))
    x = noise(2, 5, 4)

    def forward(model, batch):
        return model(batch[0]).transpose(1, 2), batch[1]

    risk = Risk(model, CROSS_ENTROPY, (x, labels(3, 2, 5)), forward=forward)
    alone = Risk(model, CROSS_ENTROPY, (x.flatten(0, 1), labels(3, 2, 5).flatten()))
    torch.testing.assert_close(kfac(risk).dense(), kfac(alone).dense())


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.table, self.norm = nn.Embedding(5, 2), nn.LayerNorm(2)
        self.conv = nn.Conv1d(2, 2, 1, groups=2)
        self.twice, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        x = self.conv(self.norm(self.table(x)).transpose(1, 2)).mean(2) * self.scale
        return self.last(self.twice(self.twice(x).tanh()).tanh())


@pytest.fixture(scope="module")
def mixed():
    data = labels(5, 6, 3, seed=3), labels(2, 6)
    return Risk(randomised(Mixed()), CROSS_ENTROPY, data, batch_size=4, l2=0.1)


def test_a_small_module_without_factors_has_its_exact_block(mixed):
    op = kfac(mixed)
    kinds = [type(block) for block in op.ops]
    assert kinds == [DenseOperator] * 5 + [LayerOperator]
    exact = gauss_newton_blocks(mixed, op.sizes)
    others = sum(op.sizes[:-1])
    torch.testing.assert_close(op.dense()[:others, :others], exact[:others, :others])
    check_operator(op)


def test_a_large_module_without_factors_has_the_diagonal_of_its_block(mixed, monkeypatch):
    monkeypatch.setattr(kfac_module, "TUNING", kfac_module.Tuning(dense_block=3))
    op = kfac(mixed)
    assert [type(block) for block in op.ops].count(DiagonalOperator) == 4
    exact = gauss_newton_blocks(mixed, op.sizes).diagonal()
    others = sum(op.sizes[:-1])
    torch.testing.assert_close(diagonal(op).mean[:others], exact[:others])


@pytest.fixture(scope="module")
def network():
    return randomised(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))


def sample_gradients(model, data, loss):
    """Derivatives of the loss of each sample by the output of the last layer."""
    outputs = model(data[0]).detach().requires_grad_()
    total = sum(loss(o[None], t[None]) for o, t in zip(outputs, data[1], strict=True))
    return torch.autograd.grad(total, outputs)[0]


@pytest.mark.parametrize(
    ("loss", "target"),
    [(CROSS_ENTROPY, labels(3, 5)), (nn.HuberLoss(delta=0.1), noise(5, 3, seed=4))],
)
def test_empirical_factors_are_moments_of_sample_gradients(network, loss, target):
    data = noise(5, 3), target
    factors = kfac(Risk(network, loss, data, batch_size=2), kind="empirical").ops[1].factors
    g = sample_gradients(network, data, loss)
    torch.testing.assert_close(factors.outputs, g.T @ g / 5)


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (CROSS_ENTROPY, labels(3, 5)),
        (CROSS_ENTROPY, torch.tensor([0, -100, 2, 1, 1])),
        (nn.MSELoss(), noise(5, 3)),
        (nn.BCEWithLogitsLoss(), labels(2, 5, 3).double()),
    ],
)
def test_drawn_labels_give_the_factors_on_average(network, loss, target):
    risk = Risk(network, loss, (noise(5, 3), target), batch_size=3)
    exact = kfac(risk)
    draws = [
        [block.factors.outputs for block in kfac(risk, kind="monte_carlo", generator=seeded(i)).ops]
        for i in range(60)
    ]
    for index, block in enumerate(exact.ops):
        samples = torch.stack([draw[index] for draw in draws])
        error = samples.std(0) / len(draws) ** 0.5
        assert ((samples.mean(0) - block.factors.outputs).abs() <= 4 * error + 1e-12).all()


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_equal_seeds_draw_equal_labels(network):
    risk = Risk(network, CROSS_ENTROPY, (noise(5, 3), labels(3, 5)))
    one = kfac(risk, kind="monte_carlo").dense()
    same, other = (kfac(risk, kind="monte_carlo", generator=seeded(i)).dense() for i in (0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_kfac_of_a_model_that_is_one_linear_layer_is_exact_for_squared_error():
    model = randomised(nn.Linear(2, 2))
    x = noise(3, 2)
    risk = Risk(model, nn.MSELoss(), (x, x))
    outputs = functional_call(model, risk.params, (x,))
    assert outputs.shape == (3, 2)
    torch.testing.assert_close(kfac(risk).dense(), ggn(risk, engine="eager").dense())


def test_factors_must_be_finite():
    square = torch.eye(2)
    with pytest.raises(ValueError, match="inputs must be finite"):
        LayerOperator(KroneckerFactors(inputs=square / 0, outputs=square), bias=False)


def test_kfac_names_what_it_cannot_do(network):
    data = noise(5, 3), noise(5, 3)
    with pytest.raises(ValueError, match="kind must be one of ggn, monte_carlo, empirical"):
        kfac(Risk(network, nn.MSELoss(), data), kind="fisher")
    with pytest.raises(ValueError, match="without class weights, whose Hessians are known"):
        kfac(Risk(network, nn.HuberLoss(), data))
    with pytest.raises(ValueError, match="loss_fn must be a likelihood to draw labels from"):
        kfac(Risk(network, nn.HuberLoss(), data), kind="monte_carlo")
    own = Risk(network, lambda outputs, target: (outputs - target).square().mean(), data)
    for kind in ("ggn", "monte_carlo"):
        with pytest.raises(ValueError, match=r"let forward return outputs \(samples, classes"):
            kfac(own, kind=kind)
    norm = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    risk = Risk(norm, nn.MSELoss(), data, batch_norm="train", batch_size=5)
    with pytest.raises(ValueError, match="batch norm in train mode couples samples"):
        kfac(risk)


@pytest.mark.distributed
def test_processes_that_share_the_batches_agree_with_one(tmp_path):
    script = """
        from torch import nn
        from ritz.curvature import Risk, kfac
        from ritz.curvature import ggn
        from ritz.operators import exact

        generator = torch.Generator().manual_seed(1)
        x = torch.randn(7, 3, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 2, (7,), generator=generator)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
        found = []
        for sharing in ("split", "none"):
            for batch_size in (3, 7):  # three batches, and one that a process does not see
                risk = Risk(model, nn.CrossEntropyLoss(), (x, y), batch_size=batch_size,
                            sharing=sharing)
                diagonal, trace = (exact(ggn(risk), name).value for name in ("diagonal", "trace"))
                found.append((diagonal, torch.tensor(trace),
                              kfac(risk).dense(), kfac(risk, kind="monte_carlo").dense()))
        for one, other in zip(found[:2], found[2:], strict=True):
            for a, b in zip(one, other, strict=True):
                torch.testing.assert_close(a, b)
        dist.destroy_process_group()
    """
    for code, error in processes.run_processes(script, 2, tmp_path):
        assert code == 0, error


def test_a_module_that_a_later_batch_does_not_call_raises():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)

        def forward(self, x):
            return self.a(self.a(x)) if len(x) == 5 else self.a(x)

    risk = Risk(randomised(Fickle()), nn.MSELoss(), (noise(11, 2), noise(11, 2)), batch_size=6)
    with pytest.raises(ValueError, match=r"exactly one call of each module per batch, but \['a'\]"):
        kfac(risk)


def test_a_class_that_is_ignored_as_a_label_can_still_be_drawn():
    y = torch.tensor([0, 1, 2, 0, 2, 1, 0, 2])
    model, found = randomised(nn.Linear(4, 3)), []
    risk = Risk(model, nn.CrossEntropyLoss(ignore_index=1), (noise(8, 4), y))
    for seed in range(400):
        generator = torch.Generator().manual_seed(seed)
        found.append(kfac(risk, kind="monte_carlo", generator=generator).ops[0].factors.outputs)
    samples = torch.stack(found)
    gap = samples.mean(0) - kfac(risk).ops[0].factors.outputs
    assert bool((gap.abs() < 4 * samples.std(0) / 20).all())


def test_too_many_outputs_for_exact_factors_point_to_drawn_labels():
    risk = Risk(nn.Linear(2, 300), nn.CrossEntropyLoss(), [(torch.ones(3, 2), torch.arange(3))])
    with pytest.raises(ValueError, match=r"300 outputs per sample: .*: use kind='monte_carlo'"):
        kfac(risk)
    assert kfac(risk, kind="monte_carlo").shape == (900, 900)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_larger_shift_saves_the_root_of_a_factor_with_more_roundoff(seed, monkeypatch):
    """A factor of rank 40. Its other eigenvalues lie between -8 and 8 eps |A|."""
    n, eps = 300, torch.finfo(torch.float32).eps
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, 40, generator=rng, dtype=torch.float64)
    exact = rows @ rows.T
    # A symmetric matrix of independent entries with deviation s has eigenvalues up to 2 s root n.
    errors = torch.randn(n, n, generator=rng, dtype=torch.float64)
    errors = (errors + errors.T) * (0.5**0.5 * 8 * eps * exact.norm() / (2 * n**0.5))
    matrix = (exact + errors).float()

    def refuse(matrix):
        raise AssertionError("an eigendecomposition is slow")

    monkeypatch.setattr(torch.linalg, "eigh", refuse)
    root = kfac_module.root(matrix).double()

    gap = torch.linalg.matrix_norm(root @ root.T - matrix.double(), 2)
    assert gap < 40 * eps * matrix.norm()
    monkeypatch.setattr(kfac_module, "TUNING", kfac_module.Tuning(shifts=(1.0,)))
    with pytest.raises(AssertionError, match="slow"):
        kfac_module.root(matrix)


def test_the_root_of_an_indefinite_matrix_is_that_of_its_positive_part():
    matrix = torch.diag(torch.tensor([4.0, 1.0, -1.0]))

    root = kfac_module.root(matrix)

    torch.testing.assert_close(root @ root.T, torch.diag(torch.tensor([4.0, 1.0, 0.0])))
