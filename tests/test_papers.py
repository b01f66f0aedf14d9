import importlib
import re
from pathlib import Path

import pytest

import ritz

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split(" | ")]
    for line in (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| [TGFAN]\d+ \|", line)
]
NAMES = sorted({
    name
    for row in ROWS
    for name in re.findall(r"`([A-Za-z_]+(?:\.[A-Za-z_]+)*)`", row[-1].partition(";")[0])
})  # fmt: skip
# Reasons for which a row may have no name.
REASONS = ("left out", "not possible here", "out of reach here")


def test_every_row_has_a_name_or_a_reason():
    for row in ROWS:
        assert len(row) == 4, row
        named = "`" in row[-1].partition(";")[0]
        assert named or any(reason in row[-1] for reason in REASONS), row


@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists(name):
    first, *rest = name.split(".")
    if first == "studies" and rest and rest[0] in ritz.studies.available():
        value = importlib.import_module(f"ritz.studies.{rest.pop(0)}")
    else:
        value = getattr(ritz, first)
    for part in rest:
        value = getattr(value, part)
