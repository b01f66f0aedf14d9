"""Linearised products: traces, their two parts, and models that cannot be traced."""

import gc
import warnings
from functools import partial

import pytest
import torch
from curvature.networks import (
    Case,
    Encoder,
    Padded,
    Recurrent,
    case,
    cnn,
    images,
    mlp,
    noise,
    sequences,
    vectors,
)
from curvature.oracles import dense_ggn, dense_hessian, difference_hessian
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ritz.curvature import Risk, fisher, ggn, hessian
from ritz.curvature._tracing import Linearization, nbytes

UNTRACED = pytest.mark.filterwarnings("ignore:.* cannot be traced")


class Sine(torch.autograd.Function):
    """An operation without a forward rule, as those of other libraries are."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, slope):
        return slope * ctx.saved_tensors[0].cos()


class Middle(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(3, 4), nn.Linear(4, 3), between

    def forward(self, x):
        return self.last(self.between(self.first(x)))


def branching(h):
    return torch.tanh(h * 2 if h.sum() > 0 else h)


def scaled(h):
    return torch.tanh(h / float(h.detach().abs().max()))


def in_place(h):
    h = h.clone()
    h[:, 0].mul_(2)
    h += 1
    return h.sigmoid_()


def made(between, oracle=None, sizes=(5, 3)):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = Case(model=Middle(between), data=vectors(*sizes))
    if oracle is not None:
        found.prepared.between = oracle
    return found


@pytest.mark.parametrize(("operator", "dense"), [(hessian, dense_hessian), (ggn, dense_ggn)])
def test_operations_without_a_forward_rule_use_reverse_over_reverse(operator, dense):
    one = made(Sine.apply, oracle=torch.sin)
    op = operator(one.risk())
    torch.testing.assert_close(op.dense(), dense(one))
    assert op.products.plan.startswith("reverse")
    assert "linearized (no forward" in op.products.plan
    assert "must implement the jvp function" in op.products.plan
    # Nor has it a rule for blocks, which a trace does not need.
    op = operator(one.risk(), engine="eager")
    torch.testing.assert_close(op.dense(), dense(one))
    assert "one column at a time: You tried to vmap over Sine" in op.products.plan


def reshaped(h):
    kept = (h.detach()[:, 0] > -1e9).nonzero()[:, 0]  # a shape that depends on values
    return torch.tanh(h[kept])


@pytest.mark.parametrize("between", [branching, scaled])
@pytest.mark.parametrize(("operator", "dense"), [(hessian, dense_hessian), (ggn, dense_ggn)])
def test_a_model_with_data_dependent_control_flow_is_linearized(between, operator, dense):
    one = made(between)
    op = operator(one.risk(), engine="linearized")
    torch.testing.assert_close(op.dense(), dense(one))


@UNTRACED
@pytest.mark.parametrize(("operator", "dense"), [(hessian, dense_hessian), (ggn, dense_ggn)])
def test_a_model_with_shapes_that_depend_on_values_is_eager_and_the_plan_says_why(operator, dense):
    one = made(reshaped)
    op = operator(one.risk())
    torch.testing.assert_close(op.dense(), dense(one))
    assert "eager (not linearized: " in op.products.plan
    with pytest.raises(RuntimeError, match="engine='linearized' needs a traceable model"):
        operator(one.risk(), engine="linearized") @ noise(31)


def len_of_target(batch):
    return len(batch[1])


def masked(outputs, target):
    return (outputs - target.unsqueeze(1)).square().mean(1)[target >= 0].mean()


def gathered(outputs, target):
    return functional.cross_entropy(outputs[(target >= 0).nonzero()[:, 0]], target[target >= 0])


@UNTRACED
@pytest.mark.parametrize("loss_fn", [masked, gathered])
@pytest.mark.parametrize("counts", [(1, 3), (3, 1)])
def test_a_loss_with_data_dependent_shapes_is_not_traced(loss_fn, counts):
    # Batches of one shape: the trace of the first would divide by its number of terms.
    data = []
    for (x, y), count in zip(vectors(4, 4), counts, strict=True):
        data.append((x, torch.where(torch.arange(4) < count, y, -1)))
    risk = Risk(mlp().double(), loss_fn, data, count=len_of_target)
    op = hessian(risk)
    parts = [hessian(risk.batch(index), engine="eager").dense() for index in range(2)]
    torch.testing.assert_close(op.dense(), (parts[0] + parts[1]) / 2)
    assert "not linearized: shapes depend on the values of tensors" in op.products.plan


@UNTRACED
def test_a_shape_of_batches_that_cannot_be_traced_is_computed_eagerly():
    def loss_fn(outputs, target):
        return gathered(outputs, target) if len(target) < 4 else squared(outputs, target)

    def squared(outputs, target):
        return (outputs - target.unsqueeze(1)).square().mean()

    risk = Risk(mlp().double(), loss_fn, vectors(4, 3), count=len_of_target)
    op = hessian(risk)
    torch.testing.assert_close(op.dense(), hessian(risk, engine="eager").dense())
    assert "(not linearized for all batches: shapes depend on" in op.products.plan
    with pytest.raises(RuntimeError, match="shapes depend on the values"):
        hessian(risk, engine="linearized") @ risk.theta


def weight_normed(normed):
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the older of the two
        torch.manual_seed(3)
        return nn.Sequential(normed(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 3)).double()


def test_products_through_weight_norm_are_right_although_those_of_torch_are_not():
    one = Case(model=weight_normed(nn.utils.parametrizations.weight_norm), data=vectors(5))
    judge = difference_hessian(one, step=1e-3)
    op = hessian(one.risk())
    torch.testing.assert_close(op.dense(), judge, rtol=0, atol=1e-8)
    assert op.products.plan == "forward over reverse, linearized"
    older = Risk(weight_normed(nn.utils.weight_norm), nn.CrossEntropyLoss(), one.data)
    assert torch.equal(older.theta, one.theta)
    torch.testing.assert_close(hessian(older) @ noise(35), op @ noise(35))
    theirs = torch.autograd.functional.hessian(one.loss, one.theta)
    assert float((theirs - theirs.T).abs().max()) > 1e-3  # the day this fails, torch has changed


@pytest.mark.parametrize(("operator", "dense"), [(hessian, dense_hessian), (ggn, dense_ggn)])
def test_the_padding_row_of_an_embedding_is_a_constant(operator, dense):
    tokens = torch.tensor([[0, 1, 2], [3, 0, 0], [2, 2, 1]])
    one = Case(model=Padded(), data=[(tokens, torch.tensor([0, 2, 1]))])
    one.prepared.embed.padding_idx = None
    expected = dense(one).clone()
    assert float(expected[:3].abs().max()) > 0
    expected[:3] = expected[:, :3] = 0
    for engine in ("eager", "linearized"):
        op = operator(one.risk(), engine=engine)
        torch.testing.assert_close(op.dense(), expected)
        assert "no forward" not in op.products.plan  # it has a forward rule


@pytest.mark.parametrize("engine", ["auto", "linearized", "eager"])
def test_a_product_that_is_not_symmetric_raises(engine):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(4, 3)

        def forward(self, tokens):
            rows = torch.embedding(self.embed.weight, tokens, scale_grad_by_freq=True)
            return rows.sin().mean(1).tanh()

    data = [(torch.tensor([[1, 1, 1], [1, 2, 3]]), torch.tensor([0, 2]))]
    one = Case(model=Scaled(), data=data)
    with pytest.raises(
        RuntimeError, match="no forward over reverse: the product is not symmetric, by"
    ):
        hessian(one.risk(), engine=engine) @ one.theta


@pytest.mark.parametrize("engine", ["eager", "linearized"])
def test_no_grad_and_autocast_around_a_product_change_nothing(engine):
    model = mlp()
    data = [(x.float(), y) for x, y in vectors(5)]
    risk = Risk(model, nn.CrossEntropyLoss(), data)
    vector = noise(31).float()
    expected, loss = hessian(risk, engine=engine) @ vector, risk.loss()
    for around in (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.no_grad(),
        torch.inference_mode(),
    ):
        with around:
            again = Risk(model, nn.CrossEntropyLoss(), data)
            assert torch.equal(hessian(again, engine=engine) @ vector, expected)
            assert risk.loss() == loss
            assert torch.equal(hessian(risk, engine=engine) @ vector, expected)


@pytest.mark.parametrize("engine", ["eager", "linearized"])
def test_models_that_write_in_place_are_right(engine):
    one = made(in_place)
    op = hessian(one.risk(), engine=engine)
    torch.testing.assert_close(op.dense(), dense_hessian(one))


@UNTRACED
def test_a_trace_with_a_wrong_product_is_not_used(monkeypatch):
    monkeypatch.setattr(Linearization, "tangent", lambda self, kept, tangent: tangent)
    risk, dense = case("mlp").risk(), dense_hessian(case("mlp"))
    op = hessian(risk)
    torch.testing.assert_close(op @ noise(31), dense @ noise(31))
    assert "eager (not linearized: the traced product differs by" in op.products.plan


@UNTRACED
def test_a_trace_that_is_not_symmetric_is_not_used(monkeypatch):
    right, calls = Linearization.tangent, []

    def tangent(self, kept, tangent):
        calls.append(1)
        product = right(self, kept, tangent)
        return product if len(calls) == 1 else torch.zeros_like(product)

    monkeypatch.setattr(Linearization, "tangent", tangent)
    one = case("group norm")  # of one batch
    op = hessian(one.risk())
    vector = noise(op.shape[0])
    torch.testing.assert_close(op @ vector, dense_hessian(one) @ vector)
    assert "eager (not linearized: the product is not symmetric, by" in op.products.plan


class Evaluations(TorchDispatchMode):
    """Counts forward passes of a model with one tanh, in graphs of operations as well."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.tanh.default
        return func(*args, **(kwargs or {}))


def evaluations(action):
    with Evaluations() as passes:
        action()
    return passes.count


# A product that is differentiated anew evaluates the model once (Hessian), or forward and in
# reverse (the others). The first product does so for reference and for the trace; then the primal
# part of each batch is computed once.
@pytest.mark.parametrize(("operator", "eager"), [(hessian, 1), (ggn, 2), (fisher, 2)])
@pytest.mark.parametrize("num_batches", [1, 3])
def test_the_primal_part_of_a_batch_is_computed_once(operator, eager, num_batches):
    op = operator(made(torch.tanh, sizes=[5] * num_batches).risk())
    assert evaluations(lambda: op @ noise(31)) == 2 * eager + num_batches
    assert op.products.plan.endswith(", linearized")
    assert evaluations(lambda: op @ noise(31, seed=1)) == 0
    assert evaluations(lambda: op @ noise(31, 9)) == 0


def test_the_primal_part_is_computed_once_per_product_without_a_cache():
    op = hessian(made(torch.tanh, sizes=(5, 5)).risk(), memory=0)
    assert evaluations(lambda: op @ noise(31)) == 2 + 2
    assert evaluations(lambda: op @ noise(31, seed=1)) == 2
    assert not op.products._cached


def test_the_first_batch_is_inspected_in_two_passes():
    one = made(torch.tanh)
    assert evaluations(one.risk) == 2


def test_a_linear_function_is_split_where_the_vector_enters():
    calls = []

    def product(vector, point):
        calls.append(1)
        weights, constant = point
        scales = torch.sin(weights["a"]).square() + constant
        return torch.cat([scales * vector[:4] * 3, vector[4:] @ weights["b"]])

    point = ({"a": noise(4), "b": noise(3, 2)}, 0.5)
    vector = noise(7, seed=1)
    trace = Linearization(product, vector, point)
    primal = trace.primal(point)
    expected = product(vector, point)
    assert torch.equal(trace.tangent(primal, vector[None])[0], expected)
    wide = torch.stack([vector, 2 * vector, 0 * vector])
    expected = torch.stack([expected, 2 * expected, 0 * expected])
    torch.testing.assert_close(trace.tangent(primal, wide), expected)
    assert len(calls) == 2
    operations = [str(node.target) for node in trace._tangent.graph.nodes]
    assert not any("sin" in name for name in operations)


def test_a_trace_holds_for_other_points_of_the_same_shapes():
    trace = Linearization(lambda v, point: point[0].exp() * v, noise(3), (noise(3),))
    other, vector = noise(3, seed=5), noise(3, seed=6)
    product = trace.tangent(trace.primal((other,)), vector[None])[0]
    torch.testing.assert_close(product, other.exp() * vector)


@pytest.mark.parametrize("width", [1, 3])
def test_a_product_that_ignores_the_vector_is_new_in_every_call(width):
    def product(vector, point):
        return torch.cat([torch.zeros_like(point[0]), point[0] * 0])

    trace = Linearization(product, noise(6), (noise(3),))
    primal, vectors = trace.primal((noise(3),)), noise(width, 6)
    trace.tangent(primal, vectors).add_(1)  # the caller may change it
    assert torch.equal(trace.tangent(primal, vectors), torch.zeros_like(vectors))


def test_equal_numbers_of_other_types_are_not_merged():
    def product(vector, point):
        x = point[0]
        return vector * (x.sum(0, keepdim=True) + x.sum(0, keepdim=False)) + x.pow(1) * 0

    trace = Linearization(product, noise(3), (noise(3),))
    x, vector = noise(3), noise(3, seed=1)
    primal = trace.primal((x,))
    torch.testing.assert_close(trace.tangent(primal, vector[None])[0], vector * 2 * x.sum())


def test_memory_is_counted_once():
    base = torch.zeros(8, dtype=torch.float64)
    assert nbytes([base, base[2:], base.view(2, 4)]) == 64
    assert nbytes([base[:2], torch.zeros(4)], beside=[base]) == 16


def test_the_cache_stays_within_its_memory():
    risk = case("mlp").risk()
    op = hessian(risk, engine="linearized")
    vector = noise(31)
    product = op @ vector
    sizes = [nbytes(kept.args[0]) for kept in op.products._cached.values()]
    some = hessian(risk, engine="linearized", memory=max(sizes))
    assert torch.equal(some @ vector, product)
    assert 0 < len(some.products._cached) < risk.num_batches


def test_arithmetic_with_zeros_is_removed_from_a_trace():
    def product(vector, point):
        weights, bias, inputs = point
        nothing = torch.zeros_like(inputs)
        return inputs @ vector + (nothing @ weights + bias) * 0.0 + nothing @ weights

    point = (noise(4, 2), noise(2), noise(3, 4))
    trace = Linearization(product, noise(4, 2), point)
    vectors = noise(1, 4, 2, seed=3)
    torch.testing.assert_close(trace.tangent(trace.primal(point), vectors), point[2] @ vectors)
    products = [node for part in (trace._primal, trace._tangent) for node in part.graph.nodes
                if node.target is torch.ops.aten.mm.default]  # fmt: skip
    assert len(products) == 1


@pytest.mark.parametrize("wanted", ["input", "weight"])
def test_convolutions_of_zeros_are_removed_from_a_trace(wanted):
    def product(vector, point):
        x, w = point
        zero = torch.zeros_like(w if wanted == "input" else x)
        delta = torch.nn.functional.conv2d(x, vector)
        pair = (x, zero) if wanted == "input" else (zero, w)
        grads = torch.ops.aten.convolution_backward(
            delta, *pair, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
            [wanted == "input", wanted == "weight", False])  # fmt: skip
        return grads[0 if wanted == "input" else 1] + pair[0 if wanted == "input" else 1] * 0

    point = (noise(2, 3, 4, 4), noise(5, 3, 2, 2))
    trace = Linearization(product, noise(5, 3, 2, 2), point)
    targets = {node.target for node in trace._tangent.graph.nodes}
    assert torch.ops.aten.convolution_backward.default not in targets
    assert not bool(trace.tangent(trace.primal(point), noise(1, 5, 3, 2, 2)).any())


def test_a_model_that_cannot_be_traced_warns_once_and_says_how_to_avoid_it():
    one = made(reshaped)
    risk, vector = one.risk(), noise(31)

    with pytest.warns(UserWarning, match="Middle cannot be traced, so each product") as caught:
        hessian(risk) @ vector
    ggn(risk) @ vector  # a second warning would be an error
    hessian(risk.at(2 * risk.theta)) @ vector

    assert len(caught) == 1
    assert "2 to 4 gradients, instead of 1 to 2" in str(caught[0].message)
    assert "Pass engine='eager'" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hessian(one.risk(), engine="eager") @ vector
        hessian(made(torch.tanh).risk()) @ vector


def test_a_model_that_is_traced_on_some_batches_alone_warns_as_well():
    def loss_fn(outputs, target):
        chosen = outputs[target >= 0] if len(target) < 4 else outputs
        return chosen.square().mean()

    op = hessian(Risk(mlp().double(), loss_fn, vectors(4, 3)))

    with pytest.warns(UserWarning, match="on some batches, such as one of 3 samples") as caught:
        op @ op.risk.theta

    assert "shapes depend on the values" in str(caught[0].message)


RAGGED = {
    "dense": (mlp, vectors, {}),
    "convolutions": (cnn, images, {}),
    "batch norm in train mode": (cnn, images, {"batch_norm": "train"}),
    "attention": (Encoder, partial(sequences, width=4), {}),
    "recurrent": (lambda: Recurrent(nn.LSTM), sequences, {}),
}


def ignoring(outputs, target):
    """Cross-entropy without the first class, so that each batch has its own number of terms."""
    return functional.cross_entropy(outputs, target, ignore_index=0)


@pytest.mark.parametrize("loss_fn", [functional.cross_entropy, ignoring])
@pytest.mark.parametrize("family", RAGGED)
def test_batches_of_all_sizes_have_the_products_of_eager_derivatives(family, loss_fn):
    make, data, options = RAGGED[family]
    count = {"count": len_of_target} if loss_fn is ignoring else {}
    risk = Risk(make().double(), loss_fn, data(8, 8, 3, 5), **options, **count)
    block = noise(risk.space.size, 3)

    for matrix in (hessian, ggn):
        op, exact = matrix(risk), matrix(risk, engine="eager") @ block

        torch.testing.assert_close(op @ block, exact)
        torch.testing.assert_close(op @ block[:, 0], exact[:, 0])
        # One trace for all sizes, but not where samples are coupled.
        assert op.products._num_traces == (3 if options else 1)


def squares_over(count):
    """A mean of squares that divides by ``count(target)``."""
    return lambda outputs, target: outputs.square().sum() / count(target) / outputs.shape[1]


UNEVEN = {
    "the number as a float": lambda target: float(len(target)),
    "its inverse": lambda target: 1 / (1 / len(target)),
    "one less than a multiple": lambda target: (100 * len(target) - 1) * len(target) / 99,
}


@pytest.mark.parametrize("count", UNEVEN)
def test_a_trace_with_a_constant_number_of_samples_is_not_used_for_others(count):
    risk = Risk(mlp().double(), squares_over(UNEVEN[count]), vectors(8, 7), count=len_of_target)
    vector = noise(risk.space.size)

    product = hessian(risk) @ vector

    torch.testing.assert_close(product, hessian(risk, engine="eager") @ vector)


def test_a_size_of_the_network_that_is_a_multiple_of_the_batch_size_stays_fixed():
    model = nn.Sequential(nn.Linear(3, 14), nn.Unflatten(1, (2, 7)), nn.Tanh(), nn.Flatten())
    model.append(nn.Linear(14, 3))
    risk = Risk(model.double(), functional.cross_entropy, vectors(8, 7, 5))
    vector = noise(risk.space.size)
    op = hessian(risk)

    torch.testing.assert_close(op @ vector, hessian(risk, engine="eager") @ vector)


@pytest.mark.parametrize(("num_products", "traces"), [(15, 1), (16, 2)])
def test_a_short_last_batch_is_traced_only_if_products_repay_it(num_products, traces):
    model, batches = small_case([4, 4, 3])  # too few samples for one trace of all sizes
    risk = Risk(model, functional.cross_entropy, batches)
    op, vector = hessian(risk, num_products=num_products), noise(risk.space.size)

    torch.testing.assert_close(op @ vector, hessian(risk, engine="eager") @ vector)
    assert len(op.products._choice.traces) == traces


def small_case(sizes):
    """A network and batches of these sizes."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for weight in model.parameters():
        nn.init.normal_(weight, generator=generator)
    inputs = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in sizes]
    return model, [(x, torch.arange(len(x)) % 2) for x in inputs]


@pytest.mark.parametrize(("num_products", "count"), [(1, 15), (15, 1)])
def test_a_model_is_not_traced_for_few_products(num_products, count):
    model, batches = small_case([4] * count)
    risk = Risk(model, functional.cross_entropy, batches)
    unused = hessian(risk)
    few = hessian(risk, num_products=num_products)
    vector = torch.linspace(-1, 1, risk.space.size, dtype=torch.float64)

    product = few @ vector

    assert few.products.plan == "plain autograd, eager"
    many = hessian(risk, num_products=num_products + 1)
    torch.testing.assert_close(many @ vector, product)
    assert "linearized" in many.products.plan
    # A trace that is there is used.
    assert unused.products.plan == many.products.plan
    assert "linearized" in hessian(risk, num_products=1).products.plan


def test_a_shorter_last_batch_of_many_has_no_trace():
    model, batches = small_case([2] * 35 + [1])
    risk = Risk(model, functional.cross_entropy, batches)
    op, strict = hessian(risk), hessian(risk, engine="linearized")

    torch.testing.assert_close(op.dense(), strict.dense())

    assert len(op.products._choice.traces) == 1
    assert len(strict.products._choice.traces) == 2


def test_products_of_an_lstm_take_forward_rules_in_float32_too():
    # torch has a kernel for it in float32 alone, without a forward rule.
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = nn.LSTM(3, 4, num_layers=2), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.layers(x.movedim(1, 0))[0][-1])

    generator = torch.Generator().manual_seed(0)
    model = Recurrent()
    for weight in model.parameters():
        nn.init.normal_(weight, generator=generator)
    x, labels = torch.randn(4, 5, 3, generator=generator), torch.arange(4) % 2
    single, double = (
        hessian(Risk(model, functional.cross_entropy, (x, labels), precision=precision))
        for precision in ("float32", "float64")
    )
    vector = torch.linspace(-1, 1, single.shape[0])

    product, exact = single @ vector, double @ vector.double()

    assert single.products.plan == "forward over reverse, linearized"
    assert float((product - exact).norm()) < 1e-5 * float(exact.norm())
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_garbage_collection_is_as_before_a_trace(enabled, fails, monkeypatch):
    states, build = [], Linearization.__init__

    def observed(self, *args, **options):
        states.append(gc.isenabled())
        if fails:
            raise RuntimeError("no trace")
        build(self, *args, **options)

    monkeypatch.setattr(Linearization, "__init__", observed)
    model, batches = small_case([4])
    op = hessian(Risk(model, functional.cross_entropy, batches))
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            op @ noise(op.shape[0])
        after = gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()

    assert (states, after) == ([False], enabled)
