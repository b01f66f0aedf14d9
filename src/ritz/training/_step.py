"""One training step, also captured as a CUDA graph; evaluation; the state of recurrent models."""

import math
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from ritz._core.batches import num_rows, tensors
from ritz._core.checks import check_count
from ritz._core.distributed import all_gather_rows, all_max, all_sum, rank, shard, world_size
from ritz._core.modes import evaluating, unwrapped
from ritz._core.params import parameters
from ritz._core.training_config import TrainingConfig
from ritz.curvature._shared import (
    Adapter,
    Forward,
    check_labels,
    check_scores,
    is_kept,
    term_mass,
)
from ritz.optim import CovarianceNoise, Lookahead
from ritz.optim._shared import curvature_of
from ritz.training._data import own_rows

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
        """Return the tensors of the state of this process's rows of a batch of ``count``."""
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
    """Return a new state if it is wanted and the model has one.

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


# ------------------------------------------------------------------------------------------
# One step: forward pass, backward pass and update, with losses summed on the device.


class Piece(NamedTuple):
    """A batch and its share of the gradient of a step.

    A piece that is not ``real`` stands in for a process without rows and has no weight. The batch
    starts from ``state``, which is then overwritten by the state after the batch.
    """

    batch: Any
    share: float | Tensor = 1.0
    real: bool = True
    state: Any = None


@final
class Totals:
    """Sums of losses, correct answers and labels over batches, on the device.

    Nothing is read from the device before :meth:`means`. The mean is over what the loss averages
    over: labels that are not ignored, by the weights of their classes.
    """

    def __init__(self, device: torch.device, top_k: int | None = None) -> None:
        self.top_k = top_k
        self.sums = torch.zeros(5, dtype=torch.float64, device=device)
        # Views, so that adding needs no indexing.
        self._loss, self._mass, self._right, self._labels, self._near = self.sums.unbind()

    def add(self, adapter: Adapter, batch: Any, loss: Tensor, outputs: Any, target: Any) -> None:
        """Add a batch with mean loss ``loss``."""
        mass = batch_mass(adapter, batch, target)
        if isinstance(mass, Tensor):
            # If all labels are ignored, the mean is 0/0 and the sum is 0.
            self._loss.add_((loss.detach().double() * mass).masked_fill(mass == 0, 0.0))
        else:
            # The sum of a batch is its mean times its mass, so batches of any sizes add up.
            self._loss.add_(loss.detach(), alpha=mass)
        self._mass.add_(mass)
        # Accuracy leaves out the labels that the loss ignores.
        if classes := num_classes(outputs, target):
            counted = is_kept(adapter.loss_fn.call, target)
            self._right.add_(((outputs.detach().argmax(1) == target) & counted).sum())
            self._labels.add_(counted.sum())
            if self.top_k is not None:
                first = outputs.detach().topk(min(self.top_k, classes), dim=1).indices
                self._near.add_(((first == target.unsqueeze(1)).any(1) & counted).sum())

    def means(self) -> dict[str, float]:
        """Return mean loss and, for classes, accuracy over all processes; waits for the device."""
        loss, mass, right, labels, near = all_sum(self.sums).tolist()
        means = {"loss": loss / mass if mass else math.nan}
        if labels:
            means["accuracy"] = right / labels
            if self.top_k is not None:
                means[f"top{self.top_k}_accuracy"] = near / labels
        return means


def num_classes(outputs: Any, target: Any) -> int:
    """Return the number of classes if outputs are scores of classes in dimension 1, else 0."""
    if not (isinstance(outputs, Tensor) and isinstance(target, Tensor)):
        return 0
    # The layout of cross_entropy: outputs (n, classes, ...) and targets (n, ...).
    classes = not target.is_floating_point() and outputs.ndim == target.ndim + 1 > 1
    return outputs.shape[1] if classes else 0


@final
@dataclass(eq=False)
class Step:
    """Forward and backward pass over the pieces of a step, and the update.

    Attributes:
        adapter: The model, perhaps wrapped, with its loss.
        optimizer: Updates the weights.
        config: Precision and ``clip_norm``; half precisions run the forward pass under autocast.
        device: Device of model and batches.
        cached: Cache casts of weights within a forward pass; not possible in a CUDA graph.
        noise: Gradient noise, if the run has any.
        penalty: Penalty on activations, if the run has any; not part of the logged loss.
    """

    adapter: Adapter
    optimizer: Optimizer
    config: TrainingConfig
    device: torch.device
    cached: bool = True
    noise: CovarianceNoise | None = None
    penalty: ActivationPenalty | None = None

    def __post_init__(self) -> None:
        self.totals = Totals(self.device, self.config.top_k)
        self.num_classes: int | None = None  # known after the first forward pass
        half = self.config.precision == "float16"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half)
        # K-FAC captures curvature in the passes of the step.
        self.curvature = curvature_of(self.optimizer)
        if self.curvature is not None:
            self.curvature.scaler = self.scaler

    def __call__(self, pieces: Sequence[Piece]) -> None:
        """Take the step."""
        self.optimizer.zero_grad(set_to_none=True)
        model, noise = self.adapter.model, self.noise
        if noise is not None:
            noise.begin()
        for number, piece in enumerate(pieces, start=1):
            # Processes exchange gradients after the last piece only.
            quiet: AbstractContextManager[Any] = nullcontext()
            if number < len(pieces) and isinstance(model, DistributedDataParallel):
                quiet = model.no_sync()
            with quiet, self._captured(piece):
                self._backward(piece)
        if noise is not None:
            # The noise must carry the factor of the gradient scaler that the gradient carries.
            noise.collect(self._scale(torch.ones((), device=self.device)))
        if self.config.clip_norm is not None:
            # The limit is on the gradient itself, not on its multiple by the scaler.
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(parameters(self.optimizer), self.config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _scale(self, value: Tensor) -> Tensor:
        scaled: Tensor = self.scaler.scale(value)
        return scaled

    def _captured(self, piece: Piece) -> AbstractContextManager[None]:
        hidden = self.curvature is not None and not piece.real
        return self.curvature.paused() if self.curvature and hidden else nullcontext()

    def _backward(self, piece: Piece) -> None:
        adapter, noise, penalty = self.adapter, self.noise, self.penalty
        with (
            nullcontext() if noise is None else noise.observing(piece.batch),
            nullcontext() if penalty is None else penalty.observing(),
            autocast(self.config.precision, self.device, cached=self.cached),
        ):
            outputs, target, after = call_model(adapter, piece.batch, piece.state)
            if self.num_classes is None:
                check_scores(adapter.loss_fn.call, outputs, target, "the first batch")
                check_labels(adapter.loss_fn.call, outputs, target, "the first batch", some=False)
                self.num_classes = num_classes(outputs, target)
            # `loss` is logged, `part` is differentiated: the penalty and the share go into `part`.
            loss = part = adapter.loss(outputs, target)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                got = (
                    f"shape {tuple(loss.shape)}"
                    if isinstance(loss, Tensor)
                    else type(loss).__name__
                )
                raise ValueError(f"the loss must be a number, the mean over a batch, got {got}")
        if penalty is not None:
            part = loss + penalty.take().to(loss.dtype)
        if isinstance(piece.share, Tensor):
            part = part * piece.share.to(loss.dtype)
        elif piece.share != 1:
            part = part * piece.share
        if self.curvature is not None:
            self.curvature.observe(outputs, target, adapter.loss_fn.call)
        if noise is None or not piece.real:
            self._scale(part).backward()
        else:
            scale = self._scale(torch.ones_like(part, requires_grad=False))
            noise.pull(self._scale(part), outputs, target, piece.batch, scale, piece.share)
        overwrite(piece.state, after)  # only now: the backward pass reads the old state
        if piece.real:
            self.totals.add(adapter, piece.batch, loss, outputs, target)


def batch_mass(adapter: Adapter, batch: Any, target: Any) -> int | Tensor:
    """Return the weight of a batch in means: what its loss divides by, or its rows if unknown.

    This is a tensor if labels may be ignored, because counting them would wait for the device.
    """
    mass = term_mass(adapter.loss_fn.call, target)
    if mass is not None:
        return mass
    return target.numel() if isinstance(target, Tensor) else num_rows(batch)


def autocast(
    precision: str, device: torch.device, *, cached: bool = True
) -> AbstractContextManager[Any]:
    """Compute in half precision where this is safe, for the block; others change nothing."""
    if precision not in ("bfloat16", "float16"):
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision), cache_enabled=cached)


@contextmanager
def scaled_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Context manager that multiplies the learning rates of all groups for the block."""
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            # Not in place: a learning rate that is a tensor must be restored as the same object.
            group["lr"] = rate * factor
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


# ------------------------------------------------------------------------------------------
# Loss and accuracy of a model.


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss_fn: Callable[..., Any] | None = cross_entropy,
    forward: Forward | None = None,
    precision: str = "float32",
    carry_state: bool | None = None,
    top_k: int | None = None,
) -> dict[str, float]:
    """Return the mean ``loss`` of a model in eval mode and, for classes, its ``accuracy``.

    The mean is over targets that the loss does not ignore, so batches of different sizes count
    correctly. The mode of the model is restored. With several processes, pass all batches to every
    process; each computes its share, and all return the same result.

    Args:
        model: Any module.
        batches: Batches on the device of the model, each ``(*inputs, target)`` or a dictionary.
        loss_fn: Mean loss of outputs and target; ``None`` if the model returns its loss.
        forward: Takes the model and a batch and returns ``(outputs, target)``, for other batches.
        precision: ``float32``, ``tf32``, ``bfloat16`` or ``float16``; the last two use autocast.
        carry_state: Pass the state of a recurrent model from batch to batch; see ``CarriedState``.
            Defaults to ``batches.consecutive``, which is true for text. Each call starts with the
            initial state. Not possible with ``forward``.
        top_k: Also return the fraction of targets among the k largest scores, as ``top5_accuracy``
            for 5.
    """
    if top_k is not None:
        check_count("top_k", top_k)
    adapter = Adapter(model, loss_fn, forward)
    wanted = getattr(batches, "consecutive", False) if carry_state is None else carry_state
    carried, totals = carried_state(adapter, wanted=wanted), None
    with evaluating(model, batch_statistics=False):
        for batch in batches:
            rows, count, real = own_rows(batch)
            totals = totals or Totals(device_of(model, rows), top_k)
            if not real:
                continue
            state = None if carried is None else carried.of(count)
            with autocast(precision, totals.sums.device):
                outputs, target, after = call_model(adapter, rows, state)
                check_scores(adapter.loss_fn.call, outputs, target, "batches")
                check_labels(adapter.loss_fn.call, outputs, target, "batches", some=False)
                loss = adapter.loss(outputs, target)
            overwrite(state, after)
            totals.add(adapter, rows, loss, outputs, target)
    if totals is None:
        raise ValueError("batches must contain at least one batch, got none")
    return totals.means()


def device_of(model: nn.Module, batch: Any = ()) -> torch.device:
    """Return the device of a model, or of a batch if the model has no parameters."""
    first = next(model.parameters(), next(iter(tensors(batch)), None))
    return torch.device("cpu") if first is None else first.device


# ------------------------------------------------------------------------------------------
# Steps as CUDA graphs: recorded once for each shape of batch, and replayed.

Signature = tuple[Any, ...]


@final
class CapturedStep:
    """A step that is replayed from a CUDA graph after a few ordinary steps.

    The first steps of each shape are ordinary ones on the stream that records. So nothing is
    computed twice, and the weights are those of ordinary steps. The hooks of the optimiser, and
    with them averages and Lookahead, run before and after each replay.

    Args:
        step: A step whose optimiser keeps all that changes on the device.
        required: Raise, instead of warning, if the step cannot be recorded.
    """

    def __init__(self, step: Step, *, required: bool) -> None:
        self._step, self._required = step, required
        self._optimizers = nested(step.optimizer)
        self._stream = torch.cuda.Stream()
        self._seen: Counter[Signature] = Counter()
        self._graphs: dict[Signature, tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._failed = False

    def __call__(self, pieces: Sequence[Piece]) -> None:
        """Take the step."""
        key = _signature(pieces)
        if key in self._graphs or self._record(pieces, key):
            graph, inputs = self._graphs[key]
            for static, new in zip(inputs, _inputs(pieces), strict=True):
                static.copy_(new, non_blocking=True)
            for optimizer in self._optimizers:
                _call(optimizer._optimizer_step_pre_hooks, optimizer)
            graph.replay()
            for optimizer in reversed(self._optimizers):
                _call(optimizer._optimizer_step_post_hooks, optimizer)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._step(pieces)
            torch.cuda.current_stream().wait_stream(self._stream)

    def _record(self, pieces: Sequence[Piece], key: Signature) -> bool:
        """Record the step; return False if it is too early or not possible."""
        self._seen[key] += 1
        # Three ordinary steps before a recording fill the state of the optimiser and choose
        # algorithms, as in torch's recipe for capturing a training step. Two graphs: the usual
        # batch, and the smaller one at the end of an epoch.
        if self._failed or self._seen[key] <= 3 or len(self._graphs) >= 2:
            return False
        # The graph reads batches and shares from these copies; a state stays where it is.
        copies = [tree_map_only(Tensor, torch.clone, piece[:2]) for piece in pieces]
        static = [Piece._make((*copy, *x[2:])) for copy, x in zip(copies, pieces, strict=True)]
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _without_hooks(self._step.optimizer),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
            ):
                self._step(static)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            if self._required:
                message = f"capture=True: the step cannot be captured in a CUDA graph: {reason}"
                raise ValueError(message) from error
            warnings.warn(f"steps are not captured in a CUDA graph: {reason}", stacklevel=2)
            self._failed = True
            return False
        self._graphs[key] = graph, _inputs(static)
        return True


def _signature(pieces: Sequence[Piece]) -> Signature:
    # A graph can be replayed for the same shapes and dtypes, and the same numbers of Python.
    leaves, shape = tree_flatten([tuple(piece) for piece in pieces])
    return (
        str(shape),
        *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves),
    )


def _inputs(pieces: Sequence[Piece]) -> list[Tensor]:
    return tensors([(piece.batch, piece.share) for piece in pieces])


def nested(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimiser and those that Lookahead wraps, outermost first."""
    chain = [optimizer]
    while isinstance(optimizer := chain[-1], Lookahead):
        chain.append(optimizer.optimizer)
    return chain


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    with ExitStack() as stack:
        for one in nested(optimizer):
            # Averages and Lookahead count steps on the host, which a recording would do only once.
            for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                stack.callback(setattr, one, name, getattr(one, name))
                setattr(one, name, OrderedDict())
        yield


def _call(hooks: dict[int, Any], optimizer: Optimizer) -> None:
    for hook in hooks.values():
        hook(optimizer, (), {})
