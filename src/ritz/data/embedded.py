"""The handwritten digits that ship inside scikit-learn."""

from pathlib import Path

import torch

from ritz.data.catalogue import DATASETS
from ritz.data.images import ImageData, image_data
from ritz.data.splitting import held_out

TEST = 517  # of the 1797 images: 1280 are left, five batches of 256


@DATASETS.register("digits")
def digits(root: Path | None, *, validation: int = 0) -> ImageData:
    """Digits: 1,280 + 517 grey images of 8 x 8 pixels, embedded in scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("digits ship inside scikit-learn: pip install scikit-learn") from error
    found = load_digits()
    # Levels 0 to 16 become 0 to 240: whole numbers, and near the range of other images.
    images = (15 * torch.from_numpy(found.images)).to(torch.uint8).unsqueeze(1)
    targets = torch.from_numpy(found.target).to(torch.int64)
    train, test = ((images[part], targets[part]) for part in held_out(len(targets), TEST))
    return image_data(
        "digits",
        train=train,
        test=test,
        classes=tuple("0123456789"),
        validation=validation,
        seeded=True,
    )
