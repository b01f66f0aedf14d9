import io
import shutil

import pytest

from ritz._core import progress
from ritz._core.progress import Bar, Progress, Stages, duration, tracking


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Recorder:
    def __init__(self):
        self.calls = []

    def start(self, label, total):
        self.calls.append(("start", label, total))

    def update(self, done, note=""):
        self.calls.append(("update", done, note))

    def finish(self):
        self.calls.append("finish")


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    # With any arguments: pytest asks for the width too, while it reports a test.
    size = shutil.os.terminal_size((60, 20))
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *args, **names: size)


def test_a_log_file_gets_one_line():
    stream = io.StringIO()
    with tracking(Bar(stream), "steps", 4) as bar:
        for done in range(1, 5):
            bar.update(done, f"residual 1e-{done}")
    assert stream.getvalue().startswith(
        "steps [########################] 4/4  0.0 s  residual 1e-4"
    )
    assert stream.getvalue().count("\n") == 1


def test_a_terminal_line_is_overwritten_in_place():
    stream = Terminal()
    with tracking(Bar(stream), "steps", 2) as bar:
        bar.update(2)
    *lines, last = stream.getvalue().split("\r")
    assert last.endswith("\n")
    assert all(len(line.rstrip("\n")) in (0, 59) for line in [*lines, last])


def test_a_line_longer_than_the_terminal_is_cut():
    stream = Terminal()
    with tracking(Bar(stream), "a label of many words that goes on and on", 2) as bar:
        bar.update(2, "and a note as well")
    assert stream.getvalue().endswith("\n")
    assert max(map(len, stream.getvalue().replace("\n", "").split("\r"))) == 59


def test_time_left_is_shown():
    stream = io.StringIO()
    with tracking(Bar(stream), "steps", 4) as bar:
        bar.update(1)
    assert "1/4" in stream.getvalue()
    assert "s left" in stream.getvalue()


class Clock:
    """A clock that tests set."""

    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def run(clock, stream, times, total):
    with tracking(Bar(stream), "products", total) as bar:
        for done, now in enumerate(times, start=1):
            clock.now = now
            bar.update(done)
    return stream.getvalue()


def test_a_log_file_gets_the_expected_time_of_long_work(clock):
    # The first step takes 20 s, since it traces a model; the other 999 take 1.5 s each.
    text = run(clock, io.StringIO(), [20.0, 21.5, 23.0], 1000)
    first, last = text.splitlines()
    assert first == "products: 1,000 steps, about 25 min"
    assert last.endswith("3/1000  23.0 s, 25 min left")


def test_short_work_and_a_terminal_get_no_further_line(clock):
    assert run(clock, io.StringIO(), [0.1, 0.2], 20).count("\n") == 1
    assert run(clock, Terminal(), [20.0, 21.5], 1000).count("\n") == 1


def test_time_left_of_resumed_work_ignores_the_steps_before(clock):
    stream = io.StringIO()
    with tracking(Bar(stream), "steps", 200) as bar:
        for done, now in ((150, 5.0), (151, 7.0)):
            clock.now = now
            bar.update(done)
    assert "98 s left" in stream.getvalue()


def test_durations_have_a_unit_that_suits_them():
    assert [duration(t) for t in (2.345, 59.6, 3000, 86400)] == [
        "2.3 s",
        "60 s",
        "50 min",
        "24.0 h",
    ]


def test_later_stages_include_the_units_of_earlier_ones():
    recorder = Recorder()
    with tracking(recorder, "products", 26) as whole:
        stages = Stages(whole)
        for width in (8, 5):
            with tracking(stages.stage(size=2 * width, weight=width), "Lanczos", 2) as bar:
                bar.update(1)
                bar.update(2, "note")
    assert recorder.calls == [
        ("start", "products", 26),
        ("update", 8, ""),
        ("update", 16, "note"),
        ("update", 21, ""),
        ("update", 26, "note"),
        "finish",
    ]


def test_without_a_total_the_bar_shows_a_count():
    stream = io.StringIO()
    with tracking(Bar(stream), "epochs", None) as bar:
        bar.update(7)
    assert stream.getvalue().startswith("epochs 7")


def test_progress_false_prints_nothing(capsys):
    with tracking(False, "steps", 3) as silent:
        silent.update(3)
    assert capsys.readouterr() == ("", "")


def test_progress_true_shows_a_bar_on_the_error_stream(capsys):
    with tracking(True, "steps", 3) as bar:
        bar.update(3)
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/3" in err


def test_a_user_defined_progress_is_finished_after_an_error():
    recorder = Recorder()
    assert isinstance(recorder, Progress)

    def fail():
        with tracking(recorder, "steps", 3) as told:
            told.update(1)
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail()
    assert recorder.calls == [("start", "steps", 3), ("update", 1, ""), "finish"]


def test_an_object_without_the_methods_is_rejected():
    with (
        pytest.raises(TypeError, match="progress must be a bool or have start"),
        tracking(3, "", 1),
    ):
        pass


def test_the_bar_is_full_after_stages_that_needed_fewer_steps_than_planned():
    recorder = Recorder()
    with tracking(recorder, "products", 10) as whole:
        stages = Stages(whole)
        stages.stage(size=5).update(5)
        stages.stage(size=5).update(2)
        stages.close()
    assert recorder.calls[-2] == ("update", 10, "")


def test_a_narrow_terminal_shortens_the_bar_and_not_the_note(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    with tracking(Bar(stream), "training", 4) as bar:
        bar.update(4, "epoch 1: loss 0.1")
    assert "epoch 1: loss 0.1" in stream.getvalue().rpartition("\r")[2]
