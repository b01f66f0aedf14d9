"""Several gloo processes for one test."""

import os
import subprocess
import sys
import textwrap

PREAMBLE = """
import datetime, os, sys
import torch, torch.distributed as dist
import ritz

torch.set_num_threads(1)
folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank,
                        world_size=size, timeout=datetime.timedelta(seconds=180))
"""


def run_processes(script, count, folder):
    """Run a script in that many processes; return each one's exit code and error stream.

    The script finds ``folder``, ``rank`` and ``size``, and the process group ready for use.
    """
    text = PREAMBLE + textwrap.dedent(script)
    (folder / "rendezvous").unlink(missing_ok=True)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", text, str(folder), str(rank), str(count)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(count)
    ]
    try:
        errors = [process.communicate(timeout=220)[1] for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()  # so that none is left with an open pipe
    return [(process.returncode, error) for process, error in zip(running, errors, strict=True)]
