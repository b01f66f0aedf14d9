"""`StepNoise`: gradient noise of a training step, from its own forward and backward pass.

Losses with random signs need one more backward pass through the graph of the step. Second moments
need the inputs of the modules and the derivatives in their outputs. Hooks record these during the
passes of the step.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ritz._core.batch_norm import batch_norms, evaluating
from ritz._core.batches import num_rows, take_rows
from ritz._core.distributed import all_sum, rank, world_size
from ritz._core.modes import arithmetic, recording
from ritz._core.random import epoch_seed
from ritz.curvature import _module_gradients as rules
from ritz.curvature._adapter import Adapter
from ritz.curvature._kfac import BlockRoot, LayerSums, block_root, times_root
from ritz.curvature._losses import KnownLoss, as_likelihood
from ritz.curvature._module_gradients import Call, full_name, hooks_on_calls, owners
from ritz.curvature._noise_kinds import (
    BY_GRADIENT,
    BY_MOMENTS,
    label_columns,
    random_signs,
    sign_columns,
)
from ritz.curvature._replaced_functions import constant_statistics
from ritz.curvature._risk import Risk
from ritz.curvature._sample_gradients import TUNING, structure_plan

Noise = dict[str, Tensor]  # by parameter
Roots = dict[str, BlockRoot]  # by the first parameter of a module, or by parameter
HALF = (torch.float16, torch.bfloat16)


@final
class StepGenerators:
    """Random generators of a step: one for numbers shared by all processes, one for each process.

    Their numbers depend on the number of the step alone, so that a resumed run draws the same ones.
    The generators are the same objects in all steps, because a CUDA graph draws from those that it
    was recorded with. A replay reads their seeds, which :meth:`begin` sets.

    Args:
        seed: Seed of the noise.
        device: Device of the weights, so that a step does not wait for numbers from the CPU.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self.shared, self.own = torch.Generator(device), torch.Generator(device)

    def begin(self, step: int) -> None:
        """Set the seeds for a step, counted from one."""
        for stream, generator in ((0, self.shared), (rank() + 1, self.own)):
            generator.manual_seed(epoch_seed(self._seed, (step << 16) + stream))


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Draw:
    """Noise as a product ``scale * values * roots``, which is formed while it is added.

    This saves passes over memory, of which a diagonal needs more than operations.

    Attributes:
        values: By parameter. Overwritten when the noise is added.
        roots: Factors of the elements, by parameter; empty if there are none.
        scale: A number, perhaps on the device.
    """

    values: Noise
    roots: Noise
    scale: float | Tensor

    def formed(self) -> Noise:
        """Return the noise of each parameter."""
        roots, scale = self.roots, self.scale
        return {k: x * scale * roots[k] if roots else x * scale for k, x in self.values.items()}

    def add_to(self, targets: Noise, factor: float | Tensor) -> None:
        """Add the noise of some parameters, times a factor, to other tensors in place."""
        if not targets:
            return
        values, places = [self.values[name] for name in targets], list(targets.values())
        factor = factor * self.scale
        if isinstance(factor, Tensor):  # not read, which would wait for the device
            torch._foreach_mul_(values, factor.to(values[0]).reshape(()))
            factor = 1.0
        if self.roots:
            roots = [self.roots[name] for name in targets]
            torch._foreach_addcmul_(places, values, roots, value=factor)
        else:
            torch._foreach_add_(places, values, alpha=factor)


@final
@dataclass(eq=False, kw_only=True)
class Pass:
    """Calls of modules in a forward pass, and the derivatives in their outputs, by module."""

    calls: dict[str, list[Call]]
    deltas: dict[str, Tensor]

    def single(self) -> Iterator[tuple[str, Call, Tensor]]:
        """Yield the modules that were called once, with their derivatives."""
        for name, calls in self.calls.items():
            if len(calls) == 1 and name in self.deltas:
                yield name, calls[0], self.deltas[name]


@final
class StepNoise:
    """Noise with the covariance of the gradient of one sample, from the micro-batches of a step.

    Call :meth:`begin`, then :meth:`observing` and :meth:`pull` for each micro-batch, then
    :meth:`collect`. With several processes, all of them must call :meth:`collect`.

    Args:
        adapter: The model without wrappers, and its loss.
        kind: A kind of :func:`noise_sample` in ``BY_GRADIENT`` or ``BY_MOMENTS``.
        seed: Seed of all random numbers.
        reused: Whether later steps reuse the square roots of second moments.
        beside: Returns a context manager for the additional passes, beside the backward pass of
            the loss.
    """

    def __init__(
        self,
        adapter: Adapter,
        *,
        kind: str,
        seed: int,
        reused: bool = False,
        beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.adapter, self.kind = adapter, kind
        self.reused, self.beside = reused, beside
        self.params = {k: p for k, p in adapter.model.named_parameters() if p.requires_grad}
        self.layers = dict(adapter.model.named_modules())
        self.device = next((p.device for p in self.params.values()), torch.device("cpu"))
        self.roots: Roots = {}  # square roots of the latest second moments
        self._checked = False
        self._known: KnownLoss | None = None  # for kind ``true``
        self._risk: Risk | None = None  # of a few samples, for kind ``kfac``
        self._modules: dict[str, tuple[str, ...]] = {}
        self._pass = Pass(calls={}, deltas={})
        self.generators = StepGenerators(seed, self.device)
        self.begin(fresh=True)

    def begin(self, *, fresh: bool) -> None:
        """Begin a step. ``fresh`` means: compute new second moments instead of reusing the old."""
        self.fresh = fresh
        if not self.reused:
            self.roots = {}
        self._total: Noise = {}
        self._blocks: dict[str, LayerSums] = {}
        self._rows = 0
        self._unit: float | None = None  # the second moments are those in _total times its square
        self._signs: Any = 0.0
        self._scaled = False

    @contextmanager
    def observing(self, batch: Any, *, active: bool = True) -> Iterator[None]:
        """Record calls of modules in the block, if second moments are computed in this step."""
        if active:
            self._check(batch)
        moments = self.kind in BY_MOMENTS and self.fresh and not self._couples()
        if not (active and moments):
            yield
            return
        with self._hooks(lambda name: partial(self._pass.deltas.__setitem__, name)):
            yield

    def pull(
        self, loss: Tensor, outputs: Any, target: Any, batch: Any, scale: float | Tensor, share: Any
    ) -> None:
        """Run the backward pass of a micro-batch and add its part of the noise.

        Args:
            loss: Loss of the micro-batch, times ``share`` and ``scale``.
            outputs: Outputs of the model, with their graph.
            target: Target of the batch.
            batch: The micro-batch of this process.
            scale: Factor of a gradient scaler.
            share: Weight of the micro-batch in the loss of the step.
        """
        count = num_rows(batch)
        self._scaled |= isinstance(scale, Tensor)
        if self.kind in BY_GRADIENT:
            with self.beside():
                self._pull_signed(outputs, target, scale, count)
        loss.backward()
        if self.kind in BY_MOMENTS and self.fresh:
            if self._pass.calls:
                self._add_moments(count, _unscale_factor(count, scale * share))
            else:
                with self.beside():
                    self._pass_again(batch, count, outputs)
        self._rows += count

    def collect(self, mean: Callable[[str], Tensor]) -> tuple[Draw, int | Tensor]:
        """Return the noise of the step, the same in all processes, and its number of samples.

        Half precision with a gradient scaler may overflow. Elements of the noise that are not
        finite are then set to zero, and second moments that are not finite are computed again in
        the next step.

        Args:
            mean: Returns the mean gradient of a parameter, by name, over all processes.
        """
        rows, signs = self._sums()
        if self.kind in BY_GRADIENT:
            noise = self._sum_parts()
            for name, value in noise.items():
                if self.kind == "centred":
                    # Cov[n - t g] = F - g g', with t = M^(-1/2) sum_i s_i
                    value.sub_(mean(name) * signs)
                if self._scaled:
                    value.nan_to_num_(0.0, 0.0, 0.0)
            return Draw(values=noise, roots={}, scale=rows**-0.5), rows
        if self.fresh:
            self._store(self._new_roots(rows))
        if not self.roots:
            zeros = {name: torch.zeros_like(p) for name, p in self.params.items()}
            return Draw(values=zeros, roots={}, scale=1.0), rows
        return self._draw(rows), rows

    def _store(self, roots: Roots) -> None:
        """Store square roots, in the place of the former ones if later steps reuse them.

        The CUDA graph of such a step reads them from there.
        """
        if not self.reused or roots.keys() != self.roots.keys():
            self.roots = roots
            return
        for name, root in roots.items():
            for key, value in root.items():
                self.roots[name][key].copy_(value)

    def _sums(self) -> tuple[Any, Any]:
        """Return the number of samples and the sum of the signs, over all processes.

        With several processes both are tensors, so that the step does not wait for the device.
        """
        if world_size() == 1:
            return self._rows, self._signs
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        sums[0], sums[1] = self._rows, self._signs
        rows, signs = all_sum(sums).unbind()
        return rows, signs

    # --------------------------------------------------------------------------------------
    # Checks of the model and the loss.

    def _check(self, batch: Any) -> None:
        """Check once, on a few samples, that model and loss allow this kind of noise."""
        if self._checked:
            return
        adapter, size = self.adapter, num_rows(batch)
        few = take_rows(batch, slice(0, min(size, TUNING.checked_samples)), size)
        loss_fn: Any = adapter.loss_fn.call
        if loss_fn is None:
            raise ValueError(
                f"kind={self.kind!r} needs outputs that are separate from the loss, got "
                "loss_fn=None: pass loss_fn, and forward if necessary"
            )
        mode: Any = "train" if self._couples() else "eval"
        risk = Risk(adapter.model, loss_fn, [few], batch_norm=mode, forward=adapter.custom,
                    sharing="none")  # fmt: skip
        if self.kind == "true":
            self._known = as_likelihood(risk.loss_fn)
        else:
            risk.require_sample_mean(alone=False)
        if self.kind in BY_MOMENTS:
            risk = risk.with_constant_statistics()
            plan = structure_plan(risk, roots=False)
            if plan.gap or plan.whole:
                reason = plan.gap or f"there is no rule for {', '.join(plan.whole[:3])}"
                raise ValueError(
                    f"kind={self.kind!r} needs per-sample gradients, but {reason}: use "
                    "kind='full', which does not"
                )
            self._modules = plan.modules
        # The risk holds a copy of the parameters, which the other kinds do not need.
        self._risk = risk if self.kind == "kfac" else None
        self._checked = True

    def _couples(self) -> bool:
        """Return whether batch norms use the statistics of a batch."""
        norms = batch_norms(self.adapter.model).values()
        return any(norm.training or norm.running_mean is None for norm in norms)

    # --------------------------------------------------------------------------------------
    # Losses with random signs, and labels drawn from the model.

    def _pull_signed(self, outputs: Tensor, target: Any, scale: float | Tensor, count: int) -> None:
        point = outputs.float() if outputs.dtype in HALF else outputs
        rng = self.generators.own  # each process draws its own signs and labels, for its own rows
        if self._known is not None:
            column = label_columns(self._known, point, target, 1, rng)[0]
        else:
            signs = random_signs((1, count), rng).to(outputs.device)
            column = sign_columns(self.adapter.loss_fn.call, point, target, signs)[0]
            # The sum stays on the device, because reading it would wait for the device.
            self._signs = self._signs + signs.sum(dtype=torch.float64)
        # Scaled like the derivative of the mean loss, so that half precision does not overflow.
        factor = scale / math.sqrt(count)
        names = list(self.params)
        gradients = torch.autograd.grad(
            outputs,
            [self.params[name] for name in names],
            (column * factor).to(outputs.dtype),
            retain_graph=True,
            materialize_grads=True,
        )
        for name, gradient in zip(names, gradients, strict=True):
            # sum_i s_i g_i = sqrt(n) n^(-1/2) sum_i s_i g_i
            part = gradient * (math.sqrt(count) / factor)
            self._total[name] = self._total[name].add_(part) if name in self._total else part

    def _sum_parts(self) -> Noise:
        zeros = {k: torch.zeros_like(p) for k, p in self.params.items() if k not in self._total}
        parts = {name: (self._total | zeros)[name] for name in self.params}
        if world_size() == 1:
            return parts
        flat = all_sum(torch.cat([part.reshape(-1) for part in parts.values()]))
        pieces = flat.split([part.numel() for part in parts.values()])
        return {k: piece.view_as(parts[k]) for k, piece in zip(parts, pieces, strict=True)}

    # --------------------------------------------------------------------------------------
    # Second moments of per-sample gradients.

    @contextmanager
    def _hooks(self, receive: Callable[[str], Callable[[Tensor], None]] | None) -> Iterator[None]:
        """Record calls of modules. ``receive(name)`` is called with the derivative in an output."""
        record = Pass(calls={name: [] for name in self._modules}, deltas={})
        self._pass = record

        def note(name: str, args: Any, kwargs: Any, output: Any) -> Tensor | None:
            if not isinstance(output, Tensor) or not output.requires_grad:
                return None
            module = self.layers[name]
            state = dict(module.named_parameters()) | dict(module.named_buffers())
            state = {key: value.detach() for key, value in state.items()}
            call = Call(args=args, kwargs=kwargs, output=output, state=state,
                        chosen=self._modules[name])  # fmt: skip
            record.calls[name].append(call)
            if receive is not None:
                output.register_hook(receive(name))
                return None
            return output.clone()  # the next operation may be in place

        with hooks_on_calls({name: self.layers[name] for name in self._modules}, note):
            yield

    def _pass_again(self, batch: Any, count: int, outputs: Tensor) -> None:
        """Evaluate the batch again with constant batch statistics and without dropout.

        The statistics of train mode couple the samples. Gradients in the weights are not computed.
        If the outputs are in half precision and the weights are not, the step ran under autocast,
        and so does this pass.
        """
        half = outputs.dtype in HALF and outputs.dtype != next(iter(self.params.values())).dtype
        cast: Any = nullcontext()
        if half:
            # Each weight is used once. A cache of casts is not possible in a CUDA graph.
            cast = torch.autocast(self.device.type, outputs.dtype, cache_enabled=False)
        with evaluating(self.adapter.model, batch_statistics=True), constant_statistics():
            with self._hooks(None), recording(), cast:
                outputs, target = self.adapter.forward(batch)
                loss = self.adapter.loss(outputs, target)
            calls = {name: each[0] for name, each in self._pass.calls.items() if len(each) == 1}
            points = [call.output for call in calls.values()]
            deltas = torch.autograd.grad(loss, points)
            self._pass.deltas.update(zip(calls, deltas, strict=True))
            self._add_moments(count, count)

    def _add_moments(self, count: int, factor: Any) -> None:
        """Add the second moments of the gradients of all samples of a micro-batch."""
        recorded = {name for name, _, _ in self._pass.single()}
        if lost := sorted(set(self._modules) - recorded):
            raise ValueError(
                f"kind={self.kind!r} needs exactly one call of each module per batch, but "
                f"{lost[:3]} are not called once: use kind='full'"
            )
        # TF32 has more digits than half precision, and is several times as fast as float32.
        half = any(delta.dtype in HALF for delta in self._pass.deltas.values())
        with torch.no_grad(), arithmetic("tf32" if half else None):
            for name, call, delta in self._pass.single():
                self._add_module(name, _widen_call(call), _widen(delta).unsqueeze(0), count, factor)
        self._pass = Pass(calls={}, deltas={})

    def _add_module(self, name: str, call: Call, deltas: Tensor, count: int, factor: Any) -> None:
        layer, keys = self.layers[name], self._modules[name]
        if self.kind == "kfac":
            if name not in self._blocks:
                self._blocks[name] = self._new_block(name)
            # Sums over samples: the derivatives are divided by root n, and the weight is n.
            self._blocks[name].add(call, deltas * (factor / math.sqrt(count)), count, first=True)
            return
        if self.kind == "diagonal":
            squares = rules.squared_gradients(layer, call, deltas)
        else:
            squares = {keys[0]: rules.squared_norm(layer, call, deltas)}
        if self._unit is None:
            # The factor of the first micro-batch, which most share, is applied to the result: a
            # pass over large moments would cost more. Processes must use the same.
            single = isinstance(factor, int | float) and world_size() == 1
            self._unit = (factor or 1.0) if single else 1.0
        factor = factor / self._unit
        for key, square in squares.items():
            place = full_name(name, key)
            part = square.mul_(factor**2) if isinstance(factor, Tensor) or factor != 1 else square
            self._total[place] = self._total[place].add_(part) if place in self._total else part

    def _new_roots(self, rows: float | Tensor) -> Roots:
        """Return square roots of the mean second moments over all processes.

        If they are not reused, those of ``diagonal`` lack a factor, which :meth:`_draw` applies.
        The result is empty if half precision overflowed. This check waits for the device.
        """
        if self.kind == "kfac":
            blocks = {name: self._block(name, rows) for name in self._modules}
            sums = [each for block in blocks.values() for each in block.sums()]
            if self._scaled and not _are_finite(sums):
                return {}
            return {full_name(name, self._modules[name][0]): block_root(block.operator())
                    for name, block in blocks.items()}  # fmt: skip
        if self.kind == "diagonal":
            squares = self._sum_parts()
            if self._scaled and not _are_finite(list(squares.values())):
                return {}
            moments = list(squares.values())
            if self.reused:
                share = self._mean_factor(rows)
                share = share.to(moments[0]) if isinstance(share, Tensor) else share
                torch._foreach_mul_(moments, share)
            torch._foreach_sqrt_(moments)
            return {name: {"root": root} for name, root in squares.items()}
        first = next(iter(self.params.values()))
        parts = [part.double() for part in self._total.values()]
        total = torch.stack(parts).sum() if parts else first.new_zeros((), dtype=torch.float64)
        variance = all_sum(total) * self._mean_factor(rows)
        if self._scaled and not _are_finite([variance]):
            return {}
        if self.kind == "trace":
            variance = variance / sum(p.numel() for p in self.params.values())
        return {next(iter(self.params)): {"deviation": variance.sqrt().to(first.dtype)}}

    def _mean_factor(self, rows: float | Tensor) -> float | Tensor:
        """Return the factor from the total to the mean over all samples."""
        return (self._unit or 1.0) ** 2 / rows

    def _block(self, name: str, rows: float | Tensor) -> LayerSums:
        """Return the mean sums of a module over all processes."""
        block = self._blocks.get(name) or self._new_block(name)  # none in a process without rows
        for sums in block.sums():
            all_sum(sums).div_(rows)
        return block

    def _new_block(self, name: str) -> LayerSums:
        if self._risk is None:
            raise RuntimeError("the noise of a step needs a batch: call backward() before step()")
        return LayerSums(self._risk, name, self._modules[name], self.layers[name], alone=True)

    def _draw(self, rows: float | Tensor) -> Draw:
        """Draw Gaussian noise from the roots, with the same numbers in all processes."""
        rng = self.generators.shared

        def normal(shape: Any) -> Tensor:
            dtype = next(iter(self.params.values())).dtype
            return torch.randn(shape, generator=rng, device=self.device, dtype=dtype)

        noise: Noise = {}
        if self.kind != "kfac":
            noise = {name: normal(p.shape) for name, p in self.params.items()}
        if self.kind == "diagonal":
            scale = 1.0 if self.reused else self._mean_factor(rows) ** 0.5
            roots = {name: self.roots[name]["root"] for name in noise}
            return Draw(values=noise, roots=roots, scale=scale)
        if self.kind != "kfac":
            deviation = next(iter(self.roots.values()))["deviation"]
            return Draw(values=noise, roots={}, scale=deviation)
        for module, keys in owners(list(self.params)).items():
            names = [full_name(module, key) for key in keys]
            shapes = [self.params[name].shape for name in names]
            sizes = [shape.numel() for shape in shapes]
            xi = normal((sum(sizes), 1))
            flat = times_root(self.roots[names[0]], xi, bias="bias" in keys)[:, 0]
            parts = zip(names, flat.split(sizes), shapes, strict=True)
            noise |= {name: part.view(shape) for name, part, shape in parts}
        return Draw(values=noise, roots={}, scale=1.0)


def _unscale_factor(count: int, scale: Any) -> Any:
    # The factor from derivatives of the scaled mean over n samples to those of single samples. It
    # is zero for a micro-batch whose labels are all ignored.
    if isinstance(scale, Tensor):
        return torch.where(scale == 0, 0.0, count / scale)
    return count / scale


def _are_finite(tensors: list[Tensor]) -> bool:
    return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _widen_call(call: Call) -> Call:
    """Return a call whose half-precision arguments, as autocast makes them, are in float32."""
    args, kwargs = tree_map_only(Tensor, _widen, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)
