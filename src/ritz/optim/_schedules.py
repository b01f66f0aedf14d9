"""Schedules: shapes over time, followed by the rate or by any other setting of an optimiser.

A shape is a function of the number of steps done, the factor on the initial value. Whether a step
is one of the optimiser or an epoch is a matter of how often the schedule is stepped::

    rate = Schedule(optimizer, warmup(5, then=linear_decay(200)))
    damping = GroupSchedule(optimizer, linear_decay(200), key="delta")
    for epoch in range(200):
        ...
        rate.step()
        damping.step()

Any function will do; those of this module can also be pickled.

Reference: Granziol et al., *Beyond SGD: iterate averaged adaptive gradient methods*, equations 12
and 13.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ritz._core.checks import check_count, check_range

Shape: TypeAlias = Callable[[int], float]


def linear_decay(
    num_steps: int, *, final: float = 0.01, hold: float = 0.5, until: float = 0.9
) -> Shape:
    r"""Return the shape that is flat, falls on a line and is flat again.

    .. math:: \frac{\alpha_t}{\alpha_0} = 1 \; \Big(\frac tT \le h\Big), \quad
        1 - (1 - r) \frac{t/T - h}{u - h} \; \Big(h < \frac tT \le u\Big), \quad r \text{ after it}

    Args:
        num_steps: :math:`T`, in the steps that the schedule is stepped by.
        final: :math:`r`.
        hold: :math:`h`, the share of time that the whole value is held for.
        until: :math:`u`, the share of time by which the final value is reached.
    """
    check_count("num_steps", num_steps)
    check_range("final", final, low=0.0)
    check_range("hold", hold, low=0.0, high=1.0)
    check_range("until", until, low=hold, high=1.0)
    return _Linear(num_steps, final, hold, until)


def averaging_decay(start: int, *, final: float = 0.5) -> Shape:
    r"""Return :func:`linear_decay` over the time before averaging begins, and flat from then on.

    Iterates are averaged at a rate that is still large, :math:`\alpha_\text{avg} = \alpha_0 / 2`,
    so that they differ.

    Args:
        start: :math:`T_\text{avg}`, when averaging begins.
        final: :math:`\alpha_\text{avg} / \alpha_0`.
    """
    check_count("start", start)
    return linear_decay(start, final=final)


def step_decay(milestones: Iterable[int], *, factor: float = 0.1) -> Shape:
    """Return the shape that is multiplied by ``factor`` at every milestone.

    Args:
        milestones: When, ascending; the new value holds from that step on.
        factor: By how much.
    """
    milestones = tuple(milestones)
    for milestone in milestones:
        check_count("milestones", milestone, low=0)
    if list(milestones) != sorted(set(milestones)):
        raise ValueError(f"milestones must ascend, got {milestones}")
    check_range("factor", factor, low=0.0)
    return _Steps(milestones, factor)


def warmup(num_steps: int, *, then: Shape | None = None) -> Shape:
    r"""Return a shape multiplied by :math:`\min(1, (t + 1) / n)`.

    The first step already moves, the :math:`n`-th has the whole value, and the shape behind it
    keeps its own time: it does not begin later.

    Args:
        num_steps: :math:`n`.
        then: The shape that is warmed up to; constant if not given.
    """
    check_count("num_steps", num_steps)
    return _Warmup(num_steps, then)


@final
class Schedule(LRScheduler):
    """A torch scheduler whose rates are the initial ones times a shape.

    It does what those of torch do: several groups, tensor rates (set in place), use in
    ``SequentialLR``, and a ``state_dict`` of plain numbers. The shape is no part of that state: it
    is given again when a run is resumed.

    Args:
        optimizer: Whose groups have rates.
        shape: Factor after so many steps; a list has one for every group.
        last_epoch: Steps already done less one, as in torch.
    """

    def __init__(
        self, optimizer: Optimizer, shape: Shape | list[Shape], *, last_epoch: int = -1
    ) -> None:
        self._shapes = _shapes(optimizer, shape)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rates of all groups."""
        factors = [shape(self.last_epoch) for shape in self._shapes]
        return [base * factor for base, factor in zip(self.base_lrs, factors, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return where it is, without the shapes."""
        return {key: value for key, value in super().state_dict().items() if key != "_shapes"}


@final
class GroupSchedule:
    """Sets any number in the groups of an optimiser to its initial value times a shape.

    For a damping ``delta``, a decay, a momentum. It is stepped, saved and loaded as a torch
    scheduler is, alone or beside one of the rate in a ``ChainedScheduler``. The initial value is
    kept in the group, as ``initial_<key>``, and so is saved with the optimiser.

    Args:
        optimizer: Its groups have ``key``.
        shape: Factor after so many steps; a list has one for every group.
        key: Name of the setting.
    """

    def __init__(self, optimizer: Optimizer, shape: Shape | list[Shape], *, key: str) -> None:
        self._shapes = _shapes(optimizer, shape)
        for group in optimizer.param_groups:
            value = group.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
                numbers = [name for name, held in group.items() if type(held) in (int, float)]
                raise ValueError(f"key must name a number in every group of the optimiser, such "
                                 f"as {', '.join(numbers)}; got {key!r}")  # fmt: skip
            begun = value.clone() if isinstance(value, Tensor) else value
            group.setdefault(f"initial_{key}", begun)
        self.optimizer, self.key, self.num_steps = optimizer, key, 0
        self._apply()

    def step(self) -> None:
        """Go on by one step."""
        self.num_steps += 1
        self._apply()

    def get_last_values(self) -> list[float]:
        """Return the values of all groups as they are now."""
        return [float(group[self.key]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """Return where it is; the initial values are in the state of the optimiser."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from a state, with the optimiser loaded before or after."""
        self.num_steps = state_dict["num_steps"]
        self._apply()

    def _apply(self) -> None:
        for group, shape in zip(self.optimizer.param_groups, self._shapes, strict=True):
            value = float(group[f"initial_{self.key}"] * shape(self.num_steps))
            if isinstance(held := group[self.key], Tensor):
                held.fill_(value)  # in place: a captured or compiled step reads it there
            else:
                group[self.key] = value


@dataclass(frozen=True)
class _Linear:
    num_steps: int
    final: float
    hold: float
    until: float

    def __call__(self, step: int) -> float:
        time = step / self.num_steps
        if time <= self.hold:
            return 1.0
        if time > self.until:
            return self.final
        return 1 - (1 - self.final) * (time - self.hold) / (self.until - self.hold)


@dataclass(frozen=True)
class _Steps:
    milestones: tuple[int, ...]
    factor: float

    def __call__(self, step: int) -> float:
        return float(self.factor ** bisect_right(self.milestones, step))


@dataclass(frozen=True)
class _Warmup:
    num_steps: int
    then: Shape | None

    def __call__(self, step: int) -> float:
        factor = min(1.0, (step + 1) / self.num_steps)
        return factor if self.then is None else factor * self.then(step)


def _shapes(optimizer: Optimizer, shape: Shape | list[Shape]) -> list[Shape]:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch optimiser, got {type(optimizer).__name__}")
    count = len(optimizer.param_groups)
    shapes = list(shape) if isinstance(shape, list) else [shape] * count
    if len(shapes) != count or not all(callable(one) for one in shapes):
        raise ValueError(f"shape must be a function or one for each of {count} groups, got {shape}")
    return shapes
