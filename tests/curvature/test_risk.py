"""A risk: its points, parts and modes."""

import copy
from collections import UserDict

import pytest
import torch
from curvature.networks import (
    Case,
    Encoder,
    Named,
    case,
    cnn,
    dictionaries,
    images,
    labels,
    mlp,
    moved,
    noise,
    sequences,
    vectors,
)
from curvature.oracles import dense_hessian
from curvature.structures import ggn_trace
from torch import nn
from torch.nn import functional

from ritz.curvature import Risk, ggn, gradient_statistics, hessian, kfac

CE = functional.cross_entropy


def dropping(layer=None):
    layers = [nn.Linear(3, 4), nn.Dropout(0.5) if layer is None else layer, nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


def test_a_smaller_last_batch_is_weighted_by_its_samples():
    x, y = noise(11, 3), labels(3, 11)
    model = mlp().double()
    whole = Risk(model, CE, (x, y))
    block = noise(len(whole.theta), 2)
    expected = dense_hessian(Case(model=model, data=[(x, y)])) @ block
    for size in (1, 4, 11):
        parts = Risk(model, CE, (x, y), batch_size=size)
        assert parts.loss() == pytest.approx(whole.loss(), rel=1e-14)
        torch.testing.assert_close(parts.gradient(), whole.gradient(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(hessian(parts, engine="eager") @ block, expected)


def test_a_risk_does_not_follow_later_changes_of_the_model():
    model = moved(cnn())
    risk = Risk(model, CE, images(4, 2))
    op = hessian(risk, engine="eager")
    loss, vector = risk.loss(), noise(op.shape[0])
    product = op @ vector
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    assert risk.loss() == loss
    assert torch.equal(op @ vector, product)


def test_at_moves_the_point_and_nothing_else():
    risk = case("cnn recomputed").risk()
    point = risk.theta + 0.1 * noise(len(risk.theta))
    there = risk.at(point)
    model = copy.deepcopy(risk.model)
    nn.utils.vector_to_parameters(point, model.parameters())
    fresh = Risk(model, CE, case("cnn recomputed").data, batch_norm="recomputed")
    assert there.loss() == fresh.loss()
    assert there.loss() != risk.loss()
    assert torch.equal(
        hessian(there, engine="eager") @ point, hessian(fresh, engine="eager") @ point
    )
    point.zero_()
    assert there.loss() == fresh.loss()


def test_batch_norm_modes_differ_and_can_be_exchanged():
    losses = {mode: case(f"cnn {mode}").risk().loss() for mode in ("eval", "train", "recomputed")}
    assert len({round(loss, 9) for loss in losses.values()}) == 3
    risk = case("cnn eval").risk()
    for mode, loss in losses.items():
        assert risk.with_batch_norm(mode).loss() == pytest.approx(loss, rel=1e-12)
        assert mode in repr(risk.with_batch_norm(mode))
    assert risk.loss() == pytest.approx(losses["eval"], rel=1e-14)


@pytest.mark.parametrize("mode", ["eval", "train", "recomputed"])
def test_choosing_parameters_gives_blocks_of_the_matrix(mode):
    whole = case(f"cnn {mode}")
    risk = whole.risk()
    names = [name for name in risk.space.shapes if name.startswith("4")]
    chosen = torch.cat(
        [torch.full((shape.numel(),), name in names) for name, shape in risk.space.shapes.items()]
    )
    expected = dense_hessian(whole)[chosen][:, chosen]
    for part in (risk.on("4"), whole.risk(params="4"), risk.on(names)):
        found = hessian(part, engine="eager").dense()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        assert part.loss() == pytest.approx(risk.loss(), rel=1e-14)


def test_parameters_are_chosen_by_tensors_or_by_their_module():
    model, data = mlp(), vectors(5)
    model[0].bias.requires_grad_(False)  # left out, as in a choice by name
    by_name = Risk(model.double(), CE, data, params="0")
    choices = (model[0], model[0].parameters(), [model[0].weight], list(model[0].parameters()))

    for params in choices:
        assert list(Risk(model, CE, data, params=params).space.shapes) == list(by_name.space.shapes)

    with pytest.raises(ValueError, match=r"params must be parameters of the model, got .*\(4, 3\)"):
        Risk(model, CE, data, params=nn.Linear(3, 4))


def test_samples_are_chosen_by_their_position_in_the_data():
    risk = case("mlp").risk()
    x = torch.cat([batch[0] for batch in case("mlp").data])
    y = torch.cat([batch[1] for batch in case("mlp").data])
    chosen = torch.tensor([11, 0, 6, 6])
    some = risk.samples(chosen, batch_size=3)
    assert some.num_samples == 4
    assert some.batch_sizes == [3, 1]
    expected = Risk(risk.model, CE, (x[chosen], y[chosen]))
    assert some.loss() == pytest.approx(expected.loss(), rel=1e-14)
    assert risk.loss() == pytest.approx(
        sum(risk.samples(torch.tensor([i])).loss() for i in range(12)) / 12, rel=1e-13
    )


def test_batches_and_samples_use_the_recomputed_statistics_of_all_data():
    risk = case("cnn recomputed").risk()
    mean = sum(risk.batch(i).loss() for i in range(2)) / 2
    assert mean == pytest.approx(risk.loss(), rel=1e-13)


def test_fixed_dropout_uses_one_mask_per_batch_and_seed():
    data = vectors(5, 3)
    model = dropping()
    off = Risk(model, CE, data)
    first, same = (Risk(model, CE, data, dropout="fixed") for _ in range(2))
    other = Risk(model, CE, data, dropout="fixed", seed=1)
    assert first.loss() == same.loss() == first.loss()
    assert len({off.loss(), first.loss(), other.loss()}) == 3
    masks = [context.masks for _, context, _ in first.contexts()]
    assert [mask[0].shape for mask in masks] == [(5, 4), (3, 4)]
    assert all(bool(((mask[0] == 0) | (mask[0] == 2)).all()) for mask in masks)

    def evaluate(call, batch):
        (mask,) = masks[len(batch[0]) == 3]
        hidden = functional.linear(batch[0], *call("first")) * mask
        return functional.linear(hidden, *call("last")), batch[1]

    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, which):
            layer = self.net[0] if which == "first" else self.net[2]
            return layer.weight, layer.bias

    expected = Case(model=Split(), data=data, evaluate=evaluate)
    assert first.loss() == pytest.approx(float(expected.loss(expected.theta)), rel=1e-14)
    for engine in ("eager", "linearized"):
        torch.testing.assert_close(hessian(first, engine=engine).dense(), dense_hessian(expected))


def test_dropout_masks_do_not_depend_on_the_default_dtype():
    model, data = dropping(), vectors(5)
    losses = []
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        losses.append(Risk(model, CE, data, dropout="fixed").loss())
    assert losses[0] == losses[1]


def test_a_single_batch_has_the_masks_it_has_among_all():
    risk = Risk(dropping(), CE, vectors(5, 3), dropout="fixed")
    parts = [risk.batch(index) for index in range(2)]
    total = sum(w * part.gradient() for w, part in zip([5 / 8, 3 / 8], parts, strict=True))
    torch.testing.assert_close(total, risk.gradient(), rtol=1e-12, atol=1e-14)
    assert parts[1].batch(0).loss() == parts[1].loss()


def test_dropout_of_channels_drops_whole_channels():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(64, 3))
    risk = Risk(model.double(), CE, images(4), dropout="fixed")
    ((_, context, _),) = risk.contexts()
    assert context.masks[0].shape == (4, 4, 1, 1)


def test_dropout_everywhere_gives_zeros():
    assert Risk(dropping(nn.Dropout(1.0)), CE, vectors(4), dropout="fixed").loss() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_models_are_computed_in_float32(dtype):
    model = cnn().to(dtype)
    data = [(x.to(dtype), y) for x, y in images(4, 2)]
    raised = [(x.to(dtype).float(), y) for x, y in images(4, 2)]
    half, single = Risk(model, CE, data), Risk(copy.deepcopy(model).float(), CE, raised)
    for operator in (hessian, ggn):
        op = operator(half, engine="eager")
        assert op.dtype == torch.float32
        vector = noise(op.shape[0]).float()
        assert torch.equal(op @ vector, operator(single, engine="eager") @ vector)
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_models_of_half_precision_and_float32_are_computed_in_float32():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3).bfloat16()

        def forward(self, x):
            return self.b(self.a(x).to(self.b.weight.dtype))

    model, data = Mixed(), [(x.float(), y) for x, y in vectors(4)]
    risk = Risk(model, CE, data)
    single = Risk(copy.deepcopy(model).float(), CE, data)
    assert torch.equal(
        hessian(risk, engine="eager").dense(), hessian(single, engine="eager").dense()
    )


def test_precision_converts_model_and_data():
    model, data = cnn(), [(x.float(), y) for x, y in images(4, 2)]
    double = Risk(copy.deepcopy(model).double(), CE, [(x.double(), y) for x, y in data])
    risk = Risk(model, CE, data, precision="float64")
    block = noise(len(risk.theta), 2)
    expected = hessian(double, engine="eager") @ block
    assert torch.equal(hessian(risk, engine="eager") @ block, expected)
    found = hessian(Risk(model, CE, data), engine="eager") @ block.float()
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


def test_mappings_of_tokenizers_are_accepted_as_batches():
    model = Named().double()
    plain = Risk(model, CE, dictionaries(4, 3))
    assert Risk(model, CE, [UserDict(d) for d in dictionaries(4, 3)]).loss() == plain.loss()
    whole = dictionaries(6)[0]
    assert Risk(model, None, UserDict(whole), batch_size=4).num_batches == 2
    losses = [Risk(model, None, whole, batch_size=size).loss() for size in (2, 6)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-14)


def test_transformers_work_in_train_mode_with_default_attention_and_the_fast_path():
    model = Encoder().double().train()
    before = torch.backends.mha.get_fastpath_enabled()
    risk = Risk(model, CE, sequences(3, width=4))
    assert bool(torch.isfinite(hessian(risk, engine="eager") @ noise(151)).all())
    assert model.training
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_batch_norm_without_running_statistics_couples_samples():
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False))
    risk = Risk(layers.double(), CE, vectors(4))
    assert not risk.separable
    assert not case("cnn train").risk().separable
    assert case("cnn recomputed").risk().separable


def test_the_repr_of_a_risk_lists_its_settings():
    risk = Risk(dropping(), CE, vectors(4), dropout="fixed", l2=0.1, precision="float64")
    assert (
        repr(risk) == "Risk(Sequential, 31 parameters, 4 samples, l2 0.1, dropout fixed, float64)"
    )


def test_inference_mode_changes_nothing_inside_or_after():
    plain = case("cnn recomputed").risk()
    vector = noise(len(plain.theta))

    def measured(risk):
        return (
            ggn_trace(risk),
            kfac(risk, kind="empirical") @ vector,
            hessian(risk, engine="eager") @ vector,
            gradient_statistics(risk).variance,
        )

    expected = measured(plain)
    with torch.inference_mode():
        data = [tuple(leaf.clone() for leaf in batch) for batch in case("cnn recomputed").data]
        made = Risk(plain.model, CE, data, batch_norm="recomputed")
        moved = plain.at(plain.theta * 1)
        inside = measured(plain)
    for found in (inside, measured(made), measured(moved)):
        torch.testing.assert_close(found, expected)


def test_autocast_does_not_round_recomputed_statistics():
    risk = case("cnn recomputed").risk()
    data = [(x.float(), y) for x, y in case("cnn recomputed").data]
    single = Risk(copy.deepcopy(risk.model).float(), CE, data, batch_norm="recomputed")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = Risk(single.model, CE, data, batch_norm="recomputed")
    assert inside.loss() == single.loss()


def test_a_transformer_with_padding_masks_has_the_right_products():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1)

    def forward(model, batch):
        return model(batch[0], src_key_padding_mask=batch[1]).mean(1), batch[2]

    x, target = noise(3, 5, 4), torch.tensor([0, 1, 2])
    padding = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    risk = Risk(encoder.double(), CE, [(x, padding, target)], forward=forward, dropout="fixed")
    assert bool(torch.isfinite(hessian(risk) @ noise(len(risk.theta))).all())


def test_parameters_without_entries_are_left_out():
    model = nn.Module()
    model.linear, model.nothing = nn.Linear(3, 3), nn.Parameter(torch.empty(0))
    data = [(x.float(), y) for x, y in vectors(4)]
    risk = Risk(model, CE, data, forward=lambda model, batch: (model.linear(batch[0]), batch[1]))
    assert list(risk.space.shapes) == ["linear.weight", "linear.bias"]
    assert float(ggn_trace(risk)) == pytest.approx(float(ggn(risk).dense().trace()), rel=1e-5)
