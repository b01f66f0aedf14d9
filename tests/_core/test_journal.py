"""States: saved at intervals, resumed bit for bit, refused by another computation."""

import signal

import pytest
import torch
from matrices import seeded
from processes import run_processes, start

from ritz._core import journal as module
from ritz._core.journal import Journal, Parts, has_state, remove_state, state_files
from ritz._core.storage import CorruptFileError, save
from ritz.spectra import lanczos

SETTINGS = {"num_steps": 5, "start": torch.arange(3.0)}


def opened(path, **options):
    return Journal(path, SETTINGS, interval=0.0, **options)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_state_is_restored_bit_for_bit(tmp_path):
    state = {
        "rows": [(0.1, float("nan")), (1 / 3, -0.0)],
        "vector": torch.randn(5, generator=seeded(0)),
        "result": lanczos(torch.eye(3), num_steps=1),
    }
    opened(tmp_path / "state").save(state, step=2)

    found = opened(tmp_path / "state").load()

    assert repr(found["rows"]) == repr(state["rows"])
    assert torch.equal(found["vector"], state["vector"])
    assert torch.equal(found["result"].values, state["result"].values)


def test_without_a_path_no_save_is_due_and_no_file_is_written_or_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal = Journal(None, SETTINGS, interval=0.0)

    journal.save([1], step=1)

    assert not journal.due()
    assert journal.load() is None
    assert names(tmp_path) == []


def test_a_save_is_due_only_after_the_interval(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    journal = Journal(tmp_path / "state", {}, interval=10.0)

    assert not journal.due()
    clock[0] = 110.0
    assert journal.due()
    journal.save([], step=1)
    assert not journal.due()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 6, "start": torch.arange(3.0)}, "num_steps=5, this run has num_steps=6"),
        ({"num_steps": 5, "start": torch.ones(3)}, "start=.*, this run has start="),
        ({"num_steps": 5, "start": [torch.ones(3)] * 2}, "start=.*, this run has start="),
    ],
)
def test_the_state_of_another_computation_is_refused_by_name(tmp_path, settings, message):
    opened(tmp_path / "state").save([], step=1)

    with pytest.raises(ValueError, match=rf"state at .*state was made with {message}"):
        Journal(tmp_path / "state", settings).load()


def test_a_file_of_results_is_not_accepted_as_a_state(tmp_path):
    save(lanczos(torch.eye(3), num_steps=1), tmp_path / "state")

    with pytest.raises(ValueError, match=r"is a saved Spectrum: pass a path"):
        opened(tmp_path / "state").load()


def test_a_damaged_state_falls_back_to_the_previous_one_and_stays_safe(tmp_path):
    journal, path = opened(tmp_path / "state"), tmp_path / "state"
    for step in (1, 2, 3):
        journal.save([step], step=step)
    path.write_bytes(path.read_bytes()[:-3])
    resumed = opened(path)

    with pytest.warns(RuntimeWarning, match="state cannot be used, looking for the previous one"):
        assert resumed.load() == [2]

    # The damaged file is gone, so the next save keeps a good one beside it.
    resumed.save([3], step=3)
    path.unlink()
    assert opened(path).load() == [2]


def test_the_error_without_a_usable_state_says_what_to_do(tmp_path):
    (tmp_path / "state").write_bytes(b"")

    with (
        pytest.warns(RuntimeWarning, match="truncated"),
        pytest.raises(CorruptFileError, match=r"no usable state at .*: delete these files, or"),
    ):
        opened(tmp_path / "state").load()


def restored(path):
    """The two blocks of vectors of a state, read from its files."""
    blocks = [[], []]

    def restore(state, parts):
        for block in blocks:
            block.clear()
        for part in parts:
            for block, rows in zip(blocks, part, strict=True):
                block.append(rows)

    state = opened(path).load(restore)
    return state, [torch.cat(block) for block in blocks]


def test_vectors_are_written_once_and_read_back_in_order(tmp_path, monkeypatch):
    real, written = module.write_tensors, []

    def count(path, tensors, header):
        written.append(sum(len(tensor) for tensor in tensors.values()))
        real(path, tensors, header)

    monkeypatch.setattr(module, "write_tensors", count)
    basis = torch.randn(6, 4, generator=seeded(1))
    journal = opened(tmp_path / "state")
    for size in (2, 3, 6):  # the second block stops growing at two rows
        journal.save(size, step=size, vectors=[basis[:size], basis[:2]])

    state, (first, second) = restored(tmp_path / "state")

    assert written == [4, 1, 3]
    assert state == 6
    assert torch.equal(first, basis)
    assert torch.equal(second, basis[:2])


def test_a_new_generation_writes_all_vectors_and_removes_the_old_ones(tmp_path):
    old, new = torch.zeros(3, 4), torch.ones(2, 4)
    journal = opened(tmp_path / "state")
    journal.save(1, step=1, vectors=[old, old])
    journal.save(2, step=2, vectors=[new, new], generation=1)
    assert "state.0.0-3" in names(tmp_path)  # the previous state needs it
    journal.save(3, step=3, vectors=[new, new], generation=1)

    assert names(tmp_path) == ["state", "state.1.0-2", "state.previous"]
    assert torch.equal(restored(tmp_path / "state")[1][0], new)


def test_damaged_vectors_fall_back_to_the_previous_state(tmp_path):
    basis = torch.randn(4, 3, generator=seeded(2))
    journal = opened(tmp_path / "state")
    for size in (2, 4):
        journal.save(size, step=size, vectors=[basis[:size], basis[:size]])
    (tmp_path / "state.0.2-4").unlink()

    with pytest.warns(RuntimeWarning, match="vectors are missing"):
        state, (first, _) = restored(tmp_path / "state")

    assert state == 2
    assert torch.equal(first, basis[:2])


def test_a_number_that_is_not_repeated_reveals_other_data(tmp_path):
    journal = opened(tmp_path / "state")

    journal.check_repeats(
        "loss", [1.0 + 1e-9, float("nan")], [1.0, float("nan")], dtype=torch.float32
    )
    with pytest.raises(
        ValueError, match="other data or another model: its loss is 1, here it is 2"
    ):
        journal.check_repeats("loss", [2.0], [1.0], dtype=torch.float32)


def test_removing_a_state_leaves_neighbours_alone(tmp_path):
    for name in ("state", "state2", "other.state"):
        opened(tmp_path / name).save([], step=1, vectors=[torch.zeros(1, 2)])
    (tmp_path / "state.part.run.previous").touch()
    (tmp_path / ".state.next.abcdef01.99.00000000").touch()

    assert len(state_files(tmp_path / "state")) == 4
    assert has_state(tmp_path / "state")
    remove_state(tmp_path / "state")

    assert not has_state(tmp_path / "state")
    left = ["other.state", "other.state.0.0-1", "state2", "state2.0.0-1"]
    assert names(tmp_path) == left


def test_vectors_and_half_done_saves_alone_are_no_state(tmp_path):
    (tmp_path / "state.0.0-3").touch()
    (tmp_path / "state.part.run.next").touch()

    assert not has_state(tmp_path / "state")
    assert not has_state(tmp_path / "missing" / "state")


def test_a_finished_part_is_not_computed_again_and_its_state_is_removed(tmp_path):
    def compute(state):
        opened(state).save([], step=1)
        return 7.0

    parts = Parts(opened(tmp_path / "state"))
    assert parts.get("a", compute) == 7.0
    assert names(tmp_path) == ["state"]

    again = Parts(opened(tmp_path / "state"))
    assert again.get("a", None) == 7.0
    assert again.get("b", lambda state: 8.0) == 8.0


def test_parts_without_a_path_are_computed_once():
    parts = Parts(Journal(None, {}))

    assert parts.get("a", lambda state: state) is None
    assert parts.get("a", lambda state: 1) is None


# A walk whose steps depend on all before them. It kills itself when it renames a file for the
# n-th time: vectors, state and the two names of a state are all written by renaming.
WALK = """
import os, signal, sys, torch
from ritz._core.journal import Journal
rename, left = os.replace, [int(sys.argv[2])]
def replace(*names):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*names)
os.replace = replace
journal = Journal(sys.argv[1], {"kind": "walk"}, interval=0.0)
rows = []
def restore(state, parts):
    rows.clear()
    for (part,) in parts:
        rows.extend(part)
step = journal.load(restore) or 0
rows = rows or [torch.ones(50, dtype=torch.float64)]
while step < 12:
    rows.append(torch.sin(3 * rows[-1] + step))
    step += 1
    journal.save(step, step=step, vectors=[torch.stack(rows)])
torch.save(torch.stack(rows), sys.argv[1] + "-result")
"""


def walk(path, kill_at):
    process = start(WALK, path, kill_at, errors=path.with_name("errors"))
    process.join(100)
    return process.exitcode


def test_a_computation_killed_at_any_point_of_a_save_ends_with_the_same_result(tmp_path):
    assert walk(tmp_path / "whole", 0) == 0

    for kill_at in (1, 7, 8, 9, 10, 11, 12):
        assert walk(tmp_path / "killed", kill_at) == -signal.SIGKILL
    assert walk(tmp_path / "killed", 0) == 0

    found, expected = (torch.load(tmp_path / f"{name}-result") for name in ("killed", "whole"))
    assert torch.equal(found, expected)


SHARED = """
    from pathlib import Path
    from ritz._core.journal import Journal, remove_state
    path = Path(folder) / "state"
    journal = Journal(path, {}, interval=0.0)
    for step in (1, 2):
        journal.save([step], step=step)
    journal.wait()
    if rank == 1:  # as if this one had been killed before its last save
        path.with_name("state.rank1.previous").replace(path.with_name("state.rank1"))
    assert Journal(path, {}).load() == [1]
    remove_state(journal.path)
    assert not path.with_name(f"state.rank{rank}").exists()
    alone = Journal(path, {}, together=False)
    if rank == 1:
        alone.save([5], step=5)
        assert Journal(path, {}, together=False).load() == [5]
    journal.wait()
    try:
        Journal(path, {}).load()
    except ValueError as error:
        assert "can be used by all processes" in str(error)
    else:
        raise RuntimeError("one process has a state, and nobody noticed")
"""


@pytest.mark.distributed
def test_processes_continue_from_a_step_that_all_have(tmp_path):
    for code, error in run_processes(SHARED, 2, tmp_path):
        assert code == 0, error
