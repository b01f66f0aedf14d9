"""One training step, also captured as a CUDA graph, and the state of recurrent models."""

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ritz._core.batches import num_rows
from ritz._core.distributed import all_max, all_sum, rank, shard
from ritz._core.modes import unwrapped
from ritz.curvature._shared import Adapter, check_labels, is_kept, term_mass
from ritz.optim import Lookahead
from ritz.training._processes import gathered

# ------------------------------------------------------------------------------------------
# The state of a recurrent model, carried from one batch of a text to the next.


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
            self._held[count] = tree_map(_copied_state, self._initial(count))
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

    A user-defined ``forward`` calls the model itself, and no state is carried.
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


def _copied_state(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _padded(tensor: Tensor) -> Tensor:
    # Processes may differ by a row, and gathering takes equal lengths.
    padded = tensor.new_zeros(all_max(tensor.numel()))
    padded[: tensor.numel()] = tensor.flatten()
    return padded


# ------------------------------------------------------------------------------------------
# One step: forward, backward, update, with the loss added up on the device.

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Piece(NamedTuple):
    """A batch and its share of the gradient of the step.

    A batch that is not ``real`` stands in where a process has no rows, and counts for nothing. With
    a state, which the batch begins with and leaves its own in.
    """

    batch: Any
    share: float | Tensor = 1.0
    real: bool = True
    state: Any = None


@final
class Totals:
    """Loss, right answers and labels of many batches, added up where they are computed.

    Nothing is read from the device before :meth:`means`. The mean is over what the loss itself
    averages over: labels that are not ignored, with their weights where classes have some.
    """

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)
        # Views: adding takes no indexing.
        self._loss, self._mass, self._right, self._labels = self.sums.unbind()

    def add(self, adapter: Adapter, batch: Any, loss: Tensor, outputs: Any, target: Any) -> None:
        """Add a batch of mean loss ``loss``."""
        mass = batch_mass(adapter, batch, target)
        if isinstance(mass, Tensor):
            # Where all labels are ignored the mean is none.
            self._loss.add_((loss.detach().double() * mass).masked_fill(mass == 0, 0.0))
        else:
            self._loss.add_(loss.detach(), alpha=mass)
        self._mass.add_(mass)
        if is_classification(outputs, target):
            kept = is_kept(adapter.loss_fn.call, target)
            self._right.add_(((outputs.detach().argmax(1) == target) & kept).sum())
            self._labels.add_(kept.sum())

    def reset(self) -> None:
        """Begin anew, in the same memory."""
        self.sums.zero_()

    def means(self) -> dict[str, float]:
        """Mean loss and, for classes, accuracy over all processes; one wait for the device."""
        loss, mass, right, labels = all_sum(self.sums).tolist()
        found = {"loss": loss / mass if mass else math.nan}
        return found | ({"accuracy": right / labels} if labels else {})


def is_classification(outputs: Any, target: Any) -> bool:
    """Whether outputs are scores of classes, in dimension 1, and targets their numbers."""
    return (isinstance(outputs, Tensor) and isinstance(target, Tensor)
            and not target.is_floating_point() and outputs.ndim == target.ndim + 1
            and outputs.ndim > 1)  # fmt: skip


@final
class Step:
    """Forward and backward over the pieces of a step, and the update.

    Args:
        adapter: The model, perhaps wrapped, with its loss.
        optimizer: Takes the step.
        precision: ``bfloat16`` and ``float16`` run the forward pass in it where that is safe.
        clip_norm: Largest norm of the gradient.
        device: Where.
        cached: Whether casts of weights are kept within a forward pass; not in a CUDA graph.
    """

    def __init__(
        self,
        adapter: Adapter,
        optimizer: Optimizer,
        *,
        precision: str,
        clip_norm: float | None,
        device: torch.device,
        cached: bool = True,
    ) -> None:
        self.adapter, self.optimizer, self.clip_norm = adapter, optimizer, clip_norm
        self.totals = Totals(device)
        self.num_classes: int | None = None  # of the outputs, once there were some
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "float16")
        self._half, self._device, self._cached = HALF.get(precision), device, cached

    def __call__(self, pieces: Sequence[Piece]) -> None:
        """Take the step."""
        self.optimizer.zero_grad(set_to_none=True)
        for number, piece in enumerate(pieces, start=1):
            with self._quiet(last=number == len(pieces)):
                self._backward(piece)
        self._update()

    def _backward(self, piece: Piece) -> None:
        with autocast(self._half, self._device, cached=self._cached):
            outputs, target, after = meet(self.adapter, piece.batch, piece.state)
            if self.num_classes is None:
                self.num_classes = self._checked(outputs, target)
            loss = self.adapter.loss(outputs, target)
        self.scaler.scale(_part(loss, piece.share)).backward()
        keep(piece.state, after)  # not before: the backward pass reads what was there
        if piece.real:
            self.totals.add(self.adapter, piece.batch, loss, outputs, target)

    def _checked(self, outputs: Any, target: Any) -> int:
        """Classes of the outputs, 0 where there are none; the labels are among them."""
        check_labels(self.adapter.loss_fn.call, outputs, target, "the first batch", some=False)
        return outputs.shape[1] if is_classification(outputs, target) else 0

    def _update(self) -> None:
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            held = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(held, self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _quiet(self, *, last: bool) -> AbstractContextManager[Any]:
        """Let processes exchange gradients after the last piece alone."""
        model = self.adapter.model
        if last or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        return model.no_sync()


def _part(loss: Tensor, share: float | Tensor) -> Tensor:
    if isinstance(share, Tensor):
        return loss * share.to(loss.dtype)
    return loss if share == 1 else loss * share


def batch_mass(adapter: Adapter, batch: Any, target: Any) -> int | Tensor:
    """How much a batch counts in means: what its loss divides by, or its rows where that is unseen.

    A tensor where labels may be ignored: nobody waits for how many are.
    """
    mass = term_mass(adapter.loss_fn.call, target)
    if mass is not None:
        return mass
    return target.numel() if isinstance(target, Tensor) else num_rows(batch)


def autocast(
    half: torch.dtype | None, device: torch.device, *, cached: bool = True
) -> AbstractContextManager[Any]:
    """Half precision where that is safe, for the block; ``None``: as it is."""
    if half is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=half, cache_enabled=cached)


# ------------------------------------------------------------------------------------------
# Steps as CUDA graphs: recorded once for every shape of batch, and replayed.

WARM_UP = 3  # steps before a recording: they fill the optimiser's state and choose algorithms
MAX_GRAPHS = 2  # the batch of every step, and the shorter one at the end of an epoch
Signature = tuple[Any, ...]


@final
class CapturedStep:
    """A step that is replayed from a CUDA graph once it has been taken a few times.

    The first steps of every shape are ordinary ones, on the stream that records, so nothing is
    computed twice and the weights are those of ordinary steps. The hooks of the optimiser, and so
    averages and Lookahead, run at every replay, before and after it.

    Args:
        step: The step, whose optimiser keeps all that changes on the device.
        required: Whether a step that cannot be recorded is an error, and not just taken as it is.
    """

    def __init__(self, step: Step, *, required: bool) -> None:
        self._step, self._required = step, required
        self._stream = torch.cuda.Stream()
        self._seen: Counter[Signature] = Counter()
        self._graphs: dict[Signature, tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._given_up = False

    def __call__(self, pieces: Sequence[Piece]) -> None:
        """Take the step."""
        key = _signature(pieces)
        if key not in self._graphs and not self._record(pieces, key):
            self._ordinary(pieces)
        else:
            self._replay(pieces, key)

    def _ordinary(self, pieces: Sequence[Piece]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._step(pieces)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _replay(self, pieces: Sequence[Piece], key: Signature) -> None:
        graph, inputs = self._graphs[key]
        for held, new in zip(inputs, _tensors(pieces), strict=True):
            held.copy_(new, non_blocking=True)
        _run_hooks(self._step.optimizer, before=True)
        graph.replay()
        _run_hooks(self._step.optimizer, before=False)

    def _record(self, pieces: Sequence[Piece], key: Signature) -> bool:
        """Record the step; False where it is too early or not possible."""
        self._seen[key] += 1
        if self._given_up or self._seen[key] <= WARM_UP or len(self._graphs) >= MAX_GRAPHS:
            return False
        held = [
            piece._replace(
                batch=tree_map(_static_copies, piece.batch), share=_static_copies(piece.share)
            )
            for piece in pieces
        ]
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _without_hooks(self._step.optimizer),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
            ):
                self._step(held)
        except RuntimeError as error:
            return self._give_up(error)
        self._graphs[key] = graph, _tensors(held)
        return True

    def _give_up(self, error: RuntimeError) -> bool:
        reason = str(error).splitlines()[0]
        if self._required:
            raise ValueError(f"capture=True needs a step without waits for the device, got one "
                             f"that cannot be recorded: {reason}") from error  # fmt: skip
        warnings.warn(f"steps are not captured in a CUDA graph: {reason}", stacklevel=2)
        self._given_up = True
        return False


def _signature(pieces: Sequence[Piece]) -> Signature:
    leaves, shape = tree_flatten([tuple(piece) for piece in pieces])
    return (str(shape), *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
                          for leaf in leaves))  # fmt: skip


def _static_copies(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _tensors(pieces: Sequence[Piece]) -> list[Tensor]:
    """What is new in every step; a state stays where it is."""
    leaves, _ = tree_flatten([(piece.batch, piece.share) for piece in pieces])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _wrapped(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimiser and those inside it, outermost first."""
    yield optimizer
    while isinstance(optimizer, Lookahead):
        optimizer = optimizer.optimizer
        yield optimizer


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    tables: list[dict[int, Any]] = []
    for one in _wrapped(optimizer):
        tables += [one._optimizer_step_pre_hooks, one._optimizer_step_post_hooks]
    before = [table.copy() for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)


def _run_hooks(optimizer: Optimizer, *, before: bool) -> None:
    chain = list(_wrapped(optimizer))
    for one in chain if before else reversed(chain):
        table: Any = one._optimizer_step_pre_hooks if before else one._optimizer_step_post_hooks
        for hook in table.values():
            hook(one, (), {})
