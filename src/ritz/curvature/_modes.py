"""A point in weight space, and the modes of model and torch in which all derivatives exist."""

import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ritz._core.batches import Batch, take_rows, tensors
from ritz._core.checks import check_choice, check_real_floating
from ritz._core.modes import Precision, arithmetic, differentiable, evaluating, outside_inference
from ritz._core.params import ParamSpace

# ------------------------------------------------------------------------------------------
# Sizes.


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes at which computations are cut into parts, cached, or done in another way."""

    # Bytes of batches in memory. Further data are loaded again for every product.
    data: int = 4 * 2**30
    # Bytes of primal parts that are cached on the CPU. A GPU offers half of its free memory.
    cache: int = 2 * 2**30
    # A trace takes as long as 20 to 40 gradients. Data in batches have two shapes; padded text has
    # one per length.
    max_traces: int = 8
    # Paths through the model for batches of one shape. A number that differs in every batch would
    # give a trace for each.
    max_paths: int = 4
    # Products of a batch that repay a trace: three eager products and then 2.7 gradients each,
    # against 30 gradients and 1.75 each (GPT of 6 layers, ViT, BERT; benchmarks/models.py). A
    # second shape is repaid after 10: 0.37 s against 0.04 s per product (8 and 3 texts).
    repaid: int = 16
    # Roundoff, in eps, of a product by a trace of another number of samples. Products agree to 4.
    # A constant 1 / n of the first batch, with n up to 10,000, is off by more.
    alike: float = 200.0
    # Share of the batches below which those of one size, such as a shorter last one, have no trace.
    # The eager product with a small batch takes about as long as the traced one with a large one
    # (GPT of 6 layers), so all products then cost a few per cent more, whatever their number.
    rare: float = 0.03
    # Columns multiplied at once. On an H200 a column of a block of 8 takes 1.1 ms against 9.0 ms
    # alone (MLP); on the CPU both take 18 ms (benchmarks/results/products*.json).
    block_size: int = 8
    # Error allowed in float32 on a GPU, where products may be in TF32 with 10 bits of mantissa.
    gpu_rtol: float = 0.05
    # Backward passes per batch for an exact diagonal. XTrace costs as much with its default of 32
    # probes: 64 products of about 1.3 gradients, or 4 passes, each.
    max_columns: int = 256
    # Entries of derivatives in the outputs of modules at once: 128 MB of doubles.
    derivatives: int = 2**24
    # Entries of sample gradients of one module at once on the CPU: 32 MB of doubles, about the size
    # of an L3 cache. A GPU takes 16 times as many, to be busy.
    gradients: int = 2**22
    # The same if only their squares are summed: 1 MB of floats, about the size of an L2 cache.
    products: int = 2**18
    # Positions of a layer up to which squares are sums over pairs of positions. For 512 channels
    # and 32 samples on the CPU, pairs take 15 ms and gradients 38 ms at 4 positions, 190 and 29 at
    # 16. A GPU is limited by memory, where pairs need less up to 16 by counting.
    pairs: int = 4
    pairs_gpu: int = 16
    # Entries of whole sample gradients in gradient_statistics: 256 MB in float64.
    statistics: int = 2**25
    # Parameters of a module without Kronecker factors whose block is formed: 32 MB of doubles.
    dense_block: int = 2048
    # Samples on which rules are checked. Two show that samples are coupled; four cost little.
    checked_samples: int = 4


LIMITS = Limits()

# ------------------------------------------------------------------------------------------
# A point in weight space: the parameters that vary, and everything that stays constant.

Params = dict[str, Tensor]
Selection = str | Sequence[str] | Callable[[str], bool]
_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class Context:
    """Everything a loss depends on except the chosen parameters, as one tree of tensors.

    Attributes:
        constants: Frozen parameters, parameters that were not chosen, and buffers, by name.
        batch: The samples.
        masks: Masks of the dropout layers in the order of their calls; ``None`` without dropout.
        size: Number of samples in the batch.
        extra: Further data of an operator, such as drawn labels.
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
        """Return everything that may have one row per sample, for some of the samples."""
        return take_rows((self.batch, self.masks, self.extra), part, self.size)

    def on(self, sample: Batch) -> "Context":
        """Return the context of a single sample, in the form of :meth:`samples`."""
        batch, masks, extra = sample
        return Context(self.constants, batch, masks, 1, extra)


_pytree.register_dataclass(Context, field_names=["constants", "batch", "masks", "size", "extra"])


def copy_state(
    model: nn.Module, selection: Selection | None, precision: Precision | None
) -> tuple[ParamSpace, Tensor, Params, torch.dtype | None]:
    """Copy the state of a model.

    Returns:
        The space of the chosen parameters, their values ``(P,)``, all other parameters and buffers,
        and the dtype that inputs must be converted to, or ``None``.
    """
    parameters = dict(model.named_parameters())
    free = [name for name, tensor in parameters.items() if tensor.requires_grad and tensor.numel()]
    if not free:
        raise ValueError("model must have parameters that require a gradient, got none")
    chosen = free if selection is None else select_names(free, selection)
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


def restore_buffers(model: nn.Module, constants: Params) -> list[str]:
    """Restore the copies of buffers that calls of a model wrote to, and return their names."""
    buffers = dict(model.named_buffers())
    # A copy of a tensor is at version 0, and every operation in place adds one.
    written = [name for name in constants if name in buffers and constants[name]._version]
    for name in written:
        constants[name] = buffers[name].detach().to(constants[name], copy=True)
    return written


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Restore attributes of modules to which the block assigns tensors, such as a cached mask.

    Otherwise the model would keep tensors of transforms that have ended, which fail when used.
    """
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for now, old in before:
            changed = [name for name, value in now.items() if value is not old.get(name)]
            # Counters and flags stay: they are the model's own.
            for name in (name for name in changed if tensors(now[name])):
                del now[name]
                now |= {name: old[name]} if name in old else {}


def as_leaves(params: Params) -> Params:
    """Return the parameters as tensors that autograd differentiates with respect to."""
    return {name: value.detach().requires_grad_() for name, value in params.items()}


def derivatives(outputs: Any, leaves: Params, along: Any = None, *, again: bool = False) -> Params:
    """Return the derivatives of outputs, or of their products with ``along``, by plain autograd.

    Args:
        outputs: A tensor, or a list of tensors.
        leaves: Parameters of :func:`as_leaves`. The derivative in one that is not used is zero.
        along: Tensors like the outputs. ``None`` for a single number.
        again: Whether the derivatives will be differentiated.
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


def select_names(names: list[str], selection: Selection) -> list[str]:
    """Return the names that a selection chooses, in their order."""
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
        raise ValueError(f"params must match at least one of {names}, got {selection!r}")
    return chosen


def _cast(dtypes: set[torch.dtype], precision: Precision | None) -> torch.dtype | None:
    """Return the dtype to convert the model to, or ``None`` if it stays as it is."""
    for dtype in dtypes:
        check_real_floating("parameters", dtype)
    if precision is not None:
        check_choice("precision", precision, tuple(_DTYPES))
        return _DTYPES[precision]
    # float32 holds all values of half precision exactly, and its products are far more accurate.
    wide = dtypes - {torch.float16, torch.bfloat16}
    if wide != dtypes and wide <= {torch.float32}:
        return torch.float32
    if len(dtypes) > 1:
        names = sorted(map(str, dtypes))
        raise ValueError(f"parameters must be of one dtype, got {names}: pass precision= to choose")
    return None


def draw_masks(
    shapes: Sequence[tuple[tuple[int, ...], float]], generator: torch.Generator, *, like: Tensor
) -> list[Tensor]:
    """Draw a mask for each call of a dropout layer, from its shape and its probability."""
    masks = []
    for shape, p in shapes:
        # With an explicit dtype: the default dtype must not change the mask.
        passed = torch.rand(shape, generator=generator, dtype=torch.float32) >= p
        # Dropout scales by 1 / (1 - p), so that the mean stays the same.
        scale = max(1 - p, torch.finfo(torch.float32).tiny)
        masks.append(differentiable(passed.to(like) / scale))
    return masks


# ------------------------------------------------------------------------------------------
# The modes of model and torch in which derivatives of every order exist.


@contextmanager
def product_modes(
    model: nn.Module,
    *,
    batch_statistics: bool,
    precision: Precision | None,
    device: torch.device,
    constant: bool = False,
    formulas: bool = False,
) -> Iterator[None]:
    """Set the modes in which a model is differentiated for the block.

    With ``constant``, statistics of a batch are constants for derivatives. With ``formulas``,
    operations are written out; a third of the time of a small gradient, so only if needed.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(evaluating(model, batch_statistics=batch_statistics))
        # The other attention kernels have no second derivatives.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(arithmetic(precision))
        stack.enter_context(without_warnings_of_fallbacks())
        stack.enter_context(_functions_traced())
        if device.type == "cuda" and any(isinstance(m, nn.RNNBase) for m in model.modules()):
            # The recurrent kernels of cuDNN have no second derivatives either.
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            # Compiled parts of a model can be neither traced nor differentiated twice.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            config: Any = sys.modules["torch._dynamo"].config
            nested = config.error_on_nested_fx_trace
            stack.callback(setattr, config, "error_on_nested_fx_trace", nested)
            config.error_on_nested_fx_trace = False
        if formulas or any(map(_needs_formulas, model.modules())):
            stack.enter_context(_Formulas())
        if constant:
            stack.enter_context(constant_statistics())
        yield


@contextmanager
def without_warnings_of_fallbacks() -> Iterator[None]:
    """Silence the warning of vmap that it computes an operation column by column."""
    warn: Any = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled")  # noqa: B009
    warn(False)
    try:
        yield
    finally:
        warn(True)  # the default


@contextmanager
def _functions_traced() -> Iterator[None]:
    """Give autograd functions a rule under functionalize, which has none in torch.

    A trace begins with functionalize, so at its level all derivatives have been taken: what is left
    of a function is its forward pass.
    """
    rules, level = custom_function_call.functorch_table, TransformType.Functionalize
    before = rules[level]
    rules[level] = lambda interpreter, function, *inputs: function.forward(*inputs)
    try:
        yield
    finally:
        rules[level] = before


@contextmanager
def without_warnings_of_torch() -> Iterator[None]:
    """Ignore warnings of torch about its own code while it traces and compiles."""
    with warnings.catch_warnings():
        # torch.func.jvp loads code that torch itself deprecates.
        warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
        # The compiler reports how it splits reductions.
        warnings.filterwarnings("ignore", r"\s*Online softmax", UserWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor")
        yield


# Errors of models, modules and losses that cannot be computed in the way that is tried.
UNSUITABLE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)


def attempt(call: Callable[[], Any], *kinds: type[Exception]) -> tuple[Any, str]:
    """Return the result of a call and ``""``, or ``None`` and why it failed with such an error.

    Running out of memory raises: it is no reason to compute in another way.
    """
    try:
        return call(), ""
    except torch.OutOfMemoryError:
        raise
    except kinds as error:
        return None, first_line(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error message."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


class _Formulas(TorchFunctionMode):
    """Replaces operations of torch by others.

    Args:
        replacements: Other functions by those of torch. Defaults to formulas for those whose
            derivatives in torch are not those of a function.
    """

    def __init__(self, replacements: Mapping[Any, Callable[..., Tensor]] | None = None) -> None:
        super().__init__()
        self._replacements = _REPLACEMENTS if replacements is None else replacements

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        replacement = self._replacements.get(func, func) if func.__hash__ else func
        return replacement(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    # In torch it has no forward rule, and reverse over reverse treats |v| as a constant.
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    *gradients: bool,
    **more: bool,
) -> Tensor:
    # Gradients in torch may be sparse or scaled by frequency; here they are plain.
    rows = functional.embedding(input, weight, None, max_norm, norm_type)
    if padding_idx is None:
        return rows
    # The row of the padding has no gradient in torch, but a tangent. Here it is a constant.
    padding = (input == padding_idx % len(weight)).unsqueeze(-1)
    return torch.where(padding, rows.detach(), rows)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    # In torch it has no second derivative. Here it is a sum of rows by number of bag.
    entries = input.flatten()
    rows = functional.embedding(entries, weight, None, max_norm, norm_type)
    place = torch.arange(len(entries), device=input.device)
    if offsets is None:
        count, bags = len(input), place // input.shape[1]
    else:
        count = len(offsets) - include_last_offset
        bags = torch.searchsorted(offsets[:count].contiguous(), place, right=True) - 1
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.flatten().unsqueeze(1)
    # Entries of the padding belong to an additional bag, which is dropped.
    if padding_idx is not None:
        bags = torch.where(entries == padding_idx % len(weight), count, bags)
    if mode == "max":
        return _largest_rows(rows, bags, count)
    sums = rows.new_zeros(count + 1, rows.shape[1]).index_add(0, bags, rows)[:count]
    if mode == "sum":
        return sums
    ones = rows.new_ones(len(bags))
    sizes = rows.new_zeros(count + 1).index_add(0, bags, ones)[:count]
    return sums / sizes.clamp_min(1).unsqueeze(1)


def _largest_rows(rows: Tensor, bags: Tensor, count: int) -> Tensor:
    """Return the largest entry of each column in each bag; zero for an empty bag."""
    number, width = rows.shape
    with torch.no_grad():
        values, index = rows.detach(), bags.unsqueeze(1).expand(number, width)
        low = values.new_full((count + 1, width), -math.inf)
        largest = low.scatter_reduce(0, index, values, "amax").gather(0, index)
        # The first of the entries that are largest, as in torch; beyond the last if there is none.
        place = torch.arange(number, device=rows.device).unsqueeze(1).expand(number, width)
        first = torch.full((count + 1, width), number, device=rows.device)
        first = first.scatter_reduce(
            0, index, torch.where(values == largest, place, number), "amin"
        )[:count]
    return torch.cat([rows, rows.new_zeros(1, width)]).gather(0, first)


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    # In torch it has no second derivative, unlike the same function by hardtanh.
    value = functional.hardtanh(input + 3, 0.0, 6.0) / 6
    return input.copy_(value) if inplace else value


def _constant_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training:
        axes = [axis for axis in range(input.ndim) if axis != 1]
        # Statistics in float32, as autocast has them.
        wide = torch.promote_types(input.dtype, torch.float32)
        running_var, running_mean = torch.var_mean(input.detach().to(wide), axes, correction=0)
    return functional.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)


def constant_statistics() -> TorchFunctionMode:
    """Return a context in which batch norm takes the statistics of a batch as constants.

    Outputs are those of train mode. Derivatives of a sample leave out its part in the statistics,
    so samples do not depend on each other. Running statistics are not updated.
    """
    return _Formulas({functional.batch_norm: _constant_batch_norm})


_REPLACEMENTS: dict[Any, Callable[..., Tensor]] = {
    torch._weight_norm: _weight_norm,
    functional.embedding: _embedding,
    functional.embedding_bag: _embedding_bag,
    functional.hardsigmoid: _hardsigmoid,
}


class WrittenOut(TorchFunctionMode):
    """Notes in ``used`` whether operations are called that have no second derivative in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.used |= func in (functional.embedding_bag, functional.hardsigmoid)
        return func(*args, **(kwargs or {}))


def _needs_formulas(module: nn.Module) -> bool:
    plain = not isinstance(module, nn.Embedding) or not (
        module.padding_idx is not None or module.sparse or module.scale_grad_by_freq
    )
    hooks = module._forward_pre_hooks.values()
    normed = isinstance(module, _WeightNorm) or any(isinstance(hook, WeightNorm) for hook in hooks)
    return normed or not plain
