"""Errors of what follows from moments: the jackknife over groups of probes."""

import torch
from torch import Tensor

from ritz.spectra import EntropicDensity

NUM_GROUPS = 10  # of probes, each left out in turn


def leave_out(samples: Tensor) -> Tensor:
    """Return means of samples ``(d, m)`` with a group left out in turn, ``(g, m)``.

    There are as many groups as probes, ten at the most, and none of a single sample.
    """
    groups = min(NUM_GROUPS, len(samples))
    if groups < 2:
        return samples[:0]
    total = samples.sum(0)
    parts = torch.tensor_split(samples, groups)
    return torch.stack([(total - part.sum(0)) / (len(samples) - len(part)) for part in parts])


def jackknife(values: Tensor) -> Tensor:
    r"""Return the standard error :math:`\sqrt{\frac{g-1}{g} \sum_k (v_k - \bar v)^2}`.

    Args:
        values: Of samples with a group left out, ``(g, *s)``; zero for none.
    """
    if not len(values):
        return torch.zeros(values.shape[1:], dtype=torch.float64)
    spread = (values - values.mean(0)).square().sum(0)
    return (spread * (len(values) - 1) / len(values)).sqrt()


def bias(values: Tensor, whole: Tensor) -> Tensor:
    r"""Return the bias :math:`(g - 1)(\bar v - v)` of a statistic, by the jackknife.

    Args:
        values: Of samples with a group left out, ``(g, *s)``; zero for none.
        whole: Of all samples, ``(*s)``.
    """
    if not len(values):
        return torch.zeros_like(whole)
    return (len(values) - 1) * (values.mean(0) - whole)


def matched_within(density: EntropicDensity) -> Tensor:
    """Return the errors within which the moments of a density were matched, ``(m + 1,)``."""
    return torch.cat([torch.zeros(1, dtype=torch.float64), density.ridge.sqrt()])
