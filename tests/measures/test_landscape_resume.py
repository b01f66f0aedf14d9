"""Landscapes resume bit for bit."""

import pytest
import torch
from measures.resuming import KilledError, assert_same_files, data, network, risk
from processes import run_processes
from torch.nn.functional import cross_entropy

from ritz.curvature import Risk
from ritz.measures import landscape, landscape2d, random_direction


class Stop:
    """Ends a loop by an error after so many points."""

    def __init__(self, after):
        self.after = after

    def start(self, label, total):
        self.first = None

    def update(self, done, note=""):
        self.first = done if self.first is None else self.first
        if done - self.first == self.after:
            raise KilledError

    def finish(self): ...


def directions(seed=5):
    generator = torch.Generator().manual_seed(seed)
    return {name: random_direction(risk(), generator=generator) for name in ("u", "v")}


def lines(centre, **options):
    return landscape(centre, directions(), num_points=5, **options)


def plane(centre, **options):
    u, v = directions().values()
    return landscape2d(centre, u, v, num_points=4, **options)


def stopped(call, state, *, after, **options):
    with pytest.raises(KilledError):
        call(risk(), state=state, save_interval=0.0, progress=Stop(after), **options)


@pytest.mark.parametrize("mode", ["eval", "recomputed"])
@pytest.mark.parametrize("call", [lines, plane])
def test_landscape_interrupted_twice_gives_the_same_file(tmp_path, call, mode):
    options = {"test": Risk(network(), cross_entropy, data(10, 2)), "batch_norm": mode}
    expected = call(risk(), **options)
    stopped(call, tmp_path / "state", after=2, **options)
    stopped(call, tmp_path / "state", after=3, **options)
    counted = []

    class Count(Stop):
        def update(self, done, note=""):
            counted.append(done)

    found = call(risk(), state=tmp_path / "state", progress=Count(0), **options)
    assert_same_files(found, expected, tmp_path)
    # What the bar is told of before a save is lost: two points, then three beyond them.
    assert counted == list(range(6, expected.loss.numel() + 1))


def test_finished_landscape_is_read_from_its_state(tmp_path):
    state = {"state": tmp_path / "state", "save_interval": 0.0}
    expected = lines(risk(), **state)
    assert {path.name for path in tmp_path.iterdir()} == {"state", "state.previous"}
    assert_same_files(lines(risk(), **state), expected, tmp_path)


def test_no_state_is_written_before_the_save_interval_has_passed(tmp_path):
    lines(risk(), state=tmp_path / "state", save_interval=3600.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda **state: lines(risk(seed=3), **state), "weights"),
        (lambda **state: lines(risk(l2=0.1), **state), "risk"),
        (lambda **state: lines(risk(), batch_norm="train", **state), "risk"),
        (lambda **state: lines(risk(), test=risk(data_seed=8), **state), "test"),
        (lambda **state: lines(risk(), distance=2.0, **state), "distance"),
        (lambda **state: landscape(risk(), directions(), num_points=7, **state), "points"),
        (lambda **state: landscape(risk(), directions(6), num_points=5, **state), "directions"),
        (lambda **state: plane(risk(), **state), "names"),
    ],
)
def test_state_of_other_settings_is_refused_and_the_difference_named(tmp_path, call, name):
    stopped(lines, tmp_path / "state", after=3)
    with pytest.raises(ValueError, match=rf"state at .* was made with {name}="):
        call(state=tmp_path / "state")


def test_state_of_other_data_raises(tmp_path):
    stopped(lines, tmp_path / "state", after=3)
    with pytest.raises(ValueError, match="other data or another model: its loss at the last"):
        lines(risk(data_seed=9), state=tmp_path / "state")


def test_damaged_state_is_skipped_and_the_previous_one_used(tmp_path):
    state = tmp_path / "state"
    stopped(lines, state, after=4)
    state.write_bytes(state.read_bytes()[:-5])
    with pytest.warns(RuntimeWarning, match="state cannot be used, looking for the previous one"):
        found = lines(risk(), state=state)
    assert_same_files(found, lines(risk()), tmp_path)


def test_negative_save_interval_raises(tmp_path):
    with pytest.raises(ValueError, match=r"save_interval must be at least 0.0, got -1"):
        lines(risk(), state=tmp_path / "state", save_interval=-1.0)


SHARED = """
    from pathlib import Path
    from torch import nn
    from torch.nn.functional import cross_entropy
    from ritz.measures import landscape

    class Stop:
        def start(self, label, total): ...
        def update(self, done, note=""):
            if done == 4:
                raise KeyError("stopped")
        def finish(self): ...

    torch.manual_seed(0)
    x, y = torch.randn(24, 3), torch.randint(0, 4, (24,))
    risk = ritz.Risk(nn.Linear(3, 4), cross_entropy, (x, y), batch_size=6)
    direction = torch.randn(16)
    whole = landscape(risk, direction, num_points=7)
    state = Path(folder) / "state"
    try:
        landscape(risk, direction, num_points=7, state=state, save_interval=0.0, progress=Stop())
    except KeyError:
        pass
    if rank == 1:  # as if this one had been killed before its last save
        state.with_name("state.rank1.previous").replace(state.with_name("state.rank1"))
    found = landscape(risk, direction, num_points=7, state=state, save_interval=0.0)
    assert torch.equal(found.loss, whole.loss)
    assert torch.equal(found.accuracy, whole.accuracy)
"""


@pytest.mark.distributed
def test_two_processes_resume_from_the_parts_that_both_have(tmp_path):
    for code, error in run_processes(SHARED, 2, tmp_path):
        assert code == 0, error
