"""Risks shared by several processes are those of one."""

import pytest
import torch
from curvature.networks import cnn, images, mlp, moved, vectors
from processes import run_processes
from torch.nn import functional

import ritz
from ritz.curvature import Risk, fisher, ggn, hessian

pytestmark = pytest.mark.distributed

NETWORK = """
    from torch import nn
    from torch.nn import functional
    from ritz.curvature import Risk, fisher, ggn, hessian
    model = torch.load(f"{folder}/model", weights_only=False)
    data = torch.load(f"{folder}/data")
    found = {}
"""

SCRIPT = (
    NETWORK
    + """
    def measured(name, risk):
        vectors = torch.linspace(-1, 1, 2 * len(risk.theta), dtype=torch.float64).view(-1, 2)
        found[name] = [
            torch.tensor([risk.loss()]), risk.gradient(),
            hessian(risk, engine="eager") @ vectors, ggn(risk, engine="eager") @ vectors,
            fisher(risk, engine="eager", num_draws=3) @ vectors,
            torch.tensor([risk.num_samples]),
        ]
    def run(name, risk):
        measured(name, risk)
        found[name + " statistics"] = list(risk.constants().values())
        op = hessian(risk, engine="eager")
        found[name + " values"] = [ritz.lanczos(op, num_steps=6, placement="spread").values]
    for mode in ("eval", "train", "recomputed"):
        run(mode, Risk(model, functional.cross_entropy, data, batch_norm=mode, l2=0.1))
    own = data[rank::size]
    if len(data) >= size:
        run("own", Risk(model, functional.cross_entropy, own, sharing="own",
                        batch_norm="recomputed", l2=0.1))
    alone = Risk(model, functional.cross_entropy, data, sharing="none", batch_norm="train", l2=0.1)
    measured("none", alone)
    torch.save(found, f"{folder}/found{rank}")
    dist.destroy_process_group()
"""
)


def single(model, data, mode):
    risk = Risk(model, functional.cross_entropy, data, batch_norm=mode, l2=0.1)
    vectors = torch.linspace(-1, 1, 2 * len(risk.theta), dtype=torch.float64).view(-1, 2)
    op = hessian(risk, engine="eager")
    return {
        "": [
            torch.tensor([risk.loss()]),
            risk.gradient(),
            op @ vectors,
            ggn(risk, engine="eager") @ vectors,
            fisher(risk, engine="eager", num_draws=3) @ vectors,
            torch.tensor([risk.num_samples]),
        ],
        " statistics": list(risk.constants().values()),
        " values": [ritz.lanczos(op, num_steps=6).values],
    }


def stored(folder, model, data):
    torch.save(model, folder / "model")
    torch.save(data, folder / "data")


def close(found, expected, what):
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        atol = 1e-12 * max(float(right.abs().max()), 1e-3)
        torch.testing.assert_close(left, right, rtol=0, atol=atol, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize(("count", "sizes"), [(2, (4, 4, 3)), (3, (4, 3))])
def test_several_processes_give_the_results_of_one(count, sizes, tmp_path):
    """The last case has fewer batches than processes."""
    model, data = moved(cnn()), images(*sizes)
    stored(tmp_path, model, data)
    for code, error in run_processes(SCRIPT, count, tmp_path):
        assert code == 0, error
    expected = {mode: single(model, data, mode) for mode in ("eval", "train", "recomputed")}
    for rank in range(count):
        found = torch.load(tmp_path / f"found{rank}")
        for mode, parts in expected.items():
            for part, tensors in parts.items():
                close(found[mode + part], tensors, mode + part)
        close(found["none"], expected["train"][""], "none")
        if "own" in found:
            for part in ("", " statistics", " values"):
                # Labels are drawn by the number of a batch, which is another there.
                keep = slice(0, 4) if part == "" else slice(None)
                close(found["own" + part][keep], expected["recomputed"][part][keep], "own" + part)
            assert found["own"][5] == sum(sizes)


IGNORING = """
    for name, part, options in (("split", data, {}), ("own", data[rank::size], {"sharing": "own"})):
        risk = Risk(model, functional.cross_entropy, part, **options)
        found[name] = [torch.tensor([risk.loss()]), risk.gradient()]
    torch.save(found, f"{folder}/found{rank}")
    dist.destroy_process_group()
"""


def test_batches_are_weighted_by_their_labels_over_all_processes(tmp_path):
    model, data = mlp().double(), vectors(4, 6, 5)
    for index, (_, y) in enumerate(data):
        y[: index + 1] = -100  # another part of each batch
    stored(tmp_path, model, data)

    for code, error in run_processes(NETWORK + IGNORING, 2, tmp_path):
        assert code == 0, error

    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    whole = Risk(model, functional.cross_entropy, [(x, y)])
    for rank in range(2):
        for name, tensors in torch.load(tmp_path / f"found{rank}").items():
            close(tensors, [torch.tensor([whole.loss()]), whole.gradient()], name)


DYING = """
    risk = Risk(model, functional.cross_entropy, data)
    op = hessian(risk, engine="eager")
    calls = []
    original = op.products.matmat
    def product(block):
        calls.append(1)
        if rank == 1 and len(calls) == 3:
            os._exit(5)
        return original(block)
    op.products.matmat = product
    ritz.lanczos(op, num_steps=20, placement="spread")
"""


def test_a_process_that_dies_ends_the_others_with_a_clear_error(tmp_path):
    stored(tmp_path, mlp().double(), vectors(4, 4, 3))
    (code, error), (dead, _) = run_processes(NETWORK + DYING, 2, tmp_path)
    assert dead == 5
    assert code not in (0, 5)
    assert "could not exchange data with the others; one of them has probably failed" in error


def test_a_batch_that_is_not_finite_in_one_process_raises_in_all(tmp_path):
    data = vectors(4, 4, 3)
    data[1][0].fill_(float("nan"))
    stored(tmp_path, mlp().double(), data)
    script = (
        NETWORK
        + """
    risk = Risk(model, functional.cross_entropy, data)
    risk.gradient()
    """
    )
    (first, other), (second, named) = run_processes(script, 2, tmp_path)
    assert first != 0
    assert second != 0
    assert "the loss of batch 1 must be finite, got nan" in named
    assert "must be finite in all processes" in other or "could not exchange data" in other
