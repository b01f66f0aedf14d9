"""When the factors of K-FAC are captured, averaged and inverted; several processes; saved state."""

import math
import random
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ritz._core.checks import check_type
from ritz._core.distributed import all_sum, broadcast, rank, unwrapped, world_size
from ritz._core.modes import arithmetic
from ritz._core.params import check_optimizer, check_setting, parameters
from ritz.curvature._shared import Replayed, as_likelihood, known_loss
from ritz.optim._kfac.blocks import (
    Block,
    KroneckerBlock,
    LayerCall,
    Pass,
    Tensors,
    block_of,
)
from ritz.optim._kfac.capture import Capture, is_attention
from ritz.optim._kfac.deferred import MEMORY, NO_VALUES, DeferredSums, size_of_step
from ritz.optim._kfac.inverses import inverses_of
from ritz.optim._kfac.settings import Settings
from ritz.optim._state_tensors import StateDict, named_params, owners

PREFIX = "kfac_"  # prefix of the names in the state of a parameter
Gradients = dict[Tensor, Tensor]


# Inverses with factored damping are computed again if the damping has changed by more than this
# factor. It is below the 3/2 of Levenberg and Marquardt, whose rule has to see what a change does.
OUTDATED = 1.4


@final
class Curvature:
    """The curvature of the parameters of an optimiser, and products with its damped inverse.

    Every group of the optimiser must have a ``delta``. The curvature is saved and loaded with the
    state of the optimiser, in the state of the first parameter of each layer.

    Attributes:
        blocks: The layers with curvature.
        plain: The other layers by name, with the reason. Their gradients are not preconditioned.
    """

    def __init__(
        self, optimizer: Optimizer, model: nn.Module, settings: Settings, scaler: Any = None
    ) -> None:
        check_optimizer(optimizer)
        check_type("model", model, nn.Module, "a torch.nn.Module")
        self.optimizer, self.settings = optimizer, settings
        self.steps, self._observed = 0, 0
        self.blocks, self.plain = _find_blocks(unwrapped(model), optimizer, settings)
        self._warn_plain(self.plain)
        waits = settings.fisher != "empirical"
        self._capture = Capture(unwrapped(model), self.blocks, self._receive, waits=waits)
        self._loaded: dict[Tensor, Tensors] = {}
        self._sums = DeferredSums()
        self._replayed: tuple[Any, Replayed] | None = None
        self.scaler = scaler
        self._arm()
        optimizer.register_state_dict_pre_hook(self._write)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    def remove(self) -> None:
        """Remove the hooks on the model."""
        self._capture.remove()

    def paused(self) -> AbstractContextManager[None]:
        """Capture nothing inside the block."""
        return self._capture.paused()

    def discard(self) -> None:
        """Discard what backward passes have captured since the last step."""
        # Not what observe() has captured: it may be called before zero_grad(), for the next step.
        for block in self.blocks if self.settings.fisher == "empirical" else ():
            block.clear()

    @property
    def scaler(self) -> Any:
        """Gradient scaler of the loss, or ``None``."""
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: Any) -> None:
        self._scaler, self._capture.scaled = scaler, scaler is not None

    @property
    def capturing(self) -> bool:
        """Whether the next step updates the factors."""
        return self._capture.active

    # --------------------------------------------------------------------------------------
    # Capture.

    def _arm(self) -> None:
        # Without inverses the capture is repeated, as after a first step with infinite sums.
        missing = not any(block.inverse for block in self.blocks)
        due = self.steps % self.settings.factor_every == 0 or missing
        self._capture.active, self._observed = due and bool(self.blocks), 0
        self._capture.forget()

    def _receive(self, block: Block, call: LayerCall, of: Pass) -> None:
        with arithmetic(self.settings.precision):
            block.receive(call, of)
            # With more batches per step than before, fewer calls can wait.
            if block.waits and size_of_step(self.blocks) > MEMORY:
                for each in self.blocks:
                    each.stop_waiting()

    def observe(self, outputs: Tensor, target: Any, loss_fn: Any) -> None:
        """Capture the curvature of a batch for ``fisher="monte_carlo"`` or ``"ggn"``."""
        if self.settings.fisher == "empirical" or not self.capturing:
            return
        if not isinstance(outputs, Tensor) or not outputs.requires_grad:
            raise ValueError("outputs must be a tensor with a gradient, before backward()")
        wide = torch.promote_types(outputs.dtype, torch.float32)
        with torch.no_grad(), arithmetic(None):
            columns = self._columns(outputs.detach().to(wide), target, loss_fn)
            # Derivatives of sums over the batch, scaled so that half precision does not underflow.
            columns = columns * (math.sqrt(len(outputs)) * self._scale())
        self._capture.pull(outputs, iter(columns.to(outputs.dtype)))
        self._observed += 1

    def _columns(self, outputs: Tensor, target: Any, loss_fn: Any) -> Tensor:
        if self.settings.fisher == "ggn":
            known = known_loss(loss_fn)
            if known is None:
                raise ValueError(
                    "loss_fn must be cross_entropy, binary_cross_entropy_with_logits or mse_loss "
                    f"without class weights for fisher='ggn', got {loss_fn}"
                )
            return known.root(outputs, target)
        known = as_likelihood(loss_fn)
        # The seed depends on step and batch alone, so that a resumed run draws the same labels.
        place = (self.settings.seed, self.steps, self._observed, rank())
        rng = torch.Generator().manual_seed(random.Random(str(place)).getrandbits(63))
        return known.score(outputs, target, known.draw(outputs, target, rng)).unsqueeze(0)

    def _scale(self) -> float:
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    # --------------------------------------------------------------------------------------
    # Steps.

    def step(self, gradients: Gradients) -> Gradients:
        """Update the curvature if it is due, and return the preconditioned gradients.

        Args:
            gradients: Gradients by parameter, without the scale of a gradient scaler.
        """
        groups = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        for group in self.optimizer.param_groups:
            if "delta" not in group:
                raise ValueError("parameter groups must be added before KFACPreconditioner is made")
            check_setting("delta", group["delta"], zero=False)
        deltas = {block: float(groups[block.anchor]["delta"]) for block in self.blocks}
        # Averages are updated before inverses, so that the first step has inverses of its factors.
        if self.capturing:
            if gains := self._absorb(gradients):
                self._invert(gains, deltas)
            self._sums.let_wait(self.blocks)
            for block in self.blocks:
                block.clear()
        elif any(self._is_outdated(block, deltas[block]) for block in self.blocks):
            self._invert({}, deltas)
        self.steps += 1
        self._arm()
        with arithmetic(self.settings.precision):
            return gradients | self._directions(gradients, deltas)

    def _directions(self, gradients: Gradients, deltas: dict[Block, float]) -> Gradients:
        """Return the preconditioned gradients of all layers that have an inverse."""
        blocks = [block for block in self.blocks if block.inverse]
        params: list[Tensor] = [p for block in blocks for p in block.params.values()]
        dtypes = {block.dtype for block in blocks}
        kinds = {(gradients[p].is_cuda, gradients[p].dtype) if p in gradients else None
                 for p in params}  # fmt: skip
        if len(dtypes) != 1 or kinds != {(True, dtype) for dtype in dtypes}:
            return dict(_precondition(blocks, gradients, deltas))
        # On a GPU the launches of three small products per layer would take most of the time.
        replayed = self._replayed_for(blocks, params, deltas)
        results = replayed(NO_VALUES, *(gradients[p] for p in params))
        return dict(zip(params, results, strict=True))

    def _replayed_for(
        self, blocks: list[Block], params: list[Tensor], deltas: dict[Block, float]
    ) -> Replayed:
        """Return the products with the inverses as a function of the gradients."""
        # A graph reads the inverses where they were when it was recorded, and contains the damping.
        places = [value.data_ptr() for block in blocks for value in block.tensors_read()]
        damping = [deltas[block] for block in blocks if block.reads_delta]
        key = (*map(id, params), *damping, *places)
        if self._replayed is None or self._replayed[0] != key:

            def multiply(*gradients: Tensor) -> list[Tensor]:
                result = dict(
                    _precondition(blocks, dict(zip(params, gradients, strict=True)), deltas)
                )
                return [as_laid_out(result[p], p) for p in params]

            self._replayed = key, Replayed(multiply, borrowed=True)
        return self._replayed[1]

    def _absorb(self, gradients: Gradients) -> dict[Block, float]:
        """Update the averages with the sums of the step. Return the gain of each updated block."""
        with arithmetic(self.settings.precision):
            for block in self.blocks:
                block.complete()
            totals = self._sums.compute(self.blocks)
        local = torch.tensor([[b.samples, b.rows] for b in self.blocks], dtype=torch.float64)
        # One exchange of counts for all layers. A single process does not wait for the device.
        alone = world_size() == 1
        counts = (local if alone else all_sum(local.to(self.blocks[0].device))).tolist()
        active = []
        for block, (samples, rows) in zip(self.blocks, counts, strict=True):
            block.samples, block.rows = int(samples), int(rows)
            if samples:
                if not alone:
                    # A process without samples adds zeros.
                    zeros = block.zeros() if not block.sums else {}
                    block.sums = {k: all_sum(v) for k, v in sorted((zeros | block.sums).items())}
                active.append(block)
        self._drop_unseen(active, gradients)
        # One number per sum, so that the step waits for the device once.
        totals += [each.sum() for b in active if not b.waits for each in b.checked()]
        # Sums that are not finite are dropped, as after an overflow of a scaled loss.
        if not totals or not bool(torch.stack(totals).isfinite().all()):
            return {}
        gains = {block: self._gain(block.samples) for block in active}
        for block, gain in gains.items():
            block.absorb(gain)
        return gains

    def _gain(self, samples: int) -> float:
        # S is quadratic in the derivatives, so it contains the square of the scale of the loss.
        unit = 1 / self._scale() ** 2
        if self.settings.fisher != "empirical":
            return unit / samples
        # The loss is a mean over N samples, so the derivatives are those of single samples divided
        # by N, and the mean of squares is N times their sum. Processes average their gradients.
        return unit * samples / world_size() ** 2

    def _drop_unseen(self, active: list[Block], gradients: Gradients) -> None:
        """Move layers that have a gradient but were never called from ``blocks`` to ``plain``."""
        if not active and self.settings.fisher != "empirical":
            raise RuntimeError(
                f"fisher={self.settings.fisher!r} needs optimizer.observe(outputs, target, "
                "loss_fn) before backward()"
            )
        unseen = {
            block.name: "its parameters are used without calling it"
            for block in self.blocks
            if block not in active
            and not block.average
            and any(p in gradients for p in block.params.values())
        }
        if unseen and not active:
            raise RuntimeError(
                "KFAC needs a forward and backward pass of its model in train mode, got none, but "
                f"{next(iter(unseen))!r} has a gradient: call model.train(), and the model that "
                "was passed to KFAC"
            )
        if unseen:
            self._warn_plain(unseen)
            self.plain |= unseen
            self.blocks[:] = [block for block in self.blocks if block.name not in unseen]

    def _warn_plain(self, plain: dict[str, str]) -> None:
        if plain:
            few = "; ".join(f"{name}: {why}" for name, why in list(plain.items())[:5])
            more = f"; and {len(plain) - 5} more" if len(plain) > 5 else ""
            warnings.warn(
                f"KFAC uses the plain gradient for layers without factors: {few}{more}",
                stacklevel=4,
            )

    # --------------------------------------------------------------------------------------
    # Inverses, divided among the processes.

    def _is_outdated(self, block: Block, delta: float) -> bool:
        """Return whether the inverse was computed with a different damping."""
        if block.reads_delta or block.inverse_delta is None:
            return False
        return not 1 / OUTDATED <= delta / block.inverse_delta <= OUTDATED

    def _invert(self, gains: dict[Block, float], deltas: dict[Block, float]) -> None:
        due = self.steps % self.settings.inverse_every == 0 and bool(gains)
        blocks = [
            block
            for block in self.blocks
            if block.average
            and (due or not block.inverse or self._is_outdated(block, deltas[block]))
        ]
        # Every process computes the same assignment, without communication.
        process = _divide(blocks)
        # Never TF32, whose roundoff would exceed small eigenvalues.
        with arithmetic("float32"):
            inverses = {
                block: block.decompose(deltas[block]) if process[block] == rank() else block.blank()
                for block in blocks
            }
            _add_inverses({b: inverses[b] for b in blocks if process[b] == rank()}, deltas)
        for block, inverse in inverses.items():
            # Sorted, because collective operations need the same order in all processes.
            for name in sorted(inverse):
                broadcast(inverse[name], process[block])
            if isinstance(block, KroneckerBlock):
                block.rotate(inverse)
            block.adopt(inverse)
            block.inverse_delta = deltas[block]
        self._add_first_scales(blocks, gains)

    def _add_first_scales(self, blocks: list[Block], gains: dict[Block, float]) -> None:
        # EK-FAC projects on eigenbases, which did not exist when the first samples were captured.
        for block in blocks if self.settings.kind == "ekfac" else ():
            if isinstance(block, KroneckerBlock) and "scales" not in block.average:
                with self.paused(), arithmetic(self.settings.precision):
                    block.project_late()
                scales = block.sums.get("scales")
                block.sums["scales"] = all_sum(
                    block.zeros()["scales"] if scales is None else scales
                )
                block.absorb_late(gains[block])

    # --------------------------------------------------------------------------------------
    # State.

    def _write(self, optimizer: Optimizer) -> None:
        for block in self.blocks:
            if block.average:
                # Tensors, for torch.load with weights_only and for distributed checkpoints.
                entry = {"updates": torch.tensor(block.updates), "steps": torch.tensor(self.steps)}
                if block.inverse_delta is not None:
                    damping = torch.tensor(block.inverse_delta, dtype=torch.float64)
                    entry["inverse_delta"] = damping
                entry |= block.average | block.inverse
                named = {f"{PREFIX}{name}": value for name, value in entry.items()}
                optimizer.state[block.anchor] |= named

    def _before_load(self, optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        """Remove the curvature from a state that torch is about to load and to cast."""
        # Parameters are matched by their position in the groups, as torch does.
        here, there = map(named_params, (optimizer.param_groups, state_dict["param_groups"]))
        places = {place: p for (_, p), (_, place) in zip(here, there, strict=False)}
        state = dict(state_dict["state"])
        self._loaded = {}
        for place, entry in state_dict["state"].items():
            mine = {k.removeprefix(PREFIX): v for k, v in entry.items() if k.startswith(PREFIX)}
            if mine and place in places:
                self._loaded[places[place]] = mine
                state[place] = {k: v for k, v in entry.items() if not k.startswith(PREFIX)}
        return state_dict | {"state": state}

    def _after_load(self, optimizer: Optimizer) -> None:
        self.steps = 0
        for block in self.blocks:
            block.clear()
            entry = dict(self._loaded.get(block.anchor, {}))
            block.updates = int(entry.pop("updates", 0))
            self.steps = max(self.steps, int(entry.pop("steps", 0)))
            damping = entry.pop("inverse_delta", None)
            block.inverse_delta = None if damping is None else float(damping)
            # Without the strides of the tensor that was saved.
            block.load(
                {
                    key: torch.empty(v.shape, dtype=block.dtype, device=block.device).copy_(v)
                    for key, v in entry.items()
                }
            )
        self._loaded = {}
        self._arm()


def as_laid_out(direction: Tensor, p: Tensor) -> Tensor:
    """Return a direction with the strides of its parameter, which fused optimisers require."""
    if direction.stride() == p.stride():
        return direction
    return torch.empty_like(p, dtype=direction.dtype).copy_(direction)


def _add_inverses(inverses: dict[Block, Tensors], deltas: dict[Block, float]) -> None:
    """Add the inverse matrices of the blocks to their tensors."""
    wanted = [
        (block, name, matrix)
        for block in sorted(inverses, key=lambda block: -block.cost())  # the longest first
        for name, matrix in block.matrices(deltas[block]).items()
    ]
    if wanted:
        # An inverse is as large as the average it comes from.
        largest = max(each.nbytes for block in inverses for each in block.average.values())
        matrices = [matrix for *_, matrix in wanted]
        results = inverses_of(matrices, wanted[0][0].device, largest=largest)
        for (block, name, _), inverse in zip(wanted, results, strict=True):
            inverses[block][name] = inverse


def _precondition(
    blocks: list[Block], gradients: Gradients, deltas: dict[Block, float]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parameters and their preconditioned gradients."""
    for block in blocks:
        present = {key: p for key, p in block.params.items() if p in gradients}
        if not present:
            continue
        # A block belongs to weight and bias together. One without a gradient counts as zero.
        parts = {
            key: gradients[p].to(block.dtype) if key in present else torch.zeros_like(p)
            for key, p in block.params.items()
        }
        result = block.precondition(parts, deltas[block])
        for key, p in present.items():
            yield p, result[key].to(p.dtype)


def _divide(blocks: list[Block]) -> dict[Block, int]:
    """Divide blocks among processes. Each goes to the process with the least work so far."""
    work, process = [0] * world_size(), dict[Block, int]()
    # Largest first. The longest time is then at most 4/3 of the optimum.
    for block in sorted(blocks, key=lambda block: -block.cost()):
        process[block] = work.index(min(work))
        work[process[block]] += block.cost()
    return process


def _find_blocks(
    model: nn.Module, optimizer: Optimizer, settings: Settings
) -> tuple[list[Block], dict[str, str]]:
    """Return the blocks of layers with curvature, and the other layers by name with the reason."""
    chosen = {id(p) for p in parameters(optimizer) if p.requires_grad}
    # The gradient of a shared parameter sums over several layers, so no single block fits it.
    users: dict[int, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            users[id(p)] = users.get(id(p), 0) + 1
    blocks: list[Block] = []
    plain: dict[str, str] = {}
    for name, module in model.named_modules():
        params = {key: p for key, p in module.named_parameters(recurse=False) if id(p) in chosen}
        _check_params(name, params)
        if is_attention(module):
            module, params, others = _packed_layer(module, params)
            plain |= {f"{name}.{key}".lstrip("."): why for key, why in others.items()}
        reason = _reason(module, params, users)
        block = None if reason or not params else block_of(name, module, params, settings)
        if block is not None:
            blocks.append(block)
        elif params:
            plain[name or "the model"] = reason or f"{type(module).__name__} is not known"
    if not blocks and not plain:
        raise ValueError("model must have parameters of the optimizer, got others")
    return blocks, plain


def _packed_layer(
    attention: Any, params: dict[str, nn.Parameter]
) -> tuple[nn.Module, dict[str, nn.Parameter], dict[str, str]]:
    """Return the linear layer of queries, keys and values of an attention, and its parameters.

    Its other parameters follow by name, with the reason why they use the plain gradient.
    """
    size, keys = attention.embed_dim, {"in_proj_weight": "weight", "in_proj_bias": "bias"}
    if not attention._qkv_same_embed_dim:
        keys = {}
    # Only its shape is read: the attention calls no such module.
    layer = nn.Linear(size, 3 * size, device="meta")
    others = {
        key: "keys and values of other sizes than queries have no factors"
        if "proj" in key
        else "it is no layer"
        for key in params.keys() - keys.keys()
    }
    return layer, {keys[key]: p for key, p in params.items() if key in keys}, others


def _check_params(name: str, params: dict[str, nn.Parameter]) -> None:
    for key, p in params.items():
        full = f"{name}.{key}".lstrip(".")
        if is_lazy(p):
            raise ValueError(f"{full} has no shape yet: call the model once before KFAC")
        if hasattr(p, "to_local"):
            raise ValueError(f"KFAC needs whole parameters, got {full} sharded (FSDP2 or tensor "
                             "parallel): use DistributedDataParallel")  # fmt: skip


def _reason(module: nn.Module, params: dict[str, nn.Parameter], users: dict[int, int]) -> str:
    if any(users[id(p)] > 1 for p in params.values()):
        return "it shares a parameter with another layer"
    if any(not p.is_floating_point() for p in params.values()):
        return "its parameters are complex"
    return "" if params.keys() <= {"weight", "bias"} else f"{type(module).__name__} is not known"


def curvature_of(optimizer: Optimizer) -> Curvature | None:
    """Return the K-FAC curvature of an optimiser or of its inner ones, or ``None``."""
    found = (owner for owner in owners(optimizer) if isinstance(owner, Curvature))
    return next(found, None)
