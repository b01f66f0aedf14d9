"""Sweeps: their grid, their runs, one by one and several at once, and their table."""

import math
import os
import signal
import time
from functools import partial

import pytest
import torch
from processes import start
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training.examples import network, samples

import ritz
from ritz.training import (
    CurvatureMonitor,
    SweepResult,
    TrainingConfig,
    fit,
    preset_config,
    read_log,
    sweep,
)
from ritz.training._jobs import TUNING, _Memory, run_tasks
from ritz.training._sweep import _best
from ritz.training._sweep_plan import check_grid, check_seeds

DATA = samples(40), samples(24, seed=1)
OPTIONS = {"num_epochs": 2, "batch_size": 10}
GRID = {"lr": [0.02, 0.2, 1.0]}


def drawn(width=8):
    """A network with weights from the global generator."""
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def text(result):
    return f"{result}\n{result.metrics}\n{result.outcomes}"


@pytest.mark.parametrize("max_jobs", [1, 2])
def test_runs_equal_trainings_of_their_own(max_jobs, tmp_path):
    grid = {
        "batch_size": [8, 20],
        "lr": [0.1, 0.5],
        "model.width": [4],
        "optimizer.momentum": [0.5],
    }

    result = sweep(drawn, DATA, grid, seeds=[3, 5], folder=tmp_path, max_jobs=max_jobs,
                   num_epochs=2)  # fmt: skip

    assert result.metrics["test_loss"].shape == (2, 2, 1, 1, 2)
    for i, size in enumerate(grid["batch_size"]):
        for j, rate in enumerate(grid["lr"]):
            for k, seed in enumerate([3, 5]):
                torch.manual_seed(seed)
                alone = fit(drawn(4), DATA, num_epochs=2, batch_size=size, seed=seed,
                            optimizer_settings={"lr": rate, "momentum": 0.5})  # fmt: skip
                found = {name: float(x[i, j, 0, 0, k]) for name, x in result.metrics.items()}
                assert found == alone.metrics
    assert result.status.ok
    assert result.outcomes == ["completed"] * 8
    assert len(list(tmp_path.iterdir())) == 8


def test_a_sweep_leaves_the_global_generator_alone():
    torch.manual_seed(8)
    before = torch.get_rng_state()

    sweep(drawn, DATA, {}, seeds=1, **OPTIONS)

    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_with_a_generator_begins_each_run_alike(tmp_path):
    loader = DataLoader(TensorDataset(*DATA[0]), batch_size=10, shuffle=True,
                        generator=torch.Generator().manual_seed(2))  # fmt: skip
    usual = {"num_epochs": 2, "folder": tmp_path}

    whole = sweep(drawn, loader, GRID, seeds=2, num_epochs=2)
    sweep(drawn, loader, {"lr": [0.2]}, seeds=[1], **usual)
    pieces = sweep(drawn, loader, GRID, seeds=2, **usual)

    assert text(whole).replace("nothing", "") == text(pieces)


def test_a_sweep_is_extended_by_values_and_seeds(tmp_path):
    sweep(drawn, DATA, {"lr": [0.02, 0.2]}, seeds=1, folder=tmp_path, **OPTIONS)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/weights.safetensors")}

    wider = sweep(drawn, DATA, GRID, seeds=2, folder=tmp_path, **OPTIONS)

    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert text(wider) == text(sweep(drawn, DATA, GRID, seeds=2, folder=tmp_path, **OPTIONS))
    assert len(written) == 2


def test_other_options_in_the_same_folder_are_refused(tmp_path):
    sweep(drawn, DATA, GRID, seeds=1, folder=tmp_path, **OPTIONS)

    with pytest.raises(ValueError, match=r"run lr 0.02, seed 0: .*batch_size=10, this run has 20"):
        sweep(drawn, DATA, GRID, seeds=1, folder=tmp_path, num_epochs=2, batch_size=20)


def test_a_diverged_run_is_shown_and_not_averaged():
    grid = {"lr": [0.1, 1e30]}
    found = sweep(partial(network, width=4), DATA, grid, seeds=2, loss_fn=steep, **OPTIONS)

    assert found.outcomes == ["completed"] * 2 + ["diverged"] * 2
    assert found.metrics["test_loss"].isnan().tolist() == [[False] * 2, [True] * 2]
    assert "2 of 2 diverged" in str(found)
    assert found.best == {"lr": 0.1}
    assert found.tied == []


def steep(outputs, target):
    return nn.functional.cross_entropy(outputs, target) + outputs.pow(4).mean()


def test_a_monitor_watches_each_run_as_if_it_were_alone(tmp_path):
    def monitor():
        names = ["lambda_max", "distance", "update_size"]
        return CurvatureMonitor(DATA[0], quantities=names, unit="epoch")

    found = sweep(drawn, DATA, GRID, seeds=1, folder=tmp_path / "sweep", monitors=[monitor()],
                  **OPTIONS)  # fmt: skip

    for place, rate in enumerate(GRID["lr"]):
        torch.manual_seed(0)
        fit(drawn(), DATA, optimizer_settings={"lr": rate}, monitors=[monitor()],
            log=tmp_path / "log.jsonl", **OPTIONS)  # fmt: skip
        alone = [each for each in read_log(tmp_path / "log.jsonl") if each["kind"] == "curvature"]
        for name in ("lambda_max", "distance", "update_size"):
            assert float(found.metrics[name][place, 0]) == alone[-1][name]
    assert "lambda_max" in str(found)


def test_numbers_of_monitors_are_in_the_table_also_if_nothing_is_saved():
    watched = CurvatureMonitor(DATA[0], quantities=["weight_norms"])

    def double(count, model, optimizer):
        return {"doubled": 2.0 * count}

    double.unit = "epoch"
    result = sweep(drawn, DATA, GRID, seeds=1, monitors=[watched, double], **OPTIONS)

    assert result.metrics["doubled"].flatten().tolist() == [4.0] * 3
    assert len(result.metrics["weight_norm"].unique()) == 3


@pytest.mark.parametrize("name", ["writer", "average", "log", "checkpoint"])
def test_what_runs_cannot_share_is_refused(name):
    with pytest.raises(TypeError, match=f"sweep has no option '{name}', which its runs would sh"):
        sweep(drawn, DATA, GRID, **{name: object()})


# ------------------------------------------------------------------------------------------
# Which point is best.


def test_the_best_point_has_the_best_mean_and_ties_are_those_of_a_paired_t_test():
    from scipy.stats import ttest_rel

    generator = torch.Generator().manual_seed(1)
    values = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    values += torch.linspace(0, 2, 9)[:, None] + 3 * torch.randn(5, generator=generator)

    for metric, sign in (("test_accuracy", 1), ("test_loss", -1)):
        best, tied = _best(values, metric)
        means = sign * values.mean(1)
        assert best == int(means.argmax())
        others = [row for row in range(9) if row != best]
        expected = [row for row in others if ttest_rel(values[row], values[best]).pvalue >= 0.05]
        assert tied == expected
        assert 0 < len(tied) < 8


def test_a_point_with_a_missing_run_is_never_the_best():
    values = torch.tensor([[0.5, 0.6], [0.9, math.nan], [0.4, 0.7]], dtype=torch.float64)
    best, tied = _best(values, "test_accuracy")
    assert best == 0
    assert tied == [2]
    assert _best(values.fill_(math.nan), "test_accuracy") == (None, [])


def test_the_metric_is_the_first_that_all_runs_have():
    parts = {"train": DATA[0], "validation": DATA[1], "test": DATA[1]}
    # Only Gadam has an average, so the average does not compare.
    grid = {"optimizer": ["sgd", "gadam"], "average_from": [None, 2]}
    both = sweep(drawn, parts, grid, seeds=1, **OPTIONS)
    averaged = sweep(drawn, parts, {"optimizer": ["gadam"]}, seeds=1, average_from=2, **OPTIONS)
    chosen = sweep(drawn, parts, GRID, seeds=1, metric="train_loss", **OPTIONS)

    assert both.metric == "validation_accuracy"
    assert averaged.metric == "average_validation_accuracy"
    assert chosen.metric == "train_loss"
    assert chosen.best["lr"] == GRID["lr"][int(chosen.metrics["train_loss"].argmin())]


@pytest.mark.parametrize("metric", ["accuracy", "validation_loss", "damping"])
def test_an_unknown_metric_is_refused_before_the_first_run(metric, tmp_path):
    with pytest.raises(ValueError, match="metric must be one of learning_rate, train_loss"):
        sweep(forbidden, DATA, GRID, folder=tmp_path / "sweep", metric=metric, **OPTIONS)
    assert not (tmp_path / "sweep").exists()


def test_numbers_of_monitors_are_metrics_that_the_first_run_shows(tmp_path):
    watched = {"monitors": [CurvatureMonitor(DATA[0], quantities=["weight_norms"])]} | OPTIONS

    assert sweep(drawn, DATA, GRID, seeds=1, metric="weight_norm", **watched).best["lr"] == 0.02
    with pytest.raises(ValueError, match=r"metric must be one of .*weight_norm"):
        sweep(drawn, DATA, GRID, folder=tmp_path, metric="lambda_max", **watched)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_table_has_means_and_deviations_over_seeds(tmp_path):
    found = sweep(drawn, DATA, GRID, seeds=3, **OPTIONS)
    lines = str(found).splitlines()

    assert lines[0] == "9 runs: 3 values of lr x 3 seeds; completed: 9 runs"
    assert lines[2].split() == ["lr", "test_accuracy", "test_loss", "train_loss", "train_accuracy"]
    assert max(map(len, lines)) <= 100
    cells = lines[4].split()
    losses = found.metrics["test_loss"][1]
    assert float(cells[4]) == pytest.approx(float(losses.mean()), abs=0.1 * float(losses.std()))
    assert float(cells[6]) == pytest.approx(float(losses.std()), rel=0.06)

    ritz.save(found, tmp_path / "sweep.safetensors")
    again = ritz.load(tmp_path / "sweep.safetensors")
    assert isinstance(again, SweepResult)
    assert text(again) == text(found)


# ------------------------------------------------------------------------------------------
# Grids.


def test_names_of_the_command_line_and_of_the_library_are_one():
    grid = {"epochs": [1, 2], "batch-size": [4], "weight_decay": [0.0], "data.rows": [3]}
    expected = {"num_epochs": [1, 2], "batch_size": [4], "weight_decay": [0.0], "data.rows": [3]}
    assert check_grid(grid) == expected


@pytest.mark.parametrize(
    ("grid", "line"),
    [
        ({"lrr": [1.0]}, "grid must have options of training, got 'lrr'; did you mean lr?"),
        ({"momentum": [0.9]}, "Settings of the optimiser, the model and the data are optimizer.N"),
        ({"rate": [1]}, "see ritz train --help. Settings of the optimiser"),
        ({"lr": []}, "grid must have at least one value of lr, got none"),
        ({"lr": 0.1}, "grid must have a list of values of lr, got 0.1"),
        ({"optimizer": "sgd"}, "grid must have a list of values of optimizer, got 'sgd'"),
        ({"lr": [0.1, 0.10]}, "grid must have each value of lr once, got 0.1 twice"),
        ({"epochs": [1], "num_epochs": [2]}, "grid must have num_epochs once, got it twice"),
        ({"seed": [1, 2]}, "grid must not have seed: pass seeds="),
        ({"lr": [math.nan]}, "grid must have finite values of lr, got nan"),
        ({"optimizer": [torch.optim.SGD]}, "grid must have numbers, text, lists or None as values"),
        ({"resume": [True]}, "grid must have options of training, got 'resume'"),
        ([("lr", [0.1])], "grid must be a dictionary of names and values, got list"),
        ({"lr": [-0.1]}, "lr must be finite and above 0, got -0.1"),
        ({"lr": ["a"]}, "lr must be a number, got str"),
        ({"batch_size": [8, 0]}, "batch_size must be at least 1, got 0"),
        ({"schedule": ["cosine"]}, "schedule must be one of constant, linear"),
        ({"optimizer": ["sgdd"]}, "no optimiser is named 'sgdd'"),
        ({"optimizer.momentun": [0.9]}, "optimizer sgd has no setting 'momentun'; it has lr"),
        ({"optimizer": ["sgd", "adam"], "optimizer.momentum": [0.9]}, "adam has no setting"),
        ({"average_from": [3]}, "average_from must be between 1 and 2, got 3"),
        ({"lr": [0.1, "abc"]}, "grid lr=abc: lr must be a number, got str"),
        (
            {"lr": [0.1], "optimizer.momentum": [0, "x"]},
            "grid optimizer.momentum=x: momentum of optimizer sgd must be a number, got 'x'",
        ),
        ({"optimizer.momentum": [0.9, True]}, "momentum of optimizer sgd must be a number"),
        ({"optimizer": ["lookahead_sgd"], "optimizer.momentum": [True]}, "must be a number, got"),
        ({"optimizer.nesterov": ["x"]}, "nesterov of optimizer sgd must be True or False, got 'x'"),
        ({"lr": [0.1], "damping": ["constant", "ratio"]}, "grid damping=ratio: damping rule 'ra"),
        (
            {"lr": [0.1], "damping": ["ratio"], "optimizer": ["damped_adamw", "sgd"]},
            "grid damping=ratio: damping rule 'ratio' needs an optimiser with a damping delta",
        ),
        ({"final": ["last", "average"]}, "grid final=average: final='average' needs an average"),
        ({"lookahead_until": [2]}, "grid lookahead_until=2: lookahead_until must agree with the"),
        ({"curvature_batch_size": [8]}, "curvature_batch_size must be given with an optimiser"),
        ({"noise": ["diagonal"], "noise_batch": [4, 10]}, "noise_batch=10: noise_batch must be le"),
        ({"batch-size": [8, 0]}, "grid batch-size=0: batch_size must be at least 1, got 0"),
        ({"preset": ["sgd/none"]}, "no preset is named 'sgd/none'"),
        ({"patience": [None, 2]}, "grid patience=2: patience needs validation data, got none"),
        ({"data.rows": [3]}, "data of sweep() are the same for all runs"),
    ],
)  # fmt: skip
def test_a_bad_grid_is_refused_before_the_first_run(grid, line, tmp_path):
    with pytest.raises((ValueError, TypeError, KeyError)) as caught:
        sweep(forbidden, DATA, grid, folder=tmp_path / "sweep", **OPTIONS)
    assert line in str(caught.value)
    assert not (tmp_path / "sweep").exists()


def test_wrong_options_of_all_runs_are_not_blamed_on_the_grid():
    with pytest.raises(ValueError, match=r"^damping rule 'ratio' needs an optimiser"):
        sweep(forbidden, DATA, GRID, damping="ratio", **OPTIONS)


def test_a_wrong_keyword_of_the_model_is_refused_before_the_first_run(tmp_path):
    with pytest.raises(TypeError, match=r"grid model.width=wide: "):
        sweep(drawn, DATA, {"lr": [0.1], "model.width": [4, "wide"]}, folder=tmp_path, **OPTIONS)
    assert not list(tmp_path.iterdir())


def test_published_settings_are_compared_as_their_runs_would_be():
    names = ["adamw/vgg16/cifar10", "sgd/vgg16/cifar100"]
    chosen = {"num_epochs": 1, "batch_size": 10}

    found = sweep(drawn, DATA, {"preset": names}, seeds=1, **chosen)

    for place, name in enumerate(names):
        torch.manual_seed(0)
        alone = fit(drawn(), DATA, preset_config(name, **chosen))
        assert float(found.metrics["train_loss"][place, 0]) == alone.metrics["train_loss"]
    with pytest.raises(ValueError, match="brings its optimiser: leave out optimizer"):
        sweep(forbidden, DATA, {"preset": names, "optimizer": ["sgd"]}, **chosen)
    with pytest.raises(ValueError, match="config must be None with preset in the grid"):
        sweep(forbidden, DATA, {"preset": names}, config=TrainingConfig())


def test_the_expected_time_does_not_count_runs_that_were_done_before(tmp_path):
    sweep(drawn, DATA, {"lr": [0.2, 1.0]}, seeds=1, folder=tmp_path, **OPTIONS)
    shown = []

    class Shown:
        def start(self, label, total):
            shown.append(total)

        def update(self, done, note=""):
            shown.append((done, note.partition(":")[0]))

        def finish(self): ...

    sweep(drawn, DATA, GRID, seeds=1, folder=tmp_path, progress=Shown(), **OPTIONS)

    # Runs that were done come first, and the bar begins after the last of them.
    ended = [(0, "lr=0.2,seed=0"), (2, "lr=1,seed=0"), (3, "lr=0.02,seed=0")]
    assert shown[0] == 3
    assert list(dict.fromkeys(shown[1:])) == [*ended[:2], (2, ended[2][1]), ended[2]]


def forbidden():
    raise AssertionError("no run may begin")


@pytest.mark.parametrize(
    ("seeds", "first", "line"),
    [(0, 0, "seeds must be at least 1"), ([], 0, "seeds must contain at least one seed, got none"),
     ([1, 1], 0, "seeds must differ, got 1 twice"), ([-1], 0, "seeds must be between 0 and"),
     ([0.5], 0, "seeds must be an integer"), ("3", 0, "seeds must be a number or a list"),
     (True, 0, "seeds must be a number or a list"),
     ([1, 2], 7, r"seed must not be given with a list of seeds, got 7 and \[1, 2\]")],
)  # fmt: skip
def test_bad_seeds_are_refused(seeds, first, line):
    with pytest.raises((ValueError, TypeError), match=line):
        check_seeds(seeds, first)


def test_seeds_are_counted_from_the_first():
    assert check_seeds(3, 5) == [5, 6, 7]
    assert check_seeds([4, 0], 0) == [4, 0]


def test_an_unknown_option_of_fit_is_refused():
    with pytest.raises(TypeError, match="fit has no option 'batchsize'; did you mean batch_size"):
        sweep(drawn, DATA, GRID, batchsize=3)


def test_names_of_folders_are_short_and_differ(tmp_path):
    grid = {"batch_schedule": ["0:4,1:8", "0:4"], "optimizer.momentum": [0.1 + 0.2, 0.3]}
    sweep(drawn, DATA, grid, seeds=1, folder=tmp_path, num_epochs=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 4
    assert all(len(name) < 150 and not {*name} & {":", "/", " "} for name in names)


# ------------------------------------------------------------------------------------------
# Killed, interrupted, resumed.

KILLED = """
import os, signal, sys
from training.test_sweep import DATA, GRID, OPTIONS, drawn
from ritz.training import sweep

class Kill:
    def __init__(self, after):
        self.left = after
    def start(self, label, total): ...
    def update(self, done, note=""):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
    def finish(self): ...

sweep(drawn, DATA, GRID, seeds=3, folder=sys.argv[1], progress=Kill(int(sys.argv[2])),
      save_interval=0.0, **OPTIONS)
"""


def files(folder):
    """The files of all runs but their times."""
    paths = [path for path in folder.rglob("*") if path.is_file() and "times" not in path.name]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_sweep_killed_twice_ends_with_the_same_table_and_files(tmp_path):
    usual = {"seeds": 3, "save_interval": 0.0, **OPTIONS}
    expected = sweep(drawn, DATA, GRID, folder=tmp_path / "whole", **usual)
    broken = tmp_path / "broken"
    for after in (9, 31):
        process = start(KILLED, broken, after, errors=tmp_path / "errors")
        process.join()
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "errors").read_text()
    finished = list(broken.glob("*/weights.safetensors"))

    found = sweep(drawn, DATA, GRID, folder=broken, **usual)

    assert 1 < len(finished) < 9
    assert text(found) == text(expected)
    for name, content in files(tmp_path / "whole").items():
        assert (broken / name).read_bytes() == content, name


class Interrupt:
    """Sends this process a signal in its second epoch."""

    unit = "epoch"
    runs = 0

    def __call__(self, count, model, optimizer):
        self.runs += 1
        if self.runs == 4:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_sweep_returns_what_has_ended_and_resumes(tmp_path):
    usual = {"seeds": 1, "folder": tmp_path / "sweep", **OPTIONS}

    part = sweep(drawn, DATA, GRID, monitors=[Interrupt()], **usual)
    whole = sweep(drawn, DATA, GRID, **usual)

    assert part.outcomes == ["completed", "interrupted", ""]
    assert part.status.outcome == "interrupted"
    assert "1 of 3 runs have ended, saved in" in str(part.status)
    assert "1 of 1 not run" in str(part)
    assert whole.status.ok
    assert text(whole) == text(sweep(drawn, DATA, GRID, seeds=1, folder=tmp_path, **OPTIONS))


# ------------------------------------------------------------------------------------------
# Several at once.


def halved(task, *, progress):
    if task == "end":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1 / task


def test_an_error_in_a_process_names_its_run():
    with pytest.raises(RuntimeError, match="run b: ZeroDivisionError: division by zero"):
        run_tasks(halved, {"a": 2, "b": 0, "c": 1}, max_jobs=2)


def test_a_killed_process_ends_the_sweep_with_advice():
    with pytest.raises(OSError, match=r"run b: its process ended by SIGKILL: .* fewer jobs"):
        run_tasks(halved, {"a": 2, "b": "end", "c": 1}, max_jobs=2)


class Busy:
    """A process with a task of some age."""

    def __init__(self, age):
        self.since = time.monotonic() - age


def test_tasks_begin_only_while_there_is_memory(monkeypatch):
    free = [9.0, math.inf]
    monkeypatch.setattr("ritz.training._jobs._free", lambda: tuple(free))
    old, young, memory = Busy(TUNING.settling + 1), Busy(0), _Memory()

    assert memory.allows([])
    memory.note((4.0, 0.0))
    # The footprint of a task that has just begun is not known yet.
    assert not memory.allows([young])
    # 9 is more than 1.25 * 4, but not than twice that.
    assert memory.allows([old])
    assert not memory.allows([old, young])
    memory.known = True
    free[0] = 10.0
    assert memory.allows([old, young])
    # The GPU counts as well.
    memory.note((1.0, 8.0))
    free[1] = 9.0
    assert not memory.allows([old])
    free[1] = 11.0
    assert memory.allows([old])


def test_options_of_training_can_be_pickled():
    import pickle

    config = TrainingConfig(optimizer_settings={"lr": 0.5}, milestones=(1,), schedule="step")
    assert pickle.loads(pickle.dumps(config)) == config
