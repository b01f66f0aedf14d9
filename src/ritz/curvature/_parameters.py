"""Parameters of a model: selection by name, copies of parameters and buffers, derivatives.

A point in weight space is the vector of the selected parameters. A :class:`Context` holds
everything else that the loss of a batch depends on.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ritz._core.batches import Batch, take_rows, tensors
from ritz._core.checks import check_choice, check_real_floating
from ritz._core.modes import Precision, outside_inference
from ritz._core.params import ParamSpace

# ------------------------------------------------------------------------------------------
# A point in weight space: the parameters that vary, and everything that stays constant.

Params = dict[str, Tensor]
Selection = str | Sequence[str] | Callable[[str], bool]
# Parameters of a model may also be selected as tensors, or by their module.
ModelSelection = Selection | Iterable[Tensor] | nn.Module
_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that the loss of a batch depends on, except the selected parameters.

    It is registered with ``torch.utils._pytree``, so that it can be traced as one tree of tensors.

    Attributes:
        constants: Frozen parameters, parameters that were not selected, and buffers, by name.
        batch: The samples.
        masks: Masks of the dropout layers in the order of their calls. ``None`` without dropout.
        size: Number of samples in the batch.
        extra: Additional data of an operator for this batch, such as drawn labels.
    """

    constants: Params
    batch: Batch
    masks: list[Tensor] | None
    size: int
    extra: Any = None

    def rows(self, part: slice) -> "Context":
        """Return the context of some of the samples."""
        batch, masks, extra = self.samples(part)
        return Context(self.constants, batch, masks, len(range(self.size)[part]), extra)

    def samples(self, part: slice) -> Batch:
        """Return the batch, masks and extra data of some of the samples."""
        return take_rows((self.batch, self.masks, self.extra), part, self.size)

    def on(self, sample: Batch) -> "Context":
        """Return the context of a single sample, which is given as :meth:`samples` returns it."""
        batch, masks, extra = sample
        return Context(self.constants, batch, masks, 1, extra)


_pytree.register_dataclass(Context, field_names=["constants", "batch", "masks", "size", "extra"])


def copy_state(
    model: nn.Module, selection: ModelSelection | None, precision: Precision | None
) -> tuple[ParamSpace, Tensor, Params, torch.dtype | None]:
    """Copy the parameters and buffers of a model.

    Returns:
        The space of the selected parameters, their values ``(P,)``, all other parameters and
        buffers by name, and the dtype that inputs must be converted to, or ``None``.
    """
    parameters = dict(model.named_parameters())
    free = [name for name, tensor in parameters.items() if tensor.requires_grad and tensor.numel()]
    if not free:
        raise ValueError("model must have parameters that require a gradient, got none")
    chosen = free if selection is None else select_names(free, _names_of(parameters, selection))
    devices = {parameters[name].device.type for name in chosen}
    if len(devices) > 1 or "meta" in devices:
        raise ValueError(f"all parameters must be on one device, got {sorted(devices)}")
    cast = _cast({parameters[name].dtype for name in chosen}, precision)
    with outside_inference():
        state = {
            name: tensor.detach().to(
                tensor.device, dtype=cast if tensor.is_floating_point() else None, copy=True
            )
            for name, tensor in (parameters | dict(model.named_buffers())).items()
        }
        values = {name: state.pop(name) for name in chosen}
        space = ParamSpace(values)
        return space, space.flatten(values), state, cast


def _names_of(parameters: Mapping[str, Tensor], selection: ModelSelection) -> Selection:
    """Return a selection by names. Parameters that do not require a gradient are left out."""
    if isinstance(selection, nn.Module):
        selection = selection.parameters()
    if isinstance(selection, str) or not isinstance(selection, Iterable):
        return selection
    chosen: list[Any] = list(selection)
    if not chosen or not all(isinstance(each, Tensor) for each in chosen):
        return chosen
    names = {id(tensor): name for name, tensor in parameters.items()}
    if other := [tuple(each.shape) for each in chosen if id(each) not in names]:
        shapes = ", ".join(map(str, other))
        raise ValueError(f"params must be parameters of the model, got other tensors: {shapes}")
    return [names[id(each)] for each in chosen if each.requires_grad]


def _cast(dtypes: set[torch.dtype], precision: Precision | None) -> torch.dtype | None:
    """Return the dtype to convert the model to, or ``None`` to leave it unchanged."""
    for dtype in dtypes:
        check_real_floating("parameters", dtype)
    if precision is not None:
        check_choice("precision", precision, tuple(_DTYPES))
        return _DTYPES[precision]
    # float32 represents all float16 and bfloat16 values exactly, and products are more accurate.
    wide = dtypes - {torch.float16, torch.bfloat16}
    if wide != dtypes and wide <= {torch.float32}:
        return torch.float32
    if len(dtypes) > 1:
        names = sorted(map(str, dtypes))
        raise ValueError(f"parameters must be of one dtype, got {names}: pass precision= to choose")
    return None


def select_names(names: list[str], selection: Selection) -> list[str]:
    """Return the names that a selection matches, in the order of ``names``."""
    if isinstance(selection, str):
        try:
            pattern = re.compile(selection)
        except re.error as error:
            message = f"params must be a regular expression, got {selection!r}: {error}"
            raise ValueError(message) from error
        chosen = [name for name in names if pattern.match(name)]
    elif callable(selection):
        chosen = [name for name in names if selection(name)]
    else:
        if unknown := sorted(set(selection) - set(names)):
            raise ValueError(f"params must be among the trainable {names}, got {unknown}")
        chosen = [name for name in names if name in selection]
    if not chosen:
        raise ValueError(f"params must match one of the trainable {names}, got {selection!r}")
    return chosen


def restore_buffers(model: nn.Module, constants: Params) -> list[str]:
    """Restore buffers in ``constants`` that calls of the model wrote to, and return their names."""
    buffers = dict(model.named_buffers())
    # The version of a new copy is 0, and every in-place operation increases it by one.
    written = [name for name in constants if name in buffers and constants[name]._version]
    for name in written:
        constants[name] = buffers[name].detach().to(constants[name], copy=True)
    return written


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Restore attributes of modules to which the model assigns tensors, such as a cached mask.

    Otherwise the model would keep tensors of a ``torch.func`` transform that has ended. Their use
    raises an error.
    """
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for now, old in before:
            changed = [name for name, value in now.items() if value is not old.get(name)]
            # Counters and flags that are not tensors keep their new values.
            for name in (name for name in changed if tensors(now[name])):
                del now[name]
                now |= {name: old[name]} if name in old else {}


@dataclass(frozen=True, slots=True)
class Roundoff:
    """Where roundoff is measured, beside float64."""

    # On this many batches, of models of at most this many parameters: 512 MB in float64.
    compared: int = 8
    parameters: int = 2**26


ROUNDOFF = Roundoff()


def as_double(tree: Any) -> Any:
    """Return a nesting of tensors with its floating-point tensors in float64."""
    return _pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, tree)


def as_leaves(params: Params) -> Params:
    """Return the parameters as leaf tensors that require a gradient."""
    return {name: value.detach().requires_grad_() for name, value in params.items()}


def derivatives(outputs: Any, leaves: Params, along: Any = None, *, again: bool = False) -> Params:
    """Return the vector-Jacobian products of outputs by ``torch.autograd.grad``.

    Args:
        outputs: A tensor, or a list of tensors.
        leaves: Parameters of :func:`as_leaves`. The derivative of an unused parameter is zero.
        along: The vectors: tensors of the shapes of the outputs. ``None`` for a scalar output.
        again: Whether the derivatives will be differentiated again.
    """
    pairs = zip(tensors(outputs), tensors(along), strict=True) if along is not None else ()
    # Outputs that do not depend on any parameter have no derivative.
    moving = [(output, vector) for output, vector in pairs if output.requires_grad]
    if along is not None and not moving:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    values, vectors = zip(*moving, strict=True) if moving else ((outputs,), None)
    parts = torch.autograd.grad(
        values, list(leaves.values()), vectors, create_graph=again, materialize_grads=True
    )
    return dict(zip(leaves, parts, strict=True))
