"""The language models: dropout in its places, state, ties and causality."""

import pytest
import torch
from models.tiny import fill, sample, tiny
from torch import nn

import ritz
from ritz import models

PLACES = ("dropout", "input_dropout", "hidden_dropout", "embedding_dropout", "weight_drop")


def only(place, chance=0.5, **changes):
    """An LSTM that drops in one place."""
    chances = dict.fromkeys(PLACES, 0.0) | {place: chance}
    given = {"num_classes": 7, "width": 8, "hidden": 10} | chances | changes
    return fill(models.create("lstm", dtype=torch.float64, **given))


def seen(layer, call):
    """What a layer took and gave."""
    pairs = []
    handle = layer.register_forward_hook(lambda _, args, out: pairs.append((args[0], out)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        call()
    handle.remove()
    return pairs


TOKENS = sample("lstm", 7)[0]


@pytest.mark.parametrize(("place", "index"), [("input_dropout", 0), ("hidden_dropout", 1),
                                              ("hidden_dropout", 2), ("dropout", 3)])  # fmt: skip
def test_features_are_dropped_at_all_positions_or_none(place, index):
    model = only(place)
    [(before, after)] = seen(model.drops[index], lambda: model(TOKENS))
    kept = after / before
    assert torch.equal(kept, kept[..., :1].expand_as(kept))
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(kept[0], kept[1])  # samples have masks of their own


def test_a_dropped_word_is_dropped_at_all_its_positions():
    model = only("embedding_dropout")
    [(_, kept)] = seen(model.embedding_drop, lambda: model(TOKENS))
    [(_, embedded)] = seen(model.drops[0], lambda: model(TOKENS))
    assert kept.shape == (1, 7, 1)
    expected = model.embedding(TOKENS) * kept[0][TOKENS]
    assert torch.equal(embedded, expected.transpose(1, 2))
    assert 0 < int((kept == 0).sum()) < 7


def test_recurrent_matrices_are_dropped_for_a_whole_sequence():
    model = only("weight_drop", depth=1)
    dropped = []
    model.weight_drops[0].register_forward_hook(lambda _, args, out: dropped.append(out))
    [(before, _)] = seen(model.drops[1], lambda: model(TOKENS))
    plain = nn.LSTM(8, 8, batch_first=True).double()
    plain.load_state_dict(model.layers[0].state_dict() | {"weight_hh_l0": dropped[0].detach()})
    expected = plain(model.embedding(TOKENS))[0].transpose(1, 2)
    torch.testing.assert_close(before, expected)
    assert 0 < int((dropped[0] == 0).sum()) < dropped[0].numel()
    model(TOKENS).sum().backward()
    assert model.layers[0].weight_hh_l0.grad is not None


@pytest.mark.parametrize("place", PLACES)
def test_eval_mode_drops_nothing_and_fixed_masks_are_reproducible(place):
    model = only(place)
    assert torch.equal(model.eval()(TOKENS), only("dropout", 0.0).eval()(TOKENS))
    data, loss_fn = (TOKENS, TOKENS.roll(1, 1)), nn.functional.cross_entropy
    off = ritz.Risk(model, loss_fn, data).loss()
    fixed, again, other = (
        ritz.Risk(model, loss_fn, data, dropout="fixed", seed=seed).loss() for seed in (1, 1, 2)
    )
    assert fixed == again
    assert len({float(off), float(fixed), float(other)}) == 3


def test_a_sequence_continued_from_its_state_equals_the_whole_sequence():
    model = tiny("lstm", 7)
    whole, end = model(TOKENS, model.initial_state(len(TOKENS)))
    first, state = model(TOKENS[:, :2], model.initial_state(len(TOKENS)))
    rest, last = model(TOKENS[:, 2:], state)
    torch.testing.assert_close(torch.cat([first, rest], 2), whole)
    torch.testing.assert_close(last, end)
    assert torch.equal(model(TOKENS), whole)


def test_weight_drop_does_not_replace_the_weights_of_the_layers():
    """Called with other weights, the layer of torch would take these for its own."""
    model = only("weight_drop")
    before = [layer._flat_weights for layer in model.layers]
    model(TOKENS).sum().backward()
    ritz.Risk(model, nn.functional.cross_entropy, (TOKENS, TOKENS.roll(1, 1))).loss()
    assert all(layer._flat_weights is held
               for layer, held in zip(model.layers, before, strict=True))  # fmt: skip


def test_a_tied_head_has_no_matrix():
    tied, loose = tiny("lstm"), tiny("lstm", tied=False)
    assert "head.weight" not in tied.state_dict()
    assert loose.head.weight.shape == (3, 4)
    assert loose(sample("lstm")[0]).shape == (4, 3, 5)


@pytest.mark.parametrize("name", ["lstm", "gpt"])
def test_no_position_depends_on_later_ones(name):
    model = tiny(name, 7).eval()
    other = TOKENS.clone()
    other[:, 3:] = (other[:, 3:] + 1) % 7
    found, changed = model(TOKENS), model(other)
    torch.testing.assert_close(found[..., :3], changed[..., :3])
    assert not torch.allclose(found[..., 3:], changed[..., 3:])


def test_gpt_equals_the_formula_written_with_matrices():
    """One block of one head, written with matrices."""
    model = tiny("gpt", 7, depth=1, heads=1)
    block, tokens = model.blocks[0], TOKENS[0]
    x = model.tokens.weight[tokens] + model.places.weight[: len(tokens)]
    query, key, value = block.qkv(block.norm1(x)).chunk(3, 1)
    future = torch.ones(5, 5).triu(1).bool()
    scores = (query @ key.T / 4**0.5).masked_fill(future, -torch.inf)
    x = x + block.out(scores.softmax(1) @ value)
    x = x + block.down(nn.functional.gelu(block.up(block.norm2(x))))
    expected = model.norm(x) @ model.tokens.weight.T
    torch.testing.assert_close(model(TOKENS)[0].T, expected)


def test_gpt_applies_dropout_to_embedding_and_residuals():
    model = tiny("gpt", 7, dropout=0.5)
    places = [model.drop, *(drop for block in model.blocks for drop in (block.drop1, block.drop2))]
    for layer in places:
        [(before, after)] = seen(layer, lambda: model(TOKENS))
        assert 0 < int(((after == 0) & (before != 0)).sum()) < before.numel()
    assert torch.equal(model.eval()(TOKENS), tiny("gpt", 7).eval()(TOKENS))
