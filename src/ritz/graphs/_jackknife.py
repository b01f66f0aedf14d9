"""Jackknife over groups of probes: standard error and bias of a function of mean moments."""

import torch
from torch import Tensor

_NUM_GROUPS = 10  # ten densities per graph; their spread is known to 1 / sqrt(2 * 9) = 24 %


def leave_out(samples: Tensor) -> Tensor:
    """Return means of samples ``(d, m)``, leaving out one group of samples at a time, ``(g, m)``.

    There are ten groups, or one per sample if there are fewer samples. A single sample gives none.
    """
    groups = min(_NUM_GROUPS, len(samples))
    if groups < 2:
        return samples[:0]
    total = samples.sum(0)
    parts = torch.tensor_split(samples, groups)
    return torch.stack([(total - part.sum(0)) / (len(samples) - len(part)) for part in parts])


def jackknife(values: Tensor) -> Tensor:
    r"""Return the standard error :math:`\sqrt{\frac{g-1}{g} \sum_k (v_k - \bar v)^2}`.

    Args:
        values: Values without one group at a time, ``(g, *s)``.
    """
    spread = (values - values.mean(0)).square().sum(0)
    return (spread * (len(values) - 1) / len(values)).sqrt()


def bias(values: Tensor, whole: Tensor) -> Tensor:
    r"""Return the bias :math:`(g - 1)(\bar v - v)` of a statistic, by the jackknife.

    Args:
        values: Values without one group at a time, ``(g, *s)``.
        whole: Value of all samples, ``(*s)``.
    """
    return (len(values) - 1) * (values.mean(0) - whole)
