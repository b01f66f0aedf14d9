"""Recurrent models: their state from batch to batch, and penalties on their activations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ritz._core.distributed import all_gather_rows, all_max, rank, shard, unwrapped, world_size
from ritz._core.training_config import TrainingConfig
from ritz.curvature._shared import Adapter

# ------------------------------------------------------------------------------------------
# The state of a recurrent model, carried from one batch of a text to the next.


@final
class CarriedState:
    r"""The state of a recurrent model after each batch, which the next batch starts from.

    .. math:: (\text{outputs}_k, h_k) = f(w, \text{inputs}_k, h_{k-1}),

    without gradient through :math:`h_{k-1}`: truncated back-propagation through time. A model with
    a state has a method ``initial_state(batch_size)``, which returns a nested structure of tensors,
    and ``model(inputs, state=state)`` returns ``(outputs, new_state)``. The model itself stores no
    state, so that its curvature can be measured and evaluations do not disturb it.

    Batches with different numbers of rows have separate states. The tensors are overwritten and
    never replaced, because a CUDA graph may have recorded their addresses.

    Args:
        model: The model without wrappers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._states: dict[int, Any] = {}  # by rows of the whole batch, equal in all processes

    def of(self, count: int) -> Any:
        """Return the state for the rows of this process, of a batch of ``count`` rows."""
        if count not in self._states:
            self._states[count] = tree_map(
                # A new copy: an expanded tensor, or one of the model, must not be overwritten.
                lambda x: x.detach().clone(memory_format=torch.contiguous_format),
                self._initial(count),
            )
        return self._states[count]

    def reset(self) -> None:
        """Overwrite all states by the initial one."""
        for count, state in self._states.items():
            overwrite(state, self._initial(count))

    def rows(self) -> dict[str, Tensor]:
        """Return the states for a checkpoint: flat tensors, one row per process."""
        return {
            f"{count}.{index}": gathered(_padded(tensor))
            for count, state in self._states.items()
            for index, tensor in enumerate(tree_leaves(state))
        }

    def load(self, rows: dict[str, Tensor]) -> None:
        """Load the states of a checkpoint of as many processes."""
        for name, row in rows.items():
            count, index = map(int, name.split("."))
            state = tree_leaves(self.of(count))[index]
            state.copy_(row[rank()][: state.numel()].view_as(state))

    def _initial(self, count: int) -> Any:
        rows = shard(count)
        with torch.no_grad():
            return self._model.initial_state(max(1, rows.stop - rows.start))


def carried_state(adapter: Adapter, *, wanted: bool) -> CarriedState | None:
    """Return a new state, or ``None`` if none is ``wanted`` or the model has none.

    A user-defined ``forward`` calls the model itself, so no state is carried.
    """
    model = unwrapped(adapter.model)
    plain = adapter.custom is None and adapter.loss_fn.call is not None
    return CarriedState(model) if wanted and plain and hasattr(model, "initial_state") else None


def call_model(adapter: Adapter, batch: Any, state: Any) -> tuple[Any, Any, Any]:
    """Return outputs and target of a batch, and the state after it or ``None``."""
    if state is None:
        return *adapter(batch), None
    outputs, after = adapter.model(*batch[:-1], state=state)
    return outputs, batch[-1], after


def overwrite(state: Any, after: Any) -> None:
    """Copy a state into the tensors of another; do nothing for ``None``."""
    if state is not None:
        for old, new in zip(tree_leaves(state), tree_leaves(after), strict=True):
            old.copy_(new.detach())


def gathered(values: Tensor) -> Tensor:
    """Return vectors of equal length of all processes, one row each, on the CPU."""
    count = world_size()
    return all_gather_rows(values, count * len(values)).reshape(count, -1).cpu().clone()


def _padded(tensor: Tensor) -> Tensor:
    # Gathering needs equal lengths, and processes may differ by one row.
    padded = tensor.new_zeros(all_max(tensor.numel()))
    padded[: tensor.numel()] = tensor.flatten()
    return padded


# ------------------------------------------------------------------------------------------
# Activation regularisation of recurrent models.


@final
class ActivationPenalty:
    r"""Penalty on the last activations of a recurrent model, per element.

    .. math:: \alpha \operatorname{mean}(d_t^2) + \beta \operatorname{mean}((h_t - h_{t-1})^2),

    with :math:`h_t` the last activations at position :math:`t` and :math:`d_t` the same after
    dropout. A model with such activations has an attribute ``last_drop``, the dropout layer that
    takes them as ``(batch, features, length)``.

    Args:
        model: The model without wrappers.
        activation: :math:`\alpha`.
        change: :math:`\beta`.

    Reference: Merity, McCann and Socher (2017), *Revisiting activation regularization for language
    RNNs*.
    """

    def __init__(self, model: nn.Module, activation: float, change: float) -> None:
        layer = getattr(model, "last_drop", None)
        if not isinstance(layer, nn.Module):
            raise ValueError(
                "activation_penalty and change_penalty need a model with a layer last_drop, such "
                f"as the model lstm, got {type(model).__name__} without"
            )
        self._layer, self._weights = layer, (activation, change)
        self._value: Tensor | None = None

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Context manager for a forward pass, after which :meth:`take` has its penalty."""
        handle = self._layer.register_forward_hook(self._observe)
        try:
            yield
        finally:
            handle.remove()

    def take(self) -> Tensor:
        """Return the penalty of the last forward pass, with its gradient, and forget it."""
        value, self._value = self._value, None
        if value is None:
            raise RuntimeError("the forward pass did not call the layer last_drop of the model")
        return value

    def _observe(self, layer: nn.Module, inputs: tuple[Tensor, ...], dropped: Tensor) -> None:
        (h,), (activation, change) = inputs, self._weights
        # In float32: squares of half-precision activations would lose digits.
        value = activation * dropped.float().square().mean()
        if h.shape[2] > 1:  # a single position has no change
            value = value + change * h.float().diff(dim=2).square().mean()
        self._value = value


def make_penalty(model: nn.Module, config: TrainingConfig) -> ActivationPenalty | None:
    """Return the penalty of the options on the last activations, or ``None`` without one."""
    if not (config.activation_penalty or config.change_penalty):
        return None
    if config.has_noise:
        raise ValueError(
            "activation_penalty and change_penalty must be 0 with noise, because gradients of "
            "single samples do not include penalties"
        )
    return ActivationPenalty(model, config.activation_penalty, config.change_penalty)
