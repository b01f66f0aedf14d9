import importlib
import re
from pathlib import Path

import pytest
import typer

import ritz
from ritz.cli import _app

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


def test_every_option_exists():
    app = typer.main.get_command(_app.build())
    known = {
        option
        for command in [app, *app.commands.values()]
        for part in [command, *getattr(command, "commands", {}).values()]
        for parameter in part.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    named = {word for row in ROWS for code in re.findall(r"`([^`]+)`", row[-1])
             for word in code.split() if word.startswith("--")}  # fmt: skip
    assert named
    assert named - known == set()


def test_every_quantity_and_command_exists():
    text = " ".join(row[-1] for row in ROWS)
    quantities = re.findall(r"--quantity (\w+)", text)
    assert quantities
    assert set(quantities) <= set(ritz.training.quantity_names())
    commands = re.findall(r"`ritz (\w+)", text)
    assert set(commands) <= set(typer.main.get_command(_app.build()).commands)


def test_every_study_that_is_named_has_a_section_of_evidence():
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    for name in NAMES:
        first, _, study = name.partition(".")
        if first == "studies" and study in ritz.studies.available():
            assert re.search(rf"^### {study}", page, re.MULTILINE), study
