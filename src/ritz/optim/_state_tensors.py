"""`StateTensors`: one tensor per parameter, saved and loaded with the state of an optimiser."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ritz._core.params import parameters

StateDict = dict[str, Any]
NEVER = -1  # a step number that is never reached


@final
class StateTensors:
    r"""One tensor per parameter, and a few integers, stored in ``optimizer.state``.

    For a parameter ``p``, the tensor is ``state[p][key]``, with the shape and sharding of ``p``.
    The integers are ``state[p][f"{key}_{name}"]``, tensors without dimensions. ``state_dict()``,
    ``load_state_dict()`` and ``torch.distributed.checkpoint`` therefore treat them like the state
    of the optimiser itself. Loading restores them bit for bit, whereas torch alone would round them
    to the dtype of ``p``.

    Many optimisers initialise the state of a parameter only if it is empty. Therefore nothing is
    stored before the optimiser has taken a step with a gradient of the parameter. Frozen parameters
    use no memory.

    Args:
        optimizer: Any optimiser. Hooks for saving and loading are registered with it. The caller
            must call :meth:`before_step` and :meth:`after_step`.
        key: Name of the tensor in the state.
        numbers: The integers with their initial values. If one is called ``count``, no parameters
            can be added once it is above zero.
        dtype: Dtype of the tensors. Complex parameters use the complex dtype of this precision.
            Defaults to float32, or to the dtype of the parameter if it is wider.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        key: str,
        numbers: Mapping[str, int],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.key, self.dtype = key, dtype
        if any(isinstance(owner, StateTensors) and owner.key == key for owner in owners(optimizer)):
            raise ValueError(f"optimizer must not have {key} weights already: attach one only")
        self.numbers, self._first_numbers = dict(numbers), dict(numbers)
        self.tensors: dict[Tensor, Tensor] = {}
        self.initialising = False
        self._waiting: dict[Tensor, None] = {}
        self._unbound: list[Tensor] = []
        self._num_groups = 0
        self._loaded: dict[Tensor, dict[str, Tensor]] = {}
        optimizer.register_state_dict_pre_hook(self.write_numbers)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    def before_step(self, optimizer: Optimizer) -> None:
        """Allocate tensors for new parameters. Call it before every step."""
        self.initialising = _is_initialising(optimizer)
        if self._waiting or self._num_groups != len(optimizer.param_groups):
            self.allocate(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """Store new tensors in the state. Call it after every step."""
        if self._unbound:
            # Not for parameters without a gradient, whose state the optimiser has not created yet.
            ready = [p for p in self._unbound if p.grad is not None or optimizer.state.get(p)]
            self._bind(optimizer, ready)

    def allocate(self, optimizer: Optimizer) -> None:
        """Allocate the tensor of every parameter that may be updated, as a copy of its weights."""
        if self._num_groups != len(optimizer.param_groups):
            self._collect(optimizer)
        # Frozen parameters keep waiting, as they may be unfrozen later. A tensor with a gradient is
        # updated by the optimiser even if it does not require one.
        for p in [p for p in self._waiting if p.requires_grad or p.grad is not None]:
            # At least float32, because averages in half precision would stall by rounding.
            self.tensors[p] = p.detach().to(self._kind(p), copy=True)
            self._unbound.append(p)
            del self._waiting[p]

    def copy_weights(self) -> None:
        """Set every tensor to the current weights."""
        with torch.no_grad():
            for p, tensor in self.tensors.items():
                tensor.copy_(p)

    def write_numbers(self, optimizer: Optimizer, *names: str) -> None:
        """Write the named integers into the state. Defaults to all of them."""
        written = [(f"{self.key}_{name}", self.numbers[name]) for name in names or self.numbers]
        for p in self.tensors:
            state = optimizer.state.get(p, {})
            # Only where the tensor is stored already; see after_step().
            for name, value in written if self.key in state else ():
                state[name].fill_(value)

    def adopt(self, optimizer: Optimizer, numbers: Mapping[str, int]) -> None:
        """Continue with the tensors in the state of a copied optimiser."""
        # Loading its own state runs the load hooks below, which find the tensors.
        optimizer.load_state_dict(optimizer.state_dict())
        self.numbers = dict(numbers)
        self.write_numbers(optimizer)

    def _collect(self, optimizer: Optimizer) -> None:
        # The mean over the iterates so far does not include the new parameters.
        if self._num_groups and self.numbers.get("count"):
            raise ValueError(f"parameter groups were added after the {self.key} had begun")
        self._waiting |= {p: None for p in parameters(optimizer) if p not in self.tensors}
        self._num_groups = len(optimizer.param_groups)

    def _bind(self, optimizer: Optimizer, ready: list[Tensor]) -> None:
        for p in ready:
            numbers = {f"{self.key}_{k}": torch.tensor(v) for k, v in self.numbers.items()}
            optimizer.state[p] |= {self.key: self.tensors[p], **numbers}
        bound = set(ready)
        self._unbound = [p for p in self._unbound if p not in bound]

    def _kind(self, p: Tensor) -> torch.dtype:
        if self.dtype is None:
            return torch.promote_types(p.dtype, torch.float32)
        return self.dtype.to_complex() if p.is_complex() else self.dtype

    def _before_load(self, optimizer: Optimizer, state_dict: StateDict) -> StateDict:
        """Remove the tensors from a state that torch is about to load and to cast."""
        keys = (self.key, *(f"{self.key}_{name}" for name in self.numbers))
        places = dict(_pairs(optimizer, state_dict))
        # torch would cast them to the dtype of the parameter, which would round an average.
        self._loaded, state = {}, dict(state_dict["state"])
        for place, entry in state_dict["state"].items():
            if isinstance(entry, dict) and self.key in entry:
                name, p = places[place]
                check_shape(self.key, entry[self.key], name, p)
                self._loaded[p] = {k: entry[k] for k in keys}
                state[place] = {k: v for k, v in entry.items() if k not in keys}
        return state_dict | {"state": state}

    def _after_load(self, optimizer: Optimizer) -> None:
        self.tensors, self._waiting, self._unbound, self._num_groups = {}, {}, [], 0
        self.numbers = dict(self._first_numbers)
        for p, entry in self._loaded.items():
            self.numbers = {name: int(entry[f"{self.key}_{name}"]) for name in self.numbers}
            self.tensors[p] = entry[self.key].to(p.device, self._kind(p), copy=True)
        self._bind(optimizer, list(self._loaded))
        self._loaded = {}
        self._collect(optimizer)


def check_shape(key: str, value: Tensor, name: str, param: Tensor) -> None:
    """Raise unless a tensor of a loaded state has the shape of its parameter."""
    if value.shape != param.shape:
        shapes = f"has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}"
        raise ValueError(f"state_dict does not match: its {key} of {name} {shapes}")


def owners(optimizer: Optimizer) -> Iterator[object]:
    """Yield the objects that have hooks on the loading of an optimiser or of its inner ones."""
    inner: Any = optimizer
    while isinstance(inner, Optimizer):
        hooks = (
            inner._optimizer_load_state_dict_pre_hooks,
            inner._optimizer_load_state_dict_post_hooks,
        )
        for hook in chain.from_iterable(table.values() for table in hooks):
            yield getattr(hook, "__self__", None)
        inner = getattr(inner, "optimizer", None)


def local(tensor: Tensor) -> Tensor:
    """Return a real view of the part of a tensor on this process."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return torch.view_as_real(part) if part.is_complex() else part


def _pairs(optimizer: Optimizer, state_dict: StateDict) -> Iterator[tuple[Any, tuple[str, Tensor]]]:
    """Yield the keys of a state to load, each with the name and the parameter it belongs to."""
    here, there = map(named_params, (optimizer.param_groups, state_dict["param_groups"]))
    for index, ((name, p), (saved, place)) in enumerate(zip(here, there, strict=False)):
        if name is not None and saved is not None and _bare(name) != _bare(saved):
            raise ValueError(f"state_dict does not match: expected parameter {name}, got {saved}")
        yield place, (name or f"parameter {index}", p)
    if len(here) != len(there):
        raise ValueError(f"state_dict must have {len(here)} parameters, got {len(there)}")


def _bare(name: str) -> str:
    """Return the name of a parameter without the names of wrappers in it."""
    wrappers = ("module", "_orig_mod", "_fsdp_wrapped_module")  # DDP, compiled, FSDP
    return ".".join(part for part in name.split(".") if part not in wrappers)


def named_params(groups: list[dict[str, Any]]) -> list[tuple[str | None, Any]]:
    """Return the names (or ``None``) and the parameters of all groups, in order."""
    params = chain.from_iterable(group["params"] for group in groups)
    names = chain.from_iterable(
        group.get("param_names", [None] * len(group["params"])) for group in groups
    )
    return list(zip(names, params, strict=True))


def _is_initialising(optimizer: Optimizer) -> bool:
    """Return whether a step only initialises the state, as torch.distributed.checkpoint does."""
    # It takes a step with learning rate 0 and zero gradients. This step must not be counted.
    if optimizer.state or not all(bool(g.get("lr", 1) == 0) for g in optimizer.param_groups):
        return False
    grads = [p.grad for p in parameters(optimizer) if p.grad is not None]
    entries: list[Any] = [grad.any() for grad in grads]
    # A sharded gradient is zero only if it is zero in all processes.
    return bool(grads) and not any(
        bool(entry.full_tensor() if hasattr(entry, "full_tensor") else entry) for entry in entries
    )
