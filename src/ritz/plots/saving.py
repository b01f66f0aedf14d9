"""Pictures as files: PNG, SVG or PDF, by how the name ends, written whole or not at all."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ritz._core.storage import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf")
DPI = 200  # of a PNG: two columns of print hold its lines


def check_picture(path: str | os.PathLike[str]) -> Path:
    """Return the path; raise, before long work, where no picture could be written there.

    Args:
        path: Of a picture to be.
    """
    target = Path(path)
    if target.suffix.lower() not in KINDS:
        raise ValueError(f"a picture must end in {', '.join(KINDS)}; got {target.name!r}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write {target}: {target.parent} is not a folder")
    return target


def save_figure(figure: "Figure", path: str | os.PathLike[str], *, dpi: int = DPI) -> Path:
    """Write a figure as its name ends, atomically, and return where.

    The same figure gives the same bytes: no file holds a time. Text in SVG and PDF stays text.

    Args:
        figure: Of matplotlib.
        path: Ends in ``.png``, ``.svg`` or ``.pdf``.
        dpi: Dots an inch of a PNG.
    """
    import matplotlib as mpl

    target = check_picture(path)
    kind = target.suffix[1:].lower()
    metadata: dict[str, Any] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
    }[kind]
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "ritz", "pdf.fonttype": 42}
    with mpl.rc_context(style), atomic_path(target) as temporary:
        figure.savefig(temporary, format=kind, dpi=dpi, metadata=metadata)
    return target
