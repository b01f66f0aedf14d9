"""One process at a time writes in a folder: the kernel has the lock, and ends it with its owner."""

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ritz.training.links import open_own

try:
    import fcntl
except ImportError:  # not a POSIX system: nobody is kept out
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_held: set[int] = set()  # of this process, which the workers of a loader must not inherit


class FolderInUseError(OSError):
    """Another process is writing in the folder."""


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Be the one process that writes in a folder, for the block.

    A file ``.lock`` is there meanwhile. One that a killed process left is no lock: that ended when
    the process did. Where the file system knows no locks, nobody is kept out.
    """
    path = folder / LOCK
    file = _locked(path)
    _held.add(file)
    try:
        yield
    finally:
        _held.discard(file)
        with contextlib.suppress(OSError):
            path.unlink()  # before it is open to others: see _locked
        os.close(file)


def _locked(path: Path) -> int:
    """A descriptor of the file that has the name ``path`` and is locked by it."""
    while True:
        file = open_own(path, os.O_RDWR)
        try:
            _lock(file, path)
            # The owner before may have removed the name between opening and locking.
            if _is_at(file, path):
                os.ftruncate(file, 0)
                os.write(file, f"{os.getpid()}".encode())
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _lock(file: int, path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in TAKEN:
            return
        owner = os.read(file, 20).decode(errors="replace").strip()
        whose = f" (pid {owner})" if owner.isdigit() else ""
        raise FolderInUseError(f"another process is writing in {path.parent}{whose}: wait until it "
                               "is done, or give another folder") from error  # fmt: skip


def _let_go() -> None:
    """Close what a fork has inherited: a lock lasts as long as anybody has it open."""
    for file in _held:
        os.close(file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
