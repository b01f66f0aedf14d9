"""Curvature of the layers of a network, each by itself."""

from collections.abc import Sequence
from typing import Any

from ritz._core.checks import check_choice
from ritz.curvature.capture import full_name, owners
from ritz.curvature.engines import EngineName
from ritz.curvature.points import Selection, selected
from ritz.curvature.risk import Risk
from ritz.curvature.samples import KINDS, Kind, curvature_operator
from ritz.operators.blocks import BlockDiagonalOperator


def block_diagonal(
    risk: Risk,
    *,
    kind: Kind = "hessian",
    by: Sequence[Selection] | None = None,
    engine: EngineName = "auto",
    memory: int = 2 * 2**30,
) -> BlockDiagonalOperator:
    r"""Return the block-diagonal part :math:`\operatorname{diag}(A_{11}, \dots, A_{mm})` by layer.

    Each block is the matrix of the risk as a function of its own parameters, the others held, so
    that a product is one with each of the blocks.

    Args:
        risk: The loss at a point.
        kind: ``hessian`` or ``ggn``.
        by: The blocks: regular expressions that names begin with, or lists or functions of names,
            that take every parameter once and follow the order of ``risk.theta``. By default one
            for each module that owns parameters.
        engine: ``auto``, ``linearized`` or ``eager``: see :class:`ritz.curvature.Products`.
        memory: Bytes for linearisations that are kept, all blocks together.
    """
    check_choice("kind", kind, KINDS)
    groups = _by_module(risk) if by is None else _given(risk, by)
    options: dict[str, Any] = {"engine": engine, "memory": memory // len(groups)}
    return BlockDiagonalOperator(
        [curvature_operator(risk.on(names), kind, **options) for names in groups]
    )


def _by_module(risk: Risk) -> list[list[str]]:
    return [[full_name(module, own) for own in names] for module, names in owners(risk).items()]


def _given(risk: Risk, by: Sequence[Selection]) -> list[list[str]]:
    if isinstance(by, str) or not isinstance(by, Sequence) or not by:
        raise TypeError(
            f"by must be a list of choices of parameters, one for each block, got {by!r}"
        )
    names = list(risk.space.shapes)
    groups = [selected(names, choice) for choice in by]
    taken = [name for group in groups for name in group]
    for name in names:
        if taken.count(name) != 1:
            raise ValueError(f"by must take every parameter once, got {name} {taken.count(name)} "
                             "times")  # fmt: skip
    if taken != names:
        first = next(a for a, b in zip(taken, names, strict=True) if a != b)
        raise ValueError(f"by must give blocks in the order of the parameters, {names}, got "
                         f"{first} out of its place")  # fmt: skip
    return groups
