"""Files of a run are no links: what is written goes to the file that has the name, or nowhere."""

import os
from pathlib import Path


class LinkError(OSError):
    """A file that is to be written is a link to another."""


def check_no_link(path: Path) -> None:
    """Raise where a file that is to be written is a link, whether or not it leads anywhere."""
    if path.is_symlink():
        raise LinkError(f"{path} is a link, and what it leads to would be overwritten: remove it, "
                        "or give another path")  # fmt: skip


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file that is no link, made where it is missing."""
    check_no_link(path)
    never = getattr(os, "O_NOFOLLOW", 0)  # not even one that was made just now
    return os.open(path, flags | os.O_CREAT | never, 0o666)
