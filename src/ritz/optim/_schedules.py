"""Schedules of the learning rate, or of any other setting of an optimiser.

A shape is a function from the number of steps done to a factor of the initial value. A step is a
call of ``step()``. Call it once per epoch, or once per step of the optimiser::

    rate = Schedule(optimizer, warmup(5, then=linear_decay(200)))
    damping = GroupSchedule(optimizer, linear_decay(200), key="delta")
    for epoch in range(200):
        ...
        rate.step()
        damping.step()

A shape may be any function. Those of this module can be pickled.

Reference: Granziol et al., *Beyond SGD: iterate averaged adaptive gradient methods*, equations 12
and 13.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias, final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ritz._core.checks import check_count, check_range, check_type
from ritz._core.params import check_optimizer, set_setting

Shape: TypeAlias = Callable[[int], float]


def linear_decay(
    num_steps: int, *, final: float = 0.01, hold: float = 0.5, until: float = 0.9
) -> Shape:
    r"""Return a shape that is constant, then falls linearly, then is constant again.

    .. math:: \frac{\alpha_t}{\alpha_0} = 1 \; \Big(\frac tT \le h\Big), \quad
        1 - (1 - r) \frac{t/T - h}{u - h} \; \Big(h < \frac tT \le u\Big), \quad
        r \; \Big(\frac tT > u\Big)

    Args:
        num_steps: Number of steps :math:`T` of the schedule.
        final: Final factor :math:`r`.
        hold: Fraction :math:`h` of the steps at the initial value.
        until: Fraction :math:`u` of the steps after which the final value is reached.
    """
    num_steps = check_count("num_steps", num_steps)
    check_range("final", final, low=0.0)
    check_range("hold", hold, low=0.0, high=1.0)
    check_range("until", until, low=hold, high=1.0)
    return partial(_linear, num_steps, final, hold, until)


def averaging_decay(start: int, *, final: float = 0.5) -> Shape:
    r"""Return :func:`linear_decay` until averaging begins, and a constant afterwards.

    During averaging the learning rate stays large, :math:`\alpha_\text{avg} = \alpha_0 / 2` by
    default, so that the averaged iterates differ.

    Args:
        start: Step :math:`T_\text{avg}` at which averaging begins.
        final: Factor :math:`\alpha_\text{avg} / \alpha_0`.
    """
    start = check_count("start", start)
    return linear_decay(start, final=final)


def held_from(start: int, shape: Shape) -> Shape:
    """Return a shape that keeps its value from a given step on.

    Args:
        start: First step of the constant part.
        shape: Shape up to this step.

    Reference: Granziol et al., *Beyond SGD: iterate averaged adaptive gradient methods*, appendix
    B.2: the learning rate of wide residual networks decays until averaging starts.
    """
    start = check_count("start", start, low=0)
    check_type("shape", shape, Callable, "a function of the steps done")
    return partial(_held, start, shape)


def step_decay(milestones: Iterable[int], *, factor: float = 0.1) -> Shape:
    """Return a shape that is multiplied by ``factor`` at every milestone.

    Args:
        milestones: Ascending steps. Each is the first step with the new value.
        factor: Factor at each milestone.
    """
    check_type("milestones", milestones, Iterable, "a list of steps")
    milestones = tuple(milestones)
    for milestone in milestones:
        check_count("milestones", milestone, low=0)
    if list(milestones) != sorted(set(milestones)):
        raise ValueError(f"milestones must ascend, got {milestones}")
    check_range("factor", factor, low=0.0)
    return partial(_steps, milestones, factor)


def warmup(num_steps: int, *, then: Shape | None = None) -> Shape:
    r"""Return a shape multiplied by :math:`\min(1, (t + 1) / n)`.

    The first step has a learning rate above zero, and step :math:`n` has the full learning rate.
    The shape ``then`` is not delayed by the warm-up.

    Args:
        num_steps: Number of warm-up steps :math:`n`.
        then: Shape that is multiplied. Defaults to a constant.
    """
    num_steps = check_count("num_steps", num_steps)
    if then is not None:
        check_type("then", then, Callable, "a function of the steps done")
    return partial(_warmup, num_steps, then)


@final
class Schedule(LRScheduler):
    """Scheduler of the learning rate: its initial value times a shape.

    It works like the schedulers of torch, with several groups, tensor learning rates (set in
    place), ``SequentialLR``, and a ``state_dict`` of plain numbers. The shape is not part of the
    state. Pass it again to resume a run.

    Args:
        optimizer: Optimiser to schedule.
        shape: Factor as a function of the steps done, or a list with one function per group.
        last_epoch: Number of steps already done, minus one, as in torch.
    """

    def __init__(
        self, optimizer: Optimizer, shape: Shape | list[Shape], *, last_epoch: int = -1
    ) -> None:
        self._shapes = _shapes(optimizer, shape)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rates of all groups."""
        # alpha_t = alpha_0 shape(t), always from the initial value, so that roundoff does not grow.
        factors = [shape(self.last_epoch) for shape in self._shapes]
        return [base * factor for base, factor in zip(self.base_lrs, factors, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the shapes."""
        return {key: value for key, value in super().state_dict().items() if key != "_shapes"}


@final
class GroupSchedule:
    """Scheduler of any real-valued setting of an optimiser: its initial value times a shape.

    Use it for a damping ``delta``, a weight decay or a momentum. It has the interface of a torch
    scheduler, and can be part of a ``ChainedScheduler``. The initial value is stored in the group
    as ``initial_<key>``, so it is saved with the optimiser.

    Args:
        optimizer: Optimiser whose groups have ``key``.
        shape: Factor as a function of the steps done, or a list with one function per group.
        key: Name of the setting.
    """

    def __init__(self, optimizer: Optimizer, shape: Shape | list[Shape], *, key: str) -> None:
        self.optimizer, self.key, self.num_steps = optimizer, key, 0
        self._shape = shape
        self._apply()

    def __repr__(self) -> str:
        values = ", ".join(f"{value:.3g}" for value in self.get_last_values())
        return f"GroupSchedule({self.key} {values} after {self.num_steps} steps)"

    def step(self) -> None:
        """Advance by one step."""
        self.num_steps += 1
        self._apply()

    def get_last_values(self) -> list[float]:
        """Return the current values of all groups."""
        return [float(group[self.key]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps. The initial values are in the state of the optimiser."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a state. The optimiser may be loaded before or after."""
        self.num_steps = state_dict["num_steps"]
        self._apply()

    def _apply(self) -> None:
        # Groups may have been added since the last step.
        shapes = _shapes(self.optimizer, self._shape)
        for group, shape in zip(self.optimizer.param_groups, shapes, strict=True):
            setting = group.get(self.key)
            if isinstance(setting, bool) or not isinstance(setting, int | float | Tensor):
                numbers = [name for name, number in group.items() if type(number) in (int, float)]
                names = ", ".join(numbers)
                raise ValueError(f"key must be a numeric setting ({names}), got {self.key!r}")
            initial = setting.clone() if isinstance(setting, Tensor) else setting
            # Stored already if this is not the first step, or if a run is resumed.
            initial = group.setdefault(f"initial_{self.key}", initial)
            set_setting(group, self.key, float(initial * shape(self.num_steps)))


def _linear(num_steps: int, final: float, hold: float, until: float, step: int) -> float:
    time = step / num_steps
    if time <= hold:
        return 1.0
    # A line from 1 at hold to final at until.
    return final if time > until else 1 - (1 - final) * (time - hold) / (until - hold)


def _held(start: int, shape: Shape, step: int) -> float:
    # From the start on, the value of the shape at the start.
    return shape(min(step, start))


def _steps(milestones: tuple[int, ...], factor: float, step: int) -> float:
    # One factor for each milestone at or before the step.
    return float(factor ** bisect_right(milestones, step))


def _warmup(num_steps: int, then: Shape | None, step: int) -> float:
    # (t + 1) / n: the first step, t = 0, has a factor above zero.
    factor = min(1.0, (step + 1) / num_steps)
    return factor if then is None else factor * then(step)


def _shapes(optimizer: Optimizer, shape: Shape | list[Shape]) -> list[Shape]:
    check_optimizer(optimizer)
    count = len(optimizer.param_groups)
    shapes = list(shape) if isinstance(shape, list) else [shape] * count
    if len(shapes) != count or not all(callable(one) for one in shapes):
        raise ValueError(f"shape must be a function or one for each of {count} groups, got {shape}")
    return shapes
