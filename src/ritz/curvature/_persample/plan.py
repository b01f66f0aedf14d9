"""How gradients of single samples are found in a network, and whether they can be."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ritz._core.batches import is_rows, take_rows
from ritz.curvature._persample.capture import captured, full_name, owners
from ritz.curvature._persample.rules import chunks, mapped_gradients, sample_gradients
from ritz.curvature._risk import Context, Params, Risk, recognised, recorded

MAX_COLUMNS = 256  # backward passes beyond which random probes are cheaper


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the gradients of single samples are found.

    Attributes:
        modules: Modules that own chosen parameters and have a rule, with the parameters' names.
        by_sample: Which of the arguments of each have a row for each sample.
        whole: Parameters that are not used by one call of the module that owns them: for these
            the whole model is differentiated, sample by sample.
        columns: Outputs of a sample.
        gap: Why it is not possible, empty where it is.
    """

    modules: dict[str, tuple[str, ...]]
    by_sample: dict[str, tuple[int, ...]] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    columns: int = 0
    gap: str = ""

    def note(self) -> str:
        """The plan in words."""
        count = "1 column" if self.columns == 1 else f"{self.columns} columns"
        text = f"structure: {count} of the root of the output Hessian, one backward pass each"
        if self.whole:
            few = ", ".join(self.whole[:3]) + (", ..." if len(self.whole) > 3 else "")
            text += f"; through the whole model for {few}: not used by one call of a module alone"
        return text


def structure_plan(risk: Risk, *, roots: bool = True) -> Plan:
    """Find how sample gradients can be had, and check it on a few samples by one gradient.

    Args:
        risk: The loss at a point.
        roots: Whether the columns are to be those of a root, of a known loss and not too many.
    """
    found = _plan(risk, roots)
    # All processes must do the same: what one cannot do, or only by the whole model, none does.
    flags = [bool(found.gap)] + [name in found.whole for name in risk.space.shapes]
    gap, *whole = risk.reduced(torch.tensor(flags, device=risk.theta.device).double()).tolist()
    names = tuple(name for name, flag in zip(risk.space.shapes, whole, strict=True) if flag)
    left = {module: own for module, own in found.modules.items()
            if not {full_name(module, name) for name in own} & set(names)}  # fmt: skip
    reason = found.gap or ("another process found it impossible" if gap else "")
    return replace(found, modules=left, whole=names, gap=reason)


def whole_gradients(
    risk: Risk, context: Context, names: tuple[str, ...], columns: Tensor
) -> Iterator[Params]:
    """Gradients ``(c, batch, *shape)`` through the whole model, some columns and rows at a time."""
    params, size = risk.params, columns.shape[1]
    chosen = {name: params[name] for name in names}

    def forward(point: Params, sample: Any) -> Tensor:
        batch, masks = sample
        found: Tensor = risk.evaluate(params | point, replace(context, batch=batch, masks=masks))[0]
        return found

    for part, some in chunks(columns, risk.space.size):
        samples = take_rows((context.batch, context.masks), some, size)
        yield mapped_gradients(forward, chosen, samples, columns[part, some])


def _plan(risk: Risk, roots: bool) -> Plan:
    modules = owners(risk)
    if roots and recognised(risk.loss_fn) is None:
        return Plan(modules={}, gap="the Hessian of the loss in the outputs has no known root")
    if not risk.separable:
        return Plan(modules={}, gap="batch norm in train mode couples samples")
    for index, context, _ in risk.contexts():
        size = risk.batch_sizes[index]
        part = slice(0, min(4, size))
        batch, masks = take_rows((context.batch, context.masks), part, size)
        few = replace(context, batch=batch, masks=masks)
        with risk.settings():
            return _checked(risk, few, part.stop, modules, MAX_COLUMNS if roots else None)
    return Plan(modules=modules)


def _checked(
    risk: Risk, few: Context, size: int, modules: dict[str, tuple[str, ...]], most: int | None
) -> Plan:
    r"""Compare :math:`\sum_i r_i g_i` with one gradient, for random weights and cotangents.

    It tells a parameter that is used elsewhere too, a module that is not what its class says,
    samples along another axis, and samples that are coupled.
    """
    seen = captured(risk, few, _untied(risk.model, modules), size)
    outputs = seen.outputs
    if not isinstance(outputs, Tensor) or not is_rows(outputs, size):
        return Plan(modules={}, gap="the outputs are not one tensor with a row for each sample")
    columns = outputs[0].numel()
    if most is not None and columns > most:
        gap = f"probes cost less than backward passes for {columns} outputs a sample"
        return Plan(modules={}, gap=gap)
    generator = torch.Generator().manual_seed(0)
    along = torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(outputs)
    weights = torch.rand(size, generator=generator, dtype=torch.float64).to(outputs) + 0.5
    weighted = along * weights.view(-1, *(1,) * (along.ndim - 1))
    same = _Comparison(weights, _gradient(risk, few, weighted))
    good, layers = {}, dict(risk.model.named_modules())
    for name, deltas in (_tried(lambda: seen.pull(along[None])) or {}).items():
        found = _tried(partial(sample_gradients, layers[name], seen.calls[name], deltas))
        if found and all(same(full_name(name, own), found[own]) for own in modules[name]):
            good[name] = modules[name]
    kept = {full_name(module, own) for module, names in good.items() for own in names}
    whole = tuple(name for name in risk.space.shapes if name not in kept)
    gap = _whole_gap(risk, few, whole, along, same)
    by_sample = {name: seen.calls[name].by_sample() for name in good}
    return Plan(modules=good, by_sample=by_sample, whole=whole, columns=columns, gap=gap)


def _gradient(risk: Risk, few: Context, cotangent: Tensor) -> Params:
    with recorded():
        params = {name: value.detach().requires_grad_() for name, value in risk.params.items()}
        outputs = risk.evaluate(params, few)[0]
    if not outputs.requires_grad:
        return {name: torch.zeros_like(value) for name, value in params.items()}
    found = torch.autograd.grad(outputs, list(params.values()), cotangent, materialize_grads=True)
    return dict(zip(params, found, strict=True))


def _whole_gap(
    risk: Risk,
    few: Context,
    whole: tuple[str, ...],
    along: Tensor,
    same: "_Comparison",
) -> str:
    if not whole:
        return ""
    found = _tried(lambda: list(whole_gradients(risk, few, whole, along[None])))
    if found is None:
        return f"torch cannot map the gradient in {whole[0]} over samples"
    apart = all(same(name, torch.cat([part[name] for part in found], 1)) for name in whole)
    return "" if apart else "the samples of a batch depend on each other"


def _tried(call: Callable[[], Any]) -> Any:
    """What a call returns, or ``None`` where it fails as unsuitable modules do."""
    try:
        return call()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return None


class _Comparison:
    """Whether gradients of samples, summed with weights, are the gradient that was expected."""

    def __init__(self, weights: Tensor, expected: Params) -> None:
        self.weights, self.expected = weights, expected
        self.size = torch.stack([value.double().norm() for value in expected.values()]).norm()

    def __call__(self, name: str, gradients: Tensor) -> bool:
        expected = self.expected[name]
        gap = (torch.tensordot(self.weights, gradients[0], 1) - expected).double().norm()
        eps = torch.finfo(expected.dtype).eps
        # Some gradients are zero but for roundoff, such as that of a bias ahead of a softmax.
        return bool(gap <= 10 * eps**0.5 * expected.double().norm() + 100 * eps * self.size)


def _untied(model: nn.Module, modules: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The modules that share no parameter with another."""
    uses: dict[int, set[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(value), set()).add(name.rpartition(".")[0])
    shared = {module for users in uses.values() if len(users) > 1 for module in users}
    return {module: names for module, names in modules.items() if module not in shared}
