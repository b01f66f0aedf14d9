"""Two processes train as one does."""

from pathlib import Path

import pytest
import torch
from processes import run_processes
from training.examples import network, samples

from ritz.training import fit, read_log, read_weights
from ritz.training._checkpoint import Generators, sole_writer

TESTS = str(Path(__file__).parents[1])
SCRIPT = f"""
sys.path.insert(0, {TESTS!r})
import signal
from training.examples import network, samples
from ritz.training import fit

data = samples(47)
common = dict(validation=samples(31, seed=0), num_epochs=3, batch_size=10, average_from=2,
              optimizer_settings={{"lr": 0.2}}, log=folder + "/log.jsonl", checkpoint=folder)

class Stop:
    unit = "epoch"
    def __call__(self, count, model, optimizer):
        if count == 2:
            os.kill(os.getpid(), signal.SIGTERM)

first = fit(network(), data, monitors=[Stop()], **common)  # rank 0 alone is told to stop
assert first.status.outcome == "interrupted" and first.num_epochs == 2, first
model = network()
result = fit(model, data, **common)
assert result.num_steps == 15, result
torch.save(model.state_dict(), f"{{folder}}/rank{{rank}}.pt")
dist.barrier()  # gloo may end a process whose neighbour has left already
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_two_processes_train_as_one_even_if_rows_do_not_divide(tmp_path):
    for code, error in run_processes(SCRIPT, 2, tmp_path):
        assert code == 0, error
    model = network()
    # 47 samples in batches of 10: the last of 7 is split into 3 and 4.
    one = fit(model, samples(47), validation=samples(31, seed=0), num_epochs=3, batch_size=10,
              average_from=2, optimizer_settings={"lr": 0.2},
              checkpoint=tmp_path / "one")  # fmt: skip
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for name, value in model.state_dict().items():
        assert torch.equal(ranks[0][name], ranks[1][name])
        # Gradients are summed in another order: roundoff, over fifteen steps.
        torch.testing.assert_close(ranks[0][name], value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        read_weights(tmp_path / "average.safetensors"),
        read_weights(tmp_path / "one" / "average.safetensors"),
        rtol=1e-4,
        atol=1e-5,
    )
    last = read_log(tmp_path / "log.jsonl")[-1]
    assert len(read_log(tmp_path / "log.jsonl")) == 3
    for name in ("train_loss", "validation_loss", "average_validation_loss"):
        assert last[name] == pytest.approx(one.metrics[name], rel=1e-4)
    assert last["validation_accuracy"] == one.metrics["validation_accuracy"]


def test_a_checkpoint_of_two_processes_is_not_resumed_by_one(tmp_path):
    states = {"cpu": torch.stack([torch.get_rng_state()] * 2)}
    with pytest.raises(ValueError, match="started with 2 processes, got 1: start 2, or"):
        Generators(torch.device("cpu")).restore(states)


REFUSED = f"""
sys.path.insert(0, {TESTS!r})
from training.examples import network, samples
from ritz.training import CheckpointError, fit

try:
    fit(network(), samples(), num_epochs=1, batch_size=12, checkpoint=folder + "/run")
except CheckpointError as error:
    open(f"{{folder}}/rank{{rank}}.txt", "w").write(str(error))
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_all_processes_learn_that_the_folder_is_in_use(tmp_path):
    (tmp_path / "run").mkdir()
    with sole_writer(tmp_path / "run"):
        for code, error in run_processes(REFUSED, 2, tmp_path):
            assert code == 0, error
    assert "is writing in" in (tmp_path / "rank0.txt").read_text()
    assert "the first process cannot write" in (tmp_path / "rank1.txt").read_text()
