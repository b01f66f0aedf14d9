"""The state of a recurrent model, carried from one batch of a text to the next."""

from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ritz._core.distributed import all_max, rank, shard
from ritz.curvature.adapters import Adapter
from ritz.optim.statistics import unwrapped
from ritz.training.processes import gathered


@final
class CarriedState:
    r"""What the rows of a batch hand on to those of the next, in tensors that stay where they are.

    .. math:: (\text{outputs}_k, h_k) = f(w, \text{inputs}_k, h_{k-1}),

    with no gradient through :math:`h_{k-1}`: truncated back-propagation through time. A model with
    a state has ``initial_state(rows)``, tensors in any nesting, and returns ``(outputs, state)``
    when it is called with ``state=``. It keeps nothing itself and stays a function of weights and
    batch, so that curvature can be measured, and an evaluation has a state of its own.

    Every number of rows has a state of its own. Its tensors are written to and never replaced: a
    CUDA graph may have recorded them.

    Args:
        model: Without wrappers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._held: dict[int, Any] = {}  # by rows of the whole batch, alike in all processes

    def of(self, count: int) -> Any:
        """The state of this process's rows of a batch of ``count``: the tensors themselves."""
        if count not in self._held:
            self._held[count] = tree_map(_copied, self._initial(count))
        return self._held[count]

    def reset(self) -> None:
        """Go back to the beginning, in the same memory."""
        for count, held in self._held.items():
            keep(held, self._initial(count))

    def rows(self) -> dict[str, Tensor]:
        """What a checkpoint holds: each tensor flat, with zeros behind, a row for each process."""
        return {
            f"{count}.{index}": gathered(_padded(tensor))
            for count, held in self._held.items()
            for index, tensor in enumerate(tree_leaves(held))
        }

    def load(self, rows: dict[str, Tensor]) -> None:
        """Go on from there, with as many processes."""
        for name, found in rows.items():
            count, index = map(int, name.split("."))
            held = tree_leaves(self.of(count))[index]
            held.copy_(found[rank()][: held.numel()].view_as(held))

    def _initial(self, count: int) -> Any:
        mine = shard(count)
        with torch.no_grad():
            return self._model.initial_state(max(1, mine.stop - mine.start))


def carried_state(adapter: Adapter, *, wanted: bool) -> CarriedState | None:
    """A new state for a model that has one, where it is wanted; ``None`` for any other.

    A ``forward`` of one's own calls the model as it likes, and carries nothing.
    """
    model = unwrapped(adapter.model)
    plain = adapter.custom is None and adapter.loss_fn.call is not None
    return CarriedState(model) if wanted and plain and hasattr(model, "initial_state") else None


def meet(adapter: Adapter, batch: Any, state: Any) -> tuple[Any, Any, Any]:
    """Outputs and target of a batch, and the state after it; ``None`` where there is none."""
    if state is None:
        return *adapter(batch), None
    outputs, after = adapter.model(*batch[:-1], state=state)
    return outputs, batch[-1], after


def keep(held: Any, after: Any) -> None:
    """Write a state into the tensors of another; nothing where there is none."""
    if held is None:
        return
    for old, new in zip(tree_leaves(held), tree_leaves(after), strict=True):
        old.copy_(new.detach())


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _padded(tensor: Tensor) -> Tensor:
    # Processes may differ by a row, and gathering takes equal lengths.
    padded = tensor.new_zeros(all_max(tensor.numel()))
    padded[: tensor.numel()] = tensor.flatten()
    return padded
