"""K-FAC of ``nn.MultiheadAttention`` equals that of attention written with ``nn.Linear``."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ritz.optim import KFAC

SIZE, HEADS = 6, 2
STEPS = {"factor_every": 1, "inverse_every": 1, "delta": 0.1, "lr": 0.05}


class Torch(nn.Module):
    """Attention of torch, then a linear layer."""

    def __init__(self, *, batch_first=True, **options):
        super().__init__()
        self.attend = nn.MultiheadAttention(SIZE, HEADS, batch_first=batch_first, **options)
        self.head = nn.Linear(SIZE, 2)

    def forward(self, x, y=None, z=None):
        y = x if y is None else y
        return self.head(self.attend(x, y, y if z is None else z, need_weights=False)[0])


class Written(nn.Module):
    """The same with linear layers alone, and the weights of the other."""

    def __init__(self, model):
        super().__init__()
        attend, self.first = model.attend, model.attend.batch_first
        self.packed, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE).double()
        self.head = copy.deepcopy(model.head)
        self.packed.weight, self.packed.bias = (
            nn.Parameter(p.detach().clone()) for p in (attend.in_proj_weight, attend.in_proj_bias)
        )
        self.out.load_state_dict(attend.out_proj.state_dict())

    def forward(self, x, y=None, z=None):
        parts = [self.packed(x)] * 3
        if y is not None:
            parts[1:] = [self.packed(y)] * 2
        if z is not None:
            parts[2] = self.packed(z)
        pieces = [part.chunk(3, -1)[i] for i, part in enumerate(parts)]
        if not self.first:
            pieces = [piece.transpose(0, 1) for piece in pieces]
        q, k, v = (piece.unflatten(-1, (HEADS, -1)).transpose(1, 2) for piece in pieces)
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(self.out(mixed if self.first else mixed.transpose(0, 1)))


def built(**options):
    torch.manual_seed(0)
    model = Torch(**options).double()
    for p in model.parameters():  # the biases begin at zero
        nn.init.normal_(p, std=0.5)
    return model


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights(model):
    return [p.detach() for p in model.parameters()]


def take_steps(model, inputs, count=3, **options):
    optimizer = KFAC(model, **(STEPS | options))
    for _ in range(count):
        optimizer.zero_grad()
        outputs = model(*inputs)
        mse_loss(outputs, drawn(*outputs.shape, seed=9)).backward()
        optimizer.step()
    return optimizer


SELF, CROSS = [(4, 5, SIZE)], [(4, 5, SIZE), (4, 3, SIZE)]
OTHER = [*CROSS, (4, 3, SIZE)]


@pytest.mark.parametrize("options", [{}, {"kind": "ekfac"}, {"damping": "exact"}, {"max_order": 9}])
@pytest.mark.parametrize("shapes", [SELF, CROSS, OTHER])
@pytest.mark.parametrize("batch_first", [True, False])
def test_steps_equal_those_of_attention_with_linear_layers(options, shapes, batch_first):
    inputs = [drawn(*shape, seed=k) for k, shape in enumerate(shapes)]
    if not batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    model = built(batch_first=batch_first)
    written = Written(model)

    # With few rows some eigenvectors are arbitrary, and in EK-FAC the second step depends on them.
    count = 1 if "kind" in options else 3
    optimizer = take_steps(model, inputs, count, **options)
    take_steps(written, inputs, count, **options)

    assert optimizer.plain == {}
    # Positions come first without batch_first, and K-FAC takes the first axis for the samples. In
    # EK-FAC those of queries and keys then differ, and their squares are added.
    if batch_first or options.get("kind") != "ekfac" or shapes is SELF:
        for found, expected in zip(weights(model), weights(written), strict=True):
            torch.testing.assert_close(found, expected)


def test_reduced_factors_and_a_sample_without_a_batch_axis():
    for shape, options in (((4, 5, SIZE), {"weight_sharing": "reduce"}), ((5, SIZE), {})):
        model, plain = built(), built()
        inputs = [drawn(*shape)]
        assert take_steps(model, inputs, **options).plain == {}
        assert all(p.isfinite().all() for p in model.parameters())
        assert not torch.equal(model.attend.in_proj_weight, plain.attend.in_proj_weight)


def test_labels_from_the_model_reach_the_layers_of_an_attention():
    model = built()
    written = Written(model)
    for each in (model, written):
        optimizer = KFAC(each, fisher="ggn", **STEPS)
        outputs = each(drawn(4, 5, SIZE)).mean(1)
        target = drawn(4, 2, seed=2)
        optimizer.observe(outputs, target, mse_loss)
        mse_loss(outputs, target).backward()
        optimizer.step()
    for found, expected in zip(weights(model), weights(written), strict=True):
        torch.testing.assert_close(found, expected)


def test_outputs_and_gradients_are_those_without_hooks():
    model, plain = built(dropout=0.3), built(dropout=0.3)
    KFAC(model, **STEPS)
    x, found = drawn(4, 5, SIZE), []
    for each in (model, plain):
        torch.manual_seed(3)
        outputs = each(x)
        outputs.square().mean().backward()
        found.append([outputs, *(p.grad for p in each.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_nothing_stays_active_after_an_error_inside():
    model = built()
    KFAC(model, **STEPS)
    with pytest.raises(AssertionError, match="embedding dimension"):
        model(drawn(4, 5, SIZE + 1))
    assert torch._C._len_torch_function_stack() == 0


def interrupt(model, monkeypatch):
    """Press Ctrl-C inside the attention: torch then calls no hooks."""

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", stop)
        with pytest.raises(KeyboardInterrupt):
            model(drawn(4, 5, SIZE))


def end_by_a_step(model, optimizer):
    model(drawn(4, 5, SIZE)).square().mean().backward()
    optimizer.step()


def end_by_a_pass_in_eval_mode(model, optimizer):
    model.eval()(drawn(4, 5, SIZE)).square().mean().backward()
    assert all(not block.sums for block in optimizer.curvature.blocks)


def end_by_removal(model, optimizer):
    optimizer.curvature.remove()


@pytest.mark.parametrize("end", [end_by_a_step, end_by_a_pass_in_eval_mode, end_by_removal])
def test_nothing_stays_active_after_an_interrupt_inside(end, monkeypatch):
    model = built()
    optimizer = KFAC(model, **STEPS)
    interrupt(model, monkeypatch)
    with BaseTorchFunctionMode():  # what is left is then not the innermost mode
        end(model, optimizer)
        assert torch._C._len_torch_function_stack() == 1
    assert torch._C._len_torch_function_stack() == 0


def test_what_an_interrupt_leaves_active_records_nothing(monkeypatch):
    model = built()
    optimizer = KFAC(model, **STEPS)
    interrupt(model, monkeypatch)

    # Called alone, without the model, so that no hook of K-FAC is the first to run.
    x, attend = drawn(4, 5, SIZE), model.attend
    torch.nn.functional.multi_head_attention_forward(
        *[x] * 3, SIZE, HEADS, attend.in_proj_weight, attend.in_proj_bias, None, None, False, 0.0,
        attend.out_proj.weight, attend.out_proj.bias,
    )[0].sum().backward()  # fmt: skip

    assert all(not block.sums for block in optimizer.curvature.blocks)
    optimizer.curvature.remove()


def test_frozen_and_separate_weights():
    frozen = built()
    frozen.attend.in_proj_weight.requires_grad_(False)
    assert take_steps(frozen, [drawn(4, 5, SIZE)]).plain == {}
    torch.manual_seed(0)
    model = nn.ModuleList([nn.MultiheadAttention(SIZE, HEADS, kdim=4, vdim=4, batch_first=True)])
    model.forward = lambda x, y: model[0](x, y, y)[0]
    with pytest.warns(UserWarning, match="0.q_proj_weight: keys and values of other sizes") as said:
        optimizer = take_steps(model.double(), [drawn(4, 5, SIZE), drawn(4, 3, 4)])
    assert len(said) == 1
    assert set(optimizer.plain) == {
        f"0.{key}" for key in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
    }


def test_an_encoder_layer_of_torch_has_factors_for_all_its_parameters():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(SIZE, HEADS, 8)
    optimizer = take_steps(model.double(), [drawn(4, 5, SIZE)])
    assert optimizer.plain == {}
    state = optimizer.state_dict()
    again = KFAC(copy.deepcopy(model), **STEPS)
    again.load_state_dict(state)
    named = {block.name: block for block in again.curvature.blocks}
    assert named["self_attn"].average["inputs"].shape == (SIZE + 1, SIZE + 1)
    assert named["self_attn"].average["outputs"].shape == (3 * SIZE, 3 * SIZE)


class Checkpointed(Torch):
    """The attention is evaluated again in the backward pass."""

    def forward(self, x):
        attend = partial(self.attend, need_weights=False)
        return self.head(checkpoint(attend, x, x, x, use_reentrant=False)[0])


# A warning of torch.compile about its own inputs after a hook.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_attention_inside_checkpoints_compiled_models_and_other_modes():
    expected = built()
    take_steps(expected, [drawn(4, 5, SIZE)])
    checkpointed = Checkpointed().double()
    checkpointed.load_state_dict(built().state_dict())
    assert take_steps(checkpointed, [drawn(4, 5, SIZE)]).plain == {}
    placed = built()
    with torch.device("cpu"):  # also a mode of torch
        assert take_steps(placed, [drawn(4, 5, SIZE)]).plain == {}
    compiled = built()
    compiled.compile(backend="aot_eager")
    assert take_steps(compiled, [drawn(4, 5, SIZE)]).plain == {}

    for model in (checkpointed, placed, compiled):
        for found, same in zip(weights(model), weights(expected), strict=True):
            torch.testing.assert_close(found, same)
