r"""Per-sample gradients of a network from the structure of its modules, and sums of their squares.

One backward pass computes the derivatives of the loss in the outputs of all modules. For a square
root of the Hessian in the outputs, there is one backward pass per column. The per-sample gradients
of a module follow from its input and these derivatives, by the rules in ``_module_gradients.py``. A
:class:`Plan` says which modules have a rule. It is checked on a few samples.

Reference: Dangel, Kunstner and Hennig (2020).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ritz._core.attempts import UNSUITABLE, attempt
from ritz._core.batches import is_rows
from ritz._core.checks import is_below
from ritz._core.modes import recording
from ritz.curvature import _module_gradients as rules
from ritz.curvature._losses import known_loss, layout_advice
from ritz.curvature._module_gradients import (
    Call,
    full_name,
    hooks_on_calls,
    mapped_gradients,
    owners,
)
from ritz.curvature._parameters import Context, Params, as_leaves, derivatives
from ritz.curvature._risk import Risk
from ritz.operators import Exact
from ritz.operators._shared import Quantity


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes of the plan for sample gradients."""

    # Largest number of backward passes per batch for an exact diagonal. XTrace with its default of
    # 32 probes costs as much: 64 products of about 1.3 gradients, or 4 passes, each.
    max_columns: int = 256
    # Number of samples on which a plan is checked. Two are enough to show that samples are coupled.
    checked_samples: int = 4


TUNING = Tuning()

# ------------------------------------------------------------------------------------------
# A forward pass that records the calls of modules.


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """Outputs and target of a batch, and the calls of modules that can be separated by sample."""

    outputs: Tensor
    target: Any
    calls: dict[str, Call]

    def pull(self, columns: Tensor) -> dict[str, Tensor]:
        """Return the derivatives ``(c, batch, ...)`` in the output of each module.

        Args:
            columns: Cotangents of the outputs, ``(c, *outputs.shape)``. Each costs a backward pass.
        """
        points = [call.output for call in self.calls.values()]
        if not points:
            return {}
        pull = partial(torch.autograd.grad, self.outputs, points, materialize_grads=True)
        passes = [pull(column, retain_graph=True) for column in columns]
        return dict(zip(self.calls, map(torch.stack, zip(*passes, strict=True)), strict=True))


def forward_pass(risk: Risk, context: Context, modules: dict[str, tuple[str, ...]]) -> ForwardPass:
    """Evaluate a batch and record the calls of modules. Call inside :meth:`Risk.settings`.

    A module is left out unless it is called exactly once and returns one tensor with one row per
    sample.
    """
    calls: dict[str, list[Call]] = {name: [] for name in modules}
    state, layers = risk.params | context.constants, dict(risk.model.named_modules())

    def record(name: str, args: Any, kwargs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        point = output if output.requires_grad else output.detach().requires_grad_()
        prefix = f"{name}." if name else ""
        inner = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
        call = Call(args=args, kwargs=kwargs, output=point, state=inner, chosen=modules[name])
        calls[name].append(call)
        return point.clone()  # the next operation may be in place

    with recording(), hooks_on_calls({name: layers[name] for name in modules}, record):
        outputs, target = risk.evaluate(risk.params, context)
    single = {name: each[0] for name, each in calls.items() if len(each) == 1}
    by_row = {n: c for n, c in single.items() if is_rows(c.output, context.size) and c.by_sample()}
    return ForwardPass(outputs=outputs, target=target, calls=by_row)


# ------------------------------------------------------------------------------------------
# The plan: which modules have a rule that gives the right gradients.

# From index and forward pass of a batch to cotangents of its outputs, (c, *outputs.shape).
Columns = Callable[[int, ForwardPass], Tensor]
# Derivatives in the outputs of modules, by module, and per-sample gradients, by parameter.
Parts = Iterator[tuple[dict[str, Tensor], Params]]
ELSEWHERE = "another process has no closed form"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How per-sample gradients are computed.

    Attributes:
        modules: The modules whose gradients follow by a rule, with the names of their parameters.
        by_sample: Which arguments of each module have one row per sample.
        whole: The other parameters, such as those of modules that are called twice. For these the
            whole model is differentiated, sample by sample.
        columns: Number of outputs per sample.
        gap: Why per-sample gradients are not possible, or ``""``.
    """

    modules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    by_sample: dict[str, tuple[int, ...]] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    columns: int = 0
    gap: str = ""

    def note(self, passes: int | None = None) -> str:
        """Return the plan in words. ``passes`` defaults to one backward pass per output."""
        count = self.columns if passes is None else passes
        text = f"structure: {count} backward pass{'es' * (count > 1)} per batch"
        if self.whole:
            few = ", ".join(self.whole[:3]) + (", ..." if len(self.whole) > 3 else "")
            text += f"; through the whole model for {few}, which no rule covers"
        return text


def structure_plan(risk: Risk, *, roots: bool = True) -> Plan:
    """Plan how to compute per-sample gradients, and check the plan on a few samples.

    Args:
        risk: A :class:`Risk`.
        roots: Whether the columns are those of a square root of the Hessian in the outputs. The
            loss must then be known, and the number of outputs is limited.
    """
    plan = _plan(risk, roots)
    # All processes must use the same rules. If one process cannot use a rule, no process does.
    flags = [bool(plan.gap)] + [name in plan.whole for name in risk.space.shapes]
    counts = torch.tensor(flags, dtype=torch.float64, device=risk.theta.device)
    gap, *whole = risk.sum_over_processes(counts).tolist()
    names = tuple(name for name, flag in zip(risk.space.shapes, whole, strict=True) if flag)
    modules = {
        module: keys
        for module, keys in plan.modules.items()
        if not {full_name(module, key) for key in keys} & set(names)
    }
    reason = plan.gap or (ELSEWHERE if gap else "")
    return replace(plan, modules=modules, whole=names, gap=reason)


def _plan(risk: Risk, roots: bool) -> Plan:
    if roots and known_loss(risk.loss_fn) is None:
        return Plan(gap="the Hessian of this loss in the outputs is not known in closed form")
    if not risk.separable:
        return Plan(gap="batch norm in train mode couples samples")
    for _, context, _ in risk.contexts():
        few = context.rows(slice(0, TUNING.checked_samples))
        with risk.settings():
            return _checked_plan(risk, few, TUNING.max_columns if roots else None)
    return Plan(modules=owners(list(risk.space.shapes)))


def _checked_plan(risk: Risk, few: Context, max_columns: int | None) -> Plan:
    r"""Compare :math:`\sum_i r_i g_i` with a gradient of the batch, for random :math:`r_i`.

    The two differ if a parameter is also used outside its module, if a module does not do what its
    class suggests, if samples lie along another axis, or if samples depend on each other.
    """
    modules = owners(list(risk.space.shapes))
    recorded_pass = forward_pass(risk, few, _unshared(risk.model, modules))
    outputs = recorded_pass.outputs
    if not is_rows(outputs, few.size):
        return Plan(gap="the outputs are not one tensor with a row for each sample")
    columns = outputs[0].numel()
    if max_columns is not None and columns > max_columns:
        gap = f"{columns} outputs per sample: probes cost less than backward passes"
        return Plan(columns=columns, gap=gap)
    rng = torch.Generator().manual_seed(0)
    cotangent = torch.randn(outputs.shape, generator=rng, dtype=torch.float64).to(outputs)
    weights = torch.rand(few.size, generator=rng, dtype=torch.float64).to(outputs) + 0.5
    weighted = cotangent * weights.view(-1, *(1,) * (cotangent.ndim - 1))
    expected = _gradient(risk, few, weighted)
    norm = torch.stack([value.double().norm() for value in expected.values()]).norm()
    eps = torch.finfo(risk.theta.dtype).eps

    def agrees(name: str, gradients: Tensor) -> bool:
        gap = (torch.tensordot(weights, gradients[0], 1) - expected[name]).double().norm()
        # The second term allows for gradients that are pure roundoff, such as that of the bias of a
        # constant shift before a softmax.
        return is_below(gap, 10 * eps**0.5 * expected[name].double().norm() + 100 * eps * norm)

    good, layers = {}, dict(risk.model.named_modules())
    pulled, _ = attempt(lambda: recorded_pass.pull(cotangent[None]), *UNSUITABLE)
    for name, deltas in (pulled or {}).items():
        call = recorded_pass.calls[name]
        rule = partial(rules.sample_gradients, layers[name], call, deltas)
        gradients, _ = attempt(rule, *UNSUITABLE)
        if gradients and all(agrees(full_name(name, key), gradients[key]) for key in modules[name]):
            good[name] = modules[name]
    by_module = {full_name(module, key) for module, keys in good.items() for key in keys}
    whole = tuple(name for name in risk.space.shapes if name not in by_module)
    gap = ""
    if whole:
        gradients = partial(_whole_gradients, risk, few, whole, cotangent[None])
        parts, problem = attempt(lambda: list(gradients()), *UNSUITABLE)
        if problem:
            gap = f"vmap fails for the sample gradients of {whole[0]}: {problem}"
        elif not all(agrees(name, torch.cat([p[name] for p in parts], 1)) for name in whole):
            gap = "the samples of a batch depend on each other"
    by_sample = {name: recorded_pass.calls[name].by_sample() for name in good}
    return Plan(modules=good, by_sample=by_sample, whole=whole, columns=columns, gap=gap)


def _gradient(risk: Risk, few: Context, cotangent: Tensor) -> Params:
    # Plain autograd, because torch.func cannot differentiate checkpointed activations.
    with recording():
        leaves = as_leaves(risk.params)
        return derivatives(risk.evaluate(leaves, few)[0], leaves, cotangent)


def _unshared(model: nn.Module, modules: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the modules that do not share a parameter with another module."""
    users: dict[int, set[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(value), set()).add(name.rpartition(".")[0])
    shared = {module for several in users.values() if len(several) > 1 for module in several}
    return {module: keys for module, keys in modules.items() if module not in shared}


# ------------------------------------------------------------------------------------------
# Passes over the data by a plan, and sums of squares.


def passes(risk: Risk, plan: Plan, columns: Columns) -> Iterator[tuple[float, ForwardPass, Parts]]:
    """Yield weight, forward pass and derivatives of each batch. Call inside ``risk.settings()``.

    The derivatives come in parts of the columns. A part holds either the derivatives in the outputs
    of modules, or per-sample gradients ``(c, batch, *shape)`` of parameters without a rule.
    """
    for index, context, weight in risk.contexts():
        full = forward_pass(risk, context, plan.modules)
        # Leave out calls where another argument has as many rows as there are samples by accident.
        same = {n: call for n, call in full.calls.items() if call.by_sample() == plan.by_sample[n]}
        full = replace(full, calls=same)
        by_rule = {full_name(name, key) for name in same for key in plan.modules[name]}
        whole = tuple(name for name in risk.space.shapes if name not in by_rule)
        yield weight, full, _parts(risk, context, full, columns(index, full), whole)


def _parts(
    risk: Risk, context: Context, full: ForwardPass, columns: Tensor, whole: tuple[str, ...]
) -> Parts:
    entries = sum(call.output.numel() for call in full.calls.values())
    for part in columns.split(max(1, rules.TUNING.derivatives // max(1, entries))):
        yield full.pull(part), {}
    if whole:
        for gradients in _whole_gradients(risk, context, whole, columns):
            yield {}, gradients


def _whole_gradients(
    risk: Risk, context: Context, names: tuple[str, ...], columns: Tensor
) -> Iterator[Params]:
    """Yield per-sample gradients ``(c, batch, *shape)`` of parameters through the whole model."""
    params = risk.params
    chosen = {name: params[name] for name in names}
    for part, some in rules.chunks(columns, risk.space.size):
        yield rules.mapped_gradients(
            lambda point, sample: risk.evaluate(params | point, context.on(sample))[0],
            chosen,
            context.samples(some),
            columns[part, some],
        )


def root_columns(risk: Risk) -> Columns:
    """Return the columns of a square root of the Hessian of the loss in the outputs."""
    known = known_loss(risk.loss_fn)
    if known is None:
        raise ValueError(
            "loss_fn must be cross_entropy, binary_cross_entropy_with_logits or mse_loss without "
            f"class weights, whose Hessians are known, got {risk.loss_fn}"
            f"{layout_advice(risk.loss_fn)}"
        )
    return lambda index, full: known.root(full.outputs.detach(), full.target)


def loss_columns(risk: Risk) -> Columns:
    """Return the derivative of each sample loss in its outputs, over root N, as one column."""

    def columns(index: int, full: ForwardPass) -> Tensor:
        with recording():
            outputs = full.outputs.detach().requires_grad_()
            loss = risk.adapter.loss(outputs, full.target)
        # L = (1 / N) sum_i l_i, so the derivative of L in row i is that of l_i divided by N. The
        # mean of the squares is the sum of squares of derivatives divided by sqrt(N).
        return torch.autograd.grad(loss, outputs)[0].unsqueeze(0) * math.sqrt(len(outputs))

    return columns


def structure_squares(
    risk: Risk, quantity: Quantity, columns: Columns, *, roots: bool = False
) -> Exact:
    """Return the sum of squares of per-sample gradients, without the L2 term.

    Args:
        risk: A :class:`Risk`.
        quantity: ``diagonal`` for the sum of each parameter, ``trace`` for that of all parameters.
        columns: Returns the derivatives in the outputs of a batch.
        roots: See :func:`structure_plan`.
    """
    plan = structure_plan(risk, roots=roots)
    if plan.gap:
        return Exact(None, plan.gap)
    # A later batch may use the modules in another way than the samples of the plan.
    total, problem = attempt(partial(_squares, risk, plan, quantity, columns), *UNSUITABLE)
    failed = torch.tensor(float(bool(problem)), device=risk.theta.device)
    if float(risk.sum_over_processes(failed)):
        return Exact(None, problem or ELSEWHERE)
    total = risk.sum_over_processes(total)
    note = plan.note() if roots else plan.note(passes=1)
    return Exact(float(total) if quantity == "trace" else total, note)


def _squares(risk: Risk, plan: Plan, quantity: Quantity, columns: Columns) -> Tensor:
    """Return the sum of squares over the batches of this process: the diagonal or the trace."""
    diagonal = {name: torch.zeros_like(value) for name, value in risk.params.items()}
    trace = torch.zeros((), dtype=torch.float64, device=risk.theta.device)
    layers = dict(risk.model.named_modules())
    with risk.settings():
        for weight, full, parts in passes(risk, plan, columns):
            for derivatives, gradients in parts:
                for name, deltas in derivatives.items():
                    layer, call = layers[name], full.calls[name]
                    if quantity == "trace":
                        # Cheaper than the diagonal: |delta a'| does not require delta a'.
                        trace += weight * rules.squared_norm(layer, call, deltas)
                        continue
                    for key, square in rules.squared_gradients(layer, call, deltas).items():
                        diagonal[full_name(name, key)].add_(square, alpha=weight)
                for name, gradient in gradients.items():
                    squares = gradient.square().sum((0, 1))
                    diagonal[name].add_(squares, alpha=weight)
                    trace += weight * squares.sum(dtype=torch.float64)
    return trace if quantity == "trace" else risk.space.flatten(diagonal)


def sample_gradient_parts(
    risk: Risk, context: Context, chunk_size: int, problems: list[str]
) -> Iterator[Params]:
    """Yield the gradients of the samples of a batch in chunks ``(c, *shape)``, by parameter.

    The gradients are vectorised with vmap. If this fails, the reason is appended to ``problems``
    and the gradients are computed one by one.
    """

    def loss(params: Params, sample: Any) -> Tensor:
        return risk.batch_loss(params, context.on(sample)).unsqueeze(0)

    for start in range(0, context.size, chunk_size):
        stop = min(context.size, start + chunk_size)
        if not problems:
            samples = context.samples(slice(start, stop))
            ones = risk.theta.new_ones(1, stop - start)
            call = partial(mapped_gradients, loss, risk.params, samples, ones)
            gradients, problem = attempt(call, RuntimeError, NotImplementedError, ValueError)
            if not problem:
                yield {name: gradient[0] for name, gradient in gradients.items()}
                continue
            problems.append(problem)
        rows = (context.rows(slice(row, row + 1)) for row in range(start, stop))
        alone = [risk.space.unflatten(risk.batch_gradient(row)[0]) for row in rows]
        yield {name: torch.stack([each[name] for each in alone]) for name in risk.space.shapes}
