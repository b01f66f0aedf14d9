"""Ghost batch norm: batch norm with the statistics of small groups of a batch."""

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ritz._core.checks import check_count, check_type


class _GhostBatchNorm(_BatchNorm):
    # Comes before a batch norm of torch in the bases, which checks the number of dimensions.

    def __init__(self, num_features: int, size: int, *args: Any, **options: Any) -> None:
        size = check_count("size", size, low=2)
        super().__init__(num_features, *args, **options)
        self.size = size

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input, of the same shape."""
        normalize = super().forward
        # As in torch, a layer without running statistics uses those of the batch in eval mode too.
        if not self.training and self.running_mean is not None:
            return normalize(input)
        groups = input.split(group_sizes(len(input), self.size))
        return torch.cat([normalize(group) for group in groups])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, size={self.size}"  # type: ignore[no-untyped-call]


@final
class GhostBatchNorm1d(_GhostBatchNorm, nn.BatchNorm1d):
    """Batch norm of ``(n, c)`` or ``(n, c, l)`` by groups; see :class:`GhostBatchNorm2d`."""


@final
class GhostBatchNorm2d(_GhostBatchNorm, nn.BatchNorm2d):
    r"""Batch norm of ``(n, c, h, w)`` over groups of samples.

    In training, each group :math:`B_g` of ``size`` successive samples is normalised with the mean
    and variance of the group, so that a large batch has the noise of small ones. Running statistics
    are shared. Each group updates them like a batch,

    .. math:: m \leftarrow (1 - \eta) m + \eta \, \mu(B_g).

    In eval mode this is batch norm. The last group may be smaller. A single remaining sample, which
    may have no variance, joins the previous group.

    The class is a subclass of torch's batch norm and has the same state, so checkpoints of either
    load into the other. Where ritz recomputes running statistics, it uses whole batches.

    Args:
        num_features: Number of channels.
        size: Number of samples per group, at least 2.
        eps: Added to the variance.
        momentum: The factor :math:`\eta`. ``None`` averages over all groups.
        affine: Learn a scale and a shift.
        track_running_stats: Update running statistics.

    Reference: Hoffer et al. (2017), *Train longer, generalize better*, Algorithm 1.
    """


def with_ghost_batch_norm(model: nn.Module, size: int) -> nn.Module:
    """Turn the batch norms of a model into ghost batch norms in place, and return the model.

    Layers, parameters and buffers stay the same objects under the same names, so existing
    optimisers, averages and hooks remain valid. Existing ghost batch norms are changed to the new
    size.

    Args:
        model: Any module.
        size: Number of samples per group, at least 2.
    """
    size = check_count("size", size, low=2)
    check_type("model", model, nn.Module, "a torch.nn.Module")
    norms = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    ghosts = {nn.BatchNorm1d: GhostBatchNorm1d, nn.BatchNorm2d: GhostBatchNorm2d}
    for name, layer in norms:
        if type(layer) not in (*ghosts, *ghosts.values()):
            kind = type(layer).__name__
            raise TypeError(f"model must have batch norms 1d or 2d, but {name or 'it'} is a {kind}")
    for _, layer in norms:
        # A ghost batch norm has the state of a batch norm, and the size.
        layer.__class__ = ghosts.get(type(layer), type(layer))
        layer.size = size  # type: ignore[assignment]
    return model


def group_sizes(samples: int, size: int) -> list[int]:
    """Return the sizes of the groups of a batch."""
    full, rest = divmod(samples, size)
    # The variance of a single value per channel is not defined.
    if rest == 1 and full:
        return [size] * (full - 1) + [size + 1]
    return [size] * full + [rest] * (rest > 0)
