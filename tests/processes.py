"""Processes for tests: groups of gloo processes, one process that the test kills, or a program.

They are forked from a server that has already imported torch and ritz, which takes seconds.
"""

import multiprocessing
import os
import signal
import sys
import textwrap
import traceback

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["ritz.training", "ritz.testing", "torch.distributed", "processes"])
PREAMBLE = """
import datetime, os, sys
import torch, torch.distributed as dist
import ritz

folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank,
                        world_size=size, timeout=datetime.timedelta(seconds=180))
"""


def run_processes(script, count, folder, seconds=220):
    """Run a script in ``count`` processes; return the exit code and error stream of each.

    The script can use ``folder``, ``rank`` and ``size``. The process group is initialised.
    Processes that run for longer than so many seconds are killed.
    """
    text = PREAMBLE + textwrap.dedent(script)
    (folder / "rendezvous").unlink(missing_ok=True)
    errors = [folder / f"process{rank}.err" for rank in range(count)]
    running = [start(text, folder, rank, count, errors=errors[rank]) for rank in range(count)]
    try:
        for process in running:
            process.join(seconds)
    finally:
        for process in running:
            process.kill()
            process.join()
    return [
        (process.exitcode, path.read_text()) for process, path in zip(running, errors, strict=True)
    ]


def start(script, *arguments, errors):
    """Start a script with these arguments and its error stream in a file; return the process."""
    process = FORKS.Process(target=_run, args=(script, [str(a) for a in arguments], errors))
    process.start()
    return process


def output_of(program, folder, seconds=220):
    """Run a program in a folder and return what it prints. A warning is an error.

    Torch and parts of ritz are imported already: a test of imports needs a new process instead.
    """
    printed, errors = (folder.with_name(f"{folder.name}.{kind}") for kind in ("out", "err"))
    begin = f"""
import os, sys, warnings
os.chdir({str(folder)!r})
sys.stdout = open({str(printed)!r}, "w")
warnings.simplefilter("error")
"""
    process = start(begin + program, errors=errors)
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode == 0, errors.read_text()
    return printed.read_text()


def _run(script, arguments, errors):
    with open(errors, "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    # Default signal handlers, whatever the test process inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv[1:] = arguments
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        sys.exit(1)
