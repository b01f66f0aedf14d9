"""Averages of models in several processes are those of one, sharded or not."""

import pytest
import torch
from optim.walks import averages
from processes import run_processes

pytestmark = pytest.mark.distributed

SETTING = """
import torch
from torch import nn
from ritz.optim import IterateAverage
from ritz.optim import Lookahead
from ritz.optim import PadamW

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(),
                         nn.Linear(5, 2)).double()

def attached(model, kind):
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if kind == "lookahead":
        optimizer = Lookahead(PadamW(model.parameters(), lr=0.05), k=2, until=5)
    return optimizer, IterateAverage(optimizer, start=4, interval=2)

def data(step):
    noise = torch.Generator().manual_seed(step)
    return torch.randn(8, 5, generator=noise, dtype=torch.float64)

def train(model, optimizer, steps, own=slice(None)):
    for step in steps:
        part = data(step)[own]
        optimizer.zero_grad()
        (model(part[:, :3]) - part[:, 3:]).square().mean().backward()
        optimizer.step()
"""
SCRIPT = (
    SETTING.replace("\n", "\n    ")
    + """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict,
        set_optimizer_state_dict)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (size,))
    mine = slice(rank, None, size)
    probe = data(99)[:, :3]

    def full(tensor):
        tensor = tensor.detach()
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()

    def distributed(way):
        model = network()
        if way == "ddp":
            return DistributedDataParallel(model)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def measured(model, optimizer, average):
        with torch.no_grad():
            model(probe)  # a sharded model keeps gathered weights after this
            with average.applied(model):
                inside = model(probe)
            after = model(probe)
        return {
            "weights": [full(p) for p in model.parameters()],
            "average": [full(optimizer.state[p]["average"]) for p in model.parameters()],
            "outputs": [inside, after],
            "numbers": [torch.tensor([average.count, average.step, average.start])],
        }

    def template(model, optimizer, flat):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        return {"model": get_model_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}

    def through_a_checkpoint(way, kind, model, optimizer, flat):
        path = f"{folder}/{way}-{kind}-{flat}"
        dcp.save(template(model, optimizer, flat), checkpoint_id=path)
        model = distributed(way)
        optimizer, average = attached(model, kind)
        state = template(model, optimizer, flat)
        assert average.step == 0, average.step
        dcp.load(state, checkpoint_id=path)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        return model, optimizer, average

    found = {}
    for way in ("ddp", "fsdp"):
        for kind in ("sgd", "adamw", "lookahead"):
            model = distributed(way)
            optimizer, average = attached(model, kind)
            train(model, optimizer, range(11), mine)
            found[way, kind] = measured(model, optimizer, average)
            for flat, stop in ((False, 7), (True, 2)):
                model = distributed(way)
                optimizer, average = attached(model, kind)
                train(model, optimizer, range(stop), mine)
                restored = through_a_checkpoint(way, kind, model, optimizer, flat)
                train(restored[0], restored[1], range(stop, 11), mine)
                found[way, kind, flat] = measured(*restored)
    torch.save(found, f"{folder}/found{rank}")
    dist.destroy_process_group()
"""
)


def alone(kind):
    scope = {}
    exec(SETTING, scope)
    model = scope["network"]()
    optimizer, average = scope["attached"](model, kind)
    scope["train"](model, optimizer, range(11))
    probe = scope["data"](99)[:, :3]
    with torch.no_grad(), average.applied(model):
        inside = model(probe)
    return {
        "weights": list(model.parameters()),
        "average": averages(model, optimizer),
        "outputs": [inside, model(probe)],
        "numbers": [torch.tensor([average.count, average.step, average.start])],
    }


def test_two_processes_give_the_average_of_one_sharded_or_not_also_after_a_checkpoint(tmp_path):
    for code, error in run_processes(SCRIPT, 2, tmp_path):
        assert code == 0, error
    expected = {kind: alone(kind) for kind in ("sgd", "adamw", "lookahead")}
    for rank in range(2):
        found = torch.load(tmp_path / f"found{rank}")
        for key, parts in found.items():
            for part, tensors in parts.items():
                for left, right in zip(tensors, expected[key[1]][part], strict=True):
                    # Gradients are summed in another order.
                    torch.testing.assert_close(
                        left,
                        right.detach(),
                        rtol=1e-12,
                        atol=1e-13,
                        msg=lambda m, k=key: f"{k}: {m}",
                    )
            if len(key) == 3:  # a checkpoint on the way changes no bit
                for left, right in zip(parts["average"], found[key[:2]]["average"], strict=True):
                    assert torch.equal(left, right), key


STATISTICS = (
    SETTING.replace("\n", "\n    ")
    + """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    batches = torch.load(f"{folder}/batches")

    def normed():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()

    def statistics(model):
        return [b.clone() for name, b in model.named_buffers() if "running" in name]

    found = {}
    for way in ("plain", "ddp", "fsdp"):
        model = normed()
        if way == "ddp":
            model = DistributedDataParallel(model)
        if way == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        optimizer, average = attached(model, "sgd")
        train(model, optimizer, range(9))
        before = statistics(model)
        # The first process has one batch, the second has three, of other sizes.
        own = batches[:1] if rank == 0 else batches[1:]
        with average.applied(model, data=own):
            found[way] = statistics(model)
        assert all(map(torch.equal, statistics(model), before))
        if way != "fsdp":
            none = batches if rank == 0 else []
            with average.applied(model, data=none):
                found[way + " one has all"] = statistics(model)
            copied = average.to_averaged_model(model, data=batches, sharing="none")
            found[way + " alone"] = statistics(copied)
            assert list(copied.state_dict()) == list(normed().state_dict())
        else:
            try:
                average.to_averaged_model(model)
            except TypeError as error:
                assert "must not be sharded" in str(error)
            else:
                raise AssertionError("a sharded model was copied")
    torch.save(found, f"{folder}/found{rank}")
    dist.destroy_process_group()
"""
)


def test_batch_norm_statistics_over_processes_are_those_of_all_samples(tmp_path):
    noise = torch.Generator().manual_seed(1)
    sizes = (7, 3, 4, 6)
    batches = [torch.randn(n, 3, generator=noise, dtype=torch.float64) for n in sizes]
    torch.save(batches, tmp_path / "batches")
    for code, error in run_processes(STATISTICS, 2, tmp_path):
        assert code == 0, error
    runs = [torch.load(tmp_path / f"found{rank}") for rank in range(2)]
    expected = runs[0]["plain alone"]  # tests of one process compare it with loops by hand
    assert len(runs[0]) == 7
    for run in runs:
        for key, tensors in run.items():
            for left, right in zip(tensors, expected, strict=True):
                torch.testing.assert_close(
                    left, right, rtol=1e-12, atol=1e-13, msg=lambda m, k=key: f"{k}: {m}"
                )


COMPILED = (
    SETTING.replace("\n", "\n    ")
    + """
    import functools
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Trace as the compiler does, without generating code.
    torch.compile = functools.partial(torch.compile, backend="eager")
    found = []
    for sharded in (False, True):
        model = network()
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        optimizer = PadamW(model.parameters(), lr=0.05, compile=sharded)
        train(model, optimizer, range(4))
        found.append([getattr(p, "full_tensor", lambda p=p: p)().detach()
                      for p in model.parameters()])
    for alone, together in zip(*found):
        torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-13)
    dist.destroy_process_group()
"""
)


@pytest.mark.slow
def test_compiled_steps_of_sharded_weights_equal_those_of_unsharded_weights(tmp_path):
    for code, error in run_processes(COMPILED, 2, tmp_path):
        assert code == 0, error
