r"""Gradients of single samples by the structure of the network, and sums of their squares.

The derivative of a loss in the outputs, or each column of a root of its Hessian, costs a backward
pass down to the outputs of the modules. The gradients of samples then follow by a rule for each
kind of module. A plan says which modules have one, and is checked on a few samples.

Reference: Dangel, Kunstner and Hennig (2020).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from ritz._core.batches import is_rows
from ritz._core.checks import is_below
from ritz._core.modes import recording
from ritz.curvature import _sample_gradients as rules
from ritz.curvature._losses import known_loss
from ritz.curvature._modes import LIMITS, UNSUITABLE, Context, Params, attempt
from ritz.curvature._risk import Risk
from ritz.curvature._sample_gradients import ForwardPass, forward_pass, full_name, owners
from ritz.operators import Exact
from ritz.operators._shared import Quantity

Columns = Callable[[int, ForwardPass], Tensor]  # (number, pass) of a batch to (c, *outputs.shape)
Parts = Iterator[tuple[dict[str, Tensor], Params]]  # derivatives by module; gradients by name
ELSEWHERE = "another process has no closed form"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the gradients of single samples are computed.

    Attributes:
        modules: Modules that own chosen parameters and have a rule, with the parameters' names.
        by_sample: Which arguments of each module have one row per sample.
        whole: Parameters that are not used by exactly one call of their module. For these the
            whole model is differentiated, sample by sample.
        columns: Number of outputs per sample.
        gap: Why gradients of single samples are not possible, or ``""``.
    """

    modules: dict[str, tuple[str, ...]] = field(default_factory=dict)
    by_sample: dict[str, tuple[int, ...]] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    columns: int = 0
    gap: str = ""

    def note(self, passes: int | None = None) -> str:
        """Return the plan in words, for one pass per output unless their number is given."""
        count = self.columns if passes is None else passes
        text = f"structure: {count} backward pass{'es' * (count > 1)} per batch"
        if self.whole:
            few = ", ".join(self.whole[:3]) + (", ..." if len(self.whole) > 3 else "")
            text += f"; through the whole model for {few}, which no rule covers"
        return text


# ------------------------------------------------------------------------------------------
# The plan: which modules have a rule that gives the right gradients.


def structure_plan(risk: Risk, *, roots: bool = True) -> Plan:
    """Plan how to compute sample gradients, and check the plan on a few samples.

    Args:
        risk: The loss at a point.
        roots: The columns are those of a root: the loss must be known, and outputs not too many.
    """
    plan = _plan(risk, roots)
    # All processes must agree. If one cannot use a rule, none does.
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
        few = context.rows(slice(0, LIMITS.checked_samples))
        with risk.settings():
            return _checked_plan(risk, few, LIMITS.max_columns if roots else None)
    return Plan(modules=owners(list(risk.space.shapes)))


def _checked_plan(risk: Risk, few: Context, max_columns: int | None) -> Plan:
    r"""Compare :math:`\sum_i r_i g_i` with one gradient, for random weights and cotangents.

    The comparison fails if a parameter is used elsewhere too, if a module does not do what its
    class says, if samples lie along another axis, or if samples depend on each other.
    """
    modules = owners(list(risk.space.shapes))
    recorded_pass = forward_pass(risk, few, _untied(risk.model, modules))
    outputs = recorded_pass.outputs
    if not is_rows(outputs, few.size):
        return Plan(gap="the outputs are not one tensor with a row for each sample")
    columns = outputs[0].numel()
    if max_columns is not None and columns > max_columns:
        return Plan(gap=f"{columns} outputs per sample: probes cost less than backward passes")
    rng = torch.Generator().manual_seed(0)
    cotangent = torch.randn(outputs.shape, generator=rng, dtype=torch.float64).to(outputs)
    weights = torch.rand(few.size, generator=rng, dtype=torch.float64).to(outputs) + 0.5
    weighted = cotangent * weights.view(-1, *(1,) * (cotangent.ndim - 1))
    expected = _gradient(risk, few, weighted)
    norm = torch.stack([value.double().norm() for value in expected.values()]).norm()
    eps = torch.finfo(risk.theta.dtype).eps

    def agrees(name: str, gradients: Tensor) -> bool:
        gap = (torch.tensordot(weights, gradients[0], 1) - expected[name]).double().norm()
        # Some gradients are pure roundoff, such as that of a bias before a softmax.
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
    # Not by torch.func, which cannot differentiate checkpointed activations.
    with recording():
        params = {name: value.detach().requires_grad_() for name, value in risk.params.items()}
        outputs = risk.evaluate(params, few)[0]
    if not outputs.requires_grad:
        return {name: torch.zeros_like(value) for name, value in params.items()}
    leaves = list(params.values())
    gradients = torch.autograd.grad(outputs, leaves, cotangent, materialize_grads=True)
    return dict(zip(params, gradients, strict=True))


def _untied(model: nn.Module, modules: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the modules that share no parameter with another module."""
    users: dict[int, set[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(value), set()).add(name.rpartition(".")[0])
    shared = {module for several in users.values() if len(several) > 1 for module in several}
    return {module: keys for module, keys in modules.items() if module not in shared}


# ------------------------------------------------------------------------------------------
# Passes over the data by a plan, and sums of squares.


def passes(risk: Risk, plan: Plan, columns: Columns) -> Iterator[tuple[float, ForwardPass, Parts]]:
    """Yield weight, forward pass and derivatives of each batch. Call inside ``settings``.

    The derivatives come in parts of the columns: by module, or as sample gradients
    ``(c, batch, *shape)`` of parameters for which the whole model is differentiated.
    """
    for index, context, weight in risk.contexts():
        full = forward_pass(risk, context, plan.modules)
        # An argument may have as many rows as there are samples by coincidence.
        same = {n: call for n, call in full.calls.items() if call.by_sample() == plan.by_sample[n]}
        full = replace(full, calls=same)
        by_rule = {full_name(name, key) for name in same for key in plan.modules[name]}
        whole = tuple(name for name in risk.space.shapes if name not in by_rule)
        yield weight, full, _parts(risk, context, full, columns(index, full), whole)


def _parts(
    risk: Risk, context: Context, full: ForwardPass, columns: Tensor, whole: tuple[str, ...]
) -> Parts:
    entries = sum(call.output.numel() for call in full.calls.values())
    for part in columns.split(max(1, LIMITS.derivatives // max(1, entries))):
        yield full.pull(part), {}
    if whole:
        for gradients in _whole_gradients(risk, context, whole, columns):
            yield {}, gradients


def _whole_gradients(
    risk: Risk, context: Context, names: tuple[str, ...], columns: Tensor
) -> Iterator[Params]:
    """Yield gradients ``(c, batch, *shape)`` through the whole model, in parts."""
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
    """Return the columns of the root of the Hessian in the outputs."""
    known = known_loss(risk.loss_fn)
    if known is None:
        raise ValueError(f"loss_fn must be one whose Hessian is known, got {risk.loss_fn}")
    return lambda index, full: known.root(full.outputs.detach(), full.target)


def loss_column(risk: Risk, full: ForwardPass) -> Tensor:
    """Return the derivative of the loss of each sample in its outputs, over root N, as a column."""
    with recording():
        outputs = full.outputs.detach().requires_grad_()
        loss = risk.adapter.loss(outputs, full.target)
    # L = (1 / N) sum_i l_i: the derivative of L is that of l_i over N, and the mean of l_i's
    # squares needs it over sqrt(N).
    return torch.autograd.grad(loss, outputs)[0].unsqueeze(0) * math.sqrt(len(outputs))


def structure_squares(
    risk: Risk, quantity: Quantity, columns: Columns, *, roots: bool = False
) -> Exact:
    """Return the sums of squares of the gradients that columns give, without an L2 term.

    Args:
        risk: The loss at a point.
        quantity: ``diagonal``, the sum for each parameter, or ``trace``, that over all parameters.
        columns: Derivatives in the outputs of a batch.
        roots: See :func:`structure_plan`.
    """
    plan = structure_plan(risk, roots=roots)
    if plan.gap:
        return Exact(None, plan.gap)
    # A later batch may use the modules in other ways than the samples of the plan.
    total, problem = attempt(partial(_squares, risk, plan, quantity, columns), *UNSUITABLE)
    failed = torch.tensor(float(bool(problem)), device=risk.theta.device)
    if float(risk.sum_over_processes(failed)):
        return Exact(None, problem or ELSEWHERE)
    total = risk.sum_over_processes(total)
    note = plan.note() if roots else plan.note(passes=1)
    return Exact(float(total) if quantity == "trace" else total, note)


def _squares(risk: Risk, plan: Plan, quantity: Quantity, columns: Columns) -> Tensor:
    """Return the sums of squares over the batches of this process: the diagonal or its sum."""
    diagonal = {name: torch.zeros_like(value) for name, value in risk.params.items()}
    trace = torch.zeros((), dtype=torch.float64, device=risk.theta.device)
    layers = dict(risk.model.named_modules())
    with risk.settings():
        for weight, full, parts in passes(risk, plan, columns):
            for derivatives, gradients in parts:
                for name, deltas in derivatives.items():
                    layer, call = layers[name], full.calls[name]
                    if quantity == "trace":
                        # Cheaper than the diagonal: |delta a'| is known without forming delta a'.
                        trace += weight * rules.squared_norm(layer, call, deltas)
                        continue
                    for key, square in rules.squared_gradients(layer, call, deltas).items():
                        diagonal[full_name(name, key)].add_(square, alpha=weight)
                for name, gradient in gradients.items():
                    squares = gradient.square().sum((0, 1))
                    diagonal[name].add_(squares, alpha=weight)
                    trace += weight * squares.sum(dtype=torch.float64)
    return trace if quantity == "trace" else risk.space.flatten(diagonal)
