"""Random crops and flips of a whole batch at once, on the device that holds it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ritz._core.checks import check_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """What is done at random to an image before it is trained on.

    Attributes:
        padding: Black pixels put around an image, from which one of the old size is cut.
        flip: Whether half of the images are mirrored left to right.
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        check_count("padding", self.padding, low=0)
        if not isinstance(self.flip, bool):
            raise TypeError(f"flip must be True or False, got {self.flip!r}")


def draw(
    augmentation: Augmentation, count: int, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return corners ``(count, 2)`` of crops and flips ``(count,)``, on the generator's device."""
    where = {"generator": generator, "device": generator.device}
    corners = torch.randint(0, 2 * augmentation.padding + 1, (count, 2), **where)  # type: ignore[call-overload]
    flips = torch.randint(0, 2, (count,), **where).bool()  # type: ignore[call-overload]
    return corners, flips & augmentation.flip


def crop_and_flip(images: Tensor, corners: Tensor, flips: Tensor, *, padding: int) -> Tensor:
    r"""Return images cut at ``corners`` from padded ones, some mirrored; one gather for all.

    .. math::
        y_{nkij} = \bar x_{nk,\, a_n + i,\, b_n + j'}, \qquad
        j' = w - 1 - j \text{ where flipped, else } j

    Args:
        images: :math:`x`, of shape ``(n, c, h, w)``; :math:`\bar x` has a black border.
        corners: :math:`(a_n, b_n)` in :math:`[0, 2p]`, of shape ``(n, 2)``.
        flips: Which to mirror, of shape ``(n,)``.
        padding: :math:`p`.
    """
    n, c, h, w = images.shape
    padded = pad(images, (padding,) * 4).flatten(2)
    rows = corners[:, :1] + torch.arange(h, device=images.device)
    columns = torch.arange(w, device=images.device).expand(n, w)
    columns = corners[:, 1:] + torch.where(flips[:, None], w - 1 - columns, columns)
    pixels = rows[:, :, None] * (w + 2 * padding) + columns[:, None, :]
    return padded.gather(2, pixels.view(n, 1, h * w).expand(n, c, h * w)).view(n, c, h, w)
