"""The state of a recurrent model, carried through an epoch and an evaluation."""

import math
from functools import partial

import pytest
import torch
from processes import run_processes
from torch.nn.functional import cross_entropy
from training.examples import assert_same_bits, state
from training.test_captured import Recording, played  # noqa: F401
from training.test_processes import TESTS
from training.test_resume import Interrupt
from training.texts import broken_loss, recurrent, text, unbroken_loss

import ritz
from ritz.curvature._shared import Adapter
from ritz.training import CurvatureMonitor, TrainingConfig, _cuda_graph, evaluate, fit, read_log
from ritz.training._checkpoint import Folder
from ritz.training._recurrent import CarriedState
from ritz.training._step import Piece

STILL = {"optimizer_settings": {"lr": 0.0}, "batch_size": 4}
MOVING = {"optimizer_settings": {"lr": 0.5}, "batch_size": 4, "num_epochs": 3}


@pytest.mark.parametrize("rows", [1, 4])
def test_segments_with_a_carried_state_equal_one_long_sequence(rows):
    model, split = recurrent(), text()
    whole, broken = unbroken_loss(model, split, rows), broken_loss(model, split, rows)
    assert abs(whole - broken) > 1e-3  # the state matters
    assert evaluate(model, split.batches(rows))["loss"] == pytest.approx(whole, rel=1e-12)
    apart = evaluate(model, split.batches(rows), carry_state=False)["loss"]
    assert apart == pytest.approx(broken, rel=1e-12)
    anew = text(consecutive=False).batches(rows)
    assert evaluate(model, anew)["loss"] == apart


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_epoch_starts_with_the_initial_state(accumulate):
    model, split = recurrent(), text()
    found = fit(model, split, num_epochs=3, accumulate=accumulate, validation=text(90, seed=1),
                evaluation_batch_size=3, **STILL)  # fmt: skip
    losses = found.history["train_loss"]
    assert losses[0] == losses[1] == losses[2]
    assert float(losses[0]) == pytest.approx(unbroken_loss(model, split, 4), rel=1e-12)
    held = unbroken_loss(model, text(90, seed=1), 3)
    assert found.metrics["validation_loss"] == pytest.approx(held, rel=1e-12)


def test_a_text_may_be_read_without_a_carried_state():
    split = text(consecutive=False)
    found = fit(recurrent(), split, num_epochs=1, **STILL)
    expected = broken_loss(recurrent(), split, 4)
    assert found.metrics["train_loss"] == pytest.approx(expected, rel=1e-12)
    assert not split.to("cpu").consecutive


def test_no_gradient_goes_back_beyond_a_segment():
    """One step on the second segment has the gradient of that segment alone."""
    model, split = recurrent(), text(length=12)
    (first, _), (inputs, targets) = split.batches(4)[:2]
    _, before = model(first, model.initial_state(4))
    held = tuple(tuple(part.detach() for part in pair) for pair in before)
    expected = torch.autograd.grad(
        cross_entropy(model(inputs, held)[0], targets), list(model.parameters())
    )
    steps = []

    class Watch:
        unit = "step"

        def __call__(self, count, model, optimizer):
            steps.append([p.grad.clone() for p in model.parameters()])

    fit(model, split, num_epochs=1, monitors=[Watch()], **STILL)
    torch.testing.assert_close(steps[1], list(expected))


@pytest.mark.parametrize("step", [2, 9, 15])
def test_an_interrupted_epoch_resumes_bit_for_bit(tmp_path, step):
    common = MOVING | {"average_from": 2, "validation": text(90, seed=1), "seed": 3}
    whole, parts = recurrent(0.3), recurrent(0.3)
    fit(whole, text(), log=tmp_path / "whole.jsonl", **common)
    common |= {"log": tmp_path / "parts.jsonl", "checkpoint": tmp_path / "run"}
    first = fit(recurrent(0.3), text(), monitors=[Interrupt(step)], **common)
    assert first.status.outcome == "interrupted"
    assert first.num_steps % 6  # six segments an epoch: between two of them
    saved = Folder(tmp_path / "run").read().carried
    assert len(saved) == 4
    assert all(bool(rows.any()) for rows in saved.values())
    fit(parts, text(), **common)
    assert_same_bits(state(parts), state(whole))
    assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_run_with_a_carried_state_is_not_resumed_without_it(tmp_path):
    common = MOVING | {"checkpoint": tmp_path}
    fit(recurrent(), text(), monitors=[Interrupt(2)], **common)
    with pytest.raises(ValueError, match=r"trained with a recurrent state .* unlike this run"):
        fit(recurrent(), text(consecutive=False), **common)
    fit(recurrent(), text(consecutive=False), resume=False, monitors=[Interrupt(2)], **common)
    with pytest.raises(ValueError, match=r"trained without a recurrent state .* unlike this run"):
        fit(recurrent(), text(), **common)


def test_evaluations_and_monitors_leave_the_state_of_training_alone():
    class Evaluation:
        unit = "step"

        def __call__(self, count, model, optimizer):
            evaluate(model, text(90, seed=1).batches(4))

    plain, watched = recurrent(0.3), recurrent(0.3)
    fit(plain, text(), **MOVING)
    risk = list(text(12, seed=2, length=1).batches(4))
    monitor = CurvatureMonitor(risk, quantities=["trace"], unit="step", every=13, num_probes=2)
    fit(watched, text(), validation=text(90, seed=1), average_from=2, average_every="step",
        monitors=[Evaluation(), monitor], **MOVING)  # fmt: skip
    assert_same_bits(state(watched), state(plain))


def test_curvature_stays_a_function_of_weights_and_batch():
    model, batches = recurrent(), text(40, length=3).batches(4)
    risks = [ritz.Risk(model, cross_entropy, list(batches), batch_norm="eval")]
    block = torch.ones(risks[0].theta.numel(), 1, dtype=torch.float64)
    before = risks[0].loss(), ritz.hessian(risks[0], engine="eager") @ block
    fit(model, text(), num_epochs=1, **STILL)
    evaluate(model, batches)
    risks.append(ritz.Risk(model, cross_entropy, list(batches), batch_norm="eval"))
    after = risks[1].loss(), ritz.hessian(risks[1], engine="eager") @ block
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])
    assert after[0] == pytest.approx(broken_loss(model, text(40, length=3), 4), rel=1e-12)


class Uneven(list):
    """Consecutive batches of which the last has fewer rows."""

    consecutive = True


def test_batches_with_other_rows_have_a_state_of_their_size(tmp_path):
    first, second = text().batches(4), text(60, seed=1).batches(2)
    batches, model = Uneven([*first[:3], *second]), recurrent()
    found = fit(model, batches, num_epochs=2, optimizer_settings={"lr": 0.0})
    size = sum(y.numel() for _, y in first[:3]), sum(y.numel() for _, y in second)
    [(inputs, targets)] = text().batches(4, length=18)[:1]
    with torch.no_grad():
        means = [float(cross_entropy(model(inputs), targets))]
    means.append(unbroken_loss(model, text(60, seed=1), 2))
    expected = (means[0] * size[0] + means[1] * size[1]) / sum(size)
    assert found.history["train_loss"].tolist() == pytest.approx([expected] * 2, rel=1e-12)
    common = {"num_epochs": 2, "optimizer_settings": {"lr": 0.5}}
    whole, parts = recurrent(), recurrent()
    fit(whole, batches, **common)
    fit(recurrent(), batches, monitors=[Interrupt(13)], checkpoint=tmp_path, **common)
    fit(parts, batches, checkpoint=tmp_path, **common)
    assert_same_bits(state(parts), state(whole))


def test_a_user_defined_forward_carries_no_state():
    model, split = recurrent(), text()
    found = evaluate(
        model, split.batches(4), forward=lambda model, batch: (model(batch[0]), batch[1])
    )
    assert found["loss"] != evaluate(model, split.batches(4))["loss"]


def walk(take_of):
    model, split = recurrent(dtype=torch.float32), text(300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    adapter = Adapter(model, cross_entropy, None)
    step = Recording(adapter, optimizer, TrainingConfig(), torch.device("cpu"))
    take, carried = take_of(step), CarriedState(model)
    for _ in range(2):
        carried.reset()
        for batch in split.batches(4):
            take([Piece(batch, state=carried.of(4))])
    return state(model), step.totals.sums, take


def test_replays_carry_the_state_as_steps_do(played):  # noqa: F811
    weights, sums, _ = walk(lambda step: step)
    found, found_sums, take = walk(lambda step: _cuda_graph.CapturedStep(step, required=True))
    assert len(take._graphs) == 1
    assert_same_bits(found, weights)
    assert torch.equal(found_sums, sums)


@pytest.mark.parametrize("loss_fn", [cross_entropy, torch.nn.CrossEntropyLoss()])
def test_the_perplexity_of_a_text_is_logged(tmp_path, loss_fn):
    found = fit(recurrent(), text(), num_epochs=2, validation=text(90, seed=1), average_from=2,
                test=text(80, seed=2), loss_fn=loss_fn, log=tmp_path / "log.jsonl",
                **STILL)  # fmt: skip
    for name in ("train", "validation", "average_validation", "test", "average_test"):
        expected = math.exp(found.metrics[f"{name}_loss"])
        assert found.metrics[f"{name}_perplexity"] == pytest.approx(expected, rel=1e-12)
    assert "test_perplexity" in str(found)
    assert "validation_perplexity" in read_log(tmp_path / "log.jsonl")[0]


def test_other_losses_have_no_perplexity():
    smoothed = partial(cross_entropy, label_smoothing=0.1)
    found = fit(recurrent(), text(), num_epochs=1, loss_fn=smoothed, **STILL)
    assert "train_loss" in found.metrics
    assert "train_perplexity" not in found.metrics


SCRIPT = f"""
sys.path.insert(0, {TESTS!r})
import signal
from training.texts import recurrent, text
from training.test_resume import Interrupt
from ritz.training import _loop, fit

_loop.AGREEMENT = 1
common = dict(num_epochs=2, batch_size=5, optimizer_settings={{"lr": 0.2}}, checkpoint=folder,
              validation=text(90, seed=1))
first = fit(recurrent(), text(), monitors=[Interrupt(3, signal.SIGTERM)], **common)
assert first.status.outcome == "interrupted" and first.num_steps == 3, first
model = recurrent()
result = fit(model, text(), **common)
torch.save(model.state_dict() | {{"loss": torch.tensor(result.metrics["validation_loss"])}},
           f"{{folder}}/rank{{rank}}.pt")
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_two_processes_carry_the_state_of_their_rows(tmp_path):
    for code, error in run_processes(SCRIPT, 2, tmp_path):
        assert code == 0, error
    model = recurrent()
    # Five rows are split into two and three.
    one = fit(model, text(), num_epochs=2, batch_size=5, optimizer_settings={"lr": 0.2},
              validation=text(90, seed=1))  # fmt: skip
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert float(found.pop("loss")) == pytest.approx(one.metrics["validation_loss"], rel=1e-6)
        # Gradients are summed in another order: roundoff of float64, over ten steps.
        torch.testing.assert_close(found, state(model), rtol=1e-9, atol=1e-12)


class Places:
    """Remembers where the weights are."""

    unit = "step"

    def __init__(self):
        self.seen = set()

    def __call__(self, count, model, optimizer):
        self.seen.add(tuple(parameter.data_ptr() for parameter in model.parameters()))


@pytest.mark.gpu
@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_captured_runs_of_a_text_equal_runs_of_ordinary_steps(chance):
    found = []
    for capture in (False, True):
        model, places = recurrent(chance, dtype=torch.float32), Places()
        result = fit(model, text(600).to("cuda"), num_epochs=3, batch_size=4, optimizer="gadam",
                     optimizer_settings={"lr": 0.001}, average_from=2, capture=capture,
                     validation=text(90, seed=1).to("cuda"), monitors=[places],
                     device="cuda")  # fmt: skip
        assert len(places.seen) == 1  # a graph reads the weights where they were recorded
        found.append(result.metrics["validation_loss"])
    if chance == 0:  # a rate in a tensor rounds otherwise than a number
        assert found[1] == pytest.approx(found[0], rel=1e-3)
    # Masks are drawn from another place of the generator: close, but not the same.
    assert found[1] == pytest.approx(found[0], rel=0.1)
