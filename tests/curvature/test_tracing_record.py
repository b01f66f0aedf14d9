"""Functions recorded as graphs of operations."""

import pytest
import torch
from torch import fx
from torch.func import functionalize, grad, jvp, vmap

from ritz.curvature._tracing import GuardError, guard, record


def replay(recording, *inputs):
    """Return the result of a recorded graph at other inputs."""
    (result,) = fx.GraphModule(recording.root, recording.graph)(*inputs)
    return result


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def second(x, v):
    return jvp(grad(lambda point: point.sin().square().sum()), (x,), (v,))[1]


def split(x, v):
    first, last = x.chunk(2)
    return torch.cat([last * v.mean(), first]).topk(2).values


@pytest.mark.parametrize("function", [second, split, functionalize(lambda x, v: x.clone().add_(v))])
def test_a_graph_computes_the_function_at_other_inputs(function):
    recording = record(function, [numbers(4), numbers(4, seed=1)])

    inputs = numbers(4, seed=2), numbers(4, seed=3)
    result = replay(recording, *inputs)

    torch.testing.assert_close(result, function(*inputs), rtol=0, atol=0)


def test_a_tensor_passed_twice_is_two_inputs_and_is_left_alone():
    x = numbers(3)
    recording = record(lambda a, b: a - 2 * b, [x, x])

    result = replay(recording, numbers(3), torch.zeros(3, dtype=torch.float64))

    assert torch.equal(result, numbers(3))
    assert not vars(x)


def test_numbers_read_from_inputs_are_guards_and_those_of_constants_are_not():
    constant = torch.tensor(2.0, dtype=torch.float64)

    def function(x):
        return x * constant if x.sum() > 0 and float(constant) > 0 else -x

    recording = record(function, [torch.ones(2, dtype=torch.float64)])

    assert [node.target for node in recording.graph.nodes].count(guard) == 1
    assert replay(recording, torch.ones(2, dtype=torch.float64)).tolist() == [2.0, 2.0]
    with pytest.raises(GuardError, match="another path"):
        replay(recording, -torch.ones(2, dtype=torch.float64))


def test_nan_that_is_read_again_is_the_same_number():
    recording = record(lambda x: x * (1.0 if float(x[0]) > 0 else 2.0), [torch.tensor([torch.nan])])

    assert replay(recording, torch.tensor([torch.nan])).isnan().all()
    with pytest.raises(GuardError):
        replay(recording, torch.ones(1))


def test_random_numbers_are_refused_even_if_the_function_seeds_them():
    def function(x):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return x + torch.randn(2)

    with pytest.raises(RuntimeError, match="draws random numbers"):
        record(function, [torch.ones(2)])


def test_layouts_are_those_of_the_tensors():
    recording = record(lambda x: x.t().contiguous().view(-1), [numbers(2, 3)])

    layouts = [node.meta["val"] for node in recording.graph.nodes if "val" in node.meta]

    assert layouts[0].shape == (2, 3)
    assert [layout.contiguous for layout in layouts[:2]] == [True, False]
    expanded = layouts[0]._replace(shape=torch.Size([1, 3])).expand_to(torch.Size([4, 3]))
    assert expanded.stride == (0, 1)


def test_a_recorded_graph_maps_over_blocks():
    recording = record(second, [numbers(4), numbers(4, seed=1)])
    module = fx.GraphModule(recording.root, recording.graph)
    block = numbers(3, 4, seed=2)

    product = vmap(module, in_dims=(None, 0))(numbers(4), block)[0]

    torch.testing.assert_close(product, torch.stack([second(numbers(4), v) for v in block]))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x if torch.equal(x, 2 * x) else -x, "depends on values"),
        (lambda x: x + torch.rand(2, generator=torch.Generator()), "random numbers"),
    ],
)
def test_functions_that_a_graph_cannot_represent_are_refused(function, message):
    with pytest.raises(RuntimeError, match=message):
        record(function, [numbers(2)])
