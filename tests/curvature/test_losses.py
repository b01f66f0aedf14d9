"""Closed forms of losses against derivatives and enumerations."""

from functools import partial

import pytest
import torch
from curvature.networks import Decoder, labels, mlp, noise, seeded, vectors
from torch import nn
from torch.func import grad, jacfwd, jvp, vjp
from torch.nn import functional

from ritz._core import cross_entropy
from ritz.curvature import Risk, fisher, ggn, gradient_covariance, hessian
from ritz.curvature._losses import accurate_loss, known_loss, output_hessian, sample_losses

CE, BCE, MSE = (
    functional.cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.mse_loss,
)
IGNORED = torch.tensor([0, -100, 2, 1])
POSITIONS = torch.tensor([[0, 2], [-100, 1], [1, -100], [2, 2]])
CHANCES = noise(4, 3, seed=8).abs()  # which do not sum to one

# The loss, the shape of its outputs, and a target.
KNOWN = {
    "cross-entropy": (CE, (4, 3), labels(3, 4)),
    "module": (nn.CrossEntropyLoss(), (4, 3), labels(3, 4)),
    "ignored": (CE, (4, 3), IGNORED),
    "other index ignored": (partial(CE, ignore_index=1), (4, 3), labels(3, 4)),
    "positions": (CE, (4, 3, 2), POSITIONS),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2), (4, 3), IGNORED),
    "chances": (CE, (4, 3), CHANCES),
    "chances smoothed": (partial(CE, label_smoothing=0.3), (4, 3), CHANCES),
    "chances of positions": (CE, (4, 3, 2), noise(4, 3, 2, seed=9).abs()),
    "binary": (BCE, (4, 3), (noise(4, 3) > 0).double()),
    "binary chances": (nn.BCEWithLogitsLoss(), (4,), noise(4).sigmoid()),
    "squares": (MSE, (4, 3), noise(4, 3, seed=3)),
    "squares of images": (nn.MSELoss(), (4, 2, 3), noise(4, 2, 3, seed=3)),
}


def plain(loss_fn):
    """The loss in a form that torch can differentiate forward over reverse."""
    if loss_fn is MSE or isinstance(loss_fn, nn.MSELoss):
        return lambda outputs, target: (outputs - target).square().mean()
    return loss_fn


def dense(loss_fn, outputs, target):
    flat = outputs.reshape(-1)
    return jacfwd(grad(lambda v: plain(loss_fn)(v.view(outputs.shape), target)))(flat)


@pytest.mark.parametrize("name", KNOWN)
def test_closed_forms_equal_the_hessian_in_the_outputs(name):
    loss_fn, shape, target = KNOWN[name]
    assert known_loss(loss_fn) is not None
    outputs = noise(*shape, seed=2)
    size = outputs.numel()
    units = torch.eye(size, dtype=torch.float64).view(size, *shape)
    found = torch.stack([output_hessian(loss_fn, outputs, target, u).reshape(-1) for u in units])
    torch.testing.assert_close(found, dense(loss_fn, outputs, target), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", KNOWN)
def test_roots_multiply_to_the_hessian_of_each_sample(name):
    loss_fn, shape, target = KNOWN[name]
    outputs = noise(*shape, seed=2)
    roots = known_loss(loss_fn).root(outputs, target)
    assert roots.shape[1:] == outputs.shape
    flat = roots.flatten(2) if len(shape) > 1 else roots.unsqueeze(2)
    blocks = torch.einsum("cni,cnj->nij", flat, flat)
    whole = dense(loss_fn, outputs, target).view(4, -1, 4, blocks.shape[1])
    for i in range(4):
        torch.testing.assert_close(blocks[i], whole[i, :, i], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [n for n in KNOWN if "smooth" not in n])
def test_gradients_at_drawn_labels_have_the_hessian_as_second_moment(name):
    loss_fn, shape, target = KNOWN[name]
    known, outputs, tangent = known_loss(loss_fn), noise(*shape, seed=2), noise(*shape, seed=4)
    rng = seeded(1)
    found = torch.stack(
        [
            (known.sampled_hessian(outputs, target, known.draw(outputs, target, rng), tangent)
             * tangent).sum()
            for _ in range(2000)
        ]
    )  # fmt: skip
    exact = float((known.hessian(outputs, target, tangent) * tangent).sum())
    assert abs(float(found.mean()) - exact) < 4 * float(found.std()) / 2000**0.5


@pytest.mark.parametrize(
    ("loss_fn", "shape", "target"), [KNOWN["cross-entropy"], KNOWN["binary"], KNOWN["squares"]]
)
def test_a_score_is_the_gradient_of_the_negative_log_likelihood(loss_fn, shape, target):
    """For one sample the mean loss is its log likelihood, for squares at the variance of draws."""
    known, tangent = known_loss(loss_fn), noise(1, *shape[1:], seed=4)
    outputs = noise(1, *shape[1:], seed=2)
    drawn = known.draw(outputs, target[:1], seeded(0))
    slope = grad(lambda o: plain(loss_fn)(o, drawn))(outputs)
    found = known.sampled_hessian(outputs, target[:1], drawn, tangent)
    if known.kind == "binary_cross_entropy":  # every output is a variable of its own
        expected = slope.square() * outputs.numel() * tangent
    else:
        expected = slope * (slope * tangent).sum()
    torch.testing.assert_close(found, expected)


def test_drawn_labels_follow_the_model_and_leave_ignored_ones():
    outputs = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64).expand(4000, 3)
    target = torch.zeros(4000, dtype=torch.long)
    target[0] = -100
    drawn = known_loss(CE).draw(outputs, target, seeded(0))
    assert drawn[0] == -100
    shares = torch.bincount(drawn[1:], minlength=3) / 3999
    chances = outputs[0].softmax(0)
    assert bool(((shares - chances).abs() < 4 * (chances * (1 - chances) / 3999).sqrt()).all())


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)),
        partial(CE, reduction="none"),
        partial(CE, torch.ones(2, 3)),
        lambda outputs, target: CE(outputs, target),
        nn.HuberLoss(),
        None,
    ],
)
def test_weighted_and_summed_losses_have_no_closed_form(loss_fn):
    assert known_loss(loss_fn) is None


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        partial(CE, ignore_index=1),
        lambda outputs, target: CE(2 * outputs, target),
    ],
)
def test_the_gauss_newton_matrix_of_losses_with_options_uses_their_hessian(loss_fn):
    model = nn.Linear(3, 3).double()
    ((x, y),) = vectors(5)
    found = ggn(Risk(model, loss_fn, [(x, y)]), engine="eager").dense()
    jacobian = torch.cat(
        [torch.kron(torch.eye(3).double(), x.unsqueeze(1)).view(5 * 3, -1),
         torch.eye(3).double().repeat(5, 1)], 1
    )  # fmt: skip
    middle = dense(loss_fn, model(x).detach(), y)
    rows = torch.cat([torch.kron(torch.eye(3).double(), row[None]) for row in x])
    jacobian[:, :9] = rows
    torch.testing.assert_close(found, jacobian.T @ middle @ jacobian)


def test_losses_of_samples_equal_losses_of_batches_of_one():
    outputs, target = noise(4, 3, 2), labels(3, 4, 2)
    found = sample_losses(CE, outputs, target)
    expected = torch.stack([CE(outputs[i : i + 1], target[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", KNOWN)
def test_the_mean_of_the_losses_of_samples_is_the_loss_of_the_batch(name):
    loss_fn, shape, target = KNOWN[name]
    outputs = noise(*shape, seed=2)
    found = sample_losses(loss_fn, outputs, target)
    assert found.shape == (4,)
    torch.testing.assert_close(found.mean(), loss_fn(outputs, target))


def test_the_covariance_over_sequences_of_different_lengths_has_no_negative_eigenvalue():
    y = labels(6, 3, 4, seed=5)
    y[0, 1:] = y[1, :2] = -100
    risk = Risk(Decoder().double(), CE, [(labels(6, 3, 4), y)])
    matrix = gradient_covariance(risk, engine="eager").dense()
    values = torch.linalg.eigvalsh(matrix)
    assert float(values[0]) > -1e-13 * float(values[-1])
    gradients = [3 * (y[i] >= 0).sum() / (y >= 0).sum() * risk.samples(torch.tensor([i])).gradient()
                 for i in range(3)]  # fmt: skip
    mean = risk.gradient()
    torch.testing.assert_close(sum(gradients) / 3, mean)
    centred = torch.stack([g - mean for g in gradients])
    torch.testing.assert_close(matrix, centred.T @ centred / 3)


@pytest.mark.parametrize("call", [partial(fisher, kind="empirical"), gradient_covariance])
def test_a_loss_that_is_no_mean_over_samples_raises(call):
    def contrast(outputs, target):
        return (outputs - outputs.mean(0)).square().mean()

    risk = Risk(mlp().double(), contrast, vectors(4))
    with pytest.raises(ValueError, match="must be the mean of the losses of its samples"):
        call(risk)


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(label_smoothing=0.1), nn.HuberLoss()])
def test_drawing_labels_raises_for_a_loss_that_is_no_likelihood(loss_fn):
    target = labels(3, 5) if isinstance(loss_fn, nn.CrossEntropyLoss) else noise(5, 3)
    risk = Risk(mlp().double(), loss_fn, [(noise(5, 3), target)])
    with pytest.raises(ValueError, match="a likelihood to draw labels from"):
        fisher(risk)


def test_a_convex_loss_without_a_forward_rule_has_a_gauss_newton_matrix():
    model, data = mlp().double(), [(noise(5, 3), noise(5, 3, seed=2))]

    def huber(outputs, target):
        gap = (outputs - target).abs()
        return torch.where(gap < 1, 0.5 * gap.square(), gap - 0.5).mean()

    op = ggn(Risk(model, nn.HuberLoss(), data))
    torch.testing.assert_close(op.dense(), ggn(Risk(model, huber, data)).dense())
    assert op.products.plan.startswith("reverse twice")


WEIGHT = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"weight": WEIGHT}, {"ignore_index": 1}])
def test_log_probabilities_with_nll_have_the_gauss_newton_matrix_of_cross_entropy(options):
    model = mlp().double()
    with_log = nn.Sequential(model, nn.LogSoftmax(1))
    logits = Risk(model, nn.CrossEntropyLoss(**options), vectors(6))

    for loss_fn in (nn.NLLLoss(**options), partial(functional.nll_loss, **options)):
        risk = Risk(with_log, loss_fn, vectors(6))
        matrix = ggn(risk, engine="eager").dense()
        torch.testing.assert_close(matrix, ggn(logits, engine="eager").dense())
        assert risk.loss() == pytest.approx(logits.loss())


def test_fisher_matrices_of_nll_equal_those_of_cross_entropy():
    model = mlp().double()
    logits = Risk(model, CE, vectors(6))
    risk = Risk(nn.Sequential(model, nn.LogSoftmax(1)), nn.NLLLoss(), vectors(6))
    for kind in ("monte_carlo", "empirical"):
        torch.testing.assert_close(
            fisher(risk, kind=kind).dense(), fisher(logits, kind=kind).dense()
        )


def test_nll_of_outputs_that_are_no_log_probabilities_raises():
    with pytest.raises(ValueError, match=r"log-probabilities for NLLLoss, .*add nn\.LogSoftmax"):
        Risk(mlp().double(), nn.NLLLoss(), vectors(6))


def test_a_gauss_newton_matrix_that_is_zero_warns():
    def likelihood(outputs, target):
        return -outputs.gather(1, target[:, None]).mean()

    risk = Risk(nn.Sequential(mlp().double(), nn.LogSoftmax(1)), likelihood, vectors(6))
    with pytest.warns(
        UserWarning, match="linear in the outputs, so the Gauss-Newton matrix is zero"
    ):
        ggn(risk)


@pytest.mark.parametrize("sharpness", [1.0, 14.0, 30.0])
@pytest.mark.parametrize("loss_fn", [CE, BCE])
def test_the_matrix_of_certain_outputs_keeps_its_digits_in_float32(loss_fn, sharpness):
    # 1 - p has no digits left in float32 if it is computed as such.
    outputs = sharpness * torch.tensor([[1.0, 0.0, 0.1], [0.2, 1.0, 0.0]])
    target = torch.tensor([0, 1]) if loss_fn is CE else torch.ones(2, 3)
    tangent = torch.tensor([[0.7, -0.4, 1.3], [0.5, 2.0, -0.6]])
    known = known_loss(loss_fn)

    found = known.hessian(outputs, target, tangent)

    exact = known.hessian(outputs.double(), target, tangent.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", KNOWN)
def test_accurate_losses_have_the_values_and_derivatives_of_torch(name):
    loss_fn, shape, target = KNOWN[name]
    outputs, tangent = noise(*shape, seed=4), noise(*shape, seed=5)
    accurate = accurate_loss(loss_fn)

    def derivatives(call):
        gradient = grad(lambda f: call(f, target))
        return call(outputs, target), gradient(outputs), jvp(gradient, (outputs,), (tangent,))[1]

    torch.testing.assert_close(derivatives(accurate), derivatives(plain(loss_fn)))


@pytest.mark.parametrize("sharpness", [14.0, 30.0, 80.0])
@pytest.mark.parametrize("loss_fn", [CE, BCE])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_gradient_of_certain_outputs_keeps_its_digits_in_float32(
    loss_fn, sharpness, chunked, monkeypatch
):
    # p_y - 1 has no digits left in float32 if it is computed as such.
    if chunked:
        monkeypatch.setattr(cross_entropy, "TUNING", cross_entropy.Tuning(large=1))
    outputs = sharpness * torch.tensor([[1.0, 0.0, 0.1], [0.2, 1.0, 0.0]])
    target = torch.tensor([0, 1]) if loss_fn is CE else torch.tensor([[1.0, 0, 1], [0, 1, 1]])
    gradient = grad(lambda f: accurate_loss(loss_fn)(f, target))

    found, product = jvp(gradient, (outputs,), (torch.ones_like(outputs) - outputs,))

    wide = outputs.double()
    if loss_fn is CE:  # p - e_y with p_y - 1 as a sum
        p = wide.softmax(1)
        label = target[:, None]
        others = p.scatter(1, label, 0.0)
        exact = others.scatter(1, label, -others.sum(1, keepdim=True)) / len(p)
    else:
        exact = torch.where(target > 0, -(-wide).sigmoid(), wide.sigmoid()) / wide.numel()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)
    known = known_loss(loss_fn).hessian(wide, target, 1 - wide)
    # For a label that is certain and wrong, p (1 - p) is tiny and cancels.
    right = gradient(wide).abs() * wide.numel() < 0.9
    torch.testing.assert_close(product.double()[right], known[right], rtol=2e-5, atol=0)


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0, 1e4])
def test_derivatives_of_wrong_labels_keep_their_digits_in_float32(scale):
    # exp(f_k - log sum exp f) has an error of |f| times machine precision.
    outputs = torch.tensor([[scale, 0.3, scale + 0.5], [scale, scale - 0.25, 0.1]])
    target, tangent = torch.tensor([1, 2]), torch.tensor([[0.7, -0.4, 1.3], [0.5, 2.0, -0.6]])
    gradient = grad(lambda f: accurate_loss(CE)(f, target))

    found, forward = jvp(gradient, (outputs,), (tangent,))
    backward = vjp(gradient, outputs)[1](tangent)[0]

    exact = grad(lambda f: CE(f, target))(outputs.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    product = known_loss(CE).hessian(outputs.double(), target, tangent.double())
    for each in (forward, backward):
        torch.testing.assert_close(each.double(), product, rtol=2e-6, atol=1e-7 * product.norm())


@pytest.mark.parametrize("chunked", [False, True])
def test_the_value_for_certain_labels_keeps_its_digits_in_float32(chunked, monkeypatch):
    if chunked:
        monkeypatch.setattr(cross_entropy, "TUNING", cross_entropy.Tuning(large=1))
    outputs, target = torch.tensor([[17.0, 0.0, 1.0], [0.0, 30.0, -2.0]]), torch.tensor([0, 1])

    value = accurate_loss(CE)(outputs, target).double()

    others = [[-17.0, -16.0], [-30.0, -32.0]]
    exact = torch.tensor(others, dtype=torch.float64).exp().sum(1).log1p().mean()
    torch.testing.assert_close(value, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("chunked", [False, True])
def test_an_ignored_label_does_not_make_the_derivatives_of_excluded_classes_nan(
    chunked, monkeypatch
):
    if chunked:
        monkeypatch.setattr(cross_entropy, "TUNING", cross_entropy.Tuning(large=1))
    outputs = noise(4, 3).index_fill(1, torch.tensor(0), -torch.inf)
    target, tangent = torch.tensor([1, -100, 2, -100]), noise(4, 3, seed=5)

    def derivatives(call):
        gradient = grad(lambda f: call(f, target))
        return call(outputs, target), *jvp(gradient, (outputs,), (tangent,))

    torch.testing.assert_close(derivatives(accurate_loss(CE)), derivatives(CE))


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)])
def test_labels_in_uint8_are_those_in_int64(weight):
    model, inputs, target = mlp(4, 3).double(), noise(6, 4), labels(3, 6)
    risks = [  # three classes and three samples per batch: uint8 would be a mask of the weights
        Risk(model, partial(CE, weight=weight), list(zip(inputs.split(3), y.split(3), strict=True)))
        for y in (target, target.to(torch.uint8))
    ]

    values = [(torch.tensor(r.loss()), r.gradient(), hessian(r) @ r.theta) for r in risks]

    torch.testing.assert_close(*values)


@pytest.mark.parametrize("loss_fn", [CE, BCE])
def test_a_traced_hessian_product_has_no_more_operations_than_that_of_the_plain_loss(loss_fn):
    target = labels(3, 6) if loss_fn is CE else (noise(6, 3) > 0).double()
    counts = []
    for call in (loss_fn, lambda outputs, y: loss_fn(outputs, y)):  # the latter is not recognized
        op = hessian(Risk(mlp(4, 3).double(), call, [(noise(6, 4), target)]))
        op @ op.risk.theta
        ((trace,),) = op.products._choice.traces.values()
        counts.append(len(trace._tangent.graph.nodes))
    assert counts[0] <= counts[1]


@pytest.mark.parametrize("loss_fn", [CE, BCE])
def test_hessian_products_whose_squares_underflow_keep_their_digits_in_float32(loss_fn):
    model, inputs = mlp(4, 3), noise(6, 4).float()
    with torch.no_grad():
        model[2].bias += 60 * torch.tensor([1.0, 0, 0] if loss_fn is CE else [1.0, -1, -1])
    target = torch.zeros(6, dtype=torch.int64)
    target = target if loss_fn is CE else functional.one_hot(target, 3).float()

    wide, narrow = (
        Risk(model, loss_fn, (inputs, target), precision=p) for p in ("float64", "float32")
    )
    exact = hessian(wide) @ wide.theta
    product = hessian(narrow) @ narrow.theta

    assert 0 < exact.norm() < 1e-22
    assert (product - exact).norm() < 1e-5 * exact.norm()


def test_a_label_without_other_classes_has_no_derivative():
    outputs = torch.tensor([[0.3, -torch.inf], [1.0, 2.0]])
    target = torch.tensor([0, 1])

    value, gradient = accurate_loss(CE)(outputs, target), grad(accurate_loss(CE))(outputs, target)

    torch.testing.assert_close(value, CE(outputs, target))
    torch.testing.assert_close(gradient, grad(CE)(outputs, target))
    assert not grad(accurate_loss(CE))(outputs[:, :1], torch.zeros(2, dtype=torch.int64)).any()


def test_losses_of_single_samples_need_not_be_vectorized():
    def loss_fn(outputs, target):  # torch checks the variances by value
        return functional.gaussian_nll_loss(outputs[:, 0], target, outputs[:, 1].exp())

    x, y, model = noise(4, 3), noise(4, seed=1), mlp(3, 2).double()

    matrix = fisher(Risk(model, loss_fn, (x, y)), kind="empirical", engine="eager").dense()

    alone = [Risk(model, loss_fn, (x[i : i + 1], y[i : i + 1])).gradient() for i in range(4)]
    torch.testing.assert_close(matrix, sum(torch.outer(g, g) for g in alone) / 4)
    several = Risk(model, lambda f, y: (f[:, 0] - y).square().topk(2)[0].mean(), (x, y))
    with pytest.raises(ValueError, match="for a batch of one sample, but it fails: selected index"):
        fisher(several, kind="empirical")
