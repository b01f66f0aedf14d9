"""K-FAC in several processes takes the steps of one, also with uneven and missing samples."""

import pytest
import torch
from processes import run_processes

pytestmark = pytest.mark.distributed

SETTING = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from ritz.optim import KFAC

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.group = nn.Conv2d(4, 4, 2, groups=2)
        self.table = nn.Embedding(5, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x, ids):
        x = self.group(self.norm(self.conv(x)).tanh()).mean((2, 3))
        return self.last((x + self.table(ids).mean(1)).tanh())

def network():
    torch.manual_seed(0)
    return Network().double()

def data(step, count=7):
    noise = torch.Generator().manual_seed(step)
    return (torch.randn(count, 2, 4, 4, generator=noise, dtype=torch.float64),
            torch.randint(0, 5, (count, 3), generator=noise),
            torch.randint(0, 3, (count,), generator=noise))

CASES = [{"kind": "kfac"}, {"kind": "kfac", "damping": "exact"}, {"kind": "ekfac"},
         {"kind": "ekfac", "fisher": "ggn"}, {"weight_sharing": "reduce"}]

def train(model, plain, settings, parts):
    optimizer = KFAC(model, lr=0.1, delta=0.05, factor_every=2, inverse_every=4, **settings)
    for step in range(6):
        x, ids, y = data(step)
        optimizer.zero_grad()
        # The mean over all samples: each process has its share of it.
        x, ids, y = (t[parts] for t in (x, ids, y))
        share = len(y) * parts.step / 7 if parts.step else 1.0
        outputs = model(x, ids)
        optimizer.observe(outputs, y, cross_entropy)
        (cross_entropy(outputs, y) * share).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in plain.parameters()])
"""
SCRIPT = (
    SETTING.replace("\n", "\n    ")
    + """
    from torch.nn.parallel import DistributedDataParallel

    for number, settings in enumerate(CASES):
        model = network()
        wrapped = DistributedDataParallel(model)
        found = train(wrapped, model, settings, slice(rank, None, size))
        torch.save(found, f"{folder}/{number}-{rank}.pt")
    dist.destroy_process_group()
"""
)


@pytest.mark.parametrize("count", [2, 3])
def test_processes_with_uneven_batches_take_the_steps_of_one(count, tmp_path):
    for code, error in run_processes(SCRIPT, count, tmp_path):
        assert code == 0, error

    names: dict = {}
    exec(SETTING, names)
    for number, settings in enumerate(names["CASES"]):
        model = names["network"]()
        expected = names["train"](model, model, settings, slice(None))
        for rank in range(count):
            found = torch.load(tmp_path / f"{number}-{rank}.pt")
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_fit_takes_the_same_steps_in_two_processes_with_a_missing_sample(tmp_path):
    script = """
        from torch import nn
        from ritz.training import fit

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        noise = torch.Generator().manual_seed(1)
        # The last batch has one sample, so that one process has none.
        x = torch.randn(9, 3, generator=noise, dtype=torch.float64)
        y = torch.randint(0, 2, (9,), generator=noise)
        fit(model, (x, y), optimizer="kfac", num_epochs=3, batch_size=4, accumulate=2,
            optimizer_settings={"lr": 0.1, "factor_every": 1, "inverse_every": 2})
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.save(flat, f"{folder}/{size}-{rank}.pt")
        dist.destroy_process_group()
    """
    for count in (1, 2):
        for code, error in run_processes(script, count, tmp_path):
            assert code == 0, error

    expected = torch.load(tmp_path / "1-0.pt")
    for rank in range(2):
        found = torch.load(tmp_path / f"2-{rank}.pt")
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_sharded_parameters_are_refused(tmp_path):
    script = """
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from ritz.optim import KFAC

        model = nn.Sequential(nn.Linear(4, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        try:
            KFAC(model)
        except ValueError as error:
            assert "KFAC needs whole parameters, got 0.weight sharded" in str(error), error
        else:
            raise AssertionError("no error")
        dist.destroy_process_group()
    """
    for code, error in run_processes(script, 2, tmp_path):
        assert code == 0, error
