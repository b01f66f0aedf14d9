"""``run_tasks``: run tasks, such as those of a sweep, in as many processes as fit in memory."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Any, Protocol, TypeVar, final

import torch

from ritz._core.progress import Progress, tracking
from ritz._core.signals import noted_signals

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants that decide when a further task starts."""

    # Seconds after which the memory of a task is taken as known. 99 % of the largest footprint was
    # reached after 5 to 7 s of CPU time by VGG-16 on 32 x 32 images, and after 3 s by an MLP on
    # MNIST; 18 s passed on a machine with three times as much load as cores.
    settling: float = 20.0
    # The footprints of three runs that differ only in their seed agreed within 3 %.
    margin: float = 1.25  # of free memory over the largest footprint, for another task
    # torch.cuda does not count its context. Between 0.4 and 0.6 GB by the documentation of CUDA.
    context: float = 0.6e9  # bytes on the device that a process takes besides its tensors
    interval: float = 0.2  # seconds between checks of signals and memory: short for a user


TUNING = Tuning()


class Compute(Protocol[R_co]):
    """Computes one task."""

    def __call__(self, task: Any, *, progress: bool | Progress) -> R_co:
        """Return the result of a task."""


def run_tasks(
    compute: Compute[R],
    tasks: Mapping[str, Any],
    *,
    max_jobs: int = 1,
    is_over: Callable[[R], bool] = lambda result: False,
    done: Collection[str] = (),
    progress: bool | Progress = False,
) -> dict[str, R]:
    """Return the results of tasks by name, in the order of ``tasks``.

    With one job, tasks run in this process. With more, they run in other processes, which receive
    ``compute`` and the tasks by pickle and share the cores. After the first, another task starts
    only while the free memory, of the host and of each CUDA device, is above 1.25 times the largest
    footprint so far. Footprints and the memory of the host are known on Linux only. The processes
    end when this process ends, even if it is killed.

    On ctrl-C or SIGTERM, running tasks receive SIGTERM and may still return a result. Then the
    results so far are returned.

    Args:
        compute: A function that can be pickled, if there are several jobs.
        tasks: Arguments of ``compute``.
        max_jobs: Largest number of tasks at once.
        is_over: Takes a result. If it returns true, no further task starts.
        done: Names of tasks whose result was saved before. They come first, and the progress is
            shown from the end of them on, so that they do not count in the expected time.
        progress: Show a progress bar, or a :class:`Progress` to report to.
    """
    several = max_jobs > 1 and len(tasks) > 1
    results: dict[str, R] = {}
    ordered = dict(sorted(tasks.items(), key=lambda item: item[0] not in done))
    with tracking(progress, "runs", len(tasks)) as whole:
        bar = _AfterSaved(whole, len(tasks.keys() & set(done)))
        pool = _Pool(compute, min(max_jobs, len(tasks)), bar)
        pairs = (pool.run(ordered, is_over) if several else
                 _one_by_one(compute, ordered, is_over, bar))  # fmt: skip
        for name, result in pairs:
            results[name] = result
            bar.update(len(results), name)
    return {name: results[name] for name in tasks if name in results}


@final
class _AfterSaved:
    """Passes progress on, but stays at zero while saved results are read."""

    def __init__(self, bar: Progress, first: int) -> None:
        self._bar, self._first = bar, first

    def start(self, label: str, total: int | None) -> None: ...

    def update(self, done: int, note: str = "") -> None:
        self._bar.update(done if done >= self._first else 0, note)

    def finish(self) -> None: ...


@final
class _TaskProgress:
    """Shows the steps of one task as a note in the bar over all tasks."""

    def __init__(self, bar: Progress, done: int, name: str) -> None:
        self._bar, self._done, self._name = bar, done, name

    def start(self, label: str, total: int | None) -> None:
        self._steps = f"{label} {{}}/{total}" if total else f"{label} {{}}"

    def update(self, done: int, note: str = "") -> None:
        self._bar.update(self._done, f"{self._name}: {self._steps.format(done)}")

    def finish(self) -> None: ...


def _one_by_one(
    compute: Compute[R], tasks: Mapping[str, Any], is_over: Callable[[R], bool], bar: Progress
) -> Iterator[tuple[str, R]]:
    for done, (name, task) in enumerate(tasks.items()):
        try:
            result = compute(task, progress=_TaskProgress(bar, done, name))
        except Exception as error:
            raise _name_task(name, error) from error
        yield name, result
        if is_over(result):
            return


def _name_task(name: str, error: BaseException) -> Exception:
    """Return an error of the same class, with the name of the task before its message."""
    words = name.replace("=", " ").replace(",", ", ")
    for kind in (ValueError, TypeError, OSError):
        if isinstance(error, kind):
            return kind(f"run {words}: {error}")
    return RuntimeError(f"run {words}: {type(error).__name__}: {error}")


# ------------------------------------------------------------------------------------------
# This process: starts tasks and collects results.


@final
class _Worker:
    """A process, as seen from the first one.

    Attributes:
        pipe: Takes tasks and gives messages.
        name: Name of the task; empty while there is none.
        since: When the task was given.
    """

    def __init__(self, context: Any, *arguments: Any) -> None:
        self.pipe, there = context.Pipe()
        # Not a daemon, which could not start the workers of a DataLoader.
        self._process = context.Process(target=_serve, args=(there, *arguments))
        self._process.start()
        there.close()  # so that the end of the process is the end of the pipe
        self.name, self.since, self._stopped = "", 0.0, False

    def give(self, name: str, task: Any) -> None:
        """Send a task."""
        self.pipe.send(task)
        self.name, self.since = name, time.monotonic()

    def take(self) -> tuple[str, Any]:
        """Return the next message: its kind and its content."""
        try:
            kind, content = self.pipe.recv()
            return kind, content
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode
            how = (
                f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            )
            return "end", ChildProcessError(
                f"its process {how}: if memory is short, choose fewer jobs (--jobs); what was "
                "trained is saved, and the same call resumes"
            )

    def stop(self) -> None:
        """Send SIGTERM once, on which `fit` saves and returns; a second one would kill."""
        if not self._stopped:
            self._process.terminate()
        self._stopped = True

    def end(self) -> None:
        """Wait until the process has ended."""
        self.pipe.close()  # a process that has finished its task ends when it sees this
        self.stop()
        self._process.join()


def available_cores() -> int:
    """Return the number of processor cores that this process may use."""
    places = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return len(places) or os.cpu_count() or 1


@final
class _Pool:
    """Processes that compute tasks, at most ``max_jobs`` at once."""

    def __init__(self, compute: Compute[Any], max_jobs: int, bar: Progress) -> None:
        threads = min(torch.get_num_threads(), max(1, available_cores() // max_jobs))
        self._new = partial(_Worker, _context(), compute, threads, os.getcwd())
        self._max_jobs, self._bar = max_jobs, bar
        self._memory, self._workers = _Memory(), list[_Worker]()

    def run(self, tasks: Mapping[str, Any], is_over: Callable[[Any], bool]) -> Iterator[Any]:
        """Yield names and results of tasks as they end."""
        waiting, done = dict(tasks), 0
        with noted_signals() as signals:
            try:
                while waiting or self._busy():
                    self._start_tasks(waiting)
                    for name, kind, content in self._messages():
                        if kind == "result":
                            done += 1
                            yield name, content
                            if is_over(content):
                                signals.append("")
                        elif not signals:
                            raise _name_task(name, content) from content
                    if signals:
                        waiting.clear()
                        for worker in self._busy():
                            worker.stop()
                    # The bar shows the elapsed time, even if no task has ended.
                    self._bar.update(done, f"{len(self._busy())} running")
            finally:
                for worker in self._workers:
                    worker.end()

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._workers if worker.name]

    def _start_tasks(self, waiting: dict[str, Any]) -> None:
        """Start waiting tasks while there is enough memory."""
        while waiting and len(busy := self._busy()) < self._max_jobs and self._memory.allows(busy):
            idle = next((worker for worker in self._workers if not worker.name), None)
            if idle is None:
                idle = self._new()
                self._workers.append(idle)
            name = next(iter(waiting))
            idle.give(name, waiting.pop(name))

    def _messages(self) -> Iterator[tuple[str, str, Any]]:
        """Yield task, kind and content of each message that has arrived."""
        workers: dict[Any, _Worker] = {worker.pipe: worker for worker in self._busy()}
        for pipe in connection.wait(list(workers), TUNING.interval):
            worker = workers[pipe]
            kind, content = worker.take()
            if kind == "footprint":
                self._memory.note(content)
                continue
            name, worker.name = worker.name, ""
            self._memory.known = True
            if kind == "end":
                self._workers.remove(worker)
            yield name, kind, content


# ------------------------------------------------------------------------------------------
# The other processes.


def _context() -> Any:
    """Return the multiprocessing context: a fork server if there is one, otherwise spawn."""
    # A fork of this process could use neither CUDA nor the threads of torch. A server that has only
    # imported this package can be forked, and saves seconds of imports for each process.
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__package__ or ""])
    return context


def _serve(pipe: Any, compute: Compute[Any], threads: int, place: str) -> None:
    """Compute the tasks that come through a pipe, until its other end is closed."""
    os.chdir(place)  # a fork server starts processes in its own folder
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # ctrl-C in a terminal reaches the first process only, which passes it on
    lock = threading.Lock()
    threading.Thread(target=_watch_parent, args=(pipe, lock), daemon=True).start()
    torch.set_num_threads(threads)
    with suppress(EOFError, ConnectionError):
        while True:
            task = pipe.recv()
            try:
                message = "result", compute(task, progress=False)
            except Exception as error:
                message = "error", _picklable(error)
            with lock:
                pipe.send(("footprint", _footprint()))
                pipe.send(message)


def _watch_parent(pipe: Any, lock: threading.Lock) -> None:
    """Report the footprint of this process, and end it when its parent ends."""
    parent: Any = multiprocessing.parent_process()
    reported = 0.0, 0.0
    while not connection.wait([parent.sentinel], TUNING.interval):
        if (size := _footprint()) != reported:
            with lock, suppress(OSError):
                pipe.send(("footprint", size))
            reported = size
    # sys.exit would end this thread only. Checkpoints are written atomically, so none is lost.
    os._exit(1)


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


# ------------------------------------------------------------------------------------------
# Memory.

Sizes = tuple[float, float]  # in bytes: of the host, and of a CUDA device


def _footprint() -> Sizes:
    """Return the largest memory that this process has had."""
    device = 0.0
    if torch.cuda.is_initialized():
        places = range(torch.cuda.device_count())
        device = TUNING.context + max(map(torch.cuda.max_memory_reserved, places))
    # ru_maxrss would also count the process from which this one was started.
    return _proc("/proc/self/status", "VmHWM") or 0.0, device


def _free() -> Sizes:
    """Return the free memory of the host and of the fullest CUDA device."""
    host = _proc("/proc/meminfo", "MemAvailable")
    devices = [torch.cuda.mem_get_info(k)[0] for k in range(torch.cuda.device_count())]
    return float("inf") if host is None else host, min(devices, default=float("inf"))


def _proc(path: str, name: str) -> float | None:
    """Return an entry of a file in ``/proc`` in bytes, or ``None`` if there is none."""
    with suppress(OSError), open(path) as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return 1024 * float(line.split()[1])
    return None


@final
class _Memory:
    """Whether another task fits in memory.

    Attributes:
        known: Whether a task has ended, so that the footprint is known.
    """

    def __init__(self) -> None:
        self.known = False
        self._largest: Sizes = 0.0, 0.0

    def note(self, footprint: Sizes) -> None:
        """Note the footprint of a process."""
        self._largest = max(self._largest[0], footprint[0]), max(self._largest[1], footprint[1])

    def allows(self, busy: list[_Worker]) -> bool:
        """Return whether another task fits in memory, together with those of ``busy``."""
        if not busy:
            return True
        young = sum(time.monotonic() - worker.since < TUNING.settling for worker in busy)
        if not self.known and young == len(busy):
            return False
        # Young tasks have not yet allocated all their memory.
        needed = [TUNING.margin * (1 + young) * size for size in self._largest]
        return all(free >= size for free, size in zip(_free(), needed, strict=True))
