"""An orthonormal basis that grows by one vector a step and lives where it was asked to."""

from typing import Literal

import torch
from torch import Tensor

from ritz._core.distributed import Group, all_gather_rows, all_sum, shard

Placement = Literal["device", "host", "spread"]
PLACEMENTS = ("device", "host", "spread")
CHUNK = 2**20  # entries that are mixed at a time
PIECE = 2**16  # entries of a vector that are summed in its own precision


class Basis:
    r"""Rows :math:`v_1, \dots, v_j` of length ``n``, orthonormal to roundoff.

    ``device`` keeps the rows beside the operator, ``host`` in the host's memory, and ``spread``
    gives every process the coordinates of its :func:`shard`, so that its share of the memory
    falls with the number of processes. Vectors that go in and out are whole and on the device.

    Args:
        capacity: Most rows there will be; memory is ``capacity`` vectors, taken at once.
        like: A vector ``(n,)`` whose length, dtype and device are those of the rows.
        placement: Where the rows live.
        group: The processes, for ``spread``.
    """

    def __init__(
        self, capacity: int, like: Tensor, *, placement: Placement, group: Group | None = None
    ) -> None:
        self.n, self.device, self.group = len(like), like.device, group
        self.spread = placement == "spread"
        self.part = shard(self.n, group) if self.spread else slice(0, self.n)
        home = torch.device("cpu") if placement == "host" else like.device
        width = self.part.stop - self.part.start
        self.rows = torch.empty(capacity, width, dtype=like.dtype, device=home)
        # Float64 has digits to spare, and devices sum in trees: neither needs pieces.
        pieces = home.type == "cpu" and like.dtype != torch.float64
        self.width = PIECE if pieces else max(1, width)
        self.size = 0

    def append(self, vector: Tensor, norm: float = 1.0) -> None:
        """Add a row, a vector in :meth:`local` form over its norm."""
        torch.div(vector, norm, out=self.rows[self.size])
        self.size += 1

    def extend(self, rows: Tensor) -> None:
        """Add rows ``(k, width)`` as another basis of this placement had them."""
        self.rows[self.size : self.size + len(rows)] = rows
        self.size += len(rows)

    def local(self, vector: Tensor) -> Tensor:
        """The part of a whole vector ``(n,)`` that the rows have, on the rows' device."""
        return vector[self.part].to(self.rows.device)

    def whole(self, vector: Tensor) -> Tensor:
        """The inverse of :meth:`local`: the vector ``(n,)`` on the operator's device."""
        if self.spread:
            vector = all_gather_rows(vector, self.n, self.group)
        return vector.to(self.device)

    def project(self, vector: Tensor, *, first: int = 0, last: int | None = None) -> Tensor:
        r"""Return :math:`h = V v` in float64, for a local vector and all rows or a stretch of them.

        One read of the rows.
        """
        rows = self._stretch(first, last)
        pieces = zip(rows.split(self.width, 1), vector.split(self.width), strict=True)
        # In pieces: a float32 sum over millions of entries has lost half its digits.
        return self._sum(_total([torch.mv(*piece).double() for piece in pieces]))

    def subtract(
        self, vector: Tensor, coefficients: Tensor, *, first: int = 0, last: int | None = None
    ) -> None:
        r"""Do :math:`v \leftarrow v - V^\top h` in place, with all rows or a stretch of them.

        One read of the rows.
        """
        rows = self._stretch(first, last)
        vector.addmv_(rows.T, coefficients.to(rows.dtype), alpha=-1)

    def dot(self, index: int, vector: Tensor) -> float:
        """Inner product of one row with a local vector, in float64."""
        pieces = zip(self.rows[index].split(self.width), vector.split(self.width), strict=True)
        # Converted before they are multiplied: what is lost here the recurrence magnifies.
        products = [torch.dot(x.double(), y.double()) for x, y in pieces]
        return float(self._sum(_total(products)))

    def norm(self, vector: Tensor) -> float:
        """Norm of a local vector, summed in float64: no overflow, no loss over many entries."""
        pieces = vector.split(self.width)
        parts = [torch.linalg.vector_norm(c, dtype=torch.float64).square() for c in pieces]
        return float(self._sum(_total(parts)).sqrt())

    def combine(self, coefficients: Tensor) -> Tensor:
        r"""Overwrite the first ``r`` rows by :math:`C^\top V`, ``C`` of shape ``(j, r)``.

        Done in place, some columns at a time: no second basis is needed. Returns the rows.
        """
        size, count = coefficients.shape
        mix = coefficients.T.to(self.rows.dtype).to(self.rows.device)
        step = max(1, CHUNK // size)
        for start in range(0, self.rows.shape[1], step):
            piece = self.rows[:size, start : start + step]
            self.rows[:count, start : start + step] = mix @ piece
        self.size = count
        return self.rows[:count]

    def _stretch(self, first: int, last: int | None) -> Tensor:
        return self.rows[first : self.size if last is None else last]

    def _sum(self, partial: Tensor) -> Tensor:
        return all_sum(partial, self.group) if self.spread else partial


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
