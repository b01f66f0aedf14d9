"""The recipe of AWD-LSTM: segments of random lengths, activation penalties, NT-ASGD."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from training.examples import assert_same_bits, state
from training.test_resume import Interrupt
from training.texts import recurrent, text

from ritz import models, optim
from ritz._core.random import epoch_generator
from ritz.training import fit, preset_config
from ritz.training._recurrent import ActivationPenalty

LONG = {"count": 900, "length": 20}  # segments of about 20, and of 10
RANDOM = {"random_segments": True, "batch_size": 4, "optimizer_settings": {"lr": 0.5}}


def replayed(model, split, epochs, seed, rate=0.5):
    """The weights after every step of SGD with momentum, with rates by length, by hand."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), []
    for epoch in range(1, epochs + 1):
        carried, steps = model.initial_state(4), []
        batches = split.batches(4, variable=True, generator=epoch_generator(seed, epoch))
        for inputs, targets in batches:
            outputs, after = model(inputs, carried)
            optimizer.zero_grad()
            cross_entropy(outputs, targets).backward()
            optimizer.param_groups[0]["lr"] = rate * inputs.shape[1] / split.length
            optimizer.step()
            carried = tuple(tuple(part.detach() for part in pair) for pair in after)
            steps.append([p.detach().clone() for p in model.parameters()])
        seen.append(steps)
    return seen


def test_steps_of_random_segments_have_rates_in_proportion_to_their_lengths():
    model, twin, split = recurrent(), recurrent(), text(**LONG)

    found = fit(model, split, num_epochs=2, seed=5, **RANDOM)

    steps = replayed(twin, split, 2, seed=5)
    assert len({len(epoch) for epoch in steps}) == 2  # epochs of different lengths
    assert found.num_steps == sum(map(len, steps))
    torch.testing.assert_close(list(model.parameters()), steps[-1][-1], rtol=1e-9, atol=1e-12)
    assert found.history["learning_rate"].tolist() == [0.5, 0.5]


def test_an_average_begins_with_its_epoch_though_epochs_differ_in_steps():
    model, twin, split = recurrent(), recurrent(), text(**LONG)

    fit(model, split, num_epochs=4, seed=5, average_from=3, average_every="step", final="average",
        **RANDOM)  # fmt: skip

    steps = replayed(twin, split, 4, seed=5)
    averaged = [steps[1][-1], *itertools.chain(*steps[2:])]  # from the weights after two epochs on
    expected = [torch.stack(each).mean(0) for each in zip(*averaged, strict=True)]
    torch.testing.assert_close(list(model.parameters()), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("step", [7, 25])
def test_a_run_of_the_whole_recipe_resumes_bit_for_bit(tmp_path, step):
    common = RANDOM | {
        "num_epochs": 6, "validation": text(90, seed=1), "patience": 1, "seed": 3,
        "patience_rule": "non_monotone", "average_every": "step", "activation_penalty": 2.0,
        "change_penalty": 1.0, "clip_norm": 0.25, "final": "average",
        "optimizer_settings": {"lr": 30.0, "momentum": 0.0},
    }  # fmt: skip
    whole, parts = recurrent(0.3), recurrent(0.3)
    result = fit(whole, text(**LONG), **common)
    common |= {"checkpoint": tmp_path}
    first = fit(recurrent(0.3), text(**LONG), monitors=[Interrupt(step)], **common)
    assert first.status.outcome == "interrupted"

    fit(parts, text(**LONG), **common)

    assert "average_validation_loss" in result.metrics
    assert_same_bits(state(parts), state(whole))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_penalty_is_that_of_the_last_activations(dropout):
    model, seen = recurrent(dropout).train(), []
    model.drops[-1].register_forward_hook(lambda layer, x, y: seen.append((x[0], y)))
    penalty = ActivationPenalty(model, 2.0, 1.0)
    tokens = torch.arange(24).view(4, 6) % 7

    with penalty.observing():
        model(tokens)
    value = penalty.take()

    [(h, dropped)] = seen
    assert h.shape == (4, 5, 6)  # (batch, features, length)
    expected = 2 * dropped.square().mean() + (h[:, :, 1:] - h[:, :, :-1]).square().mean()
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=0)
    assert torch.autograd.grad(value, model.embedding.weight)[0].any()
    model(tokens)  # outside the block nothing is observed
    with pytest.raises(RuntimeError, match="did not call the layer last_drop"):
        penalty.take()


def test_penalties_change_the_step_and_not_the_logged_loss():
    gradients, losses = [], []

    class Watch:
        unit = "step"

        def __call__(self, count, model, optimizer):
            gradients.append([p.grad.clone() for p in model.parameters()])

    for penalties in ({}, {"activation_penalty": 2.0, "change_penalty": 1.0}):
        found = fit(recurrent(), text(), num_epochs=1, max_steps=1, batch_size=4,
                    optimizer_settings={"lr": 0.0}, monitors=[Watch()], **penalties)  # fmt: skip
        losses.append(found.metrics["train_loss"])

    model, seen = recurrent(), []
    model.drops[-1].register_forward_hook(lambda layer, x, y: seen.append(x[0]))
    inputs, targets = text().batches(4)[0]
    loss = cross_entropy(model(inputs), targets)
    [h] = seen
    added = 2 * h.square().mean() + h.diff(dim=2).square().mean()
    expected = torch.autograd.grad(loss + added, list(model.parameters()))
    assert losses[0] == losses[1] == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(gradients[1], list(expected), rtol=1e-5, atol=1e-7)
    assert not torch.equal(gradients[0][0], gradients[1][0])


@pytest.mark.parametrize("patience", [1, 3, 5])
def test_nt_asgd_is_triggered_as_in_its_published_code(patience):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        losses = torch.rand(60, generator=generator, dtype=torch.float64) + torch.linspace(1, 0, 60)
        # best_val_loss, nonmono and the condition of the code of Merity et al.
        past, expected = [], None
        for number, loss in enumerate(losses.tolist()):
            if expected is None and len(past) > patience and loss > min(past[:-patience]):
                expected = number
            past.append(loss)
        weights = torch.zeros(2, requires_grad=True)
        auto = optim.AutoAverage(
            torch.optim.SGD([weights], lr=0.1), patience=patience, rule="non_monotone"
        )
        started = None
        for number, loss in enumerate(losses.tolist()):
            auto.update(loss)
            if auto.averaging and started is None:
                started = number
        assert started == expected
        assert not auto.finished


def test_published_settings_of_penn_treebank_train_a_small_model():
    for name in ("asgd", "nt_asgd", "adam", "scheduled_adam", "padam", "gadam", "gadamx"):
        config = preset_config(f"{name}/lstm/ptb", num_epochs=2, batch_size=4)
        assert (config.random_segments, config.activation_penalty) == (True, 2.0)
        found = fit(recurrent(0.1), text(), validation=text(90, seed=1), config=config)
        assert math.isfinite(found.metrics["validation_perplexity"])


@pytest.mark.parametrize(
    ("model", "source", "options", "match"),
    [
        ("lstm", None, {"random_segments": True}, "random_segments needs a text"),
        ("gpt", text, {"change_penalty": 1.0}, "need a model with a layer last_drop"),
        ("lstm", text, {"activation_penalty": 1.0, "compile": True}, "compile must be False"),
        ("lstm", text, {"activation_penalty": -1.0}, "activation_penalty"),
        ("lstm", text, {"activation_penalty": 1.0, "noise": "full"}, "must be 0 with noise"),
        ("lstm", text, {"patience_rule": "non_monotone"}, "must be given with patience"),
        ("lstm", text, {"random_segments": True, "capture": True}, "capture must be False"),
    ],
)
def test_options_that_do_not_fit_are_named(model, source, options, match):
    tokens = torch.arange(12).view(4, 3) % 7
    data = (tokens, tokens) if source is None else source()
    sizes = {"width": 12, "num_classes": 7} | ({"hidden": 6} if model == "lstm" else {})
    with pytest.raises(ValueError, match=match):
        fit(models.create(model, **sizes), data, num_epochs=1, batch_size=2, **options)
