"""Settings of parameter groups: learning rate, momentum and the kind of weight decay."""

from collections.abc import Mapping
from typing import Any

from torch.optim import SGD, Optimizer

from ritz.measures._shared import OptimizerName

# Parts of class names of torch optimisers whose weight decay is decoupled.
DECOUPLED = ("AdamW", "Adafactor", "Muon")


def learning_rate(group: dict[str, Any]) -> float:
    """Return the learning rate of a group. 0 if SpectralSGD has not measured it yet."""
    # The lr of SpectralSGD is a factor of the measured rate, which is None at first.
    return float(group.get("lr", 0.0)) * (group.get("rate", 1.0) or 0.0)


def has_decoupled_decay(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return whether weight decay is decoupled from the gradient."""
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner  # inside Lookahead
    if isinstance(optimizer, SGD):  # also with noise, in this package
        return False
    # torch.optim.RMSprop and Adagrad add an L2 term. The other optimisers of ritz never do.
    kind = type(optimizer)
    return kind.__module__.startswith("ritz.") or any(name in kind.__name__ for name in DECOUPLED)


def momentum_of(group: Mapping[str, Any]) -> float:
    """Return the momentum of a group, or beta_1 of Adam."""
    betas = group.get("betas")
    return float(betas[0]) if betas else float(group.get("momentum") or 0.0)


def group_update(group: dict[str, Any]) -> tuple[OptimizerName, float, float]:
    """Return the kind of update of a group, as in :func:`ritz.advise`, momentum and dampening."""
    if "betas" in group:
        return "adam", float(group["betas"][0]), 0.0
    momentum = float(group.get("momentum", 0.0))
    if group.get("nesterov"):
        return "nesterov", momentum, 0.0
    if not momentum:
        return "sgd", 0.0, 0.0
    return "momentum", momentum, float(group.get("dampening", 0.0))
