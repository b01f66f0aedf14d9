"""Parts of a data set that never change, and epochs that can be gone back to."""

import hashlib

import numpy as np
import torch
from torch import Tensor

from ritz._core.checks import check_count

SPLIT_SEED = 0  # of every part that is held out; recorded in the result


def held_out(total: int, count: int, *, seed: int = SPLIT_SEED) -> tuple[Tensor, Tensor]:
    """Return the indices that stay and the ``count`` that are held out, both ascending.

    The choice depends on the three numbers alone: on no device, and on no version, as the stream
    of ``numpy.random.RandomState`` is frozen. Of the 50,000 images of CIFAR, ``count=5000`` gives
    the 45,000 and 5,000 that are meant by train and validation here.
    """
    check_count("total", total)
    check_count("count", count, low=0, high=total - 1)
    order = np.random.RandomState(seed).permutation(total)
    return torch.from_numpy(np.sort(order[count:])), torch.from_numpy(np.sort(order[:count]))


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return a generator for one epoch of a run, so that any epoch can be had without the others.

    Args:
        seed: Of the run.
        epoch: Its number.

    Example:
        >>> first, again = (epoch_generator(7, 3) for _ in range(2))
        >>> bool((torch.randperm(5, generator=first) == torch.randperm(5, generator=again)).all())
        True
    """
    check_count("epoch", epoch, low=0)
    digest = hashlib.sha256(f"{int(seed)} {epoch}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
