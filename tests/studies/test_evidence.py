import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest
import torch

import ritz
from ritz import studies
from ritz.studies._evidence import _command, signed, spread

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results" / "studies").glob("*.safetensors"))


def test_the_page_of_evidence_is_made_from_the_stored_results():
    place = ROOT / "docs" / "evidence.py"
    spec = importlib.util.spec_from_file_location("evidence_page", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    text = module.page()

    assert text == (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8"), (
        "run `make evidence` after a change of results or of a study"
    )


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_stored_results_can_be_read_and_printed(path):
    result = ritz.load(path)
    assert str(result)
    study = studies.find(type(result).__module__.rpartition(".")[2])
    assert study.evidence(result)


def test_claims_are_judged_by_paired_differences():
    clear = torch.tensor([1.0, 1.2, 0.8], dtype=torch.float64)
    noise = torch.tensor([1.0, -1.2, 0.3], dtype=torch.float64)
    assert signed(clear, 1)["verdict"] == "agrees"
    assert signed(clear, 0) == {"verdict": "differs", "why": "higher"}
    assert signed(clear, -1, cause="small data") == {"verdict": "differs", "why": "small data"}
    assert signed(noise, 0)["verdict"] == "agrees"
    assert signed(noise, -1)["verdict"] == "undecided"
    missing = torch.tensor([float("nan"), 1.0, 1.1])
    assert signed(missing, 1)["verdict"] == "undecided"


def test_one_run_is_compared_by_its_sign_and_says_so():
    alone = torch.tensor([0.5], dtype=torch.float64)
    assert signed(alone, 1) == {"verdict": "agrees", "why": "one seed"}
    assert signed(alone, -1) == {"verdict": "differs", "why": "one seed"}


PAGE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")


def test_every_saved_result_has_a_section_that_names_its_command():
    sections = set(re.findall(r"^### (\S+)$", PAGE, re.MULTILINE))
    assert sections == {path.stem for path in RESULTS}
    assert len(re.findall(r"^`ritz study ", PAGE, re.MULTILINE)) >= len(RESULTS)


def test_links_of_the_claims_lead_to_sections_of_the_page():
    targets = set(re.findall(r"\]\(#([\w-]+)\)", PAGE))
    headings = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    assert targets
    assert targets <= {heading.lower().replace(" ", "-") for heading in headings}


def test_the_counts_are_those_of_the_rows():
    total, *rows = (line for line in PAGE.partition("| all ")[2].splitlines() if "|" in line)
    cells = [int(cell) for cell in total.strip("|").split("|")]
    verdicts = [re.sub(r"[*]| \(\d+\)", "", row.split(" | ")[-1]).strip("| ") for row in rows]
    assert cells[0] == sum(cells[1:])
    for name, count in zip(("agrees", "differs", "undecided", "extends"), cells[1:], strict=True):
        assert verdicts.count(name) == count, name


# Studies whose rows still list all their numbers.
LONG = {"adaptive_gap", "averaging_options", "batch_spectra", "covariance_noise", "damping",
        "flatness"}  # fmt: skip


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_cells_of_the_page_are_short(path):
    result = ritz.load(path)
    name = type(result).__module__.rpartition(".")[2]
    for row in studies.find(name).evidence(result):
        cells = (row.where, row.what, row.published, row.measured)
        assert max(map(len, cells)) <= (400 if name in LONG else 80), cells


@pytest.mark.parametrize("size", ["smoke", "paper"])
def test_the_command_of_a_result_names_the_nearest_size(size):
    study = studies.find("averaging_dynamics")
    config = dataclasses.replace(study.SIZES[size], seed=7)
    result = study.Result(config=config, names=(), series=torch.zeros(0), ensembles=torch.zeros(0))
    assert _command(result) == f"ritz study averaging_dynamics --size {size} --set seed=7"


def test_the_spread_leaves_out_runs_that_are_missing():
    values = torch.tensor([1.0, 2.0, float("nan"), 3.0], dtype=torch.float64)
    assert spread(values) == spread(values[values.isfinite()]) == "2.00 ± 0.58"
    assert spread(values[2:3]) == "-"
    assert spread(values[:1]) == "1"
