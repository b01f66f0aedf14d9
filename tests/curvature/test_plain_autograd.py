"""Models that torch.func refuses are differentiated by plain autograd."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import ritz

pytestmark = pytest.mark.filterwarnings("ignore:.* cannot be traced")


class Packed(nn.Module):
    """A recurrent network over packed sequences, whose lengths leave torch."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.RNN(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        hidden = nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True)[0]
        return self.head(hidden.sum(1))


class Cube(torch.autograd.Function):
    """An operation written before setup_context, which torch.func does not accept."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * cotangent


class Old(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x, lengths):
        return self.second(Cube.apply(self.first(x.sum(1))))


class Checkpointed(Old):
    def forward(self, x, lengths):
        def block(h):
            return torch.tanh(self.first(h))

        return self.second(checkpoint(block, x.sum(1), use_reentrant=False))


class Numpy(Old):
    def forward(self, x, lengths):
        scale = float(lengths.numpy().mean())
        return self.second(torch.tanh(self.first(x.sum(1)) / scale))


def case(kind):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind().double()
        x = torch.randn(5, 4, 2, dtype=torch.float64)
    lengths, labels = torch.tensor([4, 2, 3, 1, 4]), torch.tensor([0, 1, 2, 0, 1])
    return model, [(x[:3], lengths[:3], labels[:3]), (x[3:], lengths[3:], labels[3:])]


def dense(model, batches):
    """Return gradient, Hessian and Gauss-Newton matrix by torch alone."""
    weights = list(model.parameters())

    def flat(parts):
        return torch.cat([part.flatten() for part in parts])

    def rows(values):
        return torch.stack([
            flat(torch.autograd.grad(value, weights, retain_graph=True, materialize_grads=True))
            for value in values
        ])  # fmt: skip

    gradient, hessian, ggn = 0, 0, 0
    for x, lengths, labels in batches:
        share, outputs = len(x) / 5, model(x, lengths)
        loss = cross_entropy(outputs, labels)
        first = flat(torch.autograd.grad(loss, weights, create_graph=True))
        gradient = gradient + share * first.detach()
        hessian = hessian + share * rows(first)
        for output in outputs:
            jacobian, p = rows(output), output.softmax(0).detach()
            middle = p.diag() - torch.outer(p, p)
            ggn = ggn + share / len(x) * jacobian.T @ middle @ jacobian
    return gradient, hessian, ggn


@pytest.mark.parametrize("kind", [Packed, Old, Checkpointed, Numpy])
def test_gradient_hessian_and_gauss_newton_matrix_are_exact(kind):
    model, batches = case(kind)
    gradient, hessian, ggn = dense(model, batches)
    risk = ritz.Risk(model, cross_entropy, batches)
    unit = torch.eye(risk.space.size, dtype=torch.float64)

    torch.testing.assert_close(risk.gradient(), gradient)
    torch.testing.assert_close(ritz.hessian(risk) @ unit, hessian)
    torch.testing.assert_close(ritz.ggn(risk) @ unit, ggn)


def test_the_plan_names_the_way_and_why_others_failed():
    model, batches = case(Packed)
    op = ritz.hessian(ritz.Risk(model, cross_entropy, batches))
    op @ torch.ones(op.shape[0], dtype=torch.float64)
    assert "plain autograd" in op.products.plan
    assert "no forward over reverse" in op.products.plan


def test_parameters_that_are_not_used_have_zero_rows():
    class Partly(Old):
        def __init__(self):
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))

    model, batches = case(Partly)
    risk = ritz.Risk(model, cross_entropy, batches)
    product = ritz.hessian(risk) @ torch.ones(risk.space.size, dtype=torch.float64)
    assert float(risk.gradient()[:2].abs().max()) == 0  # named_parameters: own ones come first
    assert float(product[:2].abs().max()) == 0


@pytest.mark.parametrize("kind", [Packed, Old, Checkpointed, Numpy])
def test_the_warning_gives_the_reason_of_the_model(kind):
    model, batches = case(kind)
    op = ritz.hessian(ritz.Risk(model, cross_entropy, batches))

    with pytest.warns(UserWarning, match="cannot be traced") as caught:
        op @ torch.ones(op.shape[0], dtype=torch.float64)

    (message,) = [str(each.message) for each in caught if "cannot be traced" in str(each.message)]
    assert "requires_grad_" not in message  # which the model does not call


class Masked(Old):
    """A model that torch.func can differentiate and that cannot be traced."""

    def forward(self, x, lengths):
        outputs = self.second(torch.tanh(self.first(x.sum(1)))).clone()
        outputs[lengths > 2] *= 2.0
        return outputs


class Convolved(Masked):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(4, 4, 1)

    def forward(self, x, lengths):
        return super().forward(self.mix(x), lengths)


@pytest.mark.parametrize(
    ("kind", "matrix", "way", "of_blocks"),
    [
        (Masked, ritz.hessian, "plain autograd", "reverse over reverse"),
        (Masked, ritz.ggn, "plain autograd", "reverse twice"),
        (Convolved, ritz.hessian, "plain autograd", "reverse over reverse"),
        (Convolved, ritz.ggn, "forward and reverse", "forward and reverse"),
    ],
)
def test_products_without_a_trace_take_the_fastest_way(kind, matrix, way, of_blocks):
    model, batches = case(kind)
    _, hessian, ggn = dense(model, batches)
    risk = ritz.Risk(model, cross_entropy, batches)
    op, unit = matrix(risk, block_size=4), torch.eye(risk.space.size, dtype=torch.float64)
    expected = hessian if matrix is ritz.hessian else ggn

    torch.testing.assert_close(op @ unit[:, 0], expected[:, 0])
    torch.testing.assert_close(op @ unit, expected)

    assert op.products.plan.startswith(f"{way}, eager (not linearized")
    assert op.products.block_size == 4  # the ways of torch.func serve a block at once
    names = {id(column): name for name, column in op.products._ways}
    assert names[id(op.products._choice.untraced[True])] == of_blocks


def test_a_way_with_another_product_is_not_taken():
    class Wrong(torch.autograd.Function):
        """A square, whose derivative torch.func and plain autograd take for different things."""

        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x**2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, cotangent):
            (x,) = ctx.saved_tensors
            return 2 * (x if torch._C._functorch.maybe_current_level() else x.detach()) * cotangent

        @staticmethod
        def jvp(ctx, tangent):
            return 2 * ctx.saved_tensors[0] * tangent

    class Squared(Old):
        def forward(self, x, lengths):
            return self.second(Wrong.apply(self.first(x.sum(1))))

    model, batches = case(Squared)
    op = ritz.hessian(ritz.Risk(model, cross_entropy, batches), engine="eager")
    product = op @ torch.ones(op.shape[0], dtype=torch.float64)

    exact, _ = case(Old)
    exact.forward = lambda x, lengths: exact.second(exact.first(x.sum(1)) ** 2)
    same = ritz.hessian(ritz.Risk(exact, cross_entropy, batches))
    torch.testing.assert_close(product, same @ torch.ones(op.shape[0], dtype=torch.float64))
    assert not op.products.plan.startswith("plain")
