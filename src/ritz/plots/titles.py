"""What results are called in pictures, by what they say of themselves."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ritz.spectra import Spectrum

OPERATORS = {
    "HessianOperator": "Hessian",
    "GGNOperator": "Gauss-Newton",
    "FisherOperator": "Fisher",
}
KINDS = {"hessian": "Hessian", "ggn": "Gauss-Newton"}
DIRECTIONS = {
    "largest": "Ritz vector of the largest value",
    "smallest": "Ritz vector of the smallest value",
    "smallest magnitude": "Ritz vector of the value nearest zero",
}


def spectrum_title(spectrum: Spectrum) -> str:
    """Return the matrix of a spectrum, and its mode of batch norm where it has one.

    Such as ``Hessian, batch norm eval``; empty for a matrix that is no curvature of a network.

    Args:
        spectrum: Which remembers what its operator was.
    """
    kind = OPERATORS.get(spectrum.operator.partition("(")[0], "")
    mode = re.search(r"\bbatch norm \w+", spectrum.operator)
    return f"{kind}, {mode[0]}" if kind and mode else kind


def titled(spectra: Mapping[str, Spectrum]) -> dict[str, Spectrum]:
    """Return spectra by what they say they are, where that tells them all apart.

    Args:
        spectra: By names, which they keep otherwise.
    """
    titles = [spectrum_title(found) for found in spectra.values()]
    apart = all(titles) and len(set(titles)) == len(titles)
    return dict(zip(titles if apart else spectra, spectra.values(), strict=True))


def direction_title(name: str) -> str:
    """Return what a direction of a landscape is called in a picture.

    Args:
        name: That of the direction.
    """
    return DIRECTIONS.get(name, name)


def monitor_title(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the matrix that a monitor watched; empty where a log has none, or several.

    Args:
        records: Of a log; those of other kinds than ``curvature`` are passed over.
    """
    found = {record.get("matrix") for record in records if record.get("kind") == "curvature"}
    return KINDS.get(str(*found), "") if len(found) == 1 else ""
