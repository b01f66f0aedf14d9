"""Sharpness resumes bit for bit."""

import pytest
import torch
from measures.resuming import KilledError, assert_same_files, risk
from processes import run_processes

from ritz.measures import sharpness

STEPS, BLOCKS = 5, 2  # of each of four matrices
OPTIONS = {"num_steps": STEPS, "num_probes": 3, "block_size": 2, "engine": "eager"}


class Count:
    """Counts the steps of all runs, and ends them by an error after so many."""

    def __init__(self, after=None):
        self.after, self.done = after, 0

    def start(self, label, total): ...

    def update(self, done, note=""):
        self.done += 1
        if self.done == self.after:
            raise KilledError

    def finish(self): ...


def measured(centre, state=None, **options):
    return sharpness(centre, state=state, save_interval=0.0, **(OPTIONS | options))


def stopped(state, *, after):
    with pytest.raises(KilledError):
        measured(risk(), state, progress=Count(after))


@pytest.mark.slow
def test_sharpness_interrupted_in_every_step_gives_the_same_file(tmp_path):
    one = {"matrix": ("ggn",), "batch_norm": "train"}
    expected = measured(risk(), **one)
    total, stops = BLOCKS * STEPS, 0
    while stops < total:
        try:
            measured(risk(), tmp_path / "state", progress=Count(2), **one)
            break
        except KilledError:  # one step was saved, and one is lost
            stops += 1
    assert total / 2 < stops < total
    assert_same_files(measured(risk(), tmp_path / "state", **one), expected, tmp_path)


def test_finished_parts_are_not_computed_again(tmp_path):
    expected = measured(risk())
    stopped(tmp_path / "state", after=2 * BLOCKS * STEPS + STEPS + 3)
    left = {path.name for path in tmp_path.iterdir()} - {"state", "state.previous"}
    # Of the runs themselves, which have all the vectors, those of the unfinished part alone.
    assert left
    assert all(name.startswith("state.train-hessian-1.run") for name in left)
    counted = Count()
    found = measured(risk(), tmp_path / "state", progress=counted)
    assert_same_files(found, expected, tmp_path)
    # The bar is told before a save: two steps of the third row's second block were saved.
    assert counted.done == BLOCKS * STEPS + STEPS - 2


def test_finished_sharpness_is_read_from_its_state(tmp_path):
    expected, counted = measured(risk(), tmp_path / "state"), Count()
    assert not list(tmp_path.glob("*.run*"))
    assert_same_files(measured(risk(), tmp_path / "state", progress=counted), expected, tmp_path)
    assert counted.done == 0


@pytest.mark.parametrize(
    ("centre", "options", "name"),
    [
        ({"seed": 3}, {}, "weights"),
        ({"l2": 0.1}, {}, "risk"),
        ({}, {"num_steps": 6}, "num_steps"),
        ({}, {"generator": torch.Generator().manual_seed(5)}, "start"),
        ({}, {"block_size": 3}, "block_size"),
        ({}, {"engine": "auto"}, "engine"),
    ],
)
def test_state_of_other_settings_is_refused_and_the_difference_named(
    tmp_path, centre, options, name
):
    stopped(tmp_path / "state", after=3)
    with pytest.raises(ValueError, match=rf"state at .* was made with {name}="):
        measured(risk(**centre), tmp_path / "state", **options)


def test_state_of_other_data_raises(tmp_path):
    stopped(tmp_path / "state", after=STEPS + 1)
    with pytest.raises(ValueError, match="belongs to other data or another model: its loss is"):
        measured(risk(data_seed=9), tmp_path / "state")


def test_damaged_part_of_a_state_is_computed_again(tmp_path):
    one, state = {"matrix": "ggn", "batch_norm": "eval"}, tmp_path / "state"
    expected = measured(risk(), state, **one)
    state.write_bytes(state.read_bytes()[:-5])
    counted = Count()

    with pytest.warns(RuntimeWarning, match="state cannot be used, looking for the previous one"):
        found = measured(risk(), state, progress=counted, **one)

    assert counted.done == 0  # the row, from runs that are finished
    assert_same_files(found, expected, tmp_path)


def test_a_budget_reduces_probes_and_then_steps_and_the_status_reports_it():
    centre = risk()
    whole = measured(centre)  # 4 rows of 5 steps of 3 probes
    products = [
        (60, 5, 3),  # all
        (59, 5, 2),
        (20, 5, 1),
        (19, 4, 1),
    ]
    for budget, steps, probes in products:
        found = measured(centre, max_products=budget)
        assert (found.num_steps, found.num_probes) == (steps, probes)
        assert sum(row.num_products for row in found.rows) <= budget
        for row in found.rows:
            assert row.status.ok == (budget == 60)
    assert "max_steps: 1 of 3 probes, 4 of 5 steps, limited by max_products=19" in str(found)
    assert "max_products=60 would suffice" in found.rows[0].status.advice
    assert "max_steps" not in str(whole)
    with pytest.raises(ValueError, match="max_products must be at least 4, got 3"):
        measured(centre, max_products=3)


def test_one_bar_counts_all_products_of_sharpness():
    calls = []

    class Noting:
        def start(self, label, total):
            calls.append((label, total))

        def update(self, done, note=""):
            calls.append(done)

        def finish(self): ...

    measured(risk(), progress=Noting(), matrix="ggn", batch_norm="eval")
    assert calls == [("sharpness", 15), 2, 4, 6, 8, 10, 11, 12, 13, 14, 15]


def test_negative_save_interval_raises(tmp_path):
    with pytest.raises(ValueError, match=r"save_interval must be at least 0.0, got -1"):
        sharpness(risk(), num_steps=2, num_probes=1, save_interval=-1.0)


SHARED = """
    from pathlib import Path
    from torch import nn
    from torch.nn.functional import cross_entropy
    from ritz.measures import sharpness

    class Stop:
        done = 0
        def start(self, label, total): ...
        def update(self, done, note=""):
            self.done += 1
            if self.done == 9:
                raise KeyError("stopped")
        def finish(self): ...

    torch.manual_seed(0)
    x, y = torch.randn(24, 3), torch.randint(0, 4, (24,))
    risk = ritz.Risk(nn.Linear(3, 4), cross_entropy, (x, y), batch_size=6)
    options = {"num_steps": 5, "num_probes": 4, "block_size": 2, "engine": "eager"}
    whole = sharpness(risk, **options)
    state = Path(folder) / "state"
    try:
        sharpness(risk, state=state, save_interval=0.0, progress=Stop(), **options)
    except KeyError:
        pass
    if rank == 1:  # as if this one had been killed before it saved the last part
        state.with_name("state.rank1.previous").replace(state.with_name("state.rank1"))
    found = sharpness(risk, state=state, save_interval=0.0, **options)
    for one, other in zip(found.rows, whole.rows, strict=True):
        assert torch.equal(one.trace.mean, other.trace.mean)
        assert torch.equal(one.spectral_norm.mean, other.spectral_norm.mean)
"""


@pytest.mark.distributed
def test_two_processes_resume_from_the_parts_that_both_have(tmp_path):
    for code, error in run_processes(SHARED, 2, tmp_path):
        assert code == 0, error
