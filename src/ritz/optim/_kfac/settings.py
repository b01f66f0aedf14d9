"""Settings of K-FAC: their names, defaults and checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

from ritz._core.checks import check_choice, check_count, check_range, plain_fields
from ritz.curvature._shared import KFACKind

Kind = Literal["kfac", "ekfac"]
DampingMethod = Literal["exact", "factored"]
WeightSharing = Literal["expand", "reduce"]
Basis = Literal["eigh", "qr"]
ProductPrecision = Literal["float32", "tf32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of K-FAC, checked when they are created; see :class:`ritz.optim.KFAC`."""

    kind: Kind = "kfac"
    fisher: KFACKind = "empirical"
    damping: DampingMethod = "factored"
    # 100 as in the published runs (Granziol, Spectral Machine Learning, section 5.8.2). Factors are
    # updated ten times as often.
    factor_every: int = 10
    inverse_every: int = 100
    factor_decay: float = 0.95  # Martens and Grosse (2015), section 5
    weight_sharing: WeightSharing = "expand"
    basis: Basis = "eigh"
    max_order: int | None = None
    precision: ProductPrecision | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        plain_fields(self)
        choices: dict[str, Any] = {"kind": Kind, "fisher": KFACKind, "damping": DampingMethod}
        choices |= {"weight_sharing": WeightSharing, "basis": Basis}
        choices |= {"precision": ProductPrecision} if self.precision is not None else {}
        for name, kind in choices.items():
            check_choice(name, getattr(self, name), get_args(kind))
        check_count("factor_every", self.factor_every)
        check_count("inverse_every", self.inverse_every)
        check_count("seed", self.seed, low=0)
        if self.max_order is not None:
            check_count("max_order", self.max_order, low=0)
        check_range("factor_decay", self.factor_decay, low=0.0, high=1.0)


class Options(TypedDict, total=False):
    """Options of the curvature; see :class:`ritz.optim.KFAC`."""

    kind: Kind
    fisher: KFACKind
    damping: DampingMethod
    factor_every: int
    inverse_every: int
    factor_decay: float
    weight_sharing: WeightSharing
    basis: Basis
    max_order: int | None
    precision: ProductPrecision | None
    seed: int


def checked_settings(options: Mapping[str, Any]) -> Settings:
    """Return the settings with defaults. Raise for unknown or invalid options."""
    if unknown := sorted(options.keys() - Options.__annotations__.keys()):
        raise TypeError(f"KFAC got unknown arguments {', '.join(unknown)}")
    return Settings(**options)
