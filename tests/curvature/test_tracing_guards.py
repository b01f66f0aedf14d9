"""Models that read numbers from tensors, as in ``if mask.all()``, are linearised with guards."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ritz
from ritz.curvature._products import TUNING


class Masked(nn.Module):
    """Takes another path if a mask has zeros, as stock language models do."""

    def __init__(self, generator):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        for weight in self.parameters():
            nn.init.normal_(weight, generator=generator)
        self.calls = 0

    def forward(self, x, mask):
        self.calls += 1
        hidden = torch.tanh(self.first(x))
        if not mask.all():
            hidden = hidden * mask
        return self.second(hidden)


def batch(rng, *, masked, count=5):
    mask = torch.ones(count, 4, dtype=torch.float64)
    if masked:
        mask[:, masked:] = 0
    x = torch.randn(count, 3, generator=rng, dtype=torch.float64)
    return x, mask, torch.arange(count) % 2


def dense(model, batches):
    risk = ritz.Risk(model, cross_entropy, batches)
    eager = ritz.hessian(risk, engine="eager")
    return eager @ torch.eye(risk.space.size, dtype=torch.float64)


@pytest.mark.parametrize("order", [(0, 2, 0, 3), (2, 0)])
def test_batches_on_either_path_have_their_own_trace_and_exact_products(rng, order):
    model = Masked(rng)
    batches = [batch(rng, masked=columns) for columns in order]
    op = ritz.hessian(ritz.Risk(model, cross_entropy, batches), engine="linearized")

    product = op @ torch.eye(op.shape[0], dtype=torch.float64)

    torch.testing.assert_close(product, dense(model, batches))
    assert "linearized" in op.products.plan
    # Two paths, one shape of batch: two traces.
    assert [len(traces) for traces in op.products._choice.traces.values()] == [2]
    calls = model.calls
    op @ torch.ones(op.shape[0], dtype=torch.float64)
    assert model.calls == calls  # the model is not evaluated again


@pytest.mark.filterwarnings("ignore:.* cannot be traced")
def test_a_batch_on_an_untraceable_path_is_eager_and_exact(rng):
    class Rare(Masked):
        def forward(self, x, mask):
            if not mask.all():
                x = x[mask.bool().all(1)]  # a shape that depends on values
                return self.second(torch.tanh(self.first(x))).repeat(5, 1)[:5]
            return super().forward(x, mask)

    model = Rare(rng)
    partial = batch(rng, masked=0)
    partial[1][1] = 0
    batches = [batch(rng, masked=0), partial]
    op = ritz.hessian(ritz.Risk(model, cross_entropy, batches))

    product = op @ torch.eye(op.shape[0], dtype=torch.float64)

    torch.testing.assert_close(product, dense(model, batches))
    assert "not linearized for all batches" in op.products.plan


def test_numbers_read_from_parameters_are_guards_too(rng):
    class Gated(Masked):
        def forward(self, x, mask):
            scale = float(self.first.weight.detach().abs().max())
            return super().forward(x / max(scale, 1.0), mask)

    model, batches = Gated(rng), [batch(rng, masked=0)]
    op = ritz.hessian(ritz.Risk(model, cross_entropy, batches), engine="linearized")

    product = op @ torch.eye(op.shape[0], dtype=torch.float64)

    torch.testing.assert_close(product, dense(model, batches))


class Scaled(nn.Module):
    """Logits times a number that a function reads from the inputs or from further data."""

    def __init__(self, generator, read):
        super().__init__()
        self.layer, self.read = nn.Linear(3, 2).double(), read
        for weight in self.parameters():
            nn.init.normal_(weight, generator=generator)

    def forward(self, x, *more):
        return torch.tanh(self.layer(x)) * self.read(x, *more)


class Box:
    """An object that does not say what it holds."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return "Box()"


def rows(rng, count=5):
    return torch.randn(count, 3, generator=rng, dtype=torch.float64)


def check_exact(model, batches, **options):
    """The products with all batches, and with each alone, by one operator."""
    risk = ritz.Risk(model, cross_entropy, batches)
    op = ritz.hessian(risk, **options)
    identity = torch.eye(risk.space.size, dtype=torch.float64)
    torch.testing.assert_close(op @ identity, dense(model, batches))
    for batch in reversed(batches):
        product = op.at(risk.moved([batch])) @ identity
        torch.testing.assert_close(product, dense(model, [batch]))
    return op


def test_code_that_reads_strides_is_traced_for_each_layout(rng):
    def read(x):
        return 2.0 if x.is_contiguous() else 3.0

    batches = [(x, torch.arange(5) % 2) for x in (rows(rng), rows(rng).T.contiguous().T)]

    op = check_exact(Scaled(rng, read), batches, engine="linearized")

    assert len(op.products._choice.traces) == 2


@pytest.mark.parametrize("dtype", [float, str])  # tensors, and values that are not
def test_values_of_arrays_in_batches_are_told_apart(rng, dtype):
    long = [np.where(np.arange(3000) == 1500, v, 0.0).astype(dtype) for v in (1.0, 2.0)]
    assert repr(long[0]) == repr(long[1])
    batches = [(rows(rng), array, torch.arange(5) % 2) for array in long]

    op = check_exact(Scaled(rng, lambda x, array: float(array[1500])), batches)

    assert sum(map(len, op.products._choice.traces.values())) == 2


def test_batches_with_objects_of_unknown_content_are_eager(rng):
    batches = [(rows(rng), Box(torch.tensor(value)), torch.arange(5) % 2) for value in (1.0, 2.0)]
    model = Scaled(rng, lambda x, box: box.value)

    with pytest.warns(UserWarning, match="a batch contains a Box"):
        op = check_exact(model, batches)

    assert "eager" in op.products.plan
    risk = ritz.Risk(model, cross_entropy, batches)
    with pytest.raises(RuntimeError, match="a batch contains a Box"):
        ritz.hessian(risk, engine="linearized") @ torch.ones(risk.space.size, dtype=torch.float64)


def test_operations_that_fail_at_other_values_come_after_their_guard(rng):
    def read(x, k):  # a table that is too short for larger entries
        table = torch.linspace(1, 2, int(k.max()) + 1, dtype=torch.float64)
        return table[k].unsqueeze(1)

    tops = (1, 3, 2)
    batches = [(rows(rng), torch.arange(5) % (top + 1), torch.arange(5) % 2) for top in tops]

    op = check_exact(Scaled(rng, read), batches, engine="linearized")

    assert [len(traces) for traces in op.products._choice.traces.values()] == [3]


@pytest.mark.filterwarnings("ignore:.* cannot be traced")
def test_a_number_that_differs_everywhere_stops_tracing(rng):
    model = Scaled(rng, lambda x: float(x.detach().abs().max()))
    batches = [(rows(rng), torch.arange(5) % 2) for _ in range(7)]

    op = check_exact(model, batches)

    assert [len(traces) for traces in op.products._choice.traces.values()] == [TUNING.max_paths]
    assert op.products.plan.count("not linearized for all batches") == 1


def test_tensors_that_a_model_caches_can_be_used_after_a_product(rng):
    class Caching(Scaled):
        cache = None

        def forward(self, x):
            if self.cache is None or len(self.cache) < len(x):
                self.cache = 1 + torch.arange(len(x), dtype=torch.float64).unsqueeze(1)
            self.last = super().forward(x)
            return self.last * self.cache[: len(x)]

    model = Caching(rng, lambda x: 1.0)
    before = set(vars(model))
    batches = [(rows(rng, count), torch.arange(count) % 2) for count in (2, 5, 3)]

    check_exact(model, batches)

    assert set(vars(model)) == before
    copy.deepcopy(model)(batches[1][0])
