"""Averaged weights in a model: for a block, for good, in a copy."""

import copy

import pytest
import torch
from optim.walks import assert_near, assert_same, averages, copies, network, tail, trained, walked
from torch import nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from ritz.optim import IterateAverage


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_applied_uses_the_average_and_restores_the_weights_bit_for_bit(dtype):
    model, optimizer, average, path = trained(network(dtype))
    before = copies(model)
    with average.applied(model) as inside:
        assert inside is model
        assert_same(model.parameters(), [a.to(dtype) for a in averages(model, optimizer)])
        assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert_same(model.parameters(), before)
    near = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    assert_near(averages(model, optimizer), tail(path), **near)


def test_applied_restores_the_weights_after_an_error():
    model, _, average, _ = trained()
    before = copies(model)
    with pytest.raises(KeyError), average.applied(model):
        raise KeyError
    assert_same(model.parameters(), before)
    with average.applied(model):
        pass


def test_applied_does_not_change_later_training():
    disturbed, optimizer, average, _ = trained()
    calm, other, _, _ = trained()
    with average.applied(disturbed):
        pass
    walked(disturbed, optimizer, 5)
    walked(calm, other, 5)
    assert_same(disturbed.parameters(), calm.parameters())
    assert_same(averages(disturbed, optimizer), averages(calm, other))


@pytest.mark.parametrize("call", ["applied", "copy_to", "step", "restart"])
def test_calls_that_would_corrupt_the_average_raise_inside_applied(call):
    model, optimizer, average, _ = trained()
    calls = {
        "applied": lambda: average.applied(model).__enter__(),
        "copy_to": lambda: average.copy_to(model),
        "step": optimizer.step,
        "restart": average.restart,
    }
    before = copies(model)
    with (
        pytest.raises(RuntimeError, match=f"{call} must not be called inside"),
        average.applied(model),
    ):
        calls[call]()
    assert_same(model.parameters(), before)


def test_copy_to_changes_the_weights_permanently():
    model, optimizer, average, _ = trained()
    average.copy_to(model)
    assert_same(model.parameters(), averages(model, optimizer))


def test_averaged_model_loads_into_the_plain_model_and_has_no_gradients():
    model, optimizer, average, _ = trained()
    before = copies(model)
    found = average.to_averaged_model(model)
    assert_same(model.parameters(), before)
    assert found.state_dict().keys() == model.state_dict().keys()
    assert_same(found.parameters(), averages(model, optimizer))
    assert all(p.grad is None and p.requires_grad for p in found.parameters())
    assert all(p.grad is not None for p in model.parameters())
    network().load_state_dict(found.state_dict())
    averages(model, optimizer)[0].zero_()
    assert next(found.parameters()).detach().any()


def test_averages_are_applied_to_compiled_models():
    model, optimizer, average, _ = trained()
    compiled = torch.compile(model, backend="eager")
    with average.applied(compiled):
        assert_same(model.parameters(), averages(model, optimizer))
    assert average.to_averaged_model(compiled).state_dict().keys() == model.state_dict().keys()


class Tied(nn.Module):
    """A weight used twice, a frozen one, and one of another optimiser."""

    def __init__(self):
        super().__init__()
        self.embed, self.out, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.out.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * self.frozen(self.out(self.embed(x)))


def test_applied_keeps_tied_weights_tied_and_other_parameters_unchanged():
    torch.manual_seed(0)
    model = Tied()
    mine = [p for p in model.parameters() if p is not model.scale]
    optimizer = SGD(mine, lr=0.1)
    average = IterateAverage(optimizer)
    walked(model, optimizer, 5)
    frozen = model.frozen.weight.detach().clone()
    with average.applied(model):
        assert model.out.weight is model.embed.weight
        assert torch.equal(model.out.weight, optimizer.state[model.embed.weight]["average"])
        assert torch.equal(model.frozen.weight, frozen)
        assert model.scale == 1
    found = average.to_averaged_model(model)
    assert found.out.weight is found.embed.weight
    assert torch.equal(found.frozen.weight, frozen)


def test_model_without_parameters_of_the_optimiser_raises():
    _, _, average, _ = trained()
    with (
        pytest.raises(ValueError, match="model must have parameters of this optimiser"),
        average.applied(network()),
    ):
        pass


def test_applied_raises_for_something_that_is_not_a_module():
    model, _, average, _ = trained()
    with (
        pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"),
        average.applied(list(model.parameters())),
    ):
        pass


def test_applied_raises_before_the_average_has_begun():
    model, _, average, _ = trained(start=20)
    with (
        pytest.raises(
            RuntimeError, match=r"not begun: it starts at step 20, .* has taken 12 steps"
        ),
        average.applied(model),
    ):
        pass
    model, _, average, _ = trained(start=None)
    with pytest.raises(RuntimeError, match=r"not begun: it waits for restart\(\)"):
        average.copy_to(model)
    with pytest.raises(RuntimeError, match="not begun"):
        average.to_averaged_model(model)


def test_average_needs_one_copy_of_the_weights_and_one_more_inside_applied():
    model, optimizer, average, _ = trained()
    num = sum(p.numel() for p in model.parameters())
    held = [t for s in optimizer.state.values() for k, t in s.items() if k.startswith("average")]
    assert sum(t.numel() for t in held if t.ndim) == num
    assert sum(t.numel() for t in held if not t.ndim) == 3 * len(list(model.parameters()))
    allocated = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if "clone" in function.name() or "_to_copy" in function.name():
                allocated.append(found.numel())
            return found

    with Count(), average.applied(model):
        pass
    assert sum(allocated) == num


def test_deep_copy_of_model_optimiser_and_average_is_independent():
    model, optimizer, average, _ = trained(start=3)
    twin, second, third = copy.deepcopy((model, optimizer, average))
    assert third.optimizer is second
    assert (third.count, third.step, third.start) == (average.count, 12, 3)
    kept = [a.clone() for a in averages(model, optimizer)]
    walked(twin, second, 5)
    assert_same(averages(model, optimizer), kept)
    walked(model, optimizer, 5)
    assert_same(averages(model, optimizer), averages(twin, second))
    assert third.count == average.count
