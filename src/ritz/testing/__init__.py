"""Matrices with a known spectrum, and checks for operators and estimates."""

from ritz.testing._assertions import assert_within_stderr, check_operator
from ritz.testing._ensembles import (
    network_like,
    spiked_wigner,
    spiked_wishart,
    wigner,
    wishart,
    with_spectrum,
)

__all__ = [
    "assert_within_stderr",
    "check_operator",
    "network_like",
    "spiked_wigner",
    "spiked_wishart",
    "wigner",
    "wishart",
    "with_spectrum",
]
