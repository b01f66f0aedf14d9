r"""What goes into the modules of a network and what comes out, and derivatives by the latter.

The gradient of a sample in the parameters of a module needs nothing but its input and the
derivative :math:`\delta` by its output: backward passes that stop there serve every module at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ritz._core.batches import is_rows
from ritz.curvature._risk import Context, Params, Risk, recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The one call of a module in a forward pass.

    Attributes:
        args: What it was called with.
        kwargs: Likewise.
        output: What came out, ``(batch, ...)``.
        state: Parameters and buffers that it was called with, by their names in the module.
        chosen: Which of its own parameters vary.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    state: Params
    chosen: tuple[str, ...]

    def by_sample(self) -> tuple[int, ...]:
        """Which leaves of what it was called with have as many rows as there are samples."""
        leaves = tree_leaves((self.args, self.kwargs))
        return tuple(i for i, leaf in enumerate(leaves) if is_rows(leaf, len(self.output)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A forward pass: its outputs and target, and the modules called once on whole samples."""

    outputs: Tensor
    target: Any
    calls: dict[str, Call]

    def pull(self, columns: Tensor) -> dict[str, Tensor]:
        """Derivatives ``(c, batch, ...)`` by the output of every module, along every column.

        Args:
            columns: Cotangents of the outputs, ``(c, *outputs.shape)``: a backward pass for each.
        """
        points = [call.output for call in self.calls.values()]
        if not points:
            return {}
        if not self.outputs.requires_grad:  # nor does it depend on any module
            return {
                name: call.output.new_zeros(len(columns), *call.output.shape)
                for name, call in self.calls.items()
            }
        passes = [
            torch.autograd.grad(
                self.outputs, points, column, retain_graph=True, materialize_grads=True
            )
            for column in columns
        ]
        return {
            name: torch.stack(deltas)
            for name, deltas in zip(self.calls, zip(*passes, strict=True), strict=True)
        }


def owners(risk: Risk, names: Sequence[str] | None = None) -> dict[str, tuple[str, ...]]:
    """The modules that own chosen parameters, with the names these have there, in flat order."""
    found: dict[str, tuple[str, ...]] = {}
    for name in risk.space.shapes if names is None else names:
        module, _, own = name.rpartition(".")
        found[module] = (*found.get(module, ()), own)
    return found


def full_name(module: str, own: str) -> str:
    """The name in the model of a module's parameter."""
    return f"{module}.{own}" if module else own


def captured(
    risk: Risk, context: Context, modules: dict[str, tuple[str, ...]], size: int
) -> Captured:
    """Run a batch of ``size`` samples; inside ``risk.settings()``.

    A module is left out that is not called, or several times, or does not return one tensor with
    a row for each sample.
    """
    calls: dict[str, list[Call]] = {name: [] for name in modules}
    with recorded(), _hooked(risk, context, modules, calls):
        outputs, target = risk.evaluate(risk.params, context)
    single = {name: found[0] for name, found in calls.items() if len(found) == 1}
    kept = {name: call for name, call in single.items()
            if is_rows(call.output, size) and call.by_sample()}  # fmt: skip
    return Captured(outputs=outputs, target=target, calls=kept)


@contextmanager
def _hooked(
    risk: Risk,
    context: Context,
    modules: dict[str, tuple[str, ...]],
    calls: dict[str, list[Call]],
) -> Iterator[None]:
    state = risk.params | context.constants
    layers = dict(risk.model.named_modules())
    with ExitStack() as stack:
        for name, chosen in modules.items():
            prefix = f"{name}." if name else ""
            own = {
                key.removeprefix(prefix): value
                for key, value in state.items()
                if key.startswith(prefix)
            }
            hook = _hook(calls[name], own, chosen)
            stack.callback(layers[name].register_forward_hook(hook, with_kwargs=True).remove)
        yield


def _hook(calls: list[Call], state: Params, chosen: tuple[str, ...]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        point = output if output.requires_grad else output.detach().requires_grad_()
        args, kwargs = tree_map(_detached, (args, kwargs))
        calls.append(Call(args=args, kwargs=kwargs, output=point, state=state, chosen=chosen))
        return point.clone()  # what follows may write into it

    return hook


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
