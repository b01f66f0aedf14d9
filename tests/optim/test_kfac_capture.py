"""What K-FAC captures in the passes of a model, and what it leaves out."""

import weakref

import pytest
import torch
from optim.kfac_cases import built, curvature, flat, labels, noise, small_network, take_step
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ritz.optim import KFAC


def test_evaluation_and_no_grad_capture_nothing():
    model = built(small_network)
    optimizer = KFAC(model)
    with torch.no_grad():
        model(noise(5, 3))
    model.eval()
    model(noise(5, 3)).sum().backward()
    model.train()
    with optimizer.paused():
        model(noise(5, 3)).sum().backward()
    assert not any(block.sums for block in curvature(optimizer).values())


def test_inputs_are_released_by_the_backward_pass():
    model = built(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    optimizer = KFAC(model)
    # The memory of a tensor that is made from an array keeps the array.
    array = noise(5, 3).numpy()
    memory = weakref.ref(array)
    loss = cross_entropy(model(torch.from_numpy(array)), labels(3, 5))
    del array

    loss.backward()

    assert memory() is None
    assert optimizer.curvature.capturing
    assert loss.grad_fn is not None  # the graph is still there


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
@pytest.mark.parametrize("first", ["backward", "grad"])
def test_a_second_backward_pass_through_one_graph_is_refused(kind, first):
    model = built(small_network)
    optimizer = KFAC(model, kind=kind)  # its hooks act only as long as it exists
    loss = cross_entropy(model(noise(5, 3)), labels(3, 5))
    assert optimizer.curvature.capturing
    if first == "backward":
        loss.backward(retain_graph=True)
    else:
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)

    with pytest.raises(RuntimeError, match=r"second backward pass .* at layer '2': call backward"):
        loss.backward()


def test_a_paused_pass_through_the_graph_of_the_step_leaves_its_curvature():
    factors = []
    for penalty in (False, True):
        model, x = built(small_network), noise(5, 3).requires_grad_()
        optimizer = KFAC(model)
        loss = cross_entropy(model(x), labels(3, 5))
        if penalty:
            with optimizer.paused():
                torch.autograd.grad(loss, x, create_graph=True)
        loss.backward()
        optimizer.step()
        factors.append(curvature(optimizer)["0"].average)
    torch.testing.assert_close(*factors)


@pytest.mark.parametrize("fisher", ["ggn", "monte_carlo"])
def test_outputs_are_observed_once_for_each_forward_pass(fisher):
    model = built(small_network)
    optimizer = KFAC(model, fisher=fisher)
    outputs, target = model(noise(5, 3)), labels(3, 5)
    optimizer.observe(outputs, target, cross_entropy)

    with pytest.raises(RuntimeError, match="call it once for each forward pass"):
        optimizer.observe(outputs, target, cross_entropy)


def test_in_place_activations_after_a_layer_are_seen_before_them():
    found = []
    for inplace in (False, True):
        model = built(lambda i=inplace: nn.Sequential(nn.Linear(3, 4), nn.ReLU(i), nn.Linear(4, 3)))
        for fisher in ("empirical", "ggn"):
            optimizer = KFAC(model, lr=0.0, fisher=fisher)
            take_step(model, optimizer, noise(5, 3), labels(3, 5))
            found.append(curvature(optimizer)["0"].average["outputs"])
            optimizer.curvature.remove()
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(found[1], found[3])


def test_a_gradient_scaler_does_not_change_the_factors():
    found = []
    for scale in (1.0, 1024.0):
        model = built(small_network).float()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = KFAC(model, lr=0.1, scaler=scaler, kind="ekfac")
        outputs = model(noise(5, 3).float())
        scaler.scale(cross_entropy(outputs, labels(3, 5))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append((flat(model.parameters()), curvature(optimizer)["0"].average["scales"]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_skipped_step_leaves_no_curvature():
    model = built(small_network).float()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = KFAC(model, lr=0.1, scaler=scaler)
    for bad in (True, False):
        optimizer.zero_grad()
        loss = cross_entropy(model(noise(5, 3).float()), labels(3, 5))
        scaler.scale(loss * (float("inf") if bad else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(v.isfinite().all() for b in curvature(optimizer).values() for v in b.sums.values())
    assert optimizer.curvature.steps == 1
    assert curvature(optimizer)["0"].inverse
    assert torch.isfinite(flat(model.parameters())).all()


def test_sums_that_are_not_finite_are_left_out():
    model = built(small_network)
    optimizer = KFAC(model, lr=0.1)
    (cross_entropy(model(noise(5, 3)), labels(3, 5)) * float("inf")).backward()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()  # plain gradients, and the next step captures again
    assert optimizer.curvature.capturing
    take_step(model, optimizer, noise(5, 3), labels(3, 5))
    assert curvature(optimizer)["0"].inverse
    assert torch.isfinite(flat(model.parameters())).all()


def test_gradients_that_are_cleared_leave_no_curvature():
    found = []
    for extra in (False, True):
        model = built(small_network)
        optimizer = KFAC(model, lr=0.1)
        if extra:
            cross_entropy(model(noise(7, 3, seed=5)), labels(3, 7)).backward()
        take_step(model, optimizer, noise(5, 3), labels(3, 5))
        found.append(flat(model.parameters()))
    assert torch.equal(*found)


def test_float16_needs_the_scaler():
    model = built(small_network).float()
    KFAC_ = KFAC(model)
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(ValueError, match="scaler must be the GradScaler"),
    ):
        model(noise(5, 3).float())
    assert KFAC_.curvature.capturing


def test_autocast_captures_in_float32():
    model = built(small_network).float()
    optimizer = KFAC(model, lr=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(noise(5, 3).float())
    cross_entropy(outputs.float(), labels(3, 5)).backward()
    optimizer.step()
    assert curvature(optimizer)["0"].average["outputs"].dtype == torch.float32


def test_layers_called_outside_of_the_model_are_not_counted_with_its_last_pass():
    model = built(small_network)
    optimizer = KFAC(model)
    model(noise(2, 3))  # a pass of two samples, without a backward pass

    hidden = model[0](noise(5, 3)).tanh()
    cross_entropy(model[2](hidden), labels(3, 5)).backward()

    assert [block.samples for block in curvature(optimizer).values()] == [5, 5]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_have_the_curvature_of_plain_ones(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self, active):
            super().__init__()
            self.one, self.two, self.active = nn.Linear(3, 3), nn.Linear(3, 3), active

        def forward(self, x):
            # Four rows per sample: the samples are those of the model's input.
            rows = x.reshape(-1, 3)
            hidden = self.two(self.one(rows).tanh())
            if self.active:
                hidden = checkpoint(lambda r: self.two(self.one(r).tanh()), rows,
                                    use_reentrant=reentrant)  # fmt: skip
            return hidden.reshape(len(x), 4, 3).mean(1)

    found = []
    for active in (False, True):
        model = built(lambda active=active: Checkpointed(active))
        optimizer = KFAC(model, lr=0.1, damping="exact")
        x = noise(5, 4, 3).requires_grad_()  # reentrant checkpoints need an input with a gradient
        cross_entropy(model(x), labels(3, 5)).backward()
        optimizer.step()
        found.append(flat(model.parameters()))
    torch.testing.assert_close(*found)
