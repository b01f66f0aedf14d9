"""Hooks that capture inputs and output derivatives of layers in ordinary passes of training.

:func:`ritz.curvature.kfac` evaluates the model itself, and its hooks insert copies into the graph.
The hooks of this module run in the forward and backward passes of the user. They must not change
the graph (compiled models, checkpoints, in-place operations), must not keep the model alive, and
must do nothing in copies of the model. The factors of both are computed by
``curvature/_kfac_factors.py``.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils.hooks import RemovableHandle

from ritz._core.batches import tensors
from ritz.curvature._shared import CONVOLUTIONS, Call
from ritz.optim._kfac.blocks import Block, LayerCall, Pass

Receive = Callable[[Block, LayerCall, Pass], None]
Arrange = Callable[[Tensor], Tensor]  # of a derivative, as the block expects it


@final
class Hook:
    """A hook that calls a method of an object, as long as the object exists.

    In a copied or loaded model the hook does nothing, because the copy has another optimiser.
    """

    def __init__(self, owner: object, method: str, *bound: Any) -> None:
        self._owner, self._method, self._bound = weakref.ref(owner), method, bound

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._method)(*self._bound, *args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return _nothing

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _make_nothing, ()


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _make_nothing() -> Any:
    return _nothing


def _remove(handles: "list[RemovableHandle] | list[_Linears]") -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


@final
class _Arrival:
    """Tensor hook that receives the derivative in an output. It stores the input until then."""

    def __init__(
        self, capture: "Capture", block: Block, x: Tensor, of: Pass, arrange: Arrange
    ) -> None:
        self._capture, self._block, self._pass = weakref.ref(capture), block, of
        self._arrange = arrange
        self._version = x._version
        self._x: Tensor | None = x

    def __call__(self, delta: Tensor) -> None:
        capture = self._capture()
        if capture is None or not capture.active:
            return
        x, self._x = self._x, None
        if x is None:
            # The derivative of a sample would be the sum of both, but the first one is not stored.
            raise RuntimeError(
                f"K-FAC got a second backward pass through one forward pass, at layer "
                f"{self._block.name!r}: call backward() once, on the sum of the losses, and "
                "put any other pass, such as that of a gradient penalty, into "
                "'with optimizer.paused()'"
            )
        check_version(self._block, x, self._version)
        # A checkpointed layer has its own backward pass inside that of the model.
        if self._pass.backward is None:
            self._pass.backward = torch._C._current_graph_task_id()
        capture.deliver(self._block, x, [self._arrange(delta)], self._pass)


def check_version(block: Block, x: Tensor, version: int) -> None:
    """Raise if an input has been overwritten since the layer was called."""
    if x._version != version:
        raise RuntimeError(
            f"K-FAC needs the input of layer {block.name!r}, which was modified in place after the "
            "layer was called: use an operation that is not in place"
        )


@final
class Capture:
    """Hooks on the layers of a model, which can be switched on and off.

    While they are active, a forward pass in train mode records the input of each layer. The
    derivatives arrive in the backward pass, or from :meth:`pull`.

    Args:
        model: The model without wrappers.
        blocks: One for each layer.
        receive: Called with a block, its call with the derivatives in its output, and the pass.
        waits: Whether derivatives come from :meth:`pull` alone.
    """

    def __init__(
        self, model: nn.Module, blocks: list[Block], receive: Receive, *, waits: bool
    ) -> None:
        self.active, self._receive, self._waits = False, receive, waits
        self.scaled = False  # whether a gradient scaler is known
        self._pass: Pass | None = None
        self._inside = False  # whether a forward pass of the model is running
        self._records: list[tuple[Block, Tensor, int, GradientEdge, Pass, Arrange]] = []
        self._linears: list[_Linears] = []  # of the attention whose forward pass is running
        self._handles = [
            model.register_forward_pre_hook(Hook(self, "begin"), with_kwargs=True, prepend=True)
        ]
        self._model = weakref.ref(model)
        for block in blocks:
            hook = Hook(self, "note", block)
            self._handles.append(block.module.register_forward_hook(hook, with_kwargs=True))
        self._by_param: dict[Tensor, Block] = {
            p: block for block in blocks for p in block.params.values()
        }
        for module in filter(is_attention, model.modules()):
            hook = Hook(self, "enter")
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            hook = Hook(self, "leave")
            self._handles.append(module.register_forward_hook(hook, always_call=True))
        # Registered last, because the model may be a layer itself.
        hook = Hook(self, "end")
        self._handles.append(model.register_forward_hook(hook, with_kwargs=True, always_call=True))
        # The hooks refer to the blocks, so they are removed together with the optimiser.
        weakref.finalize(self, _remove, self._handles)
        weakref.finalize(self, _remove, self._linears)

    def remove(self) -> None:
        """Remove all hooks."""
        self.active = False
        self.forget()
        _remove(self._handles)

    def forget(self) -> None:
        """Discard recorded inputs whose derivatives have not arrived."""
        self._pass, self._inside, self._records = None, False, []
        _remove(self._linears)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the number of samples at the beginning of a forward pass."""
        # torch calls no hook after KeyboardInterrupt, which may have ended the last pass anywhere.
        _remove(self._linears)
        # The rows of a layer may include positions, but those of the model are samples.
        if self.active and torch.is_grad_enabled():
            rows = next((len(x) for x in tensors((args, kwargs)) if x.ndim), None)
            self._pass, self._inside = Pass(rows), True

    def end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record the end of a forward pass."""
        self._inside = False

    def note(self, block: Block, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record a call of a layer."""
        if self._is_noting():
            self._record(block, args[0] if args else kwargs["input"], output)

    def _is_noting(self) -> bool:
        model = self._model()
        if not self.active or model is None or not model.training:
            return False
        # Tensors inside a transform of torch.func must not be stored.
        return not torch._C._are_functorch_transforms_active()

    def enter(self, module: nn.MultiheadAttention, args: Any, kwargs: Any) -> None:
        """Record the linear layers of an attention from here on."""
        _remove(self._linears)  # an attention calls no other one
        if self._is_noting() and torch.is_grad_enabled():
            arrange = _arrangement(module, args[0] if args else kwargs["query"])
            linears = _Linears(Hook(self, "note_linear", arrange))
            self._linears.append(linears)
            linears.__enter__()  # type: ignore[no-untyped-call]

    def note_linear(
        self, arrange: Arrange, x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor
    ) -> None:
        """Record a call of a linear layer of an attention."""
        # Keys and values may have other inputs than queries. Their weights are then slices.
        owners = [t if t._base is None else t._base for t in (weight, bias) if t is not None]
        block = next((self._by_param[p] for p in owners if p in self._by_param), None)
        if block is None or not self._is_noting():
            return
        start = (weight.storage_offset() - owners[0].storage_offset()) // weight.stride(0)
        rest = len(owners[0]) - start - len(weight)

        def place(delta: Tensor) -> Tensor:
            # The other outputs of the layer do not depend on this input.
            return functional.pad(arrange(delta), (start, rest))

        self._record(block, arrange(x.detach()), output, place)

    def leave(self, module: nn.MultiheadAttention, args: Any, output: Any) -> None:
        """Record no more linear layers of an attention, also after an error inside it."""
        _remove(self._linears)

    def _record(
        self, block: Block, x: Tensor, output: Any, arrange: Arrange = lambda delta: delta
    ) -> None:
        # Without a gradient there is nothing to capture: no_grad, inference or frozen layers.
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        self._check_scale(x.device.type)
        # The backward pass calls checkpointed layers again, for the same samples.
        inside = self._inside or torch._C._current_graph_task_id() != -1
        x, of = x.detach(), (self._pass if inside else None) or Pass(None)
        if torch._C._current_graph_task_id() == -1:
            block.expect()
        if self._waits:
            edge = get_gradient_edge(output)
            self._records.append((block, x, x._version, edge, of, arrange))
        else:
            # A hook of the tensor, because a full backward hook of the module would forbid in-place
            # operations on the output.
            output.register_hook(_Arrival(self, block, x, of, arrange))

    def _check_scale(self, device: str) -> None:
        half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.half
        if half and not self.scaled:
            raise ValueError("scaler must be the GradScaler of the loss for autocast in float16, "
                             "got None: pass scaler= to KFAC")  # fmt: skip

    def pull(self, outputs: Tensor, columns: Iterator[Tensor]) -> None:
        """Compute and deliver the derivatives for all layers that were called since the last pull.

        Args:
            outputs: Outputs of the model.
            columns: Cotangents of the outputs. Each costs one backward pass.
        """
        records, self._records = self._records, []
        if not records:
            raise RuntimeError(
                "observe() needs a forward pass in train mode, with gradients, after the last call "
                "of observe(): call it once for each forward pass"
            )
        backward = object()
        edges = [record[3] for record in records]
        passes = [
            # Down to the outputs of the layers only. No gradients of weights are computed.
            torch.autograd.grad(outputs, edges, column, retain_graph=True, allow_unused=True)
            for column in columns
        ]
        for (block, x, version, _, of, arrange), *deltas in zip(records, *passes, strict=True):
            arrived = [arrange(delta) for delta in deltas if delta is not None]
            if arrived:
                check_version(block, x, version)
                of.backward = backward
                self.deliver(block, x, arrived, of)

    def deliver(self, block: Block, x: Tensor, deltas: list[Tensor], of: Pass) -> None:
        """Pass on the input and the derivatives of a call, with samples along the first axis."""
        # A layer may be called on a single sample without a batch axis.
        module = block.module
        alone = isinstance(module, nn.Linear) and x.ndim == 1
        alone = alone or (
            isinstance(module, CONVOLUTIONS) and x.ndim == len(module.kernel_size) + 1
        )
        alone = alone or (isinstance(module, nn.Embedding) and x.ndim == 0)
        if alone:
            # The input of the model then has no batch axis either.
            x, of = x.unsqueeze(0), Pass(None, backward=object())
        with self.paused(), torch.no_grad():
            columns = [
                (delta.unsqueeze(0) if alone else delta).detach().to(block.dtype).unsqueeze(0)
                for delta in deltas
            ]
            x = x.to(block.dtype) if x.is_floating_point() else x
            output = columns[0][0]  # of its shape
            call = Call(args=(x,), kwargs={}, output=output, state={}, chosen=block.keys)
            self._receive(block, (call, columns), of)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Capture nothing inside the block."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active


# ------------------------------------------------------------------------------------------
# torch's attention, whose linear layers are not modules that it calls.


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is ``nn.MultiheadAttention`` with the ``forward`` of torch."""
    kind = nn.MultiheadAttention
    return isinstance(module, kind) and type(module).forward is kind.forward


def _arrangement(module: nn.MultiheadAttention, query: Tensor) -> Arrange:
    """Return a function that gives tensors inside an attention the layout of its query.

    Inside, positions come before samples: ``(T, batch, e)``, or ``(T * batch, e)`` before the last
    linear layer. A single sample without a batch axis has one there.
    """
    batched, first = query.ndim == 3, module.batch_first
    batch = (query.shape[0] if first else query.shape[1]) if batched else 1

    def arrange(x: Tensor) -> Tensor:
        x = x.reshape(-1, batch, x.shape[-1])
        if not batched:
            return x[:, 0]
        return x.transpose(0, 1) if first else x

    return arrange


@final
class _Linears(TorchFunctionMode):
    """Reports the linear layers inside one call of torch's function of attention.

    After this call it does nothing, even if nobody could remove it.

    Args:
        note: Called with input, weight, bias and output of each.
    """

    def __init__(self, note: Callable[[Tensor, Tensor, Tensor | None, Tensor], None]) -> None:
        super().__init__()
        self._note, self._done = note, False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._done or func is not functional.multi_head_attention_forward:
            return func(*args, **(kwargs or {}))
        try:
            return _with_linear(func, self._linear)(*args, **(kwargs or {}))
        finally:
            self._done = True

    def remove(self) -> None:
        """Remove this mode, which need not be the innermost one, if it is active."""
        above = []
        while torch._C._len_torch_function_stack():
            mode = _pop_mode()
            if mode is self:
                break
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = functional.linear(x, weight, bias)
        self._note(x, weight, bias, output)
        return output


def _with_linear(function: Any, linear: Callable[..., Tensor]) -> Any:
    """Return the function of attention with another function in place of ``linear``.

    A mode cannot see the operations inside: torch switches it off for them. The code of torch runs
    with its own names instead, so that its results are the same, and torch is not modified.
    """
    names = {**function.__globals__, "linear": linear}
    for each in ("_in_projection_packed", "_in_projection", function.__name__):
        code = names[each]
        copied = FunctionType(code.__code__, names, each, code.__defaults__, code.__closure__)
        copied.__kwdefaults__ = code.__kwdefaults__
        names[each] = copied
    return names[function.__name__]
